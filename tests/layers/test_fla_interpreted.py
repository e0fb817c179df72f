"""The kernels of flash-linear-attention through our wrappers, on a CPU by Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOLERANCE = {"rwkv7": 1e-3, "ssd": 3e-5}
"""Others 3e-6. RWKV-7's tensor cores take rounded factors, as they do 16 bits, which round by 4e-3."""


@pytest.mark.slow
def test_the_real_kernels_agree_with_plain_torch(tmp_path: Path) -> None:
    """fla-core 0.6.0: outputs, last states and gradients, of equal and of packed rows."""
    pytest.importorskip("triton")
    pytest.importorskip("einops")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, "fla-core==0.6.0"], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    command = [sys.executable, "-m", "tests.layers.fla_interpreted", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 10
    for name, found in errors.items():
        assert max(found) <= TOLERANCE.get(name.partition(",")[0], 3e-6), (name, found)

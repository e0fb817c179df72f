"""`benchmarks/gpu.py` at tiny sizes on the CPU in a bare checkout, so that it works where it meets a GPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

UNINSTALLED = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
try:
    runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
finally:
    print("layers from", sys.modules["hybrid.layers"].__file__)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What the script's docstring says to carry."""
    root = tmp_path_factory.mktemp("bare")
    for name in ("hybrid", "layers", "recipes", "benchmarks", "tests/vectors"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def run(bare, *arguments):
    command = [sys.executable, "-c", UNINSTALLED, "--quick", "--output", bare]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, cwd=bare)


def test_every_section_runs_in_a_bare_checkout(bare):
    done = run(bare)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"layers from {bare / 'layers' / '__init__.py'}" in done.stdout
    found = json.loads((bare / "gpu-quick.json").read_text())
    assert not [name for name, section in found.items() if "error" in section]
    assert {case["status"] for case in found["verify"]["bf16"].values()} == {"pass"}
    assert {row["work"].split(", ")[0] for row in found["operator"]["rows"]} == {"forward+backward"}
    assert len(found["operator"]["rows"]) == 3
    assert set(found["operator"]["256"]) == {"full", "fixed", "sqrt"}
    assert found["decode"]["sqrt at 256"]["state_bytes"] > found["decode"]["fixed at 256"]["state_bytes"]
    eager = found["train"]["paper/kvm_fixed256_120m, eager"]
    assert {"mixer kvm", "feed-forward", "head", "optimizer", "step"} <= {e["part"] for e in eager["parts"]}
    compiled = found["compiled"]["paper/kvm_fixed256_120m, compiled blocks"]
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=0.02)
    assert isinstance(found["variants"]["fixed 16, kernel plain"], float)
    assert "RuntimeError" in found["variants"]["full, CUDNN_ATTENTION"]  # told, and no reason to stop


def test_a_section_without_time_is_left_out_and_the_results_say_so(bare):
    done = run(bare, "--seconds", "3", "--only", "operator", "--only", "ceilings")
    assert done.returncode == 1
    found = json.loads((bare / "gpu-quick.json").read_text())
    assert found["operator"]["error"].startswith("left out: it needs 60 s")

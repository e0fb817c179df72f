"""Whatever the project says can be installed beside it can be."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REQUIREMENTS = [one for extra in EXTRAS.values() for one in extra if not one.startswith("kvm-hybrid[")]


@pytest.mark.slow
@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_requirement_of_an_extra_can_be_installed(requirement: str, tmp_path: Path) -> None:
    """flash-attn 2 cannot: its source imports torch while it is prepared, and then nothing is installed."""
    options = ["--no-deps", "--prefer-binary", "--quiet", "--dest", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir())

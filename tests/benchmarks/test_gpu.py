"""`benchmarks/gpu.py` at tiny sizes on the CPU in a bare checkout, so that it works where it meets a GPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_advice import advice_table

LONG = ("zero", "real", "compiled")
KINDS = (
    "full",
    "sliding_window",
    "block_window",
    "kvm",
    "ovq",
    "rwkv7",
    "gated_deltanet",
    "kimi_delta",
    "mamba2",
)
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
    command = [sys.executable, "-c", UNINSTALLED, "--quick", "--output", bare, "--threads", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, cwd=bare)


def results(bare, sections):
    done = run(bare, *(word for name in sections for word in ("--only", name)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"layers from {bare / 'layers' / '__init__.py'}" in done.stdout
    found = json.loads((bare / "gpu-quick.json").read_text())
    for name in sections:
        assert "error" not in found[name]
        assert found[name].get("failed", []) == []
    return found, done.stdout


def test_every_section_runs_in_a_bare_checkout(bare):
    found, printed = results(bare, [name for name in gpu.SECTIONS if name not in LONG])
    assert {case["status"] for case in found["verify"]["bf16"].values()} == {"pass"}
    assert all(found["agree"][f"{kind}, packed, bfloat16"]["good"] for kind in KINDS)
    walks = {f"{budget}, {walk}" for budget in ("fixed", "sqrt") for walk in ("chunks", "torch")}
    assert {row["work"].split(", ")[0] for row in found["operator"]["rows"]} == {"forward+backward"}
    assert len(found["operator"]["rows"]) == 3
    assert set(found["operator"]["256 x 2"]) == {"full"} | walks
    assert found["decode"]["sqrt at 256"]["state_bytes"] > found["decode"]["fixed at 256"]["state_bytes"]
    eager = found["train"]["paper/kvm_sqrt16_120m, eager"]
    assert {"mixer kvm", "feed-forward", "head", "optimizer", "step"} <= {e["part"] for e in eager["parts"]}
    assert isinstance(found["variants"]["fixed 16, kernel plain"], float)
    assert "RuntimeError" in found["variants"]["full, CUDNN_ATTENTION"]  # told, and no reason to stop
    assert "What to change" in printed


@pytest.mark.slow
@pytest.mark.parametrize("section", LONG)
def test_the_longer_sections_run_too(bare, section):
    found, _ = results(bare, [section])
    if section == "compiled":
        assert found[section]["paper/kvm_sqrt16_120m, compiled blocks"]["loss"] > 0
    elif section == "zero":
        assert {"stage 1", "stage 2", "stage 3"} <= set(found[section])
    else:
        assert found[section]["run"]["steps"] == 2


def test_results_say_what_to_change():
    """Whatever is wrong first; then the walk, the kernel and the stage that are slow, with their numbers."""
    slow, fast = ({"both": t, "launches": n, "ratio": r} for t, n, r in ((9e-3, 1000, 0.4), (3e-3, 200, 1.2)))
    walks = {"full": slow, "fixed, triton": fast, "fixed, torch": slow, "sqrt, torch": slow}
    found = {
        "verify": {"failed": ["core_fixed, bf16"]},
        "decode": {"error": "RuntimeError: no such kernel"},
        "operator": {"8192 x 1": walks},
        "variants": {"fixed 256, kernel cuda": 2e-3, "fixed 256, kernel flash_attn_cute": 1e-3},
        "zero": {"stage 1": {"tokens_per_second": 100.0}, "stage 3": {"tokens_per_second": 50.0}},
    }
    lines = advice_table(found).splitlines()
    assert "core_fixed, bf16 is wrong" in lines[2]
    for words in (
        "no such kernel", "fixed, triton: 3 ms against 9 ms", "0.40x of flash", "1000 launches",
        "flash_attn_cute: 1 ms", "stage 3: 50 tokens/s",
    ):  # fmt: skip
        assert any(words in line for line in lines), words
    assert advice_table({"verify": {"failed": []}}).startswith("Nothing")


def test_a_section_without_time_is_left_out_and_the_results_say_so(bare):
    done = run(bare, "--seconds", "3", "--only", "operator", "--only", "ceilings")
    assert done.returncode == 1
    found = json.loads((bare / "gpu-quick.json").read_text())
    assert found["operator"]["error"].startswith("left out: it needs 60 s")

"""The operator against the stored vectors."""

import contextlib
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hybrid.layers.softmax import force_plain

from ...parity.core_case import core_case

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / "tests" / "vectors", ROOT / ".." / "shared" / "conformance"]
TOLERANCE = {"y": 1e-5, "state": 1e-5, "grad": 5e-5, "route": 0, "updates": 0}


def cases():
    """Every core case found, once."""
    found = {}
    for folder in FOLDERS:
        index = folder / "index.json"
        listed = json.loads(index.read_text())["cases"] if index.exists() else []
        for case in listed:
            if case["level"] == "core":
                found.setdefault(case["file"], (folder, case))
    return list(found.values())


@pytest.mark.parametrize("plain", [False, True], ids=["flash", "plain"])
@pytest.mark.parametrize(("folder", "case"), cases(), ids=[case["file"] for _, case in cases()])
def test_core_vectors_hold(folder, case, plain):
    tensors = load_file(folder / case["file"])
    with force_plain() if plain else contextlib.nullcontext():
        results = core_case(case["config"], tensors, case["variant"])
    for name, value in results.items():
        want = tensors[name]
        assert value.shape == want.shape, name
        error = (value - want).abs().max().item() if want.numel() else 0
        assert error <= TOLERANCE[name.split(".")[0]], f"{name}: {error}"

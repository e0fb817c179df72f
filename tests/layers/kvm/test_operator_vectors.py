"""The operator against the stored vectors."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from hybrid.layers.kvm.parallel import force_walk
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


def by_plain_products():
    return force_plain()


def by_groups():
    return force_walk("torch")


@contextlib.contextmanager
def by_triton():
    """In Triton's interpreter, which is faster with large blocks."""
    pytest.importorskip("triton")
    from hybrid.layers.kvm.triton import states

    with mock.patch.object(states, "SLOTS", 128), force_walk("triton"):
        yield


@pytest.mark.parametrize("way", [contextlib.nullcontext, by_plain_products, by_groups, by_triton])
@pytest.mark.parametrize(("folder", "case"), cases(), ids=[case["file"] for _, case in cases()])
def test_core_vectors_hold(folder, case, way):
    tensors = load_file(folder / case["file"])
    with way():
        results = core_case(case["config"], tensors, case["variant"])
    for name, value in results.items():
        want = tensors[name]
        assert value.shape == want.shape, name
        error = (value - want).abs().max().item() if want.numel() else 0
        assert error <= TOLERANCE[name.split(".")[0]], f"{name}: {error}"

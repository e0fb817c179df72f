"""Compare what a conversion wrote with its source: every tensor bit for bit, and logits.

Run as a program it reads a request from standard input and prints its findings, both JSON: a fresh process
sees only what is on disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapt import adapt
from .common import Model, Options, meta_model, same_bits
from .formats import FORMATS
from .hf import standalone

TOKENS = 768
"""Length of the row, beyond the usual windows of KVM layers, so that their states are read."""
LIMIT = 1e-3
"""Largest difference of logits from other code's; between two runs of ours it is 0."""


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compare a source and a result on disk; `faults` says in words what must not be."""
    source, result = FORMATS[request["from"]], FORMATS[request["to"]]
    given = source.read(Path(request["source"]), Options(**request["options"]))
    meant, found = adapt(given, request["overrides"]), result.read(Path(request["dest"]), Options())
    faults = list(_tensor_faults(meant, found))
    same_model = _settings(meant) == _settings(given)
    difference = float("nan")
    if not faults:
        assert given.section.vocab_size is not None
        ids = torch.randint(given.section.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = source.logits(Path(request["source"]), ids) if source.logits else logits(given, ids)
            compute = standalone.logits if request["standalone"] else result.logits
            after = compute(Path(request["dest"]), ids) if compute else logits(found, ids)
        difference = (before - after).abs().max().item()
        limit = LIMIT if source.logits or result.logits else 0.0
        if not difference <= (limit if same_model else float("inf")):
            faults.append(f"the logits differ by up to {difference:.3g}, allowed: {limit:g}")
    return {
        "tensors": len(found.tensors),
        "tokens": TOKENS,
        "largest_difference": difference,
        "same_model": same_model,
        "faults": faults,
    }


def _settings(model: Model) -> dict[str, Any]:
    """Give the settings but the pattern, which `expanded` spells out."""
    return {**vars(model.section), "pattern": None}


def _tensor_faults(meant: Model, found: Model) -> Any:
    for name in sorted(meant.tensors.keys() | found.tensors.keys()):
        if name not in found.tensors or name not in meant.tensors:
            yield f"{name} is {'missing' if name in meant.tensors else 'there and should not be'}"
            continue
        wanted, got = meant.tensors[name].read(), found.tensors[name].read()
        if not same_bits(wanted, got):
            yield f"{name} has {'become zero' if not got.any() else 'other values'}"


def logits(model: Model, ids: Tensor) -> Tensor:
    """Compute the logits of a model with our code, in fp32 (float64 where its weights are)."""
    wide = all(tensor.dtype == torch.float64 for tensor in model.tensors.values())
    built = meta_model(model.section).to(torch.float64 if wide else torch.float32).to_empty(device="cpu")
    for name, tensor in built.state_dict().items():
        tensor.copy_(model.tensors[name].read())
    return built.eval()(ids, want_state=False)[0]


if __name__ == "__main__":
    print(json.dumps(compare(json.load(sys.stdin))))

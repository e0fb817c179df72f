"""Cases of the stored vectors (`mixers_index.json`) for the linear mixers and their operators."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hybrid.layers.base import Site
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.registry import mixer_class

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "tests" / "vectors", ROOT / ".." / "shared" / "conformance"]
KINDS = {"gdn": "gated_deltanet", "kda": "kimi_delta", "mamba2": "mamba2"}
OPERATORS = ("gdn_op", "kda_op")


def cases(kinds: tuple[str, ...]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Every case of these kinds found, by name: its folder and its entry of the index."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for folder in FOLDERS:
        index = folder / "mixers_index.json"
        listed = json.loads(index.read_text())["cases"] if index.exists() else {}
        for name, case in listed.items():
            if case["kind"] in kinds:
                found.setdefault(name, (folder, case))
    return found


def load(folder: Path, case: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in load_file(folder / case["file"]).items()}


def run_layer(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`y`, `state.*` and `grad.*` of a layer with the case's parameters, input and starting state."""
    cls = mixer_class(KINDS[case["kind"]])
    config = case["config"]
    options = {f.name: config[f.name] for f in dataclasses.fields(cls.Options) if f.name in config}
    mixer = cls(cls.Options(**options), Site(config["hidden_size"])).to(tensors["x"].dtype)
    mixer.load_state_dict({n.removeprefix("param."): t for n, t in tensors.items() if n.startswith("param.")})
    x = tensors["x"].clone().requires_grad_()
    inputs = {"x": x, **{f"param.{name}": parameter for name, parameter in mixer.named_parameters()}}
    state = None
    if config["initial_state"]:
        start = {n: t.clone().requires_grad_() for n, t in tensors.items() if n.startswith("init.")}
        state = mixer.empty_state(x.shape[0])
        assert state.tensors().keys() == {name.removeprefix("init.") for name in start}
        state = dataclasses.replace(state, **{n.removeprefix("init."): t for n, t in start.items()})
        inputs |= start
    y, after = mixer(x, None, state)
    found = {"y": y} | {f"state.{name}": tensor for name, tensor in after.tensors().items()}
    return found | _gradients((y * tensors["w"]).sum(), inputs)


def run_operator(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`y`, `state.recurrent` and `grad.*` of the delta rule alone."""
    inputs = {n: tensors[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "beta", "init_state")}
    *arguments, start = inputs.values()
    y, state = gated_delta_rule(*arguments, state=start)
    loss = (y * tensors["w"]).sum() + (state * tensors["w_state"]).sum()
    return {"y": y, "state.recurrent": state} | _gradients(loss, inputs)


def _gradients(loss: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"grad.{n}": g for n, g in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True)
    }


def compare(
    found: dict[str, Tensor], tensors: dict[str, Tensor], near_zero: list[str], tolerance: float
) -> None:
    """All of the case's results, within `tolerance` of each tensor's largest entry (gradients that should be
    zero: of the largest gradient of all)."""
    wanted = {n: t for n, t in tensors.items() if n == "y" or n.startswith(("state.", "grad."))}
    assert found.keys() == wanted.keys()
    largest = max(float(t.abs().max()) for n, t in wanted.items() if n.startswith("grad."))
    for name, want in wanted.items():
        assert found[name].shape == want.shape, name
        scale = 0.01 * largest if name in near_zero else float(want.abs().max())
        error = float((found[name].detach() - want).abs().max())
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"

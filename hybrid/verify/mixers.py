"""Single layers, their operators and their initial values, of the cases in `mixers_index.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid.errors import NotSupported
from hybrid.layers import Context, Mixer, MixerState, Site, mixer_class
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.rwkv7_op import rwkv7_recurrence
from hybrid.layers.ovq.attention import Routes

from .vectors import Case, CaseError, Tensors, below, gradient


@dataclass(frozen=True)
class Layer:
    """How the cases of one kind of layer name things."""

    kind: str
    """Ours, in the registry."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Key of a config -> our option, where they differ."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Key of a config -> the one value that our layer has."""
    equal: tuple[str, str] | None = None
    """Two keys that must agree."""
    start: Mapping[str, str] = field(default_factory=dict)
    """Name of a starting tensor -> of the final one, where they differ."""

    def options_of(self, config: Mapping[str, Any]) -> Any:
        """Build our options from a config; NotSupported for what our layer does not have."""
        for key, value in self.only.items():
            if config.get(key, value) != value:
                raise NotSupported(f"{key} is {config[key]!r}: {self.kind} has {value!r} only")
        if self.equal is not None and self.equal[0] in config:
            one, other = self.equal
            if config[one] != config[other]:
                raise NotSupported(
                    f"{one} is {config[one]} and {other} {config[other]}: {self.kind} has one length for both"
                )
        cls = mixer_class(self.kind).Options
        known = {f.name for f in dataclasses.fields(cls)}
        named = {self.options.get(key, key): value for key, value in config.items()}
        return cls(**{name: value for name, value in named.items() if name in known})


DELTA_ONLY = {"l2norm_eps": 1e-6}
OVQ_SWITCHES = ("normalize_centroids", "use_min_state_size", "use_counts_for_lr_only", "use_delta_rule")

LAYERS = {
    "rwkv7": Layer("rwkv7", start={"state": "recurrent"}),
    "ovq": Layer(
        "ovq",
        options={"chunk_size": "chunk"},
        only=dict.fromkeys(OVQ_SWITCHES, False),
        equal=("window_size", "chunk_size"),
    ),
    "gdn": Layer("gated_deltanet", only=DELTA_ONLY),
    "kda": Layer("kimi_delta", only={**DELTA_ONLY, "use_gate": True}),
    "mamba2": Layer("mamba2", only={"rmsnorm": True, "norm_before_gate": False}),
}


class Operator(NamedTuple):
    """A recurrence, and the names of its inputs in order."""

    function: Callable[..., tuple[Tensor, Tensor]]
    inputs: tuple[str, ...]


DELTA_RULE = Operator(gated_delta_rule, ("q", "k", "v", "g", "beta"))
OPERATORS = {
    "rwkv7_op": Operator(rwkv7_recurrence, ("r", "log_w", "k", "v", "a", "b")),
    "gdn_op": DELTA_RULE,
    "kda_op": DELTA_RULE,
}


# Layers


def run_layer(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Compute `y`, `state.*`, the gradients of sum(y * w), and of OVQ `mid.assignments`.

    Computed in the dtype of `tensors["x"]`, on its device. In bf16 stored routes are replayed.
    """
    names = [name for name in tensors if name in ("x", "v_first") or name.startswith("init.")]
    inputs = {name: tensors[name].clone().requires_grad_() for name in names}
    x, layer = inputs["x"], LAYERS[str(case.kind)]
    mixer = build_layer(case, tensors)
    firsts = {layer.kind: inputs["v_first"]} if "v_first" in inputs else {}
    slots = tensors.get("mid.assignments")
    routes: dict[int, Any] = {}
    if slots is not None and x.dtype == torch.bfloat16:
        routes[mixer.site.layer] = Routes(slots.int())
    state = _starting_state(mixer, layer, below("init.", inputs), x.shape[0])
    y, after = mixer(x, Context.of(x, first_values=firsts, routes=routes), state)
    (y * tensors["w"]).sum().backward()
    found = {"y": y} | {f"state.{name}": tensor for name, tensor in stored_state(after).items()}
    if slots is not None:
        chosen = routes[mixer.site.layer].slot
        pending = slots[..., chosen.shape[-1] :]  # not chosen yet
        found["mid.assignments"] = torch.cat([chosen.to(slots.dtype), pending], -1)
    leaves = inputs | {f"param.{name}": parameter for name, parameter in mixer.named_parameters()}
    if "param.x_v" in tensors:  # maybe one that nothing reads: see `load_parameters`
        leaves.setdefault("param.x_v", tensors["param.x_v"])
    return found | {f"grad.{name}": gradient(leaf) for name, leaf in leaves.items()}


def build_layer(case: Case, tensors: Tensors) -> Mixer:
    """Build the case's layer with the case's parameters."""
    config, layer = case.config, LAYERS[str(case.kind)]
    options = layer.options_of(config)
    place = config.get("layer_idx", 0), config.get("num_layers", 1)
    site = Site(config["hidden_size"], *place, first_of_kind="v_first" not in tensors)
    mixer = mixer_class(layer.kind)(options, site).to(tensors["x"].device, tensors["x"].dtype)
    load_parameters(mixer, below("param.", tensors))
    return mixer


def load_parameters(module: nn.Module, stored: Tensors) -> None:
    """Copy tensors into the parameters of their names; axes of size 1 do not matter.

    Upstream gives attention layers an `x_v` that nothing reads where there is a value residual but no
    token shift; it is left out. CaseError for parameters that are missing on either side or misshapen.
    """
    ours = dict(module.named_parameters())
    theirs = {name: x for name, x in stored.items() if name != "x_v" or "x_v" in ours}
    if ours.keys() != theirs.keys():
        names = ", ".join(sorted(ours.keys() ^ theirs.keys()))
        raise CaseError(f"parameters that only one of the case and our layer has: {names}")
    with torch.no_grad():
        for name, parameter in ours.items():
            if parameter.squeeze().shape != theirs[name].squeeze().shape:
                shapes = f"{tuple(theirs[name].shape)}, ours is {tuple(parameter.shape)}"
                raise CaseError(f"parameter {name} is {shapes}")
            parameter.copy_(theirs[name].reshape(parameter.shape))


def stored_state(state: MixerState) -> dict[str, Tensor]:
    """Name a layer's state as the vectors do; tensors without entries (no pending token) are left out."""
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in state.tensors().items()}
    return {
        name: tensor.transpose(1, 2) if name.startswith("pending_") else tensor
        for name, tensor in tensors.items()
        if tensor.numel()
    }


def _starting_state(mixer: Mixer, layer: Layer, start: Tensors, batch: int) -> MixerState | None:
    if not start:
        return None
    state = mixer.empty_state(batch)
    named = {layer.start.get(name, name): tensor for name, tensor in start.items()}
    held = state.tensors()
    if named.keys() != held.keys():
        raise NotSupported(f"starts from {', '.join(named)}; a {layer.kind} state has {', '.join(held)}")
    return dataclasses.replace(state, **{name: x.reshape(held[name].shape) for name, x in named.items()})


# Operators and initial values


def run_operator(
    case: Case, tensors: Tensors, function: Callable[..., tuple[Tensor, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Compute `y`, `state.recurrent` and `grad.*`, by `function` instead of the operator where given."""
    operator = OPERATORS[str(case.kind)]
    if case.config.get("scale", "K**-0.5") != "K**-0.5":
        raise NotSupported(f"scale is {case.config['scale']!r}; supported: 'K**-0.5'")
    names = [*operator.inputs, *(["init_state"] if "init_state" in tensors else [])]
    inputs = {name: tensors[name].clone().requires_grad_() for name in names}
    y, state = (function or operator.function)(
        *(inputs[name] for name in operator.inputs), state=inputs.get("init_state")
    )
    loss = (y * tensors["w"]).sum()
    if "w_state" in tensors:
        loss = loss + (state * tensors["w_state"]).sum()
    loss.backward()
    found = {"y": y, "state.recurrent": state}
    return found | {f"grad.{name}": gradient(leaf) for name, leaf in inputs.items()}


def run_initial(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Build the case's layers; return their parameters as `layer<i>.<parameter>`, random ones included."""
    layer, config = LAYERS[str(case.kind).removesuffix("_init")], case.config
    options, count = layer.options_of(config), config["num_layers"]
    mixers = [mixer_class(layer.kind)(options, Site(config["hidden_size"], i, count)) for i in range(count)]
    return {f"layer{i}.{name}": x for i, mixer in enumerate(mixers) for name, x in mixer.named_parameters()}

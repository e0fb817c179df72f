"""Single layers, their operators and their initial values against stored results (`mixers_index.json`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hybrid.convert import NotSupported
from hybrid.layers import Context, Mixer, MixerState, Site, mixer_class
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.rwkv7_op import rwkv7_recurrence
from hybrid.layers.ovq.attention import Routes

from .compare import CaseResult, Setting, gradient, scaled_limits
from .vectors import Case, CaseError, Tensors, below


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
    function: Callable[..., tuple[Tensor, Tensor]]
    inputs: tuple[str, ...]
    scaled: bool = False
    """Queries times K^-1/2, as our function has it and the config must say."""


DELTA_RULE = Operator(gated_delta_rule, ("q", "k", "v", "g", "beta"), scaled=True)
OPERATORS = {
    "rwkv7_op": Operator(rwkv7_recurrence, ("r", "log_w", "k", "v", "a", "b")),
    "gdn_op": DELTA_RULE,
    "kda_op": DELTA_RULE,
}

EXACT = {"log_w", "g", "init_state", "init.state", "init.recurrent"}
"""Not rounded to bf16: log decays and recurrent states are fp32 in a bf16 model."""


def layer_kinds() -> Iterable[str]:
    return LAYERS


def operator_kinds() -> Iterable[str]:
    return OPERATORS


def initial_kinds() -> Iterable[str]:
    return [f"{kind}_init" for kind in LAYERS]


# Layers


def check_layer(case: Case, result: CaseResult) -> None:
    """Output, final state, chosen centroids, and the gradients of sum(y * w)."""
    tensors = case.tensors()
    _compare(case, tensors, run_layer(case, _given(tensors, result.setting)), result)


def run_layer(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """What the case stores: `y`, `state.*`, `grad.*`, and of OVQ `mid.assignments`.

    Computed in the dtype of `tensors["x"]`, on its device.
    """
    names = [name for name in tensors if name in ("x", "v_first") or name.startswith("init.")]
    inputs = {name: tensors[name].clone().requires_grad_() for name in names}
    x, layer = inputs["x"], LAYERS[str(case.kind)]
    mixer = build_layer(case, tensors)
    firsts = {layer.kind: inputs["v_first"]} if "v_first" in inputs else {}
    routes = {mixer.site.layer: _stored_routes(tensors)} if x.dtype == torch.bfloat16 else {}
    state = _starting_state(mixer, layer, below("init.", inputs), x.shape[0])
    y, after = mixer(x, Context.of(x, first_values=firsts, routes=cast(dict, routes)), state)
    (y * tensors["w"]).sum().backward()
    found = {"y": y} | {f"state.{name}": tensor for name, tensor in stored_state(after).items()}
    made = routes.get(mixer.site.layer)
    if made is not None and "mid.assignments" in tensors:
        found["mid.assignments"] = made.slot
    leaves = inputs | {f"param.{name}": parameter for name, parameter in mixer.named_parameters()}
    return found | {f"grad.{name}": gradient(leaf) for name, leaf in leaves.items()}


def build_layer(case: Case, tensors: Tensors) -> Mixer:
    """The case's layer with the case's parameters."""
    config, layer = case.config, LAYERS[str(case.kind)]
    for key, value in layer.only.items():
        if config.get(key, value) != value:
            raise NotSupported(f"{key} is {config[key]!r}: {layer.kind} has {value!r} only")
    if layer.equal is not None and layer.equal[0] in config:
        one, other = layer.equal
        if config[one] != config[other]:
            raise NotSupported(
                f"{one} is {config[one]} and {other} {config[other]}: {layer.kind} has one length for both"
            )
    cls = mixer_class(layer.kind)
    known = {f.name for f in dataclasses.fields(cls.Options)}
    options = {layer.options.get(key, key): value for key, value in config.items()}
    place = config.get("layer_idx", 0), config.get("num_layers", 1)
    site = Site(config["hidden_size"], *place, first_of_kind="v_first" not in tensors)
    mixer = cls(cls.Options(**{name: value for name, value in options.items() if name in known}), site)
    mixer.to(tensors["x"].device, tensors["x"].dtype)
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
    """A layer's state under the vectors' names; tensors without entries (no pending token) left out."""
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


def _stored_routes(tensors: Tensors) -> Routes | None:
    """In bf16 rounded keys may choose others."""
    slot = tensors.get("mid.assignments")
    return None if slot is None else Routes(slot.int())


# Operators


def check_operator(case: Case, result: CaseResult) -> None:
    """Output, final state and gradients, from a given state."""
    tensors = case.tensors()
    _compare(case, tensors, run_operator(case, _given(tensors, result.setting)), result)


def run_operator(
    case: Case, tensors: Tensors, function: Callable[..., tuple[Tensor, Tensor]] | None = None
) -> dict[str, Tensor]:
    """`y`, `state.recurrent` and `grad.*`, by `function` instead of the operator where it is given."""
    operator = OPERATORS[str(case.kind)]
    if operator.scaled and case.config.get("scale", "K**-0.5") != "K**-0.5":
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


# Initial values


def check_initial(case: Case, result: CaseResult) -> None:
    """The stored start values, `layer<i>.<parameter>`; what is not stored is random."""
    tensors, config = case.tensors(), case.config
    cls = mixer_class(LAYERS[str(case.kind).removesuffix("_init")].kind)
    allowed = scaled_limits(case, tensors, result.setting)
    known = {f.name for f in dataclasses.fields(cls.Options)}
    options = cls.Options(**{name: value for name, value in config.items() if name in known})
    names = set(tensors)
    for layer in range(config["num_layers"]):
        mixer = cls(options, Site(config["hidden_size"], layer, config["num_layers"]))
        for name, parameter in mixer.named_parameters():
            stored = f"layer{layer}.{name}"
            if stored in names:
                names.remove(stored)
                theirs = tensors[stored]
                result.compare("init", stored, _shaped(parameter, theirs), theirs, allowed)
    for name in sorted(names):
        result.fail(f"{name} belongs to no parameter")


# Common to all


def _given(tensors: Tensors, setting: Setting) -> dict[str, Tensor]:
    exact = dataclasses.replace(setting, precision="fp32")
    return {name: (exact if name in EXACT else setting).given(x) for name, x in tensors.items()}


def _compare(case: Case, tensors: Tensors, found: Mapping[str, Tensor], result: CaseResult) -> None:
    """All results that the case stores. Values on the way (`mid.*`) follow from them, but for choices."""
    allowed = scaled_limits(case, tensors, result.setting)
    groups = {"y": "y", "state": "state", "grad": "grad"}
    for name, theirs in tensors.items():
        group = groups.get(name.partition(".")[0])
        if group is not None and name not in found:
            if name == "grad.param.x_v":  # see `load_parameters`
                result.compare(group, name, torch.zeros_like(theirs), theirs, allowed)
            else:
                result.fail(f"{name} is no result of this layer")
        elif group is not None:
            result.compare(group, name, _shaped(found[name], theirs), theirs, allowed)
    for name in sorted(found.keys() - tensors.keys()):
        if name.startswith("state."):
            result.fail(f"the case has no {name}, our state has")
    if "mid.assignments" in found:
        slot = found["mid.assignments"]
        chosen = tensors["mid.assignments"][..., : slot.shape[-1]]  # the rest is still pending
        result.compare("route", "mid.assignments", slot.to(chosen.dtype), chosen, allowed)


def _shaped(ours: Tensor, theirs: Tensor) -> Tensor:
    """Ours with their axes of size 1."""
    return ours.reshape(theirs.shape) if ours.squeeze().shape == theirs.squeeze().shape else ours

"""Models of the Key-Value Means paper's code: its config keys and its parameter names, and ours.

Its layers come from one main mixer and, with `alt_layer_every` n of 2 or more, an alternate one on the
layers 0, n, 2n, ...; here they become letters of a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from hybrid.errors import ConvertError, NotSupported
from hybrid.recipe.letters import layer_specs
from hybrid.recipe.pattern import DEFAULT_LETTERS, compress
from hybrid.recipe.schema import ModelSection

from .common import LazyTensor, refuse_misfits

T = TypeVar("T", Tensor, LazyTensor)

LETTERS = {"kvm": "K", "gptalpha": "F", "gptalpha_bswa": "B", "swa": "W", "rwkv7": "R", "ovq": "Q"}
"""Upstream mixer -> letter of our default table."""

BUDGETS = {"fixed": "fixed", "power_law": "power_law", "kvm_saturation": "saturation"}

OFF_ONLY = {
    "use_block_lambdas": "block lambdas (each block mixing the embeddings back in)",
    "use_skip_connections": "skip connections between the halves of the stack (where the second half counts "
    "its alternate layers from 0 again, so that a period that does not divide the first half shifts them)",
    "use_l2wrap": "L2Wrap",
    "alt_share_v0": "main layers taking their shared values from an alternate layer",
}
"""Switches that are 0 in every published config, and what they are."""

OVQ_OFF_ONLY = {
    "ovq_normalize_centroids": "centroids of unit length",
    "ovq_use_min_state_size": "another growth of the dictionary",
    "ovq_use_counts_for_lr_only": "logits without log n",
    "ovq_use_delta_rule": "values corrected by a delta rule",
}
"""The same, of OVQ layers."""

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(OFF_ONLY, 0),
    "num_key_value_heads": None,
    "d_head": None,
    "alt_layer_every": -1,
    "alt_token_mixer": None,
    "residual_scale": 1.0,
    "logit_softcap": 0.0,
    "state_round_down": 1,
    "state_min_len": -1,
    "kvm_apply_merge_gate_to_initial_state": 0,
    **dict.fromkeys(OVQ_OFF_ONLY, 0),
}
"""Upstream's values for keys that a config may leave out; other keys are asked for when they matter."""


class Config(dict[str, Any]):
    """Upstream's config, with upstream's defaults and words for what is missing; `used` are the keys read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = values.used if isinstance(values, Config) else set()

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        if key in DEFAULTS:
            return DEFAULTS[key]
        hint = ""
        if key == "kvm_apply_merge_gate_to_appends":
            hint = " (1 in the paper's first release, 0 in its later code: give the one it was trained with)"
        raise ConvertError(f"the config has no '{key}'{hint}")

    def flag(self, key: str) -> bool:
        value = self[key]
        if value not in (0, 1, False, True):
            raise ConvertError(f"{key} is {value!r}; allowed: 0, 1")
        return bool(value)

    def refuse(self, switches: Mapping[str, str]) -> None:
        """Raise NotSupported when one of these is on."""
        for key, meaning in switches.items():
            if self.flag(key):
                raise NotSupported(f"{key} is {self[key]}: {meaning} are not supported; only 0 is")


def model_section(config: Mapping[str, Any]) -> ModelSection:
    """Translate an upstream config to the model section of a recipe.

    Raises NotSupported for mixers and switches this project does not have, ConvertError for a config that
    is incomplete or contradicts itself.
    """
    values = Config(config)
    values.refuse(OFF_ONLY)
    letters = layer_letters(values)
    section = ModelSection(
        pattern=compress(letters),
        layers={letter: _layer(values, letter, prefix) for letter, prefix in _roles(values).items()},
        hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        ffn_expansion=values["ffn_expansion"],
        ffn_token_shift=values.flag("use_tokenshift_ffn"),
        residual_scale=values["residual_scale"],
        logit_softcap=values["logit_softcap"],
    )
    layer_specs(section)  # refuses what our layers do not take
    return section


def layer_letters(config: Mapping[str, Any]) -> list[str]:
    """List one letter per layer. With a period of 2 or more layer 0 is an alternate one; else none is."""
    values = Config(config)
    depth, period = values["num_hidden_layers"], values["alt_layer_every"]
    if period == 1:
        raise NotSupported(
            "alt_layer_every is 1, which the paper's code reads in two ways (its builder alternates above 1, "
            "its forward pass above 0); use -1 for main layers only, or make the alternate mixer the main one"
        )
    main = _letter(values["token_mixer"], "token_mixer")
    if period < 1:
        return [main] * depth
    alternate = _letter(values["alt_token_mixer"], "alt_token_mixer")
    if alternate == main:
        raise NotSupported(
            f"token_mixer and alt_token_mixer are both {values['token_mixer']!r}: here the two would share "
            "their first values, in the paper's code they do not"
        )
    if alternate == "K" and values["alt_rope_partial_dim"] != values["rope_partial_dim"]:
        raise NotSupported(
            f"alt_token_mixer is 'kvm' with alt_rope_partial_dim {values['alt_rope_partial_dim']} and "
            f"rope_partial_dim {values['rope_partial_dim']}: the paper's code rotates the first by one, and "
            "clears the other in the state's keys"
        )
    return [alternate if layer % period == 0 else main for layer in range(depth)]


def _letter(mixer: Any, key: str) -> str:
    if mixer not in LETTERS:
        raise NotSupported(f"{key} is {mixer!r}; supported: {', '.join(LETTERS)}")
    return LETTERS[mixer]


def _roles(values: Config) -> dict[str, str]:
    """Map each letter to the prefix of its rotary keys in the config."""
    roles = {LETTERS[values["token_mixer"]]: ""}
    if values["alt_layer_every"] > 1:
        roles[LETTERS[values["alt_token_mixer"]]] = "alt_"
    return roles


def _layer(values: Config, letter: str, prefix: str) -> dict[str, Any]:
    """Write the entry of the layer table for one of the two mixers."""
    heads = values["num_attention_heads"]
    layer: dict[str, Any] = {
        "num_heads": heads,
        "head_dim": values["d_head"] or values["hidden_size"] // heads,
        "token_shift": values.flag("use_tokenshift_att"),
        "value_residual": values.flag("use_value_residual"),
    }
    _refuse_modes(values, letter)
    if letter in "QR":
        shared = values["num_key_value_heads"]
        if shared not in (None, heads):
            raise NotSupported(
                f"num_key_value_heads is {shared}: {DEFAULT_LETTERS[letter]} has num_attention_heads, {heads}"
            )
    else:
        layer |= {
            "num_kv_heads": values["num_key_value_heads"] or heads,
            "rotary_dim": values[f"{prefix}rope_partial_dim"],
            "rotary_base": values[f"{prefix}rope_theta"],
        }
    if letter == "R" and not layer["value_residual"]:
        raise NotSupported("use_value_residual is 0: the paper's RWKV-7 has its value residual always")
    if letter == "Q":
        layer |= _ovq_options(values)
    if letter == "W":
        window = values["swa_window_size"]
        layer["window"] = window if window > 0 else values["chunk_len"]
    if letter in "BK":
        layer |= {
            "chunk": values["chunk_len"],
            "window_chunks": values["n_bswa_chunks"],
            "sinks": values["sink_len"],
        }
    if letter == "K":
        layer |= kvm_options(values)
    return {"kind": DEFAULT_LETTERS[letter], **layer}


def _refuse_modes(values: Config, letter: str) -> None:
    """Raise NotSupported for other forms of value residual and token shift, which no published config has."""
    own = {"K": "kvm", "F": "gptalpha", "B": "gptalpha", "W": "swa", "Q": "ovq"}.get(letter)
    for key in (f"{own}_value_residual_mode", f"{own}_token_shift_mode"):
        if key in values and values[key] != "rwkv":
            raise NotSupported(f"{key} is {values[key]!r}; supported: 'rwkv'")


def _ovq_options(values: Config) -> dict[str, Any]:
    """Translate chunk and dictionary of an OVQ layer to options of our `ovq`."""
    values.refuse(OVQ_OFF_ONLY)
    chunk, window = values["ovq_chunk_size"], values["ovq_window_size"]
    if window != chunk:
        raise NotSupported(
            f"ovq_window_size is {window} and ovq_chunk_size {chunk}: the paper's code never reads the first "
            "(its exact part is the query's own chunk), so a config that means a window of its own is not "
            "what it says; make them equal"
        )
    return {"chunk": chunk, "max_centroids": values["ovq_max_centroids"]}


def kvm_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate budget, gates and value rule of a KVM layer to options of our `kvm`."""
    values = Config(config)
    mode = values["state_budget_mode"]
    if mode not in BUDGETS:
        raise NotSupported(f"state_budget_mode is {mode!r}; supported: {', '.join(BUDGETS)}")
    gated = values.flag("kvm_use_merge_gate_keys") or values.flag("kvm_use_merge_gate_values")
    options: dict[str, Any] = {
        "budget": BUDGETS[mode],
        "budget_minimum": max(values["state_min_len"], 1),
        "budget_round": values["state_round_down"],
        "budget_max_chunks": values["n_max_d_chunks"],
        "gate_keys": values.flag("kvm_use_merge_gate_keys"),
        "gate_values": values.flag("kvm_use_merge_gate_values"),
        "gate_appends": values.flag("kvm_apply_merge_gate_to_appends"),
        "gate_initial": gated and values.flag("kvm_apply_merge_gate_to_initial_state"),
        "temperatures": values.flag("kvm_use_head_temps"),
        "values": "radius" if values.flag("kvm_use_vlens") else "reference_counts",
    }
    if mode == "power_law":
        options["budget_factor"] = values["state_growth_factor"]
        options["budget_exponent"] = values["state_growth_exponent"]
    if mode == "kvm_saturation":
        options["budget_saturation"] = values["state_saturation_n"]
    return options


# Parameter names. What a mixer owns is called the same in both, but for MIXER_NAMES.

TOP_NAMES = {
    "transformer.wte.weight": "embedding.weight",
    "transformer.ln_emb.weight": "embedding_norm.weight",
    "transformer.ln_emb.bias": "embedding_norm.bias",
    "transformer.ln_head.weight": "norm.weight",
    "transformer.ln_head.bias": "norm.bias",
    "lm_head.weight": "head.weight",
}
BLOCK_NAMES = {"ln_attn": "norm_mixer", "attn": "mixer", "ln_mlp": "norm_ffn", "mlp": "ffn"}
MIXER_NAMES = {"key_weighting": "merge_gate"}
OPENED = ("attn.v_gate0", "mlp.x_k")
"""Upstream stores these vectors as [1, 1, C], and all vectors of RWKV-7 but those of its norm."""
OPENED_RWKV7 = tuple(f"attn.{n}" for n in (*(f"x_{s}" for s in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a"))
RWKV7_MARK = "attn.receptance.weight"
"""An attention layer that has this is RWKV-7."""


def our_name(name: str) -> str:
    """Translate an upstream parameter's name to ours; ConvertError for one that upstream does not have."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"transformer\.h\.(\d+)\.(\w+)\.(.+)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise ConvertError(f"unknown tensor '{name}'")
    rest = _renamed(match[3], MIXER_NAMES) if match[2] == "attn" else match[3]
    return f"blocks.{match[1]}.{BLOCK_NAMES[match[2]]}.{rest}"


def upstream_name(name: str) -> str:
    """Translate our name of a parameter to upstream's: the inverse of `our_name`."""
    top, blocks, mixer = (
        {ours: theirs for theirs, ours in names.items()} for names in (TOP_NAMES, BLOCK_NAMES, MIXER_NAMES)
    )
    if name in top:
        return top[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(.+)", name)
    if match is None or match[2] not in blocks:
        raise ConvertError(f"the paper's code has no parameter for '{name}'")
    rest = _renamed(match[3], mixer) if match[2] == "mixer" else match[3]
    return f"transformer.h.{match[1]}.{blocks[match[2]]}.{rest}"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    head, dot, tail = name.partition(".")
    return names.get(head, head) + dot + tail


def from_upstream(tensors: Mapping[str, T], expected: Mapping[str, Tensor]) -> dict[str, T]:
    """Convert upstream's state dict to our names and shapes.

    Args:
        tensors: upstream name -> tensor.
        expected: our state dict (a model on the meta device will do): what must be there, and its shapes.

    Raises ConvertError that names every unknown, missing or misshapen tensor.
    """
    needless, opened = unread(tensors), _opened(tensors)
    converted: dict[str, T] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name not in needless:
            try:
                ours = our_name(name)
            except ConvertError:
                ours = name
            converted[ours], names[ours] = tensor.flatten() if name in opened else tensor, name
    refuse_misfits(converted, expected, "the state dict", lambda ours: names.get(ours) or upstream_name(ours))
    return converted


def to_upstream(tensors: Mapping[str, T]) -> dict[str, T]:
    """Convert our state dict to upstream's names and shapes, with the tensors that only upstream has."""
    converted = {upstream_name(name): tensor for name, tensor in tensors.items()}
    for name in _opened(converted):
        converted[name] = converted[name].reshape(1, 1, -1)
    for name in sorted(unread(converted)):
        gate = converted[_beside(name, "v_gate0")]
        converted[name] = gate.new_zeros(gate.numel())
    return converted


def _opened(tensors: Mapping[str, Any]) -> set[str]:
    """Find upstream's names of the vectors that it stores as [1, 1, C]."""
    rwkv7 = {name.removesuffix(RWKV7_MARK) for name in tensors if name.endswith(RWKV7_MARK)}
    opened = {block + suffix for block in rwkv7 for suffix in OPENED_RWKV7}
    return {name for name in tensors if name.endswith(OPENED) or name in opened}


def unread(tensors: Mapping[str, Any]) -> set[str]:
    """Find upstream's names of vectors that nothing reads: its attention layers with a value residual and
    without token shift have an `x_v` of zeros nevertheless."""
    gated = {_beside(name, "x_v") for name in tensors if name.endswith("attn.v_gate0")}
    return {name for name in gated if _beside(name, "x_q") not in tensors}


def _beside(name: str, other: str) -> str:
    return f"{name.rpartition('.')[0]}.{other}"

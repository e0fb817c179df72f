"""Pretrained transformers of the Llama family as models of ours: full attention or sliding windows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hybrid.convert.common import Model, Tensors, complete, fit
from hybrid.errors import NotSupported
from hybrid.recipe.schema import ModelSection

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` that are read."""

NAMES = {
    "input_layernorm": "norm_mixer",
    "self_attn.q_proj": "mixer.c_q",
    "self_attn.k_proj": "mixer.c_k",
    "self_attn.v_proj": "mixer.c_v",
    "self_attn.o_proj": "mixer.c_proj",
    "self_attn.q_norm": "mixer.ln_q",
    "self_attn.k_norm": "mixer.ln_k",
    "post_attention_layernorm": "norm_ffn",
    "mlp.gate_proj": "ffn.c_gate",
    "mlp.up_proj": "ffn.c_fc",
    "mlp.down_proj": "ffn.c_proj",
}
"""Modules of a layer there -> here."""

LAYER_LETTERS = {("full_attention", True): "F", ("sliding_attention", True): "W",
                 ("full_attention", False): "N", ("sliding_attention", False): "S"}  # fmt: skip
"""Kind of attention, and whether it is rotated -> letter of the pattern."""


def read_pretrained(path: Path, tensors: Tensors) -> Model:
    """Read a folder whose config is of one of FAMILIES, as a model with the same logits.

    Raises NotSupported naming what its config asks for and we do not have, ConvertError for other tensors
    than its config asks for.
    """
    section = section_of_config(_config(path))
    found: Tensors = {}
    source_names: dict[str, str] = {}
    dropped: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            dropped[name] = "follows from the config"
            continue
        ours = our_name(name)
        found[ours] = tensor
        source_names[ours] = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    model = fit(found, section, path)
    model.source_names = source_names
    model.dropped |= dropped
    return model


def our_name(name: str) -> str:
    """Translate a tensor's name; an unknown one stays as it is, to be refused by it."""
    bare = name.removeprefix("model.")
    outer = {"embed_tokens": "embedding", "norm": "norm", "lm_head": "head"}
    module, _, leaf = bare.rpartition(".")
    if module in outer:
        return f"{outer[module]}.{leaf}"
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if layer and layer[2] in NAMES:
        return f"blocks.{layer[1]}.{NAMES[layer[2]]}.{leaf}"
    return name


def section_of_config(config: Any) -> ModelSection:
    """Translate a config to a complete model section. NotSupported names what has no place."""
    _refuse(config)
    kinds = config.layer_types if getattr(config, "layer_types", None) else None
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    rotated = getattr(config, "no_rope_layers", None) or [1] * len(kinds)
    letters = [LAYER_LETTERS[kind, bool(turns)] for kind, turns in zip(kinds, rotated, strict=True)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    options = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "qkv_bias": config.model_type == "qwen2",
        "qk_norm": "rmsnorm" if config.model_type == "qwen3" else "none",
        "qk_norm_eps": config.rms_norm_eps,
        "token_shift": False,
        "value_residual": False,
        "rotary_style": "standard",
    }
    turning = options | {"rotary_dim": head_dim} | _rotary(config)
    still = options | {"rotary_dim": 0}
    window = {"window": config.sliding_window} if "sliding_attention" in kinds else {}
    layers = {
        "F": {"kind": "full", **turning},
        "W": {"kind": "sliding_window", **turning, **window},
        "N": {"kind": "full", **still},
        "S": {"kind": "sliding_window", **still, **window},
    }
    return complete(
        ModelSection(
            pattern="".join(letters),
            layers={letter: layers[letter] for letter in sorted(set(letters))},
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            norm="rmsnorm",
            norm_eps=config.rms_norm_eps,
            embedding_norm=False,
            feed_forward="swiglu",
            ffn_size=config.intermediate_size,
            ffn_token_shift=False,
            tie_embeddings=config.tie_word_embeddings,
            init="normal",
        )
    )


def special_ids(path: Path) -> bytes | None:
    """Write what ids a source's config gives to the ends of a text as a `generation_config.json`."""
    config = json.loads((path / "config.json").read_bytes())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: config[name] for name in names if config.get(name) is not None}
    return (json.dumps(found, indent=2) + "\n").encode() if found else None


def _config(path: Path) -> Any:
    """Read the config with transformers, which knows its older forms and its defaults; runs no code of it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise NotSupported(f"{path}: transformers cannot read its config.json: {error}") from None


def _refuse(config: Any) -> None:
    """Raise NotSupported naming every key of a config that has no place in a model of ours."""
    problems = []
    if config.model_type not in FAMILIES:
        problems.append(f"model_type {config.model_type!r}; read are {', '.join(FAMILIES)}")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {config.hidden_act!r}; read is silu")
    for key, why in (("attention_bias", "a bias of o_proj"), ("mlp_bias", "biases of the feed-forward")):
        if getattr(config, key, False):
            problems.append(f"{key}: there is no place for {why}")
    if getattr(config, "quantization_config", None) is not None:
        problems.append("quantization_config: save the weights as floating-point numbers first")
    for kind in set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        problems.append(f"layer_types with {kind!r}; read are full_attention and sliding_attention")
    if problems:
        raise NotSupported(f"config.json has no model of ours: {'; '.join(problems)}")


def _rotary(config: Any) -> dict[str, Any]:
    """Translate a config's rotary embedding: base, and frequencies and scale where they are scaled."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise NotSupported(f"config.json has partial_rotary_factor {partial}; read is 1")
    base = {"rotary_base": float(rope["rope_theta"])}
    if kind == "default":
        return base
    if kind not in ("linear", "llama3", "yarn"):
        raise NotSupported(
            f"config.json has rotary scaling {kind!r}, whose frequencies depend on how long a text is (or "
            "which is not known here); read are linear, llama3 and yarn"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, None)
    return base | {"rotary_frequencies": frequencies.tolist(), "rotary_scale": float(scale)}

"""Folders and files of the Key-Value Means paper's code: `config.json` and a state dict, read and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid import recipe as recipes
from hybrid.errors import ConvertError, NotSupported
from hybrid.files import write_json
from hybrid.model.block import ffn_width
from hybrid.recipe.pattern import DEFAULT_LETTERS
from hybrid.recipe.schema import ModelSection

from .common import Format, Model, Options, Tensors, complete, fit, meta_model, short_list
from .kvm_paper import BUDGETS, LETTERS, Config, from_upstream, model_section, our_name, to_upstream, unread
from .tensor_io import is_weights, read_state_dict

SETTINGS = "config.json"
OPTION_KEYS = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "d_head": "head_dim",
    "use_tokenshift_att": "token_shift",
    "use_value_residual": "value_residual",
    "swa_window_size": "window",
    "n_bswa_chunks": "window_chunks",
    "sink_len": "sinks",
    "state_min_len": "budget_minimum",
    "state_round_down": "budget_round",
    "state_growth_factor": "budget_factor",
    "state_growth_exponent": "budget_exponent",
    "state_saturation_n": "budget_saturation",
    "n_max_d_chunks": "budget_max_chunks",
    "kvm_use_merge_gate_keys": "gate_keys",
    "kvm_use_merge_gate_values": "gate_values",
    "kvm_apply_merge_gate_to_appends": "gate_appends",
    "kvm_apply_merge_gate_to_initial_state": "gate_initial",
    "kvm_use_head_temps": "temperatures",
    "ovq_max_centroids": "max_centroids",
}
"""Upstream's key -> our option, where the two mean the same."""
UNCAPPED = 10**9
"""Chunks that a state may have where nothing limits it: the paper's code asks for a number."""
MARK = "transformer.ln_emb.weight"
"""A tensor that every model of the paper's code has."""


def recognise(path: Path) -> str | None:
    """Recognise a folder by `token_mixer` in its config.json, a file by its tensors' names."""
    if is_weights(path):
        return f"tensor {MARK}" if MARK in read_state_dict(path)[0] else None
    return f"{SETTINGS} with token_mixer" if "token_mixer" in _read_config(path) else None


def read(path: Path, options: Options) -> Model:
    """Read a state dict with the config beside it, and `key=value` settings over that."""
    tensors, notes = read_state_dict(path)
    model = of_tensors(tensors, path, options)
    model.notes += notes
    return model


def of_tensors(tensors: Tensors, place: Path, options: Options) -> Model:
    """Convert tensors in upstream's names; the config lies at `place`, or beside that file."""
    settings = {key: yaml.safe_load(value) for key, value in options.settings.items()}
    config = Config(_read_config(place if place.is_dir() else place.parent) | settings)
    if not config:
        raise ConvertError(
            f"{place}: no {SETTINGS} beside it says how the model is built: put it there, or give its keys "
            "as key=value"
        )
    section = complete(model_section(config))
    model = fit(from_upstream(tensors, meta_model(section).state_dict()), section, place)
    model.source_names = {our_name(name): name for name in tensors if name not in unread(tensors)}
    if idle := sorted(config.keys() - config.used):
        model.notes.append(f"keys of the config that nothing here reads: {short_list(idle)}")
    model.dropped = dict.fromkeys(sorted(unread(tensors)), "nothing reads it in the paper's code")
    return model


def write(model: Model, folder: Path, write_shards: Callable[[Path, Tensors], None]) -> None:
    """Write config.json and upstream's state dict. NotSupported for what the paper's code does not have."""
    write_json(folder / SETTINGS, upstream_config(model.section))
    write_shards(folder, to_upstream(model.tensors))
    for name, content in model.tokenizer.items():
        (folder / name).write_bytes(content)


def upstream_config(section: ModelSection) -> dict[str, Any]:
    """Write a model section as an upstream config: the inverse of `model_section`.

    The config is translated back, and every difference is refused with NotSupported, naming the key.
    """
    letters = [spec.letter for spec in recipes.layer_specs(section)]
    layers = dict(zip(letters, _resolved(section), strict=True))
    mixers = {DEFAULT_LETTERS[letter]: mixer for mixer, letter in LETTERS.items()}
    if foreign := [layer["kind"] for layer in layers.values() if layer["kind"] not in mixers]:
        raise NotSupported(f"the paper's code has no {foreign[0]}; it has {', '.join(mixers)}")
    if len(layers) > 2:
        raise NotSupported(
            f"{len(layers)} kinds of layers ({section.pattern}); the paper's code mixes at most two"
        )
    alternate, main = letters[0], next((x for x in letters if x != letters[0]), letters[0])
    period = -1 if main == alternate else [*letters, alternate].index(alternate, 1)
    if period > 0 and letters != [main if layer % period else alternate for layer in range(len(letters))]:
        raise NotSupported(
            f"the pattern {section.pattern}: in the paper's code layers 0, n, 2n, ... are of one kind and "
            "all others of another"
        )
    own, other = layers[main], layers[alternate]
    config: dict[str, Any] = {
        "vocab_size": section.vocab_size,
        "hidden_size": section.hidden_size,
        "num_hidden_layers": len(letters),
        "ffn_expansion": section.ffn_expansion,
        "use_tokenshift_ffn": int(section.ffn_token_shift),
        "residual_scale": section.residual_scale,
        "logit_softcap": section.logit_softcap,
        "tie_word_embeddings": False,
        "token_mixer": mixers[own["kind"]],
        "alt_token_mixer": mixers[other["kind"]],
        "alt_layer_every": period,
    }
    if section.ffn_size is not None:
        config["ffn_expansion"] = section.ffn_size / section.hidden_size
    for prefix, layer, neighbour in (("", own, other), ("alt_", other, own)):
        config[f"{prefix}rope_partial_dim"] = layer.get("rotary_dim", neighbour.get("rotary_dim", 0))
        config[f"{prefix}rope_theta"] = layer.get("rotary_base", neighbour.get("rotary_base", 10000.0))
    for layer in layers.values():
        config |= _layer_config(layer)
    _refuse_losses(section, config)
    return config


def _resolved(section: ModelSection) -> list[dict[str, Any]]:
    """List kind and options of every layer, with the numbers that options left open come to."""
    layers = []
    for spec, mixer in zip(recipes.layer_specs(section), meta_model(section).mixers, strict=True):
        options = {"kind": spec.kind, **dataclasses.asdict(spec.options)}
        given = {"budget_max_chunks": UNCAPPED} | vars(mixer)
        layers.append({name: given.get(name) if x is None else x for name, x in options.items()})
    return layers


def _layer_config(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Write the options of one kind of layer as keys of an upstream config."""
    config = {key: layer[option] for key, option in OPTION_KEYS.items() if option in layer}
    config = {key: int(value) if isinstance(value, bool) else value for key, value in config.items()}
    if config.get("num_key_value_heads") == layer["num_heads"]:
        del config["num_key_value_heads"]  # the first release has no such key
    if layer["kind"] == "ovq":
        config |= dict.fromkeys(("ovq_chunk_size", "ovq_window_size"), layer["chunk"])
    elif "chunk" in layer:
        config["chunk_len"] = layer["chunk"]
    if layer["kind"] == "kvm":
        config["state_budget_mode"] = next(m for m, budget in BUDGETS.items() if budget == layer["budget"])
        config["kvm_use_vlens"] = int(layer["values"] == "radius")
    return config


def _refuse_losses(section: ModelSection, config: Mapping[str, Any]) -> None:
    """Raise NotSupported naming all that an upstream config does not say of a section."""
    back = complete(model_section(config))
    problems = [
        f"layer {layer}: {name} {here.get(name)!r}, there {there.get(name)!r}"
        for layer, (here, there) in enumerate(zip(_resolved(section), _resolved(back), strict=True))
        for name in (here if here["kind"] == there["kind"] else ("kind",))
        if here.get(name) != there.get(name)
    ]
    if ffn_width(section) != ffn_width(back):
        problems.append(f"feed-forward width {ffn_width(section)}, there {ffn_width(back)}")
    apart = ("pattern", "expanded", "layers", "ffn_size", "ffn_expansion", "init")
    for name, value in vars(section).items():
        if name not in apart and value != getattr(back, name):
            problems.append(f"model.{name} {value!r}, there {getattr(back, name)!r}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise NotSupported(f"the paper's code has no such model: {'; '.join(problems[:5])}{more}")


def _read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; empty where there is none."""
    if not (folder / SETTINGS).is_file():
        return {}
    try:
        found = json.loads((folder / SETTINGS).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{folder / SETTINGS} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


FORMAT = Format("a model of the Key-Value Means paper's code", recognise, read, write)

"""Hugging Face folders: those of our models, read and written, and those of transformers, read.

A folder of ours, which `AutoModelForCausalLM.from_pretrained` loads once `hybrid` is imported:

    config.json           HybridConfig: the model section, layer by layer
    model.safetensors     the weights, our names after "model.", or several files with an index
    tokenizer.model       our tokenizer
    tokenizer.json        the same for transformers, with tokenizer_config.json and generation_config.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.checkpoint.run import HF_PREFIX, TOKENIZER
from hybrid.convert.common import Format, Model, Options, Tensors, fit
from hybrid.convert.tensor_io import read_state_dict
from hybrid.data.tokenizer import ByteLevelTokenizer, Tokenizer
from hybrid.errors import ConvertError, DataError, NotSupported
from hybrid.files import write_json
from hybrid.recipe.config_json import CONFIG, MODEL_TYPE, config_of, read_config, section_of

TOKENIZER_FILES = (
    TOKENIZER, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What goes along unchanged; `generation_config.json` names the ids that end a text."""


def recognise(path: Path) -> str | None:
    """Recognise a folder by `model_type` in its config.json (the paper's code has `token_mixer` there)."""
    config = read_config(path) if path.is_dir() else {}
    kind = config.get("model_type")
    return f"{CONFIG} with model_type {kind}" if kind and "token_mixer" not in config else None


def read(path: Path, options: Options) -> Model:
    """Read a folder of ours, or of a pretrained transformer."""
    config = read_config(path)
    if options.settings or options.recipe:
        raise ConvertError(f"{path}: its {CONFIG} says how the model is built: change that, or set model.*")
    tensors, notes = read_state_dict(path)
    if config.get("model_type") != MODEL_TYPE:
        model = _pretrained(path, tensors)
    else:
        model = fit(tensors, section_of(config, path / CONFIG), path)
        model.source_names = {name: HF_PREFIX + name for name in model.tensors}
        model.tokenizer = _tokenizer_files(path)
        ours = model.tokenizer.get(TOKENIZER, b"")
        if ours and not ours.startswith(b"{"):  # a sentencepiece model, which the others are made from
            model.tokenizer = {TOKENIZER: ours}
    model.notes += notes
    return model


def _pretrained(path: Path, tensors: Tensors) -> Model:
    """Read a pretrained transformer; its tokenizer becomes our tokenizer.model, or the notes say why not."""
    from .pretrained import read_pretrained, special_ids

    model = read_pretrained(path, tensors)
    model.tokenizer = _tokenizer_files(path)
    if "generation_config.json" not in model.tokenizer and (special := special_ids(path)):
        model.tokenizer["generation_config.json"] = special
    model.tokenizer.pop(TOKENIZER, None)
    for name in (TOKENIZER, "tokenizer.json"):
        if TOKENIZER in model.tokenizer or not (path / name).is_file():
            continue
        try:
            model.tokenizer[TOKENIZER] = Tokenizer.load(path / name).model
        except DataError as error:
            model.notes.append(f"{name} cannot be used by hybrid generate and hybrid train: {error}")
    return model


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}


def write(model: Model, folder: Path, write_shards: Callable[[Path, Tensors], None]) -> None:
    """Write a folder of ours; a tokenizer that has no exact form for transformers is named in the notes."""
    config: dict[str, Any] = {"model_type": MODEL_TYPE, "architectures": ["HybridForCausalLM"]}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in model.tensors.values()}
    config["dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    files = dict(model.tokenizer)
    if TOKENIZER in files and "tokenizer.json" not in files:
        from .tokenizer import tokenizer_files

        ours = Tokenizer.of(files[TOKENIZER], TOKENIZER)
        special = {f"{name}_token_id": getattr(ours, f"{name}_id") for name in ("bos", "eos", "pad")}
        config |= special
        if beyond := list(range(ours.vocab_size, model.section.vocab_size or 0)):
            special["suppress_tokens"] = beyond  # rows of the embedding that stand for no id
        write_json(folder / "generation_config.json", special)
        try:
            files |= ours.files() if isinstance(ours, ByteLevelTokenizer) else tokenizer_files(ours)
        except NotSupported as error:
            model.notes.append(str(error))
    write_json(folder / CONFIG, config | config_of(model.section))
    write_shards(folder, {HF_PREFIX + name: tensor for name, tensor in model.tensors.items()})
    for name, content in files.items():
        (folder / name).write_bytes(content)


def logits(path: Path, ids: Tensor) -> Tensor:
    """Compute logits by transformers, which runs no code of the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits.float()


FORMAT = Format("a Hugging Face folder", recognise, read, write, logits)

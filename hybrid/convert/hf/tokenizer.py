"""Our sentencepiece tokenizer as the files that every tokenizer of transformers is loaded from."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Fast

from hybrid.data.tokenizer import PROBES, SPACE_MARK, Tokenizer
from hybrid.errors import NotSupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
"""Types of pieces in a sentencepiece model."""
TRIALS = 500
"""Texts of random pieces on which both tokenizers must agree."""


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Write `tokenizer.json` and `tokenizer_config.json`, whose ids are those of our tokenizer.

    Text begins with the begin id (`add_special_tokens=False` leaves it out); text that looks like a control
    symbol stays text. NotSupported where the ids of any probe differ.
    """
    fast = _fast(tokenizer)
    for text in _probes(tokenizer):
        ours, theirs = tokenizer.encode(text), fast.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise NotSupported(
                f"{tokenizer.origin} has no exact form for transformers: {text!r} is {ours}, there {theirs}"
            )
    bos, eos, pad = (fast.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "padding_side": "left",
        "split_special_tokens": True,  # text that looks like a control symbol is text
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": fast.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _fast(tokenizer: Tokenizer) -> Fast:
    """Build the tokenizer with spaces as spaces, so that U+2581 in a text is no piece but its bytes."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
    pieces = [(piece.piece.replace(SPACE_MARK, " "), piece.score, piece.type) for piece in proto.pieces]
    if any(kind == UNUSED for _, _, kind in pieces):
        raise NotSupported(
            f"{tokenizer.origin} has unused pieces, which transformers' tokenizers do not have"
        )
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise NotSupported(
            f"{tokenizer.origin} is no BPE model: the ids of others are not reproduced exactly"
        )
    vocabulary = {name: index for index, (name, _, _) in enumerate(pieces)}
    unknown = next(name for name, _, kind in pieces if kind == UNKNOWN)
    model = models.BPE(vocabulary, _merges(pieces), unk_token=unknown, byte_fallback=True)
    fast = Fast(model)
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    bos = pieces[tokenizer.bos_id][0]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_id)]
    )
    fast.add_special_tokens([name for name, _, kind in pieces if kind in (UNKNOWN, CONTROL)])
    fast.add_tokens([AddedToken(name, normalized=False) for name, _, kind in pieces if kind == USER_DEFINED])
    fast.encode_special_tokens = True
    return fast


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """List every pair of pieces that makes a piece, best score first."""
    normal = {name: score for name, score, kind in pieces if kind == NORMAL}
    ranked = sorted(normal, key=lambda name: -normal[name])
    return [
        (name[:border], name[border:])
        for name in ranked
        for border in range(1, len(name))
        if name[:border] in normal and name[border:] in normal
    ]


def _probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that are hard to tokenize, and many of random pieces side by side."""
    names = [tokenizer.bytes_of(token).decode(errors="replace") for token in range(tokenizer.vocab_size)]
    draw = random.Random(0)
    joined = ("".join(draw.choices(names, k=30)) for _ in range(TRIALS))
    return itertools.chain(PROBES, names, joined)

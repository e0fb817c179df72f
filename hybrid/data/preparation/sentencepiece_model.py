"""The few facts about a sentencepiece model file that its Python interface does not tell.

The file is one protocol buffer (sentencepiece's `sentencepiece_model.proto`): field 1 the pieces (1 text,
3 type), field 2 the trainer's settings (3 the model type). Read here directly, because the generated Python
class clashes with the copies other packages carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class ModelFacts:
    """What a model file says beside its scores."""

    pieces: list[tuple[str, int]]
    """Text and type of every id."""
    model_type: int


def read_facts(model: bytes) -> ModelFacts:
    """Pieces and model type of a serialised model. Raises ValueError when the bytes are no such file."""
    pieces: list[tuple[str, int]] = []
    model_type = UNIGRAM  # the proto's default
    for number, value in _fields(model):
        if number == 1 and isinstance(value, bytes):
            text, kind = "", NORMAL
            for inner, item in _fields(value):
                if inner == 1 and isinstance(item, bytes):
                    text = item.decode("utf-8")
                elif inner == 3 and isinstance(item, int):
                    kind = item
            pieces.append((text, kind))
        elif number == 2 and isinstance(value, bytes):
            for inner, item in _fields(value):
                if inner == 3 and isinstance(item, int):
                    model_type = item
    return ModelFacts(pieces, model_type)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of one protocol buffer message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > len(data):
            raise ValueError(f"cut at byte {len(data)}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"cut at byte {len(data)}")

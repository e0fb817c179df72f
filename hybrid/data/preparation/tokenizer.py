"""A lossless sentencepiece tokenizer: every text comes back byte for byte.

Text is encoded line by line, with the newline's id between lines: for BPE this gives the ids of the whole
text in about half the time. U+2581, which sentencepiece uses for a space, is encoded as its three bytes.
Text that looks like a control symbol (`<s>`) stays text. Lone surrogates are no text and are refused.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.files import replacing

from . import sentencepiece_model as facts

SPACE_MARK = "\u2581"

# Longer lines are cut for training only: sentencepiece leaves out lines over 2^20 bytes.
LONGEST_TRAINING_LINE = 100_000

TRAINING_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "max_sentence_length": 1048576,
    "user_defined_symbols": ["\n", "\t"],
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "minloglevel": 2,
}

# What a given tokenizer must bring back unchanged before it is used.
PROBES = (
    "plain words, twice  spaced",
    " one leading and trailing space ",
    "     five     ",
    "\ttab\t\ttab",
    "line\n\n\nlines\n",
    "carriage\r\nreturn\r",
    "nul\0nul",
    "\ufeffbyte order mark",
    "e\u0301 \u00e9 combining and composed",
    "\uff21\uff22\uff23 full width \u2026 \ufb01",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji \u4f60\u597d \u0418 \u05d0",
    "<s> </s> <unk> <pad> <0x41>",
    "\u00a0\u2003\u3000 spaces",
    "1234567890",
    SPACE_MARK + " mark " + SPACE_MARK,
)


@dataclass
class TrainingNotes:
    """What training left out of the tokenizer's sample (the text itself still round-trips)."""

    lines: int = 0
    lines_with_nul: int = 0


class Tokenizer:
    """Text to ids and back. `origin` names the model in messages.

    Attributes: `vocab_size`, `bos_id`, `eos_id` (a model without a begin id begins with its end id),
    `fingerprint` (the model file's SHA-256).
    """

    def __init__(self, model: bytes, origin: str = "the tokenizer") -> None:
        import sentencepiece

        self.model = model
        self.origin = origin
        try:
            pieces = facts.read_facts(model)
            if not pieces.pieces:
                raise ValueError("it has no pieces")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{origin} is not a sentencepiece model: {error}") from None
        self.vocab_size: int = self._processor.vocab_size()
        assert self.vocab_size == len(pieces.pieces)
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.eos_id, self.bos_id = self._borders()
        self._bytes = _piece_bytes(pieces)
        self._mark_ids = self._byte_ids(SPACE_MARK.encode(), pieces)
        self._newline = self._newline_id(pieces)
        self._check_lossless()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Raises DataError when the file is missing, no sentencepiece model, or not lossless."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}") from None
        return cls(model, f"tokenizer {path}")

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, path: str | Path, notes: TrainingNotes | None = None
    ) -> Tokenizer:
        """Train a BPE model of exactly `vocab_size` ids and write it to `path` (whole or not at all).

        Raises DataError when there is no text or the vocabulary does not fit it, naming the size that does.
        """
        tokenizer = cls(train_model(texts, vocab_size, notes), f"tokenizer {path}")
        tokenizer.save(path)
        return tokenizer

    def save(self, path: str | Path) -> None:
        with replacing(Path(path)) as file:
            file.write(self.model)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin and end ids. Raises DataError for lone surrogates."""
        _refuse_surrogates(text)
        if self._newline is None:
            return self._encode_marked(text)
        lines = text.split("\n")
        if SPACE_MARK in text:
            parts = [self._encode_marked(line) for line in lines]
        else:
            parts = self._processor.encode(lines, num_threads=1)
        ids = list(parts[0])
        for part in parts[1:]:
            ids.append(self._newline)
            ids += part
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of `ids`; begin, end and other control ids have none.

        Raises DataError for an id outside the vocabulary.
        """
        return b"".join(self.bytes_of(token) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD (ids made by `encode` have none)."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise DataError(f"id {token} is outside {self.origin}'s vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def stream(self) -> StreamDecoder:
        """A decoder that takes ids one by one."""
        return StreamDecoder(self)

    def _encode_marked(self, text: str) -> list[int]:
        """Ids of text that may hold U+2581."""
        first, *rest = text.split(SPACE_MARK)
        ids = list(self._processor.encode(first))
        for part in rest:
            ids += self._mark_ids
            ids += self._processor.encode(part)
        return ids

    def _borders(self) -> tuple[int, int]:
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        if bos < 0 and eos < 0:
            raise DataError(f"{self.origin} has neither a begin nor an end id; documents need one of them")
        return (eos if eos >= 0 else bos), (bos if bos >= 0 else eos)

    def _byte_ids(self, data: bytes, pieces: facts.ModelFacts) -> list[int]:
        ids = {text: token for token, (text, kind) in enumerate(pieces.pieces) if kind == facts.BYTE}
        try:
            return [ids[f"<0x{byte:02X}>"] for byte in data]
        except KeyError:
            raise DataError(
                f"{self.origin} has no byte fallback, so characters outside its vocabulary would be lost; "
                "train it with byte_fallback=True"
            ) from None

    def _newline_id(self, pieces: facts.ModelFacts) -> int | None:
        """The newline's id when encoding line by line is sure to give the whole text's ids, else None.

        Sure means: BPE (unigram's best path looks across lines), and no piece but one reaches over a newline.
        """
        if pieces.model_type != facts.BPE:
            return None
        if any("\n" in text and text != "\n" for text, _ in pieces.pieces):
            return None
        ids = self._processor.encode("\n")
        return ids[0] if len(ids) == 1 else None

    def _check_lossless(self) -> None:
        for probe in PROBES:
            back = self.decode(self.encode(probe))
            if back != probe:
                raise DataError(
                    f"{self.origin} is not lossless: {probe!r} comes back as {back!r}; it must be trained "
                    "with normalization_rule_name=identity, remove_extra_whitespaces=False, "
                    "add_dummy_prefix=False and byte_fallback=True"
                )


class StreamDecoder:
    """Ids in, whole characters out: bytes of an unfinished character wait for the next id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        """What is left: empty, or U+FFFD when the ids end inside a character."""
        return self._decoder.decode(b"", final=True)


def train_model(texts: Iterable[str], vocab_size: int, notes: TrainingNotes | None = None) -> bytes:
    """A serialised BPE model of `vocab_size` ids. Raises DataError as `Tokenizer.train`."""
    import io

    import sentencepiece

    notes = TrainingNotes() if notes is None else notes
    lines = _training_lines(texts, notes)
    if not lines:
        nul = f" ({notes.lines_with_nul} lines with NUL are left out)" if notes.lines_with_nul else ""
        raise DataError(
            f"no text to train the tokenizer on{nul}: every source is empty or held out for validation, or "
            "data.tokenizer_sample_bytes is too small"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **TRAINING_OPTIONS
        )
    except RuntimeError as error:
        raise DataError(_training_fault(str(error), vocab_size)) from None
    return model.getvalue()


def _training_fault(message: str, vocab_size: int) -> str:
    """sentencepiece's complaint in words."""
    if found := re.search(r"Please set it to a value <= (\d+)", message):
        return (
            f"data.vocab_size is {vocab_size}, but the text allows at most {found[1]}; use that or more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        needed = f"the text's characters alone need {found[1]}; use that or more"
        return f"data.vocab_size is {vocab_size}, but {needed}"
    return f"training a tokenizer of {vocab_size} ids failed: {message}"


def _training_lines(texts: Iterable[str], notes: TrainingNotes) -> list[str]:
    """Lines as sentencepiece takes them: no NUL, no U+2581, none empty, none too long."""
    lines: list[str] = []
    for text in texts:
        _refuse_surrogates(text)
        for line in text.split("\n"):
            notes.lines += 1
            if "\0" in line:
                notes.lines_with_nul += 1
                continue
            for part in line.split(SPACE_MARK):
                pieces = (
                    part[at : at + LONGEST_TRAINING_LINE] for at in range(0, len(part), LONGEST_TRAINING_LINE)
                )
                lines.extend(piece for piece in pieces if piece)
    return lines


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is the lone surrogate {text[error.start]!r}, no text"
        ) from None


def _piece_bytes(pieces: facts.ModelFacts) -> Sequence[bytes]:
    """The UTF-8 bytes every id stands for."""
    table = []
    for text, kind in pieces.pieces:
        if kind == facts.BYTE:
            table.append(bytes([int(text[3:5], 16)]))
        elif kind in (facts.CONTROL, facts.UNKNOWN):
            table.append(b"")
        else:
            table.append(text.replace(SPACE_MARK, " ").encode())
    return table

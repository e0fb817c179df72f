"""A lossless sentencepiece tokenizer: every text comes back byte for byte.

Text is encoded line by line, with the newline's id between lines: for BPE this gives the ids of the whole
text in about half the time. U+2581, which sentencepiece uses for a space, is encoded as its three bytes.
Text that looks like a control symbol (`<s>`) stays text. Lone surrogates are no text and are refused.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from hybrid.errors import DataError
from hybrid.files import replacing

SPACE_MARK = "\u2581"

# What a tokenizer must bring back unchanged before it is used.
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


class Tokenizer:
    """A sentencepiece model that encodes text to ids and decodes ids to the same text.

    `model` is the model file's content, `origin` names it in messages. Raises DataError when it is no
    sentencepiece model or loses text.

    Attributes: `vocab_size`, `bos_id`, `eos_id` (a model without a begin id begins with its end id), `pad_id`
    (the end id where there is none; never used here), `fingerprint` (the model file's SHA-256).
    """

    def __init__(self, model: bytes, origin: str = "the tokenizer") -> None:
        self.model = model
        self.origin = origin
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self._pieces: list[str] = self._processor.id_to_piece(list(range(self._processor.vocab_size())))
            if not self._pieces:
                raise ValueError("it has no pieces")
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{origin} is not a sentencepiece model: {error}") from None
        self.vocab_size = len(self._pieces)
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.eos_id, self.bos_id = self._borders()
        self.pad_id = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos_id
        self._bytes = [self._piece_bytes(token) for token in range(self.vocab_size)]
        self._mark_ids = [self._byte_id(byte) for byte in SPACE_MARK.encode()]
        self._newline = self._newline_id()
        self._check_lossless()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a model file. Raises DataError when it is missing, no sentencepiece model, or not lossless."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}") from None
        return cls(model, f"tokenizer {path}")

    def save(self, path: str | Path) -> None:
        """Write the model file, whole or not at all."""
        with replacing(Path(path)) as file:
            file.write(self.model)

    def encode(self, text: str) -> list[int]:
        """Encode `text`, without begin and end ids. Raises DataError for lone surrogates."""
        refuse_surrogates(text)
        if self._newline is None:
            return self._encode_marked(text)
        lines = text.split("\n")
        if SPACE_MARK in text:
            encoded = [self._encode_marked(line) for line in lines]
        else:
            encoded = self._processor.encode(lines, num_threads=1)
        ids = list(encoded[0])
        for line in encoded[1:]:
            ids.append(self._newline)
            ids += line
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Join the UTF-8 bytes of `ids`; begin, end and other control ids have none.

        Raises DataError for an id outside the vocabulary.
        """
        return b"".join(self.bytes_of(token) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`; bytes that form no character become U+FFFD (ids made by `encode` have none)."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Look up the UTF-8 bytes of one id. Raises DataError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise DataError(f"id {token} is outside {self.origin}'s vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def stream(self) -> StreamDecoder:
        """Make a decoder that takes ids one by one."""
        return StreamDecoder(self)

    def _encode_marked(self, text: str) -> list[int]:
        """Encode text that may hold U+2581."""
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

    def _piece_bytes(self, token: int) -> bytes:
        piece = self._pieces[token]
        if self._processor.is_byte(token):  # <0x41>
            return bytes([int(piece[3:5], 16)])
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return b""
        return piece.replace(SPACE_MARK, " ").encode()

    def _byte_id(self, byte: int) -> int:
        token = self._processor.piece_to_id(f"<0x{byte:02X}>")
        if not self._processor.is_byte(token):
            raise DataError(
                f"{self.origin} has no byte fallback, so characters outside its vocabulary would be lost; "
                "train it with byte_fallback=True"
            )
        return token

    def _newline_id(self) -> int | None:
        """Find the newline's id when encoding line by line gives the whole text's ids, else None.

        It does not for unigram models, the only ones with an n-best encoding (their best path looks across
        lines), nor where a piece reaches over a newline.
        """
        try:
            if self._processor.nbest_encode("a", nbest_size=1):
                return None
        except RuntimeError:  # "NBestEncode is not available for the current model"
            pass
        if any("\n" in piece and piece != "\n" for piece in self._pieces):
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
    """Decodes ids one by one to whole characters: bytes of an unfinished one wait for the next id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Decode one more id."""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        """Return what is left: nothing, or U+FFFD when the ids end inside a character."""
        return self._decoder.decode(b"", final=True)


def refuse_surrogates(text: str) -> None:
    """Raise DataError when `text` holds a lone surrogate, which no UTF-8 can say."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is the lone surrogate {text[error.start]!r}, no text"
        ) from None

"""Lossless tokenizers, sentencepiece's and byte-level ones: every text comes back byte for byte.

With sentencepiece, text is encoded line by line, with the newline's id between lines: for BPE this gives the
ids of the whole text in about half the time. U+2581, which it uses for a space, becomes three byte ids. Text
that looks like a control symbol (`<s>`) stays text. Lone surrogates are no text and are refused.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from hybrid.errors import DataError
from hybrid.files import replacing

SPACE_MARK = "\u2581"

SPECIAL = ("bos_token", "eos_token", "pad_token")
"""Special tokens of a byte-level tokenizer, as transformers names them."""

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

    _LOSSLESS = (
        "it must be trained with normalization_rule_name=identity, remove_extra_whitespaces=False, "
        "add_dummy_prefix=False and byte_fallback=True"
    )

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

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Read a tokenizer: a file that `save` wrote, a sentencepiece model, a `tokenizer.json` of Hugging
        Face with the `tokenizer_config.json` beside it, or a folder with one of them.

        Raises DataError when there is none, or it is not lossless.
        """
        path = Path(path)
        if path.is_dir():
            places = [path / name for name in ("tokenizer.model", "tokenizer.json")]
            path = next((place for place in places if place.exists()), places[0])
        try:
            model = path.read_bytes()
            if model.startswith(b"{"):
                model = byte_level_model(model, path.parent)
            return Tokenizer.of(model, f"tokenizer {path}")
        except OSError as error:
            raise DataError(f"tokenizer {error.filename}: {error.strerror}") from None

    @staticmethod
    def of(model: bytes, origin: str) -> Tokenizer:
        """Make the tokenizer whose `model` this is."""
        return (ByteLevelTokenizer if model.startswith(b"{") else Tokenizer)(model, origin)

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

    def _check_lossless(self, probes: Sequence[str] = PROBES) -> None:
        for probe in probes:
            back = self.decode(self.encode(probe))
            if back != probe:
                raise DataError(
                    f"{self.origin} is not lossless: {probe!r} comes back as {back!r}; {self._LOSSLESS}"
                )


class ByteLevelTokenizer(Tokenizer):
    """A byte-level tokenizer of Hugging Face (GPT-2's kind, as of Llama 3, Qwen and SmolLM), losslessly.

    `model` is what `byte_level_model` makes. Text that looks like a special token stays text; a normalizer to
    NFC, which would change text, is left out. Needs the package `tokenizers`, of the extra `hf`.
    """

    _LOSSLESS = "no normalizer (but NFC) and no prefix space may change text"

    def __init__(self, model: bytes, origin: str = "the tokenizer") -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise DataError(f"{origin} needs the package tokenizers: pip install 'kvm-hybrid[hf]'") from None
        self.model, self.origin = model, origin
        self.fingerprint = hashlib.sha256(model).hexdigest()
        content: Any = json.loads(model)
        if "ByteLevel" not in json.dumps(content["tokenizer"].get("decoder")):
            raise DataError(f"{origin} is no byte-level tokenizer: others lose text")
        if (content["tokenizer"].get("normalizer") or {}).get("type") == "NFC":
            content["tokenizer"]["normalizer"] = None
        try:
            self._fast = Fast.from_str(json.dumps(content["tokenizer"]))
        except Exception as error:  # tokenizers raises nothing narrower
            raise DataError(f"{origin} cannot be read: {error}") from None
        self._fast.encode_special_tokens = True
        self._fast.no_truncation()
        self._fast.no_padding()
        self.special = {name: content[name] for name in SPECIAL if content[name] is not None}
        ids: Any = {name: self._fast.token_to_id(token) for name, token in self.special.items()}
        if unknown := [token for name, token in self.special.items() if ids[name] is None]:
            raise DataError(f"{origin} has no id for {unknown[0]!r}, which its configuration names")
        if not ids.keys() & {"bos_token", "eos_token"}:
            raise DataError(f"{origin} has neither a begin nor an end id; documents need one of them")
        self.eos_id = ids.get("eos_token", ids.get("bos_token"))
        self.bos_id = ids.get("bos_token", self.eos_id)
        self.pad_id = ids.get("pad_token", self.eos_id)
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._bytes = [b""] * self.vocab_size
        byte_of = _byte_level_alphabet()
        for token, index in vocabulary.items():
            self._bytes[index] = bytes(byte_of[c] for c in token if c in byte_of)
        for index, added in self._fast.get_added_tokens_decoder().items():
            self._bytes[index] = b"" if added.special else added.content.encode()
            self._check_lossless((f"a {added.content} b",))
        self._check_lossless()

    def encode(self, text: str) -> list[int]:
        refuse_surrogates(text)
        return self._fast.encode(text, add_special_tokens=False).ids

    def files(self) -> dict[str, bytes]:
        """Write the files that transformers reads."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", **self.special}
        parts = {"tokenizer.json": json.loads(self.model)["tokenizer"], "tokenizer_config.json": config}
        return {name: json.dumps(part, indent=2, ensure_ascii=False).encode() for name, part in parts.items()}


def byte_level_model(content: bytes, folder: Path) -> bytes:
    """Join a `tokenizer.json` with the special tokens that the configuration in its folder names, as one
    file; such a file comes back unchanged. Raises DataError for what is neither."""
    try:
        found = json.loads(content)
        if found.keys() == {"tokenizer", *SPECIAL}:
            return content
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        special = {name: config.get(name) for name in SPECIAL}
        special = {name: x["content"] if isinstance(x, dict) else x for name, x in special.items()}
        return json.dumps({"tokenizer": found, **special}, sort_keys=True).encode()
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(f"{folder}/tokenizer.json, or its configuration, is damaged ({error})") from None


def _byte_level_alphabet() -> dict[str, int]:
    """Map the characters of byte-level tokenizers to bytes: printable ones are themselves, the others count
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


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

"""Prompts in, continuations out: what `hybrid generate` reads and how it shows text while it grows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import UserError
from hybrid.text import decode

if TYPE_CHECKING:
    from hybrid.generate import Continuation
    from hybrid.generate.saved_state import SavedState


class PromptError(UserError):
    """Prompts that cannot be read."""


def read_prompts(texts: Sequence[str], file: str | None, separator: str | None) -> list[str]:
    """Collect a call's prompts: `texts` ("-" is standard input without its last line end), then `file`'s.

    A file holds one prompt a line, blank lines skipped. With `separator` its prompts may span lines and stand
    between lines that read exactly `separator`. Without texts and file there is one empty prompt.

    Raises PromptError when a file holds no prompt, is not UTF-8, or a separator comes without a file.
    """
    if "-" in texts and sys.stdin is None:
        raise PromptError("standard input is closed, so --prompt - cannot be read")
    prompts = [_decode(sys.stdin.buffer.read(), "standard input") if text == "-" else text for text in texts]
    if file is None:
        if separator is not None:
            raise PromptError("--separator belongs to --prompts-file, which is not given")
        return prompts or [""]
    found = split_prompts(_decode(Path(file).read_bytes(), file), separator)
    if not found:
        raise PromptError(f"{file} holds no prompt")
    return prompts + found


def _decode(data: bytes, name: str) -> str:
    """Decode a text without its last line end; PromptError when it is none."""
    try:
        text = decode(data)
    except ValueError as error:
        raise PromptError(f"{name} {error}") from None
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def split_prompts(text: str, separator: str | None) -> list[str]:
    """Split a file's text into prompts, see `read_prompts`; a carriage return at a line's end is dropped."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if separator is None:
        return [line for line in lines if line.strip()]
    prompts: list[list[str]] = [[]]
    for line in lines:
        if line == separator.removesuffix("\r"):
            prompts.append([])
        else:
            prompts[-1].append(line)
    return [joined for part in prompts if (joined := "\n".join(part)).strip()]


def read_state(load: str | None, save: str | None, prompts: int, samples: int) -> SavedState | None:
    """Where the file `load` goes on from, or None without it.

    Raises PromptError when so many prompts and samples cannot go on from one state or be kept in one, or
    `save` cannot be written; StateError when `load` holds no text's state.
    """
    if save and prompts * samples > 1:
        raise PromptError(
            f"--save-state keeps one text, but {prompts} prompts x {samples} samples are asked for"
        )
    if save and (Path(save).is_dir() or not Path(save).parent.is_dir()):
        raise PromptError(f"--save-state {save}: it must be a file in a folder that exists")
    if not load:
        return None
    if prompts > 1:
        raise PromptError(f"--load-state goes on with one prompt, but {prompts} are given")
    from hybrid.generate.saved_state import SavedState

    return SavedState.load(load)


class Printer:
    """Shows continuations in order: the first unfinished one as it grows, later ones in their turn."""

    def __init__(self, prompts: Sequence[str], samples: int) -> None:
        self._waiting = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)]
        self._held = {key: prompts[key[0]] for key in self._waiting}
        self._ended: set[tuple[int, int]] = set()
        self._titles = len(self._waiting) > 1
        self._open()

    def text(self, prompt: int, sample: int, text: str) -> None:
        """Show more of one continuation, or keep it until its turn."""
        if (prompt, sample) == self._waiting[0]:
            self._write(text)
        else:
            self._held[prompt, sample] += text

    def end(self, continuation: Continuation) -> None:
        """Close a continuation that is complete; later ones move up."""
        self._ended.add((continuation.prompt, continuation.sample))
        while self._waiting and self._waiting[0] in self._ended:
            self._write("\n")
            self._waiting.pop(0)
            self._open()

    def _open(self) -> None:
        if self._waiting:
            key = self._waiting[0]
            title = f"--- prompt {key[0] + 1}, sample {key[1] + 1} ---\n" if self._titles else ""
            self._write(title + self._held.pop(key))

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

"""What the letters of a pattern mean: `model.layers` and `model.defaults` -> one `LayerSpec` per layer."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

from .coerce import coerce, shown
from .pattern import DEFAULT_LETTERS, PatternError, compress, expand
from .reader import RecipeError
from .schema import ModelSection


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a model."""

    letter: str
    kind: str
    options: Any
    """An instance of the kind's `Options`; layers of one letter share it."""


class Problem(NamedTuple):
    key: tuple[str, ...]  # below `model`
    words: str


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' for an unknown name, or the list of what is known."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known) or 'none'}"


def layer_specs(model: ModelSection) -> list[LayerSpec]:
    """The layers of a model, first to last.

    Raises:
        RecipeError: with everything that is wrong with pattern, depth, letters, kinds and options.
    """
    table = LayerTable(model)
    if table.problems:
        raise RecipeError([f"model.{'.'.join(key)}: {words}" for key, words in table.problems])
    return table.specs()


class LayerTable:
    """Letters bound to kinds and options, and the pattern in these letters; faults are in `problems`."""

    def __init__(self, model: ModelSection) -> None:
        self.model = model
        self.problems: list[Problem] = []
        self.kinds: dict[str, str] = {}
        self.options: dict[str, Any] = {}
        self.used_defaults: set[str] = set()
        self.own = self._own_letters()
        self.letters = self._expand()
        for letter in sorted({*self.letters, *self.own}):
            self._bind(letter)
        self._check_defaults()
        self._check_sites()

    def specs(self) -> list[LayerSpec]:
        bound = {
            letter: LayerSpec(letter, self.kinds[letter], self.options[letter])
            for letter in set(self.letters)
        }
        return [bound[letter] for letter in self.letters]

    def complete(self) -> dict[str, dict[str, Any]]:
        """Letter -> kind and every option, for all letters of the pattern and the table."""
        return {
            letter: {"kind": self.kinds[letter], **dataclasses.asdict(options)}
            for letter, options in sorted(self.options.items())
        }

    def _problem(self, words: str, *key: str) -> None:
        self.problems.append(Problem(key, words))

    def _own_letters(self) -> dict[str, dict[str, Any]]:
        own = {}
        for letter, entry in self.model.layers.items():
            if len(letter) != 1 or not "A" <= letter <= "Z":
                self._problem("a layer letter is one of A-Z", "layers", letter)
            elif entry is None:
                continue  # taken out by a file further up
            elif not isinstance(entry, dict):
                self._problem("expected a table such as {kind: kvm, chunk: 256}", "layers", letter)
            else:
                own[letter] = dict(entry)
        return own

    def _expand(self) -> list[str]:
        model = self.model
        legal = {
            *DEFAULT_LETTERS,
            *(letter for letter in self.model.layers if self.model.layers[letter] is not None),
        }
        try:
            letters = expand(model.pattern, legal)
        except PatternError as error:
            self._problem(str(error), "pattern")
            return []
        if model.depth is not None and model.depth != len(letters):
            self._problem(
                f"says {model.depth} layers, but model.pattern {compress(letters)!r} has {len(letters)}; "
                "correct one of them (depth: null takes the pattern's)",
                "depth",
            )
        if model.expanded is not None and model.expanded != letters:
            listed = " ".join(model.expanded[:40])
            self._problem(
                f"lists {len(model.expanded)} layers ({listed}), but model.pattern {compress(letters)!r} has "
                f"{len(letters)}; a saved recipe's pattern changes with model.expanded=null model.depth=null",
                "expanded",
            )
        return letters

    def _bind(self, letter: str) -> None:
        from hybrid.layers import kinds  # imports torch

        entry = dict(self.own.get(letter, {}))
        kind = entry.pop("kind", None) or DEFAULT_LETTERS.get(letter)
        key = ("layers", letter)
        known = kinds()
        if kind is None:
            self._problem(f"needs a kind: {', '.join(known)}", *key)
        elif not isinstance(kind, str):
            self._problem(f"expected the name of a kind, found {shown(kind)}", *key, "kind")
        elif kind not in known:
            by_default = {kind: f" (letter {letter})" for letter, kind in DEFAULT_LETTERS.items()}
            available = ", ".join(name + by_default.get(name, "") for name in known)
            what = f"kind {kind!r} is not available{_close(kind, known)}; available: {available}"
            self._problem(what, *key, *(["kind"] if "kind" in self.own.get(letter, {}) else []))
        else:
            self.kinds[letter] = kind
            self._build_options(letter, known[kind].Options, entry)

    def _build_options(self, letter: str, options: type, entry: dict[str, Any]) -> None:
        before = len(self.problems)
        fields = option_types(options)
        values: dict[str, Any] = {}
        for name, value in self.model.defaults.items():
            if name in fields and name not in entry:
                self.used_defaults.add(name)
                self._coerce(value, fields[name], values, name, "defaults", name)
        for name, value in entry.items():
            if name in fields:
                self._coerce(value, fields[name], values, name, "layers", letter, name)
            else:
                self._problem(
                    f"{self.kinds[letter]} has no option {name!r}{nearest(name, ['kind', *fields])}",
                    *("layers", letter, name),
                )
        missing = [
            field.name
            for field in dataclasses.fields(options)
            if field.init and field.name not in {*values, *entry, *self.model.defaults}
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        for name in missing:
            self._problem(f"{self.kinds[letter]} needs a value here", "layers", letter, name)
        if len(self.problems) > before:
            return
        try:
            self.options[letter] = options(**values)
        except ValueError as error:
            self._problem(f"({self.kinds[letter]}) {error}", "layers", letter)

    def _coerce(self, value: Any, kind: Any, values: dict[str, Any], name: str, *key: str) -> None:
        try:
            values[name] = coerce(value, kind)
        except ValueError as error:
            problem = Problem(key, str(error))
            if problem not in self.problems:
                self.problems.append(problem)

    def _check_defaults(self) -> None:
        """A default that no kind has is a slip of the pen; one for a kind not in this pattern is not."""
        from hybrid.layers import kinds

        known = {name for mixer in kinds().values() for name in option_types(mixer.Options)}
        for name in self.model.defaults:
            if name not in known:
                self._problem(f"no kind of layer has this option{nearest(name, known)}", "defaults", name)

    def _check_sites(self) -> None:
        """What the kinds refuse: options that do not fit the hidden size, unequal shared values."""
        from hybrid.layers import LayerError, Site, mixer_class

        site = Site(self.model.hidden_size, 0, max(1, len(self.letters)))
        widths: dict[str, tuple[str, int]] = {}
        for letter in dict.fromkeys([*self.letters, *self.options]):
            if letter not in self.options:
                continue  # said already
            kind, options = self.kinds[letter], self.options[letter]
            mixer = mixer_class(kind)
            try:
                mixer.check(options, site)
                width = mixer.value_width(options, site)
            except LayerError as error:
                self._problem(f"({kind}) {error}", "layers", letter)
                continue
            if width is None or letter not in self.letters:
                continue
            first, expected = widths.setdefault(kind, (letter, width))
            if width != expected:
                self._problem(
                    f"its values are {width} wide, but those of {first}, the first {kind} layer, which "
                    f"all of the kind share, are {expected}; make them equal or switch the sharing off",
                    *("layers", letter),
                )

    def sharding_problems(self, size: int, tokens: int) -> list[str]:
        """Why `size` ranks cannot share sequences of `tokens`, by letter; the table has no faults."""
        from hybrid.layers import LayerError, Site, mixer_class

        found = []
        for letter in dict.fromkeys(self.letters):
            site = Site(self.model.hidden_size, self.letters.index(letter), len(self.letters))
            try:
                mixer_class(self.kinds[letter]).check_sharding(self.options[letter], site, size, tokens)
            except LayerError as error:
                found.append(f"{size} ranks per sequence: {error}")
        return found


def option_types(options: type) -> dict[str, Any]:
    """Option name -> declared type."""
    hints = typing.get_type_hints(options)
    return {field.name: hints[field.name] for field in dataclasses.fields(options) if field.init}


def _close(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""

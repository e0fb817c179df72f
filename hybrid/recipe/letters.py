"""What the letters of a pattern mean: `model.layers` and `model.defaults` -> one `LayerSpec` per layer."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection, Iterator
from typing import Any

from hybrid import layers
from hybrid.layers.errors import LayerError, did_you_mean

from .coerce import coerce, shown
from .pattern import DEFAULT_LETTERS, PatternError, compress, expand
from .problems import Problem, RecipeError, Tree
from .schema import ModelSection

_LONG = 2**20
"""Tokens from which on a state that doubles with the text is one that keeps every token."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a model."""

    letter: str
    kind: str
    options: Any
    """An instance of the kind's `Options`; layers of one letter share it."""


def layer_specs(model: ModelSection) -> list[LayerSpec]:
    """List the layers of a model, first to last.

    Raises:
        RecipeError: with everything that is wrong with pattern, depth, letters, kinds and options.
    """
    table = LayerTable(model)
    if table.problems:
        raise RecipeError(table.problems)
    return [table.specs[letter] for letter in table.letters]


class LayerTable:
    """The pattern's letters bound to kinds and options; what is wrong with them is in `problems`."""

    def __init__(self, model: ModelSection) -> None:
        self.model = model
        self.problems: list[Problem] = []
        self.specs: dict[str, LayerSpec] = {}
        """By letter, for the letters of the pattern and of `model.layers` that are right."""
        self.used_defaults: set[str] = set()
        own = {letter: entry for letter, entry in model.layers.items() if entry is not None}
        self.letters = self._expand({*DEFAULT_LETTERS, *own})
        for letter in sorted({*self.letters, *own}):
            entry = own.get(letter, {})
            if not re.fullmatch("[A-Z]", letter):
                self._problem(f"layers.{letter}", "a layer letter is one of A-Z")
            elif not isinstance(entry, dict):
                self._problem(f"layers.{letter}", "expected a table such as {kind: kvm, chunk: 256}")
            else:
                self._bind(letter, entry)
        self._check_defaults()
        self._check_sites()

    def fill(self) -> None:
        """Write what was found into the model's section: every option, the layers and their count."""
        self.model.layers = {
            letter: {"kind": spec.kind, **dataclasses.asdict(spec.options)}
            for letter, spec in sorted(self.specs.items())
        }
        self.model.defaults = {}
        self.model.expanded, self.model.depth = self.letters, len(self.letters)

    def sharding_problems(self, ranks: int, tokens: int) -> Iterator[Problem]:
        """Say why sequences of `tokens` tokens cannot be sharded over `ranks` ranks."""
        fits = True
        for letter in dict.fromkeys(self.letters) if ranks > 1 else ():
            spec = self.specs[letter]
            try:
                layers.mixer_class(spec.kind).check_sharding(spec.options, self._site(letter), ranks, tokens)
            except LayerError as error:
                fits = False
                yield Problem("parallel.sequence", f"{ranks} ranks per sequence: {error}")
        if fits and ranks > 1 and tokens % ranks:
            words = f"{tokens} tokens (data.context) / {ranks} ranks per sequence does not divide"
            yield Problem("parallel.sequence", words)

    def tbptt_problems(self, chunks: int, tokens: int) -> Iterator[Problem]:
        """Say which layers keep every token, so that `chunks` chunks of a sequence do not bound memory."""
        import torch  # the worker processes of `hybrid prepare` read recipes without it

        for letter in dict.fromkeys(self.letters) if chunks > 1 else ():
            spec, site = self.specs[letter], self._site(letter)
            with torch.device("meta"):
                mixer = layers.mixer_class(spec.kind)(spec.options, site)
            if mixer.state_bytes(2 * _LONG) < 1.9 * mixer.state_bytes(_LONG):
                continue
            whole, chunk = mixer.state_bytes(tokens), mixer.state_bytes(-(-tokens // chunks))
            yield Problem(
                "train.tbptt_chunks",
                f"is {chunks}, but layer {site.layer} ('{letter}', {spec.kind}) keeps every token: its state "
                f"has {whole:,} bytes a sequence after data.context {tokens:,} tokens and {chunk:,} after a "
                "chunk. Chunks bound the memory only where no layer's state grows like the text; allowed "
                "with this pattern: 1",
            )

    def _problem(self, key: str, words: str) -> None:
        problem = Problem(f"model.{key}", words)
        if problem not in self.problems:  # a default is read for every letter
            self.problems.append(problem)

    def _site(self, letter: str) -> layers.Site:
        """Name the place of the letter's first layer; of the model's first where the pattern has none."""
        index = self.letters.index(letter) if letter in self.letters else 0
        return layers.Site(self.model.hidden_size, index, max(1, len(self.letters)))

    def _expand(self, known: Collection[str]) -> list[str]:
        model = self.model
        try:
            letters = expand(model.pattern, known)
        except PatternError as error:
            self._problem("pattern", str(error))
            return []
        has = f"but model.pattern {compress(letters)!r} has {len(letters)}"
        if model.depth is not None and model.depth != len(letters):
            fix = "correct one of them (depth: null takes the pattern's)"
            self._problem("depth", f"says {model.depth} layers, {has}; {fix}")
        if model.expanded is not None and model.expanded != letters:
            lists = f"lists {len(model.expanded)} layers ({' '.join(model.expanded[:40])})"
            fix = "a saved recipe's pattern changes with model.expanded=null model.depth=null"
            self._problem("expanded", f"{lists}, {has}; {fix}")
        return letters

    def _bind(self, letter: str, entry: Tree) -> None:
        key, known = f"layers.{letter}", layers.kinds()
        kind = entry.get("kind") or DEFAULT_LETTERS.get(letter)
        if kind is None:
            self._problem(key, f"needs a kind: {', '.join(known)}")
        elif not isinstance(kind, str):
            self._problem(f"{key}.kind", f"expected the name of a kind, found {shown(kind)}")
        elif kind not in known:
            by_default = {kind: f" (letter {letter})" for letter, kind in DEFAULT_LETTERS.items()}
            available = ", ".join(name + by_default.get(name, "") for name in known)
            words = f"kind {kind!r} is not available{did_you_mean(kind, known)}; available: {available}"
            self._problem(f"{key}.kind" if "kind" in entry else key, words)
        else:
            given = {name: value for name, value in entry.items() if name != "kind"}
            self._build_options(letter, kind, known[kind].Options, given)

    def _build_options(self, letter: str, kind: str, options: type, given: Tree) -> None:
        kinds = option_types(options)
        used = {name: v for name, v in self.model.defaults.items() if name in kinds and name not in given}
        self.used_defaults |= used.keys()
        values: Tree = {}
        for name, value in (used | given).items():
            key = f"defaults.{name}" if name in used else f"layers.{letter}.{name}"
            if name not in kinds:
                self._problem(key, f"{kind} has no option {name!r}{_nearest(name, ['kind', *kinds])}")
                continue
            try:
                values[name] = coerce(value, kinds[name])
            except ValueError as error:
                self._problem(key, str(error))
        required = {
            field.name
            for field in dataclasses.fields(options)
            if field.init and field.default is field.default_factory is dataclasses.MISSING
        }
        for name in sorted(required - (used | given).keys()):
            self._problem(f"layers.{letter}.{name}", f"{kind} needs a value here")
        if not values.keys() >= required | used.keys() | given.keys():
            return
        try:
            self.specs[letter] = LayerSpec(letter, kind, options(**values))
        except ValueError as error:
            self._problem(f"layers.{letter}", f"({kind}) {error}")

    def _check_defaults(self) -> None:
        """Refuse a default that no kind has; one for a kind that is not in the pattern may stand."""
        known = {name for mixer in layers.kinds().values() for name in option_types(mixer.Options)}
        for name in self.model.defaults:
            if name not in known:
                self._problem(f"defaults.{name}", f"no kind of layer has this option{_nearest(name, known)}")

    def _check_sites(self) -> None:
        """Refuse what the kinds do: options that do not fit the hidden size, unequal shared values."""
        widths: dict[str, tuple[str, int]] = {}
        for letter in sorted(self.specs, key=lambda letter: self._site(letter).layer):
            kind, options = self.specs[letter].kind, self.specs[letter].options
            mixer, site = layers.mixer_class(kind), self._site(letter)
            try:
                mixer.check(options, site)
                width = mixer.value_width(options, site)
            except LayerError as error:
                self._problem(f"layers.{letter}", f"({kind}) {error}")
                continue
            if width is None or letter not in self.letters:
                continue
            first, expected = widths.setdefault(kind, (letter, width))
            if width != expected:
                self._problem(
                    f"layers.{letter}",
                    f"its values are {width} wide, but those of {first}, the first {kind} layer, which "
                    f"all of the kind share, are {expected}; make them equal or switch the sharing off",
                )


def option_types(options: type) -> dict[str, Any]:
    """Map the names of options to their declared types."""
    hints = typing.get_type_hints(options)
    return {field.name: hints[field.name] for field in dataclasses.fields(options) if field.init}


def _nearest(name: str, known: Collection[str]) -> str:
    """Suggest the nearest known name, or list what is known."""
    return did_you_mean(name, sorted(known)) or f"; known: {', '.join(sorted(known)) or 'none'}"

"""Recipes: defaults < recipe file (and what it is based on) < `key=value` on the command line -> `Recipe`.

Tables are merged key by key, everything else, lists included, is replaced. Null in place of a source
(`data.sources.NAME`) or a letter (`model.layers.X`) takes the inherited one out. A value may refer to another
key as `${section.key}`. Everything wrong with a recipe is found and listed before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
)

from . import carry
from . import rules as recipe_check
from .coerce import coerce, looks_typed, shown
from .letters import LayerSpec, LayerTable, layer_specs
from .reader import Key, RecipeError, Source, Tree, dotted, shipped
from .rules import Geometry
from .schema import RENAMED, Recipe, SourceSection

__all__ = [
    "Geometry",
    "LayerSpec",
    "Recipe",
    "RecipeError",
    "batch_geometry",
    "check",
    "layer_specs",
    "load",
    "save",
    "shipped",
    "to_yaml",
]

# what other programs call our keys; only used to say what was probably meant
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "grad_clip": "optimizer.clip",
    "beta1": "optimizer.betas",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "num_layers": "model.depth",
    "n_layer": "model.depth",
    "seq_len": "data.context",
    "sequence_length": "data.context",
    "block_size": "data.context",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "output_dir": "train.output",
    "gradient_accumulation_steps": "train.micro_batch_size",
}
_REQUIRED = {
    (section.name, entry.name)
    for section in dataclasses.fields(Recipe)
    for entry in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
    if entry.default == MISSING
}
_REFERENCE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*\}")
_OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_MAX_DEPTH = 20  # tables in tables; a reference to a table around itself would never end


def load(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        path: a YAML or JSON file, or the name of a shipped recipe such as `quickstart`.
        overrides: `section.key=value` texts, later ones win.
        world_size: number of processes, where known: the batch arithmetic is then checked too.

    Returns:
        The recipe with every layer option filled in (`model.layers`), `model.depth` and `model.expanded`.

    Raises:
        RecipeError: with everything that is wrong, each with the key and where it was written.
    """
    loading = _Loading(Source(path, overrides))
    recipe = loading.build()
    loading.check(recipe, world_size)
    if loading.problems:
        raise RecipeError(loading.problems, str(path))
    return recipe


def check(recipe: Recipe, world_size: int | None = None) -> None:
    """RecipeError with everything wrong with a recipe that was made or changed in code."""
    found: list[str] = []
    for problem in recipe_check.problems(recipe, set(), world_size):
        found.append(f"{dotted(problem.key)}: {problem.words}")
    table = LayerTable(recipe.model)
    for key, words in table.problems:
        found.append(f"{dotted(('model', *key))}: {words}")
    if not found:
        found += [f"{dotted(_CUT)}: {words}" for words in _cut_problems(recipe, table)]
        if carried := carry.problem(recipe, table.specs()):
            found.append(f"train.tbptt_chunks: {carried}")
    if found:
        raise RecipeError(found)


def batch_geometry(recipe: Recipe, world_size: int) -> Geometry:
    """How the global batch is spread over processes; RecipeError where it does not divide."""
    found = recipe_check.geometry(recipe, world_size)
    if isinstance(found, recipe_check.Problem):
        raise RecipeError([f"{dotted(found.key)}: {found.words}"])
    return found


class _Loading:
    """One recipe on its way from tables of text to typed sections; collects problems."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems = list(source.problems)
        self.faulty: set[Key] = set()

    def _problem(self, key: Key, words: str) -> None:
        self.faulty.add(key)
        self.problems.append(f"{self.source.where(key)}: {words}")

    def build(self) -> Recipe:
        """The typed recipe; keys in `faulty` hold their default (or OmegaConf's "???")."""
        merged = cast(Tree, OmegaConf.to_container(OmegaConf.structured(Recipe)))
        for tree in self.source.layers:
            empty = [name for name, value in tree.items() if value is None and name in merged]
            _overlay(merged, {name: value for name, value in tree.items() if name not in empty})
        self._drop_malformed_references(merged, ())
        return self._section(Recipe, self._resolve(OmegaConf.create(merged), ()), ())

    def _drop_malformed_references(self, tree: Tree, key: Key) -> None:
        for name, value in list(tree.items()):
            inner = (*key, name)
            if isinstance(value, dict):
                self._drop_malformed_references(value, inner)
            elif words := _reference_problem(value):
                self._problem(inner, words)
                del tree[name]

    def _resolve(self, config: DictConfig, key: Key) -> Tree:
        """Plain tables with references replaced by what they refer to; unresolvable keys are left out."""
        tree: Tree = {}
        for name in config:
            inner = (*key, str(name))
            if len(inner) > _MAX_DEPTH:
                self._problem(inner[:3], "refers to a table that it is part of")
                return {}
            try:
                value = config[name]
                if isinstance(value, DictConfig):
                    value = self._resolve(value, inner)
                elif isinstance(value, ListConfig):
                    value = [_plain(item) for item in value]
                tree[str(name)] = value
            except MissingMandatoryValue:
                # A required key's own check names its type; any other would keep its default in silence.
                if inner in self.source.places and inner not in _REQUIRED:
                    self._problem(inner, "is left open (???): give it a value")
            except (InterpolationResolutionError, RecursionError) as error:
                self._problem(inner, _reference_words(config._get_node(name), error))
        return tree

    def _section(self, section: type, tree: Tree, key: Key) -> Any:
        """An instance of a schema dataclass from its table."""
        hints = typing.get_type_hints(section)
        result = section()
        for name, value in tree.items():
            inner = (*key, name)
            if inner in RENAMED:
                self._problem(inner, f"was renamed {dotted(RENAMED[inner])}")
            elif name not in hints:
                self._problem(inner, f"unknown key{_nearest_key(name, hints, key)}")
            elif dataclasses.is_dataclass(hints[name]):
                if self._is_table(value, inner):
                    setattr(result, name, self._section(hints[name], value, inner))
            elif typing.get_origin(hints[name]) is dict:
                if self._is_table(value, inner):
                    setattr(result, name, self._sources(value, inner) if name == "sources" else value)
            else:
                try:
                    setattr(result, name, coerce(value, hints[name]))
                except ValueError as error:
                    self._problem(inner, str(error))
        return result

    def _sources(self, tree: Tree, key: Key) -> dict[str, SourceSection]:
        return {
            name: self._section(SourceSection, entry, (*key, name))
            for name, entry in tree.items()
            if entry is not None and self._is_table(entry, (*key, name))
        }

    def _is_table(self, value: Any, key: Key) -> bool:
        if not isinstance(value, dict):
            self._problem(key, f"expected a table of keys, found {shown(value)}")
        return isinstance(value, dict)

    def check(self, recipe: Recipe, world_size: int | None) -> None:
        """Rules and layers; completes `recipe.model` where its layers are right."""
        for problem in recipe_check.problems(recipe, self.faulty, world_size):
            self._problem(problem.key, problem.words)
        model = recipe.model
        unread = {("model", "pattern"), ("model", "hidden_size"), ("model", "expanded")}
        if model.pattern == MISSING or self.faulty & unread:
            return
        table = LayerTable(model)
        for key, words in table.problems:
            self._problem(("model", *key), words)
        if not table.problems:
            if not self.faulty & {_CUT, ("data", "context")}:
                for words in _cut_problems(recipe, table):
                    self._problem(_CUT, words)
            self._refuse_idle_defaults(table)
            carried = {("train", "tbptt_chunks"), ("data", "context")}
            if not self.faulty & carried and (reason := carry.problem(recipe, table.specs())):
                self._problem(("train", "tbptt_chunks"), reason)
            model.layers = table.complete()
            model.defaults = {}
            model.expanded = table.letters
            model.depth = len(table.letters)

    def _refuse_idle_defaults(self, table: LayerTable) -> None:
        """A default given on the command line that every letter overrides would be ignored in silence."""
        for key in sorted(self.source.overridden):
            if key[:2] == ("model", "defaults") and len(key) == 3 and key[2] not in table.used_defaults:
                letters = ", ".join(f"model.layers.{letter}.{key[2]}" for letter in sorted(table.options))
                self._problem(key, f"has no effect, as no layer leaves this option open; set it in {letters}")


_CUT: Key = ("parallel", "sequence")


def _cut_problems(recipe: Recipe, table: LayerTable) -> list[str]:
    """What forbids to cut the recipe's sequences over so many ranks."""
    ranks, tokens = recipe.parallel.sequence, recipe.data.context
    if ranks < 2 or tokens < 1:
        return []
    found = table.sharding_problems(ranks, tokens)
    if tokens % ranks and not found:
        found = [f"{tokens} tokens (data.context) / {ranks} ranks per sequence does not divide"]
    return found


def _overlay(tree: Tree, above: Tree) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _overlay(tree[name], value)
        else:
            tree[name] = _copy(value)


def _copy(value: Any) -> Any:
    return {name: _copy(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _reference_problem(value: Any) -> str | None:
    """What is wrong with the references in a text or list; only `${section.key}` is understood."""
    if isinstance(value, list):
        return next(filter(None, map(_reference_problem, value)), None)
    if isinstance(value, dict):
        return _reference_problem(list(value.values()))
    if not isinstance(value, str):
        return None
    for opening in _OPENING.finditer(value):
        rest = value[opening.end() :]
        if not _REFERENCE.match(rest):
            found = "${" + rest.partition("}")[0][:40] + ("}" if "}" in rest else "")
            return (
                f"{found!r} is not a reference: only other keys can be referred to, such as "
                r"${model.hidden_size}; nothing else is looked up or evaluated. Write \${ for the text ${"
            )
    return None


def _reference_words(written: Any, error: Exception) -> str:
    if isinstance(error, InterpolationKeyError):
        return f"{written!r} refers to a key that does not exist"
    if isinstance(error, InterpolationToMissingValueError):
        return f"{written!r} refers to a key without a value"
    return f"{written!r} refers to itself in a circle"


def _nearest_key(name: str, siblings: Iterable[str], section: Key) -> str:
    """'; did you mean ...?': a neighbour, else a key of another section or what it is called elsewhere."""
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"; did you mean {dotted((*section, near[0]))}?"
    leaves = {leaf: key for key in _schema_keys(Recipe, ()) for leaf in [key[-1]]}
    meant = {leaf: dotted(key) for leaf, key in leaves.items()} | _OTHER_NAMES
    near = difflib.get_close_matches(name, meant, n=1, cutoff=0.75)
    if near:
        return f"; did you mean {meant[near[0]]}?"
    return f"; known here: {', '.join(sorted(siblings))}"


def _schema_keys(section: Any, key: Key) -> Iterable[Key]:
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _schema_keys(kind, (*key, name))
        else:
            yield (*key, name)


class _Dumper(yaml.SafeDumper):
    """Texts that some reader might take for a number are written with quotes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if looks_typed(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    short = all(not isinstance(item, dict | list) and len(str(item)) <= 12 for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=short)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def _tree(recipe: Recipe) -> Tree:
    """Plain tables that `load` reads back to an equal recipe: literal "${" escaped."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, str):
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        return value

    return plain(dataclasses.asdict(recipe))


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, every key written out; loading it gives an equal recipe."""
    return yaml.dump(_tree(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def save(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe as YAML, or as JSON where `path` ends in .json."""
    path = Path(path)
    text = json.dumps(_tree(recipe), indent=2) + "\n" if path.suffix == ".json" else to_yaml(recipe)
    path.write_text(text, encoding="utf-8")

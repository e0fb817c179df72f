"""Recipes: defaults < recipe file (and what it is based on) < `key=value` on the command line -> `Recipe`.

Tables are merged key by key, everything else, lists included, is replaced. Null in place of a source
(`data.sources.NAME`) or a letter (`model.layers.X`) takes the inherited one out. A value may refer to another
key as `${section.key}`. Everything wrong with a recipe is found and listed before anything is built.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf, errors

from hybrid.files import write_text
from hybrid.layers.errors import did_you_mean

from .coerce import coerce, looks_typed, shown
from .letters import LayerTable
from .reader import COMMAND_LINE, Problem, RecipeError, RecipeText, Tree, join
from .rules import examine
from .schema import OTHER_NAMES, RENAMED, Recipe, renamed, types_of

_MALFORMED = re.compile(r"(?<!\\)(?:\\\\)*(\$\{(?![A-Za-z_][\w-]*(?:\.[\w-]+)*\})[^}]{0,40}\}?)")
"""A "${" that is not escaped and does not begin a reference such as ${model.hidden_size}."""


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    saved: bool = False,
    model_only: bool = False,
) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        path: a YAML or JSON file, or the name of a shipped recipe such as `quickstart`.
        overrides: `section.key=value` texts, later ones win.
        world_size: number of processes, where known: the batch arithmetic is then checked too.
        saved: a run wrote the file; keys that were renamed since are then understood.
        model_only: only the model section has to be there and right.

    Returns:
        The recipe with every layer option filled in (`model.layers`), `model.depth` and `model.expanded`.

    Raises:
        RecipeError: with everything that is wrong, each with the key and where it was written.
    """
    text = RecipeText(path, overrides)
    merged = cast(Tree, OmegaConf.to_container(OmegaConf.structured(Recipe)))
    for table in map(renamed, text.tables) if saved else text.tables:
        # an empty section changes nothing
        _overlay(merged, {name: v for name, v in table.items() if v is not None or name not in merged})
    problems: list[Problem] = []
    _drop_malformed(merged, "", problems)
    resolved = _resolve(merged, OmegaConf.create(merged), "", problems)
    recipe, layers = _examined(resolved, problems, world_size, model_only)
    if layers is not None:
        problems += _idle_defaults(text, layers)
    if text.problems or problems:
        raise RecipeError([*text.problems, *map(text.locate, problems)], str(path))
    return recipe


def from_saved(saved: dict[str, Any], name: str, *, model_only: bool = False) -> Recipe:
    """Check the resolved recipe that a run saved as plain tables, whose keys may have been renamed since.

    `name` is where it was found, for RecipeError; `model_only` as for `load`.
    """
    merged = cast(Tree, OmegaConf.to_container(OmegaConf.structured(Recipe)))
    _overlay(merged, renamed(saved))
    problems: list[Problem] = []
    recipe, _ = _examined(merged, problems, None, model_only)
    if problems:
        raise RecipeError(problems, name)
    return recipe


def _examined(
    resolved: Tree, problems: list[Problem], world_size: int | None, model_only: bool
) -> tuple[Recipe, LayerTable | None]:
    """Convert tables to a recipe and check it, its layers filled in; None for layers with problems."""
    recipe: Recipe = _typed(Recipe, resolved, "", problems)
    found, layers = examine(recipe, world_size, {problem.key for problem in problems})
    found = [*problems, *found]
    problems[:] = [one for one in found if not model_only or one.key.partition(".")[0] == "model"]
    if layers is None or layers.problems:
        return recipe, None
    layers.fill()
    return recipe, layers


def _overlay(tree: Tree, above: Tree) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _overlay(tree[name], value)
        else:
            tree[name] = value


def _drop_malformed(tree: Tree, key: str, problems: list[Problem]) -> None:
    """Leave out what OmegaConf would look up elsewhere than in the recipe, such as in the environment."""
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _drop_malformed(value, join(key, name), problems)
        elif found := next(filter(None, map(_MALFORMED.search, _texts(value))), None):
            words = (
                f"{found[1]!r} is not a reference: only other keys can be referred to, such as "
                r"${model.hidden_size}; nothing else is looked up or evaluated. Write \${ for the text ${"
            )
            problems.append(Problem(join(key, name), words))
            del tree[name]


def _texts(value: Any) -> Iterator[str]:
    """Find every text in a value, such as those of a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _resolve(tree: Tree, config: DictConfig, key: str, problems: list[Problem]) -> Tree:
    """Replace references by what they refer to; unresolvable keys are left out."""
    found: Tree = {}
    for name, value in tree.items():
        inner = join(key, name)
        try:
            meant = config[name]
            if isinstance(value, dict):
                meant = _resolve(value, meant, inner, problems)
            elif OmegaConf.is_config(meant):
                meant = OmegaConf.to_container(meant, resolve=True)
            found[name] = meant
        except errors.MissingMandatoryValue:
            found[name] = MISSING
        except errors.InterpolationKeyError:
            problems.append(Problem(inner, f"{value!r} refers to a key that does not exist"))
        except errors.InterpolationToMissingValueError:
            problems.append(Problem(inner, f"{value!r} refers to a key without a value"))
        except (errors.InterpolationResolutionError, RecursionError):
            problems.append(Problem(inner, f"{value!r} refers to itself in a circle"))
    return found


def _typed(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """Convert a value to `kind`: a section's class, a table of sections, or what `coerce` knows.

    ValueError says what is wrong with the value itself; what is wrong within it goes to `problems`.
    """
    is_section = dataclasses.is_dataclass(kind)
    if not is_section and typing.get_origin(kind) is not dict:
        return coerce(value, kind)
    if not isinstance(value, dict):
        raise ValueError(f"expected a table of keys, found {shown(value)}")
    kinds = dict.fromkeys(value, typing.get_args(kind)[1]) if not is_section else types_of(kind)
    found: Tree = {}
    for name, written in value.items():
        inner = join(key, name)
        try:
            if inner in RENAMED:
                raise ValueError(f"was renamed {RENAMED[inner]}")
            if name not in kinds:
                raise ValueError(f"unknown key{_nearest_key(name, kinds, key)}")
            if written is not None or not dataclasses.is_dataclass(kinds[name]):
                found[name] = _typed(kinds[name], written, inner, problems)
        except ValueError as error:
            problems.append(Problem(inner, str(error)))
    return kind(**found) if is_section else found


def _nearest_key(name: str, siblings: Collection[str], section: str) -> str:
    """Suggest a key of the same section, else of another one or by what other programs call it."""
    here = {sibling: join(section, sibling) for sibling in siblings}
    sections = dataclasses.asdict(Recipe())
    elsewhere = {key: f"{section}.{key}" for section, keys in sections.items() for key in keys} | OTHER_NAMES
    return (
        did_you_mean(name, here, shown=here)
        or did_you_mean(name, elsewhere, cutoff=0.75, shown=elsewhere)
        or f"; known here: {', '.join(sorted(here))}"
    )


def _idle_defaults(text: RecipeText, table: LayerTable) -> Iterator[Problem]:
    """Find defaults given on the command line that every letter overrides: they would do nothing."""
    for key, place in sorted(text.places.items()):
        section, _, name = key.rpartition(".")
        if place == COMMAND_LINE and section == "model.defaults" and name not in table.used_defaults:
            letters = ", ".join(f"model.layers.{letter}.{name}" for letter in sorted(table.specs))
            yield Problem(key, f"has no effect, as no layer leaves this option open; set it in {letters}")


class _Dumper(yaml.SafeDumper):
    """Write texts that some reader might take for a number with quotes, and short lists in one line."""


_TAG = "tag:yaml.org,2002:"
_Dumper.add_representer(
    str, lambda to, text: to.represent_scalar(f"{_TAG}str", text, style='"' if looks_typed(text) else None)
)
_Dumper.add_representer(
    list, lambda to, items: to.represent_sequence(f"{_TAG}seq", items, all(len(str(i)) <= 12 for i in items))
)


def _tree(value: Any) -> Any:
    """Convert a recipe to plain tables that `load` reads back to an equal one: literal "${" escaped."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _tree(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_yaml(recipe: Recipe | dict[str, Any]) -> str:
    """Write out a recipe, or a table of some sections, as YAML with every key; loading gives an equal one."""
    return yaml.dump(_tree(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def save(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe as YAML, or as JSON where `path` ends in .json."""
    path = Path(path)
    text = json.dumps(_tree(recipe), indent=2) + "\n" if path.suffix == ".json" else to_yaml(recipe)
    write_text(path, text)

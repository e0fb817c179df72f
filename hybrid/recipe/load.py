"""Recipes: defaults < recipe file (and what it is based on) < `key=value` on the command line -> `Recipe`.

Tables are merged key by key, everything else, lists included, is replaced. Null in place of a source
(`data.sources.NAME`) or a letter (`model.layers.X`) takes the inherited one out. A value may refer to another
key as `${section.key}`. Everything wrong with a recipe is found and listed before anything is built.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, errors

from hybrid.files import write_text

from .coerce import looks_typed
from .letters import LayerTable
from .problems import Problem, RecipeError, Tree, join
from .reader import COMMAND_LINE, RecipeText
from .schema import MISSING, Recipe, renamed
from .typed import examined, overlay

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
    merged = dataclasses.asdict(Recipe())
    for table in map(renamed, text.tables) if saved else text.tables:
        # an empty section changes nothing
        overlay(merged, {name: v for name, v in table.items() if v is not None or name not in merged})
    problems: list[Problem] = []
    _drop_malformed(merged, "", problems)
    resolved = _resolve(merged, OmegaConf.create(merged), "", problems)
    recipe, layers = examined(resolved, problems, world_size, model_only)
    if layers is not None:
        problems += _idle_defaults(text, layers)
    if text.problems or problems:
        raise RecipeError([*text.problems, *map(text.locate, problems)], str(path))
    return recipe


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

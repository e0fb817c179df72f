"""Plain tables -> a typed, checked `Recipe`. It needs the standard library alone."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from typing import Any

from hybrid.layers.errors import did_you_mean

from .coerce import coerce, shown
from .letters import LayerTable
from .problems import Problem, RecipeError, Tree, join
from .rules import examine
from .schema import OTHER_NAMES, RENAMED, Recipe, renamed, types_of


def from_saved(saved: dict[str, Any], name: str, *, model_only: bool = False) -> Recipe:
    """Check the resolved recipe that a run saved as plain tables, whose keys may have been renamed since.

    `name` is where it was found, for RecipeError; `model_only` as for `load`.
    """
    merged = dataclasses.asdict(Recipe())
    overlay(merged, renamed(saved))
    problems: list[Problem] = []
    recipe, _ = examined(merged, problems, None, model_only)
    if problems:
        raise RecipeError(problems, name)
    return recipe


def examined(
    resolved: Tree, problems: list[Problem], world_size: int | None, model_only: bool
) -> tuple[Recipe, LayerTable | None]:
    """Convert tables to a recipe and check it, its layers filled in; None for layers with problems."""
    recipe: Recipe = typed(Recipe, resolved, "", problems)
    found, layers = examine(recipe, world_size, {problem.key for problem in problems})
    found = [*problems, *found]
    problems[:] = [one for one in found if not model_only or one.key.partition(".")[0] == "model"]
    if layers is None or layers.problems:
        return recipe, None
    layers.fill()
    return recipe, layers


def overlay(tree: Tree, above: Tree) -> None:
    """Write the keys of `above` over those of `tree`, tables key by key."""
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            overlay(tree[name], value)
        else:
            tree[name] = value


def typed(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
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
                found[name] = typed(kinds[name], written, inner, problems)
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

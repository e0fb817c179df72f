"""Choosing what is trained (`train.only`): the other parameters keep their values and cost no gradient and no
optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hybrid.layers.errors import did_you_mean
from hybrid.recipe.reader import Problem, RecipeError

from .lm import HybridLM

KEY = "train.only"


def freeze_all_but(model: HybridLM, only: Sequence[str] | None) -> None:
    """Freeze every parameter whose name matches none of the globs `only`; None leaves all trained.

    In a name `blocks.N` may also be the letter of that layer: `K.mixer.*`. A tied head is one parameter with
    the embedding, trained when either name is matched.

    Raises RecipeError for a pattern without a match, and where nothing would be trained.
    """
    if only is None:
        return
    names = [(name, p) for name, p in model.named_parameters(remove_duplicate=False)]
    names += [(_by_letter(model, name), p) for name, p in names if name.startswith("blocks.")]
    known = dict.fromkeys(name.rsplit(".", n)[0] + ".*" * bool(n) for n in range(4) for name, _ in names)
    idle = [glob for glob in only if not any(fnmatchcase(name, glob) for name, _ in names)]
    problems = [Problem(KEY, f"{glob!r} matches no parameter{did_you_mean(glob, known)}") for glob in idle]
    if not only:
        problems = [Problem(KEY, f"[] trains nothing; null trains all, [{next(iter(known))}] one parameter")]
    if problems:
        raise RecipeError(problems)
    trained = {id(p) for name, p in names if any(fnmatchcase(name, glob) for glob in only)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def _by_letter(model: HybridLM, name: str) -> str:
    """Name a parameter of `blocks.N` by its layer's letter instead."""
    _, number, rest = name.split(".", 2)
    return f"{model.layers[int(number)].letter}.{rest}"

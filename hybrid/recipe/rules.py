"""Rules between the keys of a typed recipe, and the check of each key's own bounds."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.paths import LONGEST_NAME, LocalPath, local_path

from .coerce import describe
from .letters import LayerTable
from .problems import Problem, RecipeError, join
from .schema import MISSING, Bounds, Recipe, types_of


class Geometry(NamedTuple):
    """How a global batch is spread: batch_size = data_parallel * micro_batch * accumulation."""

    world_size: int
    data_parallel: int
    micro_batch: int
    accumulation: int


def batch_geometry(recipe: Recipe, world_size: int) -> Geometry:
    """Spread the global batch over processes; RecipeError where it does not divide."""
    found = _geometry(recipe, world_size)
    if isinstance(found, Problem):
        raise RecipeError([found])
    return found


def check(recipe: Recipe, world_size: int | None = None) -> None:
    """Raise RecipeError with everything wrong with a recipe that was made or changed in code."""
    found, _ = examine(recipe, world_size)
    if found:
        raise RecipeError(found)


def examine(
    recipe: Recipe, world_size: int | None = None, unread: Collection[str] = ()
) -> tuple[list[Problem], LayerTable | None]:
    """Find everything wrong with a recipe.

    Args:
        world_size: number of processes, where known: the batch arithmetic is then checked too.
        unread: keys whose values could not be read, so that there is nothing to check.

    Returns:
        The problems, and the layers where the keys that they are read from are right.
    """
    faulty = set(unread)
    found = list(_bounds(recipe, "", faulty))
    faulty |= {problem.key for problem in found}
    found += [problem for problem in _agreements(recipe) if problem.key not in faulty]
    if not faulty & {"train", "train.batch_size", "train.micro_batch_size", "parallel.sequence"}:
        geometry = _geometry(recipe, world_size)
        found += [geometry] if isinstance(geometry, Problem) else []
    faulty |= {problem.key for problem in found}
    if faulty & {"model", "model.pattern", "model.hidden_size", "model.expanded"}:
        return found, None
    table = LayerTable(recipe.model)
    found += table.problems
    if not table.problems and "data.context" not in faulty:
        sharding = table.sharding_problems(recipe.parallel.sequence, recipe.data.context)
        tbptt = table.tbptt_problems(recipe.train.tbptt_chunks, recipe.data.context)
        found += [problem for problem in (*sharding, *tbptt) if problem.key not in faulty]
    return found, table


def _bounds(section: Any, key: str, faulty: Collection[str]) -> Iterator[Problem]:
    """Find values left open, out of their bounds or not offered; `faulty` keys have no value to look at."""
    kinds = types_of(type(section))
    for field in dataclasses.fields(section):
        value, inner = getattr(section, field.name), join(key, field.name)
        if inner in faulty:
            continue
        if dataclasses.is_dataclass(value):
            yield from _bounds(value, inner, faulty)
        elif field.name in ("sources", "distill"):
            for name, entry in value.items():
                yield from _bounds(entry, join(inner, name), faulty)
        elif value == MISSING:
            yield Problem(inner, f"needs a value: {describe(kinds[field.name])}")
        elif value is not None and (words := field.metadata.get("bounds", Bounds()).refuse(value)):
            yield Problem(inner, words)
        elif LocalPath in (kinds[field.name], *typing.get_args(kinds[field.name])) and value is not None:
            yield from _path(inner, value)


def _path(key: str, value: str) -> Iterator[Problem]:
    """Find what is wrong with a path of a recipe that was made in code; one that was loaded is right."""
    try:
        if (found := local_path(value)) != value:
            yield Problem(key, f"is {value!r}, and ~ is expanded only on loading: write {found}")
    except ValueError as error:
        yield Problem(key, str(error))


def _agreements(recipe: Recipe) -> Iterator[Problem]:
    """Find keys that contradict one another, apart from the batch and the layers."""
    train, data = recipe.train, recipe.data
    if train.precision == "bf16" and recipe.parallel.zero_stage == 0:
        yield Problem(
            "train.precision",
            "bf16 needs parallel.zero_stage 1 or higher: at stage 0 DeepSpeed's bf16 optimizer takes a step "
            "with zero gradients at the start, and the result is wrong",
        )
    if recipe.parallel.sequence > 1 and data.order == "document":
        words = "document reads rows of unequal length, which parallel.sequence above 1 cannot shard equally"
        yield Problem("data.order", words)
    if train.tbptt_chunks > data.context:
        words = f"{train.tbptt_chunks} chunks of data.context {data.context} tokens: more than tokens"
        yield Problem("train.tbptt_chunks", words)
    if train.tbptt_chunks > 1 and recipe.parallel.sequence > 1:
        yield Problem(
            "train.tbptt_chunks",
            f"a sequence is read in chunks ({train.tbptt_chunks}) or sharded over ranks (parallel.sequence "
            f"{recipe.parallel.sequence}), not both: one of the two must be 1",
        )
    copy, run = train.checkpoint_copy, train.output
    if copy and Path(os.path.realpath(copy)).is_relative_to(os.path.realpath(run)):
        words = f"is {copy}, in train.output {run} itself: name another folder"
        yield Problem("train.checkpoint_copy", words)
    if not re.fullmatch(r"[\w.-]+", str(train.resume)):
        yield Problem("train.resume", f"is {train.resume!r}; allowed: auto, never, or a tag's name")
    expansion, hidden = recipe.model.ffn_expansion, recipe.model.hidden_size
    if int(expansion * hidden) < 32 and recipe.model.ffn_size is None:
        words = f"is {expansion}: fewer than 32 features at hidden size {hidden}; give model.ffn_size"
        yield Problem("model.ffn_expansion", words)
    yield from _optimizer_and_schedule(recipe)
    yield from _sources(recipe)
    yield from _distillation(recipe)


def _optimizer_and_schedule(recipe: Recipe) -> Iterator[Problem]:
    betas, schedule, steps = recipe.optimizer.betas, recipe.schedule, recipe.train.steps
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem("optimizer.betas", f"is {betas}; allowed: two numbers from 0 to below 1")
    if schedule.decay_steps is not None and schedule.shape != "constant":
        words = f"only the constant shape has a decay of its own length; schedule.shape is {schedule.shape}"
        yield Problem("schedule.decay_steps", words)
    warmup, decay = schedule.warmup_steps, schedule.decay_steps or 0
    if isinstance(steps, int) and warmup + decay > steps:
        words = f"warmup_steps {warmup} and decay_steps {decay} together are more than train.steps {steps}"
        yield Problem("schedule.warmup_steps" if warmup else "schedule.decay_steps", words)


def _sources(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.data.sources:
        yield Problem("data.sources", "needs at least one source, such as {text: {paths: [my_texts/]}}")
    for name, source in recipe.data.sources.items():
        key = f"data.sources.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_][\w-]*", name):
            yield Problem(key, "a source is named with letters, digits, - and _ (it becomes a folder)")
        if len(os.fsencode(name)) > LONGEST_NAME:
            yield Problem(key, f"a source's name has at most {LONGEST_NAME} bytes (it becomes a folder)")
        if isinstance(source.paths, list) and not source.paths:
            yield Problem(f"{key}.paths", "needs at least one file, folder, glob or built-in corpus")


def _distillation(recipe: Recipe) -> Iterator[Problem]:
    train, stages = recipe.train, recipe.train.distill
    taught = [name for name, stage in stages.items() if stage.hidden or stage.kl]
    if taught and train.teacher is None:
        yield Problem("train.teacher", f"needs a value: stage {taught[0]!r} of train.distill learns from it")
    if train.teacher is not None and not taught:
        yield Problem("train.teacher", "is given, but no stage of train.distill weighs hidden or kl")
    if stages and train.tbptt_chunks > 1:
        words = f"a teacher reads no chunks: train.tbptt_chunks must be 1, not {train.tbptt_chunks}"
        yield Problem("train.distill", words)
    for number, (name, stage) in enumerate(stages.items(), 1):
        key, last = f"train.distill.{name}", number == len(stages)
        if not (stage.hidden or stage.kl or stage.ce):
            yield Problem(key, "needs a weight above 0 of hidden, kl or ce")
        if stage.hidden and (stage.kl or stage.ce):
            yield Problem(
                key, "hidden is alone in its stage: its blocks are fed by the teacher, not each other"
            )
        if stage.hidden and any(before.kl or before.ce for before in list(stages.values())[: number - 1]):
            yield Problem(key, "stages of hidden come before those of kl and ce")
        if stage.steps is None and not last:
            yield Problem(f"{key}.steps", "needs a value: only the last stage takes the steps that are left")
        ranks, context = recipe.parallel.sequence, recipe.data.context
        if stage.context and (context % stage.context or stage.context % ranks):
            words = f"is {stage.context}: no divisor of data.context {context}"
            yield Problem(f"{key}.context", words + f" that {ranks} ranks share" * (ranks > 1))
    given, steps = [stage.steps for stage in stages.values() if stage.steps is not None], train.steps
    open_end = len(given) < len(stages)
    if stages and isinstance(steps, int) and (sum(given) >= steps if open_end else sum(given) != steps):
        words = f"the stages' steps are {' + '.join(map(str, given))} = {sum(given)}"
        yield Problem("train.distill", f"{words}, which does not fit train.steps {steps}")


def _geometry(recipe: Recipe, world_size: int | None) -> Geometry | Problem:
    """Divide the batch, or say what does not divide: for None what no number of processes can put right."""
    sequence, batch, micro = recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size
    if world_size is None:
        if micro is not None and batch % micro:
            return Problem("train.batch_size", f"{batch} is no multiple of train.micro_batch_size {micro}")
        world_size = sequence
    ranks, parallel = f"{world_size} processes / {sequence} ranks per sequence", world_size // sequence
    if world_size % sequence:
        return Problem("parallel.sequence", f"{ranks} does not divide")
    ranks += f" = {parallel} data-parallel"
    if micro is None:
        if batch % parallel:
            return Problem("train.batch_size", f"{batch} sequences do not divide over {ranks}")
        micro = batch // parallel
    if batch % (parallel * micro):
        words = (
            f"{batch} sequences = data-parallel x micro_batch_size x accumulation has no whole accumulation: "
            f"{ranks}, {parallel} x {micro} = {parallel * micro}, and {batch} / {parallel * micro} = "
            f"{batch / (parallel * micro):.4g}"
        )
        return Problem("train.batch_size", words)
    return Geometry(world_size, parallel, micro, batch // (parallel * micro))

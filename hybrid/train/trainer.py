"""`train(recipe)`: what a run stands in, set up before its first step and taken down after its last."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from functools import partial
from pathlib import Path

from hybrid import recipe as recipes
from hybrid.data.preparation.prepare import is_prepared, outdated, prepare
from hybrid.distributed import world as distributed
from hybrid.distributed.lifeline import lifeline
from hybrid.distributed.signals import Signals
from hybrid.distributed.watchdog import compilation_takes_time, watching
from hybrid.distributed.world import TrainError, World
from hybrid.recipe.schema import Recipe

from . import logs
from .loop import Run, Summary
from .run_directory import RunDirectory


def train(recipe: Recipe) -> Summary:
    """Train as the recipe says, in this process and those that the launcher started with it.

    Goes on from the newest whole checkpoint in `train.output` unless `train.resume` says otherwise; prepares
    the data first when it is not there.

    Raises:
        TrainError, RecipeError, DataError: what stops it, on the main rank; SystemExit(2) on the others.
        SystemExit(75): SIGTERM came; the state is saved, and the same command goes on from it.
    """
    begin = time.perf_counter()
    recipe = copy.deepcopy(recipe)
    world = distributed.start(recipe.train.threads)
    world.same("the recipe", hashlib.sha256(recipes.to_yaml(recipe).encode()).hexdigest()[:12])
    with world.together():
        recipes.check(recipe, world.size)
    folder = Path(recipe.train.output)
    with distributed.peers_may_end(), contextlib.ExitStack() as stack:
        directory = _open_directory(folder, world, stack)
        stack.enter_context(lifeline(world))
        log = folder / "logs" / f"rank_{world.rank}.log"
        stack.enter_context(logs.quiet(log))
        stack.enter_context(watching(world, recipe.train.hang_timeout, log))
        if recipe.train.compile:
            stack.enter_context(compilation_takes_time(world))
        signals = stack.enter_context(Signals())
        signals.at_once = True  # a stopped preparation goes on where it was
        _prepare_data(recipe, world)
        signals.at_once = False
        run = Run(recipe, world, signals, directory, stack)
        run.steps()
        return run.finish(begin)


def _open_directory(folder: Path, world: World, stack: contextlib.ExitStack) -> RunDirectory | None:
    found: list[RunDirectory] = []
    world.on_main(lambda: found.append(RunDirectory(folder)))
    if not found:
        return None
    stack.callback(found[0].close)
    return found[0]


def _prepare_data(recipe: Recipe, world: World) -> None:
    def work() -> None:
        if not is_prepared(recipe.data):
            print(f"preparing {recipe.data.folder}", flush=True)
            print(prepare(recipe.data, say=partial(print, flush=True)), flush=True)
        elif found := outdated(recipe.data):
            print(
                f"training on {recipe.data.folder} as it was prepared, although its sources have changed: "
                f"{found}; `hybrid prepare --force` takes them in",
                flush=True,
            )

    world.on_main(work, patient=True)
    with world.together():
        if not is_prepared(recipe.data):
            raise TrainError(f"sees no prepared data in {recipe.data.folder}: all processes need that folder")

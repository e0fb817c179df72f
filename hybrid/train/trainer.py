"""`train(recipe)`: set a run up before its first step, and take it down after its last."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import CheckpointFolder, Origin, Progress, read_trainer
from hybrid.checkpoint.run import CHECKPOINTS, TOKENIZER, describe, opened
from hybrid.checkpoint.writer import Writer
from hybrid.data.checksums import ShardCheck
from hybrid.data.loader import Loader
from hybrid.data.preparation.prepare import is_prepared, outdated, prepare
from hybrid.data.store import Store
from hybrid.data.tokenizer import Tokenizer
from hybrid.data.validation import ValidationSet
from hybrid.distributed.context_parallel import SequenceRanks
from hybrid.distributed.lost_hosts import keepalive, lost_peers_in_words
from hybrid.distributed.signals import Signals
from hybrid.distributed.watchdog import compilation_takes_time, compiled_kernels_are_progress, watching
from hybrid.distributed.world import World, start
from hybrid.errors import TrainError
from hybrid.estimate.info import meta_model
from hybrid.files import no_link
from hybrid.layers.errors import SlowPathWarning
from hybrid.model import HybridLM
from hybrid.model.freeze import freeze_all_but
from hybrid.recipe.schema import Recipe

from . import resume
from .distill import Objectives
from .engine import Engine
from .hooks import CheckpointProgress, DamagedShards, LayerStatistics, SignsOfLife, StopSignals, stop
from .loop import Run, evaluate, train_steps, wait_saved
from .metrics import Metrics
from .throughput import Throughput, peak_memory
from .validation import write_samples

EVALUATED_WINDOWS = 8
"""Windows of held-out text in one forward pass of a rank."""
SHARDS_WAIT = 3.0
"""Seconds."""
QUIET = ("DeepSpeed", "py.warnings", "torch")


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    run: Path
    steps: int
    tokens: int
    """Seen since the first step, over all processes."""
    skipped: int
    loss: float | None
    """Training loss of the last step; None when this call had no step left to do."""
    validation_loss: float
    bits_per_byte_before: float
    """On held-out text, before the first step."""
    bits_per_byte: float
    """On held-out text, after the last step."""
    same_text: bool
    """Whether both are of the same text."""
    tokens_per_second: float
    """Over this call's steps, validation and checkpoints left out."""
    seconds: float
    """This call, all in."""
    peak_memory_bytes: int
    """Peak of the process that needed most."""
    samples: tuple[str, ...]
    """train.prompts with their continuations."""


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
    world = start(recipe.train.threads)
    world.check_equal("the recipe", hashlib.sha256(recipes.to_yaml(recipe).encode()).hexdigest()[:12])
    with world.all_ranks_or_none():
        recipes.check(recipe, world.size)
        if recipe.train.only is not None:
            meta_model(recipe)  # refuses names that there are not
    output = Path(recipe.train.output)
    with lost_peers_in_words(), contextlib.ExitStack() as stack:
        world.rank0_only(lambda: stack.enter_context(opened(output)))
        stack.enter_context(keepalive(world))
        log = stack.enter_context(quiet(output / "logs" / f"rank_{world.rank}.log", world.main))
        stack.enter_context(watching(world, recipe.train.hang_timeout, log.path))
        if recipe.train.compile:
            stack.enter_context(compilation_takes_time(world))
        if world.device.type == "cuda":
            stack.enter_context(compiled_kernels_are_progress(world))
        signals = stack.enter_context(Signals())
        signals.at_once = True  # a stopped preparation goes on where it was
        _prepare_data(recipe, world)
        signals.at_once = False
        run = build(recipe, world, signals, log, stack)
        if any(world.gather(signals.stop)):
            stop(run, "before a step was taken; the same command goes on")
        train_steps(run)
        return finish(run, begin)


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

    world.rank0_only(work, no_timeout=True)
    with world.all_ranks_or_none():
        if not is_prepared(recipe.data):
            raise TrainError(f"sees no prepared data in {recipe.data.folder}: all processes need that folder")


def build(recipe: Recipe, world: World, signals: Signals, log: LogFile, stack: contextlib.ExitStack) -> Run:
    """Put a run together, as it stands at the checkpoint to go on from; `stack` takes it down.

    `recipe` is checked, and its model.vocab_size is filled in here. `log` takes what DeepSpeed prints.
    """
    train, output = recipe.train, Path(recipe.train.output)
    geometry = recipes.batch_geometry(recipe, world.size)
    with world.all_ranks_or_none():
        tokenizer = Tokenizer.load(Path(recipe.data.folder) / TOKENIZER)
        _set_vocabulary(recipe, tokenizer)
        held_out = ValidationSet(
            recipe.data, train.eval_tokens, sequences=EVALUATED_WINDOWS if train.tbptt_chunks == 1 else 1,
            rank=world.rank, world=world.size,
        )  # fmt: skip
    origin = Origin(
        world.size, recipe.parallel.zero_stage, train.precision, tokenizer.fingerprint, resume.plain(recipe),
        held_out.store.describe(),
    )  # fmt: skip
    world.check_equal("the data they see", {n: s["fingerprint"][:12] for n, s in origin.data.items()})
    shards = _check_shards(held_out.store, world)
    copy_to = Path(train.checkpoint_copy) if train.checkpoint_copy else None
    checkpoints = CheckpointFolder(output / CHECKPOINTS, train.keep_last, world, copy_to)
    tag, progress, changes = _find_checkpoint(checkpoints, recipe, origin, world)
    with world.all_ranks_or_none():
        if world.main:
            describe(output, recipe, tokenizer, world)
        metrics = Metrics(output, recipe.monitor, world.main, progress.step)
    stack.callback(metrics.close)
    for text in changes:
        metrics.say(f"changed since the checkpoint: {text}")
    torch.manual_seed(train.seed)
    with world.heartbeat.no_timeout("building the model"), world.all_ranks_or_none():
        model = HybridLM.from_recipe(recipe)
        model.loss_chunk, model.activation_checkpointing = train.loss_chunk, train.activation_checkpointing
        if tag is None and train.init_from:
            metrics.say(resume.load_initial(model, train.init_from, tokenizer.fingerprint))
        freeze_all_but(model, train.only)
        if train.only is not None:
            metrics.say(f"training {model.num_trained:,} of {model.num_parameters:,} parameters (train.only)")
        objectives = Objectives(
            recipe, model, tokenizer.fingerprint, world.device, progress.step, metrics.say
        )
    with world.heartbeat.no_timeout("building the engine"):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                engine = Engine(model, recipe, geometry, world)
            finally:
                log.write(said.getvalue())
        if tag is not None:
            with world.all_ranks_or_none():
                engine.load(tag)
            metrics.say(f"going on from {tag}")
    stack.callback(engine.close)
    writer = Writer(checkpoints, engine.zero_state, origin, world, metrics)
    stack.callback(writer.close)
    if tag is not None:
        writer.begun_step = writer.saved_step = progress.step
    ranks = SequenceRanks.join(world, recipe.parallel.sequence)
    stack.callback(ranks.leave)
    loader = Loader(
        recipe.data, seed=train.seed, sequences=geometry.micro_batch, rank=world.rank // ranks.size,
        world=geometry.data_parallel, start_sample=progress.sample, lanes=train.batch_size,
    )  # fmt: skip
    flops = engine.model.flops_per_token(recipe.data.context).training
    return Run(
        recipe, world, engine, loader, geometry.accumulation, ranks, held_out, metrics,
        Throughput(recipe, flops, world), writer,
        [SignsOfLife(), CheckpointProgress(), LayerStatistics(), DamagedShards(shards, progress.step),
         StopSignals(signals)], progress, objectives,
    )  # fmt: skip


def _check_shards(store: Store, world: World) -> ShardCheck:
    """Begin to compare the token shards with their checksums, each rank its share; SHARDS_WAIT seconds are
    waited for it, in which a few GB are read, and `DamagedShards` sees to the rest."""
    files = [file for source in store.sources.values() for file in source.files]
    check = ShardCheck(files[world.rank :: world.size])
    check.over(SHARDS_WAIT)
    world.raise_if_any(check.fault)
    return check


def _set_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Fill in model.vocab_size: the tokenizer's, rounded up to a multiple of 64."""
    size = tokenizer.vocab_size
    if recipe.model.vocab_size is None:
        recipe.model.vocab_size = -(-size // 64) * 64
    elif recipe.model.vocab_size < size:
        raise TrainError(
            f"model.vocab_size is {recipe.model.vocab_size}, but the tokenizer in {recipe.data.folder} has "
            f"{size} ids"
        )


def _find_checkpoint(
    checkpoints: CheckpointFolder, recipe: Recipe, now: Origin, world: World
) -> tuple[Path | None, Progress, list[str]]:
    """Find the tag to go on from: its folder, the progress in it, and the recipe's changes since."""
    with world.heartbeat.no_timeout("checking checkpoints"):
        name = checkpoints.find(recipe.train.resume)
    if name is None:
        return None, Progress(), []
    with world.all_ranks_or_none():
        progress, origin = read_trainer(checkpoints.path / name)
        changes = resume.check(origin, now)
        if progress.step > recipe.train.steps:
            raise TrainError(
                f"{name} is beyond train.steps={recipe.train.steps}: raise it, resume an older tag, or "
                "give another train.output"
            )
    checkpoints.set_newer_aside(progress.step)
    return checkpoints.path / name, progress, changes


def finish(run: Run, begin: float) -> Summary:
    """Score, sample and sum up, when the last step's checkpoint is on disk; `begin`: of the call."""
    progress, recipe, world = run.progress, run.recipe, run.world
    if run.scored is None or run.scored[0] != progress.step:
        evaluate(run)
    wait_saved(run)
    assert run.scored is not None
    result, output = run.scored[1], Path(recipe.train.output)
    memory = peak_memory(world)
    texts = world.rank0_only(
        lambda: write_samples(output, recipe, world.device, run.metrics.say), no_timeout=True
    )
    before = progress.bits_per_byte_before
    return Summary(
        run=output,
        steps=progress.step,
        tokens=progress.tokens,
        skipped=progress.skipped,
        loss=run.last_loss,
        validation_loss=result.loss,
        bits_per_byte_before=math.nan if before is None else before,
        bits_per_byte=result.bits_per_byte,
        same_text=progress.text_before == result.text,
        tokens_per_second=run.throughput.tokens_per_second,
        seconds=time.perf_counter() - begin,
        peak_memory_bytes=memory,
        samples=tuple(texts or ()),
    )


class LogFile(logging.Handler):
    """A file of messages; what a full disk does not take is lost, as messages must not end a run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if path.is_symlink():
            no_link(str(path), os.O_WRONLY)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record) + "\n")

    def write(self, text: str) -> None:
        """Add text at the end."""
        with contextlib.suppress(OSError), open(self.path, "a", encoding="utf-8", opener=no_link) as f:
            f.write(text)


@contextlib.contextmanager
def quiet(path: Path, main: bool) -> Iterator[LogFile]:
    """Send DeepSpeed's and torch's log messages and all warnings to the file `path`, not the terminal.

    Layers' warnings of slow paths go to standard error too, those of the main rank.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log, before = LogFile(path), {}
    logging.captureWarnings(True)
    captured = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if main and issubclass(category, SlowPathWarning):
            with contextlib.suppress(OSError):
                print(f"note: {message}", file=sys.stderr, flush=True)
        captured(message, category, *place)

    warnings.showwarning = show  # type: ignore[assignment]
    for name in QUIET:
        logger = logging.getLogger(name)
        before[name] = (logger.handlers[:], logger.propagate)
        logger.handlers, logger.propagate = [log], False
    try:
        yield log
    finally:
        logging.captureWarnings(False)
        for name, (handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate

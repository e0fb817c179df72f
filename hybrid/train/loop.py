"""The training loop: a run's parts put together, its steps, and what happens between them."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import Checkpoints
from hybrid.checkpoint.run import TOKENIZER
from hybrid.checkpoint.tag import Origin, Progress
from hybrid.checkpoint.writer import Saver
from hybrid.data.loader import Loader
from hybrid.data.tokenizer import Tokenizer
from hybrid.data.validation import ValidationSet
from hybrid.distributed.context_parallel import SequenceRanks, whole
from hybrid.distributed.signals import Signals
from hybrid.distributed.world import TrainError, World
from hybrid.errors import STOPPED_EXIT_CODE
from hybrid.model import HybridLM
from hybrid.recipe.schema import Recipe
from hybrid.text import clock

from . import logs, resume, samples, schedule, step, validation
from . import metrics as monitor
from .engine import Engine
from .run_directory import RunDirectory
from .step import Step
from .tbptt import stretch
from .throughput import Pace

if TYPE_CHECKING:
    from hybrid.data.batch import Batch

EVALUATED_WINDOWS = 8
"""Windows of held-out text in one forward pass of a rank."""
PASSES_TO_STOP, BATCHES_TO_STOP = 8, 64
"""After so many passes of a step, or batches read for it, it is seen whether to stop there."""


class _Abandoned(Exception):
    """All ranks leave a step they are in."""


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
    """The same after the last step."""
    tokens_per_second: float
    """Over this call's steps, validation and checkpoints left out."""
    seconds: float
    """This call, all in."""
    peak_memory_bytes: int
    """Of the process that needed most."""
    samples: tuple[str, ...]
    """train.prompts with their continuations."""


class Run:
    """One call of `train`, from the opened run directory to the summary."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        signals: Signals,
        directory: RunDirectory | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.recipe, self.world, self.signals = recipe, world, signals
        self.folder = Path(recipe.train.output)
        self.geometry = recipes.batch_geometry(recipe, world.size)
        with world.together():
            self.tokenizer = Tokenizer.load(Path(recipe.data.folder) / TOKENIZER)
            _set_vocabulary(recipe, self.tokenizer)
        copy = Path(recipe.train.checkpoint_copy) if recipe.train.checkpoint_copy else None
        self.checkpoints = Checkpoints(self.folder / "checkpoints", recipe.train.keep_last, world, copy)
        self.origin = Origin(
            world.size, recipe.parallel.zero_stage, recipe.train.precision, self.tokenizer.fingerprint,
            resume.plain(recipe),
        )  # fmt: skip
        with world.pulse.patience("checking checkpoints"):
            tag = self.checkpoints.find(recipe.train.resume)
        self.progress, told = self._read(tag)
        if tag is not None:
            self.checkpoints.set_newer_aside(self.progress.step)
        if directory is not None:
            directory.describe(recipe, world)
            self.tokenizer.save(self.folder / TOKENIZER)
        self.monitor = monitor.Monitor(self.folder, recipe.monitor, world.main, self.progress.step)
        stack.callback(self.monitor.close)
        for text in told:
            self.monitor.say(f"changed since the checkpoint: {text}")
        with world.pulse.patience("building the model"):
            self.engine = self._build(tag)
        stack.callback(self.engine.close)
        self.saver = Saver(self.checkpoints, world, self.monitor)
        stack.callback(self.saver.close)
        self.sharing = SequenceRanks.join(world, recipe.parallel.sequence)
        stack.callback(self.sharing.leave)
        self.loader = Loader(
            recipe.data, seed=recipe.train.seed, sequences=self.geometry.micro_batch,
            rank=world.rank // self.sharing.size, world=self.geometry.data_parallel,
            start_sample=self.progress.sample, lanes=recipe.train.batch_size,
        )  # fmt: skip
        self.held_out = ValidationSet(
            recipe.data,
            recipe.train.eval_tokens,
            sequences=EVALUATED_WINDOWS if recipe.train.tbptt_chunks == 1 else 1,
            rank=world.rank,
            world=world.size,
        )
        flops = self.engine.model.flops_per_token(recipe.data.context).training
        self.pace = Pace(recipe, flops, world)
        self.last_loss: float | None = None
        if tag is not None:
            self.saver.begun_step = self.saver.saved_step = self.progress.step
        self.scored: tuple[int, validation.Score] | None = None

    def _read(self, tag: str | None) -> tuple[Progress, list[str]]:
        """Progress stored in a checkpoint and the recipe's changes since."""
        if tag is None:
            return Progress(), []
        with self.world.together():
            progress, origin = self.checkpoints.read(tag)
            told = resume.check(origin, self.recipe, self.tokenizer.fingerprint, self.world.size)
        if progress.step > self.recipe.train.steps:
            words = (
                f"{tag} is beyond train.steps={self.recipe.train.steps}: raise it, resume an older tag, or "
                "give another train.output"
            )
            self.world.agree(TrainError(words))
        return progress, told

    def _build(self, tag: str | None) -> Engine:
        recipe = self.recipe
        torch.manual_seed(recipe.train.seed)
        with self.world.together():
            model = HybridLM.from_recipe(recipe)
            model.loss_chunk = recipe.train.loss_chunk
            model.activation_checkpointing = recipe.train.activation_checkpointing
            if tag is None and recipe.train.init_from:
                source, fingerprint = recipe.train.init_from, self.tokenizer.fingerprint
                self.monitor.say(resume.load_initial(model, source, fingerprint))
        with logs.prints_to(self.folder / "logs" / f"rank_{self.world.rank}.log"):
            engine = Engine(model, recipe, self.geometry, self.world)
            if tag is not None:
                with self.world.together():
                    engine.load(self.checkpoints.folder / tag)
        if tag is not None:
            self.monitor.say(f"going on from {self.checkpoints.folder / tag}")
        return engine

    # The loop

    def steps(self) -> None:
        """From where the run stands to its last step, or to a signal."""
        train = self.recipe.train
        if any(self.world.gather(self.signals.stop)):
            self.monitor.say("stopped by SIGTERM before a step was taken; the same command goes on")
            raise SystemExit(STOPPED_EXIT_CODE)
        if self.progress.step == 0:
            before = self._score().bits_per_byte
            self.progress.bits_per_byte_before = None if math.isnan(before) else before
        while self.progress.step < train.steps:
            try:
                done, number = self._step(), self.progress.step
            except _Abandoned:
                self._stop_within_step()
            self.saver.advance()
            if train.eval_every and number % train.eval_every == 0:
                self._score()
            last = done.stop or number == train.steps
            if last or done.save or number % train.checkpoint_every == 0:
                self._save(patient=last)
            if done.stop and number < train.steps:
                self._saved()
                self.monitor.say(
                    f"stopped by SIGTERM after step {number}; the same command goes on from there"
                )
                raise SystemExit(STOPPED_EXIT_CODE)

    def _step(self) -> Step:
        """One optimizer step, counted and logged."""
        recipe, progress = self.recipe, self.progress
        begin = time.perf_counter()
        self.world.pulse.beat(f"step {progress.step + 1}")
        batches = []
        for number in range(1, self.geometry.accumulation + 1):
            batches.append(next(self.loader))
            if number % BATCHES_TO_STOP == 0:
                self._leave_if_asked()
        waited = time.perf_counter() - begin
        fraction = schedule.rate_fraction(progress.step, recipe.train.steps, recipe.schedule)
        rate = self.engine.set_rates(fraction)
        done = step.take(
            self.engine, self.world, batches, self.signals, z_loss=recipe.train.z_loss,
            tbptt_chunks=recipe.train.tbptt_chunks, waited=waited, sharing=self.sharing,
            between=self._between_passes,
        )  # fmt: skip
        progress.step += 1
        progress.sample += recipe.train.batch_size
        progress.tokens += done.tokens
        self._count_skipped(done)
        self.pace.add(time.perf_counter() - begin, done.waited, done.tokens)
        self.last_loss = done.loss
        self._log(done, rate)
        return done

    def _between_passes(self, passes: int) -> None:
        """What need not wait for the end of a step, as one of many passes may take minutes."""
        self.saver.advance()
        if passes % PASSES_TO_STOP == 0:
            self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        self.world.pulse.beat()
        if self.world.gather_numbers([self.signals.stop]).any():
            raise _Abandoned

    def _stop_within_step(self) -> NoReturn:
        """Keep what there was before the step, which is to be taken again."""
        number = self.progress.step
        if number:
            self._save(patient=True)
            self._saved()
        self.monitor.say(
            f"stopped by SIGTERM within step {number + 1}; the same command begins that step again"
        )
        raise SystemExit(STOPPED_EXIT_CODE)

    def _count_skipped(self, done: Step) -> None:
        progress, limit = self.progress, self.recipe.train.max_skipped
        if not done.update.skipped:
            progress.skipped_in_a_row = 0
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        bad = done.bad_ranks
        what = f"non-finite loss on rank {', '.join(map(str, bad))}" if bad else "non-finite gradient"
        self.monitor.say(f"step {progress.step} skipped: {what}")
        if progress.skipped_in_a_row <= limit:
            return
        where = self.world.gather([step.describe(batch) for batch in done.batches])
        chosen = [text for rank in bad or range(self.world.size) for text in where[rank]]
        self.world.agree(
            TrainError(
                f"{progress.skipped_in_a_row} steps in a row were skipped (train.max_skipped={limit}), the "
                f"last, step {progress.step}, for a {what}. It read {'; '.join(chosen[:8])}"
            )
        )

    def _log(self, done: Step, rate: float) -> None:
        section, progress, steps = self.recipe.monitor, self.progress, self.recipe.train.steps
        if section.statistics_every and progress.step % section.statistics_every == 0:
            self.monitor.write(progress.step, self._statistics(done.batches[0]))
        if progress.step % section.log_every and progress.step != steps:
            return
        values = {
            "train/loss": done.loss,
            "train/loss_largest": done.loss_largest,
            "train/learning_rate": rate,
            "train/gradient_norm": done.update.norm,
            "train/clip_factor": done.update.clip_factor,
            "train/skipped": progress.skipped,
            "train/tokens": progress.tokens,
            "train/z": done.z,
            "data/checksum": done.checksum,
        }
        speed = self.pace.report()
        self.monitor.write(progress.step, values | speed)
        left = clock(self.pace.seconds_per_step * (steps - progress.step))
        self.monitor.say(
            f"step {progress.step}/{steps}  loss {done.loss:.4f}  "
            f"{speed['speed/tokens_per_second']:,.0f} tokens/s  {left} left"
        )

    @torch.no_grad()
    def _statistics(self, batch: Batch) -> dict[str, float]:
        """The mixers' own numbers on the first window of a batch (its first piece), by a forward pass of its
        own: means over the ranks."""
        length = -(-self.recipe.data.context // self.recipe.train.tbptt_chunks)
        first = stretch(whole(batch), 0, length)
        ids = first.ids[:1]
        piece = self.sharing.piece(replace(batch, ids=ids, labels=ids, cu_seqlens=first.cu_seqlens))
        piece = piece.to(self.world.device)
        found: dict[str, Tensor] = {}
        self.engine.model(piece.ids, statistics=found, **piece.arguments())
        ranks = self.world.gather({name: float(value) for name, value in found.items()})
        return {f"layers/{name}": sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}

    # Between the steps

    def _score(self) -> validation.Score:
        """Score the held-out text as the model is now; not a number where no text is held out."""
        if not self.held_out.documents:
            if self.scored is None:
                self.monitor.say("no validation: no document is held out (data.sources.*.validation)")
            self.scored = (self.progress.step, validation.Score(math.nan, math.nan, 0))
            return self.scored[1]
        result = validation.score(
            self.engine.model, self.held_out, self.world, self.recipe.train.tbptt_chunks
        )
        self.scored = (self.progress.step, result)
        self.monitor.write(
            self.progress.step,
            {"validation/loss": result.loss, "validation/bits_per_byte": result.bits_per_byte},
        )
        self.monitor.say(
            f"step {self.progress.step}: validation loss {result.loss:.4f}, "
            f"{result.bits_per_byte:.4f} bits per byte"
        )
        return result

    def _save(self, *, patient: bool) -> None:
        """Start to write a checkpoint, unless this step has one."""
        if self.saver.begun_step != self.progress.step:
            self.world.on_main(self.monitor.flush)
            self.saver.begin(self.engine, self.progress, self.origin, patient=patient)

    def _saved(self) -> None:
        """Wait until the checkpoint of this step is on disk; TrainError when it could not be written."""
        self.saver.wait()
        if self.saver.saved_step != self.progress.step:
            self.world.agree(TrainError(self.saver.failure))

    def finish(self, begin: float) -> Summary:
        """Score, sample and sum up, when the last step's checkpoint is on disk."""
        if self.scored is None or self.scored[0] != self.progress.step:
            self._score()
        self._saved()
        assert self.scored is not None
        result = self.scored[1]
        memory = self.world.gather_numbers([monitor.memory_bytes(self.world.device)])
        texts: list[str] = []
        self.world.on_main(
            lambda: texts.extend(
                samples.write(self.folder, self.recipe, self.world.device, self.monitor.say)
            ),
            patient=True,
        )
        before = self.progress.bits_per_byte_before
        return Summary(
            run=self.folder,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            skipped=self.progress.skipped,
            loss=self.last_loss,
            validation_loss=result.loss,
            bits_per_byte_before=math.nan if before is None else before,
            bits_per_byte=result.bits_per_byte,
            tokens_per_second=self.pace.tokens_per_second,
            seconds=time.perf_counter() - begin,
            peak_memory_bytes=int(memory.max()),
            samples=tuple(texts),
        )


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

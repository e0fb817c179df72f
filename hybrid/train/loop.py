"""The training loop: fetch, forward, backward, step, log, evaluate, save. The rest hangs on hooks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hybrid.checkpoint.folder import Progress
from hybrid.checkpoint.writer import Writer
from hybrid.data.batch import Batch
from hybrid.data.loader import Loader
from hybrid.data.validation import ValidationSet
from hybrid.distributed.context_parallel import SequenceRanks
from hybrid.distributed.world import World
from hybrid.errors import TrainError
from hybrid.recipe.schema import Recipe
from hybrid.text import clock

from . import validation
from .distill import Objectives
from .engine import Engine
from .metrics import Metrics
from .optimizer import rate_fraction
from .step import Step, StepResult, describe
from .throughput import Throughput


class Hook:
    """What else happens at some points of the loop. All ranks call all hooks in the same order.

    `batches` and `passes` of the step have been read and made so far. `after_backward` comes before the
    update, `after_scored` after every batch of held-out text, and `after_step` when the step is logged and
    evaluated, and before it is saved.
    """

    def before_step(self, run: Run) -> None: ...
    def after_fetch(self, run: Run, batches: int) -> None: ...
    def after_forward(self, run: Run) -> None: ...
    def after_backward(self, run: Run, passes: int) -> None: ...
    def after_scored(self, run: Run) -> None: ...
    def after_step(self, run: Run, result: StepResult) -> None: ...


@dataclass
class Run:
    """The parts of a run, which `trainer.build` puts together, and how far it has come."""

    recipe: Recipe
    world: World
    engine: Engine
    loader: Loader
    accumulation: int
    """Micro-batches of a step."""
    ranks: SequenceRanks
    held_out: ValidationSet
    metrics: Metrics
    throughput: Throughput
    writer: Writer
    hooks: list[Hook]
    progress: Progress
    objectives: Objectives
    last_loss: float | None = None
    scored: tuple[int, validation.Score] | None = None
    """The last evaluation's step and result."""


def train_steps(run: Run) -> None:
    """Train from where the run stands to its last step."""
    train, progress = run.recipe.train, run.progress
    if progress.step == 0:
        before = evaluate(run)
        progress.bits_per_byte_before = None if math.isnan(before.bits_per_byte) else before.bits_per_byte
        progress.text_before = before.text
    while progress.step < train.steps:
        result = take_step(run)
        if train.eval_every and progress.step % train.eval_every == 0:
            evaluate(run)
        for hook in run.hooks:
            hook.after_step(run, result)
        last = progress.step == train.steps
        if last or progress.step % train.checkpoint_every == 0:
            save(run, no_timeout=last)


def take_step(run: Run) -> StepResult:
    """Take one optimizer step, count and log it."""
    begin, train = time.perf_counter(), run.recipe.train
    for hook in run.hooks:
        hook.before_step(run)
    objective = run.objectives.at(run.progress.step)
    batches: list[Batch] = []
    while len(batches) < run.accumulation:
        batches.append(objective.rows(next(run.loader)))
        for hook in run.hooks:
            hook.after_fetch(run, len(batches))
    waited = time.perf_counter() - begin

    fraction = rate_fraction(run.progress.step, train.steps, run.recipe.schedule)
    rate = run.engine.set_rates(fraction, objective.resting)
    step = Step(
        run.engine, run.world, batches, ranks=run.ranks, objective=objective, tbptt_chunks=train.tbptt_chunks,
        waited=waited,
    )  # fmt: skip
    for number, inputs in enumerate(step.passes, 1):
        loss = step.forward(inputs)
        for hook in run.hooks:
            hook.after_forward(run)
        step.backward(loss)
        for hook in run.hooks:
            hook.after_backward(run, number)
    result = step.update()

    _count(run, result)
    run.throughput.add(time.perf_counter() - begin, result.waited, result.tokens)
    _log(run, result, rate)
    return result


def _count(run: Run, result: StepResult) -> None:
    """Count a step; TrainError when too many in a row were skipped."""
    progress, train = run.progress, run.recipe.train
    progress.step += 1
    progress.sample += train.batch_size
    progress.tokens += result.tokens
    if result.empty:
        progress.empty += 1
        run.metrics.say(f"step {progress.step} is empty: no token of it is counted; it changes nothing")
        return
    run.last_loss = result.loss
    if not result.update.skipped:
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    bad = result.bad_ranks
    what = f"non-finite loss on rank {', '.join(map(str, bad))}" if bad else "non-finite gradient"
    run.metrics.say(f"step {progress.step} skipped: {what}")
    if progress.skipped_in_a_row <= train.max_skipped:
        return
    where = run.world.gather([describe(batch) for batch in result.batches])
    chosen = [text for rank in bad or range(run.world.size) for text in where[rank]]
    run.world.raise_if_any(
        TrainError(
            f"{progress.skipped_in_a_row} steps in a row were skipped "
            f"(train.max_skipped={train.max_skipped}), the last, step {progress.step}, for a {what}. "
            f"It read {'; '.join(chosen[:8])}"
        )
    )


def _log(run: Run, result: StepResult, rate: float) -> None:
    progress, train, steps = run.progress, run.recipe.train, run.recipe.train.steps
    if progress.step % run.recipe.monitor.log_every and progress.step != steps:
        return
    values = {
        "train/learning_rate": rate,
        "train/skipped": progress.skipped,
        "train/empty": progress.empty,
        "train/tokens": progress.tokens,
        "data/checksum": result.checksum,
    }
    if not result.empty:
        values |= {
            "train/loss": result.loss,
            "train/loss_largest": result.loss_largest,
            "train/gradient_norm_before_clipping": result.update.norm,
            "train/clip_factor": result.update.clip_factor,
            "train/z": result.z,
        }
        if train.distill:
            values |= {f"distill/{name}": value for name, value in result.parts.items()}
    speed = run.throughput.report()
    run.metrics.write(progress.step, values | speed)
    left = clock(run.throughput.seconds_per_step * (steps - progress.step))
    loss = "-" if result.empty else f"{result.loss:.4f}"
    run.metrics.say(
        f"step {progress.step}/{steps}  loss {loss}  "
        f"{speed['speed/tokens_per_second']:,.0f} tokens/s  {left} left"
    )


def evaluate(run: Run) -> validation.Score:
    """Score the held-out text as the model is now; not a number where no text is held out."""
    step = run.progress.step
    if not run.held_out.documents:
        if run.scored is None:
            run.metrics.say("no validation: no document is held out (data.sources.*.validation)")
        result = validation.Score(math.nan, math.nan, run.held_out.text_fingerprint)
    else:
        model, chunks = run.engine.model, run.recipe.train.tbptt_chunks

        def after_batch() -> None:
            for hook in run.hooks:
                hook.after_scored(run)

        result = validation.score(model, run.held_out, run.world, chunks, after_batch)
        values = {
            "validation/loss": result.loss,
            "validation/bits_per_byte": result.bits_per_byte,
            "validation/text": int(result.text[:8], 16),  # another number: scores of another text
        }
        run.metrics.write(step, values)
        run.metrics.say(
            f"step {step}: validation loss {result.loss:.4f}, {result.bits_per_byte:.4f} bits per byte"
        )
    run.scored = (step, result)
    return result


def save(run: Run, *, no_timeout: bool = False) -> None:
    """Start to write a checkpoint, unless this step has one."""
    if run.writer.begun_step != run.progress.step:
        run.world.rank0_only(run.metrics.flush)
        run.writer.begin(run.progress, no_timeout=no_timeout)


def wait_saved(run: Run) -> None:
    """Wait until the checkpoint of this step is on disk; TrainError when it could not be written."""
    run.writer.wait()
    if run.writer.saved_step != run.progress.step:
        run.world.raise_if_any(TrainError(run.writer.failure))

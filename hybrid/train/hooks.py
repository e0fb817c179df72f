"""What hangs on the training loop's hooks: signs of life, checkpoints, stop signals, statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from hybrid.data.batch import Batch
from hybrid.data.checksums import ShardCheck
from hybrid.distributed.context_parallel import ALONE
from hybrid.distributed.signals import Signals
from hybrid.errors import STOPPED_EXIT_CODE, DataError

from .loop import Hook, Run, save, wait_saved
from .step import StepResult
from .tbptt import token_range

PASSES_TO_STOP, BATCHES_TO_STOP = 8, 64
"""After so many passes of a step, or batches read for it, it is seen whether to stop there."""

WITHIN_STEP = "within step {1}; the same command begins that step again"


class SignsOfLife(Hook):
    """Tells the watchdog that training goes on."""

    def before_step(self, run: Run) -> None:
        run.world.heartbeat.beat(f"step {run.progress.step + 1}")

    def after_forward(self, run: Run) -> None:
        run.world.heartbeat.beat()

    def after_backward(self, run: Run, passes: int) -> None:
        run.world.heartbeat.beat()

    def after_step(self, run: Run, result: StepResult) -> None:
        run.world.heartbeat.beat()


class CheckpointProgress(Hook):
    """Brings the checkpoint on its way further, also within a step, whose many passes may take minutes."""

    def after_backward(self, run: Run, passes: int) -> None:
        run.writer.advance()


class DamagedShards(Hook):
    """Stops all ranks when a token shard turns out to be damaged; the last step waits until that is known."""

    def __init__(self, check: ShardCheck, step: int) -> None:
        """`step`: the finished steps when this run began to read the shards."""
        self._check, self._step, self._over = check, step, False

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._over:
            return
        last = run.progress.step == run.recipe.train.steps
        with run.world.heartbeat.no_timeout("comparing token shards with their checksums"):
            over = self._check.over(None if last else 0.0)
        fault = self._check.fault
        found = run.world.gather_numbers([over, fault is not None])
        self._over = bool(found[:, 0].all())
        if found[:, 1].any():
            since = f"; checkpoints after step {self._step} may have learned from it"
            run.world.raise_if_any(fault and DataError(f"{fault}{since}"))


class StopSignals(Hook):
    """Saves and stops on SIGTERM, and saves on SIGUSR1, on all ranks when one has got it."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def after_fetch(self, run: Run, batches: int) -> None:
        if batches % BATCHES_TO_STOP == 0:
            self._leave_if_asked(run, WITHIN_STEP)

    def after_backward(self, run: Run, passes: int) -> None:
        if passes % PASSES_TO_STOP == 0:
            self._leave_if_asked(run, WITHIN_STEP)

    def after_scored(self, run: Run) -> None:
        self._leave_if_asked(run, "within the evaluation after step {0}; the same command goes on from there")

    def after_step(self, run: Run, result: StepResult) -> None:
        step, signals = run.progress.step, self._signals
        last = step == run.recipe.train.steps
        asked_to_stop, asked_to_save = run.world.gather_numbers([signals.stop, signals.save]).any(0)
        signals.save = False
        if asked_to_stop and not last:
            save(run, no_timeout=True)
            wait_saved(run)
            stop(run, f"after step {step}; the same command goes on from there")
        if asked_to_save:
            save(run, no_timeout=last)

    def _leave_if_asked(self, run: Run, when: str) -> None:
        """Keep what there was after the last whole step; `when` has places for its number and the next."""
        run.world.heartbeat.beat()
        if not run.world.gather_numbers([self._signals.stop]).any():
            return
        step = run.progress.step
        if step:
            save(run, no_timeout=True)
            wait_saved(run)
        stop(run, when.format(step, step + 1))


def stop(run: Run, when: str) -> NoReturn:
    """End the process as asked by SIGTERM."""
    run.metrics.say(f"stopped by SIGTERM {when}")
    raise SystemExit(STOPPED_EXIT_CODE)


class LayerStatistics(Hook):
    """Logs the mixers' own numbers every `monitor.statistics_every` steps."""

    def after_step(self, run: Run, result: StepResult) -> None:
        every = run.recipe.monitor.statistics_every
        if every and run.progress.step % every == 0:
            run.metrics.write(run.progress.step, layer_statistics(run, result.batches[0]))


@torch.no_grad()
def layer_statistics(run: Run, batch: Batch) -> dict[str, float]:
    """Compute the mixers' own numbers on the first window of a batch (its first tbptt chunk), by a forward
    pass of its own: means over the ranks."""
    length = -(-run.recipe.data.context // run.recipe.train.tbptt_chunks)
    first = token_range(ALONE.shard(batch), 0, length)
    ids = first.ids[:1]
    shard = run.ranks.shard(replace(batch, ids=ids, labels=ids, cu_seqlens=first.cu_seqlens))
    shard = shard.to(run.world.device)
    found: dict[str, Tensor] = {}
    run.engine.model(shard.ids, statistics=found, **shard.options())
    ranks = run.world.gather({name: float(value) for name, value in found.items()})
    return {f"layers/{name}": sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}

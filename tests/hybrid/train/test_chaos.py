"""Random misfortune: whatever happens, a run ends within a minute and says why, and going on from what is
left gives the series of a run that was left alone. `make test` has a few trials, `make chaos` all."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.folder import tags_in
from hybrid.errors import LOST_EXIT_CODE, STOPPED_EXIT_CODE

from . import tiny
from .processes import Ranks, fill, small_disk, started

pytestmark = pytest.mark.ranks

TRIALS, QUICK_TRIALS = 50, 8
STEPS, MINUTE, HANG_TIMEOUT = 16, 60, 20
SETTINGS = {"train__steps": STEPS, "train__checkpoint_every": 3, "train__keep_last": 2}
LOST = r"lost the connection to another process"


class Trial:
    """One run of two ranks, and a source of chance."""

    def __init__(self, seed: int, recipe: Path, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.recipe, self.folder, self.output = recipe, folder, folder / "run"
        self.stage = 3 if seed % 9 == 8 else 1
        self.misfortunes: list[str] = []

    def start(self, **changes: Any) -> contextlib.AbstractContextManager[Ranks]:
        settings = {**SETTINGS, "parallel__zero_stage": self.stage, "train__hang_timeout": HANG_TIMEOUT}
        return started(self.recipe, self.output, 2, self.folder / "log", **settings | changes)

    def wait(self, ranks: Ranks, least: int = 4) -> None:
        """Until some step after the first checkpoint, and a moment longer."""
        assert ranks.wait_for_steps(self.output, self.chance.randint(least, STEPS - 5)), ranks.said()
        time.sleep(self.chance.random() * 0.05)

    def signal(self, ranks: Ranks, rank: int, number: signal.Signals) -> None:
        ranks.signal(rank, number)
        self.misfortunes.append(number.name)


def killed(trial: Trial) -> None:
    """One rank, which has no chance to say anything: the other does."""
    with trial.start() as ranks:
        trial.wait(ranks)
        victim = trial.chance.randrange(2)
        trial.signal(ranks, victim, signal.SIGKILL)
        assert ranks.exit_codes(MINUTE, [1 - victim]) == [LOST_EXIT_CODE]
    assert re.search(LOST, ranks.said())


def asked_to_stop(trial: Trial) -> None:
    with trial.start() as ranks:
        trial.wait(ranks)
        trial.signal(ranks, trial.chance.randrange(2), signal.SIGTERM)
        assert ranks.exit_codes(MINUTE) == [STOPPED_EXIT_CODE] * 2
    assert re.search(r"stopped by SIGTERM after step \d+", ranks.said())


def asked_to_stop_early(trial: Trial) -> None:
    """While it starts, or soon after: on a fast machine that may be after its last step."""
    with trial.start() as ranks:
        ranks.wait_until_they_catch_sigterm()
        time.sleep(trial.chance.random())
        for rank in range(2):
            trial.signal(ranks, rank, signal.SIGTERM)
        codes = ranks.exit_codes(MINUTE)
    if f"step {STEPS}/{STEPS}" not in ranks.said():
        assert codes == [STOPPED_EXIT_CODE] * 2
        assert re.search(r"stopped by SIGTERM (outside training|before|after)", ranks.said())
    else:
        assert set(codes) <= {0, STOPPED_EXIT_CODE, -signal.SIGTERM}


def stopped_in_its_tracks(trial: Trial) -> None:
    """SIGSTOP: the process is there, its connections too, but nothing comes."""
    with trial.start() as ranks:
        trial.wait(ranks)
        victim = trial.chance.randrange(2)
        begin = time.monotonic()
        trial.signal(ranks, victim, signal.SIGSTOP)
        assert ranks.exit_codes(MINUTE, [1 - victim]) == [LOST_EXIT_CODE]
        assert time.monotonic() - begin < HANG_TIMEOUT
    said = ranks.said()
    assert f"rank {1 - victim} of 2 ends, as the run hangs: rank {victim} is silent" in said
    assert re.search(r"Thread 0x\w+ .*\n  File ", said)


def power_cut(trial: Trial) -> None:
    """All at once, and the newest tag's files are not what they were."""
    with trial.start() as ranks:
        trial.wait(ranks, 8)
        for rank in range(2):
            trial.signal(ranks, rank, signal.SIGKILL)
        ranks.exit_codes(MINUTE)
    folder = trial.output / "checkpoints"
    assert len(tags_in(folder)) > 1
    trial.misfortunes += damage(trial.chance, folder / tags_in(folder)[-1])
    (folder / "latest").unlink()


def damage(chance: random.Random, tag: Path) -> list[str]:
    """Some files of a tag; what was done to each."""
    done = []
    files = sorted(tag.iterdir())
    for path in chance.sample(files, chance.randint(1, len(files))):
        content = path.read_bytes()
        kind = chance.choice(["removed", "emptied", "truncated", "truncated", "changed"])
        done.append(f"file {kind}")
        at = chance.randrange(len(content))
        if kind == "removed":
            path.unlink()
        elif kind == "emptied":
            path.write_bytes(b"")
        elif kind == "truncated":
            path.write_bytes(content[:at])
        else:
            path.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
    return done


def cut_during_a_save(trial: Trial) -> None:
    """As soon as an unfinished tag is seen."""
    folder = trial.output / "checkpoints"
    with trial.start(train__checkpoint_every=2) as ranks:
        trial.wait(ranks)
        end = time.monotonic() + MINUTE
        while not list(folder.glob("*.partial")) and time.monotonic() < end:
            pass
        for rank in trial.chance.choice(([0], [1], [0, 1])):
            trial.signal(ranks, rank, signal.SIGKILL)
        ranks.exit_codes(MINUTE)


def disk_fills(trial: Trial) -> None:
    """Training goes on without new checkpoints; the last one cannot be written, which is an error."""
    with small_disk(trial.output, "3m"):
        with trial.start() as ranks:
            trial.wait(ranks)
            fill(trial.output)
            trial.misfortunes.append("disk full")
            assert ranks.exit_codes(MINUTE) == [2, 2]
        said = ranks.said()
        assert re.search(r"could not write checkpoint .*No space left on device", said)
        assert "the newest good checkpoint is step_" in said
        assert f"step {STEPS}/{STEPS}" in said
        (trial.output / "filler").unlink()
        kept = trial.folder / "kept"
        shutil.copytree(trial.output, kept)
    trial.output.rmdir()
    kept.rename(trial.output)


def goes_elsewhere(trial: Trial) -> None:
    """One rank dies, and the other goes on alone for a while, at another stage."""
    killed(trial)
    logged = tiny.logged_steps(trial.output)
    with started(
        trial.recipe, trial.output, 1, trial.folder / "log",
        **SETTINGS | {"parallel__zero_stage": 0, "train__hang_timeout": HANG_TIMEOUT},
    ) as alone:  # fmt: skip
        assert alone.wait_for_steps(trial.output, logged + 2), alone.said()
        trial.signal(alone, 0, signal.SIGTERM)
        assert alone.exit_codes(MINUTE) == [STOPPED_EXIT_CODE]


KINDS: list[Callable[[Trial], None]] = [
    killed, stopped_in_its_tracks, asked_to_stop, power_cut, cut_during_a_save, disk_fills, goes_elsewhere,
    asked_to_stop_early,
]  # fmt: skip


@pytest.fixture(scope="module")
def left_alone(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The series of a run at a ZeRO stage to which nothing happens."""
    found: dict[int, list[tuple[float, ...]]] = {}

    def series(stage: int) -> list[tuple[float, ...]]:
        if stage not in found:
            folder = tmp_path_factory.mktemp("alone")
            settings = {"parallel__zero_stage": stage, **SETTINGS}
            with started(tiny_recipe, folder / "run", 2, folder / "log", **settings) as ranks:
                assert ranks.exit_codes(4 * MINUTE) == [0, 0], ranks.said()
            found[stage] = tiny.series(folder / "run")
        return found[stage]

    return series


@pytest.mark.parametrize(
    "seed",
    [pytest.param(s, marks=[pytest.mark.chaos] if s >= QUICK_TRIALS else []) for s in range(TRIALS)],
)
def test_it_ends_with_a_message_and_goes_on(
    left_alone: Any, tiny_recipe: Path, tmp_path: Path, seed: int, record_property: Callable[[str, Any], None]
):
    trial, happens = Trial(seed, tiny_recipe, tmp_path), KINDS[seed % len(KINDS)]
    record_property("misfortune", happens.__name__)
    record_property("happened", trial.misfortunes)
    wanted = left_alone(trial.stage)
    happens(trial)
    with trial.start() as ranks:
        assert ranks.exit_codes(4 * MINUTE) == [0, 0], ranks.said()
    found = tiny.series(trial.output)
    if happens is not goes_elsewhere:
        assert found == wanted
        return
    assert [(line[0], line[-1]) for line in found] == [(line[0], line[-1]) for line in wanted]
    assert [line[1] for line in found] == pytest.approx([line[1] for line in wanted], abs=1e-5)

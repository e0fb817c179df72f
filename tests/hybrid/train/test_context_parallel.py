"""Sequences cut over ranks: training as without the cut, whatever the layers, ZeRO stage and batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.data.batch import Batch, Segment
from hybrid.distributed import world as distributed
from hybrid.distributed.context_parallel import SequenceRanks
from hybrid.estimate.communication import sequence_bytes
from hybrid.model import HybridLM
from hybrid.model.head import IGNORE
from hybrid.recipe import Geometry, layer_specs
from hybrid.recipe.schema import Recipe
from hybrid.train import optimizer
from hybrid.train.engine import Engine
from hybrid.train.metrics import read_metrics
from hybrid.train.step import Step, checksum_of

from . import tiny
from .tiny import fingerprint, weights

pytestmark = pytest.mark.ranks

WINDOWS, LENGTH, VOCABULARY, STEPS = 4, 32, 40, 3
DOCUMENTS = ((32,), (5, 20, 7), (1, 31), (16, 16))  # of each window
SMALL = {
    "K": {"chunk": 4, "budget_minimum": 4, "budget_factor": 2.0}, "W": {"window": 6}, "B": {"chunk": 4},
    "Q": {"chunk": 4, "max_centroids": 6},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A few steps of training."""

    pattern: str
    sequence: int = 2
    stage: int = 1
    micro: int = 1
    packed: bool = True
    again: bool = False
    """Activation checkpointing."""
    three: bool = False
    """Three heads, which no test's ranks can share."""
    rate: float = 0.1
    name: str = "sgd"
    steps: int = STEPS

    def recipe(self) -> Recipe:
        found = Recipe()
        found.model.pattern, found.model.hidden_size, found.model.vocab_size = self.pattern, 32, VOCABULARY
        heads = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8}
        found.model.defaults = heads if self.three else {"num_heads": 4, "num_kv_heads": 2}
        found.model.layers = {letter: SMALL[letter] for letter in SMALL if letter in self.pattern}
        found.optimizer.name, found.optimizer.lr = self.name, self.rate
        found.optimizer.clip = found.optimizer.weight_decay = 0.0
        # Far above what rounding leaves of a gradient that is 0 (1e-8), which AdamW would take for a step.
        found.optimizer.eps = 1e-6
        found.parallel.zero_stage, found.parallel.sequence = self.stage, self.sequence
        found.data.context, found.data.boundaries = LENGTH, "respect" if self.packed else "cross"
        found.train.activation_checkpointing = self.again
        return found

    def geometry(self, size: int) -> Geometry:
        parallel = size // self.sequence
        return Geometry(size, parallel, self.micro, WINDOWS // (parallel * self.micro))

    def model(self) -> HybridLM:
        """The same weights every time, none of them zero: every parameter has a real gradient. The layers are
        tame, so that fp32 itself is within 3e-6 of float64."""
        torch.manual_seed(0)
        section = self.recipe().model
        made = HybridLM(section, layer_specs(section))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        made.activation_checkpointing = self.again
        return made

    def batch(self, number: int, first: int, count: int) -> Batch:
        """Windows `first` to `first + count` of a step; some count all their labels, some few or none."""
        generator = torch.Generator().manual_seed(number)
        ids, labels = torch.randint(0, VOCABULARY, (2, WINDOWS, LENGTH), generator=generator)
        labels[1, 3:] = IGNORE
        labels[2, : LENGTH // 2] = IGNORE
        labels[3] = IGNORE
        chosen = slice(first, first + count)
        lengths = sum(DOCUMENTS[chosen], ())
        segments = [Segment("text", 0, 0, length) for length in lengths]
        if not self.packed:
            return Batch(ids[chosen], labels[chosen], None, first, segments)
        borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Batch(ids[chosen].reshape(1, -1), labels[chosen].reshape(1, -1), borders, first, segments)


def in_ranks(case: Case) -> dict[str, Any]:
    """Losses, weights and their hash after every step, in a rank."""
    world = distributed.start(1)
    _, parallel, _, accumulation = case.geometry(world.size)
    engine = Engine(case.model(), case.recipe(), case.geometry(world.size), world)
    ranks = SequenceRanks.join(world, case.sequence)
    found: dict[str, Any] = {"losses": [], "hashes": [], "checksums": []}
    for number in range(case.steps):
        engine.set_rates(1.0)
        firsts = [
            (micro * parallel + world.rank // case.sequence) * case.micro for micro in range(accumulation)
        ]
        batches = [case.batch(number, first, case.micro) for first in firsts]
        done = Step(engine, world, batches, ranks=ranks).take()
        found["losses"].append(done.loss)
        found["checksums"].append((done.checksum, done.tokens))
        found["hashes"].append(fingerprint(engine))
    found["weights"] = weights(engine)
    found["sent"] = ranks.sent.total()
    engine.close()
    ranks.leave()
    return found


def order_of_gradients(case: Case) -> list[list[str]]:
    """Of this rank's micro-batches: the parameters in the order in which they got their gradients."""
    world = distributed.start(1)
    _, parallel, micro, accumulation = case.geometry(world.size)
    model, ranks = case.model(), SequenceRanks.join(world, case.sequence)
    came: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    found = []
    for number in range(accumulation):
        first = (number * parallel + world.rank // case.sequence) * micro
        shard = ranks.shard(case.batch(0, first, micro))
        model(shard.ids, **shard.options()).total.backward()
        found.append(came.copy())
        came.clear()
    ranks.leave()
    return found


def on_one(case: Case) -> dict[str, Any]:
    """The same as one large batch on one process, with plain torch in float64."""
    model, settings = case.model().double(), case.recipe().optimizer
    built = optimizer.build(settings, model.named_parameters(), model.no_decay())
    found: dict[str, Any] = {"losses": [], "checksums": []}
    for number in range(case.steps):
        optimizer.apply(built.param_groups, settings, 1.0, 1.0)
        batch = case.batch(number, 0, WINDOWS)
        out = model(batch.ids, cu_seqlens=batch.cu_seqlens, labels=batch.labels)
        loss = out.total / out.tokens
        loss.backward()
        if number == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        built.step()
        built.zero_grad()
        found["losses"].append(loss.item())
        found["checksums"].append((checksum_of(batch) % 2**32, WINDOWS * LENGTH))
    found["weights"] = {name: p.detach() for name, p in model.named_parameters()}
    return found


def assert_close(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Within 1e-5 of each tensor's largest number, or 1e-7."""
    assert found.keys() == right.keys()
    for name, value in right.items():
        error, allowed = (found[name] - value).abs().max(), max(1e-5 * float(value.abs().max()), 1e-7)
        assert error <= allowed, f"{name}: {error:.2g} off, allowed {allowed:.2g}"


def check(pools: Any, size: int, case: Case) -> None:
    """Losses, weights or gradients, hashes, and what was counted, against one process."""
    right, ranks = on_one(case), pools(size).run(in_ranks, case)
    for one in ranks:
        assert one["losses"] == pytest.approx(right["losses"], rel=1e-5)
        assert one["hashes"] == ranks[0]["hashes"]
        assert one["checksums"] == right["checksums"]
    assert len(set(ranks[0]["hashes"])) == case.steps
    geometry = case.geometry(size)
    a_step = sum(layer.step for layer in sequence_bytes(case.model(), case.recipe(), geometry))
    assert sum(one["sent"] for one in ranks) == case.steps * geometry.data_parallel * a_step
    if case.name == "sgd" and case.steps == 1:
        start = dict(case.model().named_parameters())
        moved = {name: (start[name].detach() - new) / case.rate for name, new in ranks[0]["weights"].items()}
        assert_close(moved, right["gradients"])
    elif case.name == "sgd":
        assert_close(ranks[0]["weights"], right["weights"])


SPLITS = [(2, 2), (4, 2), (4, 4)]  # processes, ranks per sequence
PATTERNS = {1: "KFWBQK", 2: "RGDMRK", 3: "QRFMKB"}  # by ZeRO stage


@pytest.mark.parametrize(("size", "sequence"), SPLITS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_those_of_whole_sequences(rank_pools: Any, size: int, sequence: int, stage: int):
    """One large SGD step shows the gradient that the optimizer was given."""
    check(rank_pools, size, Case(PATTERNS[stage], sequence, stage, rate=1e3, steps=1))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sequence", [1, 2, 4])
@pytest.mark.parametrize(("pattern", "three"), [("KFWBQ", False), ("RGDMK", False), ("KWK", True)])
def test_gradients_come_in_one_order(rank_pools: Any, pattern: str, three: bool, sequence: int, packed: bool):
    """DeepSpeed adds up the ranks' buckets, which it fills with gradients as they come."""
    case = Case(pattern, sequence, packed=packed, three=three)
    orders = [order for rank in rank_pools(4).run(order_of_gradients, case) for order in rank]
    assert len(orders) == WINDOWS * sequence
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == sorted(name for name, _ in case.model().named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kvm_hands_on_what_heads_cannot_share(rank_pools: Any, stage: int):
    check(rank_pools, 4, Case("KWK", 4, stage, three=True, rate=1e3, steps=1))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("micro", "again"), [(1, True), (2, False)])
def test_weights_after_three_steps(rank_pools: Any, micro: int, again: bool, stage: int):
    """With accumulation, recomputed layers (which replay their routes), and rows of more than a window."""
    check(rank_pools, 2, Case("KWFQ", 2, stage, micro, again=again))


@pytest.mark.parametrize("stage", [1, 3])
def test_adamw_follows_and_replicas_stay_equal(rank_pools: Any, stage: int):
    check(rank_pools, 4, Case("FKB", 2, stage, packed=False, rate=1e-2, name="adamw"))


@pytest.mark.parametrize("seed", range(3))
def test_random_patterns(rank_pools: Any, seed: int):
    rng = random.Random(seed)
    size, sequence = SPLITS[seed]
    pattern = "".join(rng.choices("KFWBQRGDM", k=4))
    packed, again = rng.random() < 0.5, rng.random() < 0.5
    check(
        rank_pools,
        size,
        Case(pattern, sequence, 3 - seed, packed=packed, again=again, rate=1e3, steps=1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("size", "sequence"), SPLITS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_kind_in_random_order(rank_pools: Any, size: int, sequence: int, stage: int, packed: bool):
    """Gradients, weights after three steps, and AdamW; KVM by heads and, with three heads, handed on."""
    rng = random.Random(f"{size} {sequence} {stage} {packed}")
    kinds = "".join(rng.sample("KFWBQRGDM", k=9))
    micro = rng.choice([1, 2]) if size // sequence < 4 else 1
    for pattern, again in ((kinds[:5], True), (kinds[5:], False)):
        settings = {"stage": stage, "micro": micro, "packed": packed, "again": again}
        check(rank_pools, size, Case(pattern, sequence, **settings, rate=1e3, steps=1))
        check(rank_pools, size, Case(pattern, sequence, **settings))
        check(rank_pools, size, Case(pattern, sequence, **settings, rate=1e-2, name="adamw"))
    check(rank_pools, size, Case("KWK", sequence, **settings, three=True, rate=1e3, steps=1))


def test_a_run_logs_the_same_with_and_without_the_cut(rank_pools: Any, tiny_recipe: Path, tmp_path: Path):
    """Losses, norms, checksums of what was read, and the layers' statistics: no window is read twice."""
    settings = {
        "model__pattern": "KRF", "data__context": 48, "monitor__statistics_every": 2, "train__steps": 3,
        "model__layers__K__chunk": 4, "model__layers__K__budget_minimum": 4,
        "model__layers__K__budget_factor": 2, "train__micro_batch_size": 2,
    }  # fmt: skip
    for sequence in (1, 2):
        rank_pools(sequence).run(
            tiny.run, tiny_recipe, tmp_path / str(sequence), parallel__sequence=sequence, **settings
        )
    logged = ("train/", "data/", "layers/", "validation/")
    whole, cut = (read_metrics(tmp_path / str(sequence)) for sequence in (1, 2))
    assert [line.keys() for line in cut] == [line.keys() for line in whole]
    for line, right in zip(cut, whole, strict=True):
        for name, value in right.items():
            if name.startswith(logged) and name != "train/loss_largest":
                assert line[name] == pytest.approx(value, rel=1e-5), name
    assert any("layers/0/gate_std" in line for line in whole)

"""One step on real ranks: exact weighting, equal replicas, skipping."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid.data.batch import Batch, Segment
from hybrid.distributed import world as distributed
from hybrid.errors import TrainError
from hybrid.model import HybridLM
from hybrid.model.head import IGNORE, Loss
from hybrid.recipe import Geometry, layer_specs
from hybrid.recipe.schema import Recipe
from hybrid.train import engine as engine_module
from hybrid.train import optimizer
from hybrid.train.distill import CROSS_ENTROPY
from hybrid.train.engine import Engine, settings
from hybrid.train.step import Step

from .tiny import fingerprint, patched, weights

pytestmark = pytest.mark.ranks

SEQUENCES, LENGTH, VOCABULARY, STEPS = 8, 12, 40, 3
SPLITS = (8, 4, 2, 1)  # micro-batch sizes of a rank's 8 sequences
STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]


def recipe(stage: int = 0, precision: str = "fp32", **section: Any) -> Recipe:
    found = Recipe()
    found.model.pattern, found.model.hidden_size, found.model.vocab_size = "FW", 16, VOCABULARY
    found.model.defaults = {"num_heads": 2}
    found.model.layers = {"W": {"window": 4}}
    found.optimizer.lr, found.optimizer.clip = 1e-2, 0.0
    for name, value in section.items():
        setattr(found.optimizer, name, value)
    found.parallel.zero_stage, found.train.precision = stage, precision
    return found


def model(precision: str = "fp32") -> HybridLM:
    """The same weights every time; `bf16`: rounded to what bf16 can hold."""
    torch.manual_seed(0)
    section = recipe().model
    made = HybridLM(section, layer_specs(section))
    with torch.no_grad():
        for parameter in made.parameters():  # nothing zero or tiny: every parameter has a real gradient
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made.bfloat16().float() if precision == "bf16" else made


def data(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels `[steps, 8 * world, T]`; counted labels are spread unevenly, a sequence has none."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, SEQUENCES * world, LENGTH)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    for sequence in range(shape[1]):
        labels[:, sequence, : (5 * sequence) % (LENGTH + 1)] = IGNORE
    labels[:, 0] = IGNORE
    return ids, labels


def micro_batches(ids: torch.Tensor, labels: torch.Tensor, size: int) -> list[Batch]:
    """A rank's `[8, T]` cut into micro-batches."""
    return [
        Batch(a, b, None, 0, [Segment("text", 0, 0, a.numel())])
        for a, b in zip(ids.split(size), labels.split(size), strict=True)
    ]


def in_ranks(
    stage: int,
    precision: str,
    size: int,
    *,
    steps: int = STEPS,
    bad_step: int | None = None,
    bad: str = "loss",
    empty_step: int | None = None,
    z_loss: float = 0.0,
    overlap: bool = False,
    **section: Any,
) -> dict[str, Any]:
    """Some steps in a rank; `bad_step`: there the last rank's loss, or one entry of its gradient, is nan;
    `overlap`: with communication beside the backward pass, as on GPUs."""
    from deepspeed.runtime import bf16_optimizer

    world = distributed.start(1)
    geometry = Geometry(world.size, world.size, size, SEQUENCES // size)

    def overlapping(*args: Any) -> dict[str, Any]:
        found = settings(*args)
        assert found["zero_optimization"]["overlap_comm"] is False
        found["zero_optimization"]["overlap_comm"] = overlap
        return found

    with (
        patched(bf16_optimizer, "see_memory_usage", lambda *_, **__: None),  # a garbage collection each
        patched(engine_module, "settings", overlapping if overlap else settings),
    ):
        engine = Engine(model(), recipe(stage, precision, **section), geometry, world)
    ids, labels = data(world.size)
    if empty_step is not None:
        labels[empty_step] = IGNORE
    mine = slice(world.rank * SEQUENCES, (world.rank + 1) * SEQUENCES)
    found: dict[str, Any] = {"hashes": [fingerprint(engine)], "steps": []}
    true_forward = Engine.forward

    def bad_forward(*args: Any, **kwargs: Any) -> Loss:
        """A loss that is not finite, with a gradient that is."""
        loss = true_forward(*args, **kwargs)
        return loss._replace(total=loss.total + math.nan)

    for number in range(steps):
        engine.set_rates(1.0)
        batches = micro_batches(ids[number, mine], labels[number, mine], size)
        wrong = bad if number == bad_step and world.rank == world.size - 1 else ""
        hook = engine.model.norm.weight.register_hook(one_nan) if wrong == "gradient" else None
        with patched(Engine, "forward", bad_forward if wrong == "loss" else true_forward):
            done = Step(engine, world, batches, objective=replace(CROSS_ENTROPY, z_loss=z_loss)).take()
        if hook:
            hook.remove()
        found["steps"].append((done.loss, done.update.norm, done.update.clip_factor, done.update.skipped))
        found["hashes"].append(fingerprint(engine))
    found["weights"] = weights(engine)
    engine.close()
    return found


def one_nan(gradient: torch.Tensor) -> torch.Tensor:
    changed = gradient.clone()
    changed[3] = math.nan
    return changed


def all_splits(stage: int, precision: str, sizes: tuple[int, ...], **more: Any) -> list[dict[str, Any]]:
    return [in_ranks(stage, precision, size, **more) for size in sizes]


def reference(
    world: int, precision: str = "fp32", skip: int | None = None, z_loss: float = 0.0, **section: Any
) -> dict[str, Any]:
    """The same steps as one large batch with plain torch in fp32."""
    plain, settings = model(precision), recipe(**section).optimizer
    built = optimizer.build(settings, plain.named_parameters(), plain.no_decay())
    ids, labels = data(world)
    found: dict[str, Any] = {"steps": []}
    for number in range(STEPS):
        if number == skip:
            continue
        optimizer.apply(built.param_groups, settings, 1.0, 1.0)
        out = plain(ids[number], labels=labels[number], z_loss=z_loss)
        loss = out.total / out.tokens
        (loss + z_loss * out.z_total / out.tokens).backward()
        if number == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in plain.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.clip or math.inf)
        found["steps"].append((loss.item(), norm.item()))
        built.step()
        built.zero_grad()
    return found


def largest_error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest error of any tensor relative to that tensor's largest value."""
    assert found.keys() == right.keys()
    return max(
        float((found[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1e-9))
        for name in right
    )


def whole_error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Norm of the error over all tensors / norm of what is right."""
    error = torch.cat([(found[name] - value).flatten() for name, value in right.items()])
    return float(error.norm() / torch.cat([value.flatten() for value in right.values()]).norm())


@pytest.mark.parametrize(("precision", "stage"), STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_any_split_gives_the_gradient_of_one_large_batch(rank_pools, world: int, precision: str, stage: int):
    """allenai/open-instruct#1498. One large SGD step shows the gradient that the optimizer was given."""
    rate = 1e3
    settings = {"name": "sgd", "lr": rate, "weight_decay": 0.0}
    start = dict(model(precision).named_parameters())
    right = reference(world, precision, **settings)["gradients"]
    found = rank_pools(world).run(all_splits, stage, precision, SPLITS[:: 3 - world], steps=1, **settings)
    splits = [
        {name: (start[name].detach() - new) / rate for name, new in split["weights"].items()}
        for split in found[0]
    ]
    for gradients in splits:
        if precision == "fp32":
            assert largest_error(gradients, right) < 1e-5
        else:  # rounded layer by layer: close as a whole, and alike between splits
            assert whole_error(gradients, right) < 2e-2
            assert largest_error(gradients, splits[0]) < 3e-2


@pytest.mark.parametrize(("precision", "stage"), STAGES)
def test_adamw_follows_the_large_batch_and_replicas_stay_equal(two_ranks, precision: str, stage: int):
    """deepspeedai/DeepSpeed#7985: losses, norms, and the hash of the weights on both ranks after each of
    three steps."""
    right = reference(2, clip=0.5)["steps"]
    tolerance = 2e-5 if precision == "fp32" else 2e-2
    for ranks in zip(*two_ranks.run(all_splits, stage, precision, (8, 2), clip=0.5), strict=True):
        assert ranks[0]["hashes"] == ranks[1]["hashes"]
        assert len(set(ranks[0]["hashes"])) == STEPS + 1
        for (loss, norm, factor, skipped), wanted in zip(ranks[0]["steps"], right, strict=True):
            assert (loss, norm) == pytest.approx(wanted, rel=tolerance)
            assert factor == pytest.approx(min(1.0, 0.5 / norm), rel=1e-4)
            assert not skipped


@pytest.mark.parametrize(("precision", "stage"), [one for one in STAGES if one[1]])
def test_communication_beside_the_backward_pass_changes_nothing(two_ranks, precision: str, stage: int):
    """As settings for GPUs have it, with the two buckets that DeepSpeed then fills in turn."""
    runs = [
        two_ranks.run(in_ranks, stage, precision, 2, clip=0.5, overlap=overlap) for overlap in (False, True)
    ]
    assert runs[1][0]["hashes"] == runs[1][1]["hashes"] == runs[0][0]["hashes"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_z_loss_is_weighted_by_counted_tokens_too(two_ranks, stage: int):
    """The gradient is that of mean loss + weight * mean logsumexp^2; the reported loss is without it."""
    settings = {"name": "sgd", "lr": 1e3, "weight_decay": 0.0, "z_loss": 0.3}
    right, start = reference(2, **settings), dict(model().named_parameters())
    (found, *_) = two_ranks.run(in_ranks, stage, "fp32", 4, steps=1, **settings)
    gradients = {name: (start[name].detach() - new) / 1e3 for name, new in found["weights"].items()}
    assert largest_error(gradients, right["gradients"]) < 1e-5
    assert largest_error(gradients, reference(2, **settings | {"z_loss": 0.0})["gradients"]) > 1e-2
    assert found["steps"][0][:2] == pytest.approx(right["steps"][0], rel=2e-5)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize(("precision", "stage"), STAGES)
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(
    two_ranks, precision: str, stage: int, bad: str
):
    """Weights stay, and the next step is as if the skipped one had not been: moments and step counts too."""
    ranks = two_ranks.run(in_ranks, stage, precision, 4, bad_step=1, bad=bad)
    before, after = reference(2, skip=1)["steps"]
    tolerance = 2e-5 if precision == "fp32" else 2e-2
    for found in ranks:
        first, skipped, last = found["steps"]
        assert first[:2] == pytest.approx(before, rel=tolerance)
        assert last[:2] == pytest.approx(after, rel=tolerance)
        assert (skipped[2:], math.isfinite(skipped[1])) == ((0.0, True), False)
        assert found["hashes"][2] == found["hashes"][1]
        assert found["hashes"][3] != found["hashes"][2]
    assert ranks[0]["hashes"] == ranks[1]["hashes"]


@pytest.mark.parametrize(("precision", "stage"), STAGES)
def test_a_step_without_counted_tokens_changes_nothing(two_ranks, precision: str, stage: int):
    """Neither momentum nor decay moves a weight, and the next step is as if the empty one had not been."""
    ranks = two_ranks.run(in_ranks, stage, precision, 4, empty_step=1, weight_decay=0.5)
    _, after = reference(2, skip=1, weight_decay=0.5)["steps"]
    for found in ranks:
        loss, *update = found["steps"][1]
        assert math.isnan(loss)
        assert update == [0.0, 0.0, True]
        assert found["hashes"][2] == found["hashes"][1]
        assert found["hashes"][3] != found["hashes"][2]
        assert found["steps"][2][:2] == pytest.approx(after, rel=2e-5 if precision == "fp32" else 2e-2)


class Lengths(torch.nn.Module):
    """Parameters of these lengths, whose sum of squares is the loss."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.ones(length) for length in lengths)

    def no_decay(self) -> set[str]:
        return set()

    def forward(self) -> torch.Tensor:
        return sum((part.square().sum() for part in self.parts), torch.zeros(()))


def of_lengths(stage: int) -> list[tuple[float, float]]:
    """Norm of the gradient, and the largest weight after a step, of models of few and odd parameters."""
    world, found = distributed.start(1), []
    for lengths in ((1,), (7,), (1, 7, 317)):
        geometry = Geometry(world.size, world.size, 1, 1)
        engine = Engine(Lengths(*lengths), recipe(stage, name="sgd", weight_decay=0.0), geometry, world)
        engine.set_rates(1.0)
        engine.backward(engine.forward())
        norm = engine.step().norm
        found.append((norm, max(float(weight.max()) for weight in weights(engine).values())))
        engine.close()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_an_odd_number_of_parameters_is_trained(two_ranks, stage: int):
    """DeepSpeed asserts that the sizes of its buckets are even."""
    right = [(2 * math.sqrt(count), 1 - 2e-2) for count in (1, 7, 325)]
    for found in two_ranks.run(of_lengths, stage):
        for values, wanted in zip(found, right, strict=True):
            assert values == pytest.approx(wanted, rel=1e-5)


def with_unknown_ids() -> str:
    """How a step ends whose model counts ids outside its vocabulary on the last rank."""
    world = distributed.start(1)
    loss = Loss(*torch.ones(3), outside=torch.tensor(2 * world.rank))
    engine: Any = SimpleNamespace(forward=lambda *_, **__: loss)
    step = Step(engine, world, micro_batches(*(x[0] for x in data(1)), SEQUENCES))
    objective = step.forward(step.passes[0])
    try:
        step.backward(objective)
    except (TrainError, SystemExit) as error:
        return str(error)
    return "went on"


def test_ids_outside_the_vocabulary_end_the_run_on_all_ranks(two_ranks):
    """A GPU does not wait for them in the forward pass: they are told with the loss."""
    told, stopped = two_ranks.run(with_unknown_ids)
    assert "2 ids or labels are outside the model's vocabulary. They are in the windows from sample 0" in told
    assert stopped == "2"

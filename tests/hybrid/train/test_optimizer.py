"""Parameter groups, their rates and decay, and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.recipe.schema import OptimizerSection, ScheduleSection
from hybrid.train import optimizer
from hybrid.train.optimizer import rate_fraction


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.mix = nn.Linear(4, 4)
        self.state = nn.Parameter(torch.ones(3, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)

    def no_decay(self) -> set[str]:
        return {"mix.bias", "norm.weight", "norm.bias", "state"}


def roles(model: nn.Module) -> dict[str, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.groups(model.named_parameters(), model.no_decay())
    return {names[id(parameter)]: group["role"] for group in groups for parameter in group["params"]}


def test_every_parameter_is_in_the_group_of_the_papers_table():
    assert roles(Model()) == {
        "embedding.weight": "embedding",
        "mix.weight": "matrices",
        "mix.bias": "scalars",
        "state": "scalars",
        "norm.weight": "scalars",
        "norm.bias": "scalars",
        "head.weight": "head",
    }


def test_tied_weights_are_optimised_once_as_the_embedding():
    model = Model()
    model.head.weight = model.embedding.weight
    found = roles(model)
    assert "head.weight" not in found
    assert found["embedding.weight"] == "embedding"


@pytest.mark.parametrize(
    ("role", "lr", "decay"),
    [
        ("embedding", 1e-3, 0.2),
        ("matrices", 7.5e-4, 0.2 * 4 / 3),
        ("head", 1e-3, 0.2),
        ("scalars", 1e-3, 0.0),
    ],
)
def test_mup_scales_matrices_only(role: str, lr: float, decay: float):
    """At 1024 with base 768 the ratio is 4/3 (the paper's 350M model)."""
    section = OptimizerSection(lr=2e-3, weight_decay=0.2, mup_base_size=768)
    found = optimizer.settings(section, optimizer.width_ratio(section, 1024), role, 0.5)
    assert found == pytest.approx({"lr": lr, "weight_decay": decay})


def test_decay_follows_the_schedule_when_asked():
    section = OptimizerSection(lr=1.0, weight_decay=0.2, decay_follows_schedule=True)
    assert optimizer.settings(section, 1.0, "head", 0.25) == {"lr": 0.25, "weight_decay": 0.05}


def test_decay_shrinks_a_weight_by_lr_times_decay():
    section = OptimizerSection(lr=0.5, weight_decay=0.2)
    model = Model()
    built = optimizer.build(section, model.named_parameters(), model.no_decay())
    optimizer.apply(built.param_groups, section, 1.0, 1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if name in model.no_decay() else 0.9
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_the_papers_adamw_settings_are_the_defaults():
    built = optimizer.build(OptimizerSection(lr=1.0), Model().named_parameters(), set())
    assert isinstance(built, torch.optim.AdamW)
    assert built.defaults["betas"] == (0.9, 0.95)
    assert built.defaults["eps"] == 1e-8


def fractions(steps: int, **section) -> list[float]:
    return [rate_fraction(step, steps, ScheduleSection(**section)) for step in range(steps)]


def test_linear_is_the_papers_triangle():
    """(it + 1) / warm-up, then linear, reaching 0 one step after the last."""
    assert fractions(6, shape="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rate_fraction(6, 6, ScheduleSection(warmup_steps=2)) == 0.0


def test_cosine_and_a_final_fraction():
    found = fractions(4, shape="cosine", final_fraction=0.2)
    assert found == pytest.approx(
        [1.0, 0.2 + 0.8 * (0.5 + 0.5 * 2**-0.5), 0.6, 0.2 + 0.8 * (0.5 - 0.5 * 2**-0.5)]
    )


def test_constant_decays_only_at_the_end():
    assert fractions(6, shape="constant", warmup_steps=1, decay_steps=2) == [1, 1, 1, 1, 1, 0.5]
    assert fractions(3, shape="constant") == [1, 1, 1]


def test_warm_up_does_not_depend_on_the_number_of_steps():
    """So a run may be made longer while it is still warming up."""
    assert fractions(50, warmup_steps=30)[:30] == fractions(90, warmup_steps=30)[:30]

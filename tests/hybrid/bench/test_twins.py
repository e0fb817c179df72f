"""The plain forms that benchmarks measure against compute the same as what is measured."""

import pytest
import torch

from hybrid.bench.eager import eager_kvm
from hybrid.bench.mixers import QUICK as MIXER_SIZES
from hybrid.bench.mixers import TWINS
from hybrid.bench.operands import BUDGETS, QUICK, Operands
from hybrid.layers.kvm.attention import kvm_attention


def results(operator, leaves, call):
    y = call(operator)
    y = y[0] if isinstance(y, tuple) else y
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape))]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_eager_twin_gives_the_operators_values_and_gradients(budget):
    operands = QUICK.operands(11 * QUICK.chunk)
    spec = QUICK.kvm(budget).spec
    assert spec.slots_after(8) == (16 if budget == "fixed" else 50)  # 4 * sqrt(160)
    leaves = operands.leaves()
    settings = Operands(*leaves).settings(spec)
    found = [
        results(operator, leaves, lambda op: op(*leaves[:4], **settings))
        for operator in (kvm_attention, eager_kvm)
    ]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", TWINS)
def test_step_loops_give_the_operators_values_and_gradients(kind):
    twin = TWINS[kind]
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in twin.inputs(MIXER_SIZES)]
    found = [results(op, leaves, lambda op: op(*leaves)) for op in (twin.operator, twin.steps)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)

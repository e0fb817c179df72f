"""The twins that benchmarks measure against compute what the operators do."""

import pytest
import torch

from benchmarks.mixers import QUICK as MIXER_SIZES
from benchmarks.mixers import TWINS
from benchmarks.workloads import BUDGETS, QUICK, operands
from hybrid.layers.kvm.attention import kvm_attention

from ..parity.kvm_eager import eager_kvm


def results(y, leaves):
    """The output, and gradients of a random sum of it."""
    y = y[0] if isinstance(y, tuple) else y
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape))]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_eager_twin_gives_the_operators_values_and_gradients(budget):
    spec = QUICK.kvm(budget).spec
    assert spec.slots_after(8) == (16 if budget == "fixed" else 50)  # 4 * sqrt(160)
    leaves = operands(QUICK, 11 * QUICK.chunk).leaves()
    found = [results(leaves.given_to(operator, spec), leaves) for operator in (kvm_attention, eager_kvm)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", TWINS)
def test_loops_over_tokens_give_the_operators_values_and_gradients(kind):
    twin = TWINS[kind]
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in twin.inputs(MIXER_SIZES)]
    found = [results(operator(*leaves), leaves) for operator in (twin.operator, twin.steps)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)

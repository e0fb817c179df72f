"""torch.compile of a block gives the same numbers, whichever mixer is in it."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from hybrid.layers import Context
from hybrid.model.block import Block
from hybrid.recipe.schema import ModelSection

from .mixers import HIDDEN, KINDS, fresh, tokens

QUICK = ("full", "rwkv7")  # one with and one without softmax: compiling takes most kinds 40 s
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="torch.compile needs g++ and Python's headers",
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Nothing that an interrupted run left half written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def make(kind):
    torch.manual_seed(0)
    block = Block(ModelSection(hidden_size=HIDDEN), fresh(kind))
    block.reset_parameters()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    torch.compiler.reset()
    return block, torch.compile(block, dynamic=False)


@every_kind
def test_values_and_gradients_of_training(kind):
    (block, compiled), routes = make(kind), {}
    x = tokens(2, 40, torch.float32).requires_grad_()
    leaves, results = [x, *block.parameters()], []
    for run in (block, compiled):
        y, _, _ = run(x, x, Context.of(x, want_state=False, routes=routes))
        grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        results.append([y, *grads])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            scale = max(1.0, float(expected.detach().abs().max()))
            torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_single_tokens(kind):
    block, compiled = make(kind)
    x, results = tokens(2, 30, torch.float32), []
    with torch.no_grad():
        for run in (block, compiled):
            state, outputs = None, []
            for piece in x.split([20, *[1] * 10], 1):
                y, state, _ = run(piece, piece, Context.of(piece), state)
                outputs.append(y)
            results.append(torch.cat(outputs, 1))
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)

"""The whole model on a pretended CUDA device: nothing between embedding and backward makes the host wait."""

from __future__ import annotations

import threading

import pytest
import torch

from hybrid.distributed.context_parallel import Inputs
from hybrid.layers.softmax import force_kernel, kernels
from hybrid.model import HybridLM

from ...pretended_cuda import PretendedDevice, pretended_cuda
from ..mini import borders, ids, mini

PATTERN = "FWBRGDMQK"
LENGTHS = (70, 1, 29, 50)


def inputs(batch: int, lengths: tuple[int, ...] = ()) -> Inputs:
    text = ids(150, batch)
    labels = torch.roll(text, -1, 1)
    labels[:, -1] = -100
    return Inputs(text, labels, borders(*lengths) if lengths else None)


def train(model: HybridLM, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the embedding."""
    given = given.to(next(model.parameters()).device)
    loss = model(given.ids, **given.options())
    (loss.total / loss.tokens).backward()
    return loss, model.embedding.weight.grad


@pytest.fixture
def device():
    with pretended_cuda() as device:
        yield device


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("batch", "lengths"), [(1, ()), (8, ()), (1, LENGTHS)])
def test_a_pass_makes_the_host_wait_for_nothing(
    device: PretendedDevice, checkpointing: bool, batch: int, lengths: tuple[int, ...]
) -> None:
    model = mini(PATTERN).to(device="cuda", dtype=torch.bfloat16)
    model.activation_checkpointing = checkpointing
    device.waits.clear()
    train(model, inputs(batch, lengths))
    assert not device.waits, "\n".join(device.waits)


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_the_loss_and_its_gradient_are_those_of_the_cpu(lengths: tuple[int, ...]) -> None:
    given = inputs(1, lengths)
    expected, expected_grad = train(mini(PATTERN), given)
    with pretended_cuda():
        loss, grad = train(mini(PATTERN).to("cuda"), given)
        total, grad, outside = loss.total.cpu(), grad.cpu(), loss.outside.cpu()
    torch.testing.assert_close(total, expected.total, atol=0, rtol=1e-4)
    torch.testing.assert_close(grad, expected_grad, atol=1e-3 * float(expected_grad.abs().max()), rtol=0)
    assert outside == 0


def test_ids_outside_the_vocabulary_are_counted_not_waited_for(device: PretendedDevice) -> None:
    model, given = mini("F").to("cuda"), inputs(2)
    given.ids[0, 3], given.ids[1, 5], given.labels[1, 7] = 320, -1, 999
    device.waits.clear()
    loss, _ = train(model, given)
    assert not device.waits
    assert loss.outside.cpu() == 3
    assert bool(loss.total.cpu().isfinite())


def test_recomputation_in_the_backwards_thread_takes_the_kernel_of_the_forward(monkeypatch):
    """On CUDA the backward runs in threads of its own, which know nothing of a context in another."""
    model, text = mini("FG"), ids(40)
    model.activation_checkpointing = True
    used, run = [], kernels.forward

    def seen(kernel, *operands):
        used.append(kernel)
        return run(kernel, *operands)

    monkeypatch.setattr(kernels, "forward", seen)
    with force_kernel("plain"):
        loss = model(text, labels=text).total
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert used == ["plain", "plain"]

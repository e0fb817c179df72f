"""Cross-entropy in chunks of tokens."""

import pytest
import torch
import torch.nn.functional as F

from hybrid.model.head import IGNORE, Head

HIDDEN, VOCAB = 16, 50


def head(softcap=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    made = Head(HIDDEN, VOCAB, softcap)
    torch.nn.init.normal_(made.weight)
    return made.to(dtype)


def inputs(tokens=37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (2, tokens), generator=generator)
    labels[:, ::5] = IGNORE
    return hidden, labels


def gradients(made, hidden, value):
    return torch.autograd.grad(value, [hidden, made.weight])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_chunks_give_torchs_cross_entropy_and_gradients(softcap, chunk):
    made = head(softcap)
    hidden, labels = inputs()
    logits = hidden @ made.weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    squares = torch.logsumexp(logits, -1)[labels != IGNORE].square().sum()
    total, z_total = made(hidden, labels, chunk, True)
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)
    assert z_total.item() == pytest.approx(squares.item(), rel=1e-6)
    ours = gradients(made, hidden, total + 0.1 * z_total)
    theirs = gradients(made, hidden, plain + 0.1 * squares)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()


def test_without_a_z_loss_its_sum_has_no_gradient():
    hidden, labels = inputs()
    total, z_total = head()(hidden, labels, 8, False)
    assert total.requires_grad
    assert not z_total.requires_grad
    assert z_total > 0


def test_no_counted_token_gives_zero_and_zero_gradients():
    made = head()
    hidden, labels = inputs()
    total, z_total = made(hidden, torch.full_like(labels, IGNORE), 8, True)
    assert total.item() == 0
    assert z_total.item() == 0
    for gradient in gradients(made, hidden, total + z_total):
        assert gradient.eq(0).all()


def test_bf16_hidden_states_give_an_fp32_loss():
    hidden, labels = inputs(dtype=torch.bfloat16)
    made = head(dtype=torch.bfloat16)
    total, _ = made(hidden, labels, 8, False)
    logits = (hidden @ made.weight.T).float()
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)


def largest_saved(chunk):
    """The largest tensor that the graph of a loss over 400 tokens keeps, and the largest ever made."""
    made = head()
    hidden, labels = inputs(200)
    saved, ever = [0], [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                ever.append(result.numel())
            return result

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total, _ = made(hidden, labels, chunk, False)
        total.backward()
    return max(saved), max(ever)


def test_logits_are_never_all_in_memory():
    whole = 2 * 200 * VOCAB
    assert largest_saved(400)[0] == whole  # the test sees them when they are
    saved, ever = largest_saved(10)
    assert saved <= 2 * 200 * HIDDEN
    assert ever <= 2 * 200 * HIDDEN < whole

"""Token shift."""

import pytest
import torch

from hybrid.layers.token_shift import last_token, shift_ramp, token_shift

X = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]])
MIX = torch.tensor([1.0, 0.25])


def test_mixes_with_the_token_before():
    expected = [[[1.0, 10.0], [1.0, 17.5], [2.0, 35.0]]]
    assert token_shift(X, MIX).tolist() == expected


def test_zero_fallback_mixes_the_first_token_with_zero():
    assert token_shift(X, MIX, fallback="zero")[0, 0].tolist() == [0.0, 7.5]


@pytest.mark.parametrize("fallback", ["first", "zero"])
@pytest.mark.parametrize("cut", [1, 2])
def test_carried_last_token_continues(fallback, cut):
    first = token_shift(X[:, :cut], MIX, fallback=fallback)
    second = token_shift(X[:, cut:], MIX, last_token(X[:, :cut]), fallback)
    assert torch.equal(torch.cat((first, second), 1), token_shift(X, MIX, fallback=fallback))


@pytest.mark.parametrize("fallback", ["first", "zero"])
def test_packed_documents_start_anew_in_values_and_gradients(fallback):
    torch.manual_seed(0)
    lengths = (1, 4, 2)
    x = torch.randn(1, 7, 3, requires_grad=True)
    mix = torch.rand(3, requires_grad=True)
    packed = token_shift(x, mix, fallback=fallback, lengths=lengths)
    alone = torch.cat([token_shift(part, mix, fallback=fallback) for part in x.split(lengths, 1)], 1)
    assert torch.equal(packed, alone)
    weight = torch.randn_like(x)
    one = torch.autograd.grad((packed * weight).sum(), (x, mix))
    two = torch.autograd.grad((alone * weight).sum(), (x, mix))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


def test_last_token_does_not_keep_the_sequence_alive():
    x = torch.randn(2, 100, 4)
    assert last_token(x).untyped_storage().nbytes() == 2 * 4 * 4


def test_ramp():
    mix = torch.empty(4)
    shift_ramp(mix, 0.5)
    torch.testing.assert_close(mix, torch.tensor([1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]))

"""Rotary embedding: the paper's and the usual one."""

import math

import pytest
import torch

from hybrid.layers.rope import Rotary, frequencies, positions, rotary, rotate

from ..parity.attention_reference import rotate_paper


def test_paper_frequencies_run_from_one_to_one_over_base_inclusive():
    found = frequencies(8, 10000.0, "paper")
    torch.testing.assert_close(found, torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4]))


def test_standard_frequencies_stop_short_of_one_over_base():
    torch.testing.assert_close(frequencies(8, 10000.0, "standard"), torch.tensor([1.0, 0.1, 0.01, 0.001]))


@pytest.mark.parametrize("style", ["paper", "standard"])
def test_one_pair_turns_by_one_radian_a_token(style):
    assert frequencies(2, 500.0, style).tolist() == [1.0]


def test_paper_turns_interleaved_pairs_backwards():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0, 7.0]).view(1, 1, 1, 5)
    y = rotate(x, rotary(torch.tensor([3]), 4, 100.0, "paper")).flatten()
    slow = 3 / 100
    expected = [math.cos(3), -math.sin(3), math.sin(slow), math.cos(slow), 7.0]
    torch.testing.assert_close(y, torch.tensor(expected))


def test_standard_turns_halves_forwards():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0, 7.0]).view(1, 1, 1, 5)
    y = rotate(x, rotary(torch.tensor([3]), 4, 100.0, "standard")).flatten()
    slow = 3 / 10
    expected = [math.cos(3), -math.sin(slow), math.sin(3), math.cos(slow), 7.0]
    torch.testing.assert_close(y, torch.tensor(expected))


def test_matches_the_stepwise_twin():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    table = rotary(positions(9), 6, 77.0, "paper")
    torch.testing.assert_close(rotate(x, table), rotate_paper(x, 6, 77.0), atol=2e-6, rtol=0)


@pytest.mark.parametrize("style", ["paper", "standard"])
def test_scores_depend_on_distance_only(style):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def score(at_q, at_k):
        tables = (rotary(torch.tensor([at]), 8, 50.0, style) for at in (at_q, at_k))
        return (rotate(q, next(tables)) * rotate(k, next(tables))).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), atol=1e-4, rtol=0)


def test_positions_restart_in_packed_documents_and_continue_from_a_state():
    assert positions(5, lengths=(2, 3)).tolist() == [0, 1, 0, 1, 2]
    assert positions(3, 7).tolist() == [7, 8, 9]


def test_dtype_is_kept_and_angles_are_fp32():
    table = rotary(positions(4, 100_000), 4, 1e4, "paper")
    assert isinstance(table, Rotary)
    assert table.cos.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert rotate(torch.ones(1, 4, 1, 8, dtype=dtype), table).dtype == dtype

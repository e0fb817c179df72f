"""Choosing tokens, stop strings and streaming, with a tiny stand-in model whose results are known."""

import math
import re
import sys

import pytest
import torch

from hybrid.generate import generate
from hybrid.generate.sampling import (
    GenerateError,
    Settings,
    StopMatcher,
    choose,
    kept_probabilities,
    penalise_repetition,
)

NONE = torch.zeros(0, dtype=torch.long)


def kept(probabilities, **settings):
    p, ids = kept_probabilities(
        torch.tensor(probabilities).log(), Settings(**{"temperature": 1.0, **settings})
    )
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


def test_top_k_keeps_the_k_most_probable_and_lower_ids_on_ties():
    assert kept([0.1, 0.3, 0.3, 0.3], top_k=2) == pytest.approx({1: 0.5, 2: 0.5})
    assert len(kept([0.1, 0.3, 0.3, 0.3], top_k=9)) == 4


def test_top_p_keeps_the_fewest_tokens_that_reach_the_sum():
    assert kept([0.125, 0.5, 0.25, 0.125], top_p=0.5) == pytest.approx({1: 1.0})
    assert kept([0.125, 0.5, 0.25, 0.125], top_p=0.51) == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert kept([0.125, 0.5, 0.25, 0.125], top_p=1e-9) == pytest.approx({1: 1.0})
    assert len(kept([0.125, 0.5, 0.25, 0.125])) == 4


def test_top_p_is_taken_of_what_top_k_left():
    assert list(kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.57)) == [0]  # 4/7 of the two


def test_temperature_sharpens():
    assert kept([0.2, 0.8], temperature=0.5) == pytest.approx({1: 16 / 17, 0: 1 / 17})


def test_repetition_penalty_lowers_seen_tokens_whatever_their_sign():
    logits = torch.tensor([2.0, -2.0, 1.0])
    assert penalise_repetition(logits, torch.tensor([0, 1]), 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_greedy_ignores_the_generator_and_applies_the_penalty():
    logits = torch.tensor([3.0, 2.0])
    assert choose(logits, Settings(), None, NONE) == 0
    assert choose(logits, Settings(repetition_penalty=2.0), None, torch.tensor([0])) == 1


def test_draws_follow_the_probabilities():
    generator = torch.Generator().manual_seed(3)
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    counts = torch.bincount(
        torch.tensor([choose(logits, Settings(temperature=1.0), generator, NONE) for _ in range(4000)]),
        minlength=3,
    )
    assert (counts / 4000 - logits.exp()).abs().max() < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e308),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("seed", -1),
        ("max_tokens", -1),
        ("samples", 0),
        ("batch", 0),
    ],
)
def test_values_out_of_range_are_named_with_what_is_allowed(name, value):
    with pytest.raises(GenerateError, match=rf"{name} is {re.escape(str(value))}; it must be .*\d"):
        generate(Counting(), Bytes(), ["a"], **{name: value})


def test_several_greedy_samples_and_empty_stop_strings_are_refused():
    with pytest.raises(GenerateError, match="samples is 2; at temperature 0"):
        generate(Counting(), Bytes(), ["a"], samples=2)
    with pytest.raises(GenerateError, match="stop"):
        generate(Counting(), Bytes(), ["a"], stop=["x", ""])


@pytest.mark.parametrize("cut", range(1, 8))
def test_stop_strings_are_found_across_any_borders(cut):
    text = "ababac and more"
    matcher = StopMatcher(["abac", "zz"])
    shown = ""
    for start in range(0, len(text), cut):
        shown += matcher.push(text[start : start + cut])
        if matcher.stopped:
            break
    assert (shown, matcher.stopped) == ("ab", True)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_of_several_stop_strings_the_first_completed_counts(cut):
    text = "xabcd"
    matcher = StopMatcher(["abcd", "bc"])
    shown = ""
    for start in range(0, len(text), cut):
        if not matcher.stopped:
            shown += matcher.push(text[start : start + cut])
    assert shown == "xa"


def test_text_that_only_began_a_stop_string_is_shown_in_the_end():
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.finish() == "EN"


class Bytes:
    """Ids 0 unknown, 1 begin, 2 end, 3 padding, 4 + b for byte b."""

    vocab_size, bos_id, eos_id = 260, 1, 2

    def encode(self, text):
        return [4 + b for b in text.encode()]

    def stream(self):
        return ByteStream()


class ByteStream:
    def __init__(self):
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token):
        return self._decoder.decode(bytes([token - 4] if token >= 4 else []))

    def finish(self):
        return self._decoder.decode(b"", True)


class Seen:
    """A state of the stand-in models: the tokens seen `[T]`."""

    def __init__(self, ids):
        self.ids = ids

    def fork(self):
        return Seen(self.ids.clone())


class StandIn(torch.nn.Module):
    """Takes packed rows as a HybridLM does; `after` gives the logits after the tokens seen `[T]`.

    `calls` holds the documents' lengths of each call. The vocabulary is padded to 320.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls = []

    def forward(self, ids, states, *, cu_seqlens, last_only):
        assert last_only
        lengths = cu_seqlens.diff().tolist()
        self.calls.append(tuple(lengths))
        pieces = zip(ids[0].split(lengths), states, strict=True)
        seen = [piece if state is None else torch.cat([state.ids, piece]) for piece, state in pieces]
        return torch.stack([self.after(one) for one in seen])[None], [Seen(one) for one in seen]


class Scripted(StandIn):
    """Predicts a script after the prompt; an id of the padding is tempting."""

    def __init__(self, script: bytes, prompt_tokens: int, end: bool = True):
        super().__init__()
        self.ids = [4 + b for b in script] + ([2] if end else [])
        self.start = prompt_tokens

    def after(self, seen):
        logits = torch.zeros(320)
        logits[300] = 9.0
        step = len(seen) - self.start
        logits[self.ids[step] if 0 <= step < len(self.ids) else 5] = 5.0
        return logits


class Counting(StandIn):
    """The next token depends on everything seen: a fixed random function of the ids' sum."""

    def after(self, seen):
        table = torch.randn(97, 320, generator=torch.Generator().manual_seed(0)) * 3
        table[:, :3] = -20.0
        return table[int(seen.sum()) % 97]


def streamed(model, **settings):
    pieces = []
    result = generate(model, Bytes(), ["ab"], on_text=lambda p, s, text: pieces.append(text), **settings)
    return pieces, result[0]


def test_multi_byte_characters_are_streamed_whole():
    """google/sentencepiece#650: a 4-byte emoji comes id by id and is shown once, whole."""
    pieces, result = streamed(Scripted("né🙂!".encode(), 3))
    assert pieces == ["n", "é", "🙂", "!"]
    assert (result.text, result.reason, len(result.ids)) == ("né🙂!", "eos", 8)


def test_a_character_cut_off_by_the_length_limit_is_marked():
    pieces, result = streamed(Scripted("n🙂".encode(), 3), max_tokens=3)
    assert result.text == "".join(pieces) == "n\ufffd"
    assert (result.reason, len(result.ids)) == ("length", 3)


def test_stop_string_ends_the_text_before_it():
    pieces, result = streamed(Scripted(b"one\nUser: two", 3), stop=["\nUser:"])
    assert "".join(pieces) == result.text == "one"
    assert (result.reason, len(result.ids)) == ("stop", 9)


def test_held_back_text_is_shown_when_the_end_comes():
    _, result = streamed(Scripted(b"one\nUse", 3), stop=["\nUser:"])
    assert (result.text, result.reason) == ("one\nUse", "eos")


def test_ids_that_only_pad_the_vocabulary_are_never_chosen():
    _, result = streamed(Scripted(b"abc", 3), temperature=0.1, max_tokens=3)
    assert max(result.ids) < 260


def test_empty_prompt_starts_from_the_begin_token():
    model = Counting()
    generate(model, Bytes(), [""], max_tokens=2)
    assert model.calls == [(1,), (1,)]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0, "samples": 3, "top_p": 0.9, "repetition_penalty": 1.2}]
)
def test_every_result_is_the_one_the_prompt_gets_alone(settings):
    prompts = ["abcde", "x", "fghij", "", "klmno", "yy", "x"]
    together = generate(Counting(), Bytes(), prompts, max_tokens=12, batch=4, seed=5, **settings)
    alone = [generate(Counting(), Bytes(), [p], max_tokens=12, seed=5, **settings) for p in prompts]
    assert [r.ids for r in together] == [r.ids for rs in alone for r in rs]
    assert [(r.prompt, r.sample) for r in together] == [
        (p, s) for p in range(len(prompts)) for s in range(settings.get("samples", 1))
    ]


def test_prompts_of_any_lengths_are_read_and_go_on_together():
    model = Counting()
    generate(model, Bytes(), ["abc", "x", "def"], max_tokens=3)
    assert model.calls == [(4, 2, 4), (1, 1, 1), (1, 1, 1)]


class Ends(Counting):
    """Ends a text that begins with `a` after one new token."""

    def after(self, seen):
        logits = super().after(seen)
        if seen[1] == 4 + ord("a") and len(seen) >= 4:
            logits[2] = 99.0
        return logits


def test_rows_that_ended_leave():
    model = Ends()
    results = generate(model, Bytes(), ["az", "bz"], max_tokens=4)
    assert [(r.reason, len(r.ids)) for r in results] == [("eos", 1), ("length", 4)]
    assert model.calls == [(3, 3), (1, 1), (1,), (1,)]


def test_rows_that_wait_take_the_place_of_those_that_ended():
    model = Ends()
    results = generate(model, Bytes(), ["az", "bz", "c"], max_tokens=4, batch=2)
    assert [(r.reason, len(r.ids)) for r in results] == [("eos", 1), ("length", 4), ("length", 4)]
    assert model.calls == [(3, 3), (1, 1), (1,), (2,), (1, 1), (1,), (1,)]


def test_a_prompt_is_read_once_for_all_its_samples():
    model = Counting()
    generate(model, Bytes(), ["abc"], max_tokens=3, samples=5, batch=2, temperature=1.0)
    assert model.calls == [(4,), *[(1, 1)] * 4, *[(1,)] * 2]


def test_without_new_tokens_the_prompt_is_only_read():
    model = Counting()
    (result,) = generate(model, Bytes(), ["abc"], max_tokens=0)
    assert (result.ids, result.text, result.reason) == ((), "", "length")
    assert model.calls == [(4,)]


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i():
    settings = {"max_tokens": 20, "temperature": 1.0}
    many = generate(Counting(), Bytes(), ["q"], samples=3, seed=7, **settings)
    assert many[2].ids == generate(Counting(), Bytes(), ["q"], seed=9, **settings)[0].ids
    assert len({r.ids for r in many}) == 3


def test_long_prompts_are_read_in_pieces_of_bounded_size():
    model = Counting()
    generate(model, Bytes(), ["a" * 3000, "b" * 3000], max_tokens=1)
    assert model.calls == [(1024,), (1024,), (953, 71), (1024,), (1024,), (882,)]


def test_logits_that_are_not_finite_are_reported():
    class Diverged(Counting):
        def after(self, seen):
            return super().after(seen) * math.nan

    with pytest.raises(GenerateError, match="not finite after 0 new tokens of prompt 1"):
        generate(Diverged(), Bytes(), ["a"])


def test_prompts_that_are_not_text_are_refused():
    with pytest.raises(GenerateError, match="prompt 2 is not valid Unicode"):
        generate(Counting(), Bytes(), ["a", "\udcff"])


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300, 1e-308, 1e-320, 5e-324])
@pytest.mark.parametrize("others", [{}, {"top_k": 2}, {"top_p": 5e-324}, {"repetition_penalty": 1e-100}])
def test_the_smallest_temperatures_are_greedy(temperature, others):
    """What is not finite after the division was drawn as the first id."""
    logits, seen = torch.tensor([0.5, 1.0, 5.0, 2.0]), torch.tensor([2])
    settings = Settings(temperature=temperature, **others)
    assert {choose(logits, settings, torch.Generator().manual_seed(s), seen) for s in range(9)} == {2}


@pytest.mark.parametrize("temperature", [1e30, 1e308, sys.float_info.max])
def test_the_largest_temperatures_leave_the_order_of_logits(temperature):
    settings = Settings(temperature=temperature, top_k=2)
    probabilities, ids = kept_probabilities(torch.tensor([0.5, 1.0, 5.0, 2.0]), settings)
    assert (ids.tolist(), probabilities.tolist()) == ([2, 3], [0.5, 0.5])


@pytest.mark.parametrize("penalty", [1e-100, 1e-40, 1e39, 1e100])
def test_extreme_penalties_keep_every_logit_finite_and_in_order(penalty):
    big = torch.finfo(torch.float32).max
    logits = torch.tensor([big, 3.0, 1e-45, 0.0, -1e-45, -3.0, -big])
    found = penalise_repetition(logits, torch.arange(7), penalty)
    assert torch.isfinite(found).all()
    assert found.argsort(descending=True).tolist() == list(range(7))
    choose(
        logits, Settings(temperature=1e-320, repetition_penalty=penalty), torch.Generator(), torch.arange(7)
    )


def test_more_top_k_than_tokens_is_all_of_them():
    probabilities, _ = kept_probabilities(torch.zeros(4), Settings(temperature=1.0, top_k=10**30))
    assert probabilities.tolist() == [0.25] * 4

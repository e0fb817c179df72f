"""Generation with real models: each step equals reading everything again, and prompts of different lengths
together give the tokens, logits and states that each gets alone."""

import random
from collections import Counter

import pytest
import torch
from torch import nn

from hybrid.generate import decoding, generate, prefill
from hybrid.generate.saved_state import SavedState

from ..mini import EQUAL, difference, ids, mini
from .test_sampling import Bytes

LETTERS = "KFWBRGDMQ"


class Ids:
    """Every character is the id of its code."""

    vocab_size, bos_id, eos_id, fingerprint = 320, 1, 2, "ids"

    def encode(self, text):
        return [ord(character) for character in text]

    def stream(self):
        return self

    def push(self, token):
        return chr(token)

    def finish(self):
        return ""


def small(pattern, seed=0):
    """Windows and chunks that forty tokens pass several times; float64, so that no choice is a near tie."""
    defaults = {
        "num_heads": 2,
        "window": 7,
        "chunk": 4,
        "window_chunks": 2,
        "sinks": 1,
        "budget_minimum": 4,
        "budget_factor": 2.0,
        "max_centroids": 8,
        "state_size": 8,
    }
    return mini(pattern, seed, hidden_size=32, defaults=defaults).double()


def random_case(seed):
    """A pattern of two to four letters, one of them `LETTERS[seed % 9]`, and three to five prompts."""
    draw = random.Random(seed)
    letters = [LETTERS[seed % 9], *draw.choices(LETTERS, k=draw.randint(1, 3))]
    draw.shuffle(letters)
    prompts = []
    for _ in range(draw.randint(3, 5)):
        length = draw.choice([0, 1, 3, 4, 6, 7, 8, 12, 15, 16, 17, 31, 40])
        prompts.append("".join(map(chr, draw.sample(range(4, 320), length))))
    return "".join(letters), prompts


def written(model, prompts, **settings):
    """Results and, by (prompt, sample), where each of them ended."""
    ends: list[SavedState] = []
    ended = []
    results = generate(
        model, Ids(), prompts, on_end=lambda r: ended.append((r.prompt, r.sample)), on_state=ends.append,
        **settings,
    )  # fmt: skip
    return results, dict(zip(ended, ends, strict=True))


def assert_same_end(found: SavedState, expected: SavedState):
    assert found.state.position == expected.state.position
    assert difference(found.logits, expected.logits) <= 1e-6
    one, other = found.state.tensors(), expected.state.tensors()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape, name
        assert tensor.numel() == 0 or difference(tensor, other[name]) <= 1e-9, name
    assert torch.equal(found.seen, expected.seen)


@pytest.mark.parametrize("seed", range(20))
def test_random_patterns_and_prompts_give_each_prompts_own_result(seed, monkeypatch):
    """huggingface/transformers#46773, #37574: prompts are read 16 tokens at a time over all of them, at most
    three go on together. Ids are never repeated (by the penalty), so that no keys are equal and no choice is
    a tie."""
    pattern, prompts = random_case(seed)
    model = small(pattern, seed)
    settings = {"max_tokens": 9, "repetition_penalty": 1e9}
    alone = [written(model, [prompt], **settings) for prompt in prompts]
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 16)
    results, ends = written(model, prompts, batch=3, **settings)
    assert [r.ids for r in results] == [own[0].ids for own, _ in alone], pattern
    for prompt, (_, own) in enumerate(alone):
        assert_same_end(ends[prompt, 0], own[0, 0])


def test_samples_of_several_prompts_are_those_of_each_alone():
    model = small("KRWFB")
    prompts = ["abcd", "hello world", "", "HELLO WORLDS"]
    settings = {"temperature": 1.0, "samples": 2, "max_tokens": 8, "seed": 5}
    together = generate(model, Ids(), prompts, batch=3, **settings)
    alone = [generate(model, Ids(), [prompt], **settings) for prompt in prompts]
    assert [r.ids for r in together] == [r.ids for results in alone for r in results]


def test_a_step_of_several_sequences_reads_every_weight_as_often_as_one():
    """Whatever the kind and however the positions differ."""
    model = small(LETTERS)
    lengths = [1, 5, 9, 14]
    used: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, name=name: used.update([name]))
    with torch.no_grad():
        logits, states = prefill(model, [torch.arange(4, 4 + n) for n in lengths])
        tokens = logits.argmax(-1).split(1)
        counts = []
        for rows in (slice(0, 1), slice(1, None)):
            used.clear()
            decoding.read_row(model, tokens[rows], states[rows])
            counts.append(dict(used))
    assert counts[0]
    assert counts[0] == counts[1]


def test_reading_holds_a_bounded_number_of_tokens_and_one_row_of_logits_a_prompt(monkeypatch):
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 64)
    model = small("WRM")
    widest: dict[str, int] = {}

    def note(name):
        def hook(_module, inputs):
            widest[name] = max(widest.get(name, 0), inputs[0].shape[:2].numel())

        return hook

    model.blocks[0].register_forward_pre_hook(note("block"))
    model.head.register_forward_pre_hook(note("head"))
    sizes = []
    with torch.no_grad():
        for length in (200, 1000):
            _, states = prefill(model, [torch.arange(length) % 316 + 4, torch.arange(10)])
            sizes.append([state.nbytes for state in states])
    assert widest == {"block": 64, "head": 2}
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("pattern", ["KRF", "WB", "QGDM"])
def test_last_logits_only_are_those_of_all(pattern):
    model = small(pattern)
    ids, borders = torch.arange(4, 34)[None], torch.tensor([0, 11, 12, 30], dtype=torch.int32)
    whole = model(ids, want_state=False)[0]
    assert torch.equal(model(ids, want_state=False, last_only=True)[0], whole[:, -1:])
    packed = model(ids, cu_seqlens=borders, want_state=False)[0]
    last = model(ids, cu_seqlens=borders, want_state=False, last_only=True)[0]
    assert last.shape == (1, 3, 320)
    torch.testing.assert_close(last, packed[:, [10, 11, 29]], atol=1e-6, rtol=0)


# Against reading everything again


def positions(state):
    return [state.position, *[p for layer in state.layers for p in (layer.position, layer.mixer.position)]]


def test_each_step_equals_recomputation_and_every_layer_counts_its_tokens():
    """fla-org/flash-linear-attention#157, #962, #777"""
    model, prompt = mini(), ids(15)
    with torch.no_grad():
        logits, (state,) = prefill(model, [prompt[0]])
        seen = prompt
        for step in range(64):
            again = model(seen, want_state=False)[0][:, -1]
            assert (logits - again).abs().max() <= EQUAL, f"step {step}"
            assert logits.argmax() == again.argmax()
            assert set(positions(state)) == {prompt.shape[1] + step}
            token = logits.argmax(-1, keepdim=True)
            seen = torch.cat([seen, token], 1)
            logits, state = model(token, state)
            logits = logits[:, -1]


def test_greedy_generation_is_the_argmax_of_recomputation():
    """Through the public function, over the growth of the KVM state."""
    model, tokenizer = mini(), Bytes()
    prompt = [tokenizer.bos_id, *tokenizer.encode("the beginning")]
    result = generate(model, tokenizer, ["the beginning"], max_tokens=60)[0]
    seen = list(prompt)
    with torch.no_grad():
        for token in result.ids:
            logits = model(torch.tensor([seen]), want_state=False)[0][0, -1, : tokenizer.vocab_size]
            assert int(logits.argmax()) == token
            seen.append(token)

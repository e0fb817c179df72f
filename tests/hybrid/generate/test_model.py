"""Generation with real models: what is carried from token to token equals reading everything again."""

import pytest
import torch

from hybrid.generate import generate, prefill

from ..mini import EQUAL, ids, mini
from .test_sampling import Bytes


def positions(state):
    return [state.position, *[p for layer in state.layers for p in (layer.position, layer.mixer.position)]]


def follow(model, prompt, steps):
    """Decode greedily from `prompt` `[1, T]`, comparing each step's logits with reading everything again."""
    with torch.no_grad():
        logits, (state,) = prefill(model, [prompt[0]])
        seen = prompt
        for step in range(steps):
            again = model(seen, want_state=False)[0][:, -1]
            assert (logits - again).abs().max() <= EQUAL, f"step {step}"
            assert logits.argmax() == again.argmax()
            assert set(positions(state)) == {prompt.shape[1] + step}
            token = logits.argmax(-1, keepdim=True)
            seen = torch.cat([seen, token], 1)
            logits, state = model(token, state)
            logits = logits[:, -1]
    return seen[0, prompt.shape[1] :].tolist()


def test_each_step_equals_recomputation_and_every_layer_counts_its_tokens():
    """T032"""
    follow(mini(), ids(15), 64)


@pytest.mark.parametrize("length", [1, 30, 31, 32, 33, 64, 100])
def test_decoding_across_the_window_equals_recomputation(length):
    """T035: the pattern starts with the sliding layer of window 32."""
    follow(mini("WKRF"), ids(length), 40)


def test_greedy_generation_is_the_argmax_of_recomputation():
    """T032: through the public function, over the growth of the KVM state."""
    model, tokenizer = mini(), Bytes()
    prompt = [tokenizer.bos_id, *tokenizer.encode("the beginning")]
    result = generate(model, tokenizer, ["the beginning"], max_tokens=60)[0]
    seen = list(prompt)
    with torch.no_grad():
        for token in result.ids:
            logits = model(torch.tensor([seen]), want_state=False)[0][0, -1, : tokenizer.vocab_size]
            assert int(logits.argmax()) == token
            seen.append(token)


def test_several_new_tokens_with_a_state_equal_recomputation():
    """T037: 300, then 5 in one call, single steps, pieces of 128 + 128 + 44, and a second turn."""
    model, text = mini("KRWFB"), ids(330)
    with torch.no_grad():
        whole = model(text, want_state=False)[0]
        for pieces in ((300, 5, 1, 1, 1, 22), (128, 128, 44, 30), (300, 30)):
            state, parts = None, []
            for piece in text.split(pieces, 1):
                logits, state = model(piece, state)
                parts.append(logits)
            assert (torch.cat(parts, 1) - whole).abs().max() <= EQUAL, pieces
            assert set(positions(state)) == {330}

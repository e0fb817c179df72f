"""A text put aside and gone on with: as if it had been written at once."""

import pytest
import torch
from safetensors.torch import save_file

from hybrid.generate import GenerateError, generate
from hybrid.generate.saved_state import KEY, SavedState
from hybrid.model.state import StateError, write_file

from ..mini import ids, mini
from .test_ragged import Ids, small

SETTINGS = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}


def write(model, prompt, tokens, resume=None, **settings):
    """The result, and where it ended."""
    found: list[SavedState] = []
    (result,) = generate(
        model, Ids(), [prompt], resume=resume, on_state=found.append, max_tokens=tokens, **settings
    )
    return result, found[0]


@pytest.mark.parametrize("pattern", ["KRWFB", "QGDM"])
@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["greedy", "sampled"])
def test_a_saved_text_goes_on_exactly_as_one_run(tmp_path, pattern, first, settings):
    model, path = small(pattern), tmp_path / "s"
    whole, end = write(model, "once upon a time", 14, **settings)
    head, saved = write(model, "once upon a time", first, **settings)
    saved.save(path)
    tail, again = write(model, "", 14 - first, SavedState.load(path), **settings)
    assert len(whole.ids) == 14
    assert head.ids + tail.ids == whole.ids
    assert torch.equal(again.logits, end.logits)
    assert torch.equal(again.seen, end.seen)
    assert (again.draws, again.state.position) == (end.draws, end.state.position)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_prompt_after_a_saved_text_continues_its_document():
    model = small("KRWFB")
    _, saved = write(model, "abcdefg", 0)
    later, _ = write(model, "hijk", 12, saved)
    assert later.ids == write(model, "abcdefghijk", 12)[0].ids


def test_several_samples_go_on_from_one_saved_text():
    model = small("KRWFB")
    settings = {"max_tokens": 8, "samples": 3, "temperature": 1.0}
    _, saved = write(model, "abcdefg", 0)
    found = generate(model, Ids(), ["hi"], resume=saved, **settings)
    expected = generate(model, Ids(), ["abcdefghi"], **settings)
    assert [r.ids for r in found] == [r.ids for r in expected]


def test_after_an_end_of_text_the_saved_text_ends_again():
    model = small("RW")
    with torch.no_grad():
        model.head.weight.zero_()[2] = 1.0
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
    result, saved = write(model, "abc", 9)
    assert (result.reason, saved.state.position) == ("eos", 4)
    again, _ = write(model, "", 9, saved)
    assert (again.reason, again.ids) == ("eos", ())


def test_other_models_and_tokenizers_are_refused(tmp_path):
    model = small("KRW")
    _, saved = write(model, "abc", 3)
    saved.save(tmp_path / "s")

    def load():
        return SavedState.load(tmp_path / "s")

    with pytest.raises(StateError, match="it has 3 layers, this model 2"):
        write(small("KR"), "", 1, load())
    with pytest.raises(StateError, match=r"made with other weights .* than this model's"):
        write(small("KRW", seed=1), "", 1, load())
    other = Ids()
    other.fingerprint = "another"
    with pytest.raises(StateError, match="another tokenizer"):
        generate(model, other, [""], resume=load())
    with pytest.raises(GenerateError, match="goes on with one prompt, not with 2"):
        generate(model, Ids(), ["a", "b"], resume=load())
    write(model, "", 1, load())


def test_every_damage_is_found(tmp_path):
    model = small("KW")
    _, saved = write(model, "abcdefgh", 3)
    path = tmp_path / "s"
    saved.save(path)
    whole = path.read_bytes()
    for place in (0, 7, 40, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 0x11
        path.write_bytes(damaged)
        with pytest.raises(StateError, match="s: "):
            SavedState.load(path)
    path.write_bytes(whole[:-3])
    with pytest.raises(StateError, match="cannot be read as a state"):
        SavedState.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(StateError, match="not a model state"):
        SavedState.load(path)


def test_a_bare_state_is_no_saved_text(tmp_path):
    with torch.no_grad():
        mini("F")(ids(5))[1].save(tmp_path / "s")
    with pytest.raises(StateError, match="without the text's end"):
        SavedState.load(tmp_path / "s")


def test_a_file_without_its_facts_is_damaged(tmp_path):
    _, saved = write(small("W"), "abc", 1)
    texts, tensors = saved.state.parts()
    own = {f"{KEY}.logits": saved.logits, f"{KEY}.seen": saved.seen}
    for facts, words in (("{}", "draws"), ("{", "JSON"), ("3", "mapping")):
        write_file(tmp_path / "s", {**texts, KEY: facts}, {**tensors, **own})
        with pytest.raises(StateError, match=f"damaged .*{words}"):
            SavedState.load(tmp_path / "s")
    write_file(tmp_path / "s", {**texts, KEY: "{}"}, tensors)
    with pytest.raises(StateError, match=r"damaged .*logits"):
        SavedState.load(tmp_path / "s")

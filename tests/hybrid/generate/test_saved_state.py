"""A text put aside and gone on with: as if it had been written at once."""

import json
import math
import time

import pytest
import torch
from safetensors.torch import save_file

from hybrid.errors import UserError
from hybrid.generate import GenerateError, generate
from hybrid.generate.saved_state import KEY, SavedState
from hybrid.model.state import StateError, read_file, write_file

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


@pytest.mark.parametrize("letter", "KFWBRGDMQ")
def test_texts_that_were_written_side_by_side_are_gone_on_with_one_by_one(letter):
    model, found, prompts = small(letter), [], ["a", "bcdefg", "once upon a time, long ago"]
    heads = generate(model, Ids(), prompts, max_tokens=40, on_state=found.append, batch=2)
    order = sorted(found, key=lambda saved: saved.state.position)
    for prompt, head, saved in zip(prompts, heads, order, strict=True):
        whole, _ = write(model, prompt, 45)
        assert head.ids + write(model, "", 5, saved)[0].ids == whole.ids


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


def forged(texts, tensors):
    """Yield what is changed, and a file's texts and tensors with it: every field of a state in every way."""
    for name, tensor in tensors.items():
        yield f"{name} dropped", texts, {other: x for other, x in tensors.items() if other != name}
        changes = {
            "None": None,
            "scalar": tensor.new_zeros(()),
            "empty": tensor.new_zeros((0,) * tensor.ndim),
            "longer": torch.cat((tensor, tensor), -1),
            "two rows": torch.cat((tensor, tensor)),
            "one axis more": tensor[None],
            "half": tensor.half(),
            "int32": tensor.int(),
        }
        if tensor.ndim > 2:
            changes |= {"longer in 1": torch.cat((tensor, tensor[:, :1]), 1), "less in 1": tensor[:, 1:]}
            changes |= {"less in 2": tensor[:, :, 1:], "turned": tensor.transpose(1, 2).contiguous()}
        for value in (-1, 2**40, torch.nan, torch.inf):
            if tensor.is_floating_point() != isinstance(value, int) and tensor.numel():
                changes[str(value)] = torch.full_like(tensor, value)
        for what, change in changes.items():
            if "sink" in name and what == "turned":  # other numbers, as far as a layer can see
                continue
            if change is None or (change.shape == tensor.shape and change.equal(tensor)):
                continue
            yield f"{name} {what}", texts, {**tensors, name: change}
    yield "surplus tensor", texts, {**tensors, "layers.0.more": torch.zeros(1)}
    for key in texts.keys() - {"format"}:
        yield f"{key} dropped", {name: text for name, text in texts.items() if name != key}, tensors
        for text in ("", "-1", "1.5", "[]", "{}", "null", '"x"', "[" * 10_000, "9" * 5000, str(2**62)):
            yield f"{key} {text[:9]}", {**texts, key: text}, tensors
    for key in (KEY, "layers"):
        for what, changed in altered(json.loads(texts[key]), key):
            yield what, {**texts, key: json.dumps(changed)}, tensors


def altered(tree, name):
    """Yield a JSON tree with one leaf or branch changed or dropped."""
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            less = {k: v for k, v in tree.items() if k != key} if isinstance(tree, dict) else tree[1:]
            if tree[key] is not None:  # else it has that value in any case
                yield f"{name}.{key} dropped", less
            for what, inner in altered(tree[key], f"{name}.{key}"):
                yield (
                    what,
                    {**tree, key: inner}
                    if isinstance(tree, dict)
                    else [inner if at == key else one for at, one in enumerate(tree)],
                )
        if isinstance(tree, dict):
            yield f"{name}._spent", {**tree, "_spent": True}
            yield f"{name}.more", {**tree, "more": 1}
    for value in (None, "x", -1, 10**30, 2**40, math.nan, [], {"class": "x"}):
        if value != tree:
            yield f"{name} {value!r}", value


@pytest.mark.parametrize("letter", ["K", "R", *(pytest.param(x, marks=pytest.mark.slow) for x in "FWBGDMQ")])
def test_every_forged_field_is_refused_in_words(tmp_path, letter):
    """With a right checksum: never a traceback, and at once."""
    model, path = small(letter), tmp_path / "s"
    _, saved = write(model, "once upon a time", 30, temperature=1.0)
    saved.save(path)
    texts, tensors = read_file(path)
    taken = []
    for what, new_texts, new_tensors in forged(texts, tensors):
        write_file(path, new_texts, new_tensors)
        begin = time.process_time()
        try:
            write(model, "a", 1, SavedState.load(path))
            taken.append(what)
        except UserError as error:
            assert "s: " in str(error) or "s was made" in str(error), what  # noqa: PT017 (many in a loop)
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")
        assert time.process_time() - begin < 1, what
    assert not taken

"""Our models inside transformers: folders, generation with states as the cache, padding, training."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from tests.hybrid.mini import EQUAL, difference, ids

from .models import ALL_KINDS, hf_mini, left_padded


@pytest.fixture(scope="module")
def model():
    return hf_mini()


def greedy(model, row, tokens):
    """The most probable tokens after a row, every prefix read anew."""
    row = row[None]
    with torch.no_grad():
        for _ in range(tokens):
            row = torch.cat((row, model(row, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return row[0]


def test_importing_hybrid_imports_neither_torch_nor_transformers_and_yet_registers_the_models():
    code = (
        "import sys, hybrid; assert not {'torch', 'transformers', 'peft'} & sys.modules.keys();"
        "from transformers import AutoConfig, AutoModelForCausalLM;"
        "print(AutoConfig.for_model('kvm_hybrid').__class__.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("HybridConfig"), done.stderr
    auto = "from transformers import AutoConfig, AutoModelForCausalLM;"
    ours = "from hybrid.convert.hf.modeling import HybridForCausalLM;"
    for other in (f"{auto} import hybrid;", f"{ours} {auto}"):
        other += code.split(";")[-1]
        done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
        assert done.stdout.strip().endswith("HybridConfig"), done.stderr


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_is_loaded_with_equal_weights_and_logits(tmp_path, tied):
    model = hf_mini(tie_embeddings=tied)
    model.save_pretrained(tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() == {f"model.{name}" for name in model.model.state_dict()}
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(model(ids(40)).logits, again(ids(40)).logits)
    assert (again.model.head.weight is again.model.embedding.weight) == tied


def test_config_json_tells_a_plain_reader_the_layers(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["model"]["expanded"] == ["K", "R", "W", "F"]
    assert {letter: entry["kind"] for letter, entry in config["model"]["layers"].items()} == {
        "K": "kvm", "R": "rwkv7", "W": "sliding_window", "F": "full"
    }  # fmt: skip
    assert AutoConfig.from_pretrained(tmp_path).section() == model.config.section()


def test_a_config_that_contradicts_itself_and_missing_weights_are_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.blocks.1.ffn.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing.*blocks\.1\.ffn\.c_fc\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match=r"num_hidden_layers is 5, model\.depth 4"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generation_with_the_state_as_cache_writes_what_full_recomputation_does(how):
    model, prompts = hf_mini(ALL_KINDS), ids(30, 2)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(
            model.generate(prompts, max_new_tokens=12, eos_token_id=None, use_cache=use_cache, **how)
        )
    assert torch.equal(*found)


def test_every_prompt_of_a_left_padded_batch_gets_its_own_result(model):
    rows = [ids(length, seed=length)[0] for length in (9, 40, 17)]
    padded, mask = left_padded(rows)
    logits = model(padded, attention_mask=mask).logits
    for row, own in zip(rows, logits, strict=True):
        assert difference(own[-len(row) :], model(row[None]).logits[0]) < EQUAL
        assert not own[: -len(row)].any()
    for how in ({}, {"num_beams": 2}):
        found = model.generate(padded, attention_mask=mask, max_new_tokens=8, eos_token_id=None, **how)
        for row, own in zip(rows, found, strict=True):
            alone = model.generate(row[None], max_new_tokens=8, eos_token_id=None, **how)
            assert torch.equal(own[padded.shape[1] :], alone[0, len(row) :])
    assert torch.equal(
        model.generate(rows[0][None], max_new_tokens=8, eos_token_id=None)[0], greedy(model, rows[0], 8)
    )


@torch.no_grad()
def test_a_cache_goes_on_with_several_tokens_and_can_be_copied_and_reordered(model):
    rows = [ids(length, seed=length)[0] for length in (9, 20)]
    padded, mask = left_padded(rows)
    cache = model(padded, attention_mask=mask).cache
    assert cache.get_seq_length() == 20
    copied = copy.deepcopy(cache)
    more = ids(5, 2, seed=1)
    logits = model(more, cache=cache).logits
    assert cache.get_seq_length() == 25
    for row, new, own in zip(rows, more, logits, strict=True):
        assert difference(own, model(torch.cat((row, new))[None]).logits[0, -5:]) < EQUAL
    copied.reorder_cache(torch.tensor([1, 0]))
    swapped = model(more.flip(0), past_key_values=copied).logits
    assert difference(swapped.flip(0), logits) < EQUAL
    whole = torch.cat((padded, more), 1)
    mask = torch.cat((mask, torch.ones_like(more)), 1)
    with_cache = model.generate(
        torch.cat((whole, more), 1), attention_mask=torch.cat((mask, torch.ones_like(more)), 1),
        cache=cache, max_new_tokens=4, eos_token_id=None,
    )  # fmt: skip
    fresh = model.generate(
        torch.cat((whole, more), 1), attention_mask=torch.cat((mask, torch.ones_like(more)), 1),
        max_new_tokens=4, eos_token_id=None,
    )  # fmt: skip
    assert torch.equal(with_cache, fresh)


def test_what_a_state_cannot_do_is_refused_in_words(model):
    prompt = ids(12)
    for how in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="stateful"):
            model.generate(prompt, max_new_tokens=4, **how)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        model(prompt).cache.crop(3)
    masks = {
        "right": [1, 1, 1, 0], "hole": [1, 0, 1, 1], "empty": [0, 0, 0, 0], "values": [0, 2, 2, 2]
    }  # fmt: skip
    for mask in masks.values():
        with pytest.raises(ValueError, match="attention_mask"):
            model(prompt[:, :4], attention_mask=torch.tensor([mask]))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(prompt, attention_mask=torch.ones(1, 1, 12, 12))
    for name in ("position_ids", "inputs_embeds", "output_hidden_states"):
        with pytest.raises(ValueError, match=name):
            model(prompt, **{name: True})
    cache = model(prompt).cache
    with pytest.raises(ValueError, match="12 were read and 1 are new"):
        model(prompt[:, :1], cache=cache, attention_mask=torch.tensor([[0] + [1] * 12]))


def test_the_loss_is_the_mean_over_counted_tokens_whatever_the_padding(model):
    rows = [ids(length, seed=length)[0] for length in (9, 20)]
    padded, mask = left_padded(rows)
    alone = [model(row[None], labels=row[None]).loss for row in rows]
    together = model(padded, attention_mask=mask, labels=padded).loss
    wanted = (alone[0] * 8 + alone[1] * 19) / 27
    assert abs(together - wanted) < 1e-5


def test_the_trainer_trains_with_and_without_activation_checkpointing(tmp_path):
    losses = []
    for checkpointing in (False, True):
        model = hf_mini("KF")
        before = {name: p.clone() for name, p in model.named_parameters()}
        arguments = TrainingArguments(
            tmp_path / "out", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            gradient_checkpointing=checkpointing, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids(24, 2)]
        found = Trainer(model, arguments, train_dataset=rows).train()
        assert model.model.activation_checkpointing == checkpointing
        assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
        losses.append(found.training_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_peft_adapts_every_linear_layer_by_default_and_merges_exactly():
    from peft import LoraConfig, get_peft_model

    model, prompt = hf_mini(ALL_KINDS), ids(80)
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    weights = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    assert len(weights) == 2 * linears
    torch.manual_seed(0)
    for weight in weights.values():
        weight.data.normal_(std=0.05)
    adapted.eval()
    loss = adapted(input_ids=prompt, labels=prompt).loss
    loss.backward()
    unused = {name for name, p in weights.items() if not p.grad.any()}
    assert all("blocks.0." in name or ".v_gate" in name for name in unused), unused
    logits = adapted(prompt).logits
    assert adapted.generate(input_ids=prompt[:, :9], max_new_tokens=2).shape == (1, 11)
    assert difference(adapted.merge_and_unload()(prompt).logits, logits) < EQUAL

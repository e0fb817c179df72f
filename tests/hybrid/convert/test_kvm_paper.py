"""Configs and state dicts of the paper's code: to our recipe section and names, and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid.convert.kvm_paper import (
    OVQ_OFF_ONLY,
    from_upstream,
    layer_letters,
    model_section,
    our_name,
    to_upstream,
)
from hybrid.errors import ConvertError, NotSupported
from hybrid.model import HybridLM
from hybrid.recipe.letters import layer_specs
from hybrid.recipe.pattern import expand
from hybrid.verify.vectors import below, read_cases

VECTORS = Path(__file__).parents[2] / "vectors"


def published(**changes):
    """The paper's 120M model with saturating KVM on odd and sliding windows on even layers."""
    config = {
        "vocab_size": 50304,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "d_head": 128,
        "token_mixer": "kvm",
        "alt_token_mixer": "swa",
        "alt_layer_every": 2,
        "rope_partial_dim": 64,
        "rope_theta": 10000.0,
        "alt_rope_partial_dim": 128,
        "alt_rope_theta": 10000.0,
        "ffn_expansion": 4,
        "use_tokenshift_att": 1,
        "use_tokenshift_ffn": 1,
        "use_value_residual": 1,
        "swa_window_size": 256,
        "chunk_len": 256,
        "n_bswa_chunks": 2,
        "sink_len": 1,
        "state_budget_mode": "kvm_saturation",
        "state_saturation_n": 1024,
        "state_min_len": 1,
        "n_max_d_chunks": 10000,
        "kvm_use_merge_gate_keys": 1,
        "kvm_use_merge_gate_values": 1,
        "kvm_apply_merge_gate_to_appends": 1,
        "kvm_use_head_temps": 1,
        "kvm_use_vlens": 1,
    }
    return config | changes


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_a_published_config_becomes_a_model_section():
    section = model_section(published())
    assert section.pattern == "(WK)6"
    assert (section.hidden_size, section.vocab_size, section.ffn_expansion) == (768, 50304, 4)
    kvm = layer_specs(section)[1].options
    assert (kvm.chunk, kvm.window_chunks, kvm.sinks, kvm.rotary_dim) == (256, 2, 1, 64)
    assert (kvm.budget, kvm.budget_saturation, kvm.budget_minimum) == ("saturation", 1024, 1)
    assert (kvm.gate_keys, kvm.gate_values, kvm.gate_appends, kvm.gate_initial) == (True, True, True, False)
    assert (kvm.temperatures, kvm.values) == (True, "radius")
    sliding = layer_specs(section)[0].options
    assert (sliding.window, sliding.rotary_dim, sliding.num_heads, sliding.head_dim) == (256, 128, 6, 128)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"state_budget_mode": "fixed", "state_min_len": 256, "n_max_d_chunks": 1},
            {"budget": "fixed", "budget_minimum": 256, "budget_max_chunks": 1},
        ),
        (
            {
                "state_budget_mode": "power_law",
                "state_growth_factor": 16.0,
                "state_growth_exponent": 0.5,
                "state_min_len": -1,
                "state_round_down": 4,
            },
            {
                "budget": "power_law",
                "budget_factor": 16.0,
                "budget_exponent": 0.5,
                "budget_minimum": 1,
                "budget_round": 4,
            },
        ),
        ({"kvm_apply_merge_gate_to_appends": 0}, {"gate_appends": False}),
        ({"kvm_use_merge_gate_values": 0}, {"gate_values": False, "gate_keys": True}),
        ({"kvm_use_head_temps": 0, "sink_len": 0}, {"temperatures": False, "sinks": 0}),
        ({"num_key_value_heads": 2}, {"num_kv_heads": 2, "num_heads": 6}),
        ({"use_value_residual": 0, "use_tokenshift_att": 0}, {"value_residual": False, "token_shift": False}),
    ],
)
def test_switches_of_the_kvm_layer_carry_over(changes, expected):
    options = layer_specs(model_section(published(**changes)))[1].options
    assert {name: getattr(options, name) for name in expected} == expected


def test_other_mixers_carry_over():
    changes = {"token_mixer": "gptalpha_bswa", "alt_layer_every": -1, "n_bswa_chunks": 3, "sink_len": 0}
    block = model_section(published(**changes))
    assert block.pattern == "B12"
    options = layer_specs(block)[0].options
    assert (options.chunk, options.window_chunks, options.sinks, options.rotary_dim) == (256, 3, 0, 64)
    mixed = model_section(published(token_mixer="gptalpha", rope_partial_dim=0, swa_window_size=-1))
    assert mixed.pattern == "(WF)6"
    assert [spec.options.rotary_dim for spec in layer_specs(mixed)[:2]] == [128, 0]
    assert layer_specs(mixed)[0].options.window == 256  # no window given: the chunk's length


@pytest.mark.parametrize(
    ("period", "pattern"),
    [(-1, "K12"), (0, "K12"), (2, "(WK)6"), (3, "(WKK)4"), (5, "WKKKKWKKKKWK"), (12, "WK11"), (99, "WK11")],
)
def test_the_first_of_every_period_is_alternate(period, pattern):
    assert layer_letters(published(alt_layer_every=period)) == expand(pattern)


def test_a_period_of_one_is_refused_with_the_reason():
    with pytest.raises(NotSupported, match="alt_layer_every is 1, which the paper's code reads in two ways"):
        model_section(published(alt_layer_every=1))


@pytest.mark.parametrize("period", [-1, 2, 3, 5])
def test_skip_connections_are_refused_with_the_reason(period):
    with pytest.raises(NotSupported, match=r"use_skip_connections is True: .*counts its"):
        model_section(published(alt_layer_every=period, use_skip_connections=True))


@pytest.mark.parametrize("switch", ["use_block_lambdas", "use_l2wrap", "alt_share_v0"])
def test_switches_we_do_not_have_are_refused(switch):
    with pytest.raises(NotSupported, match=f"{switch} is 1: .*only 0 is"):
        model_section(published(**{switch: 1}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_mixer": "gla"}, "token_mixer is 'gla'; supported: kvm, gptalpha"),
        ({"alt_token_mixer": "kda"}, "alt_token_mixer is 'kda'"),
        ({"token_mixer": "swa"}, "both 'swa'"),
        ({"state_budget_mode": "log"}, "state_budget_mode is 'log'; supported: fixed, power_law"),
        ({"swa_token_shift_mode": "linear"}, "swa_token_shift_mode is 'linear'"),
        ({"kvm_value_residual_mode": "linear"}, "kvm_value_residual_mode is 'linear'"),
        ({"token_mixer": "rwkv7", "num_key_value_heads": 2}, "num_key_value_heads is 2: rwkv7 has"),
        ({"token_mixer": "rwkv7", "use_value_residual": 0}, "RWKV-7 has its value residual always"),
        ({"token_mixer": "swa", "alt_token_mixer": "kvm"}, "alt_rope_partial_dim 128 and rope_partial"),
    ],
)
def test_what_we_do_not_have_is_refused(changes, words):
    with pytest.raises(NotSupported, match=words):
        model_section(published(**changes))


def test_incomplete_and_broken_configs_are_refused():
    with pytest.raises(ConvertError, match="the config has no 'state_saturation_n'"):
        model_section(without(published(), "state_saturation_n"))
    with pytest.raises(ConvertError, match=r"'kvm_apply_merge_gate_to_appends' .1 in the paper"):
        model_section(without(published(), "kvm_apply_merge_gate_to_appends"))
    with pytest.raises(ConvertError, match="use_tokenshift_att is 2; allowed: 0, 1"):
        model_section(published(use_tokenshift_att=2))
    with pytest.raises(ValueError, match="rotary_dim"):
        model_section(published(rope_partial_dim=128))  # KVM needs part of the head unrotated


def ovq(**changes):
    own = {"token_mixer": "ovq", "ovq_chunk_size": 256, "ovq_window_size": 256, "ovq_max_centroids": 1024}
    return published(rope_partial_dim=0, **{**own, **changes})


def test_ovq_and_rwkv7_carry_over():
    section = model_section(ovq())
    assert section.pattern == "(WQ)6"
    options = layer_specs(section)[1].options
    assert (options.chunk, options.max_centroids, options.num_heads, options.head_dim) == (256, 1024, 6, 128)
    assert (options.token_shift, options.value_residual) == (True, True)
    section = model_section(published(token_mixer="rwkv7", alt_layer_every=-1, use_tokenshift_att=0))
    assert section.pattern == "R12"
    options = layer_specs(section)[0].options
    assert (options.num_heads, options.head_dim, options.token_shift) == (6, 128, False)
    hybrid = published(token_mixer="rwkv7", alt_token_mixer="kvm", alt_layer_every=4, alt_rope_partial_dim=64)
    assert model_section(hybrid).pattern == "(KR3)3"


def test_heads_of_rwkv7_make_up_the_hidden_size():
    with pytest.raises(ValueError, match="head_dim 64 do not cut hidden_size 768"):
        model_section(published(token_mixer="rwkv7", d_head=64))


def test_an_ovq_window_is_only_taken_when_it_is_the_chunk():
    with pytest.raises(NotSupported, match=r"ovq_window_size is 512 and ovq_chunk_size 256: .*never reads"):
        model_section(ovq(ovq_window_size=512))
    assert model_section(published(ovq_window_size=512, ovq_chunk_size=256)).pattern == "(WK)6"  # no OVQ here


@pytest.mark.parametrize("switch", OVQ_OFF_ONLY)
def test_switches_of_ovq_we_do_not_have_are_refused(switch):
    with pytest.raises(NotSupported, match=f"{switch} is 1: .*only 0 is"):
        model_section(ovq(**{switch: 1}))
    assert model_section(ovq(**{switch: 0})).pattern == "(WQ)6"
    assert model_section(published(**{switch: 1})).pattern == "(WK)6"


# State dicts


@pytest.fixture(scope="module")
def upstream():
    """A stored model of sliding-window and KVM layers: (config, upstream's state dict)."""
    cases = json.loads((VECTORS / "index.json").read_text())["cases"]
    case = next(case for case in cases if case["file"] == "model_kvm_swa.safetensors")
    tensors = load_file(VECTORS / case["file"])
    prefix = "state_dict/"
    return case["config"], {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def build(config):
    with torch.device("meta"):
        section = model_section(config)
        return HybridLM(section, layer_specs(section))


def test_a_state_dict_goes_there_and_back(upstream):
    config, tensors = upstream
    expected = build(config).state_dict()
    ours = from_upstream(tensors, expected)
    assert ours.keys() == expected.keys()
    assert "blocks.3.mixer.c_q.weight" in ours
    back = to_upstream(ours)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].shape == tensor.shape


def test_a_hybrid_with_rwkv7_goes_there_and_back_with_upstreams_shapes():
    """Its vectors are [1, 1, C], those of attention layers beside it [C]."""
    cases = [case for case in read_cases(VECTORS) if case.config.get("token_mixer") == "rwkv7"]
    tensors = below("param.", cases[0].tensors())
    ours = from_upstream(tensors, build(cases[0].config).state_dict())
    assert ours["blocks.1.mixer.x_k"].shape == ours["blocks.0.mixer.x_k"].shape == (32,)
    back = to_upstream(ours)
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in tensors.items()}
    assert all(torch.equal(back[name], t) for name, t in tensors.items())
    assert back["transformer.h.1.attn.x_k"].shape == (1, 1, 32)
    assert back["transformer.h.0.attn.x_k"].shape == (32,)


@pytest.mark.parametrize("mixer", ["ovq", "gptalpha"])
def test_a_shift_that_nothing_reads_is_dropped_and_made_again(mixer):
    """Upstream keeps `x_v` where there is a value residual but no token shift."""
    small = {
        "hidden_size": 64,
        "d_head": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    config = ovq(use_tokenshift_att=0, alt_rope_partial_dim=32) | small | {"token_mixer": mixer}
    section = model_section(config)
    ours = HybridLM(section, layer_specs(section)).state_dict()
    theirs = to_upstream(ours)
    unread = [f"transformer.h.{layer}.attn.x_v" for layer in range(2)]
    assert [name for name in theirs if ".attn.x_" in name] == unread
    assert all(torch.equal(theirs[name], torch.zeros(64)) for name in unread)
    again = from_upstream(theirs, ours)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], t) for name, t in ours.items())
    shifted = model_section(config | {"use_tokenshift_att": 1})
    both = to_upstream(HybridLM(shifted, layer_specs(shifted)).state_dict())
    assert from_upstream(both, build(config | {"use_tokenshift_att": 1}).state_dict())[
        "blocks.1.mixer.x_v"
    ].any()


def test_every_fault_of_a_state_dict_is_named(upstream):
    config, tensors = upstream
    broken = without(tensors, "lm_head.weight", "transformer.h.1.attn.c_q.weight")
    broken["transformer.h.9.attn.c_q.weight"] = tensors["transformer.h.1.attn.c_q.weight"]
    broken["transformer.h.1.attn.c_x.weight"] = torch.zeros(2)
    broken["optimizer.step"] = torch.zeros(1)
    broken["transformer.h.0.mlp.x_k"] = torch.zeros(1, 1, 31)
    with pytest.raises(ConvertError) as caught:
        from_upstream(broken, build(config).state_dict())
    words = str(caught.value)
    assert "unknown tensor 'transformer.h.9.attn.c_q.weight'" in words
    assert "unknown tensor 'transformer.h.1.attn.c_x.weight'" in words
    assert "unknown tensor 'optimizer.step'" in words
    assert "tensor 'transformer.h.0.mlp.x_k' is (31,), the config asks for (32,)" in words
    assert "missing tensor 'lm_head.weight'" in words
    assert "missing tensor 'transformer.h.1.attn.c_q.weight'" in words
    assert words.count("\n") == 6


def test_names_that_upstream_does_not_have_are_refused():
    with pytest.raises(ConvertError, match=r"unknown tensor 'transformer\.h\.0\.attn'"):
        our_name("transformer.h.0.attn")
    with pytest.raises(ConvertError, match=r"no parameter for 'blocks\.0\.router\.weight'"):
        to_upstream({"blocks.0.router.weight": torch.zeros(1)})

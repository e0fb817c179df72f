"""recipes/paper: every published model, with the options of its published config and hand-computed sizes."""

import dataclasses

import pytest

from hybrid.convert.kvm_paper import model_section
from hybrid.estimate.info import meta_model
from hybrid.recipe import load, shipped
from hybrid.recipe.letters import layer_specs

from ..convert.test_kvm_paper import published

PLAIN = {"alt_layer_every": -1}
FIXED = {**PLAIN, "state_budget_mode": "fixed", "state_min_len": 256, "n_max_d_chunks": 1}
SQRT16 = {
    "state_budget_mode": "power_law",
    "state_growth_factor": 16.0,
    "state_growth_exponent": 0.5,
    "state_min_len": 256,
}
FULL = {"token_mixer": "gptalpha"}
OVQ = {
    "token_mixer": "ovq",
    "rope_partial_dim": 0,
    "ovq_chunk_size": 256,
    "ovq_window_size": 256,
    "ovq_max_centroids": 1024,
}
UNGATED_APPENDS = {"kvm_apply_merge_gate_to_appends": 0}
UNGATED = {"kvm_use_merge_gate_keys": 0, "kvm_use_merge_gate_values": 0, **UNGATED_APPENDS}

BOTH_SIZES = {
    "gptalpha": FULL | PLAIN,
    "gptalpha_bswa": PLAIN | {"token_mixer": "gptalpha_bswa", "n_bswa_chunks": 3, "sink_len": 0},
    "gptalpha_halfrope_swa": FULL,
    "gptalpha_nope_swa": FULL | {"rope_partial_dim": 0},
    "kvm_fixed256": FIXED,
    "kvm_sqrt16": PLAIN | SQRT16,
    "kvm_swa_saturate1024": {},
    "kvm_fixed256_no_append_gate": FIXED | UNGATED_APPENDS,
    "kvm_sqrt16_no_append_gate": PLAIN | SQRT16 | UNGATED_APPENDS,
    "kvm_swa_saturate1024_no_append_gate": UNGATED_APPENDS,
    "kvm_fixed256_no_merge_gate": FIXED | UNGATED,
    "ovq_swa": OVQ,
    "rwkv7": PLAIN | {"token_mixer": "rwkv7"},
}
ONLY_120M = {
    "kvm_sqrt16_no_merge_gate": PLAIN | SQRT16 | UNGATED,
    "kvm_swa_saturate1024_no_merge_gate": UNGATED,
    "kvm_fixed256_no_temperatures": FIXED | {"kvm_use_head_temps": 0},
    "kvm_fixed256_no_sink": FIXED | {"sink_len": 0},
    "kvm_fixed256_no_vlens": FIXED | {"kvm_use_vlens": 0},
}
SIZES = {
    "120m": {},
    "350m": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "residual_scale": 0.5,
    },
}
CONFIGS = {f"{name}_{size}": SIZES[size] | config for size in SIZES for name, config in BOTH_SIZES.items()}
CONFIGS |= {f"{name}_120m": config for name, config in ONLY_120M.items()}
OURS = {"rwkv7_kvm_120m", "rwkv7_kvm_350m"}
"""Not expressible in the paper's code, whose alternate layers come first."""


def test_every_published_model_has_a_recipe():
    paper = {name.removeprefix("paper/") for name in shipped() if name.startswith("paper/")}
    assert paper == CONFIGS.keys() | OURS


def comparable(spec):
    """A layer in the words of both sides: what is left open here, or limits nothing, is explicit there."""
    options = dataclasses.asdict(spec.options)
    if "num_kv_heads" in options:
        options["num_kv_heads"] = options["num_kv_heads"] or options["num_heads"]
    if spec.kind == "kvm":
        options["budget_max_chunks"] = options["budget_max_chunks"] or 10000
        unused = {
            "fixed": ("factor", "exponent", "saturation"),
            "power_law": ("saturation",),
            "saturation": ("factor", "exponent"),
        }
        for name in unused[options["budget"]]:
            del options[f"budget_{name}"]
    return spec.letter, spec.kind, options


@pytest.mark.parametrize("name", CONFIGS)
def test_recipes_say_what_the_published_configs_say(name):
    recipe = load(f"paper/{name}")
    config = published(**{"n_max_d_chunks": 10000, "state_round_down": 1, **CONFIGS[name]})
    section = model_section(config)
    ours, theirs = layer_specs(recipe.model), layer_specs(section)
    assert [spec.letter for spec in ours] == [spec.letter for spec in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert comparable(one) == comparable(other)
    for key in ("hidden_size", "vocab_size", "ffn_expansion", "ffn_token_shift", "residual_scale"):
        assert getattr(recipe.model, key) == getattr(section, key), key


def hand_computed(size):
    """Parameters of a layer of each kind (mixer, feed-forward, two norms) and of the rest, by hand."""
    hidden, heads, gate = {"120m": (768, 6, 128), "350m": (1024, 8, 160)}[size]
    maps = 4 * hidden * hidden  # q, k, v, output
    shifts = 3 * hidden
    value_residual = hidden + 2 * 32 * hidden
    norms = 2 * 2 * 128  # of queries and keys
    full = maps + shifts + value_residual + norms
    low_rank = 2 * hidden * (64 + 64 + 32 + gate)  # decay, rate, values, gate
    mixers = {
        "F": full,
        "W": full,
        "B": full,
        "K": full + heads * hidden + 2 * 128 + 2 * heads,  # merge gate, norm of state keys, temperatures
        "Q": full - norms + heads,  # a factor per head instead
        "R": maps + 6 * hidden + low_rank + 5 * hidden + hidden + 2 * hidden,
    }
    rest = 2 * 4 * hidden * hidden + hidden + 2 * 2 * hidden  # feed-forward with shift, two norms
    layers = {letter: mixer + rest for letter, mixer in mixers.items()}
    return layers, 2 * 50304 * hidden + 2 * 2 * hidden


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gptalpha_120m", 162_883_584),
        ("gptalpha_nope_swa_350m", 406_822_912),
        ("kvm_fixed256_120m", 162_942_096),
        ("kvm_swa_saturate1024_350m", 406_924_480),
        ("ovq_swa_120m", 162_880_548),
        ("rwkv7_120m", 167_688_192),
        ("rwkv7_350m", 421_212_160),
        ("rwkv7_kvm_120m", 166_501_668),
    ],
)
def test_parameter_counts_are_those_computed_by_hand(name, total):
    recipe = load(f"paper/{name}")
    layers, rest = hand_computed(name[-4:])
    assert sum(layers[letter] for letter in recipe.model.expanded) + rest == total
    assert sum(meta_model(recipe).parameter_parts().values()) == total


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("kvm_fixed256_no_merge_gate_120m", 12 * 6 * 768),
        ("kvm_swa_saturate1024_no_merge_gate_120m", 6 * 6 * 768),
        ("kvm_fixed256_no_temperatures_120m", 12 * 2 * 6),
        ("kvm_fixed256_no_append_gate_120m", 0),
        ("kvm_fixed256_no_sink_120m", 0),
        ("kvm_fixed256_no_vlens_120m", 0),
    ],
)
def test_ablations_lack_what_they_take_away(name, fewer):
    def parameters(name):
        return sum(meta_model(load(f"paper/{name}")).parameter_parts().values())

    whole = name.split("_no_")[0] + "_120m"
    assert parameters(whole) - parameters(name) == fewer


def test_rwkv7_with_kvm_has_kvm_every_fourth_layer():
    assert load("paper/rwkv7_kvm_120m").model.expanded == list("RRRK" * 3)
    recipe = load("paper/rwkv7_kvm_350m")
    assert recipe.model.expanded == list("RRRK" * 6)
    kvm = layer_specs(load("paper/kvm_sqrt16_350m").model)[0]
    assert layer_specs(recipe.model)[3] == kvm

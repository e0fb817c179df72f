"""Kinds by name, and the base's own rules."""

import dataclasses

import pytest
import torch

from hybrid.layers import Flops, LayerError, Mixer, MixerState, Site, registry


def test_built_in_kinds_are_found_with_documented_options():
    known = registry.kinds()
    assert {"full", "sliding_window", "block_window", "kvm"} <= known.keys()
    for kind, mixer in known.items():
        assert mixer.kind == kind
        assert dataclasses.is_dataclass(mixer.Options)
        mixer.Options()  # every option has a default


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(LayerError, match="unknown layer kind 'sliding_windw'; did you mean sliding_window"):
        registry.mixer_class("sliding_windw")


def test_two_mixers_of_one_name_are_refused():
    class Other(Mixer):
        Options = registry.mixer_class("full").Options

    with pytest.raises(
        LayerError, match=r"registered as 'full': hybrid.layers.attention.FullAttention and .*Other"
    ):
        registry.register("full")(Other)
    assert registry.mixer_class("full").__name__ == "FullAttention"


def test_options_must_be_a_dataclass():
    class Other(Mixer):
        class Options:
            pass

    with pytest.raises(LayerError, match=r"mixer 'other': .*Other.Options must be a dataclass"):
        registry.register("other")(Other)


def test_flops_add_up_and_training_has_no_backward_of_the_routing():
    flops = Flops(10, 3) + Flops(5, 1)
    assert (flops.forward, flops.training) == (19, 49)


@dataclasses.dataclass
class Inner(MixerState):
    a: torch.Tensor | None = None


@dataclasses.dataclass
class Outer(MixerState):
    b: torch.Tensor | None = None
    inner: Inner | None = None
    nothing: torch.Tensor | None = None


def test_states_inside_states_are_counted_and_changed_with_them():
    state = Outer(3, b=torch.zeros(2, 4), inner=Inner(3, a=torch.ones(2, 5)))
    assert {name: t.shape for name, t in state.tensors().items()} == {"b": (2, 4), "inner.a": (2, 5)}
    assert state.nbytes == 72
    fork = state.fork()
    fork.inner.a.zero_()
    assert state.inner.a.sum() == 10
    assert state.map(lambda t: t.double()).inner.a.dtype == torch.float64


def test_site_of_a_layer_alone():
    assert Site(64) == Site(64, 0, 1, True)

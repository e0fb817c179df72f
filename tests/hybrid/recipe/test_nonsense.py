"""Whatever somebody writes into a recipe or a pattern: it is one, or an error for people."""

from __future__ import annotations

import contextlib
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import UserError
from hybrid.estimate.info import describe
from hybrid.layers.registry import kinds
from hybrid.recipe import load
from hybrid.recipe.pattern import PatternError, expand
from hybrid.recipe.schema import Recipe

OPTIONS = ("kind", "num_heads", "num_kv_heads", "head_dim", "chunk", "window", "rotary_dim", "token_shift")
VALUES = (
    "", "0", "-1", "3", "1.5", "1e400", "nan", "-inf", "1e-320", "0x10", "1_000", "9" * 400, "true", "null",
    "???", "[]", "{}", "[[1]]", "{a: 1}", "a: b", "- a", "${", "${train.steps}", "${model}", "~", "~nobody/x",
    "/", "\0", "\ud800", "\n", "'", '"', "%", "@", "*a", "&a [*a]", "!!python/object:os.system x", "x" * 300,
    "2020-01-01", "12:30:00", "K", "(K)2", "bf16", "\N{FULLWIDTH DIGIT ONE}",
)  # fmt: skip

sections = {field.name: field.default_factory for field in dataclasses.fields(Recipe)}
keys = st.one_of(
    st.sampled_from(
        [f"{name}.{key.name}" for name, section in sections.items() for key in dataclasses.fields(section)]
    ),
    st.builds("model.layers.{}.{}".format, st.sampled_from("KFWRGDMQBXk"), st.sampled_from(OPTIONS)),
    st.builds("model.defaults.{}".format, st.sampled_from(OPTIONS)),
    st.builds(
        "data.sources.{}.{}".format, st.sampled_from(["text", "x"]), st.sampled_from(["paths", "weight"])
    ),
    st.text("abc._-[]{}$ ~K\0é", max_size=8),
)
values = st.one_of(
    st.sampled_from(VALUES),
    st.sampled_from(sorted(kinds())),
    st.text("0123456789.e-+,[]{}: 'K\"", max_size=10),
)
overrides = st.one_of(
    st.builds("{}={}".format, keys, values),
    st.builds("model.pattern={}".format, st.text("KFWRGDMQB()23 x|", max_size=12)),
    keys,
)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(overrides, min_size=1, max_size=3), st.sampled_from([None, 1, 2]))
def test_any_override_is_taken_or_refused_in_words(chosen, processes):
    with contextlib.suppress(UserError):
        recipe = load("debug", chosen, world_size=processes)
        if len(expand(recipe.model.pattern)) < 20:  # the others take their time
            describe(recipe, processes or 1)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.one_of(st.text("KFRk()0129 \n|", max_size=20), st.text(max_size=8)))
def test_any_pattern_is_expanded_or_refused_in_words(pattern):
    with contextlib.suppress(PatternError):
        assert all("A" <= letter <= "Z" for letter in expand(pattern))

"""The pattern language: what expands to what, what is refused and where the caret stands."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.recipe.pattern import DEFAULT_LETTERS, PatternError, compress, expand


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        ("K", "K"),
        ("K3F", "KKKF"),
        ("(R3K)2", "RRRKRRRK"),
        ("(KF)", "KF"),
        ("((KF)2W)2", "KFKFWKFKFW"),
        ("((((K))))3", "KKK"),
        ("K12", "K" * 12),
        (" K 3 ( F W ) 2 ", "KKKFWFW"),
        ("\n\tK2F\r\n", "KKF"),
        ("K4096", "K" * 4096),
    ],
)
def test_patterns_expand_as_written(pattern, letters):
    """White space is allowed, also a trailing newline."""
    assert "".join(expand(pattern)) == letters


@pytest.mark.parametrize(
    ("pattern", "column", "words"),
    [
        ("KXF", 1, "unknown letter 'X' at position 2; letters with a meaning here: F K W"),
        ("Kf", 1, "unexpected 'f' at position 2 (did you mean 'F'?)"),
        ("K|F", 1, "unexpected '|' at position 2"),
        ("KÉ", 1, "unexpected 'É' at position 2"),
        ("K²", 1, "unexpected '²' at position 2"),
        ("", 0, "empty"),
        (" \n", 0, "empty"),
        ("3K", 0, "a count at position 1 needs a letter"),
        ("K1 2", 3, "a count at position 4 needs a letter"),
        ("K-1", 1, "unexpected '-'"),
        ("K0", 1, "a count is 1 or more"),
        ("K04", 1, "without leading zeros"),
        ("(K", 0, "never closed"),
        ("K(F(W)", 1, "never closed"),
        ("K)", 1, "closes no group"),
        ("K()", 2, "at least one letter"),
        ("F(K4096)2", 1, "more than 4096 layers"),
        ("K4096F", 5, "more than 4096 layers"),
        ("K4097", 0, "more than 4096 layers"),
        ("K" + "9" * 5000, 1, "more than 4096 layers"),
    ],
)
def test_faults_are_shown_with_a_caret(pattern, column, words):
    """huggingface/transformers#45300: the letter, its position and the legal letters; nothing is guessed."""
    with pytest.raises(PatternError) as caught:
        expand(pattern, {"K", "F", "W"})
    problem, shown, caret = str(caught.value).split("\n")
    assert words in problem
    assert caret.index("^") == 2 + column
    assert shown[2:] == pattern.replace("\n", " ")[:80] or len(pattern) > 80


def test_caret_stays_in_sight_in_a_long_pattern():
    with pytest.raises(PatternError) as caught:
        expand("K" * 500 + "?" + "K" * 500)
    _, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^")] == "?"
    assert len(shown) < 100


@pytest.mark.parametrize(
    "pattern", ["(K9999)9999", "((((((K99)99)99)99)99)99)99", "(" * 50_000 + "K" + ")99" * 50_000]
)
def test_huge_repetitions_are_refused_without_being_written_out(pattern):
    start = time.process_time()
    with pytest.raises(PatternError, match="more than 4096 layers"):
        expand(pattern)
    assert time.process_time() - start < 1


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("KFW"), min_size=1, max_size=60))
def test_compressed_letters_expand_to_themselves(letters):
    short = compress(letters)
    assert expand(short) == letters
    assert len(short) <= len(letters)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    st.recursive(
        st.sampled_from("KFW"),
        lambda inner: st.builds("({}{}){}".format, inner, inner, st.integers(1, 3)),
        max_leaves=5,
    )
)
def test_compressing_a_pattern_keeps_its_layers(pattern):
    assert expand(compress(expand(pattern))) == expand(pattern)


@pytest.mark.parametrize("pattern", ["(R3K)6", "K12", "(KFW)100", "W(K2F)3W2", "K4096"])
def test_regular_patterns_compress_to_the_short_form(pattern):
    assert compress(expand(pattern)) == pattern


def test_default_letters_are_capitals():
    assert all(len(letter) == 1 and "A" <= letter <= "Z" for letter in DEFAULT_LETTERS)

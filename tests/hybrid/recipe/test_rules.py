"""Rules a recipe must keep: allowed values with reasons, and a batch that divides over processes."""

import pytest

from hybrid.recipe import Geometry, RecipeError, batch_geometry, load

from ..two_kinds import refused

pytestmark = pytest.mark.usefixtures("two_kinds")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["train.precision=fp16"], "train.precision", "allowed: fp32, bf16. fp16 cannot be trained on CPUs"),
        (
            ["train.precision=bf16", "parallel.zero_stage=0"],
            "train.precision",
            "needs parallel.zero_stage 1 or higher",
        ),
        (["parallel.zero_stage=4"], "parallel.zero_stage", "allowed: 0, 1, 2, 3"),
        (
            ["parallel.sequence=3", "data.context=130"],
            "parallel.sequence",
            "3 ranks per sequence: layer 2 has 4 heads for 130 tokens",
        ),
        (
            ["parallel.sequence=4", "data.context=130"],
            "parallel.sequence",
            "130 tokens (data.context) / 4 ranks per sequence does not divide",
        ),
        (["parallel.sequence=2", "data.order=document"], "data.order", "rows of unequal length"),
        (["model.norm=batchnorm"], "model.norm", "allowed: layernorm, rmsnorm"),
        (
            ["data.sources.code.format=tar"],
            "data.sources.code.format",
            "allowed: auto, text, jsonl, json, csv",
        ),
        (["data.sources.code.weight=0"], "data.sources.code.weight", "more than 0"),
        (["data.sources.code.paths=[]"], "data.sources.code.paths", "at least one"),
        (["data.sources.code=null", "data.sources.books=null"], "data.sources", "at least one source"),
        (["optimizer.betas=[0.9]"], "optimizer.betas", "two numbers"),
        (["optimizer.lr=-1e-3"], "optimizer.lr", "is -0.001; allowed: 0 or more"),
        (["schedule.warmup_steps=11"], "schedule.warmup_steps", "are more than train.steps 10"),
        (
            ["schedule.shape=constant", "schedule.decay_steps=11"],
            "schedule.decay_steps",
            "warmup_steps 0 and decay_steps 11 together are more than train.steps 10",
        ),
        (["train.checkpoint_copy=runs/out"], "train.checkpoint_copy", "in train.output runs/out itself"),
        (["train.checkpoint_copy=runs/out/copy"], "train.checkpoint_copy", "name another folder"),
        (["train.batch_size=100000000000"], "train.batch_size", "allowed: 1 or more, up to 1048576"),
        (["schedule.decay_steps=3"], "schedule.decay_steps", "schedule.shape is linear"),
        (["train.steps=0"], "train.steps", "allowed: 1 or more"),
        (["train.micro_batch_size=3"], "train.batch_size", "8 is no multiple of train.micro_batch_size 3"),
        (["model.depth=4"], "model.depth", "says 4 layers, but model.pattern 'K2F' has 3"),
        (["model.hidden_size=30"], "model.layers.F", "hidden_size 30 is no multiple of num_heads 4"),
        (["model.layers.K.chunk=0"], "model.layers.K", "(kvm) chunk is 0; allowed: 1 or more"),
        (
            ["model.layers.K.budget=cubic"],
            "model.layers.K.budget",
            "expected one of fixed, power_law, found 'cubic'",
        ),
        (["model.layers.K.kind=kmv"], "model.layers.K.kind", "'kmv' is not available; did you mean kvm?"),
        (["model.layers.X.chunk=3"], "model.layers.X", "needs a kind: full, kvm"),
    ],
)
def test_rules_are_kept_with_reasons(base, overrides, key, words):
    """deepspeedai/DeepSpeed#3991 (fp16), NVIDIA/Model-Optimizer#1377 (depth)"""
    (problem,) = refused(base, *overrides)
    assert problem.split(" ")[0].rstrip(":") == key
    assert words in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.layers.K.kind=[kvm]", "model.layers.K.kind (command line): expected the name of a kind"),
        ("train.micro_batch_size=0", "train.micro_batch_size (command line): is 0; allowed: 1 or more"),
        ("model.hidden_size=99999999999", "is 99999999999; allowed: 1 or more, up to 1048576"),
        ("train.steps=100000000", "allowed: 1 or more, up to 99999999"),
        ("model.depth=99999999999999999999", "expected a whole number below 2^63"),
        ("data.vocab_size=3000000000", "allowed: 260 or more, up to 16777216"),
        ("train.output=\udcff", "expected text in valid Unicode, found '\\udcff'"),
        ("model=3", "model (command line): expected a table of keys, found '3'"),
    ],
)
def test_impossible_values_are_refused_by_key(base, override, words):
    """The one problem of each: nothing is divided, built or looked up by it before."""
    (problem,) = refused(base, override)
    assert words in problem


@pytest.mark.parametrize(
    ("processes", "sequence", "batch", "micro", "expected"),
    [
        (1, 1, 8, None, Geometry(1, 1, 8, 1)),
        (2, 1, 8, None, Geometry(2, 2, 4, 1)),
        (2, 1, 8, 2, Geometry(2, 2, 2, 2)),
        (2, 2, 8, 2, Geometry(2, 1, 2, 4)),
        (4, 2, 12, 3, Geometry(4, 2, 3, 2)),
    ],
)
def test_batch_arithmetic_counts_data_parallel_processes(base, processes, sequence, batch, micro, expected):
    """bigcode-project/starcoder#41, deepspeedai/DeepSpeed#3982"""
    recipe = load(base)
    recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size = sequence, batch, micro
    assert batch_geometry(recipe, processes) == expected
    assert expected.data_parallel * expected.micro_batch * expected.accumulation == batch


@pytest.mark.parametrize(
    ("processes", "sequence", "batch", "micro", "numbers"),
    [
        (2, 1, 8, 3, ["8", "2 processes / 1", "= 2 data-parallel", "2 x 3 = 6", "1.333"]),
        (2, 2, 8, 3, ["8", "2 processes / 2", "= 1 data-parallel", "1 x 3 = 3"]),
        (3, 2, 8, 2, ["3 processes / 2"]),
        (3, 1, 8, None, ["8", "3 processes / 1", "3 data-parallel"]),
        (4, 1, 2, 1, ["2 sequences", "4 x 1 = 4"]),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_all_numbers(
    base, processes, sequence, batch, micro, numbers
):
    recipe = load(base)
    recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size = sequence, batch, micro
    with pytest.raises(RecipeError) as caught:
        batch_geometry(recipe, processes)
    assert all(number in str(caught.value) for number in numbers)


def test_the_batch_is_checked_on_loading_where_the_processes_are_known(base):
    """Before anything is built."""
    assert load(base, ["train.micro_batch_size=2"], world_size=2).train.micro_batch_size == 2
    (problem,) = refused(base, "train.micro_batch_size=4", world_size=3)
    assert "3 x 4 = 12" in problem

"""`hybrid bench RECIPE` at a tiny size."""

import json

import pytest
import torch

from hybrid.cli.main import main


@pytest.fixture
def bench(tmp_path):
    """Run the command on `debug`; the results it keeps."""
    threads = torch.get_num_threads()

    def run(*overrides):
        sizes = ["data.context=32", "train.batch_size=1", *overrides]
        assert main(["bench", "debug", *sizes, "--threads", "1", "--output", str(tmp_path)]) == 0
        return json.loads((tmp_path / "model.json").read_text())["KWBF"]

    yield run
    torch.set_num_threads(threads)


def test_a_recipe_is_timed_by_part(bench, capsys):
    found = bench()
    training = found["training"]
    parts = {entry["part"]: entry for entry in training["parts"]}
    own = {"mixer kvm", "mixer full", "mixer sliding_window", "mixer block_window", "feed-forward", "head"}
    assert own | {"optimizer", "step"} <= set(parts)
    assert all(parts[name]["flops_per_second"] > 0 and parts[name]["utilisation"] > 0 for name in own)
    assert sum(e["share"] for name, e in parts.items() if name != "step") == pytest.approx(1)
    assert training["tokens_per_second"] == pytest.approx(32 / training["seconds"])
    assert training["peak_memory_bytes"] > 2**20
    assert found["decode"]["parts"]["mixer kvm"] > 0
    assert set(found["prefill"]["parts"]) == set(found["decode"]["parts"])
    printed = capsys.readouterr().out
    assert "Training step of 1 x 32 tokens, fp32" in printed
    assert "Decode of 32 tokens" in printed


@pytest.mark.parametrize(
    "override", ["train.activation_checkpointing=true", "train.precision=bf16", "model.tie_embeddings=true"]
)
def test_other_ways_of_training_are_timed_too(bench, override):
    assert bench(override)["training"]["parts"]


def test_measurements_that_became_scripts_are_named(capsys):
    assert main(["bench", "kvm"]) == 2
    assert "python -m benchmarks.kvm" in capsys.readouterr().err

"""`hybrid convert`: written whole or not at all, checked, and what is odd about a source is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid import recipe as recipes
from hybrid.checkpoint.run import load_run
from hybrid.cli.commands import CONVERT_FROM, CONVERT_TO
from hybrid.cli.main import main
from hybrid.convert import convert as module
from hybrid.convert.common import LazyTensor, complete, same_bits
from hybrid.convert.formats import FORMATS
from hybrid.recipe.letters import layer_specs
from tests.hybrid.mini import mini, section


def folder_of(path: Path, model=None, tensors=None) -> Path:
    """A model folder as `hybrid convert` writes it, without a tokenizer."""
    path.mkdir()
    model = model or mini("KRWF")
    (path / "recipe.yaml").write_text(recipes.to_yaml({"model": complete(model.section)}))
    found = model.state_dict() if tensors is None else tensors
    save_file({name: tensor.clone() for name, tensor in found.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def source(tmp_path):
    return folder_of(tmp_path / "source")


def convert(*arguments, check=False) -> int:
    return main(["convert", *map(str, arguments), *([] if check else ["--no-check"])])


def report(folder: Path):
    return json.loads((folder / "conversion.json").read_text())


def leftovers(folder: Path):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_shards_hold_the_same_bits_and_the_index_lists_each_tensor_once(source, tmp_path, capsys):
    """deepspeedai/DeepSpeed#6791: a sharded conversion that wrote zeros and ended well."""
    assert convert(source, tmp_path / "one") == 0
    assert convert(source, tmp_path / "many", "--shard-size", "150KB", check=True) == 0
    assert "read back equal, largest difference of the logits of 768 tokens 0" in capsys.readouterr().out
    whole = load_file(tmp_path / "one/model.safetensors")
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(files) >= 4
    assert all(file.stat().st_size < 170_000 for file in files)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == whole.keys()
    for file in files:
        for name, tensor in load_file(file).items():
            assert same_bits(tensor, whole[name])
            assert index[name] == file.name
    assert report(tmp_path / "many")["all_zero"] == []


def test_tensors_that_become_zero_stop_the_conversion(source, tmp_path, monkeypatch, capsys):
    def forgetful(folder, tensors, *rest):
        zero = {"blocks.0.ffn.c_fc.weight": LazyTensor.of(torch.zeros(256, 64))}
        write_shards(folder, tensors | zero, *rest)

    write_shards = module.write_shards
    monkeypatch.setattr(module, "write_shards", forgetful)
    assert convert(source, tmp_path / "made", check=True) == 1
    words = capsys.readouterr().err
    assert "nothing was kept" in words
    assert "blocks.0.ffn.c_fc.weight has become zero" in words
    assert not (tmp_path / "made").exists()
    assert not leftovers(tmp_path)


def test_a_result_that_cannot_be_read_is_not_kept(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "write_shards", lambda folder, tensors, *rest: None)
    assert convert(source, tmp_path / "made", check=True) == 1
    assert "the check could not be made" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_destination_is_there_whole_or_not_at_all(source, tmp_path, monkeypatch, error):
    def full(*arguments):
        raise error

    monkeypatch.setattr(module, "write_json", full)
    assert convert(source, tmp_path / "made") in (2, 130)
    assert not (tmp_path / "made").exists()
    assert not leftovers(tmp_path)


def test_the_command_knows_every_format():
    assert set(CONVERT_FROM) == set(FORMATS)
    assert set(CONVERT_TO) == {name for name, form in FORMATS.items() if form.write}


def test_an_existing_destination_is_refused(source, tmp_path, capsys):
    (tmp_path / "made").mkdir()
    assert convert(source, tmp_path / "made") == 2
    assert "exists already" in capsys.readouterr().err


def test_unknown_and_ambiguous_sources_are_refused_with_what_was_seen(source, tmp_path, capsys):
    assert convert(tmp_path / "absent", tmp_path / "made") == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert convert(tmp_path, tmp_path / "made") == 2
    assert "is a folder with source: none of the formats" in capsys.readouterr().err
    (source / "config.json").write_text('{"token_mixer": "kvm"}')
    assert convert(source, tmp_path / "made") == 2
    words = capsys.readouterr().err
    assert "recipe.yaml" in words
    assert "config.json with token_mixer" in words
    assert "--from" in words
    assert convert(source, tmp_path / "made", "--from", "hybrid") == 0
    assert convert(source, tmp_path / "again", "--to", "deepspeed", "--from", "hybrid") == 2
    assert "invalid choice: 'deepspeed'" in capsys.readouterr().err
    assert convert(source / "recipe.yaml", tmp_path / "again") == 2
    assert "recipe.yaml is a file: none of the formats" in capsys.readouterr().err


def test_a_model_folder_is_loaded_trained_from_and_generated_with(rank_pools, tiny_recipe, tmp_path, capsys):
    """The first loss of the run that starts from it is that of the run it came from."""
    from tests.hybrid.train import tiny

    rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "run", train__steps=2)
    assert convert(tmp_path / "run", tmp_path / "made") == 0
    text = (tmp_path / "made/recipe.yaml").read_text()
    assert text.startswith("model:")
    assert "data:" not in text
    model, tokenizer, _ = load_run(tmp_path / "run")
    again, its_tokenizer, _ = load_run(tmp_path / "made")
    assert tokenizer.fingerprint == its_tokenizer.fingerprint
    assert all(torch.equal(again.state_dict()[name], t) for name, t in model.state_dict().items())
    assert main(["generate", str(tmp_path / "made"), "--max-tokens", "3", "--prompt", "a"]) == 0
    (found,) = rank_pools(1).run(
        tiny.run, tiny_recipe, tmp_path / "more", train__steps=1, train__init_from=tmp_path / "made"
    )
    assert found.steps == 1
    before = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    after = [json.loads(line) for line in (tmp_path / "more/metrics.jsonl").read_text().splitlines()]
    key = "validation/loss"
    scores = [[line[key] for line in lines if key in line] for lines in (before, after)]
    assert scores[1][0] == pytest.approx(scores[0][-1], rel=1e-6)
    # one checkpoint of a run, and weights of another tokenizer
    (tag,) = [path for path in (tmp_path / "run/checkpoints").iterdir() if path.is_dir()][-1:]
    assert convert(tag, tmp_path / "of tag") == 0
    record = report(tmp_path / "made")
    assert record["tokenizer"] == tokenizer.fingerprint
    (tmp_path / "made/conversion.json").write_text(json.dumps(record | {"tokenizer": "0" * 64}))
    (refused,) = rank_pools(1).run(
        tiny.run, tiny_recipe, tmp_path / "other", train__steps=1, train__init_from=tmp_path / "made"
    )
    assert "another tokenizer" in refused[1]
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "made")]) == 2
    assert "was trained with another tokenizer" in capsys.readouterr().err


def test_settings_beside_a_model_are_not_trusted(rank_pools, tiny_recipe, tmp_path, capsys):
    """As of a run: the record of the conversion counts, and what recipe.yaml says otherwise is said."""
    from tests.hybrid.train import tiny

    rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "run", train__steps=1)
    assert convert(tmp_path / "run", tmp_path / "made") == 0
    path = tmp_path / "made/recipe.yaml"
    path.write_text(path.read_text().replace("residual_scale: 1.0", "residual_scale: 2.0"))
    capsys.readouterr()
    model, _, _ = load_run(tmp_path / "made")
    assert model.section.residual_scale == 1.0
    assert "model.residual_scale is 2.0 there, used is 1.0" in capsys.readouterr().err
    (tmp_path / "made/conversion.json").write_text("{}")
    assert main(["generate", str(tmp_path / "made")]) == 2
    assert "conversion.json is damaged" in capsys.readouterr().err
    (tmp_path / "made/conversion.json").unlink()
    assert main(["generate", str(tmp_path / "made")]) == 2
    assert "or conversion.json of a model folder" in capsys.readouterr().err


def test_a_changed_pattern_keeps_what_has_a_place_and_names_the_rest(source, tmp_path, capsys):
    """ggml-org/llama.cpp#27019, onnxruntime/mobius#522: conversions that dropped tensors without a word."""
    assert convert(source, tmp_path / "made", "model.pattern=KRKG", check=True) == 0
    words = capsys.readouterr().out
    made, tensors = report(tmp_path / "made"), load_file(source / "model.safetensors")
    assert "blocks.2.mixer.merge_gate.weight" in made["created"]
    assert "blocks.3.mixer.c_q.weight" in made["dropped"]
    assert "created: " in words
    assert "the settings were changed" in words
    written = load_file(tmp_path / "made/model.safetensors")
    for name in made["copied"]:
        assert same_bits(written[name], tensors[name])
    assert made["copied"].keys() | made["created"].keys() == written.keys()
    assert tensors.keys() - made["copied"].keys() == made["dropped"].keys()
    assert convert(source, tmp_path / "again", "model.pattern=KRKG") == 0
    again = load_file(tmp_path / "again/model.safetensors")
    assert all(same_bits(again[name], tensor) for name, tensor in written.items())


def test_what_cannot_be_made_up_is_refused(source, tmp_path, capsys):
    assert convert(source, tmp_path / "made", "model.vocab_size=640") == 2
    assert "embedding.weight is (320, 64) in the source, and (640, 64) with model.vocab_size" in (
        capsys.readouterr().err
    )
    assert convert(source, tmp_path / "made", "model.patern=K4") == 2
    assert "the recipe has a problem:\n  - model.patern (command line)" in capsys.readouterr().err
    assert convert(source, tmp_path / "made", "hidden=3") == 2
    assert "only model.* keys" in capsys.readouterr().err


def test_a_tied_head_becomes_one_of_its_own(tmp_path):
    tied = folder_of(tmp_path / "tied", mini("K", tie_embeddings=True))
    assert convert(tied, tmp_path / "made", "model.tie_embeddings=false") == 0
    written = load_file(tmp_path / "made/model.safetensors")
    assert same_bits(written["head.weight"], written["embedding.weight"])
    assert "head.weight" in report(tmp_path / "made")["created"]


# Odd sources


def test_a_head_beside_the_embedding_that_it_is_tied_to(tmp_path, capsys):
    model = mini("K", tie_embeddings=True)
    same = dict(model.state_dict()) | {"head.weight": model.embedding.weight.detach()}
    assert convert(folder_of(tmp_path / "same", model, same), tmp_path / "made") == 0
    assert "head.weight" in report(tmp_path / "made")["dropped"]
    other = same | {"head.weight": torch.zeros(320, 64)}
    assert convert(folder_of(tmp_path / "other", model, other), tmp_path / "not") == 2
    assert "head.weight differs from embedding.weight" in capsys.readouterr().err


def test_two_names_of_one_tensor_in_a_file_of_torch(tmp_path, capsys):
    model = mini("K")
    tensors = dict(model.state_dict())
    tensors["head.weight"] = tensors["embedding.weight"]
    torch.save({"state_dict": {f"module.{name}": t for name, t in tensors.items()}}, tmp_path / "model.pt")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipes.to_yaml({"model": complete(model.section)}))
    assert convert(tmp_path / "model.pt", tmp_path / "made", "--recipe", recipe) == 0
    assert "module.head.weight and module.embedding.weight are one tensor" in capsys.readouterr().out
    written = load_file(tmp_path / "made/model.safetensors")
    assert same_bits(written["head.weight"], tensors["embedding.weight"])


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path, capsys):
    model = mini("K")
    tensors = dict(model.state_dict())
    del tensors["norm.bias"]
    tensors["blocks.1.ffn.c_fc.weight"] = torch.zeros(3)
    tensors["norm.weight"] = torch.zeros(63)
    tensors["embedding.weight"] = torch.zeros(320, 64, dtype=torch.int8)
    assert convert(folder_of(tmp_path / "source", model, tensors), tmp_path / "made") == 2
    words = capsys.readouterr().err
    assert "missing tensor 'norm.bias'" in words
    assert "unknown tensor 'blocks.1.ffn.c_fc.weight'" in words
    assert "'norm.weight' is (63,), the config asks for (64,)" in words
    assert "'embedding.weight' is torch.int8" in words


def test_mixed_dtypes_zeros_and_nan_are_reported_by_name(tmp_path, capsys):
    model = mini("K")
    tensors = dict(model.state_dict())
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()
    tensors["norm.bias"] = torch.zeros(64)
    tensors["head.weight"] = tensors["head.weight"] + torch.nan
    source = folder_of(tmp_path / "source", model, tensors)
    assert convert(source, tmp_path / "made") == 0
    words = capsys.readouterr().out
    assert "mixed dtype" in words
    assert "bfloat16): norm.weight" in words
    assert "all zero: norm.bias" in words
    assert "with nan or infinity: head.weight" in words
    written = load_file(tmp_path / "made/model.safetensors")
    assert all(same_bits(written[name], tensor) for name, tensor in tensors.items())
    assert convert(source, tmp_path / "checked", check=True) == 1
    assert "the logits differ by up to nan" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [0, 7, 2000, -1])
def test_truncated_files_are_refused_by_name(source, tmp_path, keep, capsys):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert convert(source, tmp_path / "made") == 2
    assert "model.safetensors is truncated, damaged" in capsys.readouterr().err
    torch.save(mini("K").state_dict(), tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[:keep])
    assert convert(tmp_path / "model.pt", tmp_path / "made") == 2
    assert "model.pt" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"embedding.weight": torch.zeros(2, 2), "x": Evil()}, "model.pt")
    for source in ("model.pt",):
        assert convert(source, "made") == 2
        words = capsys.readouterr().err
        assert "posix.system" in words
        assert "refused" in words
    assert not Path("ran").exists()


def test_memory_stays_near_one_shard(tmp_path):
    """Peak of a conversion of 256 MB in shards of 16 MB, beyond what the imports take."""
    model = mini("W4", hidden_size=64, vocab_size=320, ffn_size=131072)
    folder_of(tmp_path / "source", model)
    code = (
        "import resource, sys; from pathlib import Path; from hybrid.convert.convert import convert\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), shard_bytes=16 * 2**20, check=False)\n"
        "print((peak() - before) // 1024)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "made")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    total = sum(file.stat().st_size for file in (tmp_path / "made").glob("*.safetensors")) / 2**20
    assert total > 250
    assert int(done.stdout) < 160


def test_settings_survive_a_second_conversion(source, tmp_path):
    assert convert(source, tmp_path / "one") == 0
    assert convert(tmp_path / "one", tmp_path / "two") == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(same_bits(two[name], tensor) for name, tensor in one.items())
    specs = [
        layer_specs(recipes.load(tmp_path / name / "recipe.yaml", model_only=True).model)
        for name in ("one", "two")
    ]
    assert specs[0] == specs[1] == layer_specs(complete(section("KRWF")))


def test_a_recipe_can_be_based_on_a_model_folder(source, tmp_path):
    assert convert(source, tmp_path / "made") == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: made/recipe.yaml\ndata: {folder: d, sources: {a: {paths: [a]}}}\noptimizer: {lr: 1e-3}\n"
        f"train: {{output: o, steps: 1, batch_size: 1, init_from: {tmp_path / 'made'}}}\n"
    )
    assert recipes.load(mine).model == recipes.load(tmp_path / "made/recipe.yaml", model_only=True).model
    with pytest.raises(recipes.RecipeError, match=r"optimizer\.lr"):
        recipes.load(tmp_path / "made/recipe.yaml")

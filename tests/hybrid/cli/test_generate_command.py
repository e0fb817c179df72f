"""`hybrid generate` on a model's folder, from the command line to the text."""

import dataclasses
import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid import recipe
from hybrid.checkpoint.folder import Origin
from hybrid.cli.main import main
from hybrid.data.preparation.tokenizer_training import train_tokenizer
from hybrid.data.tokenizer import Tokenizer
from hybrid.files import sha256, write_json
from hybrid.generate import generate, load_model
from hybrid.model import HybridLM
from hybrid.train.resume import plain

RECIPE = """
model: {pattern: WF, hidden_size: 32, vocab_size: 320, defaults: {num_heads: 2, window: 8}}
data: {folder: absent, sources: {one: {paths: [absent]}}}
optimizer: {lr: 1e-3}
train: {output: out, steps: 1, batch_size: 1}
"""
BIAS = "norm.bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    (root / "given.yaml").write_text(RECIPE)
    loaded = recipe.load(root / "given.yaml")
    recipe.save(loaded, root / "recipe.yaml")
    texts = [f"line {n} has words é and 🙂\n" * 3 for n in range(30)]
    train_tokenizer(texts, 300)[0].save(root / "tokenizer.model")
    torch.manual_seed(0)
    model = HybridLM.from_recipe(loaded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    save_file(model.state_dict(), root / "model.safetensors")
    origin = Origin(1, 1, "fp32", Tokenizer.load(root / "tokenizer.model").fingerprint, plain(loaded))
    write_json(root / "trainer.json", {"progress": {}, "origin": dataclasses.asdict(origin)})
    seal(root)
    return root


def seal(root):
    """Write the manifest of what lies there now."""
    names = ("trainer.json", "model.safetensors")
    sums = {n: {"bytes": (root / n).stat().st_size, "sha256": sha256(root / n)} for n in names}
    write_json(root / "manifest.json", {"files": sums})


def test_one_prompt_is_shown_with_its_continuation(folder, capsys):
    model, tokenizer = load_model(folder)
    (expected,) = generate(model, tokenizer, ["line 3"], max_tokens=12, temperature=0.8, seed=4)
    assert len(expected.ids) > 0
    assert main(["generate", str(folder), "--prompt", "line 3", "--max-tokens", "12", "--seed", "4"]) == 0
    assert capsys.readouterr().out == f"line 3{expected.text}\n"


def test_several_prompts_and_samples_are_titled_and_in_order(folder, capsys, tmp_path):
    model, tokenizer = load_model(folder)
    prompts = ["a longer prompt", "", "x"]
    (tmp_path / "p.txt").write_text("\n".join(["---", "x"]))
    expected = generate(model, tokenizer, prompts, max_tokens=5, temperature=0.8, samples=2)
    arguments = [
        "--prompt",
        prompts[0],
        "--prompt",
        "",
        "--prompts-file",
        str(tmp_path / "p.txt"),
        "--separator=---",
    ]
    assert main(["generate", str(folder), *arguments, "--samples", "2", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "".join(
        f"--- prompt {r.prompt + 1}, sample {r.sample + 1} ---\n{prompts[r.prompt]}{r.text}\n"
        for r in expected
    )


def test_a_document_is_read_once_and_gone_on_with_later(folder, capsys, tmp_path):
    def run(*arguments):
        assert main(["generate", str(folder), "--seed", "4", *arguments]) == 0
        return capsys.readouterr().out

    document, kept = "line 3 has words\n" * 40, str(tmp_path / "state")
    (tmp_path / "p.txt").write_text(document)
    read = ["--prompts-file", str(tmp_path / "p.txt"), "--separator=---"]
    whole = run(*read, "--max-tokens", "24").removesuffix("\n")
    assert run(*read, "--max-tokens", "0", "--save-state", kept) == ""
    first = run("--load-state", kept, "--max-tokens", "9", "--save-state", kept).removesuffix("\n")
    rest = run("--load-state", kept, "--max-tokens", "15").removesuffix("\n")
    assert document.removesuffix("\n") + first + rest == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--prompt", "b", "--save-state", "{}/s"], "keeps one text, but 2 prompts"),
        (["--samples", "2", "--save-state", "{}/s"], "keeps one text, but 1 prompts x 2 samples"),
        (["--prompt", "a", "--prompt", "b", "--load-state", "{}/s"], "goes on with one prompt, but 2 are"),
        (["--save-state", "{}/none/s"], "none/s: it must be a file in a folder that exists"),
        (["--save-state", "{}"], "it must be a file in a folder that exists"),
        (["--load-state", "{}/absent"], "absent: no such file"),
    ],
)
def test_state_files_that_cannot_serve_are_refused_before_the_model_is_read(
    tmp_path, capsys, arguments, message
):
    arguments = [text.format(tmp_path) for text in arguments]
    assert main(["generate", str(tmp_path / "no model"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("trainer.json", "trainer.json"),
        ("manifest.json", "manifest.json"),
        ("tokenizer.model", "tokenizer.model"),
        ("model.safetensors", "model.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_in_words(folder, tmp_path, capsys, absent, message):
    for file in folder.iterdir():
        if file.name != absent:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hybrid: error: ")
    assert message in shown


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("window: 8", "window: 4", "'window': 4"),
        (
            "tie_embeddings: false",
            "tie_embeddings: true",
            "tie_embeddings is True there, used is False",
        ),
        ("logit_softcap: 0.0", "logit_softcap: 0.5", "model.logit_softcap is 0.5 there, used is 0.0"),
        ("hidden_size: 32", "hidden_size: [", "it cannot be read ("),
        ("model:", "", "it cannot be read ("),
        ("", None, ""),
    ],
)
def test_the_checkpoint_decides_whatever_its_recipe_file_says(folder, tmp_path, capsys, old, new, said):
    arguments = ["--prompt", "line 3", "--max-tokens", "6", "--seed", "4"]
    assert main(["generate", str(folder), *arguments]) == 0
    whole = capsys.readouterr()
    assert whole.err == ""
    root = shutil.copytree(folder, tmp_path / "model")
    path = root / "recipe.yaml"
    assert old in path.read_text()
    path.unlink() if new is None else path.write_text(path.read_text().replace(old, new))
    assert main(["generate", str(root), *arguments]) == 0
    found = capsys.readouterr()
    assert found.out == whole.out
    assert said in found.err
    assert ("is not the checkpoint's own recipe, which is used: " in found.err) == bool(said)


def _other_weights(root):
    save_file({name: 2 * w for name, w in load_file(root / "model.safetensors").items()}, root / "x")
    (root / "x").rename(root / "model.safetensors")


def _changed_weights(change):
    def damage(root):
        weights = load_file(root / "model.safetensors")
        change(weights)
        save_file(weights, root / "model.safetensors")
        seal(root)

    return damage


def _tied(root):
    record = json.loads((root / "trainer.json").read_text())
    record["origin"]["recipe"]["model"]["tie_embeddings"] = True
    write_json(root / "trainer.json", record)
    seal(root)


def _record(text):
    def damage(root):
        (root / "trainer.json").write_text(text)
        seal(root)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_other_weights, "model.safetensors has other contents than were written"),
        (lambda root: save_file({}, root / "model-2.safetensors"), "model-2.safetensors is not in "),
        (_changed_weights(lambda w: w.update(more=torch.zeros(1))), '"more"'),
        (_changed_weights(lambda w: w.pop("norm.weight")), '"norm.weight"'),
        (_changed_weights(lambda w: w.update({BIAS: torch.zeros(3)})), "norm.bias"),
        (_changed_weights(lambda w: w.update({BIAS: torch.zeros(32).int()})), "norm.bias is torch.int32"),
        (_tied, "head.weight differs from embedding.weight, but model.tie_embeddings"),
        (_record("{"), "trainer.json is damaged, or of another version"),
        (_record('{"progress": {}, "origin": []}'), "trainer.json is damaged, or of another version"),
        (
            lambda root: train_tokenizer(["other text\n" * 99], 280)[0].save(root / "tokenizer.model"),
            "was trained with another tokenizer",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_refused(folder, tmp_path, capsys, damage, message):
    root = shutil.copytree(folder, tmp_path / "model")
    damage(root)
    assert main(["generate", str(root), "--prompt", "a"]) == 2
    found = capsys.readouterr()
    assert (found.out, message in found.err) == ("", True), found.err


def test_a_state_that_a_full_disk_does_not_take_leaves_the_old_one(folder, tmp_path, capsys, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = tmp_path / "state"
    arguments = ["generate", str(folder), "--max-tokens", "0", "--save-state", str(kept)]
    assert main([*arguments, "--prompt", "line"]) == 0
    before = kept.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr("hybrid.files.os.fsync", full)
    assert main([*arguments, "--prompt", "other"]) == 2
    assert capsys.readouterr().err == f"hybrid: error: {kept}: No space left on device\n"
    assert [kept.read_bytes(), *tmp_path.iterdir()] == [before, kept]

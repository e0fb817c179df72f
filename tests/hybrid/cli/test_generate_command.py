"""`hybrid generate` on a model's folder, from the command line to the text."""

import pytest
import torch
from safetensors.torch import save_file

from hybrid import recipe
from hybrid.cli.main import main
from hybrid.data.preparation.tokenizer_training import train_tokenizer
from hybrid.generate import generate, load_model
from hybrid.model import HybridLM

RECIPE = """
model: {pattern: WF, hidden_size: 32, vocab_size: 320, defaults: {num_heads: 2, window: 8}}
data: {folder: absent, sources: {one: {paths: [absent]}}}
optimizer: {lr: 1e-3}
train: {output: out, steps: 1, batch_size: 1}
"""


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
    return root


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
        ("recipe.yaml", "recipe.yaml"),
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

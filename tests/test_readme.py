"""What README and docs show is true: the layer works, commands exist, files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch

from .third_party import KIND

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}


def test_the_example_layer_trains_and_streams_in_a_pattern():
    """It is installed for all tests."""
    from hybrid.model import HybridLM
    from hybrid.recipe import layer_specs
    from hybrid.recipe.schema import ModelSection

    torch.manual_seed(0)
    section = ModelSection(
        pattern="(AF)2",
        hidden_size=32,
        vocab_size=64,
        defaults={"num_heads": 2},
        layers={"A": {"kind": KIND, "scale": 2.0}},
    )
    model = HybridLM(section, layer_specs(section))
    ids = torch.randint(0, 64, (2, 17))
    loss = model(ids, labels=ids)
    loss.total.backward()
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.get_parameter(
            "output.weight" if block.mixer.kind == KIND else "c_proj.weight"))  # fmt: skip
    whole, _ = model(ids)
    first, state = model(ids[:, :9])
    second, _ = model(ids[:, 9:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-4, rtol=0)
    assert model.blocks[0].mixer.options.scale == 2.0
    assert loss.tokens == 34


def test_named_files_exist():
    missing = []
    for page, text in PAGES.items():
        names = re.findall(r"`((?:hybrid|layers|tests|launch|recipes|benchmarks|docs)/[\w./]*)`", text)
        missing += [f"{page}: {name}" for name in names if not (ROOT / name).exists()]
        links = re.findall(r"\]\((?!http|#)([^)#]+)", text)
        missing += [f"{page}: {link}" for link in links if not (ROOT / page.parent / link).exists()]
    assert not missing


def test_shown_commands_exist():
    from hybrid.cli.commands import COMMANDS

    shown = {name for text in PAGES.values() for name in re.findall(r"^(?:\S*/)?hybrid (\w+)", text, re.M)}
    assert {"info", "train", "generate", "bench", "launch"} <= shown <= set(COMMANDS)


def test_the_recipe_for_own_text_is_whole(tmp_path):
    from hybrid.recipe import load

    (text,) = re.findall(r"```yaml\n(# mine\.yaml.*?)```", README, re.S)
    (tmp_path / "mine.yaml").write_text(text)
    assert list(load(tmp_path / "mine.yaml").data.sources) == ["notes", "chat"]


def test_the_bare_operator_is_called_like_this():
    (code,) = re.findall(r"```python\n(from hybrid\.layers\.kvm.*?)```", README, re.S)
    names = {name: torch.randn(1, 600, 2, 128) for name in "qkv"}
    names |= {"gate": torch.rand(1, 600, 2), "weight": torch.ones(128), "bias": torch.zeros(128)}
    exec(code, names)
    assert names["y"].shape == (1, 600, 2, 128)
    assert names["state"].position == 600


def test_checkpoints_are_converted_like_this(tmp_path, monkeypatch, capsys):
    """By the three commands as they stand, with small models in place of those they name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybrid.cli.main import main
    from hybrid.convert.common import Options
    from hybrid.convert.model_folder import FORMAT

    from .hybrid.convert.hf.test_standalone import model_folder
    from .hybrid.convert.test_paper_folder import MODELS, written

    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    model_folder(Path("made"), "RK")
    assert main(["convert", "made", "runs/quickstart", "--no-check"]) == 0
    written(MODELS[0], Path("kvm_paper"))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("smollm2")
    (block,) = re.findall(r"```\n(hybrid convert.*?)```", README, re.S)
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        assert main([*command, "--no-check"]) == 0, capsys.readouterr().err
    assert list(Path("hf_model").glob("modeling_*.py"))
    for made in ("from_paper", "from_smollm2"):
        assert FORMAT.read(Path(made), Options()).section.expanded

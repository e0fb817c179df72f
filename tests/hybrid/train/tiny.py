"""A tiny recipe and its data, and helpers that run inside the rank pools."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid import recipe as recipes
from hybrid.recipe.schema import Recipe

RECIPE = """
model:
  pattern: FW
  hidden_size: 16
  defaults: {{num_heads: 2}}
  layers: {{W: {{window: 8}}}}
data:
  folder: {data}
  vocab_size: 300
  context: 16
  sources: {{text: {{paths: ["{text}"], format: jsonl, validation: 0.1}}}}
optimizer: {{lr: 1e-2}}
schedule: {{warmup_steps: 1}}
train:
  output: {output}
  steps: 4
  batch_size: 4
  threads: 1
  checkpoint_every: 1000
  eval_every: 0
  eval_tokens: 200
monitor: {{log_every: 1, statistics_every: 0, tensorboard: false, peak_tflops: 1}}
"""


def write_text(path: Path, documents: int = 60) -> None:
    """A JSONL file of made-up documents of very different lengths."""
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "of", "the", "and", "a", "tree", "river", "stone", "runs"]
    with path.open("w") as file:
        for _ in range(documents):
            text = " ".join(rng.choices(words, k=rng.choice([3, 8, 20, 90])))
            file.write(f'{{"text": "{text}."}}\n')


def prepare(folder: Path) -> Path:
    """Text, tokenizer and shards below `folder`; returns the recipe file."""
    from hybrid.data.preparation.prepare import prepare

    text = folder / "text.jsonl"
    write_text(text)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(data=folder / "data", text=text, output=folder / "run"))
    prepare(recipes.load(path).data, processes=1)
    return path


def load(path: Path, output: Path, **overrides: Any) -> Recipe:
    """The tiny recipe with `section__key=value` changes."""
    texts = [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    return recipes.load(path, [f"train.output={output}", *texts])


def run(path: Path, output: Path, **overrides: Any) -> Any:
    """Train in a rank: the Summary, or ("TrainError", text) and the like for what ends it."""
    from hybrid.train import train

    try:
        return train(load(path, output, **overrides))
    except (ValueError, SystemExit) as error:
        return type(error).__name__, str(error)


def series(output: Path, *names: str) -> list[tuple[float, ...]]:
    """`train/...` values of every step that was trained, in step order."""
    from hybrid.train.metrics import read_metrics

    names = names or (
        "train/loss",
        "train/learning_rate",
        "train/gradient_norm_before_clipping",
        "data/checksum",
    )
    return [
        (line["step"], *(line[name] for name in names))
        for line in read_metrics(output)
        if "train/loss" in line
    ]


def logged_steps(output: Path) -> int:
    """How many steps a run and those before it in the same place have logged."""
    return (output / "metrics.jsonl").read_bytes().count(b"train/loss_largest")


def weights(engine: Any) -> dict[str, Any]:
    """All fp32 weights, by DeepSpeed's own means."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.model.named_parameters():
        full = parameter if engine.stage == 0 else safe_get_full_fp32_param(parameter)
        found[name] = full.detach().float().clone()
    return found


def moments(engine: Any, key: str) -> dict[str, Any]:
    """One entry of the optimizer's state of all parameters, by DeepSpeed's own means."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.stage == 0:
        state = engine.deepspeed.optimizer.state
        return {name: state[parameter][key].clone() for name, parameter in engine.model.named_parameters()}
    named = engine.model.named_parameters()
    return {name: safe_get_full_optimizer_state(parameter, key).clone() for name, parameter in named}


def fingerprint(engine: Any) -> str:
    """Hash of all weights as this rank has them."""
    import deepspeed

    digest = hashlib.sha256()
    for _, parameter in sorted(engine.model.named_parameters()):
        gathered = (
            deepspeed.zero.GatheredParameters([parameter]) if engine.stage == 3 else contextlib.nullcontext()
        )
        with gathered:
            digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """monkeypatch for code that runs in a rank."""
    before = vars(owner)[name]  # not getattr, which unwraps static methods
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""`hybrid bench model RECIPE`: training steps, prefill and decoding of a whole model, by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from hybrid.generate.decoding import prefill, read_row
from hybrid.model import HybridLM
from hybrid.model.block import Block
from hybrid.model.head import Loss
from hybrid.recipe import batch_geometry
from hybrid.recipe.schema import OptimizerSection, Recipe
from hybrid.train import optimizer
from hybrid.train.throughput import peak_flops

from .report import columns, duration, environment, keep, shares_table
from .timing import alternate, seconds


class Trainer:
    """Training steps on random tokens: bf16 parameters with fp32 masters, or fp32 throughout."""

    def __init__(
        self,
        model: HybridLM,
        batch: int,
        tokens: int,
        *,
        precision: str = "fp32",
        device: torch.device | str = "cpu",
        section: OptimizerSection | None = None,
    ) -> None:
        """`section`: None is AdamW. Rates are a twentieth of its: random tokens teach nothing, but weights
        that stay as initialised hold zeros, which some devices multiply faster."""
        self.model = model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.parameters = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        if precision != "bf16":
            self.masters = self.parameters
        names = [name for name, _ in self.model.named_parameters()]
        named = list(zip(names, self.masters, strict=True))
        section = section or OptimizerSection(lr=1e-3)
        self.optimizer = optimizer.build(section, named, self.model.no_decay())
        optimizer.apply(self.optimizer.param_groups, section, 1.0, 0.05)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.vocab_size, (batch, tokens + 1), generator=generator).to(device)
        self.ids, self.labels = drawn[:, :-1], drawn[:, 1:]

    def forward(self) -> Tensor:
        """Mean loss."""
        loss = self.model(self.ids, labels=self.labels)
        assert isinstance(loss, Loss)
        return loss.total / loss.tokens

    def update(self) -> None:
        """Let the optimizer use the gradients, and drop them."""
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_([*self.parameters], [*self.masters])
        self.model.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.forward().backward()
        self.update()


class Parts:
    """Time that a model's mixers (by kind), feed-forwards and head take in forward and backward passes.

    A part's input and output pass through marks that take the time, on the way there and on the way back.
    On a GPU they are events in its stream, so nothing waits.
    """

    def __init__(self, model: HybridLM, device: torch.device | str, compiler: str | None = None) -> None:
        """`compiler`: a backend of torch.compile, which each part is then given to by itself."""
        self.cuda = torch.device(device).type == "cuda"
        self._modules: list[tuple[nn.Module, str]] = [(model.head, "head")]
        for block in cast(list[Block], list(model.blocks)):
            self._modules += [(block.mixer, f"mixer {block.mixer.kind}"), (block.ffn, "feed-forward")]
        self._forwards = [
            torch.compile(module.forward, backend=compiler, dynamic=False) if compiler else module.forward
            for module, _ in self._modules
        ]
        self._stamps: dict[str, list[Any]] = defaultdict(list)

    def stamp(self, label: str) -> None:
        """Stamps of a label are its start and its end in turn."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._stamps[label].append(event)
        else:
            self._stamps[label].append(time.perf_counter())

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (module, label), forward in zip(self._modules, self._forwards, strict=True):
                stack.enter_context(mock.patch.object(module, "forward", self._marked(forward, label)))
            yield

    def _marked(self, forward: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = forward(_Mark.apply(x, self, label), *args, **kwargs)
            first, *rest = result if isinstance(result, tuple) else (result,)
            first = _Mark.apply(first, self, label)
            return (first, *rest) if isinstance(result, tuple) else first

        return call

    def seconds(self) -> dict[str, float]:
        """By label, since the last time this was asked."""
        found = {}
        if self.cuda:
            torch.cuda.synchronize()
        for label, stamps in self._stamps.items():
            pairs = zip(stamps[::2], stamps[1::2], strict=True)
            if self.cuda:
                found[label] = sum(start.elapsed_time(end) for start, end in pairs) / 1e3
            else:
                found[label] = sum(end - start for start, end in pairs)
        self._stamps.clear()
        return found


class _Mark(torch.autograd.Function):
    """The input itself; takes the time when it passes, and when its gradient does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, label: str) -> Tensor:
        parts.stamp(f"{label}, forward")
        ctx.parts, ctx.label = parts, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.parts.stamp(f"{ctx.label}, backward")
        return grad, None, None


REST = "rest (embedding, norms, residual stream, loss)"


def step_parts(trainer: Trainer, parts: Parts, rounds: int = 3) -> dict[str, float]:
    """Median seconds of a training step's parts, each phase's rest and the optimizer included."""
    device = trainer.ids.device
    found: list[dict[str, float]] = []
    losses: list[Tensor] = []
    for _ in range(rounds + 1):
        with parts.watched():
            phases = {
                "forward": seconds(lambda: losses.append(trainer.forward()), device),
                "backward": seconds(lambda: losses.pop().backward(), device),
            }
        once = parts.seconds()
        for phase, whole in phases.items():
            known = sum(value for label, value in once.items() if label.endswith(f", {phase}"))
            once[f"{REST}, {phase}"] = max(0.0, whole - known)
        once["optimizer"] = seconds(trainer.update, device)
        found.append(once)
    return {label: median(once[label] for once in found[1:]) for label in found[-1]}


def part_flops(model: HybridLM, tokens: int) -> dict[str, float]:
    """Training FLOPs per token by part, forward and backward."""
    flops: dict[str, float] = defaultdict(float)
    for block in cast(list[Block], list(model.blocks)):
        flops[f"mixer {block.mixer.kind}"] += block.mixer.flops_per_token(tokens).training
        flops["feed-forward"] += block.ffn.flops().training
    flops["head"] = 3 * 2.0 * model.section.hidden_size * model.vocab_size
    return dict(flops)


def utilisation(
    by_part: dict[str, float], flops: dict[str, float], tokens: int, peak: float | None
) -> list[dict[str, Any]]:
    """One entry a part: seconds, share of the step, FLOP/s, and share of `peak` where that is known."""
    whole = sum(by_part.values())
    merged: dict[str, float] = defaultdict(float)
    for label, value in by_part.items():
        merged[label.removesuffix(", forward").removesuffix(", backward")] += value
    merged = dict(sorted(merged.items(), key=lambda item: -item[1]))
    entries = []
    for label, value in {**merged, "step": whole}.items():
        done = (sum(flops.values()) if label == "step" else flops.get(label, 0.0)) * tokens
        entry: dict[str, Any] = {"part": label, "seconds": value, "share": value / whole}
        if done:
            entry["flops_per_second"] = done / value
            entry["utilisation"] = done / value / peak if peak else None
        entries.append(entry)
    return entries


@torch.no_grad()
def serving(model: HybridLM, parts: Parts, tokens: int, piece: int, decoded: int) -> dict[str, Any]:
    """Prefill of `tokens` in calls of `piece`, then decoding: seconds, by part as well, one sequence."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, tokens + 2 * decoded), generator=generator).to(device)
    state: Any = None

    def read(start: int, end: int, step: int) -> None:
        nonlocal state
        for first in range(start, end, step):
            _, state = model(ids[:, first : min(first + step, end)], state)

    read(0, min(tokens, 2 * piece), piece)
    state = None
    found: dict[str, Any] = {}
    with parts.watched():
        whole = seconds(lambda: read(0, tokens, piece), device)
    found["prefill"] = {"tokens": tokens, "seconds": whole, "parts": _with_rest(parts.seconds(), whole)}
    read(tokens, tokens + decoded, 1)
    with parts.watched():
        whole = seconds(lambda: read(tokens + decoded, tokens + 2 * decoded, 1), device)
    found["decode"] = {"tokens": decoded, "seconds": whole, "parts": _with_rest(parts.seconds(), whole)}
    return found


@torch.no_grad()
def together(model: HybridLM, tokens: int, count: int = 8, steps: int = 16) -> dict[str, Any]:
    """Tokens a second of `count` sequences, after prompts of `tokens` / count to `tokens` tokens, that step
    together as one packed row, and of the same stepping one by one."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (tokens,), generator=generator).to(device)
    lengths = [tokens * (i + 1) // count for i in range(count)]
    token = ids[:1]

    def run(parts: list[slice]) -> Callable[[], None]:
        _, states = prefill(model, [ids[:length] for length in lengths])

        def steps_of_all() -> None:
            for _ in range(steps):
                for part in parts:
                    _, states[part] = read_row(model, [token] * len(states[part]), states[part])

        return steps_of_all

    runs = {"together": run([slice(None)]), "one by one": run([slice(i, i + 1) for i in range(count)])}
    times = alternate(runs, rounds=3, device=device)
    return {"sequences": count, "prompts": lengths} | {
        f"{name}, tokens/s": count * steps / value for name, value in times.items()
    }


def _with_rest(by_part: dict[str, float], whole: float) -> dict[str, float]:
    named = {label.removesuffix(", forward"): value for label, value in by_part.items()}
    return {**named, REST: max(0.0, whole - sum(named.values()))}


def bench_model(recipe: Recipe, output: str | None, *, device: str | None = None) -> int:
    """Time the recipe's training step (one micro-batch), prefill and decoding on random tokens.

    On the GPU where there is one. Printed, and kept as `model.json` in `output`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = recipe.model.vocab_size or -(-recipe.data.vocab_size // 64) * 64
    recipe = replace(recipe, model=replace(recipe.model, vocab_size=size))
    torch.manual_seed(recipe.train.seed)
    model = HybridLM.from_recipe(recipe)
    model.loss_chunk = recipe.train.loss_chunk
    model.activation_checkpointing = recipe.train.activation_checkpointing
    batch, tokens = batch_geometry(recipe, 1).micro_batch, recipe.data.context
    precision = recipe.train.precision
    trainer = Trainer(model, batch, tokens, precision=precision, device=device, section=recipe.optimizer)
    peak = peak_flops(recipe.monitor, torch.device(device), precision)
    parts = Parts(model, device)
    whole = alternate({"step": trainer.step}, rounds=3, device=device)["step"]
    entries = utilisation(step_parts(trainer, parts), part_flops(model, tokens), batch * tokens, peak)
    trainer.model.zero_grad(set_to_none=True)
    served = serving(model, parts, tokens, min(tokens, 1024), 32)
    served["ragged"] = together(model, tokens)
    results = {
        "environment": environment(device),
        "pattern": recipe.model.pattern,
        "precision": precision,
        "batch": batch,
        "tokens": tokens,
        "peak_flops_per_second": peak,
        "training": {"seconds": whole, "tokens_per_second": batch * tokens / whole, "parts": entries},
        **served,
    }
    print(report(results))
    if output is not None:
        keep(Path(output, "model.json"), {recipe.model.pattern: results})
    return 0


def report(results: dict[str, Any]) -> str:
    """The results as text."""
    training = results["training"]
    lines = [
        f"Training step of {results['batch']} x {results['tokens']} tokens, {results['precision']}: "
        f"{duration(training['seconds'])}, {training['tokens_per_second']:.4g} tokens/s",
        parts_table(training["parts"]),
    ]
    for phase in ("prefill", "decode"):
        found = results[phase]
        rate = found["tokens"] / found["seconds"]
        title = f"{phase.capitalize()} of {found['tokens']} tokens, one sequence ({rate:.4g} tokens/s)"
        lines.append(shares_table(title, found["parts"]))
    ragged = results["ragged"]
    lines.append(
        f"Decoding of {ragged['sequences']} sequences of different lengths, tokens/s: "
        f"{ragged['together, tokens/s']:.4g} together, {ragged['one by one, tokens/s']:.4g} one by one"
    )
    return "\n\n".join(lines)


def parts_table(entries: list[dict[str, Any]]) -> str:
    rows = [["part", "time", "share", "TFLOP/s", "of peak"]]
    for entry in entries:
        rate, used = entry.get("flops_per_second"), entry.get("utilisation")
        rows.append(
            [
                entry["part"],
                duration(entry["seconds"]),
                f"{entry['share']:.1%}",
                "-" if rate is None else f"{rate / 1e12:.3g}",
                "-" if used is None else f"{used:.1%}",
            ]
        )
    return columns(rows, left={0})

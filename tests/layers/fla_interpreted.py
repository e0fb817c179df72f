"""Runs the kernels of flash-linear-attention on a CPU, through our wrappers:

    python -m tests.layers.fla_interpreted FOLDER

FOLDER holds an unpacked wheel of fla-core, which is changed for Triton's interpreter: one configuration of
every kernel, as there is nothing to time; no `tl.gather`, which the interpreter computes wrongly; casts of
scalars by a function, as in the interpreter they are Python's. Prints JSON: operator and row -> the largest
error of every output and gradient, of its largest value, against plain torch in fp32.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.layers.linear import fla
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.rwkv7_op import rwkv7_recurrence
from hybrid.layers.linear.short_conv import ShortConv
from hybrid.layers.linear.ssd import ssd
from hybrid.layers.softmax import force_plain

CAST = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([^()]*\))?)\.to\(tl\.int64\)")
TUNED = "CachedAutotuner(fn, fn.arg_names, configs,"
TOKENS, HEADS, SIZE = 80, 2, 16
ROWS = {"equal": (), "packed": (50, 1, 29)}


def prepare(folder: Path) -> None:
    for path in (folder / "fla").rglob("*.py"):
        text = path.read_text()
        changed = CAST.sub(r"tl.cast(\1, tl.int64)", text).replace(
            TUNED, TUNED.replace("configs", "configs[:1]")
        )
        if changed != text:
            path.write_text(changed)
    autotune = triton.autotune
    triton.autotune = lambda configs, *given, **more: autotune(configs[:1], *given, **more)
    if hasattr(tl, "gather"):
        del tl.gather
    sys.path.insert(0, str(folder))
    fla.on_supported_gpu = lambda device, dtype: True


def operators() -> Iterator[tuple[str, Callable[..., tuple[Tensor, Tensor]], dict[str, Tensor]]]:
    torch.manual_seed(0)
    shape = (1, TOKENS, HEADS, SIZE)
    q, k, v, r = (torch.randn(shape) for _ in range(4))
    unit, strength = torch.nn.functional.normalize(k, dim=-1), torch.rand(shape[:3])
    slow, by_channel, rate = -0.5 * torch.rand(shape[:3]), -0.6 * torch.rand(shape), torch.rand(shape)

    def normalised(**given: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(**given, normalise=True)

    delta = {"q": q, "k": k, "v": v, "beta": strength}
    yield "gated_delta_rule", normalised, delta | {"g": slow}
    yield "kimi_delta", gated_delta_rule, delta | {"k": unit, "g": by_channel}
    yield "ssd", ssd, {"x": v, "b": k[:, :, :1], "c": q[:, :, :1], "g": slow}
    states = {"log_decay": by_channel, "a": -unit, "b": unit * rate}
    yield "rwkv7", rwkv7_recurrence, {"r": r, "k": k, "v": v, **states}
    conv = ShortConv(24, 4, True)

    def convolution(u: Tensor, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        y, tail = conv(u, None, lengths)
        return y, y[:, :0] if lengths or tail is None else tail[..., 1:]  # the first is out of sight

    yield "short_conv", convolution, {"u": torch.randn(1, TOKENS, 24)}


def computed(run: Callable, operands: dict[str, Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in operands.items()}
    y, state = run(**leaves, lengths=lengths, dtype=torch.float32)
    loss = (y * torch.sin(y.detach())).sum() + state.sum()
    return [y.detach(), state.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


def main(folder: Path) -> None:
    prepare(folder)
    errors = {}
    for name, run, operands in operators():
        for row, lengths in ROWS.items():
            found = computed(run, operands, lengths)
            with force_plain():
                right = computed(run, operands, lengths)
            pairs = [(one, two) for one, two in zip(found, right, strict=True) if two.numel()]
            errors[f"{name}, {row}"] = [
                float((one - two).abs().max() / two.abs().max().clamp(min=1e-30)) for one, two in pairs
            ]
            assert any(not torch.equal(one, two) for one, two in pairs), f"{name}: no kernel ran"
    print(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Whether a GPU computes what the CPU does: stored vectors, every kind of layer, every attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid.layers import Context, Mixer, Site, kinds, mixer_class
from hybrid.layers.softmax import Mask, kernels
from hybrid.text import columns
from hybrid.verify import Setting, check_folder, table

from . import ROOT
from .gpu_plan import Note, Plan

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Largest error, of a tensor's largest value."""
LENGTHS = (180, 1, 75)
"""Documents of the packed row."""


def verify(plan: Plan, note: Note) -> None:
    """The stored vectors, in fp32, and in bf16 with wider tolerances."""
    failed = []
    for precision in ("fp32", "bf16"):
        results = check_folder(ROOT / "tests" / "vectors", Setting(plan.device, precision))
        print(f"{precision}\n{table(results)}")
        found = {r.name: {"status": r.status, "errors": r.errors, "reason": r.reason} for r in results}
        note(precision, found)
        failed += [f"{name}, {precision}" for name, one in found.items() if one["status"] == "fail"]
    note("failed", failed)


def agree(plan: Plan, note: Note) -> None:
    """Outputs and gradients of every kind, at all tokens, against the CPU in fp32; equal and packed rows."""
    cells, failed = [["kind", "row", "dtype", "outputs", "gradients", ""]], []
    for kind in kinds():
        for lengths in ((), LENGTHS):
            expected = _computed(kind, lengths, "cpu", torch.float32)
            for dtype, limit in LIMITS.items():
                label = f"{kind}, {'packed' if lengths else 'equal'}, {str(dtype)[6:]}"
                try:
                    found = _computed(kind, lengths, plan.device, dtype)
                    y, worst = (max(errors) for errors in _errors(found, expected))
                    good = y <= limit and worst <= 3 * limit
                    note(label, {"outputs": y, "gradients": worst, "good": good})
                    shown = [f"{y:.1e}", f"{worst:.1e}"]
                except Exception as error:  # the other kinds still count
                    good, shown = False, ["-", f"{type(error).__name__}: {error}".splitlines()[0]]
                    note(label, {"error": shown[1], "good": False})
                cells.append([*label.split(", "), *shown, "" if good else "WRONG"])
                failed += [] if good else [label]
    note("failed", failed)
    print(columns(cells, left={0, 1, 2}))


def _computed(kind: str, lengths: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Give a layer's output and the gradients of its input and parameters, as fp32 on the CPU."""
    mixer, x = _layer(kind).to(device, dtype), torch.randn(1, sum(LENGTHS), 256, generator=_generator())
    x = x.to(device, dtype).requires_grad_()
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) if lengths else None
    y, _ = mixer(x, Context.of(x, borders, want_state=False))
    weight = torch.randn(y.shape, generator=_generator()).to(y)
    leaves = [x, *mixer.parameters()]
    grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    given = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
    return [z.detach().float().cpu() for z in (y, *given)]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _layer(kind: str) -> Mixer:
    """Build a layer of heads that every kernel takes, no parameter of which is special; rounded to bf16."""
    wanted = {
        "num_heads": 4, "head_dim": 64, "chunk": 64, "window": 64, "head_k_dim": 64, "head_v_dim": 64,
        "budget_minimum": 64, "state_size": 64,
    }  # fmt: skip
    known = mixer_class(kind).Options.__dataclass_fields__
    if kind == "mamba2":
        del wanted["num_heads"]
    options = mixer_class(kind).Options(**{name: n for name, n in wanted.items() if name in known})
    torch.manual_seed(0)
    mixer = mixer_class(kind)(options, Site(256))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
            parameter.copy_(parameter.bfloat16())
    return mixer


def _errors(found: list[Tensor], expected: list[Tensor]) -> tuple[list[float], list[float]]:
    """Compare outputs, and gradients, by the largest error of each tensor's largest value."""
    errors = [
        float((one - two).abs().max() / two.abs().max().clamp(min=1e-6))
        for one, two in zip(found, expected, strict=True)
    ]
    return errors[:1], errors[1:]


def attention(plan: Plan, note: Note) -> None:
    """Every attention kernel against plain products: one block, forward and backward, each mask."""
    cells, failed = [["kernel", "mask", "output", "gradients"]], []
    draw = [torch.randn(2, 512, heads, 128, generator=_generator()) for heads in (8, 2, 2)]
    q, k, v = (x.to(plan.device, torch.bfloat16) for x in draw)
    for mask in Mask:
        out, lse = kernels.forward("plain", q, k, v, mask, 0.1)
        joint = torch.ones_like(q), out.to(q.dtype), lse
        expected = [out, *kernels.backward("plain", joint, q, k, v, mask, 0.1)]
        for name in plan.kernels:
            label = f"{name}, {mask.name}"
            try:
                own, own_lse = kernels.forward(name, q, k, v, mask, 0.1)
                joint = torch.ones_like(q), own.to(q.dtype), own_lse
                found = [own, *kernels.backward(name, joint, q, k, v, mask, 0.1)]
                errors: Any = _errors([x.float() for x in found], [x.float() for x in expected])
                shown = [f"{max(one):.1e}" for one in errors]
                good = max(max(one) for one in errors) <= LIMITS[torch.bfloat16]
            except Exception as error:  # not installed, or another mask
                good, shown = None, [f"{type(error).__name__}: {error}".splitlines()[0], "-"]
            note(label, {"found": shown, "good": good})
            failed += [label] if good is False else []
            cells.append([name, mask.name, *shown])
    note("failed", failed)
    print(columns(cells, left={0, 1}))

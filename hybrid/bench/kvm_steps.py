"""Where the KVM operator's time goes, by its four steps, found by watching the functions that take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..layers.kvm import chunks
from ..layers.softmax import joined, kernels
from ..layers.softmax.kernels import Mask
from .timing import Steps

OTHER = "other (norms, gates, gradients of inputs)"


def kvm_steps(run: Callable[[], Any], device: torch.device | str = "cpu") -> dict[str, float]:
    """Seconds of one forward and backward by step; the second of two runs."""
    run()
    steps = Steps(device)

    def attend(phase: str) -> Callable[..., str]:
        def label(_kernel: str, *operands: Any) -> str:
            mask = operands[-2]
            if mask is Mask.LOWER:
                return f"attend, own chunk, {phase}"
            where = "previous chunk" if any(name.endswith("of window") for name in steps.inside) else "state"
            return f"attend, {where}, {phase}"

        return label

    def join(parts_at: int, verb: str) -> Callable[..., str]:
        """The window's parts have a causal one among them."""

        def label(*args: Any) -> str:
            window = any(part.mask is Mask.LOWER for part in args[parts_at])
            return f"{verb} of window" if window else f"{verb} of state"

        return label

    with (
        steps.watching(
            (chunks, "decide", "route"),
            (chunks, "contributions", "accumulate"),
            (chunks, "accumulate", "accumulate"),
            (chunks, "accumulate_backward", "accumulate, backward"),
            (chunks, "read", "read"),
            (chunks, "_read_backward", "read, backward"),
            (joined.Joint, "add", join(5, "join")),
            (chunks, "part_gradients", join(5, "gather gradients")),
            (kernels, "forward", attend("forward")),
            (kernels, "backward", attend("backward")),
        ),
        steps.step(OTHER),
    ):
        run()
    return dict(steps.seconds)

"""Where the KVM operator's time goes, by its four steps, found by watching the functions that take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..layers.kvm import slots, walk
from ..layers.softmax import kernels
from ..layers.softmax.kernels import Mask
from .timing import Steps

READ = "accumulate and read"
READ_BACKWARD = "accumulate and read, backward"
OTHER = "other (norms, gates, gradients of inputs)"


def kvm_steps(run: Callable[[], Any], device: torch.device | str = "cpu") -> dict[str, float]:
    """Seconds of one forward and backward by step; the second of two runs."""
    run()
    steps = Steps(device)

    def attend(phase: str) -> Callable[..., str]:
        def label(_kernel: str, *operands: Any) -> str:
            if operands[-2] is Mask.LOWER:
                return f"attend, own chunk, {phase}"
            state = any(name.endswith("state") for name in steps.inside)
            return f"attend, {'state' if state else 'previous chunk'}, {phase}"

        return label

    def over(what: str) -> Callable[..., str]:
        def label(*args: Any) -> str:
            """The window's parts have a causal one among them."""
            window = any(part.mask is Mask.LOWER for part in args[5])
            return f"{what} of window" if window else f"{what} of state"

        return label

    with (
        steps.watching(
            (walk, "route", "route"),
            (walk, "contributions", READ),
            (walk, "accumulate", READ),
            (slots, "refresh", READ),
            (walk, "_made_again", READ_BACKWARD),
            (walk, "accumulate_backward", READ_BACKWARD),
            (walk, "read_backward", READ_BACKWARD),
            (walk, "attend", over("join")),
            (walk, "attend_backward", over("gather gradients")),
            (kernels, "forward", attend("forward")),
            (kernels, "backward", attend("backward")),
        ),
        steps.step(OTHER),
    ):
        run()
    return dict(steps.seconds)

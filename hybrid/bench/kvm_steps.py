"""Where the KVM operator's time goes, by its four steps, found by watching the functions that take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybrid.layers.kvm import chunks, operands, walk, walk_backward
from hybrid.layers.kvm.slots import Slots
from hybrid.layers.softmax import joined, kernels
from hybrid.layers.softmax.kernels import Mask

from .timing import Steps

TAKE_BACK = "accumulate and read, backward"
OTHER = "other (norms, gates, gradients of inputs)"


def kvm_steps(run: Callable[[], Any], device: torch.device | str = "cpu") -> dict[str, float]:
    """Seconds of one forward and backward by step; the second of two runs."""
    run()
    steps = Steps(device)

    def attend(phase: str) -> Callable[..., str]:
        def label(_kernel: str, *operands: Any) -> str:
            if operands[-2] is Mask.LOWER:
                return f"attend, own chunk, {phase}"
            state = any(name in ("join of state", TAKE_BACK) for name in steps.inside)
            return f"attend, {'state' if state else 'previous chunk'}, {phase}"

        return label

    def join(*args: Any) -> str:
        """The window's parts have a causal one among them."""
        window = any(part.mask is Mask.LOWER for part in args[5])
        return "join of window" if window else "join of state"

    with (
        steps.watching(
            (chunks, "decide", "route"),
            (operands, "contributions", "accumulate and read"),
            (Slots, "update", "accumulate and read"),
            (walk_backward, "slots_backward", TAKE_BACK),
            (walk, "group_backward", "gather gradients"),
            (joined.Joint, "add", join),
            (kernels, "forward", attend("forward")),
            (kernels, "backward", attend("backward")),
        ),
        steps.step(OTHER),
    ):
        run()
    return dict(steps.seconds)

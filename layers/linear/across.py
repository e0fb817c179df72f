"""Linear recurrences over a sequence that is sharded over ranks.

The state enters linearly, each value column for itself. A segment that starts from the state S `[K, V]` gives

    o_t = o_t^0 + R_t S,     S_end = E + A S

with o^0 and E those of a zero start, and the reach R_t `[1, K]` and the transition A `[K, K]` made by the
segment's tokens alone. So every rank runs its shard at once from zero, all exchange (E, A), each folds those
of earlier ranks to its true start, and adds R_t S. Any number of ranks may share a sequence, whatever the
heads.

Only a rank's first segment can go on with the previous rank's last document, and only a rank that holds
nothing else lets what came before it through: elsewhere A is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..context import Context
from ..parameters import always_used
from .chunked import running_decay


class ShardOutput(NamedTuple):
    """Result of a rank's tokens as if nothing came before them, and what another start changes."""

    out: Tensor  # [B, T, H, V]
    end: Tensor  # [B, H, ...], the state after them
    transition: Tensor
    """`[B, H, K, K]` or, where it is a number, `[B, H, 1, 1]`: how the start is seen in the end."""
    reached: Callable[[Tensor], Tensor] | None
    """Start -> what it adds to the outputs of the first document, `[B, T1, H, V]`; None: that begins here."""

    def from_start(self, start: Tensor) -> Tensor:
        """Give the outputs `[B, T, H, V]` from the true start."""
        if self.reached is None:
            return self.out
        added = self.reached(start)
        first, rest = self.out.tensor_split((added.shape[1],), 1)
        return torch.cat((first + added, rest), 1)


class AcrossRanks:
    """An operator for a call whose sequence may be sharded over ranks.

    The transition and the reach come out of the operator itself: K more value columns, which add nothing to
    the state and start from the identity. The operator is one pass so, forward and backward, of about 1.4
    times the work; a first pass for (E, A) and a second from the true start would be more. In the kernels of
    fla the reach is of 16 bits, as all outputs there. On a CPU use `torch.set_flush_denormal(True)`: over a
    long segment the transition falls below normal numbers, with which the operator is three times as slow.
    """

    def __init__(self, operator: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """`operator(**tokens, state=, lengths=, dtype=)` gives outputs and the last document's end state."""
        self.operator = operator

    def __call__(
        self, context: Context, state: Tensor | None, dtype: torch.dtype, **tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run the operator: the outputs for this rank's `tokens` `[B, T, ...]`, and its state without a
        shard."""
        shard = context.shard
        if shard is None:
            return self.operator(**tokens, state=state, lengths=context.lengths, dtype=dtype)
        own = self.from_zero(tokens, context.lengths, shard.continues, dtype)
        with torch.autocast(own.end.device.type, enabled=False):
            earlier = shard.earlier(torch.cat((own.end.flatten(2), own.transition.flatten(2)), -1))
            if not shard.continues:
                return always_used(own.out, earlier), None
            end, transition = (x.shape[2:] for x in (own.end, own.transition))
            ends, transitions = earlier.split((end.numel(), transition.numel()), -1)
            start = fold(ends.unflatten(-1, end), transitions.unflatten(-1, transition))
            return own.from_start(start), None

    def from_zero(
        self, tokens: dict[str, Tensor], lengths: Sequence[int], continues: bool, dtype: Any
    ) -> ShardOutput:
        """Run one rank's `tokens`: documents of `lengths` (empty for equal rows), of which the first
        `continues` one of the rank before."""
        if not continues:
            out, end = self.operator(**tokens, lengths=lengths, dtype=dtype)
            return ShardOutput(out, end, self.blocked(end), None)
        if len(lengths) < 2:
            return self.open(tokens, dtype)
        first = self.open({name: x[:, : lengths[0]] for name, x in tokens.items()}, dtype)
        rest = {name: x[:, lengths[0] :] for name, x in tokens.items()}
        out, end = self.operator(**rest, lengths=lengths[1:], dtype=dtype)
        return ShardOutput(torch.cat((first.out, out), 1), end, self.blocked(end), first.reached)

    def open(self, tokens: dict[str, Tensor], dtype: torch.dtype) -> ShardOutput:
        """Run one segment of each row, whose start is not known yet."""
        v = tokens["v"]
        (batch, _, heads, width), keys = v.shape, tokens["k"].shape[-1]
        wide = torch.promote_types(v.dtype, torch.float32)
        start = F.pad(torch.eye(keys, dtype=wide, device=v.device), (width, 0))
        out, end = self.operator(
            **tokens | {"v": F.pad(v, (0, keys))}, state=start.expand(batch, heads, -1, -1), dtype=dtype
        )
        out, reach = out.split((width, keys), -1)
        end, transition = end.split((width, keys), -1)

        def reached(start: Tensor) -> Tensor:
            return (reach.transpose(1, 2).to(wide) @ start).transpose(1, 2)

        return ShardOutput(out, end, transition, reached)

    def blocked(self, end: Tensor) -> Tensor:
        """Make the transition through the start of a document: zero."""
        return end.new_zeros(*end.shape[:2], end.shape[2], end.shape[2])


class DecayAcrossRanks(AcrossRanks):
    """`AcrossRanks` for state space duality, whose transition is the decay, and whose reach the decay times
    C."""

    def open(self, tokens: dict[str, Tensor], dtype: torch.dtype) -> ShardOutput:
        out, end = self.operator(**tokens, dtype=dtype)
        c = tokens["c"].to(end.dtype).transpose(1, 2)  # [B, G, T, N]
        decay = running_decay(tokens["g"], 1).exp().to(end.dtype)[..., None]  # [B, T, H, 1]

        def reached(start: Tensor) -> Tensor:
            """`[B, H, P, N]` to `[B, T, H, P]`; the heads of a group are one product."""
            by_group = start.unflatten(1, (c.shape[1], -1))
            read = c @ by_group.flatten(2, 3).mT  # [B, G, T, M * P]
            return read.transpose(1, 2).reshape(*decay.shape[:3], -1) * decay

        return ShardOutput(out, end, decay[:, -1, :, :, None], reached)

    def blocked(self, end: Tensor) -> Tensor:
        return end.new_zeros(*end.shape[:2], 1, 1)


def fold(ends: Sequence[Tensor] | Tensor, transitions: Sequence[Tensor] | Tensor) -> Tensor:
    """Compute the state after the last of consecutive shards, the first of which starts from zero."""
    state = ends[0]
    for end, transition in zip(ends[1:], transitions[1:], strict=True):
        state = end + (transition * state if transition.shape[-1] == 1 else transition @ state)
    return state

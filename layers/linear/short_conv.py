"""Short causal convolution of each channel, followed by SiLU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import initialise
from ..norms import compute_dtype


class ShortConv(nn.Module):
    """`silu(sum_j weight[c, 0, j] u_{t - W + 1 + j}[c] + bias[c])`, zero before the start of a sequence."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch initialises a depthwise convolution."""
        bound = 1 / math.sqrt(self.width)
        initialise(self.weight, lambda w: nn.init.uniform_(w, -bound, bound))
        if self.bias is not None:
            initialise(self.bias, lambda b: nn.init.uniform_(b, -bound, bound))

    def forward(
        self, u: Tensor, last: Tensor | None = None, lengths: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Convolve `u` `[B, T, channels]`.

        Args:
            last: `[B, channels, width]`, the inputs before the first, oldest first; None at the start.
            lengths: of packed documents, each of which starts anew (`last` must be None then).

        Returns:
            `[B, T, channels]` in at least fp32, and the last `width` inputs, `[B, channels, width]`.
        """
        assert last is None or len(lengths) < 2
        if last is None:
            last = u.new_zeros(u.shape[0], self.channels, self.width)
        padded = torch.cat((last.to(u.dtype), u.transpose(1, 2)), 2)
        dtype = compute_dtype(u)
        if len(lengths) > 1:
            y = self._documents(padded.to(dtype), lengths)
        else:
            y = self._convolve(padded[..., 1:].to(dtype))
        return F.silu(y).transpose(1, 2), padded[..., -self.width :].clone()

    def _convolve(self, padded: Tensor) -> Tensor:
        """`[B, channels, W - 1 + T]` to `[B, channels, T]`."""
        bias = None if self.bias is None else self.bias.to(padded.dtype)
        with torch.autocast(padded.device.type, enabled=False):
            return F.conv1d(padded, self.weight.to(padded.dtype), bias, groups=self.channels)

    def _documents(self, padded: Tensor, lengths: Sequence[int]) -> Tensor:
        """Every document behind zeros of its own: spread them out, convolve the row, take what is theirs."""
        sizes, room = torch.tensor(lengths), self.width - 1
        gaps = torch.arange(1, len(lengths) + 1) * room
        places = (torch.arange(int(sizes.sum())) + gaps.repeat_interleave(sizes)).to(padded.device)
        spread = padded.new_zeros(1, self.channels, int(sizes.sum()) + room * len(lengths))
        spread = spread.index_copy(2, places, padded[..., self.width :])
        return self._convolve(spread).index_select(2, places - room)

"""Initial values of the backbone's own parameters; mixers initialise themselves.

"paper" follows the code of the Key-Value Means paper: tiny embeddings, an orthogonal head and orthogonal
inputs of the feed-forward, zero output projections (so that every block starts as the identity).
"normal": every matrix N(0, 0.02), biases zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from hybrid.layers import initialise

INITS = ("paper", "normal")
NORMAL_STD = 0.02

Fill = Callable[[Tensor], Tensor]


def normal() -> Fill:
    """Fill with normal values of standard deviation 0.02."""
    return lambda value: nn.init.normal_(value, std=NORMAL_STD)


def orthogonal(gain: float = 1.0) -> Fill:
    """Fill a matrix `[m, n]` whose shorter side's rows or columns become orthogonal, of length `gain`."""
    return lambda value: nn.init.orthogonal_(value, gain)


def embedding(init: str) -> Fill:
    """Fill the token table `[V, C]`."""
    return normal() if init == "normal" else lambda value: nn.init.uniform_(value, -1e-4, 1e-4)


def head(init: str, vocab_size: int, hidden_size: int) -> Fill:
    """Fill the head's weight `[V, C]`."""
    return normal() if init == "normal" else orthogonal(0.5 * math.sqrt(vocab_size / hidden_size))


def normal_linears(module: nn.Module) -> None:
    """Give every linear layer in `module` the "normal" start."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            initialise(part.weight, normal())
            if part.bias is not None:
                initialise(part.bias, nn.init.zeros_)

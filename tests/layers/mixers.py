"""Small mixers of every registered kind, for tests that hold for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.layers import Context, Mixer, MixerState, Site, kinds, mixer_class

HIDDEN = 32
KINDS = list(kinds())
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)  # fla-org/flash-linear-attention#88
every_kind = pytest.mark.parametrize("kind", KINDS)

# Given to every kind whose options have a field of that name: windows and chunks short enough that sixty
# tokens cross every border, and heads that share.
SMALL: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": 2, "chunk": 8, "window_chunks": 2, "window": 11, "sinks": 2,
    "budget_minimum": 8, "budget_factor": 2.0, "gate_appends": True, "max_centroids": 12, "state_bias": True,
    "num_v_heads": 8, "state_size": 8, "n_groups": 2,
}  # fmt: skip


def small_options(kind: str, **changes: Any) -> Any:
    cls = mixer_class(kind).Options
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in (SMALL | changes).items() if name in names})


def build(
    kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, site: Site | None = None, **changes: Any
):
    """A mixer whose parameters all differ from their special starting values (zeros, ones)."""
    torch.manual_seed(seed)
    mixer = mixer_class(kind)(small_options(kind, **changes), site or Site(HIDDEN))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return mixer.to(dtype)


def fresh(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Mixer:
    """A mixer as it starts, in a layer used alone."""
    torch.manual_seed(seed)
    return mixer_class(kind)(small_options(kind, **changes), Site(HIDDEN)).to(dtype)


def tokens(batch: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def packed_context(x: Tensor, lengths: list[int], **more: Any) -> Context:
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Context.of(x, borders, **more)


def in_pieces(
    mixer: Mixer,
    x: Tensor,
    cuts: list[int],
    state: MixerState | None = None,
    routes: dict[int, Any] | None = None,
) -> tuple[Tensor, MixerState | None]:
    """`x` `[B, T, C]` read in successive calls of the given lengths."""
    outputs = []
    for piece in x.split(cuts, 1):
        y, state = mixer(piece, Context.of(piece, routes=routes), state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def gradients(mixer: Mixer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of a fixed weighting of `y`, for `x` and every parameter."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    named = {"x": x, **dict(mixer.named_parameters())}
    found = torch.autograd.grad(
        (y * weight).sum(), list(named.values()), allow_unused=True, retain_graph=True
    )
    return {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)
    }


def assert_same_state(found: MixerState, expected: MixerState, tolerance: float) -> None:
    assert found.position == expected.position
    one, two = found.tensors(), expected.tensors()
    assert one.keys() == two.keys()
    for name in one:
        message = f"state tensor {name}"
        torch.testing.assert_close(
            one[name], two[name], atol=tolerance, rtol=0, msg=lambda m, message=message: f"{message}: {m}"
        )


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest entry of each tensor."""
    for name, one in found.items():
        scale = max(1.0, float(expected[name].detach().abs().max()))
        torch.testing.assert_close(
            one,
            expected[name],
            atol=tolerance * scale,
            rtol=0,
            msg=lambda m, name=name: f"gradient of {name}: {m}",
        )

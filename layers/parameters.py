"""Parameters of a layer: how they are filled, and how every rank gets their gradients in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEP_RANGE = (0.001, 0.1)
LEAST_STEP = 1e-4


def initialise(parameter: Tensor, init: Callable[[Tensor], Any]) -> None:
    """Fill `parameter` in place by `init`, which gets an fp32 tensor of its full shape.

    The values do not depend on the parameter's dtype, nor on how FSDP2 shards it (every rank draws the
    full tensor and keeps its part; torch's own orthogonal init cannot write into a DTensor). On the meta
    device it does nothing.
    """
    if parameter.is_meta:
        return
    value = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    with torch.no_grad():
        init(value)
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(parameter, DTensor)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


def reset_uniform(module: nn.Module, inputs: int) -> None:
    """Fill `module`'s own weight and bias as torch does linear maps: uniform, up to 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(inputs)
    for parameter in module.parameters(recurse=False):
        initialise(parameter, lambda value: nn.init.uniform_(value, -bound, bound))


def reset_decay_rate(a_log: Tensor, low: float, high: float) -> None:
    """Fill `a_log` with the logarithm of rates drawn uniformly from `low` to `high` (Mamba-2 paper's
    code)."""
    a_log.uniform_(low, high).clamp_(min=1e-6).log_()  # a rate of exactly 0 would have no logarithm


def reset_time_step(dt_bias: Tensor) -> None:
    """Fill `dt_bias` so that its softplus is log-uniform in STEP_RANGE (Mamba-2 paper's code)."""
    low, high = (math.log(limit) for limit in STEP_RANGE)
    step = dt_bias.uniform_(low, high).exp_().clamp_(min=LEAST_STEP)
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))


class _AlwaysUsed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *tensors: Tensor) -> Tensor:
        # Not the tensors themselves: ZeRO-3 has taken a parameter apart by the time of the backward.
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.like)


def always_used(y: Tensor, *tensors: Tensor) -> Tensor:
    """`y` itself, through which `tensors` get at least a zero gradient.

    For parameters that some inputs do not reach: data-parallel training goes wrong where a parameter has a
    gradient on one rank and none on another. Where a submodule owns the parameter give its output instead,
    so that the gradient comes to it the usual way.
    """
    return _AlwaysUsed.apply(y, *tensors) if torch.is_grad_enabled() else y


class _OrderedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def ordered_gradients(*parameters: Tensor | None) -> Sequence[Any]:
    """`parameters` themselves, whose gradients come one after another in this order, once all are known.

    For parameters that are used in several places, or in places that are not the same on every rank: ZeRO
    puts gradients into buckets as they come and adds up the buckets of all ranks, so that another order on
    another rank adds up what does not belong together, without an error.
    """
    given = [parameter for parameter in parameters if parameter is not None]
    if not torch.is_grad_enabled():
        return parameters
    # A node of its own for each: torch runs leaves that are ready at the same time in no certain order.
    made = iter(_OrderedGradients.apply(*(parameter.view_as(parameter) for parameter in given)))
    return tuple(None if parameter is None else next(made) for parameter in parameters)

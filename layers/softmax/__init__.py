"""Exact attention of queries over blocks of keys and values, with log-sum-exp.

`attention` and `block_window_attention` are whole layers' worth; `joined_attention` is what they and the
KVM operator are made of. `force_plain` switches every one of them to plain matrix products, `force_kernel` to
any one kernel.
"""

from ..backends import force_plain
from .attention import attention, block_window_attention
from .joined import ALL, Part, joined_attention
from .kernels import Mask, force_kernel

__all__ = [
    "ALL",
    "Mask",
    "Part",
    "attention",
    "block_window_attention",
    "force_kernel",
    "force_plain",
    "joined_attention",
]

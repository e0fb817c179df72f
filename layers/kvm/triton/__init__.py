"""The KVM walk as Triton kernels: routing, sums and reading of all chunks of a group in a few launches.

Imports triton, so import this package only where kernels are asked for. Environment `TRITON_INTERPRET=1`, set
before that, runs them on the CPU.
"""

from .routing import route_group
from .states import States, read_group, read_group_backward

__all__ = ["States", "read_group", "read_group_backward", "route_group"]

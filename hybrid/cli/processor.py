"""How this process waits and keeps memory on a CPU, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, <malloc.h>


def wait_briefly() -> None:
    """Let waiting threads spin only for a short while; to be called before torch loads its OpenMP.

    Threads that spin while they wait stand in each other's way where a core is shared: a quickstart step took
    10 s beside one busy process. With spins this short it took 1.6 s, and no longer than before on an idle
    machine (a third longer when they sleep at once).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def keep_freed_memory() -> None:
    """Use freed memory again instead of giving it back to the system, as glibc does with 32 MiB and more.

    The system fills what it hands out again with zeros, page by page: a tenth to a fifth of the time of
    windows and KVM at 32768 tokens, forward and backward. Peaks of memory grew by up to 5 %. Allocators other
    than glibc's are left as they are.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if chosen or not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)

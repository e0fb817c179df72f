"""Freed memory is kept, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from hybrid.cli.commands import keep_freed_memory

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
b"x" * 2**26
before = page_faults()
b"x" * 2**26
print(page_faults() - before)
"""


def page_faults(**chosen):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | chosen, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()), reason="needs the GNU C library"
)
def test_freed_memory_is_used_again_unless_the_environment_says_otherwise():
    assert page_faults() < 20
    assert page_faults(MALLOC_MMAP_MAX_="65536") >= 32  # few where the system gives huge pages

"""Measurements that need a checkout: the KVM operator, every layer, several processes, and a GPU.

`make bench` runs them all and redraws results/; one of them: `python -m benchmarks.kvm --help`.
"""

import importlib.util
from pathlib import Path

import hybrid

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("hybrid.layers") is None:
    hybrid.__path__.append(str(ROOT))  # not installed: layers/ and recipes/ lie beside hybrid/

from hybrid.cli.main import wait_briefly  # noqa: E402

wait_briefly()  # before torch is imported, as the command line does

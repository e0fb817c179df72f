"""Draw the curves of finished runs: python -m benchmarks.curves OUT.png NAME=RUN [NAME=RUN ...]"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hybrid.train.metrics import read_metrics

PANELS = {
    "training loss (nats / token)": "train/loss",
    "learning rate": "train/learning_rate",
    "gradient norm before clipping": "train/gradient_norm_before_clipping",
    "slots used": "layers/*/slots",
    "attention mass on the state": "layers/*/state_mass",
    "merge gate, mean": "layers/*/gate_mean",
}
"""Title -> series; * stands for every layer that has it."""


def series(rows: list[dict], pattern: str) -> dict[str, tuple[list[int], list[float]]]:
    """Pick the series that `pattern` names: name -> (steps, values)."""
    names = sorted({key for row in rows for key in row if Path(key).match(pattern)})
    return {n: ([r["step"] for r in rows if n in r], [r[n] for r in rows if n in r]) for n in names}


def main(out: str, *runs: str) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for run in runs:
        label, folder = run.split("=", 1)
        rows = read_metrics(Path(folder))
        for axis, (title, pattern) in zip(axes.flat, PANELS.items(), strict=True):
            for name, (steps, values) in series(rows, pattern).items():
                layer = f", layer {name.split('/')[1]}" if "*" in pattern else ""
                axis.plot(steps, values, label=f"{label}{layer}", linewidth=1.2)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step", fontsize=8)
    for axis in axes.flat:
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all("=" in run for run in sys.argv[2:]):
        sys.exit(__doc__)
    main(*sys.argv[1:])

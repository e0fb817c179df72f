"""`hybrid convert`: from any format to any other, written whole or not at all, checked and reported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid.checkpoint.run import CONVERSION, TOKENIZER
from hybrid.errors import CheckFailed, ConvertError
from hybrid.files import PARTIAL, sync, write_json

from .adapt import adapt
from .common import Format, Model, Options, Tensors, short_list
from .formats import FORMATS, recognise
from .hf.standalone import add_code
from .tensor_io import write_shards


def convert(
    source: Path,
    dest: Path,
    to: str = "hybrid",
    source_format: str | None = None,
    options: Options = Options(),
    overrides: Sequence[str] = (),
    shard_bytes: int = 4 * 10**9,
    check: bool = True,
    standalone: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Convert the model at `source` to a new folder `dest`; returns the report that `conversion.json` holds.

    Args:
        to: name of a format that can be written.
        source_format: name in FORMATS; None: recognised by the source's content.
        overrides: `model.key=value` texts that change the model's settings on the way.
        check: compare what was written with the source in a fresh process.
        standalone: put our code into a Hugging Face folder, which then loads where we are not installed.

    Raises ConvertError, or CheckFailed where the comparison fails; then there is no `dest`.
    """
    source_format = source_format or recognise(source)
    if os.path.lexists(dest):
        raise ConvertError(f"{dest} exists already: give a new folder, or remove it")
    if standalone and to != "hf":
        raise ConvertError(f"--standalone is for folders of Hugging Face (--to hf), not for --to {to}")
    given = FORMATS[source_format].read(source, options)
    model = adapt(given, overrides)
    partial = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}{PARTIAL}")
    partial.mkdir(parents=True)
    try:
        zeros, not_finite = _write(FORMATS[to], model, partial, shard_bytes, progress)
        if standalone:
            add_code(partial, model.section)
        report = _report(source, source_format, to, model, zeros, not_finite)
        if check:
            progress("checking what was written")
            request = {
                "source": str(given.place or source), "from": source_format, "dest": str(partial), "to": to,
                "options": dataclasses.asdict(options), "overrides": list(overrides),
                "standalone": standalone,
            }  # fmt: skip
            report["check"] = _check(request)
        write_json(partial / CONVERSION, report)
        sync(partial)
        if os.path.lexists(dest):
            raise ConvertError(f"{dest} exists by now: somebody else made it")
        os.rename(partial, dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _write(
    form: Format, model: Model, folder: Path, shard_bytes: int, progress: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """Write a model; returns which written tensors are all zero, and which hold nan or infinity."""
    zeros: list[str] = []
    not_finite: list[str] = []
    done = 0

    def on_tensor(name: str, tensor: Tensor) -> None:
        nonlocal done
        done += 1
        progress(f"writing tensor {done} of about {len(model.tensors)}")
        if not tensor.any():
            zeros.append(name)
        elif not tensor.isfinite().all():
            not_finite.append(name)

    def write(path: Path, tensors: Tensors) -> None:
        write_shards(path, tensors, shard_bytes, on_tensor)

    assert form.write is not None
    form.write(model, folder, write)
    return zeros, not_finite


def _report(
    source: Path, source_format: str, to: str, model: Model, zeros: list[str], not_finite: list[str]
) -> dict[str, Any]:
    copied = {
        name: {
            "from": model.source_names.get(name, name),
            "shape": list(tensor.shape),
            "dtype": _dtype(tensor),
        }
        for name, tensor in model.tensors.items()
        if name not in model.created
    }
    tokenizer = model.tokenizer.get(TOKENIZER)
    dtypes = Counter(_dtype(tensor) for tensor in model.tensors.values())
    notes = list(model.notes)
    if len(dtypes) > 1:
        rare = [
            name for name, tensor in model.tensors.items() if _dtype(tensor) != dtypes.most_common()[0][0]
        ]
        counts = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        notes.append(f"of mixed dtype ({counts}): {short_list(rare)}")
    if zeros:
        notes.append(f"all zero: {short_list(zeros)}")
    if not_finite:
        notes.append(f"with nan or infinity: {short_list(not_finite)}")
    return {
        "source": {"path": str(source), "format": source_format},
        "format": to,
        "settings": json.loads(json.dumps(dataclasses.asdict(model.section))),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest() if tokenizer else None,
        "copied": copied,
        "created": model.created,
        "dropped": model.dropped,
        "all_zero": zeros,
        "not_finite": not_finite,
        "notes": notes,
        "check": None,
    }


def describe(report: dict[str, Any], dest: Path) -> str:
    """Write the report in words."""
    settings, check = report["settings"], report["check"]
    lines = [
        f"{report['source']['path']} ({report['source']['format']}) -> {dest} ({report['format']})",
        f"model: {settings['pattern']}, {settings['depth']} layers, hidden size {settings['hidden_size']}, "
        f"vocabulary {settings['vocab_size']}",
        *(f"{verb}: {_counted(report[verb])}" for verb in ("copied", "created", "dropped")),
        *(f"note: {note}" for note in report["notes"]),
    ]
    if check is None:
        lines.append("check: left out")
    else:
        lines.append(
            f"check: {check['tensors']} tensors read back equal, largest difference of the logits of "
            f"{check['tokens']} tokens {check['largest_difference']:.3g}"
            + ("" if check["same_model"] else " (the settings were changed: no limit)")
        )
    return "\n".join(lines)


def _counted(found: dict[str, Any]) -> str:
    """Count tensors; name those that are not simply copied."""
    copied = all(isinstance(entry, dict) for entry in found.values())
    return f"{len(found)} tensors" + ("" if copied else f": {short_list(found)}")


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Compare source and result in a fresh process; CheckFailed where they differ."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hybrid.convert.check"],
        input=json.dumps(request), capture_output=True, text=True,
    )  # fmt: skip
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckFailed(f"the check could not be made, and nothing was kept: {last}") from None
    if found["faults"]:
        listed = "".join(f"\n  {fault}" for fault in found["faults"][:20])
        raise CheckFailed(f"what was written differs from the source, and nothing was kept:{listed}")
    return found


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")

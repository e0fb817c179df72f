"""`hybrid inspect`: one HTML file that shows where every token of a text is in a model's memory.

The file holds arrays, each compressed and in base64, which the page's script unpacks when they are looked at;
so nothing of the text is ever read as HTML.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hybrid.data.tokenizer import Tokenizer
from hybrid.files import replacing
from hybrid.generate import load_model
from hybrid.layers.kvm.mixer import KVM
from hybrid.model import HybridLM
from hybrid.text import decode

from .trace import InspectError, LayerTrace, trace

LARGEST = 2**26
"""Most places (tokens times heads of all layers shown) of one page: 3 to 5 bytes each in the file."""


def inspect(
    path: str | Path,
    text: str | Path,
    output: str | Path,
    queries: int = 16,
    layers: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Write the page of a text file, read by the model that `hybrid generate` finds at `path`.

    Args:
        queries: tokens whose attention is shown: the last one, and others at equal distances.
        layers: KVM layers to show; None: all.

    Returns what was written, in words. Raises InspectError when there is nothing to show or too much.
    """
    text, output = Path(text), Path(output)
    content = _read(text)
    if output.exists() and (output.is_dir() or output.samefile(text)):
        raise InspectError(f"--output {output}: it must be a file of its own, not a folder or the text")
    model, tokenizer = load_model(path)
    mixers = _layers(model, layers)
    ids = [tokenizer.bos_id, *tokenizer.encode(content)]
    heads = sum(mixer.num_kv_heads for mixer in mixers)
    if len(ids) * heads > LARGEST:
        raise InspectError(
            f"{len(ids):,} tokens in {heads} heads of layers {_listed(mixers)} are more than one page can "
            f"hold ({LARGEST:,} in all); choose fewer with --layers"
        )
    spots = sorted({round((i + 1) * len(ids) / queries) - 1 for i in range(queries)} - {-1})
    device = model.head.weight.device
    traces = trace(model, torch.tensor(ids, device=device), mixers, spots, say)
    about = describe(model, traces, len(ids), spots) | {"model": str(path), "text": text.name}
    say("writing the page")
    with replacing(output) as file:
        write(file, about, arrays(tokenizer, ids, traces))
    size = output.stat().st_size / 1e6
    told = f"{output}: {len(ids):,} tokens in the KVM layers {_listed(mixers)} ({size:.1f} MB)"
    if whole := [mixer for mixer in mixers if not mixer.spec.window_start(len(ids))]:
        told += (
            f"\nall tokens are still in the window of layers {_listed(whole)}: no slot of theirs is read yet"
        )
    return told


def _read(path: Path) -> str:
    try:
        content = decode(path.read_bytes())
    except ValueError as error:
        raise InspectError(f"--text {path} {error}") from None
    if not content:
        raise InspectError(f"--text {path} is empty; there is nothing to inspect")
    return content


def _layers(model: HybridLM, wanted: Sequence[int] | None) -> list[KVM]:
    """Choose the layers to show."""
    found = {mixer.site.layer: mixer for mixer in model.mixers if isinstance(mixer, KVM)}
    if not found:
        kinds = ", ".join(sorted({mixer.kind for mixer in model.mixers}))
        raise InspectError(f"the model has no KVM layer, so there are no slots to show (it has {kinds})")
    if unknown := sorted(set(wanted or ()) - set(found)):
        allowed = _listed(list(found.values()))
        raise InspectError(f"--layers: {unknown[0]} is no KVM layer of this model; allowed: {allowed}")
    return [mixer for layer, mixer in found.items() if wanted is None or layer in wanted]


def _listed(mixers: Sequence[KVM]) -> str:
    return ", ".join(str(mixer.site.layer) for mixer in mixers)


def describe(
    model: HybridLM, traces: Sequence[LayerTrace], tokens: int, queries: list[int]
) -> dict[str, Any]:
    """List what the page's script must know beside the arrays."""
    layers = [
        {
            "layer": mixer.site.layer,
            "heads": mixer.num_kv_heads,
            "shared": mixer.num_heads // mixer.num_kv_heads,
            "chunk": mixer.spec.chunk,
            "window": mixer.spec.window_chunks,
            "sinks": mixer.spec.sinks,
            "gated": mixer.spec.gated,
        }
        for mixer in (one.mixer for one in traces)
    ]
    others = [f"{mixer.site.layer} ({mixer.kind})" for mixer in model.mixers if not isinstance(mixer, KVM)]
    return {"tokens": tokens, "queries": queries, "layers": layers, "others": others}


def arrays(
    tokenizer: Tokenizer, ids: Sequence[int], traces: Sequence[LayerTrace]
) -> Iterator[tuple[str, bytes]]:
    """Give the page's arrays by name, little-endian.

    `text`: the tokens' UTF-8 bytes; `lengths`: uint16, how many each has. For layer l and head h
    `slot-l-h`: uint32 for every token in the state, 2 * slot + whether it made the slot; `gate-l-h`: bfloat16
    for every token; `mass-l-h-i`: for query i uint16, 65535ths on its slots, then on its window's tokens.
    """
    pieces = [tokenizer.bytes_of(token) for token in ids]
    yield "text", b"".join(pieces)
    yield "lengths", np.array([len(piece) for piece in pieces], "<u2").tobytes()
    for one in traces:
        slots = 2 * np.concatenate(one.slots, 1) + np.concatenate(one.founds, 1)
        gates = np.concatenate(one.gates, 1) if one.gates else None
        for head in range(one.mixer.num_kv_heads):
            place = f"{one.mixer.site.layer}-{head}"
            yield f"slot-{place}", slots[head].astype("<u4").tobytes()
            if gates is not None:
                rounded = gates[head].astype("<f4").view("<u4") + 0x8000
                yield f"gate-{place}", (rounded >> 16).astype("<u2").tobytes()
            for index, masses in enumerate(one.masses):
                mass = np.concatenate([x[head] for x in masses])
                yield f"mass-{place}-{index}", np.rint(mass * 65535).astype("<u2").tobytes()


def write(file: BinaryIO, about: dict[str, Any], arrays: Iterator[tuple[str, bytes]]) -> None:
    """Write the page: its template with the title, the description and the arrays in their places."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    head, tail = template.split("{{data}}")
    head = head.replace("{{title}}", html.escape(about["text"]))
    described = json.dumps(about).replace("<", "\\u003c")
    file.write(f'{head}<script type="application/json" id="about">{described}</script>\n'.encode())
    for name, data in arrays:
        packed = base64.b64encode(zlib.compress(data, 6))
        file.write(b'<script type="text/plain" id="%s">%s</script>\n' % (name.encode(), packed))
    file.write(tail.encode())

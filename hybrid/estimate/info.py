"""`hybrid info`: the layers and costs of a recipe, computed on torch's meta device, without any weights."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Any

import torch

from hybrid.model import HybridLM
from hybrid.model.freeze import freeze_all_but
from hybrid.recipe import Geometry, LayerSpec, Recipe, batch_geometry
from hybrid.recipe.pattern import compress
from hybrid.text import columns

from .communication import LayerBytes, sequence_bytes, zero_exchanges
from .memory import element_size, memory_estimate

CONTEXTS = {"1k": 1024, "8k": 8 * 1024, "64k": 64 * 1024, "1M": 1024 * 1024}
"""Context lengths of the FLOPs and state table."""


def describe(recipe: Recipe, processes: int = 1) -> str:
    """Write the whole report.

    Raises:
        RecipeError: the batch does not divide over `processes`.
    """
    geometry = batch_geometry(recipe, processes)
    model = meta_model(recipe)
    parts = [
        layer_table(model.layers),
        _parameters(model, recipe),
        _costs(model, recipe),
        batch(model, recipe, geometry),
        memory(model, recipe, geometry),
        communication(model, recipe, geometry),
    ]
    return "\n\n".join(parts)


def meta_model(recipe: Recipe) -> HybridLM:
    """Build the recipe's model without storage. An open vocabulary size is taken from `data.vocab_size`."""
    if recipe.model.vocab_size is None:
        size = -(-recipe.data.vocab_size // 64) * 64
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=size))
    with torch.device("meta"):
        model = HybridLM.from_recipe(recipe)
    freeze_all_but(model, recipe.train.only)
    return model


def layer_table(layers: list[LayerSpec]) -> str:
    """Write one row per letter: its kind, its layers, and the options that are not the kind's default."""
    spans: dict[str, list[str]] = {}
    specs = {spec.letter: spec for spec in layers}
    first = 0
    for letter, run in groupby(spec.letter for spec in layers):
        last = first + len(list(run)) - 1
        spans.setdefault(letter, []).append(str(first) if first == last else f"{first}-{last}")
        first = last + 1
    rows = [["letter", "kind", "count", "layers", "options"]]
    for letter, places in spans.items():
        count = sum(spec.letter == letter for spec in layers)
        shown = places if len(places) <= 8 else [*places[:5], "...", places[-1]]
        options = _set_options(specs[letter].options)
        rows.append([letter, specs[letter].kind, str(count), ", ".join(shown), options])
    title = f"{_count(len(layers), 'layer')}: {compress([spec.letter for spec in layers])}"
    return title + "\n" + columns(rows, left={0, 1, 3, 4}, indent="  ")


def _set_options(options: Any) -> str:
    shown = []
    for field in dataclasses.fields(options):
        value, factory = getattr(options, field.name), field.default_factory
        if value != (field.default if factory is dataclasses.MISSING else factory()):
            shown.append(f"{field.name}={value}")
    return " ".join(shown) or "(defaults)"


def _parameters(model: HybridLM, recipe: Recipe) -> str:
    total = model.num_parameters
    rows = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in model.parameter_parts().items()]
    size = model.embedding.weight.shape[0]
    note = "" if recipe.model.vocab_size else " (from data.vocab_size; the tokenizer decides)"
    title = f"Parameters, with a vocabulary of {size:,}{note}"
    rows.append(["total", f"{total:,}", ""])
    if recipe.train.only is not None:
        rows.append(["trained (train.only)", f"{model.num_trained:,}", f"{model.num_trained / total:.1%}"])
    return title + "\n" + columns(rows, left={0}, indent="  ")


def _costs(model: HybridLM, recipe: Recipe) -> str:
    rows = [["context", "training FLOPs/token", "decoding FLOPs/token", "state"]]
    for name, length in CONTEXTS.items():
        training = model.flops_per_token(length).training
        decoding = model.flops_at(length - 1).forward
        state = model.state_bytes(length, element_size(recipe))
        rows.append([name, flops(training), flops(decoding), size(state)])
    title = (
        f"FLOPs per token (training: forward and backward, mean over the context; decoding: the last token) "
        f"and state per sequence ({recipe.train.precision})"
    )
    return title + "\n" + columns(rows, indent="  ")


def batch(model: HybridLM, recipe: Recipe, geometry: Geometry) -> str:
    """Write how a step's batch divides over processes and micro-batches, and the whole run's work."""
    train, context = recipe.train, recipe.data.context
    tokens = train.batch_size * context
    total = tokens * train.steps
    ratio = total / model.num_parameters
    work = model.flops_per_token(context).training * total
    lines = [
        f"{_count(geometry.world_size, 'process', 'es')} / {recipe.parallel.sequence} per sequence = "
        f"{geometry.data_parallel} data-parallel",
        f"{train.batch_size} sequences = {geometry.data_parallel} data-parallel x {geometry.micro_batch} "
        f"micro-batch x {geometry.accumulation} accumulation",
        f"{train.batch_size} sequences x {context:,} tokens = {tokens:,} tokens a step",
        f"{tokens:,} x {train.steps:,} steps = {total:,} tokens ({ratio:.3g} per parameter), "
        f"{flops(work)}FLOPs in all",
    ]
    return "Batch\n" + "\n".join(f"  {line}" for line in lines)


def memory(model: HybridLM, recipe: Recipe, geometry: Geometry) -> str:
    """Write the estimated memory of a process at every ZeRO stage."""
    rows = [["ZeRO", "weights", "gradients", "optimizer", "buffers", "activations", "logits", "total"]]
    for stage in range(4):
        name = f"stage {stage}" + (" *" if stage == recipe.parallel.zero_stage else "")
        if stage == 0 and recipe.train.precision == "bf16":
            rows.append([name, "not offered with bf16", *[""] * 6])
            continue
        needed = memory_estimate(model, recipe, geometry, stage)
        rows.append([name, *map(size, needed), size(needed.total)])
    title = "Memory per process, estimated (activations roughly; * the recipe's stage)"
    return title + "\n" + columns(rows, left={0}, indent="  ")


def communication(model: HybridLM, recipe: Recipe, geometry: Geometry) -> str:
    """Write what processes send each other in a step."""
    stage, ranks = recipe.parallel.zero_stage, geometry.world_size
    title = f"Communication of each process in a step, ZeRO stage {stage}"
    if ranks == 1:
        return title + "\n  none: one process"
    found = zero_exchanges(model, recipe, geometry, stage)
    rows = [["collective", "tensors", "sent"]]
    rows += [[one.what, size(one.payload), size(one.sent)] for one in found]
    rows.append(["all", "", size(sum(one.sent for one in found))])
    text = title + "\n" + columns(rows, left={0}, indent="  ")
    return text if recipe.parallel.sequence == 1 else f"{text}\n\n{_in_sequences(model, recipe, geometry)}"


def _in_sequences(model: HybridLM, recipe: Recipe, geometry: Geometry) -> str:
    ranks = recipe.parallel.sequence
    letters: dict[str, list[LayerBytes]] = {}
    kinds = {spec.letter: spec.kind for spec in model.layers}
    layers = sequence_bytes(model, recipe, geometry)
    for spec, sent in zip(model.layers, layers, strict=True):
        letters.setdefault(spec.letter, []).append(sent)
    rows = [["letter", "kind", "count", "a layer's forward pass", "a layer's step", "all layers' step"]]
    for letter, found in letters.items():
        numbers = found[0].forward, found[0].step, sum(sent.step for sent in found)
        rows.append([letter, kinds[letter], str(len(found)), *(f"{number:,} B" for number in numbers)])
    total = sum(sent.step for sent in layers)
    rows.append(["total", "", str(len(layers)), "", "", f"{total:,} B"])
    passes = "forward twice" if recipe.train.activation_checkpointing else "forward"
    title = (
        f"Sent for the cut by the {ranks} ranks that share a sequence, all together (a step: {passes} and "
        f"backward, {_count(geometry.accumulation, 'micro-batch', 'es')})"
    )
    return title + "\n" + columns(rows, left={0, 1}, indent="  ")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + (plural if number != 1 else "")


def flops(count: float) -> str:
    """Write a count as `1.23 G`."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(count) < 1000 or unit == "E":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def size(count: float) -> str:
    """Write bytes as `1.23 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"

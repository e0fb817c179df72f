"""Learning from a teacher (`train.teacher`, `train.distill`): what each step makes small, stage by stage.

The teacher is a frozen model of its own dtype, whole on every rank; neither engine nor checkpoints know it.
A stage aligns blocks (each is fed with the teacher's hidden states and compared with the teacher's block), or
logits (KL divergence), or learns from text (cross-entropy), or a weighted sum of the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybrid.checkpoint.run import load_model, newest_weights, recorded_recipe, tokenizer_of
from hybrid.data.batch import Batch
from hybrid.distributed.context_parallel import Inputs
from hybrid.errors import TrainError
from hybrid.model import HybridLM
from hybrid.model.head import Loss
from hybrid.recipe.schema import Recipe, StageSection

from .resume import refuse_other_tokenizer


@dataclass(frozen=True)
class Objective:
    """What a step makes small: a weighted sum of losses, each a mean over the counted tokens."""

    stage: StageSection
    z_loss: float = 0.0
    """Weight of the mean of logsumexp(logits)^2, besides."""
    teacher: HybridLM | None = None
    """For stages of hidden and kl."""

    @property
    def resting(self) -> tuple[str, ...]:
        """Name the optimizer's groups that have no gradient and must not decay."""
        return ("embedding", "head") if self.stage.hidden else ()

    def rows(self, batch: Batch) -> Batch:
        """Cut a batch's windows in rows of the stage's context."""
        context = self.stage.context
        if context is None:
            return batch
        if batch.cu_seqlens is None:
            return replace(batch, ids=batch.ids.view(-1, context), labels=batch.labels.view(-1, context))
        cuts = torch.arange(0, batch.ids.shape[1], context, dtype=batch.cu_seqlens.dtype)
        return replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, cuts]).unique())

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Make the student's keyword arguments for this objective, beside the inputs' own."""
        lesson = None
        if self.teacher is not None:
            lesson = self.teacher.teach(
                inputs.ids, cu_seqlens=inputs.cu_seqlens, shard=inputs.shard, streams=self.stage.hidden > 0
            )
        return {"z_loss": self.z_loss, "lesson": lesson}

    def parts(self, out: Loss) -> dict[str, Tensor]:
        """Name the losses that the model has computed: sums over the counted tokens."""
        if out.hidden is not None:
            return {"hidden": out.hidden}
        return {"ce": out.total} | ({} if out.kl is None else {"kl": out.kl})

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Sum the losses by their weights."""
        weights = {name: getattr(self.stage, name) for name in parts}
        return torch.stack([weights[name] * part for name, part in parts.items() if weights[name]]).sum()


CROSS_ENTROPY = Objective(StageSection(ce=1.0))


class Objectives:
    """The objective of every step of a run."""

    def __init__(
        self,
        recipe: Recipe,
        student: HybridLM,
        tokenizer: str,
        device: torch.device,
        step: int,
        say: Callable[[str], None],
    ) -> None:
        """Load the teacher if a step from `step` on needs it; TrainError where it does not fit `student`."""
        self._z_loss, self._say, self._told = recipe.train.z_loss, say, -1
        self._names = list(recipe.train.distill)
        self._stages = list(recipe.train.distill.values()) or [CROSS_ENTROPY.stage]
        lengths = [stage.steps or 0 for stage in self._stages[:-1]]
        self._ends = [*accumulate(lengths), recipe.train.steps]
        self._teacher: HybridLM | None = None
        left = [stage for stage, end in zip(self._stages, self._ends, strict=True) if end > step]
        if any(stage.hidden or stage.kl for stage in left):
            self._teacher = load_teacher(recipe, student, tokenizer, say).to(device)

    def at(self, step: int) -> Objective:
        """Find the objective of a 0-based step; a teacher that is of no more use is given up."""
        number = next(i for i, end in enumerate(self._ends) if step < end)
        stage = self._stages[number]
        if not any(later.hidden or later.kl for later in self._stages[number:]):
            self._teacher = None
        if self._names and self._told != number:
            self._told = number
            weights = {name: getattr(stage, name) for name in ("hidden", "kl", "ce")}
            losses = " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)
            self._say(f"stage {self._names[number]}, to step {self._ends[number]}: {losses}")
        return Objective(stage, self._z_loss, self._teacher if stage.hidden or stage.kl else None)


def load_teacher(recipe: Recipe, student: HybridLM, tokenizer: str, say: Callable[[str], None]) -> HybridLM:
    """Load train.teacher, frozen and in the dtype of its weights, on the CPU.

    Raises TrainError where it has another tokenizer or vocabulary or, to align blocks, other hidden states.
    """
    path, stages = recipe.train.teacher, recipe.train.distill.items()
    assert path is not None
    source = newest_weights(path)
    found = recorded_recipe(source)
    if found is None:
        raise TrainError(
            f"train.teacher={path}: the weights there do not say of which model they are: give a run "
            "directory, or make a model folder with hybrid convert"
        )
    refuse_other_tokenizer("train.teacher", source, tokenizer)
    aligned = [name for name, stage in stages if stage.hidden]
    faults = []
    if found.model.vocab_size != student.vocab_size:
        faults.append(f"model.vocab_size is {found.model.vocab_size} there and {student.vocab_size} here")
    if aligned:
        with torch.device("meta"):
            layers = len(HybridLM.from_recipe(found).layers)
        sizes = {"hidden_size": (found.model.hidden_size, student.section.hidden_size)}
        sizes["layers"] = (layers, len(student.layers))
        faults += [
            f"{name} is {there} there and {here} here, which stage {aligned[0]!r} aligns"
            for name, (there, here) in sizes.items()
            if there != here
        ]
        if not any(p.requires_grad for block in student.blocks for p in block.parameters()):
            faults.append(f"train.only trains no block, which stage {aligned[0]!r} aligns")
    if faults:
        raise TrainError(f"train.teacher={path} does not fit this model: {'; '.join(faults)}")
    teacher = load_model(source, found, own_dtype=True).eval().requires_grad_(False)
    kind = f"{teacher.num_parameters:,} parameters, {teacher.head.weight.dtype}"
    say(f"teacher from {source}: {found.model.pattern}, {kind}")
    if tokenizer_of(source) is None:
        say(f"its tokenizer is not known: {recipe.data.folder} must hold the ids of its own")
    return teacher

"""A stored case's whole model, through the converter of the paper's code: logits, loss and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.convert.kvm_paper import from_upstream, model_section, to_upstream
from hybrid.model import HybridLM
from hybrid.recipe import layer_specs

from .vectors import Case, CaseError, Tensors, below, gradient


def run_model(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Compute `logits`, `decode_logits` token by token after a first call, `loss`, and all gradients."""
    parameters, gradients = ("state_dict/", "grad/") if case.level else ("param.", "grad.param.")
    model = _model(case, below(parameters, tensors))
    ids, labels = (tensors[name].long() for name in ("input_ids", "labels"))
    with torch.no_grad():
        prefill = case.entry.get("prefill_len", max(1, ids.shape[1] // 2))
        found = {"logits": model(ids)[0], "decode_logits": _decode(model, ids, prefill)}
    loss = model(ids, labels=labels)
    mean = loss.total / loss.tokens
    mean.backward()
    ours = to_upstream({name: gradient(parameter) for name, parameter in model.named_parameters()})
    return found | {"loss": mean} | {f"{gradients}{name}": x for name, x in ours.items()}


def _model(case: Case, stored: Tensors) -> HybridLM:
    if not stored:
        raise CaseError("the case has no parameters")
    section = model_section(case.config)
    model = HybridLM(section, layer_specs(section))
    model.load_state_dict(from_upstream(stored, model.state_dict()))
    like = next(iter(stored.values()))
    return model.to(like.device, like.dtype)


def _decode(model: HybridLM, ids: Tensor, prefill: int) -> Tensor:
    logits, state = model(ids[:, :prefill])
    rows = [logits]
    for token in ids[:, prefill:].split(1, 1):
        logits, state = model(token, state)
        rows.append(logits)
    return torch.cat(rows, 1)

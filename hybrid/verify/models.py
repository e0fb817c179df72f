"""Whole models against stored logits, loss and gradients, through the converter of the paper's code."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.convert.kvm_paper import from_upstream, model_section, to_upstream
from hybrid.model import HybridLM
from hybrid.recipe.letters import layer_specs

from .compare import Allowed, CaseResult, Setting, fixed_limits, gradient, scaled_limits
from .vectors import Case, CaseError, Tensors, below

LIMITS = {"logits": 1e-5, "decode": 1e-5, "loss": 1e-5, "grad": 1e-6}
LIMITS_BF16 = {"logits": 5e-2, "decode": 5e-2, "loss": 1e-2, "grad": 5e-3}


class Names(NamedTuple):
    """What an index calls things."""

    parameters: str
    gradients: str


def check_model(case: Case, result: CaseResult) -> None:
    """A model of `index.json`, whose decoding has a stored result and length of the first call."""
    tensors = case.tensors()
    allowed = fixed_limits(LIMITS, LIMITS_BF16, result.setting)
    decoded = "decode_logits", tensors["decode_logits"], case.entry["prefill_len"]
    _check(case, tensors, result, allowed, Names("state_dict/", "grad/"), *decoded)


def check_mixer_model(case: Case, result: CaseResult) -> None:
    """A model of `mixers_index.json`. Decoding after half of the tokens must give the logits of one pass."""
    tensors = case.tensors()
    allowed = scaled_limits(case, tensors, result.setting)
    prefill = max(1, tensors["input_ids"].shape[1] // 2)
    decoded = "logits when decoding", tensors["logits"], prefill
    _check(case, tensors, result, allowed, Names("param.", "grad.param."), *decoded)


def _check(
    case: Case,
    tensors: Tensors,
    result: CaseResult,
    allowed: Allowed,
    names: Names,
    decoded_name: str,
    decoded: Tensor,
    prefill: int,
) -> None:
    """Logits, decoding token by token after a first call of `prefill` tokens, loss, gradients."""
    setting = result.setting
    model = _model(case, below(names.parameters, tensors), setting)
    ids, labels = (setting.given(tensors[name]).long() for name in ("input_ids", "labels"))
    with torch.no_grad():
        result.compare("logits", "logits", model(ids)[0], tensors["logits"], allowed)
        result.compare("decode", decoded_name, _decode(model, ids, prefill), decoded, allowed)
    loss = model(ids, labels=labels)
    mean = loss.total / loss.tokens
    mean.backward()
    result.compare("loss", "loss", mean.detach().reshape(1), tensors["loss"], allowed)
    ours = to_upstream({name: gradient(parameter) for name, parameter in model.named_parameters()})
    for name, theirs in below(names.gradients, tensors).items():
        if name not in ours:
            result.fail(f"{names.gradients}{name} belongs to no parameter")
            continue
        result.compare("grad", f"{names.gradients}{name}", ours[name], theirs, allowed)


def _model(case: Case, stored: Tensors, setting: Setting) -> HybridLM:
    if not stored:
        raise CaseError("the case has no parameters")
    section = model_section(case.config)
    model = HybridLM(section, layer_specs(section))
    model.load_state_dict(from_upstream(stored, model.state_dict()))
    return model.to(setting.device, torch.bfloat16 if setting.rounded else next(iter(stored.values())).dtype)


def _decode(model: HybridLM, ids: Tensor, prefill: int) -> Tensor:
    logits, state = model(ids[:, :prefill])
    rows = [logits]
    for position in range(prefill, ids.shape[1]):
        logits, state = model(ids[:, position : position + 1], state)
        rows.append(logits)
    return torch.cat(rows, 1)

"""The KVM operator against stored outputs, states, routes and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..convert.kvm_paper import kvm_options
from ..layers import MixerState
from ..layers.kvm.attention import Budget, KVMSpec, Routes, kvm_attention
from .compare import CaseResult, Setting, fixed_limits, gradient
from .vectors import Case, Tensors, below

LIMITS = {"y": 1e-5, "state": 1e-5, "grad": 5e-5}
LIMITS_BF16 = {"y": 2e-2, "state": 2e-2, "grad": 1e-1}
"""The operator is given the stored routes in bf16, as rounded keys may choose others."""

KIND_INITIAL, KIND_APPENDED, KIND_MERGED = 0, 1, 2


def check_core(case: Case, result: CaseResult) -> None:
    """Output, final state, routes, and the gradients of sum(y * w)."""
    tensors, setting = case.tensors(), result.setting
    spec = kvm_spec(case.config, case.entry.get("variant", "reference"))
    allowed = fixed_limits(LIMITS, LIMITS_BF16, setting)
    inputs = {name: setting.given(tensors[name]).requires_grad_() for name in below("grad.", tensors)}
    heads = {name: t.transpose(1, 2) for name, t in inputs.items() if t.ndim == 4}  # [B, T, H, D]
    y, state, routes = kvm_attention(
        heads["q"],
        heads["k"],
        heads["v"],
        heads["merge_gate"].squeeze(-1),
        spec=spec,
        norm_weight=inputs["ln_s_k.weight"],
        norm_bias=inputs["ln_s_k.bias"],
        front_temperature=inputs.get("front_head_temp"),
        state_temperature=inputs.get("state_head_temp"),
        routes=_stored_routes(tensors, setting) if setting.rounded else None,
    )
    y = y.transpose(1, 2)
    (y * setting.given(tensors["w"])).sum().backward()
    result.compare("y", "y", y, tensors["y"], allowed)
    for name, ours in _operator_state(state).items():
        result.compare("state", name, ours, tensors[name], allowed)
    if not setting.rounded:
        for name, ours in _route_tensors(spec, routes, tensors["q"].shape[2]).items():
            result.compare("route", name, ours, tensors[name], allowed)
    for name, given in inputs.items():
        result.compare("grad", f"grad.{name}", gradient(given), tensors[f"grad.{name}"], allowed)


def kvm_spec(config: Mapping[str, Any], variant: str) -> KVMSpec:
    """The operator that a core case's config and variant ask for."""
    options = kvm_options(config)
    saturation = options.get("budget_saturation")
    budget = Budget(
        options["budget"],
        options["budget_minimum"],
        options.get("budget_factor", 1.0),
        options.get("budget_exponent", 0.5),
        saturation,
        options["budget_round"],
        options["budget_max_chunks"],
    )
    counts = "counts" if variant == "true_counts" else "reference_counts"
    return KVMSpec(
        chunk=config["chunk_len"],
        window_chunks=config["n_bswa_chunks"],
        rotary_dim=config["rope_partial_dim"],
        sinks=config["sink_len"],
        budget=budget,
        values="radius" if options["values"] == "radius" else counts,
        **{name: options[name] for name in ("gate_keys", "gate_values", "gate_appends", "gate_initial")},
    )


def _operator_state(state: MixerState) -> dict[str, Tensor]:
    names = {"key_sums": "state.s_k", "value_sums": "state.s_v", "radius": "state.s_vlen"}
    return {theirs: state.tensors()[ours].detach() for ours, theirs in names.items()}


def _stored_routes(tensors: Tensors, setting: Setting) -> Routes:
    covered = int((tensors["route.update"] >= 0).sum())
    slot, kind = (setting.given(tensors[f"route.{name}"])[..., :covered] for name in ("slot", "kind"))
    return Routes(slot, kind != KIND_MERGED)


def _route_tensors(spec: KVMSpec, routes: Routes, tokens: int) -> dict[str, Tensor]:
    """Routes in the vectors' form: int32 per token, -1 for tokens that are not in the state."""
    slot = torch.full((*routes.slot.shape[:2], tokens), -1, dtype=torch.int32)
    kind, update = slot.clone(), torch.full((tokens,), -1, dtype=torch.int32)
    covered = routes.slot.shape[2]
    slot[..., :covered] = routes.slot
    kind[..., :covered] = torch.where(routes.founds, KIND_APPENDED, KIND_MERGED)
    kind[..., : spec.chunk].clamp_(max=KIND_INITIAL)
    update[:covered] = torch.arange(covered) // spec.chunk  # update n absorbs chunk n
    rows, before = [], spec.chunk
    for number in range(1, -(-covered // spec.chunk)):
        first, last = number * spec.chunk, (number + 1) * spec.chunk
        after = spec.growth(before, number)
        rows.append((first, last, last + (spec.window_chunks - 1) * spec.chunk, before, after))
        before = after
    updates = torch.tensor(rows, dtype=torch.int32).reshape(-1, 5)
    return {"route.slot": slot, "route.kind": kind, "route.update": update, "updates": updates}

"""The KVM operator of a stored case: outputs, state, routes and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.convert.kvm_paper import kvm_options
from hybrid.layers import mixer_class
from hybrid.layers.kvm.attention import KVMSpec, Routes, kvm_attention

from .vectors import Case, Tensors, below, gradient

KIND_INITIAL, KIND_APPENDED, KIND_MERGED = 0, 1, 2


def run_kvm(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Compute `y`, `state.*`, routes, and the gradients of sum(y * w). In bf16 stored routes are replayed."""
    spec = kvm_spec(case)
    inputs = {name: tensors[name].requires_grad_() for name in below("grad.", tensors)}
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
        routes=_stored_routes(tensors) if tensors["q"].dtype == torch.bfloat16 else None,
    )
    y = y.transpose(1, 2)
    (y * tensors["w"]).sum().backward()
    names = {"key_sums": "state.s_k", "value_sums": "state.s_v", "radius": "state.s_vlen"}
    found = {"y": y} | {theirs: state.tensors()[ours] for ours, theirs in names.items()}
    found |= _route_tensors(spec, routes, tensors["q"].shape[2])
    return found | {f"grad.{name}": gradient(given) for name, given in inputs.items()}


def kvm_spec(case: Case) -> KVMSpec:
    """Build the operator's settings from a case's config and variant."""
    config, options = case.config, kvm_options(case.config)
    if options["values"] != "radius" and case.entry.get("variant") == "true_counts":
        options["values"] = "counts"
    chunks = {"chunk": "chunk_len", "window_chunks": "n_bswa_chunks", "sinks": "sink_len"}
    options |= {ours: config[theirs] for ours, theirs in chunks.items()}
    return mixer_class("kvm").Options(**options).spec(config["rope_partial_dim"])


def _stored_routes(tensors: Tensors) -> Routes:
    covered = int((tensors["route.update"] >= 0).sum())
    slot, kind = (tensors[f"route.{name}"][..., :covered] for name in ("slot", "kind"))
    return Routes(slot, kind != KIND_MERGED)


def _route_tensors(spec: KVMSpec, routes: Routes, tokens: int) -> dict[str, Tensor]:
    """Write routes in the vectors' form: int32 per token, -1 for tokens that are not in the state."""
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

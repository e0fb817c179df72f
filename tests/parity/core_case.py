"""One stored case of the operator (conformance README, core level) computed by `kvm_attention`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid.layers.kvm.attention import Budget, KVMSpec, Routes, kvm_attention
from hybrid.layers.kvm.spec import updates

TEMPERATURES = {"front_head_temp": "front_temperature", "state_head_temp": "state_temperature"}
INPUTS = ("q", "k", "v", "merge_gate", "ln_s_k.weight", "ln_s_k.bias", *TEMPERATURES)


def spec_of(config: Mapping[str, Any], variant: str = "reference") -> KVMSpec:
    mode = {"kvm_saturation": "saturation"}.get(config["state_budget_mode"], config["state_budget_mode"])
    budget = Budget(
        mode,
        config["state_min_len"],
        config["state_growth_factor"],
        config["state_growth_exponent"],
        config["state_saturation_n"],
        config["state_round_down"],
        config["n_max_d_chunks"],
    )
    counts = "counts" if variant == "true_counts" else "reference_counts"
    return KVMSpec(
        config["chunk_len"],
        config["n_bswa_chunks"],
        config["rope_partial_dim"],
        config["sink_len"],
        budget,
        gate_keys=bool(config["kvm_use_merge_gate_keys"]),
        gate_values=bool(config["kvm_use_merge_gate_values"]),
        gate_appends=bool(config["kvm_apply_merge_gate_to_appends"]),
        gate_initial=bool(config["kvm_apply_merge_gate_to_initial_state"]),
        values="radius" if config["kvm_use_vlens"] else counts,
    )


def core_case(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], variant: str = "reference"
) -> dict[str, Tensor]:
    """The case's results under the README's names, from its inputs."""
    spec = spec_of(config, variant)
    leaves = {name: tensors[name].clone().requires_grad_() for name in INPUTS if name in tensors}
    q, k, v, gate = (leaves[name].transpose(1, 2) for name in INPUTS[:4])
    options = {ours: leaves[theirs] for theirs, ours in TEMPERATURES.items() if theirs in leaves}
    y, state, routes = kvm_attention(
        q,
        k,
        v,
        gate[..., 0],
        spec=spec,
        norm_weight=leaves[INPUTS[4]],
        norm_bias=leaves[INPUTS[5]],
        **options,
    )
    y = y.transpose(1, 2)
    (y * tensors["w"]).sum().backward()
    sums = state.sums()
    found = {"y": y, "state.s_k": sums.keys, "state.s_v": sums.values, "state.s_vlen": sums.radius}
    found |= {f"grad.{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in found.items()} | _routes(spec, routes, k.shape[1])


def _routes(spec: KVMSpec, routes: Routes, tokens: int) -> dict[str, Tensor]:
    slots = routes.slot
    slot, kind = (slots.new_full((*slots.shape[:2], tokens), -1) for _ in range(2))
    update = slots.new_full((tokens,), -1)
    slot[..., : slots.shape[2]] = slots
    kind[..., : slots.shape[2]] = torch.where(routes.founds, 1, 2)
    rows = []
    chunk = spec.chunk
    last = -(-tokens // chunk) - 1 - spec.window_chunks
    for step in updates(spec, [max(0, last)]):
        span = slice(step.number * chunk, min((step.number + 1) * chunk, tokens))
        update[span] = step.number
        if step.number == 0:
            kind[..., span] = 0
        else:
            context = (step.number + spec.window_chunks) * chunk
            rows.append([span.start, span.stop, context, step.before, step.after])
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 5)
    return {"route.slot": slot, "route.kind": kind, "route.update": update, "updates": table}

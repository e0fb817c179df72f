"""Compare this machine's results with stored test vectors: the operator's and whole models'.

A folder of vectors has an `index.json` (cases of level "core", the KVM operator, and "model") or a
`mixers_index.json` (other mixers), or both; each case is one safetensors file that the index names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .convert import NotSupported
from .convert.kvm_paper import from_upstream, kvm_options, model_section, upstream_name
from .layer_table import layer_specs
from .layers.base import MixerState
from .layers.kvm.attention import KVMSpec, Routes, kvm_attention
from .layers.kvm.budget import Budget
from .model import HybridLM

INDEXES = ("index.json", "mixers_index.json")

TOLERANCES = {
    "core": {"y": 1e-5, "state": 1e-5, "grad": 5e-5, "route": 0.0},
    "model": {"logits": 1e-5, "decode": 1e-5, "loss": 1e-5, "grad": 1e-6},
}
"""Level -> group of tensors -> largest absolute error in fp32; routes must be equal."""

TOLERANCES_BF16 = {
    "core": {"y": 2e-2, "state": 2e-2, "grad": 1e-1},
    "model": {"logits": 5e-2, "decode": 5e-2, "loss": 1e-2, "grad": 5e-3},
}
"""The same for bf16 inputs and weights, in units of the tensor's largest entry where that is above 1. The
operator is given the stored routes, as rounded keys may choose others."""

GROUPS = ("y", "logits", "decode", "loss", "state", "route", "grad")

KIND_INITIAL, KIND_APPENDED, KIND_MERGED = 0, 1, 2

Tensors = Mapping[str, Tensor]


class VerifyError(ValueError):
    """A folder without readable vectors; the message names the file."""


class CaseError(ValueError):
    """A case whose file is missing, damaged or not what the index says."""


@dataclass(frozen=True)
class Setting:
    """Where and how precisely to compute."""

    device: str = "cpu"
    precision: str = "fp32"
    """fp32 or bf16."""

    @property
    def rounded(self) -> bool:
        return self.precision == "bf16"

    def given(self, stored: Tensor) -> Tensor:
        """A copy of a stored tensor to compute with."""
        dtype = torch.bfloat16 if self.rounded and stored.is_floating_point() else stored.dtype
        return stored.to(self.device, dtype, copy=True)


@dataclass
class CaseResult:
    """What became of one case."""

    name: str
    status: str = "pass"
    """pass, fail or not covered."""
    errors: dict[str, float] = field(default_factory=dict)
    """Group -> largest absolute difference; for routes the number of wrong entries."""
    reason: str = ""
    """Why it failed or is not covered."""
    setting: Setting = Setting()

    def note(self, group: str, name: str, error: float, limit: float) -> None:
        """Take in one tensor's error; NaN counts as infinite."""
        error = math.inf if math.isnan(error) else error
        self.errors[group] = max(error, self.errors.get(group, 0.0))
        if error > limit:
            self.fail(f"{name} is off by {error:.3g} (allowed {limit:g})")

    def fail(self, reason: str) -> None:
        """The first reason is kept: later ones mostly follow from it."""
        self.reason = self.reason or reason
        self.status = "fail"


def verify(folder: str | os.PathLike[str], setting: Setting = Setting()) -> int:
    """Check every case of `folder` and print a table; 0 when some passed and none failed, else 1."""
    results = check_folder(folder, setting)
    print(table(results))
    statuses = [result.status for result in results]
    return 0 if "pass" in statuses and "fail" not in statuses else 1


def check_folder(folder: str | os.PathLike[str], setting: Setting = Setting()) -> list[CaseResult]:
    """One result per case of the folder's index files. VerifyError without one that is readable."""
    root = Path(folder)
    if not root.is_dir():
        raise VerifyError(f"{root}: no such folder")
    found = [root / name for name in INDEXES if (root / name).exists()]
    if not found:
        raise VerifyError(f"{root}: no vectors here (neither {' nor '.join(INDEXES)})")
    return [_check_case(root, name, case, setting) for index in found for name, case in _cases(index)]


def table(results: list[CaseResult]) -> str:
    """A line per case with the largest error of each group of tensors, and the counts."""
    groups = [group for group in GROUPS if any(group in result.errors for result in results)]
    width = max([4, *(len(result.name) for result in results)])
    lines = [f"{'case':{width}}  result       " + "".join(f"{group:>9}" for group in groups)]
    for result in results:
        line = f"{result.name:{width}}  {result.status:11}  "
        line += "".join(f"{_shown(result.errors.get(group)):>9}" for group in groups)
        lines.append(f"{line}  {result.reason}".rstrip())
    counts = {status: sum(r.status == status for r in results) for status in ("pass", "fail", "not covered")}
    lines.append("")
    lines.append(f"{counts['pass']} passed, {counts['fail']} failed, {counts['not covered']} not covered")
    if not counts["pass"]:
        lines.append("nothing was verified")
    return "\n".join(lines)


def _shown(error: float | None) -> str:
    if error is None:
        return "-"
    return "0" if error == 0 else f"{error:.1e}"


def _cases(index: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        cases = json.loads(index.read_text(encoding="utf-8"))["cases"]
        if isinstance(cases, dict):
            return [(str(name), dict(case)) for name, case in cases.items()]
        return [(str(case.get("file", "?")).removesuffix(".safetensors"), dict(case)) for case in cases]
    except OSError as error:
        raise VerifyError(f"{index}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise VerifyError(f"{index}: not valid JSON (line {error.lineno}: {error.msg})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = type(error).__name__
        raise VerifyError(f"{index}: has no readable list of cases ({kind}: {error})") from error


def _check_case(root: Path, name: str, case: dict[str, Any], setting: Setting) -> CaseResult:
    result = CaseResult(name, setting=setting)
    level = case.get("level")
    if level not in CHECKS:
        result.status = "not covered"
        result.reason = f"level {level!r}" if level else f"no check for mixers of kind {case.get('kind')!r}"
        return result
    try:
        CHECKS[level](_load(root, case), case, result)
    except NotSupported as error:
        result.status, result.reason = "not covered", str(error)
    except ValueError as error:  # of this module, the converter or a layer: all in words
        result.fail(str(error).replace("\n", " "))
    except KeyError as error:
        result.fail(f"the case has no {error}")
    except Exception as error:  # one broken layer must not hide what the other cases show
        result.fail(f"{type(error).__name__}: {error}".splitlines()[0])
    return result


def _load(root: Path, case: dict[str, Any]) -> dict[str, Tensor]:
    """The case's tensors, which must be those that the index lists."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = root / case["file"]
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise CaseError(f"{path.name} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CaseError(f"{path.name} is damaged ({error})") from error
    for name, (dtype, shape) in case["tensors"].items():
        if name not in tensors:
            raise CaseError(f"{path.name} has no tensor '{name}'")
        found = str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)
        if found != (dtype, list(shape)):
            raise CaseError(f"tensor '{name}' is {found[0]} {found[1]}, the index says {dtype} {shape}")
    return tensors


def _compare(result: CaseResult, level: str, group: str, name: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        result.fail(f"{name} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        return
    ours, rounded = ours.to(theirs.device), result.setting.rounded
    if group == "route":
        error = float((ours != theirs).sum())
    else:
        error = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
        if rounded and ours.numel():
            error /= max(1.0, theirs.abs().max().item())
    result.note(group, name, error, (TOLERANCES_BF16 if rounded else TOLERANCES)[level][group])


# Models


def _check_model(tensors: Tensors, case: dict[str, Any], result: CaseResult) -> None:
    """Logits, loss, gradients, and decoding token by token after a first call of `prefill_len`."""
    section = model_section(case["config"])
    setting = result.setting
    model = HybridLM(section, layer_specs(section))
    stored = {name: tensors[f"state_dict/{name}"] for name in _below("state_dict/", tensors)}
    model.load_state_dict(from_upstream(stored, model.state_dict()))
    model.to(setting.device, torch.bfloat16 if setting.rounded else torch.float32)
    ids, labels = (setting.given(tensors[name]).long() for name in ("input_ids", "labels"))
    with torch.no_grad():
        _compare(result, "model", "logits", "logits", model(ids)[0], tensors["logits"])
        decoded = _decode(model, ids, case["prefill_len"])
        _compare(result, "model", "decode", "decode_logits", decoded, tensors["decode_logits"])
    loss = model(ids, labels=labels)
    mean = loss.total / loss.tokens
    mean.backward()
    _compare(result, "model", "loss", "loss", mean.detach().reshape(1), tensors["loss"])
    names = {upstream_name(name): parameter for name, parameter in model.named_parameters()}
    for name in _below("grad/", tensors):
        if name not in names:
            result.fail(f"grad/{name} belongs to no parameter")
            continue
        theirs = tensors[f"grad/{name}"]
        _compare(result, "model", "grad", f"grad/{name}", _grad(names[name]).reshape(theirs.shape), theirs)


def _decode(model: HybridLM, ids: Tensor, prefill: int) -> Tensor:
    logits, state = model(ids[:, :prefill])
    rows = [logits]
    for position in range(prefill, ids.shape[1]):
        logits, state = model(ids[:, position : position + 1], state)
        rows.append(logits)
    return torch.cat(rows, 1)


def _below(prefix: str, tensors: Tensors) -> list[str]:
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


# The KVM operator


def _check_core(tensors: Tensors, case: dict[str, Any], result: CaseResult) -> None:
    """Output, final state, routes, and the gradients of sum(y * w)."""
    config = case["config"]
    spec = kvm_spec(config, case.get("variant", "reference"))
    setting = result.setting
    inputs = {name: setting.given(tensors[name]).requires_grad_() for name in _below("grad.", tensors)}
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
    _compare(result, "core", "y", "y", y.detach(), tensors["y"])
    for name, ours in _operator_state(state).items():
        _compare(result, "core", "state", name, ours, tensors[name])
    if not setting.rounded:
        for name, ours in _route_tensors(spec, routes, tensors["q"].shape[2]).items():
            _compare(result, "core", "route", name, ours, tensors[name])
    for name, given in inputs.items():
        _compare(result, "core", "grad", f"grad.{name}", _grad(given), tensors[f"grad.{name}"])


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


CHECKS: dict[str, Callable[[dict[str, Tensor], dict[str, Any], CaseResult], None]] = {
    "core": _check_core,
    "model": _check_model,
}

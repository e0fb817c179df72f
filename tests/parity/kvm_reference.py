"""KVM attention as the plain recurrence: chunk by chunk, one update after the other, autograd through it all.

Written from the spec (sections 2 to 5) without regard to speed or to the operator; any dtype, one sequence
after the other, one head after the other.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Reference:
    y: Tensor  # [B, T, H, D]
    key_sums: Tensor  # [B, G, S, D]
    value_sums: Tensor  # [B, G, S, D]
    radius: Tensor  # [B, G, S]
    slot: Tensor  # [B, G, T]; -1: not in the state
    founds: Tensor  # [B, G, T]


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def reference(
    q, k, v, gate, spec, weight, bias, front=None, back=None, state_bias=None, replay=None
) -> Reference:
    """Arguments as of `kvm_attention`; `replay`: slots and founders `[B, G, A]` instead of own decisions."""
    heads, groups = q.shape[2], k.shape[2]
    front, back = (torch.ones(heads, dtype=q.dtype) if t is None else t for t in (front, back))
    state_bias = torch.zeros(heads, dtype=q.dtype) if state_bias is None else state_bias
    gate = torch.ones_like(k[..., 0]) if gate is None else gate
    outs, sums = [], []
    for b in range(q.shape[0]):
        for g in range(groups):
            own = range(g * heads // groups, (g + 1) * heads // groups)
            given = None if replay is None else [x[b, g] for x in replay]
            head = Head(spec, k[b, :, g], v[b, :, g], gate[b, :, g], weight, bias, given)
            outs += head.run([(q[b, :, h], front[h], back[h], state_bias[h]) for h in own])
            sums.append(head)
    shape = (q.shape[0], groups)
    stacked = [torch.stack([getattr(s, n) for s in sums]) for n in ("s_k", "s_v", "r", "slot", "founds")]
    y = torch.stack(outs).unflatten(0, (q.shape[0], heads)).transpose(1, 2)
    return Reference(y, *(x.unflatten(0, shape) for x in stacked))


class Head:
    """The state of one key/value head of one sequence."""

    def __init__(self, spec, k, v, gate, weight, bias, given):
        self.spec, self.k, self.v, self.gate, self.given = spec, k, v, gate, given
        self.ln = lambda x: norm(x, weight, bias)
        zeroed = torch.cat((torch.zeros_like(k[:, : spec.rotary_dim]), k[:, spec.rotary_dim :]), 1)
        self.prepared = self.ln(zeroed)
        self.slot = torch.full((len(k),), -1)
        self.founds = torch.zeros(len(k), dtype=torch.bool)

    def run(self, queries):
        """Outputs `[T, D]` of the query heads that read this key/value head."""
        spec, tokens = self.spec, len(self.k)
        chunk, window = spec.chunk, spec.window_chunks
        self.start(min(tokens, chunk))
        rows = [[] for _ in queries]
        for c in range(-(-tokens // chunk)):
            if c > window:
                self.update(c - window, c * chunk)
            for t in range(c * chunk, min((c + 1) * chunk, tokens)):
                for row, (q, *of_head) in zip(rows, queries, strict=True):
                    begin = max(0, c + 1 - window) * chunk
                    row.append(self.attend(t, begin, c >= window, q[t], *of_head))
        return [torch.stack(row) for row in rows]

    def start(self, count):
        gate = self.gate[:count, None] if self.spec.gate_initial else 1
        self.s_k, self.s_v = self.prepared[:count] * gate, self.v[:count] * gate
        ones = torch.ones(count, dtype=self.v.dtype)
        self.r = self.v[:count].norm(dim=-1) if self.spec.values == "radius" else ones
        self.slot[:count] = torch.arange(count)
        self.founds[:count] = True

    def attend(self, t, begin, with_state, q, front, back, state_bias):
        keys, values = self.k[begin : t + 1] * front, self.v[begin : t + 1]
        if with_state:
            read = self.s_v / self.r[:, None]
            if self.spec.values == "radius":
                read = F.normalize(self.s_v, dim=-1, eps=1e-12) * self.r[:, None]
            keys, values = torch.cat((self.ln(self.s_k) * back, keys)), torch.cat((read, values))
        logits = keys @ q / math.sqrt(len(q))
        if with_state:
            slots = len(self.s_k)
            logits = torch.cat((logits[:slots] + state_bias, logits[slots:]))
        return torch.softmax(logits, 0) @ values

    def update(self, number, context):
        spec = self.spec
        tokens = range(number * spec.chunk, (number + 1) * spec.chunk)
        size = len(self.s_k)
        wanted = min(budget(spec.budget, context), tokens.stop)
        if spec.budget.max_chunks is not None:
            wanted = min(wanted, spec.chunk * spec.budget.max_chunks)
        count = min(max(wanted, size) - size, spec.chunk)
        appended = self.appended(tokens, count)
        gates = [flag and spec.gate_appends for flag in (spec.gate_keys, spec.gate_values)]
        for j in appended:
            key, value = self.weighted(j, *gates)
            radius = value.norm() if spec.values == "radius" else torch.ones((), dtype=value.dtype)
            self.s_k = torch.cat((self.s_k, key[None]))
            self.s_v = torch.cat((self.s_v, value[None]))
            self.r = torch.cat((self.r, radius[None]))
            self.slot[j], self.founds[j] = len(self.s_k) - 1, True
        self.merge([j for j in tokens if j not in appended])

    def appended(self, tokens, count):
        if self.given is not None:
            return [j for j in tokens if self.given[1][j]]
        if count == len(tokens):
            return list(tokens)
        read = self.ln(self.s_k).detach()
        novelty = {j: (read @ self.prepared[j].detach()).max().item() for j in tokens}
        return sorted(sorted(tokens, key=novelty.__getitem__)[:count])

    def merge(self, tokens):
        """All against the state as it is now."""
        spec = self.spec
        read = self.ln(self.s_k).detach()[spec.sinks :]
        moves = {}
        for j in tokens:
            key = self.weighted(j, spec.gate_keys, False)[0].detach()
            best = int((read @ key).argmax()) + spec.sinks
            moves[j] = best if self.given is None else int(self.given[0][j])
        for j, slot in moves.items():
            key, value = self.weighted(j, spec.gate_keys, spec.gate_values)
            at = F.one_hot(torch.tensor(slot), len(self.s_k)).to(key.dtype)
            self.s_k = self.s_k + at[:, None] * key
            self.s_v = self.s_v + at[:, None] * value
            if spec.values == "counts":
                self.r = self.r + at
            self.slot[j] = slot
        if spec.values == "reference_counts":
            self.r = self.r + 1

    def weighted(self, j, gate_key, gate_value):
        gate = self.gate[j]
        return self.prepared[j] * (gate if gate_key else 1), self.v[j] * (gate if gate_value else 1)


def budget(budget, t):
    if budget.mode == "fixed":
        return budget.minimum
    if budget.mode == "power_law":
        slots = math.floor(budget.factor * t**budget.exponent)
    else:
        slots = math.floor(budget.saturation * t / (budget.saturation + t))
    return max(budget.minimum, slots // budget.round_to * budget.round_to)

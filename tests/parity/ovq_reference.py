"""OVQ attention head by head and token by token, from its definition; nothing of the package's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    y: Tensor  # [B, T, H, D]
    slots: Tensor  # int64 [B, H, A], of the tokens in complete chunks
    keys: Tensor  # [B, H, M, D], centroids after the last complete chunk
    values: Tensor
    counts: Tensor  # [B, H, M, 1]


def sizes(tokens: int, chunk: int, limit: int) -> list[int]:
    """N_0, N_1, ... up to the last, perhaps partial, chunk: the schedule as the public code computes it."""
    found = [0]
    for c in range(1, -(-tokens // chunk) + 1):
        t = min(tokens, c * chunk)
        found.append(min(limit, max(found[-1], math.floor(t * limit / (t + limit)))))
    return found


def reference(q: Tensor, k: Tensor, v: Tensor, chunk: int, limit: int, slots: Tensor | None = None) -> Result:
    """`q, k, v` `[B, T, H, D]`, normalised and scaled; `slots`: choices to take instead of making them."""
    batch, _, heads, _ = q.shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            given = None if slots is None else slots[b, h]
            rows.append(_head(q[b, :, h], k[b, :, h], v[b, :, h], chunk, limit, given))
    y, chosen, keys, values, counts = (
        torch.stack(x).unflatten(0, (batch, heads)) for x in zip(*rows, strict=True)
    )
    return Result(y.transpose(1, 2), chosen, keys, values, counts)


def _head(
    q: Tensor, k: Tensor, v: Tensor, chunk: int, limit: int, given: Tensor | None
) -> tuple[Tensor, ...]:
    """One head `[T, D]`. A centroid is the list of the tokens in it."""
    tokens = len(q)
    members: list[list[int]] = [[] for _ in range(limit)]
    schedule = sizes(tokens, chunk, limit)
    outs, chosen = [], []
    for c, start in enumerate(range(0, tokens, chunk)):
        size, end = schedule[c], min(start + chunk, tokens)
        for i in range(start, end):
            logits = [q[i] @ _mean(k, members[j]) + math.log(len(members[j])) for j in range(size)]
            logits += [q[i] @ k[m] for m in range(start, i + 1)]
            values = [_mean(v, members[j]) for j in range(size)] + [v[m] for m in range(start, i + 1)]
            outs.append(torch.softmax(torch.stack(logits), 0) @ torch.stack(values))
        if end - start < chunk:
            break
        new = _size_after(c + 1, chunk, limit) - size
        if given is None:
            slot = _choose(
                [k[i] for i in range(start, end)], [_mean(k, members[j]) for j in range(size)], new
            )
        else:
            slot = given[start:end].tolist()
        for i, j in zip(range(start, end), slot, strict=True):
            members[j].append(i)
        chosen += slot
    keys, values = (torch.stack([_mean(x, m) for m in members]) for x in (k, v))
    counts = torch.tensor([[float(len(m))] for m in members], dtype=q.dtype)
    return torch.stack(outs), torch.tensor(chosen, dtype=torch.int64), keys, values, counts


def _size_after(chunks: int, chunk: int, limit: int) -> int:
    return sizes(chunks * chunk, chunk, limit)[-1]


def _mean(x: Tensor, members: list[int]) -> Tensor:
    return x[members].mean(0) if members else torch.zeros_like(x[0])


def _choose(keys: list[Tensor], known: list[Tensor], new: int) -> list[int]:
    if not known:
        slot = [0] * len(keys)
        others = sorted(range(1, len(keys)), key=lambda i: float(keys[i].detach() @ keys[0].detach()))
        for name, i in enumerate(others[: max(new - 1, 0)], 1):
            slot[i] = name
        return slot
    scores = [[float(key.detach() @ centre.detach()) for centre in known] for key in keys]
    slot = [row.index(max(row)) for row in scores]
    least = sorted(range(len(keys)), key=lambda i: max(scores[i]))
    for name, i in enumerate(least[:new], len(known)):
        slot[i] = name
    return slot


def project(x: Tensor, p: Mapping[str, Tensor], heads: int, first: Tensor | None) -> tuple[Tensor, ...]:
    """The layer's q, k, v `[B, T, H, D]` from parameters by name; `first`: shared values, if any."""
    q, k, v = (x @ p[f"c_{name}.weight"].T for name in "qkv")
    if first is not None:
        gate = p["v_gate0"].flatten() + x @ p["v_gate1.weight"].T @ p["v_gate2.weight"].T
        v = v + (first - v) * torch.sigmoid(gate)
    if "x_q" in p:
        q, k, v = (
            z + p[f"x_{name}"] * (torch.cat((z[:, :1], z[:, :-1]), 1) - z)
            for name, z in zip("qkv", (q, k, v), strict=True)
        )
    q, k, v = (z.unflatten(-1, (heads, -1)) for z in (q, k, v))
    q, k = (z / (z.norm(dim=-1, keepdim=True) + 1e-5) for z in (q, k))
    return q * p["beta"][:, None] * math.sqrt(q.shape[-1]), k, v

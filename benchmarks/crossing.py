"""A KVM layer on a sequence sharded over ranks: tokens traded for heads, against its state handed on.

Times are of forward and backward on two ranks of one thread each, taking turns; bytes are those that all
ranks send in the two passes, for any number of ranks. Ranks of one machine send through memory; what a slower
network adds goes by bytes. So times and bytes give the speed of a link below which handing on, which moves
fewer bytes, would win.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybrid.distributed import world
from hybrid.layers import Context, Site
from hybrid.layers.context_parallel import SequenceShard
from hybrid.layers.kvm.mixer import KVM
from hybrid.text import columns, duration

from .measure import alternate
from .ranks import Ranks

SHARED_BY = (2, 4, 8)
"""Ranks for which bytes are shown."""


class HandedOn(KVM):
    """Hands its state on also where its heads could be shared out."""

    @classmethod
    def hands_on(cls, options: Any, site: Site, size: int) -> bool:
        return True


FORMS: dict[str, type[KVM]] = {"by heads": KVM, "handed on": HandedOn}


@dataclass(frozen=True)
class Crossing:
    """One layer with the default budget, 16 sqrt(t) slots."""

    lengths: tuple[int, ...] = (4 * 1024, 16 * 1024)
    hidden: int = 512
    heads: int = 8
    rounds: int = 5

    def layer(self, form: str) -> KVM:
        torch.manual_seed(0)
        return FORMS[form](KVM.Options(num_heads=self.heads), Site(self.hidden))

    def bytes(self, form: str, tokens: int, size: int) -> int:
        """Count the bytes of a forward and a backward pass in fp32 on `size` ranks."""
        return 2 * self.layer(form).exchange_bytes(1, tokens, size, 4)

    def compare(self) -> dict[str, Any]:
        """Measure seconds and count bytes of both forms; print a table."""
        found: dict[str, dict[str, Any]] = {}
        with Ranks(2) as ranks:
            for tokens in self.lengths:
                ranks.call(open_layers, self, tokens)
                runs = {form: partial(ranks.call, forward_backward, form) for form in FORMS}
                seconds = alternate(runs, rounds=self.rounds)
                moved = {form: [self.bytes(form, tokens, size) for size in SHARED_BY] for form in FORMS}
                found[str(tokens)] = {"seconds": seconds, "bytes": moved}
        table = [["tokens", "", "2 ranks", *(f"MB, S={size}" for size in SHARED_BY), "handed on wins below"]]
        for count, one in found.items():
            for form in FORMS:
                sizes = [f"{moved / 1e6:.1f}" for moved in one["bytes"][form]]
                wins = _speed(one) if form == "handed on" else ""
                table.append([f"{int(count):,}", form, duration(one["seconds"][form]), *sizes, wins])
        heads = f"{self.heads} heads of {self.hidden // self.heads}"
        print(f"A KVM layer, {heads}, forward and backward\n" + columns(table, left={1}))
        return {"rows": [], "measured": found, "shared_by": SHARED_BY}


def _speed(one: dict[str, Any]) -> str:
    """Name the speed of a link at which the bytes that handing on saves on two ranks take what it costs."""
    heads, handed = (one["seconds"][form] for form in FORMS)
    more, fewer = (one["bytes"][form][0] for form in FORMS)
    if handed <= heads:
        return "any speed" if fewer <= more else "-"
    return f"{(more - fewer) / 2 / (handed - heads) / 1e6:,.0f} MB/s" if fewer < more else "no speed"


_opened: dict[str, Any] = {}
"""What a rank keeps between two calls."""


def open_layers(crossing: Crossing, tokens: int) -> None:
    """Make both layers, and this rank's chunk of a random sequence."""
    here = world.start(threads=1)
    x = torch.randn(1, tokens // here.size, crossing.hidden, requires_grad=True)
    _opened.update(tokens=tokens, x=x, layers={form: crossing.layer(form) for form in FORMS})


def forward_backward(form: str) -> None:
    """Run one layer on the chunk."""
    x, layer = _opened["x"], _opened["layers"][form]
    shard = SequenceShard(None, dist.get_rank(), dist.get_world_size(), _opened["tokens"])
    y, _ = layer(x, Context.of(x, want_state=False, shard=shard))
    y.backward(torch.ones_like(y))
    dist.barrier()

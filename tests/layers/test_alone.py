"""One layer in somebody else's trainer: their project has a `layers` package of its own, their process group,
their mixers."""

import os
import re
import socket
import subprocess
import sys
import textwrap

TRAINER = """
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import layers  # their own package
from hybrid.layers import Context, Site
from hybrid.layers import mixer_class

assert layers.MINE == "theirs"
rank, world = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
SMALL = dict(num_heads=4, num_kv_heads=2, chunk=8, window=11, budget_minimum=8, budget_factor=2.0)


def build(kind):
    cls = mixer_class(kind)
    names = set(cls.Options.__dataclass_fields__)
    return cls(cls.Options(**{k: v for k, v in SMALL.items() if k in names}), Site(32, 1, 4))


def train(layer, mine):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 40, 32)[mine]
        y, _ = layer(x, Context.of(x, want_state=False))
        loss = (y - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def ddp(kind, alone):
    layer = build(kind)
    layer.load_state_dict(alone.state_dict())
    return torch.nn.parallel.DistributedDataParallel(layer)


def fsdp(kind, alone):
    with torch.device("meta"):
        layer = build(kind)
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (world,)))
    layer.to_empty(device="cpu")
    for mixer in (layer, alone):
        torch.manual_seed(1)
        mixer.reset_parameters()
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, layer.get_parameter(name).full_tensor()), name
    return layer


for wrap, kind in ((ddp, "kvm"), (fsdp, "kvm"), (fsdp, "sliding_window")):
    torch.manual_seed(0)
    alone = build(kind)
    layer = wrap(kind, alone)
    expected = train(alone, slice(None))
    losses = train(layer, slice(rank * 4 // world, (rank + 1) * 4 // world))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / world, expected, atol=5e-5, rtol=0)
    assert float(expected[2]) < float(expected[0])
    print(wrap.__name__, kind, "as alone", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads now and then abort a process that ends the usual way
"""


def start(folder, code, *arguments, **environment):
    (folder / "layers").mkdir(exist_ok=True)
    (folder / "layers" / "__init__.py").write_text('MINE = "theirs"\n')
    (folder / "trainer.py").write_text(code)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    command = [sys.executable, "trainer.py", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_layer_trains_under_ddp_and_fsdp_like_alone(tmp_path):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ranks = [start(tmp_path, TRAINER, rank, 2, **environment) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
        for line in ("ddp kvm as alone", "fsdp kvm as alone", "fsdp sliding_window as alone"):
            assert all(line in output for output in outputs)
    finally:
        for process in ranks:
            process.kill()


THIRD_PARTY = '''
from dataclasses import dataclass

import torch
from hybrid.layers import Flops, Mixer, MixerState


@dataclass
class MeanOptions:
    scale: float = 1.0


@dataclass
class MeanState(MixerState):
    total: torch.Tensor | None = None


class Mean(Mixer):
    """The mean of all tokens so far."""

    Options = MeanOptions

    def __init__(self, options, site):
        super().__init__(options, site)
        self.weight = torch.nn.Parameter(torch.empty(site.hidden_size))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.weight, self.options.scale)

    def mix(self, x, context, state):
        state = state or self.empty_state(x.shape[0])
        if context.lengths:
            pieces = x.split(context.lengths, 1)
            return torch.cat([self.mix(p, type(context).of(p), None)[0] for p in pieces], 1), None
        total = state.total[:, None] + x.cumsum(1)
        position = state.position + x.shape[1]
        count = torch.arange(state.position + 1, position + 1, device=x.device)[:, None]
        return total / count * self.weight, MeanState(position, total[:, -1]) if context.want_state else None

    def empty_state(self, batch):
        return MeanState(0, self.weight.new_zeros(batch, self.site.hidden_size))

    def flops_per_token(self, context_length):
        return Flops()

    def flops_at(self, position):
        return Flops()

    def state_bytes(self, context_length, element_size=4):
        return self.site.hidden_size * element_size
'''

USE_IT = """
import torch
from hybrid.layers import Site
from hybrid.layers import kinds, mixer_class

assert "mean_of_tokens" in kinds() and "full" in kinds()
mixer = mixer_class("mean_of_tokens")(mixer_class("mean_of_tokens").Options(scale=2.0), Site(3))
assert mixer.kind == "mean_of_tokens"
x = torch.arange(12.0).view(1, 4, 3)
y, state = mixer(x[:, :3])
z, _ = mixer(x[:, 3:], None, state)
assert torch.cat((y, z), 1).tolist() == [[[0, 2, 4], [3, 5, 7], [6, 8, 10], [9, 11, 13]]]
print("used by its kind")
"""


def test_a_mixer_of_another_package_is_found_by_its_entry_point(tmp_path):
    """A tiny package, laid out as an installer leaves it."""
    site = tmp_path / "site"
    info = site / "mean_mixer-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "mean_mixer.py").write_text(THIRD_PARTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-mixer\nVersion: 1.0\n")
    entry = "[hybrid.layers]\nmean_of_tokens = mean_mixer:Mean\n"
    (info / "entry_points.txt").write_text(textwrap.dedent(entry))
    process = start(tmp_path, USE_IT, PYTHONPATH=str(site))
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "used by its kind" in output


def test_another_package_that_cannot_be_loaded_is_an_error_for_who_asks_for_it(tmp_path):
    info = tmp_path / "site" / "mean_mixer-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "mean_mixer.py").write_text(THIRD_PARTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-mixer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hybrid.layers]\nwhole = mean_mixer\nnone = no_such:Mean\n")
    code = """
from hybrid.layers import LayerError, mixer_class

print(mixer_class("full").kind)
for kind in ("whole", "none"):
    try:
        mixer_class(kind)
    except LayerError as error:
        print(error)
"""
    process = start(tmp_path, code, PYTHONPATH=str(tmp_path / "site"))
    output, _ = process.communicate(timeout=100)
    lines = output.splitlines()
    assert process.returncode == 0, output
    assert lines[0] == "full"
    assert re.search(
        "'whole' .mean_mixer of package mean-mixer. .*names its class as 'module:Class'", lines[1]
    )
    assert re.search("'none' .no_such:Mean of package mean-mixer. cannot be loaded: No module", lines[2])

"""A pretended CUDA device: real numbers on the CPU, whose tensors say that they are on `cuda:0`.

Inside `pretended_cuda()` a tensor is on the device when it was made there, moved there, or computed from
such. The device counts what would launch a kernel, notes what would make the host wait and where, and refuses
what mixes devices. torch's flash operators, which have no CPU form, are computed by plain products after the
checks that their C++ makes (or should); kernels of other packages can be given as stand-ins (see `stand_in`).

What it cannot know: how many kernels one operator launches (one each is counted, none for views), and what
code that never reaches torch's dispatcher does.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hybrid.layers import indices
from hybrid.layers.softmax import Mask, kernels, ragged

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WITHOUT_LAUNCH = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "permute",
    "reshape", "resize_", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unfold", "unsafe_split", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real",
    "real", "imag",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"}
INDEXED = {"index", "index_put", "_index_put_impl"}
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_device_of = torch.Tensor.device


class PretendedDevice:
    """What happened on the device: `launches` by operator, and `waits` of the host, each with its place."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.places: Counter[str] | None = None
        """Launches by the line of ours they come from; a Counter put here is filled (which is slow)."""
        self._storages: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._python = self._engine = 0
        self._hidden = False

    def count(self) -> int:
        """Count the launches since the last call of this."""
        found = self.launches.total()
        self.launches.clear()
        return found

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._storages

    def put(self, x: Any) -> Any:
        storage = x.untyped_storage()
        # A weak reference keeps the address from being used again, but not the memory.
        self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return x

    def wait(self, what: str) -> None:
        self.waits.append(f"{what} at {_place()}")

    def launch(self, name: str) -> None:
        self.launches[name] += 1
        if self.places is not None:
            self.places[f"{name} {_place()}"] += 1

    @contextmanager
    def one_launch(self, name: str) -> Iterator[None]:
        """Count whatever is computed inside as one launch."""
        self.launch(name)
        before, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = before

    def upload(self, x: Tensor, quiet: bool) -> Tensor:
        """Copy from the host; `quiet` where that makes nobody wait."""
        if not quiet:
            self.wait("copy from pageable memory")
        self.launch("copy to the device")
        return _Moved.apply(x, self, True)

    def download(self, x: Tensor) -> Tensor:
        self.wait("copy to the host")
        return _Moved.apply(x, self, False)


def _place() -> str:
    """Name the innermost two lines of this project's own code."""
    found = []
    for frame in reversed(traceback.extract_stack()):
        path = os.path.relpath(frame.filename, HERE)
        if not path.startswith("..") and path != "tests/pretended_cuda.py" and ".venv" not in path:
            found.append(f"{path}:{frame.lineno}")
    return " < ".join(found[:2])


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: PretendedDevice, up: bool) -> Tensor:
        ctx.back = device, not up
        with torch._C._DisableTorchDispatch():
            y = x.detach().clone()
        return device.put(y) if up else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Moved.apply(grad, *ctx.back), None, None


class _Dispatch(TorchDispatchMode):
    """Follows which results lie on the device, below autograd."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self.device, dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = [x for x in given if device.holds(x)]
        wanted = kwargs.get("device")
        # In the engine, options of C++ code come from tensors that are really on the CPU.
        in_engine = bool(device._engine) and not device._python
        up = bool(there) or (wanted is not None and wanted.type == "cuda") or (in_engine and not given)
        if wanted is not None:
            kwargs["device"] = CPU
        if there and len(there) < len(given) and not device._hidden:
            self._refuse_mixed(name, given, there)
        run = _EMULATED.get(name, func) if there else func
        with device.one_launch(name) if run is not func else _nothing():
            out = run(*args, **kwargs)
        if there and not device._hidden:
            self._note_wait(name, there, kwargs)
        if up:
            for x in tree_flatten(out)[0]:
                if isinstance(x, Tensor):
                    device.put(x)
            if name.removesuffix("_copy") not in WITHOUT_LAUNCH and run is func and not device._hidden:
                device.launch(name)
        return out

    def _refuse_mixed(self, name: str, given: list[Tensor], there: list[Tensor]) -> None:
        on_host = [x for x in given if not any(x is one for one in there) and x.ndim]
        if not on_host or name == "_to_copy":
            return
        if name == "copy_":
            self.device.wait("copy between host and device")
        elif name.rstrip("_") in INDEXED:
            self.device.wait(f"{name} by a list on the host")
        else:
            raise RuntimeError(f"{name} mixes devices: {[tuple(x.shape) for x in on_host]} at {_place()}")

    def _note_wait(self, name: str, there: list[Tensor], kwargs: dict[str, Any]) -> None:
        if name.rstrip("_") in WAITS or name == "_local_scalar_dense":
            self.device.wait(name)
        elif name.rstrip("_") in INDEXED and any(x.dtype == torch.bool for x in there[1:]):
            self.device.wait(f"{name} by a mask")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.device.wait("repeat_interleave without output_size")


class _Function(TorchFunctionMode):
    """Sees what names devices, above autograd."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.device._python += 1
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.device._python -= 1

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, name = self.device, getattr(func, "__name__", "")
        if name in ("cuda", "cpu") and isinstance(args[0], Tensor):
            return self._move(args[0], torch.device(name), False)
        if name == "to":
            return self._to(func, args, kwargs)
        if name == "pin_memory":
            copy = args[0].clone()
            device._pinned[copy.untyped_storage()._cdata] = StorageWeakRef(copy.untyped_storage())
            return copy
        if name == "rms_norm" and device.holds(args[0]) and not device._hidden:
            return _rms_norm(device, func, *args, **kwargs)
        if name in ("tolist", "numpy", "__array__") and device.holds(args[0]):
            args = (self._move(args[0].detach(), CPU, False), *args[1:])
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda" and name != "_parse_to":
            kwargs["device"] = CPU
            out = func(*args, **kwargs)
            if name in ("tensor", "as_tensor"):
                return device.upload(out, quiet=False)
            device.launch(name)
            return device.put(out)
        if wanted is not None and args and isinstance(args[0], Tensor) and device.holds(args[0]):
            return _Moved.apply(func(*args, **kwargs), device, False)
        return func(*args, **kwargs)

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], []
        target, quiet = kwargs.pop("device", None), kwargs.pop("non_blocking", False)
        for one in args[1:]:
            if isinstance(one, str | torch.device):
                target = one
            elif isinstance(one, Tensor):
                target, one = one.device, one.dtype
                rest.append(one)
            elif isinstance(one, bool):
                quiet = one
            elif one is not None:
                rest.append(one)
        if target is not None:
            x = self._move(x, torch.device(target), quiet)
        return func(x, *rest, **kwargs) if rest or kwargs else x

    def _move(self, x: Tensor, target: torch.device, quiet: bool) -> Tensor:
        device = self.device
        if (target.type == "cuda") == device.holds(x):
            return x
        if target.type == "cuda":
            return device.upload(x, quiet and x.untyped_storage()._cdata in device._pinned)
        return device.download(x)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def pretended_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[PretendedDevice]:
    """Pretend inside this context that there is one CUDA device, of this compute capability."""
    device = PretendedDevice()

    def engine(*args: Any, **kwargs: Any) -> Any:
        python, device._python = device._python, 0
        device._engine += 1
        try:
            with _Function(device):  # of which `backward` itself has taken us out
                return run(*args, **kwargs)
        finally:
            device._python = python
            device._engine -= 1

    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    patches: dict[str, Any] = {
        "hybrid.layers.kvm.parallel._kernels": lambda: None,  # Triton's, which only a real device can run
        "torch.Tensor.device": property(lambda x: CUDA if device.holds(x) else _device_of.__get__(x)),
        "torch.Tensor.is_cuda": property(lambda x: device.holds(x)),
        "torch.Tensor.is_cpu": property(lambda x: not device.holds(x)),
        "torch.cuda.get_device_capability": lambda *_: capability,
        "torch.accelerator.is_available": lambda: True,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.synchronize": lambda *_: device.wait("synchronize"),
        "torch.autograd._engine_run_backward": engine,
    }
    _forget_lists()
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value, create=True))
        stack.enter_context(_Function(device))
        stack.enter_context(_Dispatch(device))
        try:
            yield device
        finally:
            _forget_lists()


def _forget_lists() -> None:
    """Drop what is kept by device: a list of the pretended one is none of the next."""
    for kept in indices.KEPT:
        kept.cache_clear()


def stand_in(device: PretendedDevice, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of another package, computed by `function` of its keyword arguments, and counted as one
    launch forward and one backward."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, names: Any, options: Any, *tensors: Tensor) -> Any:
            ctx.call = names, options
            ctx.save_for_backward(*tensors)
            with device.one_launch(name):
                return function(**dict(zip(names, tensors, strict=True)), **options)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            names, options = ctx.call
            with device.one_launch(f"{name} backward"), torch.enable_grad():
                leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
                out = function(**dict(zip(names, leaves, strict=True)), **options)
                wanted = [x for x in leaves if x.requires_grad]
                found = iter(torch.autograd.grad(out, wanted, grads, allow_unused=True))
                return None, None, *(next(found) if x.requires_grad else None for x in leaves)

    def call(**arguments: Any) -> Any:
        tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
        rest = {key: x for key, x in arguments.items() if key not in tensors}
        return Kernel.apply(tuple(tensors), rest, *tensors.values())

    return call


def _rms_norm(
    device: PretendedDevice,
    function: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    eps: Any = None,
) -> Tensor:
    """On CUDA one kernel of torch's, though several operators on a CPU."""

    def run(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return function(x, shape, weight, eps)

    return stand_in(device, "rms_norm", run)(x=x, **({} if weight is None else {"weight": weight}))


# torch's flash operators for CUDA, with the checks of their C++


def check_flash(*operands: Tensor) -> None:
    """Refuse what the kernel would: `operands` are q, k, v and what else is laid out like these."""
    q = operands[0]
    assert q.shape[-1] % 8 == 0, "heads of a multiple of 8 features"
    assert q.shape[-1] <= 256, "heads of up to 256 features"
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    for x in operands:
        assert x.dtype == q.dtype, (x.dtype, q.dtype)
        assert x.stride(-1) == 1, x.stride()
        assert x.numel() > 0, x.shape
        assert_aligned(x)


def assert_aligned(x: Tensor) -> None:
    """Fail where a kernel that loads 16 bytes at a time would end the process, as it does not look."""
    steps = [step for step, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]
    odd = [n for n in (*steps, x.storage_offset()) if n * x.element_size() % 16]
    assert not odd, f"{tuple(x.shape)}: strides {x.stride()}, offset {x.storage_offset()}"


def _mask(causal: bool, left: int | None) -> Mask:
    return Mask.UPPER if left == 0 else Mask.LOWER if causal else Mask.FULL


def _flash_forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=None, **window
):  # fmt: skip
    check_flash(q, k, v)
    q, k, v = (x.detach().clone() for x in (q, k, v))  # which are on the host
    unused = torch.empty(2, dtype=torch.uint64)
    if cum_q is not None:
        rows = _rows(cum_q, cum_k, max_q, max_k)
        out, lse = ragged.forward("plain", q.unflatten(0, (-1, max_q)), k, v, rows, scale)
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        return out.to(q.dtype).flatten(0, 1).contiguous(), lse, unused, unused, q[:0]
    assert (cum_k, max_q, max_k, debug) == (None, q.shape[1], k.shape[1], False)
    out, lse = kernels.forward("plain", q, k, v, _mask(causal, window_size_left), scale)
    return out.to(q.dtype).contiguous(), lse.contiguous(), unused, unused, q[:0]


def _flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
    window_size_left=None, **window,
):  # fmt: skip
    check_flash(q, k, v, grad, out)
    assert lse.is_contiguous()
    shape = (q.shape[1], q.shape[0]) if cum_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    assert (lse.dtype, lse.shape) == (torch.float32, shape)
    mask = _mask(causal, window_size_left)
    grad, q, k, v, out, lse = (x.detach().clone() for x in (grad, q, k, v, out, lse))
    if cum_q is not None:
        grad, q, out = (x.unflatten(0, (-1, max_q)) for x in (grad, q, out))
        joint = grad, out, lse.unflatten(1, (-1, max_q)).transpose(0, 1)
        rows = _rows(cum_q, cum_k, max_q, max_k)
        d_q, *found = ragged.backward("plain", joint, q, k, v, rows, scale)
        return tuple(x.to(q.dtype).contiguous() for x in (d_q.flatten(0, 1), *found))
    found = kernels.backward("plain", (grad, out, lse), q, k, v, mask, scale)
    return tuple(x.to(q.dtype).contiguous() for x in found)


def _rows(cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> ragged.Ragged:
    """Find what rows of equally many queries have as keys."""
    assert cum_q.dtype == cum_k.dtype == torch.int32
    ends, query_ends = (x.detach().clone() for x in (cum_k, cum_q))
    lengths = tuple(ends.diff().tolist())
    assert query_ends.diff().unique().tolist() == [max_q]
    assert max(lengths) == max_k
    return ragged.Ragged(lengths, ends, query_ends)


_EMULATED = {"_flash_attention_forward": _flash_forward, "_flash_attention_backward": _flash_backward}

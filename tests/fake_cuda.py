"""A CUDA device that is not there: tensors that say ``cuda`` and compute on the CPU, counted.

``fake_cuda()`` is a context in which ``device="cuda:0"`` works on any machine. A tensor there wraps
one in host memory, so values are real, and what an engine generates can be compared with what it
generates on the CPU. As on a GPU, an operation that mixes the two devices raises, and so does
``numpy()`` of a tensor on the device. Counted are

    launches    kernels: each operation that computes or copies on the device, views apart
    uploads     copies from the host to the device that wait: from memory that is not pinned
    staged      copies from the host to the device that do not wait
    waits       what makes the host wait for the device: copies to the host, ``item()``, operations
                whose result's shape depends on values

An operation that is one kernel on CUDA and several on a CPU counts as one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten

# One kernel each on CUDA, by the name of the operation.
_ONE_KERNEL = {
    "aten::scaled_dot_product_attention",
    "aten::rms_norm",
    "aten::layer_norm",
    "aten::linear",
    "aten::silu",
    "aten::softmax",
    "aten::log_softmax",
}
# No kernel at all: they allocate, or give the same memory another form.
_NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::lift_fresh",
    "aten::lift",
    "aten::detach",
    "aten::detach_",
    "aten::alias",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::set_",
    "aten::resize_",
    "aten::record_stream",
}
# The shape of the result depends on values, so the host waits: so many times.
_WAITS = {
    "aten::nonzero": 1,
    "aten::masked_select": 1,
    "aten::_unique2": 1,
    "aten::unique_dim": 1,
    "aten::bincount": 2,
    "aten::repeat_interleave": 1,
    "aten::_local_scalar_dense": 1,
    "aten::is_nonzero": 1,
    "aten::equal": 1,
}


class CudaTensor(Tensor):
    """A tensor on the device; ``host`` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> CudaTensor:
        with torch.inference_mode(False):  # a view of a tensor that is none must be none, too
            made = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                layout=host.layout,
                device=DEVICE,
                requires_grad=host.requires_grad,
            )
        made.host = host
        return made

    # torch's own versions of what follows look for a guard of the device, which a torch for CPUs
    # lacks, or refuse subclasses.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def item(self) -> Any:
        return self.cpu().item()

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        return _ACTIVE[-1].copy(self, other, non_blocking)

    def contiguous(self, *, memory_format: Any = torch.contiguous_format) -> Tensor:  # type: ignore[override]
        is_contiguous = self.is_contiguous(memory_format=memory_format)
        return self if is_contiguous else self.clone(memory_format=memory_format)

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def new_tensor(self, data: Any, *, dtype: Any = None) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=DEVICE)

    def new_zeros(self, *size: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(*size, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def new_ones(self, *size: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.ones(*size, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def new_empty(self, *size: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.empty(*size, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        return _ACTIVE[-1].get_item(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:  # type: ignore[override]
        _ACTIVE[-1].set_item(self, index, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of FakeCuda outside of its context")


class FakeEvent:
    """In place of ``torch.cuda.Event``: a millisecond after the one before it.

    Attributes:
        passed: whether the device has reached the events that were recorded.
    """

    passed = True

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        _waiting()

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds."""
        return 1.0


class FakeCuda(TorchDispatchMode):
    """The device, while its context is open; see the top of this file.

    Attributes:
        counts: launches, uploads, staged copies and waits so far.
        sites: the same by kind and line of this project.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sites: Counter[str] = Counter()

    def reset(self) -> None:
        """Start to count anew."""
        self.counts.clear()
        self.sites.clear()

    def _count(self, kind: str, number: int = 1) -> None:
        self.counts[kind] += number
        frame: Any = sys._getframe(1)
        while frame is not None:
            _, found, where = frame.f_code.co_filename.partition("/src/forethought/")
            if found:
                self.sites[f"{kind} {where}:{frame.f_lineno}"] += number
                return
            frame = frame.f_back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "cuda"
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs)
        if name == "aten::_to_copy":
            return self._convert(func, args[0], kwargs)
        composed = None if name in _ONE_KERNEL else self._decomposed(func, args, kwargs)
        if composed is not None:
            return composed[0]
        if name == "aten::copy_":
            return self.copy(args[0], args[1], *args[2:], **kwargs)
        return self._compute(func, name, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on the CPU; memory that it pins is marked, as a CPU has none."""
        pinned = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        if pinned:
            result.is_pinned_memory = True
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any] | None:
        """What an operation that consists of others returns, in a tuple."""
        if not func._can_decompose():
            return None
        with self:
            result = func.decompose(*args, **kwargs)
        return None if result is NotImplemented else (result,)

    def _convert(self, func: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """``to``: between the devices, or another dtype on the device."""
        device = kwargs.pop("device", None)
        non_blocking = kwargs.pop("non_blocking", False)
        kwargs.pop("pin_memory", None)
        stays = device is None or torch.device(device).type == "cuda"
        if isinstance(x, CudaTensor):
            self._count("launches" if stays else "waits")
            found = func(x.host, **kwargs)
            return CudaTensor(found) if stays else found
        self._count_upload(x, non_blocking)
        return CudaTensor(func(x, **kwargs))

    def _count_upload(self, x: Tensor, non_blocking: bool) -> None:
        staged = non_blocking and getattr(x, "is_pinned_memory", False)
        self._count("staged" if staged else "uploads")

    def copy(self, to: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor:
        """``to.copy_(x)``, within the device or across."""
        if isinstance(to, CudaTensor):
            if isinstance(x, CudaTensor):
                self._count("launches")
            else:
                self._count_upload(x, non_blocking)
            to.host.copy_(x.host if isinstance(x, CudaTensor) else x)
        else:
            assert isinstance(x, CudaTensor)
            self._count("waits")
            to.copy_(x.host)
        return to

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on the device."""
        self._check_devices(name, args, kwargs)
        if name not in _NO_KERNEL and not _is_view(func):
            self._count("launches", 1 + _has_splits(name, args))
        waits = _WAITS.get(name, 0) + _has_bool_index(name, args)
        if waits:
            self._count("waits", waits)
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        wrappers = {
            id(leaf.host): leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, CudaTensor)
        }
        args, kwargs = tree_map(_host, (args, kwargs))
        result = func(*args, **kwargs)

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return wrappers[id(leaf)] if id(leaf) in wrappers else CudaTensor(leaf)

        return tree_map(wrapped, result)

    def get_item(self, x: CudaTensor, index: Any) -> Tensor:
        """``x[index]``: a view, or one kernel."""
        self._count_index(index)
        found = x.host[_on_host(index)]
        if found.untyped_storage().data_ptr() != x.host.untyped_storage().data_ptr():
            self._count("launches")
        return CudaTensor(found)

    def set_item(self, x: CudaTensor, index: Any, value: Any) -> None:
        """``x[index] = value``: one kernel."""
        self._count_index(index)
        self._count("launches")
        if isinstance(value, Tensor) and not isinstance(value, CudaTensor) and value.dim() > 0:
            self._count_upload(value, False)
        x.host[_on_host(index)] = _host(value)

    def _count_index(self, index: Any) -> None:
        """Indices that are on the host are copied; booleans on the device are counted there."""
        for leaf in index if isinstance(index, tuple) else (index,):
            if isinstance(leaf, list):
                self._count("uploads")
            elif isinstance(leaf, Tensor) and not isinstance(leaf, CudaTensor) and leaf.dim() > 0:
                self._count_upload(leaf, False)
            elif isinstance(leaf, CudaTensor) and leaf.dtype in (torch.bool, torch.uint8):
                self._count("waits")

    def _check_devices(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """As CUDA does, refuse host tensors but numbers and indices, which are copied first."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        hosts = [leaf for leaf in leaves if not isinstance(leaf, CudaTensor) and leaf.dim() > 0]
        if hosts and name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
            self._count("uploads", len(hosts))
        elif hosts:
            raise RuntimeError(f"{name}: expected all tensors to be on cuda, but some are on cpu")


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, CudaTensor) else leaf


def _on_host(index: Any) -> Any:
    return tuple(map(_host, index)) if isinstance(index, tuple) else _host(index)


def _is_view(func: Any) -> bool:
    """Whether the result is memory of an argument that is not written to."""
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_splits(name: str, args: Any) -> bool:
    """Whether attention over pages has a second kernel, which merges the splits of long rows."""
    return name == "forethought::paged_attention" and len(args[3][-1]) > 0


def _has_bool_index(name: str, args: Any) -> bool:
    """Whether booleans select: their number is read on the host."""
    if name not in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    dtypes = [leaf.dtype for leaf in args[1] if isinstance(leaf, Tensor)]
    return torch.bool in dtypes or torch.uint8 in dtypes


def _through_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor``, which cannot be told to make a tensor of numbers on the device."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        pinned = kwargs.pop("pin_memory", False)
        if device is None or torch.device(device).type != "cuda":
            result = make(data, *args, device=device, **kwargs)
            if pinned:
                result.is_pinned_memory = True  # type: ignore[attr-defined]
            return result
        if isinstance(data, CudaTensor):
            return data.to(kwargs.get("dtype", data.dtype))
        return make(data, *args, **kwargs).to(device)

    return made


_ACTIVE: list[FakeCuda] = []


def active() -> FakeCuda | None:
    """The device whose context is open."""
    return _ACTIVE[-1] if _ACTIVE else None


def _waiting() -> None:
    if _ACTIVE:
        _ACTIVE[-1]._count("waits")


@contextmanager
def fake_cuda(memory: int = 2**30) -> Iterator[FakeCuda]:
    """The device, and torch's functions that ask about it.

    Args:
        memory: bytes that it says are free.
    """
    device = FakeCuda()
    _device_constructors()  # torch keeps the first answer, which is to name its own functions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _through_host(getattr(torch, name)))
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (memory, memory))
        _ACTIVE.append(device)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with device:
                yield device
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
            _ACTIVE.pop()

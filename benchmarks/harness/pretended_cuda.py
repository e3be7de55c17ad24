"""A pretended CUDA device: finds tensors on the wrong device, on a machine without a GPU.

    with PretendedCuda() as gpu:
        network = build(...).to("cuda")          # computes on the CPU, and answers cuda:0
        network(torch.zeros(1, 1, 64, 64))       # MixedDevices: a tensor of the CPU

A tensor of this device wraps one of the CPU, and its C++ device is `lazy:0`: composites of C++ carry it on,
autograd runs it on the calling thread, and no kernel of a CPU build takes it by accident. Two modes do the
rest:

    _Functions   'cuda' in arguments becomes lazy:0; `Tensor.device` answers cuda:0
    _Dispatch    each aten operation, forward and backward: checks devices by CUDA's rules, runs it on the CPU

Checked: operands on two devices, an index of the GPU in a tensor of the CPU, a generator of the CPU for a
tensor of the GPU. Counted: operations, host synchronisations, copies to the device.
Not seen: the numbers of CUDA's kernels, their memory, streams, processes; autocast casts nothing here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

_LAZY = torch.device("lazy", 0)
_CUDA = torch.device("cuda", 0)
_ROOT = f"{Path(__file__).resolve().parents[2]}/"

# Their tensors may be on two devices.
_COPIES = {
    "_to_copy",
    "copy_",
    "copy",
    "_copy_from",
    "set_",
    "lift_fresh",
    "lift",
    "resize_as_",
    "_pin_memory",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Not pointwise, so that a scalar of the CPU fails as well.
_STRICT = {
    *("cat", "stack", "mm", "bmm", "addmm", "matmul", "dot", "mv", "convolution", "embedding"),
    *("index_select", "gather", "scatter", "scatter_add", "take", "put_", "index_add", "index_copy"),
    *(
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
        "nll_loss_forward",
        "nll_loss2d_forward",
    ),
    *("grid_sampler_2d", "upsample_bilinear2d", "bincount", "searchsorted", "bucketize", "histc"),
}
# The host waits for the device until their answer is there.
_SYNCS = {
    *("_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "is_nonzero", "repeat_interleave"),
    *("unique_dim", "_unique2", "unique_consecutive"),
}
_DRAWS = {"native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like"}
_SCALARS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}


class MixedDevices(RuntimeError):
    """An operation that CUDA refuses."""


class _OnCuda(torch.Tensor):
    """A tensor that answers cuda:0; `inner` is on the CPU."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> _OnCuda:
        made: _OnCuda = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=_LAZY,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_OnCuda({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if PretendedCuda.current is None:
            raise RuntimeError(f"{func}: a tensor of the pretended device outside of it")
        return PretendedCuda.current.dispatch.__torch_dispatch__(func, types, args, kwargs or {})


class PretendedCuda:
    """Within it, torch has one CUDA device, which computes by the kernels of the CPU.

    Attributes:
        operations: number of aten operations, by name.
        syncs: number of host synchronisations, by place in the code.
        uploads: number of copies to the device, by place.
    """

    current: PretendedCuda | None = None

    def __init__(self) -> None:
        self.dispatch = _Dispatch(self)
        self.operations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def __enter__(self) -> PretendedCuda:
        self._stack = ExitStack()
        PretendedCuda.current = self
        self._stack.callback(setattr, PretendedCuda, "current", None)
        # A parameter stays the same object when it moves.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        self._stack.callback(torch.__future__.set_swap_module_params_on_conversion, before)
        answers = {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "synchronize": None,
            "empty_cache": None,
            "reset_peak_memory_stats": None,
            "max_memory_allocated": 0,
            "memory_allocated": 0,
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "get_device_name": "Pretended",
            "get_device_capability": (9, 0),
            "get_arch_list": ["sm_90"],
            "mem_get_info": (2**33, 2**34),
        }
        for name, answer in answers.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        # In a build for CUDA, an optimiser asks the driver for its stream.
        self._stack.enter_context(
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=None)
        )
        self._stack.enter_context(self.dispatch)
        self._stack.enter_context(_Functions())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _fail(what: str) -> None:
    raise MixedDevices(f"{what}, at {_place()}")


def _place() -> str:
    """The innermost lines of the project."""
    own: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(own) < 3:
        file = frame.f_code.co_filename
        if file.startswith(_ROOT) and not file.startswith((__file__, f"{_ROOT}.venv")):
            own.append(f"{file.removeprefix(_ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(own) or "?"


@cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """An operation's name, whether it draws numbers, and whether what it returns shares memory.

    Kept, since reading a schema takes longer than an operation on few numbers.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    draws = name in _DRAWS or any(argument.name == "generator" for argument in schema.arguments)
    return name, draws, any(each.alias_info is not None for each in schema.returns)


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments of an operation, and those in its lists."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _inner(argument: Any) -> Any:
    """The argument, or each in a list, with the tensor of the CPU in place of one of the device."""
    if isinstance(argument, _OnCuda):
        return argument.inner
    if isinstance(argument, list | tuple):
        return [each.inner if isinstance(each, _OnCuda) else each for each in argument]
    return argument


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: PretendedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, draws, aliases = _facts(func)
        leaves = list(_flat((*args, *kwargs.values())))
        ours = [leaf for leaf in leaves if isinstance(leaf, _OnCuda)]
        plain = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, _OnCuda)]
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        moves_here = device in ("lazy", "cuda")
        if not ours and not moves_here:
            return func(*args, **kwargs)
        self._count(name, args, ours, plain, device)
        if ours and plain and name not in _COPIES:
            _check_devices(name, args, plain)
        if draws:
            _check_generator(name, leaves)
        ends_here = moves_here or (bool(ours) and device not in ("cpu", "meta"))
        if name == "copy_":
            ends_here = isinstance(args[0], _OnCuda)
        if moves_here:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        out = func(*map(_inner, args), **{key: _inner(value) for key, value in kwargs.items()})
        if out is None or name in _SCALARS:
            return out
        # What is changed in place stays the same object.
        known = {id(tensor.inner): tensor for tensor in ours}

        def wrapped(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in known:
                return known[id(tensor)]
            return _OnCuda(tensor) if ends_here else tensor

        result = wrapped(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, wrapped, out)
        if name in ("_to_copy", "lift_fresh") or not ours or not ends_here or not aliases:
            return result
        try:
            return return_and_correct_aliasing(func, args, kwargs, result)  # type: ignore[no-untyped-call]
        except Exception:
            # Aliases are not known of every operation; the result is right all the same.
            return result

    def _count(self, name: str, args: Any, ours: list[Any], plain: list[Any], device: str | None) -> None:
        self._owner.operations[name] += 1
        reads = device == "cpu" and bool(ours)
        back = name == "copy_" and bool(ours) and not isinstance(args[0], _OnCuda)
        masked = name in _INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _SYNCS or reads or back or masked:
            self._owner.syncs[_place()] += 1
        sends = name == "copy_" and isinstance(args[0], _OnCuda) and bool(plain)
        if sends or (name == "_to_copy" and device in ("lazy", "cuda") and not ours):
            self._owner.uploads[_place()] += 1


def _check_devices(name: str, args: Any, plain: Iterable[torch.Tensor]) -> None:
    """Refuse what CUDA refuses of an operation with tensors of both devices."""
    plain = [tensor for tensor in plain if tensor.device.type == "cpu"]
    if name.startswith(("_foreach", "_fused")):
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
        for row in zip(*lists, strict=False):
            here = [isinstance(tensor, _OnCuda) or tensor.ndim == 0 for tensor in row]
            if any(isinstance(tensor, _OnCuda) for tensor in row) and not all(here):
                _fail(f"{name}: tensors of one entry on two devices")
        return
    if name in _INDEXING:
        indexed, indices, *values = args
        if not isinstance(indexed, _OnCuda):
            if any(isinstance(index, _OnCuda) for index in indices):
                _fail(f"{name}: an index on cuda:0 of a tensor on the cpu")
        elif any(isinstance(v, torch.Tensor) and not isinstance(v, _OnCuda) and v.ndim for v in values):
            _fail(f"{name}: values on the cpu of a tensor on cuda:0")
        return
    wrong = [tensor for tensor in plain if tensor.ndim or name in _STRICT]
    if wrong:
        shapes = [tuple(tensor.shape) for tensor in wrong]
        _fail(f"{name}: expected all tensors on one device, found cuda:0 and the cpu {shapes}")


def _check_generator(name: str, leaves: Iterable[Any]) -> None:
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        _fail(f"{name}: expected a generator on cuda, found one on the cpu")


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device or isinstance(func, type) or "autocast" in name:
            return func(*args, **kwargs)
        if name == "__get__":
            return _attribute(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        args = tuple(map(_renamed, args))
        kwargs = {name: _renamed(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _renamed(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return _LAZY
    if isinstance(argument, str) and (argument == "cuda" or argument.startswith("cuda:")):
        return _LAZY
    return argument


def _attribute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if isinstance(found, torch.device) and found.type == "lazy":
        return _CUDA
    if isinstance(args[0], _OnCuda):
        of = getattr(func, "__self__", None)
        if of is torch.Tensor.is_cuda:
            return True
        if of is torch.Tensor.is_cpu:
            return False
    return found


def _made(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`torch.tensor` and its like: their C++ switches the modes off."""
    device = kwargs.get("device")
    if device is None and func is not torch.tensor and isinstance(args[0], torch.Tensor):
        device = args[0].device
    if device is None or torch.device(device).type not in ("cuda", "lazy"):
        return func(*args, **kwargs)
    made = func(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
    return made if isinstance(made, _OnCuda) else made.to(_LAZY)


def _item(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A list as an index becomes a tensor on the indexed one's device, with the modes switched off."""
    if not isinstance(args[0], _OnCuda):
        return func(*args, **kwargs)

    def moved(index: Any) -> Any:
        if not isinstance(index, list):
            return index
        return torch.tensor(index, dtype=None if index else torch.long).to(_LAZY)

    index = tuple(map(moved, args[1])) if isinstance(args[1], tuple) else moved(args[1])
    return func(args[0], index, *args[2:])


def _numpy(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if isinstance(args[0], _OnCuda):
        _fail("numpy() of a tensor on cuda:0")
    return func(*args, **kwargs)


def _list(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].to("cpu") if isinstance(args[0], _OnCuda) else args[0], **kwargs)


def _deepcopied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    source, memo = args
    if not isinstance(source, _OnCuda):
        return func(*args, **kwargs)
    if id(source) not in memo:
        copy = source.detach().clone().requires_grad_(source.requires_grad)
        if getattr(source, "_is_param", False):
            copy._is_param = True
        memo[id(source)] = copy
    return memo[id(source)]


_SPECIAL: dict[Any, Any] = {
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.asarray: _made,
    torch.Tensor.__getitem__: _item,
    torch.Tensor.__setitem__: _item,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.tolist: _list,
    torch.Tensor.__deepcopy__: _deepcopied,
    torch.Tensor.cuda: lambda _func, args, _kwargs: args[0].to(_LAZY),
    torch.Tensor.pin_memory: lambda _func, args, _kwargs: args[0],
    torch.Tensor.get_device: lambda func, args, _: 0 if isinstance(args[0], _OnCuda) else func(*args),
}

"""Checking the tensors of a call and packing their addresses into the tables that the kernels take.

Two ways lead to the same table. The compiled module reads thousands of tensors in well under a millisecond, but it
only knows the plain case and declines everything else. The functions here are the complete rules: they accept
what the fast way declines without need (transposed weights, a missing binary) and say precisely what is wrong
with the rest. Nothing is written before both are through.

Row layouts (64-bit integers) are those of ``csrc/common/table.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmt_kernels import _library, _native

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPE_NAMES = "float32, bfloat16 or float16"
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}


class Table(NamedTuple):
    """Rows of a packed table and the device that all their tensors are on."""

    rows: bytes
    device: torch.device


def adam_table(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
) -> Table:
    """One row per non-empty parameter. Raises what `adam_step` documents."""
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters)
    return packed("pack_adam", *lists) or _adam_table_checked(*lists)


def packed(function: str, params: Sequence[Tensor], *lists: Sequence[Any] | None) -> Table | None:
    """The table that `function` of the compiled module makes; None if it declines."""
    cpu = _native.cpu_module
    if cpu is None or type(params) not in (list, tuple) or not params or not isinstance(params[0], Tensor):
        return None
    device = params[0].device
    code = _DLPACK_DEVICES.get(device.type)
    rows = None if code is None else getattr(cpu, function)(params, *lists, device, code, device.index or 0)
    return None if rows is None else Table(rows, device)


def data_table(tensors: Sequence[Tensor], device: torch.device) -> bytes | None:
    """One row per non-empty tensor; None if one is not contiguous, negated or not in a dtype of the kernels.

    The tensors are on `device` and dense-layout floating point; `check_data` has seen to it.
    """
    rows = array("q")
    for tensor in tensors:
        code = _DTYPE_CODES.get(tensor.dtype)
        if code is None or not tensor.is_contiguous() or tensor.is_neg():
            return None
        if tensor.shape.numel():
            rows.extend((_address("tensors", tensor), tensor.shape.numel(), code))
    return rows.tobytes()


def fast_data_table(tensors: Sequence[Tensor], device: torch.device) -> bytes | None:
    """The same, checked and packed by the compiled module; None if it declines."""
    code = _DLPACK_DEVICES.get(device.type)
    if _native.cpu_module is None or code is None:
        return None
    rows: bytes | None = _native.cpu_module.pack_data(tensors, device, code, device.index or 0)
    return rows


def check_data(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Raise unless all are strided floating-point tensors on `device`."""
    for i, tensor in enumerate(tensors):
        name = f"tensors[{i}]"
        _check_tensor(name, tensor)
        if tensor.dtype not in _DTYPE_CODES and tensor.dtype is not torch.float64:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {_DTYPE_NAMES}, or float64")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {device} like the rest")


def check_flag(
    name: str, flag: Tensor, device: torch.device | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    """Raise unless `flag` is a tensor of one element in one of `dtypes`, on `device` (None: on any)."""
    wanted = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(flag, Tensor):
        raise TypeError(f"{name} is a {type(flag).__name__}; it must be a {wanted} tensor with one element")
    if flag.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {flag.dtype}; it must be {wanted}")
    if flag.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(flag.shape)}; it must have exactly one element")
    if device is not None and flag.device != device:
        raise ValueError(f"{name} is on {flag.device}; it must be on {device} like the tensors")
    check_memory(name, flag)


def check_stats(name: str, stats: Tensor, device: torch.device | None) -> None:
    """Raise unless `stats` is a contiguous float64 tensor of shape (2,) on `device` (None: on any)."""
    if not isinstance(stats, Tensor):
        raise TypeError(f"{name} is a {type(stats).__name__}; it must be a torch.float64 tensor of shape (2,)")
    if stats.dtype is not torch.float64:
        raise TypeError(f"{name} has dtype {stats.dtype}; it must be torch.float64")
    if stats.shape != (2,) or not stats.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(stats.shape)}; it must be contiguous and of shape (2,)")
    if device is not None and stats.device != device:
        raise ValueError(f"{name} is on {stats.device}; it must be on {device} like the tensors")
    check_memory(name, stats)


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor of another class, such as a ``DTensor``, that has no memory: the kernels would take
    its address, 0, for that of none."""
    if type(tensor) not in _PLAIN_TYPES and not _library.tracing():
        _address(name, tensor)


def check_sequence(name: str, value: object) -> None:
    """Raise unless `value` is a sequence of things, rather than one tensor or an iterator."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a Tensor; pass a list of tensors, for instance [{name}]")
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a list or tuple of tensors")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; convert it with .to_dense()")


def _address(name: str, tensor: Tensor) -> int:
    """The tensor's address; 0 if it is empty or on a device without addresses."""
    if tensor.shape.numel() == 0 or tensor.device.type == "meta":
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0:
        raise TypeError(
            f"{name} is a {type(tensor).__name__} without memory of its own; pass the tensor that it wraps "
            "(for a DTensor: to_local())"
        )
    if tensor.is_neg():
        raise TypeError(f"{name} is negated when it is read; pass it as .resolve_neg()")
    return address


def _adam_table_checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
) -> Table:
    lists: dict[str, Sequence[Tensor | None]] = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
    }
    if masters is not None:
        lists["masters"] = masters
    rows = array("q")
    for i, at in checked_addresses(lists, written=("params", "exp_avgs", "exp_avg_sqs", "masters")):
        weight, copy, kinds = weight_and_copy(params[i], at)
        kinds |= _DTYPE_CODES[grads[i].dtype] << 16
        rows.extend((weight, copy, at["grads"], at["exp_avgs"], at["exp_avg_sqs"], params[i].shape.numel(), kinds))
    return Table(rows.tobytes(), device_of(params))


def check_lengths(lists: Mapping[str, Sequence[Any]]) -> None:
    """Raise unless all are lists, and have as many entries as the first, of the parameters."""
    count = None
    for name, values in lists.items():
        check_sequence(name, values)
        count = len(values) if count is None else count
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries and params has {count}; they must be as many")


def checked_addresses(
    lists: Mapping[str, Sequence[Any]],
    written: Sequence[str],
    check: Callable[..., None] | None = None,
) -> Iterator[tuple[int, dict[str, int]]]:
    """Check the tensors of a step; yields each non-empty parameter's index, and addresses by the names of the lists.

    Args:
        lists: the tensors by parameter, "params" first. Masters that are None are left out.
        written: the names of those that are written to.
        check: called with an entry's name, its list's, the entry, its parameter, the device and the index; raises
            unless it fits. By default :func:`_check_adam_tensor`.
    """
    check_lengths(lists)
    params = lists["params"]
    extents: list[tuple[int, int, str, bool]] = []  # begin, end, name, whether it is written to
    for i, param in enumerate(params):
        _check_tensor(f"params[{i}]", param)
        device = device_of(params)  # the first one is a tensor
        addresses: dict[str, int] = {}
        for name, values in lists.items():
            tensor = values[i]
            if name == "masters" and tensor is None:
                continue
            where = f"{name}[{i}]"
            _check_tensor(where, tensor)
            if check is None:
                _check_adam_tensor(where, name, tensor, param, device)
            else:
                check(where, name, tensor, param, device, i)
            addresses[name] = address = _address(where, tensor)
            if address:
                extents.append((address, address + tensor.nbytes, where, name in written))
        if param.shape.numel():
            yield i, addresses
    _check_overlaps(extents)


def weight_and_copy(param: Tensor, addresses: Mapping[str, int]) -> tuple[int, int, int]:
    """The addresses of what is updated and of its rounded copy, and the dtypes' codes: of a master, if there is one."""
    code = _DTYPE_CODES[param.dtype]
    if "masters" in addresses:
        return addresses["masters"], addresses["params"], code << 8
    return addresses["params"], 0, code


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if len(tensors) else torch.device("cpu")


def _check_adam_tensor(
    where: str, name: str, tensor: Tensor, param: Tensor, device: torch.device, moments: torch.dtype = torch.float32
) -> None:
    """Raise unless `tensor`, an entry of list `name`, fits its parameter. `moments`: the dtype of the moments."""
    if name in ("params", "grads"):
        if tensor.dtype not in _DTYPE_CODES:
            raise TypeError(f"{where} has dtype {tensor.dtype}; it must be {_DTYPE_NAMES}")
    elif tensor.dtype is not (dtype := torch.float32 if name == "masters" else moments):
        raise TypeError(f"{where} has dtype {tensor.dtype}; it must be {dtype}, whatever its parameter's dtype")
    if name == "masters" and param.dtype is torch.float32:
        raise TypeError(
            f"{where} belongs to a float32 parameter, which needs no master copy; pass None there, "
            "or masters=None if all parameters are float32"
        )
    if tensor.device != device:
        raise ValueError(f"{where} is on {tensor.device}; it must be on {device} like params[0]")
    if tensor.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}; it must be {tuple(param.shape)}, its parameter's")
    if tensor.is_contiguous() and param.is_contiguous():
        return
    if tensor.stride() != param.stride() or not _is_dense(tensor):
        raise ValueError(
            f"{where} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, and its parameter "
            f"{param.stride()}; both must be contiguous, or dense with equal strides (use .contiguous())"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without holes and without sharing, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _check_overlaps(extents: list[tuple[int, int, str, bool]]) -> None:
    """Raise if a tensor that is written to shares memory with any other."""
    extents.sort()
    # Of all that came before, the one that reaches furthest: among those written, and among all.
    written_end, written_name, any_end, any_name = 0, "", 0, ""
    for begin, end, name, written in extents:
        reach, other = (any_end, any_name) if written else (written_end, written_name)
        if begin < reach:
            raise ValueError(f"{name} overlaps {other} in memory; every tensor that is written to needs its own memory")
        if end > any_end:
            any_end, any_name = end, name
        if written and end > written_end:
            written_end, written_name = end, name

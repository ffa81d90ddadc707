"""Checking the tensors of the factored operations and packing them, as `_tables` does for the others.

The row layout is that of ``csrc/common/factored.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels._tables import (
    _DLPACK_DEVICES,
    _DTYPE_CODES,
    _DTYPE_NAMES,
    _address,
    _check_overlaps,
    _check_tensor,
    check_memory,
    check_sequence,
)


@dataclass(slots=True)
class FactoredTensors:
    """The tensors of a call, one entry per matrix in every list; what the operation does not have is None.

    Lists that are only read may be replaced by contiguous copies, which live as long as this object.
    """

    grads: Sequence[Tensor]
    params: Sequence[Tensor] | None = None
    exp_avgs: Sequence[Tensor] | None = None
    masters: Sequence[Tensor | None] | None = None
    row_factors: Sequence[Tensor] | None = None
    col_factors: Sequence[Tensor] | None = None
    row_sums: Sequence[Tensor] | None = None
    col_sums: Sequence[Tensor] | None = None
    vector: Tensor | None = None
    """Written to by the operation: one element per matrix."""

    def device(self) -> torch.device:
        """The device of the first matrix; the CPU if there is none. Raises if grads is no list of tensors."""
        check_sequence("grads", self.grads)
        if len(self.grads) == 0:
            return torch.device("cpu")
        _check_tensor("grads[0]", self.grads[0])
        return self.grads[0].device

    def pack(self, device: torch.device) -> bytes:
        """One row per matrix. Raises what the operations document."""
        code = _DLPACK_DEVICES.get(device.type)
        if _native.cpu_module is not None and code is not None:
            rows: bytes | None = _native.cpu_module.pack_factored(
                self.grads,
                self.params,
                self.exp_avgs,
                self.masters,
                self.row_factors,
                self.col_factors,
                self.row_sums,
                self.col_sums,
                self.vector,
                device,
                code,
                device.index or 0,
            )
            if rows is not None:
                return rows
        return self._pack_checked(device)

    def _pack_checked(self, device: torch.device) -> bytes:
        lists = {name: getattr(self, name) for name in _COLUMNS if getattr(self, name) is not None}
        for name, values in lists.items():
            check_sequence(name, values)
            if len(values) != len(self.grads):
                raise ValueError(
                    f"{name} has {len(values)} entries and grads has {len(self.grads)}; they must be as many"
                )
        for i, grad in enumerate(self.grads):
            _check_matrix(f"grads[{i}]", grad, device)
            for name, values in lists.items():
                if name == "masters" and values[i] is None:
                    continue
                _check_entry(f"{name}[{i}]", name, values[i], grad, device)
                if name == "masters" and lists["params"][i].dtype is torch.float32:
                    raise TypeError(
                        f"masters[{i}] belongs to a float32 parameter, which needs no master copy; pass None there, "
                        "or masters=None if all parameters are float32"
                    )
        for name in _READ:
            if name in lists:
                lists[name] = [tensor.contiguous() for tensor in lists[name]]
                setattr(self, name, lists[name])

        extents: list[tuple[int, int, str, bool]] = []  # begin, end, name, whether it is written to

        def address(name: str, tensor: Tensor, written: bool) -> int:
            begin = _address(name, tensor)
            if begin:
                extents.append((begin, begin + tensor.numel() * tensor.element_size(), name, written))
            return begin

        if self.vector is not None:
            address("out", self.vector, True)
        rows = array("q")
        for i, grad in enumerate(self.grads):
            row = dict.fromkeys(_COLUMNS, 0)
            for name, values in lists.items():
                if values[i] is not None:
                    row[name] = address(f"{name}[{i}]", values[i], name not in _READ)
            kinds = _DTYPE_CODES[grad.dtype] << 16
            copy = 0
            if self.params is not None:
                code = _DTYPE_CODES[self.params[i].dtype]
                with_master = self.masters is not None and self.masters[i] is not None
                kinds |= code << 8 if with_master else code
                if with_master:
                    row["params"], copy = row["masters"], row["params"]
            pointers = (row["params"], copy, row["grads"], row["exp_avgs"], row["row_factors"], row["col_factors"])
            count, cols = grad.shape[:-2].numel(), grad.shape[-1]
            rows.extend((*pointers, row["row_sums"], row["col_sums"], count, grad.shape[-2], cols, i, kinds))
        _check_overlaps(extents)
        return rows.tobytes()


_COLUMNS = ("grads", "params", "exp_avgs", "masters", "row_factors", "col_factors", "row_sums", "col_sums")
_READ = ("grads", "row_factors", "col_factors")


def _check_matrix(where: str, tensor: Tensor, device: torch.device) -> None:
    _check_tensor(where, tensor)
    if tensor.dtype not in _DTYPE_CODES:
        raise TypeError(f"{where} has dtype {tensor.dtype}; it must be {_DTYPE_NAMES}")
    if tensor.dim() < 2:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}; it must have rows and columns, as the last two")
    _check_device(where, tensor, device)


def _check_device(where: str, tensor: Tensor, device: torch.device, like: str = "grads[0]") -> None:
    if tensor.device != device:
        raise ValueError(f"{where} is on {tensor.device}; it must be on {device} like {like}")


def _check_entry(where: str, name: str, tensor: Tensor, grad: Tensor, device: torch.device) -> None:
    """Raise unless `tensor`, an entry of list `name`, fits its gradient."""
    _check_tensor(where, tensor)
    if name in ("params", "grads"):
        if tensor.dtype not in _DTYPE_CODES:
            raise TypeError(f"{where} has dtype {tensor.dtype}; it must be {_DTYPE_NAMES}")
    elif tensor.dtype is not torch.float32:
        raise TypeError(f"{where} has dtype {tensor.dtype}; it must be torch.float32")
    _check_device(where, tensor, device)
    shape = grad.shape
    if name.startswith("row_"):
        shape = grad.shape[:-1]
    elif name.startswith("col_"):
        shape = grad.shape[:-2] + grad.shape[-1:]
    if tensor.shape != shape:
        raise ValueError(
            f"{where} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}, "
            f"for its gradient's {tuple(grad.shape)}"
        )
    if name not in _READ and not tensor.is_contiguous():
        raise ValueError(f"{where} has strides {tensor.stride()}; what is written to must be contiguous")


def check_vector(name: str, vector: Tensor, count: int, device: torch.device, like: str = "grads[0]") -> None:
    """Raise unless `vector` is a float32 tensor of `count` elements on `device`."""
    if not isinstance(vector, Tensor):
        raise TypeError(f"{name} is a {type(vector).__name__}; it must be a float32 tensor, one element per tensor")
    if vector.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {vector.dtype}; it must be torch.float32")
    if vector.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it must be ({count},), one element per tensor")
    check_memory(name, vector)
    if count:
        _check_device(name, vector, device, like)

"""Checking the tensors of the passes of LAMB steps, and packing their addresses; see `_tables`.

The row layout is that of ``csrc/common/lamb.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels._tables import (
    _DLPACK_DEVICES,
    _DTYPE_CODES,
    Table,
    _address,
    _check_adam_tensor,
    _check_overlaps,
    _check_tensor,
    check_sequence,
)


def lamb_table(
    params: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
    directions: Sequence[Tensor] | None = None,
) -> Table:
    """One row per non-empty parameter: of the first pass with `grads`, of the second without.

    Raises what `lamb_moments` and `lamb_update` document.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, directions)
    cpu = _native.cpu_module
    if cpu is not None and type(params) in (list, tuple) and params and isinstance(params[0], Tensor):
        device = params[0].device
        code = _DLPACK_DEVICES.get(device.type)
        if code is not None:
            rows = cpu.pack_lamb(*lists, device, code, device.index or 0)
            if rows is not None:
                return Table(rows, device)
    return _lamb_table_checked(*lists)


def _lamb_table_checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
    directions: Sequence[Tensor] | None = None,
) -> Table:
    lists: dict[str, Sequence[Tensor | None]] = {"params": params}
    if grads is not None:
        lists["grads"] = grads
    lists.update(exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if masters is not None:
        lists["masters"] = masters
    if directions is not None:
        lists["directions"] = directions
    for name, values in lists.items():
        check_sequence(name, values)
        if len(values) != len(params):
            raise ValueError(f"{name} has {len(values)} entries and params has {len(params)}; they must be as many")
    if len(params) == 0:
        return Table(b"", torch.device("cpu"))

    written = ("params", "masters") if grads is None else ("exp_avgs", "exp_avg_sqs", "directions")
    rows = array("q")
    extents: list[tuple[int, int, str, bool]] = []  # begin, end, name, whether it is written to
    _check_tensor("params[0]", params[0])
    device = params[0].device
    for i, param in enumerate(params):
        _check_tensor(f"params[{i}]", param)
        addresses = {"grads": 0, "directions": 0}
        for name, values in lists.items():
            tensor = values[i]
            if name == "masters" and tensor is None:
                continue
            where = f"{name}[{i}]"
            _check_tensor(where, tensor)
            assert tensor is not None
            _check_adam_tensor(where, name, tensor, param, device)
            addresses[name] = address = _address(where, tensor)
            if address:
                extents.append(
                    (address, address + tensor.shape.numel() * tensor.element_size(), where, name in written)
                )
        if param.shape.numel() == 0:
            continue
        kinds = _DTYPE_CODES[param.dtype]
        weight, copy = addresses["params"], 0
        if "masters" in addresses:
            kinds, weight, copy = kinds << 8, addresses["masters"], weight
        if grads is not None:
            kinds |= _DTYPE_CODES[grads[i].dtype] << 16
        averages = (addresses["exp_avgs"], addresses["exp_avg_sqs"])
        rows.extend(
            (weight, copy, addresses["grads"], *averages, param.shape.numel(), i, kinds, addresses["directions"])
        )
    _check_overlaps(extents)
    return Table(rows.tobytes(), device)

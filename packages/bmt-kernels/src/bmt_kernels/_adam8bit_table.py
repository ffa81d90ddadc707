"""Checking the tensors of an Adam step with 8-bit moments and packing their addresses; see `_tables`."""

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
from bmt_kernels.quantize import check_absmax, check_block_offset
from bmt_kernels.reference.quantize import block_count


def adam8bit_table(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    absmax_avgs: Sequence[Tensor],
    absmax_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
    block_offsets: Sequence[int] | None,
) -> Table:
    """One row per non-empty parameter. Raises what `adam8bit_step` documents."""
    lists = (params, grads, exp_avgs, exp_avg_sqs, absmax_avgs, absmax_avg_sqs, masters, block_offsets)
    cpu = _native.cpu_module
    if cpu is not None and type(params) in (list, tuple) and params and isinstance(params[0], Tensor):
        device = params[0].device
        code = _DLPACK_DEVICES.get(device.type)
        if code is not None:
            rows = cpu.pack_adam8bit(*lists, device, code, device.index or 0)
            if rows is not None:
                return Table(rows, device)
    return _adam8bit_table_checked(*lists)


def _adam8bit_table_checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    absmax_avgs: Sequence[Tensor],
    absmax_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
    block_offsets: Sequence[int] | None,
) -> Table:
    lists: dict[str, Sequence[Tensor | None]] = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "absmax_avgs": absmax_avgs,
        "absmax_avg_sqs": absmax_avg_sqs,
    }
    if masters is not None:
        lists["masters"] = masters
    for name, values in (*lists.items(), ("block_offsets", block_offsets)):
        if values is None:
            continue
        check_sequence(name, values)
        if len(values) != len(params):
            raise ValueError(f"{name} has {len(values)} entries and params has {len(params)}; they must be as many")
    if len(params) == 0:
        return Table(b"", torch.device("cpu"))

    rows = array("q")
    extents: list[tuple[int, int, str, bool]] = []  # begin, end, name, whether it is written to
    _check_tensor("params[0]", params[0])
    device = params[0].device
    for i, param in enumerate(params):
        _check_tensor(f"params[{i}]", param)
        offset = 0
        if block_offsets is not None:
            offset = block_offsets[i]
            check_block_offset(f"block_offsets[{i}]", offset)
        addresses = {"masters": 0}
        for name, values in lists.items():
            tensor = values[i]
            if name == "masters" and tensor is None:
                continue
            where = f"{name}[{i}]"
            _check_tensor(where, tensor)
            assert tensor is not None
            if name in ("absmax_avgs", "absmax_avg_sqs"):
                check_absmax(where, tensor, block_count(param.shape.numel(), offset), device)
                if not tensor.is_contiguous():
                    raise ValueError(f"{where} has strides {tensor.stride()}; it must be contiguous")
            else:
                _check_adam_tensor(where, name, tensor, param, device, moments=torch.uint8)
            addresses[name] = address = _address(where, tensor)
            if address:
                extents.append(
                    (address, address + tensor.shape.numel() * tensor.element_size(), where, name != "grads")
                )
        if param.shape.numel() == 0:
            continue
        kinds = _DTYPE_CODES[param.dtype] | _DTYPE_CODES[grads[i].dtype] << 16
        weight, copy = addresses["params"], 0
        if masters is not None and masters[i] is not None:
            kinds = _DTYPE_CODES[param.dtype] << 8 | _DTYPE_CODES[grads[i].dtype] << 16
            weight, copy = addresses["masters"], weight
        moments = (addresses[name] for name in ("grads", "exp_avgs", "exp_avg_sqs", "absmax_avgs", "absmax_avg_sqs"))
        rows.extend((weight, copy, *moments, offset, param.shape.numel(), kinds))
    _check_overlaps(extents)
    return Table(rows.tobytes(), device)

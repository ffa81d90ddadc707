"""Checking the tensors of an Adam step with 8-bit moments and packing their addresses; see `_tables`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels._tables import (
    _DTYPE_CODES,
    Table,
    _check_adam_tensor,
    check_lengths,
    checked_addresses,
    device_of,
    packed,
    weight_and_copy,
)
from bmt_kernels.quantize import check_absmax, check_block_offset
from bmt_kernels.reference.quantize import block_count

_ABSMAX = ("absmax_avgs", "absmax_avg_sqs")


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
    return packed("pack_adam8bit", *lists) or _adam8bit_table_checked(*lists)


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
    if block_offsets is not None:
        check_lengths({"params": params, "block_offsets": block_offsets})
        for i, offset in enumerate(block_offsets):
            check_block_offset(f"block_offsets[{i}]", offset)

    def offset_of(i: int) -> int:
        return block_offsets[i] if block_offsets is not None else 0

    def check(where: str, name: str, tensor: Tensor, param: Tensor, device: torch.device, i: int) -> None:
        if name not in _ABSMAX:
            _check_adam_tensor(where, name, tensor, param, device, moments=torch.uint8)
            return
        check_absmax(where, tensor, block_count(param.shape.numel(), offset_of(i)), device)
        if not tensor.is_contiguous():
            raise ValueError(f"{where} has strides {tensor.stride()}; it must be contiguous")

    rows = array("q")
    for i, at in checked_addresses(lists, [name for name in lists if name != "grads"], check):
        weight, copy, kinds = weight_and_copy(params[i], at)
        kinds |= _DTYPE_CODES[grads[i].dtype] << 16
        states = (at[name] for name in ("grads", "exp_avgs", "exp_avg_sqs", *_ABSMAX))
        rows.extend((weight, copy, *states, offset_of(i), params[i].shape.numel(), kinds))
    return Table(rows.tobytes(), device_of(params))

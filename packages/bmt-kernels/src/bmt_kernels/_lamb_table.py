"""Checking the tensors of the passes of LAMB steps, and packing their addresses; see `_tables`.

The row layout is that of ``csrc/common/lamb.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from bmt_kernels._tables import _DTYPE_CODES, Table, checked_addresses, device_of, packed, weight_and_copy


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
    return packed("pack_lamb", *lists) or _lamb_table_checked(*lists)


def _lamb_table_checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None,
    directions: Sequence[Tensor] | None = None,
) -> Table:
    lists: dict[str, Sequence[Tensor | None]] = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    given = {"grads": grads, "masters": masters, "directions": directions}
    lists.update({name: values for name, values in given.items() if values is not None})
    written = ("params", "masters") if grads is None else ("exp_avgs", "exp_avg_sqs", "directions")
    rows = array("q")
    for i, at in checked_addresses(lists, written):
        weight, copy, kinds = weight_and_copy(params[i], at)
        if grads is not None:
            kinds |= _DTYPE_CODES[grads[i].dtype] << 16
        pointers = (weight, copy, at.get("grads", 0), at["exp_avgs"], at["exp_avg_sqs"])
        rows.extend((*pointers, params[i].shape.numel(), i, kinds, at.get("directions", 0)))
    return Table(rows.tobytes(), device_of(params))

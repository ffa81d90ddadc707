"""The plain state dict of a model, on rank 0 alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, current_context

from .state import logical_tensor, sharded_entries, unshards_state


def rank0_state_dict(model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """The plain state dict in the host memory of rank 0; the other ranks get no entries. Every rank must call it.

    A model whose ``state_dict`` returns this is saved and loaded like any other.

    Args:
        model: any module, sharded or not.
        destination: gets the entries, and is returned.
        prefix: of all names.
    """
    state = OrderedDict() if destination is None else destination
    if not unshards_state():
        nn.Module.state_dict(model, destination=state, prefix=prefix, keep_vars=True)
        return state
    context = current_context()
    with sharded_entries():
        entries = nn.Module.state_dict(model, prefix=prefix, keep_vars=True)
    kept = _take_to_rank0(entries, context)
    if context.rank == 0:
        state.update(kept)
    return state


def _take_to_rank0(entries: Mapping[str, Any], context: ParallelContext) -> dict[str, Any]:
    """Copies of entries in host memory on rank 0, one for all names of a value; None elsewhere. All ranks take part."""
    taken: dict[int, Any] = {}
    for value in entries.values():
        if id(value) not in taken:
            taken[id(value)] = _take(value, context)
    return {name: taken[id(value)] for name, value in entries.items()}


def _take(value: Any, context: ParallelContext) -> Any:
    """A copy of an entry in host memory on rank 0; None elsewhere."""
    value = logical_tensor(value)  # every rank takes part
    if context.rank != 0:
        return None
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)

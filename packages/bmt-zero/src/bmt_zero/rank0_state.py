"""The plain state dict of a model, on rank 0 alone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from bmt_comm import current_context

from .checkpoint import take_to_rank0
from .state import gathers_state, sharded_entries


def rank0_state_dict(model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """The plain state dict in the host memory of rank 0; the other ranks get no entries. Every rank must call it.

    A model whose ``state_dict`` returns this is saved and loaded as any other.

    Args:
        model: any module, sharded or not.
        destination: gets the entries, and is returned.
        prefix: what names begin with.
    """
    state = OrderedDict() if destination is None else destination
    if not gathers_state():
        nn.Module.state_dict(model, destination=state, prefix=prefix, keep_vars=True)
        return state
    context = current_context()
    with sharded_entries():
        entries = nn.Module.state_dict(model, prefix=prefix, keep_vars=True)
    kept = take_to_rank0(entries, context)
    if context.rank == 0:
        state.update(kept)
    return state

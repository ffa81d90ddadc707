"""Unsharded state dicts of models whose plain parameters are sharded over tensor-parallel ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bmt_comm import is_tp_shard, slice_of, tp_shard_of, unshard_tp


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with unsharded tensors in place of shards. Every tensor-parallel rank must call it.

    Parameters that bmt_zero shards are unsharded in any state dict. This function does it for plain parameters, too.
    """
    shards = {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_tp_shard(p)}
    state: dict[str, Any] = model.state_dict()
    unsharded: dict[int, Tensor] = {}
    for name, param in shards.items():
        if name in state:
            if id(param) not in unsharded:
                unsharded[id(param)] = unshard_tp(param.detach(), slice_of(param))
            state[name] = unsharded[id(param)]
    return state


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a state dict of unsharded tensors, such as the plain model's. This rank takes its shards of them.

    Returns:
        The result of ``torch.nn.Module.load_state_dict``: the missing and the surplus names.

    Raises:
        ValueError: an entry does not have the shape of the logical parameter. The model is unchanged then.
        RuntimeError: under ``strict``, names are missing or surplus.
    """
    entries: Any = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # the versions of the modules that saved it
        entries._metadata = state_dict._metadata
    for name, param in model.named_parameters(remove_duplicate=False):
        if not is_tp_shard(param) or name not in entries:
            continue
        where = slice_of(param)
        if tuple(entries[name].shape) != where.shape:
            raise ValueError(
                f"entry {name!r} has shape {tuple(entries[name].shape)}; the logical parameter has {where.shape}"
            )
        entries[name] = tp_shard_of(entries[name], where)
    return model.load_state_dict(entries, strict)

"""Whole state dicts, with plain names, of models whose plain parameters are cut over tensor-parallel ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bmt_comm import is_piece, slice_of, tp_shard_of, unshard_tp


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with whole tensors in place of pieces. Every tensor-parallel rank must call it.

    Parameters that bmt_zero shards are whole in any state dict; this serves models without it, too.
    """
    pieces = {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_piece(p)}
    state: dict[str, Any] = model.state_dict()
    joined: dict[int, Tensor] = {}
    for name, param in pieces.items():
        if name in state:
            if id(param) not in joined:
                joined[id(param)] = unshard_tp(param.detach(), slice_of(param))
            state[name] = joined[id(param)]
    return state


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a state dict of whole tensors, such as the plain model's, of which this rank takes its pieces.

    Returns:
        what ``torch.nn.Module.load_state_dict`` does: the missing and the surplus names.

    Raises:
        ValueError: an entry has another shape than the whole parameter. The model is as it was then.
        RuntimeError: under ``strict``, names are missing or surplus.
    """
    entries: Any = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # the versions of the modules that saved it
        entries._metadata = state_dict._metadata
    for name, param in model.named_parameters(remove_duplicate=False):
        if not is_piece(param) or name not in entries:
            continue
        found = slice_of(param)
        if tuple(entries[name].shape) != found.shape:
            raise ValueError(
                f"entry {name!r} has shape {tuple(entries[name].shape)}; the whole parameter has {found.shape}"
            )
        entries[name] = tp_shard_of(entries[name], found)
    return model.load_state_dict(entries, strict)

"""Finding the tensors in a module's inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def find_tensors(value: Any) -> list[Tensor]:
    """The tensors in nested containers and objects (dataclasses, caches), each object looked into once."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for leaf in tree_flatten(waiting.pop())[0]:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif not isinstance(leaf, (*_PLAIN, type, torch.nn.Module)) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting.append(_contents(leaf))
    return tensors


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # a dict of a kind that torch does not know
        return list(value.values())
    if isinstance(value, (set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if callable(value):
        return []
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    found = [getattr(value, name, None) for name in slots if isinstance(name, str) and not name.startswith("__")]
    return found + list(getattr(value, "__dict__", {}).values())


def replaced(value: Any, is_wanted: Any, replace: Any) -> Any:
    """``value`` with ``replace(tensor)`` for the tensors that ``is_wanted`` chooses."""
    return tree_map_only(Tensor, lambda x: replace(x) if is_wanted(x) else x, value)

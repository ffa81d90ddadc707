"""Find and replace the tensors in a module's inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, torch.nn.Module)
_ITERATORS: Any = (type(iter([])), type(iter(())))


def find_tensors(value: Any, in_objects: bool = True) -> list[Tensor]:
    """The tensors in nested containers and, with ``in_objects``, in objects (dataclasses, caches)."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        leaves = value if type(value) in (tuple, list) else tree_flatten(value)[0]
        if len(leaves) == 1 and leaves[0] is value:  # no container that torch knows
            leaves = _contents(value) if in_objects else []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting.append(leaf)
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with the results of a function in place of the tensors in nested containers and dataclasses.

    The containers and dataclasses are new ones.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return map_fields(partial(map_tensors, function), leaf)

    return tree_map(of_leaf, value)


def map_fields(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a dataclass, frozen or not, with the results of a function in place of its fields."""
    twin = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(twin, field.name, function(getattr(value, field.name)))
    return twin


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # a dict of a class that torch does not know
        return list(value.values())
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, _ITERATORS):
        return list(copy.copy(value))  # the caller's is not consumed
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if callable(value):
        return []
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    slots = [getattr(value, name, None) for name in names if isinstance(name, str) and not name.startswith("__")]
    return slots + list(getattr(value, "__dict__", {}).values())

"""Caches of keys and values in Hugging Face models. A checkpointed layer must not fill a cache twice.

A checkpointed layer computes twice. In the recomputation, the cache would already have the layer's keys and values. So
models make no caches in training, as with transformers' own checkpointing. If a layer gets a cache nevertheless (a
learned prefix, or a model that needs one), its recomputation gets the cache as it was before the forward.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from typing import Any

import torch
from torch import nn

from bmt_comm import not_compiled

from .outputs import map_fields


def turn_off_caches(model: nn.Module) -> None:
    """Pass ``use_cache=False`` to the modules of ``model`` that take ``use_cache``, while they train."""
    for module in model.modules():
        if not hasattr(module, "config"):
            continue
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        if "use_cache" in names:
            module.register_forward_pre_hook(_WithoutCache(names), with_kwargs=True)


class _WithoutCache:
    """A hook before forward.

    Args:
        names: of the arguments of forward.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        asked = given.get("use_cache")
        if asked is None:
            asked = getattr(module.config, "use_cache", False)
        if not asked:
            return None
        if given.get("use_cache") is not None:
            warnings.warn(
                f"use_cache=True is ignored by {type(module).__name__} in training: its layers are checkpointed",
                stacklevel=2,
            )
        place = self.names.index("use_cache")
        if place < len(args):
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}


def copied_arguments(value: Any) -> Any:
    """Arguments of a forward with copies of their containers, dataclasses and caches, which share the tensors."""
    if type(value) in (list, tuple):
        return type(value)(map(copied_arguments, value))
    if type(value) is dict:
        return {key: copied_arguments(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        return map_fields(copied_arguments, value)
    if not hasattr(type(value), "get_seq_length"):  # of transformers' caches and of their layers
        return value
    twin = copy.copy(value)
    twin.__dict__.update({key: copied_arguments(item) for key, item in vars(value).items()})
    return twin

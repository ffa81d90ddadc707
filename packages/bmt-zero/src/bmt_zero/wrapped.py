"""Undo ``BMTrainModelWrapper`` for modules that become parts of a Block."""

from __future__ import annotations

from typing import Any

from torch import nn

from bmt_comm import ParallelContext

from .hooks import ForwardHooks
from .options import Options
from .parameter_group import ParameterGroup
from .shard import build_standalone, forget_sharding, sharding_of, values_of


class WrapperHook:
    """A hook before the forward of a wrapped model.

    Attributes:
        hooks: by module; those of one module in the order in which they run.
        key: of this hook among the model's.
    """

    hooks: dict[nn.Module, list[ForwardHooks]]
    key: int

    def remove(self, model: nn.Module) -> None:
        del model._forward_pre_hooks[self.key]
        model._forward_pre_hooks_with_kwargs.pop(self.key, None)


def blocks_of_wrappers(module: nn.Module) -> set[nn.Module]:
    """The Blocks that wrappers of a module and its submodules have made."""
    return {part for _, hook in _wrappers(module) for part in hook.hooks if sharding_of(part) is not None}


def unwrap(module: nn.Module, context: ParallelContext) -> None:
    """Undo the wrappers of a module and its submodules. Parameters stay sharded, each as a group by itself.

    Every rank must call it. Gradients are dropped.
    """
    groups: dict[ParameterGroup, None] = {}
    for model, wrapper in _wrappers(module):
        wrapper.remove(model)
        for hooks in (each for of_part in wrapper.hooks.values() for each in of_part):
            groups[hooks.group] = None
        for part in wrapper.hooks:
            if sharding_of(part) is not None:
                forget_sharding(part)
                part.__dict__.pop("_module", None)
    for part in module.modules():
        for hook in list(part._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, ForwardHooks) and owner.group in groups:
                owner.remove()
    for group in groups:
        for reducer in group.reducers:
            flat = reducer.flat
            params = list(flat.params)
            values = [values_of(param, context.device, flat.shard_comm, flat.replicate_comm) for param in params]
            for param, value in zip(params, values, strict=True):
                build_standalone(param, context, value, Options(group.level))
            flat.drop_storage()


def _wrappers(module: nn.Module) -> list[tuple[nn.Module, WrapperHook]]:
    hooks: list[tuple[nn.Module, Any]] = [
        (model, hook) for model in module.modules() for hook in model._forward_pre_hooks.values()
    ]
    return [(model, hook) for model, hook in hooks if isinstance(hook, WrapperHook)]

"""Sharding a model that was written for one device."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

from torch import nn

from bmt_comm import ParallelContext, check_agreement, current_context, slice_of

from .block import Block
from .parameter_group import ForwardHooks, Slot, link
from .precision import MixedPrecision
from .shard import (
    Options,
    check_buffer,
    check_level,
    check_parameter,
    find_slots,
    group_of,
    shard_together,
    sharding_of,
    share_buffers,
)
from .sharded_parameter import ShardedParameter
from .stage_entry import is_stage_local

M = TypeVar("M", bound=nn.Module)

_LARGE = 1 << 20
"""Bytes. A module outside of the layers that has more is unsharded while it computes; all smaller ones together, from
the beginning of the model's forward to its end in backward."""


def BMTrainModelWrapper(
    model: M,
    *,
    use_checkpoint: bool = True,
    zero_level: int | None = None,
    precision: MixedPrecision | None = None,
) -> M:
    """Shard all parameters of any module, in place.

    The elements of the outermost ``nn.ModuleList``s (a transformer's layers) become Blocks; ``ModuleList``s inside them
    are part of their Block. Outside of them, each module with large parameters (embeddings, a head) is unsharded while
    it computes, and all small ones are unsharded together. All of these prefetch each other in the order in which the
    model has them. Parameters keep their identity (tied weights stay tied), names and the values of rank 0; buffers
    take rank 0's values and move to the context's device.

    Returns ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a parameter is shared by two layers, or by a layer and the rest of the model, or cannot be
            sharded (see :func:`shard`); the model is as it was then.
    """
    context = current_context()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if sharding_of(model) is not None:
        return model
    level = check_level(zero_level, context)
    layers = _layers(model)
    rest = _slots_outside(model, layers)
    _check(model, layers, rest, context)
    precision = precision or MixedPrecision()
    inside = dataclasses.replace(precision, output_dtype=None)
    for module in layers:
        Block(module, use_checkpoint, level, precision=inside)
    share_buffers(model, context)
    outside = _shard_rest(model, rest, Options(level, inside), precision, context)
    chain = outside.pop(model, [])
    for path, module in model.named_modules():
        sharding = sharding_of(module)
        if sharding is not None:
            group_of(module).name = f"{path} (a {type(module).__name__})"
            if module in layers:  # others keep to the list that they are in
                chain.append(sharding.hooks)
        chain += outside.get(module, [])
    link(chain)
    return model


def _layers(model: nn.Module) -> dict[nn.Module, None]:
    """The elements of the outermost ModuleLists, and recurrent modules, which keep lists of their weights.

    An element that is itself but a container, with no forward to run as a Block, is looked into instead.
    """
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is None or sharding_of(child) is not None:
                continue
            is_layer = isinstance(module, nn.ModuleList) and type(child).forward is not nn.Module.forward
            if not is_layer and not isinstance(child, nn.RNNBase):
                visit(child)
            elif any(True for _ in child.parameters()):
                found[child] = None

    visit(model)
    return found


def _slots_outside(model: nn.Module, layers: dict[nn.Module, None]) -> list[Slot]:
    """Where parameters are that are not sharded yet and belong to no layer."""
    found: list[Slot] = []

    def visit(module: nn.Module, prefix: str) -> None:
        if sharding_of(module) is not None or module in layers:
            return
        for name, param in module._parameters.items():
            if param is not None and not isinstance(param, ShardedParameter):
                found.append(Slot(module, name, -1, prefix + name))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


class _Rest(NamedTuple):
    """Modules that share parameters, and where they have them."""

    modules: list[nn.Module]
    slots: list[Slot]


def _shard_rest(
    model: nn.Module, slots: list[Slot], options: Options, precision: MixedPrecision, context: ParallelContext
) -> dict[nn.Module, list[ForwardHooks]]:
    """Shard what is outside of the layers; the hooks by module."""
    hooks: dict[nn.Module, list[ForwardHooks]] = {}
    small: list[Slot] = []
    for part in _connected(slots):
        params = {id(p): p for s in part.slots if (p := s.module._parameters[s.name]) is not None}
        if sum(p.numel() * p.element_size() for p in params.values()) < _LARGE:
            small += part.slots
            continue
        name = f"{part.slots[0].path.rpartition('.')[0]} (a {type(part.modules[0]).__name__})"
        for each in shard_together(part.modules, part.slots, dataclasses.replace(options, name=name), context):
            hooks.setdefault(each.module, []).append(each)
    if small:
        name = f"the small parameters of {type(model).__name__}"
        options = dataclasses.replace(options, precision=precision, reshard_after_forward=False, name=name)
        hooks[model] = shard_together([model], small, options, context) + hooks.get(model, [])
    return hooks


def _connected(slots: list[Slot]) -> list[_Rest]:
    """The modules that own ``slots``, those together that share a parameter."""
    parts: list[_Rest] = []
    for slot in slots:
        param = slot.module._parameters[slot.name]
        joined = [
            part
            for part in parts
            if slot.module in part.modules or any(s.module._parameters[s.name] is param for s in part.slots)
        ]
        merged = _Rest([], [])
        for part in joined:
            merged.modules.extend(part.modules)
            merged.slots.extend(part.slots)
        if slot.module not in merged.modules:
            merged.modules.append(slot.module)
        merged.slots.append(slot)
        parts = [part for part in parts if part not in joined] + [merged]
    return parts


def _check(model: nn.Module, layers: dict[nn.Module, None], rest: list[Slot], context: ParallelContext) -> None:
    """Raise before anything is changed."""
    if isinstance(model, nn.RNNBase):
        raise ValueError("a recurrent module by itself is sharded by Block(model)")
    owners: dict[int, nn.Module | None] = {id(slot.module._parameters[slot.name]): None for slot in rest}
    for layer in layers:
        for slot in find_slots(layer, context):
            param = slot.module._parameters[slot.name]
            if owners.setdefault(id(param), layer) is not layer:
                other = owners[id(param)]
                where = "another layer" if other is not None else "the model outside of the layers"
                raise ValueError(
                    f"parameter {slot.path!r} of layer {type(layer).__name__} is shared with {where}; "
                    f"a Block must own its parameters"
                )
    for slot in rest:
        param = slot.module._parameters[slot.name]
        assert param is not None
        check_parameter(slot.path, param, context)
    for name, buffer in model.named_buffers():
        check_buffer(name, buffer, context)
    facts = [
        f"{n}: {slice_of(p).shape} {p.dtype} requires_grad={p.requires_grad}"
        for n, p in model.named_parameters()
        if not is_stage_local(p)  # other stages do not have those
    ]
    check_agreement(context.outer_zero, f"the parameters of {type(model).__name__}", facts)

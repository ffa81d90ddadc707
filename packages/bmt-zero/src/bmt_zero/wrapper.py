"""Sharding a model that was written for one device."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import nn

from bmt_comm import ParallelContext, check_agreement, current_context, slice_of

from .block import Block, find_slots
from .conversion import check_buffer, check_parameter, convert, move_buffers, whole_values
from .module import DistributedModule
from .parameter import DistributedParameter
from .precision import MixedPrecision
from .stage_entry import is_stage_local
from .unit import link, make_standalone, shard_comms

M = TypeVar("M", bound=nn.Module)

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def BMTrainModelWrapper(
    model: M,
    *,
    use_checkpoint: bool = True,
    zero_level: int | None = None,
    precision: MixedPrecision | None = None,
) -> M:
    """Shard all parameters of any module, in place.

    The elements of the outermost ``nn.ModuleList``s (a transformer's layers) become Blocks that gather ahead of
    each other; ``ModuleList``s inside them are part of their Block. All other parameters are sharded one by
    one and gathered where a module reads them. Parameters keep their identity (tied weights stay tied), names
    and the values of rank 0; buffers move to the context's device.

    Returns ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a parameter is shared by two layers, or by a layer and the rest of the model, or cannot be
            sharded (see :class:`Block`); the model is as it was then.
    """
    context = current_context()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    sites = _sites(model)
    layers = {site.layer: None for site in sites}
    rest = _parameters_outside(model, layers)
    _check(model, layers, rest, context)
    everything = list(model.modules())
    blocks: dict[nn.Module, Block] = {}
    for site in sites:
        if site.layer not in blocks:
            blocks[site.layer] = Block(site.layer, use_checkpoint, zero_level, precision=precision)
    for module in everything:
        for name, child in module._modules.items():
            if child in blocks:  # in its list, and wherever else the model has it
                module._modules[name] = blocks[child]
    for parent in dict.fromkeys(site.parent for site in sites):
        link([b.unit for b in dict.fromkeys(parent.children()) if isinstance(b, Block)])
    level = context.zero_level if zero_level is None else zero_level
    for param in {id(p): p for _, p in rest.values()}.values():
        comms = shard_comms(context, getattr(param, "tp_mode", False), level)
        whole = whole_values(param, context.device, *comms)
        make_standalone(convert(param, context), context, whole, level, precision)
    for module, _ in rest.values():
        if not isinstance(module, DistributedModule):
            module.__class__ = _distributed_class(type(module))
    move_buffers(model, context.device)
    return model


class _Site(NamedTuple):
    """Where a layer that is to become a Block hangs."""

    parent: nn.Module
    layer: nn.Module


def _sites(model: nn.Module) -> list[_Site]:
    """The elements of the outermost ModuleLists, and recurrent modules, which cannot be gathered where they
    are read because they keep lists of their weights.

    An element that is itself but a container, with no forward to run as a Block, is looked into instead.
    """
    found: list[_Site] = []

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is None or isinstance(child, Block):
                continue
            is_layer = isinstance(module, nn.ModuleList) and type(child).forward is not nn.Module.forward
            if not is_layer and not isinstance(child, nn.RNNBase):
                visit(child)
            elif any(True for _ in child.parameters()):
                found.append(_Site(module, child))

    if not isinstance(model, Block):
        visit(model)
    return found


def _parameters_outside(model: nn.Module, layers: dict[nn.Module, None]) -> dict[str, tuple[nn.Module, nn.Parameter]]:
    """Parameters, not sharded yet, that belong to no layer and no Block: name to (module, parameter)."""
    found: dict[str, tuple[nn.Module, nn.Parameter]] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if isinstance(module, Block) or module in layers:
            return
        for name, param in module._parameters.items():
            if param is not None and not isinstance(param, DistributedParameter):
                found[prefix + name] = (module, param)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def _check(
    model: nn.Module,
    layers: dict[nn.Module, None],
    rest: dict[str, tuple[nn.Module, nn.Parameter]],
    context: ParallelContext,
) -> None:
    """Raise before anything is changed."""
    if isinstance(model, nn.RNNBase):
        raise ValueError("a recurrent module by itself is sharded by Block(model)")
    owners: dict[int, nn.Module | None] = {id(param): None for _, param in rest.values()}
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
    for name, (_, param) in rest.items():
        check_parameter(name, param, context)
    for name, buffer in model.named_buffers():
        check_buffer(name, buffer, context)
    facts = [
        f"{n}: {slice_of(p).shape} {p.dtype} requires_grad={p.requires_grad}"
        for n, p in model.named_parameters()
        if not is_stage_local(p)  # other stages do not have those
    ]
    check_agreement(context.outer_zero, f"the parameters of {type(model).__name__}", facts)


def _distributed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with gathering where it reads its parameters."""
    found = _classes.get(cls)
    if found is None:
        found = _classes[cls] = type(cls.__name__, (DistributedModule, cls), {"__module__": cls.__module__})
    return found

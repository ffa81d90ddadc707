"""BMTrainModelWrapper: shard a model that was written for one device."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from bmt_comm import (
    LAYER_ATTRIBUTE,
    ParallelContext,
    check_agreement,
    current_context,
    is_stage_local,
    not_compiled,
    print_rank,
)

from .block import Block
from .caches import turn_off_caches
from .hooks import ForwardHooks, link
from .kept_operations import UseCheckpoint, kept_results
from .options import Options
from .parameter_group import Slot
from .precision import MixedPrecision
from .readable_parameters import let_others_read
from .registrations import registrations
from .repeated_layers import find_layers
from .shard import (
    agreed,
    build_group,
    check_level,
    check_not_scripted,
    check_offload,
    check_parameter,
    find_slots,
    is_standalone,
    parameter_fact,
    sharding_of,
    share_buffers,
)
from .sharded_parameter import ShardedParameter
from .wrapped import WrapperHook

M = TypeVar("M", bound=nn.Module)

_LARGE = 1 << 20
"""In bytes. A module outside of the layers with larger parameters is unsharded while it computes. All smaller ones are
unsharded together, from the beginning of the model's forward to the end of its backward."""


def BMTrainModelWrapper(
    model: M,
    *,
    use_checkpoint: UseCheckpoint = True,
    zero_level: int | None = None,
    precision: MixedPrecision | None = None,
    offload: bool = False,
) -> M:
    """Shard all parameters of any module, in place.

    The repeated layers (see :func:`find_layers`) become Blocks. Outside of them, each module with large parameters
    (embeddings, a head) is unsharded while it computes, and all small ones are unsharded together. All of these
    prefetch each other in the order of the model. Rank 0 prints to stderr which modules are Blocks.

    Parameters keep their identity (tied weights stay tied) and names. Parameters and buffers take the values of rank 0
    and the context's device. Hugging Face models whose layers are checkpointed keep no cache in training.

    Parameters that are added to the model later (adapters) are sharded when its forward begins, or when it is wrapped
    again. They stay the same objects, with the values of rank 0. All ranks must add the same parameters. A forward
    raises RuntimeError if parameters were replaced.

    ``use_checkpoint`` says what each layer keeps for backward, and ``offload`` whether shards are in host memory; see
    :func:`shard`.

    Returns ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a parameter is shared by two layers, or by a layer and the rest of the model, or cannot be
            sharded (see :func:`shard`). The model is not changed then.
    """
    context = current_context()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if sharding_of(model) is not None:
        return model
    hooks = [(module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values()]
    wrapped = [(module, hook) for module, hook in hooks if isinstance(hook, _Wrapped)]
    for module, hook in wrapped:
        hook.shard_added(module)
    if wrapped and all(isinstance(p, ShardedParameter) for p in model.parameters()):
        return model
    level, kept = check_level(zero_level, context), kept_results(use_checkpoint)
    check_offload(offload)
    for path, module in model.named_modules():
        check_not_scripted(path, module)
    layers = find_layers(model)
    if isinstance(model, nn.RNNBase):
        raise ValueError("a recurrent module by itself is sharded by Block(model)")
    rest = _slots_outside(model, layers, context)
    # Other stages do not have the parameters that are local to a stage.
    facts = _shared_with_stages(model) if context.pipe_size > 1 else []
    precision = precision or MixedPrecision()
    facts += [parameter_fact(name, p, precision) for name, p in model.named_parameters() if not is_stage_local(p)]
    facts += [f"Block {path}" for path, module in model.named_modules() if module in layers] + [f"level {level}"]
    check_agreement(context.outer_zero, f"the parameters of {type(model).__name__}", facts)
    inside = dataclasses.replace(precision, output_dtype=None)
    options = Options(level, inside, offload=offload)
    with agreed():
        for module in layers:
            Block(module, use_checkpoint, level, precision=inside, offload=offload)
        share_buffers(model, context, options)
        outside = _shard_rest(model, rest, options, precision, context)
    parts = {module: [sharding.hooks] for module in layers if (sharding := sharding_of(module)) is not None}
    for path, module in model.named_modules():
        sharding = sharding_of(module)
        if sharding is not None:
            sharding.group.name = f"{path} (a {type(module).__name__})"
    _link(model, parts | outside)
    if any(sharding.checkpoint for m in model.modules() if (sharding := sharding_of(m)) is not None):
        turn_off_caches(model)
    _Wrapped(list(model.parameters()), parts | outside, options, precision).register(model)
    print_rank(_summary(model, layers, outside, kept), file=sys.stderr)
    return model


def _link(model: nn.Module, hooks: Mapping[nn.Module, list[ForwardHooks]]) -> None:
    """Let modules in ``hooks`` prefetch each other in the order of the model. Others keep their order."""
    link([each for module in model.modules() for each in hooks.get(module, ())])


class _Wrapped(WrapperHook):
    """A hook before the forward of a wrapped model: shards parameters that were added since its last call.

    It searches for them only if something was registered with any module since then.

    Args:
        params: all parameters of the model.
        hooks: by module; those of one module in the order in which they run.
        options, precision: how the model was wrapped.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        hooks: dict[nn.Module, list[ForwardHooks]],
        options: Options,
        precision: MixedPrecision,
    ) -> None:
        self.params = params
        self.hooks = hooks
        self.options = options
        self.precision = precision
        self.seen = registrations.count
        self.key = -1

    def register(self, model: nn.Module) -> None:
        """Run before the forward of ``model``."""
        self.key = model.register_forward_pre_hook(self, with_kwargs=True).id
        self._be_first(model)

    def _be_first(self, model: nn.Module) -> None:
        """Run before the hooks that show unsharded parameters."""
        cast(OrderedDict[int, Any], model._forward_pre_hooks).move_to_end(self.key, last=False)

    @not_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = None
        for hooks in self.shard_added(model):  # new hooks do not run in this call
            changed = hooks.before(model, *(changed or (args, kwargs))) or changed
        return changed

    def shard_added(self, model: nn.Module) -> list[ForwardHooks]:
        """Shard parameters that were added. Returns the new hooks of ``model`` itself.

        Raises:
            RuntimeError: parameters were removed, so that the new ones replace them; ranks have added different ones.
        """
        if self.seen == registrations.count:
            return []
        if any(p.handle.group.replaced for p in self.params if isinstance(p, ShardedParameter)):
            return []  # gathered_parameters has set unsharded copies, which are not new; look later
        slots, count = list(_added(model)), len(self.hooks.get(model, ()))
        if slots:
            present = {id(p) for p in model.parameters()}
            if not all(id(p) in present for p in self.params):
                module, path = slots[0][1].module, slots[0][1].path
                raise RuntimeError(
                    f"parameter {path!r}, of a {type(module).__name__}, came into the model after "
                    f"BMTrainModelWrapper, and another one has left it. Values that were copied from one to the other "
                    f"are one rank's part. Change heads and embeddings first, and wrap the model then"
                )
            self._shard(model, slots)
        self.seen = registrations.count
        hooks = self.hooks.get(model, [])
        return hooks[: len(hooks) - count]

    def _shard(self, model: nn.Module, added: list[tuple[nn.Module | None, Slot]]) -> None:
        context = current_context()
        paths: dict[bool, list[str]] = {False: [], True: []}  # by whether only this pipeline stage has them
        for owner, slot in added:
            sharding = None if owner is None else sharding_of(owner)
            paths[sharding is not None and sharding.group.options.stage_local].append(slot.path)
        for comm, added_paths in ((context.outer_zero, paths[False]), (context.zero, paths[True])):
            if added_paths:
                check_agreement(comm, "the parameters that were added", added_paths)
        owners: dict[int, nn.Module | None] = {}
        for owner, slot in added:
            check_parameter(slot.path, slot.param, context)
            if owners.setdefault(id(slot.param), owner) is not owner:
                raise ValueError(
                    f"parameter {slot.path!r} was added to several Blocks; a Block must own its parameters"
                )
        for owner in dict.fromkeys(owners.values()):
            slots = [slot for each, slot in added if each is owner]
            if owner is None:
                for module, hooks in _shard_rest(model, slots, self.options, self.precision, context).items():
                    self.hooks[module] = hooks + self.hooks.get(module, [])  # the latest hook runs first
                continue
            sharding = sharding_of(owner)
            assert sharding is not None
            name = f"the parameters that were added to {sharding.group.name}"
            group = build_group(slots, context, dataclasses.replace(sharding.group.options, name=name))
            sharding.added.append(group)
            layer = next((getattr(param, LAYER_ATTRIBUTE, None) for param in sharding.group.params), None)
            for slot in slots if layer is not None else ():
                setattr(slot.module._parameters[slot.name], LAYER_ATTRIBUTE, layer)
            self.hooks[owner] = [ForwardHooks(group, owner), *self.hooks.get(owner, [])]
        self.params += [slot.param for _, slot in added]
        _link(model, self.hooks)
        self._be_first(model)
        count = sum(slot.param.numel() for _, slot in added)
        print_rank(
            f"BMTrainModelWrapper({type(model).__name__}): {len(added)} parameters with {count} elements were added "
            f"and are sharded now",
            file=sys.stderr,
        )


def _added(model: nn.Module) -> Iterator[tuple[nn.Module | None, Slot]]:
    """The slots of parameters that are not sharded, each with the innermost sharded module around it, or None."""

    def visit(module: nn.Module, path: str, owner: nn.Module | None) -> Iterator[tuple[nn.Module | None, Slot]]:
        owner = owner if sharding_of(module) is None else module
        for name, param in module._parameters.items():
            if isinstance(param, nn.Parameter) and not isinstance(param, ShardedParameter):
                yield owner, Slot(module, name, path + name)
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{path}{name}.", owner)

    return visit(model, "", None)


def _summary(model: nn.Module, layers: Container[nn.Module], large: Container[nn.Module], kept: object) -> str:
    """A line that says how the modules of a model were sharded."""
    paths: dict[tuple[str, str], list[str]] = {}  # of the layers, by container and class
    for path, module in model.named_modules():
        if module in layers:
            container, _, name = path.rpartition(".")
            paths.setdefault((container, type(module).__name__), []).append(name)
    blocks = [
        f"{container or 'the model'}: {len(names)} {kind} ({names[0]}{f' to {names[-1]}' if names[1:] else ''})"
        for (container, kind), names in paths.items()
    ]
    activations = "their activations are kept" if kept is None else str(kept)
    what = f"Blocks ({activations}) in {'; '.join(blocks)}" if blocks else "no repeated layers"
    others = [f"{path} ({type(module).__name__})" for path, module in model.named_modules() if path and module in large]
    alone = f"; unsharded by themselves: {', '.join(others)}" if others else ""
    return f"BMTrainModelWrapper({type(model).__name__}): {what}{alone}"


def _slots_outside(model: nn.Module, layers: dict[nn.Module, None], context: ParallelContext) -> list[Slot]:
    """The slots of parameters that belong to no layer and are not sharded yet, after checking that all can be."""
    inside_blocks = [p for p in model.parameters() if isinstance(p, ShardedParameter) and not is_standalone(p)]
    inside = {part for m in model.modules() if sharding_of(m) is not None for part in m.modules()}
    paths = {path: module for path, module in model.named_modules(remove_duplicate=False) if module in layers}
    owners: dict[int, nn.Module | None] = {}
    rest = []
    for slot in find_slots(model, context, inside_blocks):
        parts = slot.path.split(".")
        owner = next((paths[path] for i in range(len(parts)) if (path := ".".join(parts[:i])) in paths), None)
        if owner is None:
            if isinstance(slot.param, ShardedParameter) or slot.module in inside:
                continue
            rest.append(slot)
        if owners.setdefault(id(slot.param), owner) is not owner:
            other = owners[id(slot.param)]
            where = "another layer" if owner and other else "the model outside of the layers"
            raise ValueError(
                f"parameter {slot.path!r} of layer {type(owner or other).__name__} is shared with {where}; "
                f"a Block must own its parameters"
            )
    return rest


def _shared_with_stages(model: nn.Module) -> list[str]:
    """The parameters outside of Blocks that a layer of this pipeline stage has, too. Other stages find none of them."""
    inside = {part for m in model.modules() if sharding_of(m) is not None for part in m.modules()}
    modules = list(model.named_modules())
    names = {id(p): f"{path}.{name}" for path, m in modules if m in inside for name, p in m._parameters.items()}
    return [
        f"{path}.{name}, which is shared with {names[id(p)]} of one pipeline stage (tie it to parameters outside of "
        f"the list only)"
        for path, m in modules
        if m not in inside
        for name, p in m._parameters.items()
        if p is not None and is_stage_local(p) and id(p) in names
    ]


def _shard_rest(
    model: nn.Module, slots: list[Slot], options: Options, precision: MixedPrecision, context: ParallelContext
) -> dict[nn.Module, list[ForwardHooks]]:
    """Shard the parameters outside of the layers. Returns the new hooks by module."""
    hooks: dict[nn.Module, list[ForwardHooks]] = {}
    small: list[Slot] = []
    for part in _connected(slots):
        params = {id(slot.param): slot.param for slot in part}
        if sum(p.nbytes for p in params.values()) < _LARGE:
            small += part
            continue
        modules = dict.fromkeys(slot.module for slot in part)
        name = f"{part[0].path.rpartition('.')[0]} (a {type(part[0].module).__name__})"
        group = build_group(part, context, dataclasses.replace(options, name=name))
        for module in modules:
            hooks.setdefault(module, []).append(ForwardHooks(group, module))
            let_others_read(module)
    if small or (hooks and model not in hooks):  # other modules read large parameters during a call of the model
        name = f"the small parameters of {type(model).__name__}"
        options = dataclasses.replace(options, precision=precision, reshard_after_forward=False, name=name)
        group = build_group(small, context, options)
        hooks.setdefault(model, []).insert(0, ForwardHooks(group, model))
        owners = {slot.module for slot in small}
        for module in model.modules():  # the base model and the encoder are called by themselves, too
            inside = [] if module is model else list(module.modules())
            if not owners.isdisjoint(inside) and any(sharding_of(each) is not None for each in inside):
                ForwardHooks(group, module, outermost_only=True)
    return hooks


def _connected(slots: list[Slot]) -> list[list[Slot]]:
    """``slots`` in parts: one part for each module, or for several modules that share a parameter."""
    parts: list[list[Slot]] = []
    for slot in slots:
        same = [part for part in parts if any(s.module is slot.module or s.param is slot.param for s in part)]
        parts = [part for part in parts if part not in same]
        parts.append([s for part in same for s in part] + [slot])
    return parts

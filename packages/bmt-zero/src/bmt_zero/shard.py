"""Sharding a module's parameters in place: validate, plan, build.

[Note: tensor-parallel ranks]
    Tensor-parallel ranks each compute the whole gradient of what they hold in common. Summed over all ranks that share
    such a parameter, it counts ``tp_size`` times, and is divided by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmt_comm import Communicator, ParallelContext, Slice, check_agreement, current_context, slice_of

from .activation_checkpoint import CheckpointedForward
from .flat_parameter import FlatParameter, write_rows
from .gradient_reducer import GradientReducer
from .layout import FlatLayout, plan_layouts
from .parameter_group import ForwardHooks, GroupHandle, ParameterGroup, Slot
from .precision import MixedPrecision
from .sharded_parameter import ShardedParameter
from .stage_entry import STAGE_LOCAL_ATTRIBUTE
from .state import add_state_hooks

M = TypeVar("M", bound=nn.Module)

_ATTRIBUTE = "_bmt_sharding"


@dataclass
class Sharding:
    """What was said when a module was sharded, and what came of it; ``sharding_of(module)``.

    Attributes:
        group: its parameters.
        hooks: before and after its forward.
        is_block: whether it was sharded by ``Block``.
        initialized: whether ``init_parameters`` leaves its parameters alone.
        stage_local: whether only the ranks of this pipeline stage have it.
        shard_comm, replicate_comm: as they were given.
        checkpoint: computes its forward again in backward; None: activations are kept.
    """

    group: ParameterGroup
    hooks: ForwardHooks
    is_block: bool = False
    initialized: bool = False
    stage_local: bool = False
    shard_comm: Communicator | None = None
    replicate_comm: Communicator | None = None
    checkpoint: CheckpointedForward | None = None


def sharding_of(module: object) -> Sharding | None:
    """How a module was sharded; None where it was not."""
    return getattr(module, "__dict__", {}).get(_ATTRIBUTE)


def group_of(module: nn.Module) -> ParameterGroup:
    """The parameter group of a sharded module.

    Raises:
        ValueError: the module was not sharded.
    """
    sharding = sharding_of(module)
    if sharding is None:
        raise ValueError(f"module {type(module).__name__} is not sharded; pass it to bmt_zero.shard or Block first")
    return sharding.group


def shard(
    module: M,
    zero_level: int | None = None,
    *,
    use_checkpoint: bool = False,
    precision: MixedPrecision | None = None,
    shard_comm: Communicator | None = None,
    replicate_comm: Communicator | None = None,
    stage_local: bool = False,
    reshard_after_forward: bool | None = None,
    initialized: bool = False,
) -> M:
    """Shard a module's parameters in place; unshard them while it computes.

    The module keeps its class, attributes, names and parameter objects; hooks before and after its forward do the rest.
    Parameters of modules inside that were sharded before stay as they are. Parameters on the meta device get storage
    for the shards alone, to be filled by ``init_parameters`` or a checkpoint. Other parameters, and buffers, take
    the values of rank 0 and the device of the context.

    Inputs and outputs may be nested containers and objects. A tensor that reaches the loss by another way than the
    module's output (kept in an attribute, say) is not seen; return it instead. A parameter that is part of the output
    is returned as a copy. Parameters may be frozen and unfrozen at any time; those that are frozen before the module
    is sharded cost no reduction.

    Args:
        module: the module.
        zero_level: what is sharded. 0: nothing, gradients are all-reduced; 1: optimizer states; 2: gradients,
            too, and parameters from backward to forward; 3: parameters at all times. By default what
            ``init_distributed(zero_level=)`` said, which is 3.
        use_checkpoint: whether to keep only the inputs for backward, and compute the rest again there. Calls of the
            module then go through an attribute ``forward`` of the instance.
        precision: dtypes to compute and reduce in.
        shard_comm, replicate_comm: hybrid sharding: the ranks that hold a part each (of a node, say), and
            those that hold the same part. By default all ranks hold a part each.
        stage_local: whether only the ranks of this pipeline stage have the module, and share it. They take the
            values of the first of them.
        reshard_after_forward: whether parameters are resharded between forward and backward; by default at level 3.
        initialized: whether ``init_parameters`` is to leave the parameters alone.

    Returns:
        ``module``.

    Raises:
        RuntimeError: before ``init_distributed``; ranks pass different modules.
        TypeError: ``module`` is not a module.
        ValueError: it is sharded already, shares a parameter with another sharded module, or has a parameter or
            buffer that cannot be sharded (of a device, dtype or class); communicators that do not make up the ranks
            that have the module; ``stage_local`` with parameters that other stages have parts of already
            (:func:`stage_block` takes those). The module is as it was then.
    """
    context = current_context()
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if sharding_of(module) is not None:
        raise ValueError(f"module {type(module).__name__} is sharded already; shard each module once")
    level = check_level(zero_level, context)
    if (shard_comm is None) != (replicate_comm is None):
        raise ValueError("shard_comm and replicate_comm must be given together")
    slots = find_slots(module, context)
    comms = None if shard_comm is None or replicate_comm is None else (shard_comm, replicate_comm)
    options = Options(
        level, precision or MixedPrecision(), comms, stage_local, reshard_after_forward, f"a {type(module).__name__}"
    )
    if stage_local:
        check_stage(slots, context, comms or ())
    group = build_group(slots, context, options)
    share_buffers(module, context, stage_local)
    hooks = ForwardHooks(group, module, needed_in_backward=not isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    sharding = Sharding(group, hooks, False, initialized, stage_local, shard_comm, replicate_comm)
    module.__dict__[_ATTRIBUTE] = sharding
    if use_checkpoint:
        checkpoint_activations(module)
    add_state_hooks(slots)
    return module


def shard_together(
    modules: Sequence[nn.Module],
    slots: Sequence[Slot],
    options: Options,
    context: ParallelContext,
) -> list[ForwardHooks]:
    """Make one group of the parameters in ``slots``, which is unsharded while any of ``modules`` computes."""
    group = build_group(list(slots), context, options)
    hooks = [ForwardHooks(group, m, not isinstance(m, (nn.Embedding, nn.EmbeddingBag))) for m in modules]
    add_state_hooks(slots)
    return hooks


def checkpoint_activations(module: nn.Module) -> None:
    """Let a sharded module keep only its inputs for backward."""
    sharding = sharding_of(module)
    assert sharding is not None
    sharding.checkpoint = CheckpointedForward(module, sharding.group)
    module.forward = sharding.checkpoint


def forget_sharding(module: nn.Module) -> Sharding:
    """Take the hooks off a module whose parameters are to be sharded anew."""
    sharding: Sharding = module.__dict__.pop(_ATTRIBUTE)
    sharding.hooks.remove()
    if sharding.checkpoint is not None:
        del module.forward
    return sharding


@dataclass(frozen=True)
class Options:
    """How parameters are sharded; see :func:`shard`."""

    level: int
    precision: MixedPrecision
    comms: tuple[Communicator, Communicator] | None = None
    stage_local: bool = False
    reshard_after_forward: bool | None = None
    name: str = "a parameter"


# --- validate -------------------------------------------------------------------------------------


def check_level(zero_level: int | None, context: ParallelContext) -> int:
    """The ZeRO level that is meant."""
    level = context.zero_level if zero_level is None else zero_level
    if level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level={zero_level!r} is not a ZeRO level; choose 0, 1, 2 or 3")
    return level


def find_slots(module: nn.Module, context: ParallelContext) -> list[Slot]:
    """Where a module and those in it have parameters that are not sharded yet, after checking that all can be."""
    slots = []
    inside = [m for m in module.modules() if m is not module and sharding_of(m) is not None]
    theirs = {id(p) for m in inside for p in group_of(m).params}
    for module_path, child in module.named_modules(remove_duplicate=False):  # a shared one has several names
        prefix = f"{module_path}." if module_path else ""
        for name, param in child._parameters.items():
            if param is not None and id(param) not in theirs:
                check_parameter(prefix + name, param, context)
                slots.append(Slot(child, name, -1, prefix + name))
        for name, buffer in child._buffers.items():
            check_buffer(prefix + name, buffer, context)
    return slots


def check_buffer(name: str, buffer: Tensor | None, context: ParallelContext) -> None:
    """Raise unless a buffer is, or can be moved, where this rank computes."""
    if buffer is not None and buffer.device not in (context.device, torch.device("cpu")):
        raise ValueError(
            f"buffer {name!r} is on device {buffer.device}, and this rank computes on {context.device}; "
            f"move the module there first"
        )


def is_standalone(param: object) -> bool:
    """Whether a sharded parameter belongs to no module: it was built as a ``DistributedParameter``."""
    return isinstance(param, ShardedParameter) and not param.handle.flat.allocate  # type: ignore[attr-defined]


def check_parameter(name: str, param: nn.Parameter, context: ParallelContext) -> None:
    """Raise unless a parameter can be sharded."""
    if isinstance(param, ShardedParameter) and not is_standalone(param):
        raise ValueError(
            f"parameter {name!r} (shape {param.bmt_slice.shape}) belongs to another Block already; put the modules "
            f"that share it into one Block, or keep it outside of both"
        )
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} has no shape yet; run the module once, so that it gets one, and then wrap"
        )
    if hasattr(param, "placements"):
        raise ValueError(f"parameter {name!r} is a DTensor; pass the module before it is sharded by something else")
    if type(param) is not nn.Parameter and not hasattr(type(param), "tp_mode") and not is_standalone(param):
        raise ValueError(
            f"parameter {name!r} is a {type(param).__name__}, and rows of it would lose what that class adds; shard "
            f"the module without it, or convert it to a plain nn.Parameter"
        )
    if param.device not in (context.device, torch.device("cpu"), torch.device("meta")):
        raise ValueError(
            f"parameter {name!r} is on device {param.device}, and this rank computes on {context.device}; "
            f"move the module there first"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {param.layout}; only dense parameters can be sharded")
    if param.dtype.is_complex:
        raise ValueError(f"parameter {name!r} has dtype {param.dtype}; store real and imaginary parts as real numbers")
    if not isinstance(param, ShardedParameter):
        if getattr(param, "tp_mode", False):
            _check_tensor_ranks(name, slice_of(param).tp_comm, context)
        if getattr(param, "sequence_parallel", False):
            _check_tensor_ranks(name, param.sequence_comm, context)  # type: ignore[attr-defined]


def _check_tensor_ranks(name: str, comm: Communicator | None, context: ParallelContext) -> None:
    """Raise unless ``comm``, over which bmt_tp has sharded or marked a parameter, has the context's ranks."""
    ranks = (context.rank,) if comm is None else comm.ranks
    if ranks != context.tp.ranks:
        raise ValueError(
            f"parameter {name!r} is prepared for the tensor-parallel ranks {ranks}, and the context's are "
            f"{context.tp.ranks}; use the same: init_distributed(tp_size=)"
        )


def check_stage(slots: Sequence[Slot], context: ParallelContext, comms: Sequence[Communicator]) -> None:
    """Raise if ranks of other pipeline stages are among ``comms``, or hold parts of the parameters."""
    stage = set(context.zero.ranks)
    for comm in comms:
        if not stage.issuperset(comm.ranks):
            raise ValueError(
                f"shard_comm and replicate_comm include ranks {comm.ranks}; those of this pipeline stage are "
                f"{context.zero.ranks}, and a module that belongs to one stage is shared by its ranks alone"
            )
    for slot in slots:
        param = slot.module._parameters[slot.name]
        if isinstance(param, ShardedParameter):
            ranks = param.handle.flat.shard_comm.ranks  # type: ignore[attr-defined]
            if not stage.issuperset(ranks):
                raise ValueError(
                    f"parameter {slot.path!r} is sharded over ranks {ranks}, and those of this pipeline stage are "
                    f"{context.zero.ranks}; let every rank pass the module through stage_block"
                )


def check_groups(
    comms: tuple[Communicator, Communicator],
    context: ParallelContext,
    params: Mapping[str, nn.Parameter],
    stage_local: bool,
) -> None:
    """Raise unless a shard group and a replicate group together are the ranks that hold the parameters."""
    ranks = comms[0].size * comms[1].size
    for path, param in params.items():
        is_tensor_parallel = getattr(param, "tp_mode", False)
        wanted = ranks_of(context, is_tensor_parallel, stage_local).size
        if ranks != wanted:
            raise ValueError(
                f"shard_comm and replicate_comm spread parameters over {ranks} ranks; parameter {path!r}, which "
                f"tensor-parallel ranks {'hold pieces of' if is_tensor_parallel else 'have in common'}, belongs to "
                f"{wanted}. Put the two kinds into Blocks of their own, each with communicators of its own"
            )


# --- plan -----------------------------------------------------------------------------------------


def ranks_of(context: ParallelContext, tp_mode: bool, stage_local: bool = False) -> Communicator:
    """The ranks that share a parameter: of all stages, or of this one."""
    if stage_local:
        return context.tp_zero if tp_mode else context.zero
    return context.outer_tp_zero if tp_mode else context.outer_zero


def shard_and_replicate(context: ParallelContext, tp_mode: bool, options: Options) -> tuple[Communicator, Communicator]:
    """The shard group and the replicate group of a parameter."""
    if options.comms is not None:
        return options.comms
    comm = ranks_of(context, tp_mode, options.stage_local)
    alone = Communicator(None, context.device)
    return (alone, comm) if options.level == 0 else (comm, alone)


@dataclass(frozen=True)
class _Plan:
    """Parameters that become one flat parameter."""

    layout: FlatLayout
    params: list[nn.Parameter]  # in the order of the layout's indices
    dtype: torch.dtype
    tp_mode: bool


def _plan(params: Iterable[nn.Parameter], context: ParallelContext, options: Options) -> list[_Plan]:
    """Sort parameters by what can be unsharded at once, and lay them out."""
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.requires_grad, getattr(param, "tp_mode", False)), []).append(param)
    plans = []
    for (dtype, _, tp_mode), members in kinds.items():
        shard_comm, _ = shard_and_replicate(context, tp_mode, options)
        for layout in plan_layouts([slice_of(p).piece_shape for p in members], shard_comm.size):
            chosen = sorted(p.index for p in layout.placements)
            number = {index: i for i, index in enumerate(chosen)}
            placements = tuple(dataclasses.replace(p, index=number[p.index]) for p in layout.placements)
            own = dataclasses.replace(layout, placements=placements)
            plans.append(_Plan(own, [members[index] for index in chosen], dtype, tp_mode))
    return plans


# --- build ----------------------------------------------------------------------------------------


def build_group(slots: list[Slot], context: ParallelContext, options: Options) -> ParameterGroup:
    """Shard the parameters in ``slots``, the same objects."""
    paths: dict[int, str] = {}
    params: dict[int, nn.Parameter] = {}
    for slot in slots:
        param = slot.module._parameters[slot.name]
        assert param is not None
        paths.setdefault(id(param), slot.path)
        params.setdefault(id(param), param)
    if options.comms is not None and (context.tp_size > 1 or options.stage_local):
        check_groups(options.comms, context, {paths[i]: p for i, p in params.items()}, options.stage_local)
    facts = [
        f"{paths[i]}: {slice_of(p).shape} {p.dtype} requires_grad={p.requires_grad}{' on meta' * p.is_meta}"
        for i, p in params.items()
    ]
    for comm in options.comms or (ranks_of(context, False, options.stage_local),):
        check_agreement(comm, f"the parameters of {options.name} at level {options.level}", facts)
    for module in {slot.module: None for slot in slots}:
        drop_weak_references(module)
    reducers = [_build(plan, context, options) for plan in _plan(params.values(), context, options)]
    if options.stage_local:
        for param in params.values():
            setattr(param, STAGE_LOCAL_ATTRIBUTE, True)
    position = {id(p): i for i, p in enumerate(p for r in reducers for p in r.flat.params)}
    for slot in slots:
        slot.index = position[id(slot.module._parameters[slot.name])]
    return ParameterGroup(
        options.name, reducers, context, options.level, options.precision, slots, options.reshard_after_forward
    )


def _build(plan: _Plan, context: ParallelContext, options: Options) -> GradientReducer:
    shard_comm, replicate_comm = shard_and_replicate(context, plan.tp_mode, options)
    storage = torch.zeros(plan.layout.shard_numel, dtype=plan.dtype, device=context.device)
    for placement in plan.layout.placements:
        # One parameter at a time: never more than one is unsharded beside the shards.
        values = values_of(plan.params[placement.index], context.device, shard_comm, replicate_comm)
        if values is not None:
            write_rows(storage, plan.layout, placement, shard_comm.rank, values)
    before = [p.handle.flat for p in plan.params if isinstance(p, ShardedParameter)]  # type: ignore[attr-defined]
    converted = [convert(param, context) for param in plan.params]
    precision = options.precision if plan.dtype.is_floating_point else MixedPrecision()
    stream = (shard_comm if shard_comm.size > 1 else replicate_comm).stream
    flat = FlatParameter(
        plan.layout, converted, storage, shard_comm, stream, precision.param_dtype, keep_storage=options.level <= 1
    )
    for old in before:
        old.params = []  # of which each has had one
        old.drop_storage()
    grad_scale = 1.0 if plan.tp_mode else 1.0 / context.tp_size  # see [Note: tensor-parallel ranks]
    return GradientReducer(flat, replicate_comm, options.level, precision.reduce_dtype, grad_scale)


def build_standalone(
    param: ShardedParameter, context: ParallelContext, values: Tensor | None, options: Options
) -> None:
    """Spread the rows of a parameter, whose values (None: not known yet) are ``values``, as a group of its own."""
    shard_comm, replicate_comm = shard_and_replicate(context, param.tp_mode, options)
    [layout] = plan_layouts([param.bmt_slice.piece_shape], shard_comm.size)
    storage = torch.zeros(layout.shard_numel, dtype=param.dtype, device=context.device)
    if values is not None:
        write_rows(storage, layout, layout.placements[0], shard_comm.rank, values)
    stream = (shard_comm if shard_comm.size > 1 else replicate_comm).stream
    precision = options.precision
    flat = FlatParameter(
        layout, [param], storage, shard_comm, stream, precision.param_dtype, options.level <= 1, allocate=False
    )
    grad_scale = 1.0 if param.tp_mode else 1.0 / context.tp_size
    reducer = GradientReducer(flat, replicate_comm, options.level, precision.reduce_dtype, grad_scale)
    name = f"a parameter of shape {param.bmt_slice.shape}"
    ParameterGroup(name, [reducer], context, options.level, precision)
    if values is not None:
        param.handle.original = (values, param._version)  # type: ignore[attr-defined]


def values_of(
    param: nn.Parameter, device: torch.device, shard_comm: Communicator, replicate_comm: Communicator
) -> Tensor | None:
    """A parameter's values before it is sharded: rank 0's, or None where it has none yet."""
    with torch.no_grad():
        if isinstance(param, ShardedParameter):
            if param.awaits_values:
                return None
            handle: GroupHandle = param.handle  # type: ignore[assignment]
            if handle.original is None or handle.original[1] != param._version:
                return handle.gather_stored()
            values = handle.original[0].to(device).contiguous()
            if replicate_comm.size > 1:  # which hold the same rows; others each take theirs
                values = values.clone()
                replicate_comm.broadcast(values, 0)
            return values
        if param.is_meta:
            return None
        if shard_comm.size == replicate_comm.size == 1:
            return param.data
        values = param.data.to(device).clone(memory_format=torch.contiguous_format)
        shard_comm.broadcast(values, 0)
        replicate_comm.broadcast(values, 0)
        return values


def convert(param: nn.Parameter, context: ParallelContext) -> ShardedParameter:
    """Turn a parameter, the same object, into a sharded one that has all its rows."""
    param.grad = None
    if isinstance(param, ShardedParameter):
        unsharded = dataclasses.replace(param.bmt_slice, row_start=0, row_stop=0, row_comm=None, row_dims=1)
        param.bmt_slice = dataclasses.replace(unsharded, row_stop=unsharded.piece_rows)
        return param
    shape = tuple(param.shape)
    # What bmt_tp has noted: that it sharded the parameter over tensor-parallel ranks, or how it is used.
    is_piece, piece = getattr(param, "tp_mode", False), slice_of(param)
    sequence_parallel = getattr(param, "sequence_parallel", False)
    awaits_values = param.is_meta
    if awaits_values:
        empty = torch.empty(0, dtype=param.dtype, device=context.device)
        twin = torch.Tensor._make_subclass(ShardedParameter, empty, param.requires_grad)
        torch.utils.swap_tensors(param, twin)
    else:
        param.__class__ = ShardedParameter
    assert isinstance(param, ShardedParameter)
    describe(param, context, shape)
    param.awaits_values = awaits_values
    if is_piece:
        param.bmt_slice, param.tp_mode = piece, True
    param.sequence_parallel = sequence_parallel
    return param


def describe(
    param: ShardedParameter,
    context: ParallelContext,
    shape: tuple[int, ...],
    init_method: Any = None,
    group: str | None = None,
    tp_mode: bool = False,
    tp_split_dim: int = -1,
    tp_blocks: tuple[int, ...] = (),
) -> None:
    """Set the attributes of a parameter that has all rows, of ``shape``, of its tensor-parallel shard."""
    rows = shape[0] if shape else 1
    if tp_mode and tp_split_dim >= 0 and context.tp_size > 1:
        extent = shape[tp_split_dim]
        logical = (*shape[:tp_split_dim], extent * context.tp_size, *shape[tp_split_dim + 1 :])
        found = Slice(logical, 0, rows, None, tp_split_dim, context.tp_rank * extent, extent, context.tp, tp_blocks)
    else:
        found = Slice(shape, 0, rows)
    param.bmt_slice = found
    param.init_method = init_method
    param.group = group
    param.tp_mode = tp_mode
    param.sequence_parallel = False
    param.awaits_values = False


def drop_weak_references(module: nn.Module) -> None:
    """Recurrent modules keep weak references to their weights, with which :func:`convert` cannot swap them."""
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = [None] * len(module._flat_weights_names)


def share_buffers(module: nn.Module, context: ParallelContext, stage_local: bool = False) -> None:
    """Move buffers to the context's device, and let all ranks have those of the first."""
    comm = ranks_of(context, False, stage_local)
    done: dict[int, Tensor] = {}
    for part in module.modules():
        if part is not module and sharding_of(part) is not None:
            continue
        for name, buffer in part._buffers.items():
            if buffer is None or id(buffer) in done:
                continue
            moved = buffer.to(context.device)
            if comm.size > 1 and moved.numel():
                values = moved.detach().contiguous().clone()
                comm.broadcast(values, 0)
                with torch.no_grad():
                    moved.copy_(values)
            part._buffers[name] = moved
            done[id(moved)] = moved

"""Sharding a module's parameters in place: validate, plan, build.

[Note: tensor-parallel ranks]
    Each tensor-parallel rank computes the full gradient of a parameter that all of them hold. The sum over all ranks
    that share the parameter counts it ``tp_size`` times, so it is divided by ``tp_size``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmt_comm import STAGE_LOCAL_ATTRIBUTE, Communicator, ParallelContext, check_agreement, current_context, slice_of

from .activation_checkpoint import CheckpointedForward
from .backward_context import step_context
from .flat_parameter import FlatParameter, write_rows
from .float8 import float8_dtype, make_plain
from .gradient_reducer import GradientReducer
from .granularity import granularity_of
from .hooks import ForwardHooks
from .kept_operations import UseCheckpoint, kept_results
from .layout import FlatLayout, plan_layouts
from .options import Options, ranks_of
from .parameter_group import GroupHandle, ParameterGroup, Slot
from .precision import MixedPrecision
from .sharded_parameter import ShardedParameter
from .state import add_state_hooks
from .torch_optimizers import watch_optimizers

M = TypeVar("M", bound=nn.Module)

_ATTRIBUTE = "_bmt_sharding"


@dataclass
class Sharding:
    """How a module was sharded; ``sharding_of(module)``.

    Attributes:
        hooks: before and after its forward.
        initialized: whether ``init_parameters`` does not change its parameters.
        is_block: whether it was sharded by ``Block``.
        checkpoint: recomputes its forward in backward; None: activations are kept.
        added: groups of parameters that were added to the module later.
    """

    hooks: ForwardHooks
    initialized: bool = False
    is_block: bool = False
    checkpoint: CheckpointedForward | None = None
    added: list[ParameterGroup] = field(default_factory=list)

    @property
    def group(self) -> ParameterGroup:
        return self.hooks.group


def sharding_of(module: object) -> Sharding | None:
    """How a module was sharded; None if it was not."""
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


def groups_of(module: nn.Module) -> list[ParameterGroup]:
    """The parameter group of a sharded module, and the groups of parameters that were added to it later.

    Raises:
        ValueError: the module was not sharded.
    """
    group, sharding = group_of(module), sharding_of(module)
    assert sharding is not None
    return [group, *sharding.added]


def shard(
    module: M,
    zero_level: int | None = None,
    *,
    use_checkpoint: UseCheckpoint = False,
    precision: MixedPrecision | None = None,
    shard_comm: Communicator | None = None,
    replicate_comm: Communicator | None = None,
    stage_local: bool = False,
    reshard_after_forward: bool | None = None,
    offload: bool = False,
    initialized: bool = False,
) -> M:
    """Shard a module's parameters in place; unshard them while it computes.

    The module keeps its class, attributes, names and parameter objects; hooks run before and after its forward.
    Parameters of inner modules that are already sharded are not changed. Parameters on the meta device get storage for
    the shards only, to be filled by ``init_parameters`` or a checkpoint. Other parameters, and buffers, take the values
    of rank 0 and the device of the context.

    Inputs and outputs may be nested containers and objects. A tensor that reaches the loss in another way than through
    the module's output (in an attribute, for example) is not seen; return it instead. A parameter that is part of the
    output is returned as a copy. Parameters may be frozen and unfrozen at any time. Parameters that are frozen before
    the module is sharded are not reduced.

    Args:
        module: the module.
        zero_level: what is sharded. 0: nothing, gradients are all-reduced; 1: optimizer states; 2: also gradients,
            and parameters from backward to forward; 3: parameters at all times. By default the level of
            ``init_distributed(zero_level=)``, which is 3.
        use_checkpoint: what is kept for backward, which recomputes the rest. True: the inputs only. False: everything.
            "matmuls": also the results of matrix products, convolutions and attention. A set of operators
            (``{torch.ops.aten.mm.default}``): also their results. A float from 0.0 to 1.0: also the results that take
            the most time per byte, up to this share of the memory that False takes; the module's first forward with
            gradients decides which. Unless it is False or 1.0, the instance has attributes ``forward`` and ``compile``.
        precision: dtypes of computation and reduction, and compression of what is communicated.
        shard_comm, replicate_comm: hybrid sharding: the shard group (the ranks of a node, for example) and the
            replicate group. By default all ranks are one shard group.
        stage_local: whether only the ranks of this pipeline stage have the module. They take the values of the first
            of these ranks.
        reshard_after_forward: whether parameters are resharded between forward and backward; by default at level 3.
        offload: whether this rank's rows of parameters and gradients, and so optimizer states, are in host memory. They
            are copied to the device while the module computes, and optimizers step on the host.
        initialized: whether ``init_parameters`` does not change the parameters.

    Returns:
        ``module``.

    Raises:
        RuntimeError: before ``init_distributed``; ranks pass different modules.
        TypeError: ``module`` is not a module.
        ValueError: ``use_checkpoint`` is none of these; the module is sharded already, shares a parameter with another
            sharded module, or has a parameter or buffer that cannot be sharded (because of its device, dtype or class);
            the communicators are not the ranks that have the module; ``stage_local`` with parameters that are sharded
            over other stages (pass them to :func:`stage_block`). The module is not changed then.
    """
    context = current_context()
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if sharding_of(module) is not None:
        raise ValueError(f"module {type(module).__name__} is sharded already; shard each module once")
    level, kept = check_level(zero_level, context), kept_results(use_checkpoint)
    if (shard_comm is None) != (replicate_comm is None):
        raise ValueError("shard_comm and replicate_comm must be given together")
    slots = find_slots(module, context)
    communicators = None if shard_comm is None or replicate_comm is None else (shard_comm, replicate_comm)
    name = f"a {type(module).__name__}"
    given = level, precision or MixedPrecision(), communicators, stage_local, reshard_after_forward
    options = Options(*given, check_offload(offload), name=name)
    if stage_local:
        check_stage(slots, context, communicators or ())
    group = build_group(slots, context, options)
    share_buffers(module, context, options)
    sharding = add_sharding(module, group, initialized)
    if kept is not None:
        if module._compiled_call_impl is not None:
            warnings.warn(
                f"{name} was compiled before it was sharded: with use_checkpoint={use_checkpoint!r} it computes as it "
                "is. Call its compile() after sharding",
                stacklevel=2,
            )
        sharding.checkpoint = CheckpointedForward(module, group, kept)
        module.forward = sharding.checkpoint
        module.__dict__["compile"] = sharding.checkpoint.compile
    return module


def add_sharding(module: nn.Module, group: ParameterGroup, initialized: bool = False) -> Sharding:
    """Add the hooks that unshard ``group`` while ``module`` computes."""
    sharding = Sharding(ForwardHooks(group, module), initialized)
    module.__dict__[_ATTRIBUTE] = sharding
    return sharding


def forget_sharding(module: nn.Module) -> None:
    """Remove the hooks of a module whose parameters will be sharded again."""
    sharding: Sharding = module.__dict__.pop(_ATTRIBUTE)
    sharding.hooks.remove()
    checkpoint = sharding.checkpoint
    if checkpoint is not None:
        del module.compile
        if module.__dict__["forward"] is checkpoint:
            del module.forward
            if checkpoint.replaced is not None:
                module.forward = checkpoint.replaced


# --- validate -------------------------------------------------------------------------------------


def check_level(zero_level: int | None, context: ParallelContext) -> int:
    """The ZeRO level, by default the context's."""
    level = context.zero_level if zero_level is None else zero_level
    if level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level={zero_level!r} is not a ZeRO level; choose 0, 1, 2 or 3")
    return level


def check_offload(offload: object) -> bool:
    """Raise unless it is True or False."""
    if not isinstance(offload, bool):
        raise ValueError(f"offload={offload!r} must be True (shards in host memory) or False (on the device)")
    return offload


def check_not_scripted(path: str, module: nn.Module) -> None:
    """Raise ValueError if ``torch.jit`` has compiled a module: it does not see unsharded parameters."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{path or 'the module'} was compiled by torch.jit and cannot be sharded; shard the module that it was "
            "made of, and compile that with torch.compile"
        )


def find_slots(module: nn.Module, context: ParallelContext, ignored: Iterable[nn.Parameter] = ()) -> list[Slot]:
    """The slots of a module and its submodules whose parameters are not sharded yet, except those in ``ignored``.

    Raises:
        ValueError: one of these parameters, or a buffer, cannot be sharded.
    """
    slots = []
    inside = [sharding for m in module.modules() if m is not module and (sharding := sharding_of(m)) is not None]
    sharded = {id(p) for sharding in inside for p in sharding.group.params} | {id(p) for p in ignored}
    for module_path, child in module.named_modules(remove_duplicate=False):  # a shared module has several names
        prefix = f"{module_path}." if module_path else ""
        check_not_scripted(module_path, child)
        if context.world_size > 1 and getattr(child, "max_norm", None) is not None:
            raise ValueError(
                f"{module_path or 'the module'}, a {type(child).__name__}, has max_norm={child.max_norm}: its forward "
                f"writes to its weight, and what one rank writes would be lost; scale what the module returns instead"
            )
        for name, param in child._parameters.items():
            if param is not None and id(param) not in sharded:
                check_parameter(prefix + name, param, context)
                slots.append(Slot(child, name, prefix + name))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                _check_device(f"buffer {prefix + name!r}", buffer, context)
    return slots


def _check_device(what: str, tensor: Tensor, context: ParallelContext) -> None:
    if tensor.device not in (context.device, torch.device("cpu"), torch.device("meta")):
        raise ValueError(
            f"{what} is on device {tensor.device}, and this rank computes on {context.device}; move the module there "
            f"first"
        )


def is_standalone(param: object) -> bool:
    """Whether a sharded parameter belongs to no sharded module: it was built as a ``DistributedParameter``."""
    return isinstance(param, ShardedParameter) and not param.handle.flat.allocate


def check_parameter(name: str, param: nn.Parameter, context: ParallelContext) -> None:
    """Raise unless a parameter can be sharded."""
    if isinstance(param, ShardedParameter) and not is_standalone(param):
        raise ValueError(
            f"parameter {name!r} (shape {param.bmt_slice.shape}) belongs to another Block already; put the modules "
            f"that share it into one Block, or keep it outside of both"
        )
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} has no shape yet; run the module once before you shard it, so that it gets one"
        )
    if hasattr(param, "placements"):
        raise ValueError(f"parameter {name!r} is a DTensor; pass the module before another library shards it")
    if type(param) is not nn.Parameter and not hasattr(type(param), "tp_mode") and float8_dtype(param) is None:
        raise ValueError(
            f"parameter {name!r} is a {type(param).__name__}, and its shards would not have that class; shard the "
            f"module without it, or convert it to a plain nn.Parameter"
        )
    _check_device(f"parameter {name!r}", param, context)
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {param.layout}; only dense parameters can be sharded")
    if param.dtype.is_complex:
        raise ValueError(f"parameter {name!r} has dtype {param.dtype}; store real and imaginary parts as real numbers")
    if isinstance(param, ShardedParameter):
        return
    communicators: list[Communicator | None] = []  # over which bmt_tp has sharded the parameter or splits its sequence
    if getattr(param, "tp_mode", False):
        communicators.append(slice_of(param).tp_comm)
    if getattr(param, "sequence_parallel", False):
        communicators.append(param.sequence_comm)  # type: ignore[attr-defined]
    for comm in communicators:
        ranks = (context.rank,) if comm is None else comm.ranks
        if ranks != context.tp.ranks:
            raise ValueError(
                f"parameter {name!r} is prepared for the tensor-parallel ranks {ranks}, and the context's are "
                f"{context.tp.ranks}; use the same: init_distributed(tp_size=)"
            )


def check_stage(slots: Sequence[Slot], context: ParallelContext, communicators: Sequence[Communicator]) -> None:
    """Raise if ranks of other pipeline stages are in ``communicators`` or hold shards of the parameters."""
    stage = set(context.zero.ranks)
    for comm in communicators:
        if not stage.issuperset(comm.ranks):
            raise ValueError(
                f"shard_comm and replicate_comm include ranks {comm.ranks}; those of this pipeline stage are "
                f"{context.zero.ranks}, and only these may share a module of this stage"
            )
    for slot in slots:
        if isinstance(slot.param, ShardedParameter):
            ranks = slot.param.handle.flat.shard_comm.ranks
            if not stage.issuperset(ranks):
                raise ValueError(
                    f"parameter {slot.path!r} is sharded over ranks {ranks}, and those of this pipeline stage are "
                    f"{context.zero.ranks}; let every rank pass the module through stage_block"
                )


def check_groups(
    communicators: tuple[Communicator, Communicator], context: ParallelContext, slots: Sequence[Slot], stage_local: bool
) -> None:
    """Raise unless a shard group and a replicate group together are the ranks that hold the parameters."""
    ranks = communicators[0].size * communicators[1].size
    for slot in slots:
        tp_mode = getattr(slot.param, "tp_mode", False)
        expected = ranks_of(context, tp_mode, stage_local).size
        if ranks != expected:
            raise ValueError(
                f"shard_comm and replicate_comm spread parameters over {ranks} ranks; parameter {slot.path!r}, which "
                f"tensor-parallel ranks {'hold different shards of' if tp_mode else 'have in common'}, belongs to "
                f"{expected}. Put the two kinds into separate Blocks, each with its own communicators"
            )


# --- plan -----------------------------------------------------------------------------------------


def _plan(
    params: Iterable[nn.Parameter], context: ParallelContext, options: Options
) -> list[tuple[FlatLayout, list[nn.Parameter], MixedPrecision]]:
    """Divide parameters into flat parameters, each of which one collective can unshard, and plan their layouts.

    Returns the layout of each flat parameter, its parameters in the order of the layout's indices, and their precision.
    """
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for param in params:
        tp_mode = getattr(param, "tp_mode", False)
        precision = options.precision.of(param)
        kind = tp_mode, precision, param.dtype, float8_dtype(param), param.requires_grad
        kinds.setdefault(kind, []).append(param)
    plans = []
    for (tp_mode, precision, *_), members in kinds.items():
        shard_comm, _ = options.groups(context, tp_mode)
        shapes, granularity = [slice_of(p).tp_shard_shape for p in members], [granularity_of(p) for p in members]
        layouts = plan_layouts(shapes, shard_comm.size, granularity)
        padding, numel = sum(layout.padding for layout in layouts), sum(layout.numel for layout in layouts)
        if max(granularity) > 1 and padding > 0.01 * numel and context.rank == 0:
            warnings.warn(
                f"{options.name}: granules of up to {max(granularity)} rows make {padding / (numel - padding):.1%} of "
                f"padding on {shard_comm.size} ranks; choose smaller ones, or fewer ranks to shard over",
                stacklevel=2,
            )
        for layout in layouts:
            indices = sorted(p.index for p in layout.placements)
            plans.append((layout, [members[index] for index in indices], precision))
    return plans


# --- build ----------------------------------------------------------------------------------------


def build_group(slots: Sequence[Slot], context: ParallelContext, options: Options) -> ParameterGroup:
    """Shard the parameters in ``slots`` in place: they stay the same objects."""
    check_compression(options, context, slots)
    by_param = {id(slot.param): slot for slot in reversed(slots)}
    first = [slot for slot in slots if by_param[id(slot.param)] is slot]  # one for each parameter
    if options.communicators is not None and (context.tp_size > 1 or options.stage_local):
        check_groups(options.communicators, context, first, options.stage_local)
    if context.deterministic and options.communicators is not None:
        shard_ranks, replica_ranks = (comm.ranks for comm in options.communicators)
        if len(replica_ranks) > 1 and shard_ranks[-1] - shard_ranks[0] >= replica_ranks[1] - replica_ranks[0]:
            raise ValueError(
                f"deterministic=True: the ranks of a shard group must follow one another, and they are {shard_ranks}"
            )
    params = [slot.param for slot in first]
    facts = [parameter_fact(slot.path, p, options.precision) for slot, p in zip(first, params, strict=True)]
    for comm in () if _agreed.get() else options.ranks(context):
        check_agreement(comm, f"the parameters of {options.name} at level {options.level}", facts)
    for param in params:
        make_plain(param)
    for module in {slot.module: None for slot in slots}:
        if isinstance(module, nn.RNNBase):  # convert() cannot swap tensors that have weak references
            module._flat_weight_refs = [None] * len(module._flat_weights_names)
    reducers = [_build(*each, context, options) for each in _plan(params, context, options)]
    if options.stage_local:
        for param in params:
            setattr(param, STAGE_LOCAL_ATTRIBUTE, True)
    position = {id(p): i for i, p in enumerate(p for r in reducers for p in r.flat.params)}
    for slot in slots:
        slot.index = position[id(slot.param)]
    add_state_hooks(slots)
    group = ParameterGroup(reducers, context, options, step_context(context), slots)
    group.number = group.step.next_number(group.communicators)
    return group


def check_compression(options: Options, context: ParallelContext, slots: Sequence[Slot]) -> None:
    """Raise if communication is to be compressed and cannot be."""
    if options.precision.compression is None:
        return
    if options.level == 0:
        raise ValueError(
            "compression is of the all-gather of parameters and the reduce-scatter of gradients, and zero_level=0 "
            "has neither; choose zero_level 1, 2 or 3"
        )
    if options.precision.packs_gradients and options.precision.reduce_dtype is torch.float64:
        raise ValueError("compression is for fp32, bf16 and fp16, and reduce_dtype is torch.float64")
    for slot in slots:
        if torch.float64 in (slot.param.dtype, options.precision.param_dtype):
            dtype = options.precision.param_dtype or slot.param.dtype
            raise ValueError(f"compression is for fp32, bf16 and fp16, and {slot.path!r} is {dtype}")
    if context.deterministic and options.precision.packs_gradients:
        raise ValueError(
            "deterministic=True gives the same bits on any number of ranks, and gradients that travel compressed are "
            "rounded on the way; use Compression(gradients=None)"
        )


def parameter_fact(name: str, param: nn.Parameter, precision: MixedPrecision) -> str:
    """A description of a parameter, which must be the same on all ranks before it is sharded."""
    meta = " on meta" if param.is_meta or getattr(param, "is_unfilled", False) else ""
    granules = f" granularity={rows}" if (rows := granularity_of(param)) > 1 else ""
    travels = f" as {dtype}" if (dtype := float8_dtype(param)) else ""
    computed = "" if precision.of(param).param_dtype == precision.param_dtype else " computed as stored"
    dtypes = f"{param.dtype}{travels}{computed}"
    return f"{name}: {slice_of(param).shape} {dtypes} requires_grad={param.requires_grad}{meta}{granules}"


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Within, :func:`build_group` does not compare parameters between ranks: the caller has compared all of them."""
    token = _agreed.set(True)
    try:
        yield
    finally:
        _agreed.reset(token)


_agreed: contextvars.ContextVar[bool] = contextvars.ContextVar("agreed", default=False)


def build_standalone(
    param: ShardedParameter, context: ParallelContext, values: Tensor | None, options: Options
) -> None:
    """Shard a parameter as a group by itself. ``values``: its unsharded values; None: it has none yet."""
    [each] = _plan([param], context, options)
    reducer = _build(*each, context, options, standalone=True, value=values)
    name = f"a parameter of shape {param.bmt_slice.shape}"
    ParameterGroup([reducer], context, dataclasses.replace(options, name=name), step_context(context))


def _build(
    layout: FlatLayout,
    params: list[nn.Parameter],
    precision: MixedPrecision,
    context: ParallelContext,
    options: Options,
    standalone: bool = False,
    value: Tensor | None = None,
) -> GradientReducer:
    """Make a flat parameter of ``params`` with their values, or of one ``standalone`` parameter with ``value``."""
    options = dataclasses.replace(options, precision=precision)
    dtype, tp_mode = params[0].dtype, getattr(params[0], "tp_mode", False)
    communicators = options.groups(context, tp_mode)
    storage = options.new_storage(layout.shard_numel, dtype, context.device).zero_()
    for param, placement in zip(params, sorted(layout.placements, key=lambda p: p.index), strict=True):
        if not standalone:  # one at a time, so that memory has one unsharded parameter beside the shards
            value = values_of(param, context.device, *communicators)
        if value is not None:
            write_rows(storage, layout, placement, communicators[0].rank, value)
    before = [] if standalone else [p.handle.flat for p in params if isinstance(p, ShardedParameter)]
    converted = [convert(param, context) for param in params]
    watch_optimizers()
    flat = FlatParameter(layout, converted, storage, communicators, options, not standalone)
    for old in before:
        old.params = []  # its parameter belongs to ``flat`` now
        old.drop_storage()
    grad_scale = 1.0 if tp_mode else 1.0 / context.tp_size  # see [Note: tensor-parallel ranks]
    return GradientReducer(flat, grad_scale, context.deterministic)


def values_of(
    param: nn.Parameter, device: torch.device, shard_comm: Communicator, replicate_comm: Communicator
) -> Tensor | None:
    """A parameter's values before it is sharded: rank 0's, or None if it has none yet."""
    with torch.no_grad():
        if isinstance(param, ShardedParameter):
            if param.is_unfilled:
                return None
            handle: GroupHandle = param.handle
            values = handle.unshard_stored()
            replicate_comm.broadcast(values, 0)  # replicas must agree
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
    """Turn a parameter, the same object, into a sharded one."""
    param.grad = None
    if isinstance(param, ShardedParameter):
        return param
    where, awaits_values, writes = slice_of(param), param.is_meta, param._version
    hooks = param._backward_hooks or {}
    for key in [key for key, hook in hooks.items() if getattr(hook, "is_part_of_reduction", False)]:
        del hooks[key]  # bmt_tp's sum over ranks; the reduction includes it
    if awaits_values:
        empty = torch.empty(0, dtype=param.dtype, device=context.device)
        twin = torch.Tensor._make_subclass(ShardedParameter, empty, param.requires_grad)
        twin.__dict__.update(param.__dict__)  # attributes of bmt_tp, for example
        torch.utils.swap_tensors(param, twin)
    else:
        param.__class__ = ShardedParameter
    assert isinstance(param, ShardedParameter)
    param.bmt_slice, param.awaits_values = where, awaits_values
    param.writes_on_meta = writes if awaits_values else 0
    return param


def share_buffers(module: nn.Module, context: ParallelContext, options: Options) -> None:
    """Move buffers to the context's device, with the values of the first rank, except those on the meta device."""
    communicators = [comm for comm in options.ranks(context) if comm.size > 1]
    done: set[int] = set()
    for part in module.modules():
        if part is not module and sharding_of(part) is not None:
            continue
        for name, buffer in part._buffers.items():
            if buffer is None or buffer.is_meta or id(buffer) in done:
                continue
            moved = buffer.to(context.device)
            if communicators and (moved.layout is not torch.strided or moved.is_quantized):
                for comm in communicators:
                    moved = comm.broadcast_object(moved.cpu(), 0).to(context.device)
            elif communicators and moved.numel():
                values = moved.detach().contiguous().clone()
                for comm in communicators:
                    comm.broadcast(values, 0)
                if any(size > 1 and not stride for size, stride in zip(moved.shape, moved.stride())):
                    moved = values  # an expanded one cannot be written to
                with torch.no_grad():
                    moved.copy_(values)
            part._buffers[name] = moved
            done.add(id(moved))

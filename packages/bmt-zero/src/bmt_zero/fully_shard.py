"""``fully_shard`` with the signature and the meaning of FSDP2's, on the machinery of :func:`bmt_zero.shard`.

[Note: what differs from FSDP2]
    A script that was written for ``torch.distributed.fsdp`` imports these names from here, and trains the same model.
    Sharded parameters are :class:`bmt_zero.ShardedParameter`, not DTensors, and stay in their modules between forward
    and backward. docs/fsdp2.md lists the differences.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from bmt_comm import (
    Communicator,
    ParallelContext,
    current_context,
    init_distributed,
    is_initialized,
    not_compiled,
    shutdown,
)

from .backward_context import current_backward
from .hooks import Call, ForwardHooks
from .options import Options
from .parameter_group import ParameterGroup
from .precision import MixedPrecision
from .reduction import ReductionSettings
from .shard import add_sharding, build_group, find_slots, group_of, sharding_of, share_buffers
from .state import serves_shards

T = TypeVar("T")

MixedPrecisionPolicy = MixedPrecision


@dataclass
class OffloadPolicy:
    """Parameters, gradients and optimizer states stay on the device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """This rank's rows of parameters and gradients, and so optimizer states, are in host memory; see :func:`shard`.

    Attributes:
        pin_memory: whether the host memory is pinned, so that copies overlap with computation; without meaning on a
            CPU context.
    """

    pin_memory: bool = True


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, module: FSDPModule) -> None:
        self._module: FSDPModule | None = module

    def wait(self) -> None:
        """Wait until the parameters are unsharded. The module has unsharded parameters from then on."""
        module, self._module = self._module, None
        if module is not None:
            hooks = module._hooks
            group = hooks.group
            with torch._C.DisableTorchFunctionSubclass():
                group.wait()
                views = Call(hooks).enter() if torch.is_grad_enabled() else group.views()
                # Copies, because autograd may save them: the storage of the views is released before backward.
                group.show([view.clone() for view in views])
                group.step.end_use()


class FSDPModule:
    """The class that :func:`fully_shard` adds to the class of a module.

    Methods with ``recurse`` also act on inner modules.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Part of a container, such as ``model[:2]``, has the container's original class."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = object.__new__(type(self))
        cast(Any, twin).__setstate__(copy.deepcopy(cast(Any, self).__getstate__(), memo))  # as copy.deepcopy does
        return twin

    # --- parameters -------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard the parameters of this module, not of sharded ones inside; all ranks must call it.

        The module has copies of the unsharded parameters, in the dtype of computation, until its forward,
        :meth:`reshard` or a state dict. Their gradients are reduced as usual. Writes to them are lost.

        Args:
            async_op: whether to return a handle to wait for, instead of waiting. Forward waits by itself; then nothing
                is copied.
        """
        group = self._group
        with torch._C.DisableTorchFunctionSubclass():
            group.unshard(refresh=True)
        group.unsharded_by_script = True
        handle = UnshardHandle(self)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshard the parameters of this module, not of sharded ones inside."""
        self._group.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r} must be True or False")
        for group in self._groups(recurse):
            group.reshard_after_forward = reshard_after_forward
            group.options = replace(group.options, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward.

        If not, the next forward unshards them only if they were written since (in place; writes to ``.data`` are not
        seen).
        """
        for group in self._groups(recurse):
            group.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward unshards the parameters. The backward of an embedding does not read them, for example."""
        self._hooks.needed_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to prefetch when this module's forward begins, instead of the next module."""
        self._hooks.prefetch_in_forward = _hooks_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to prefetch when this module's backward begins, instead of the previous module."""
        self._hooks.prefetch_in_backward = _hooks_of(modules)

    # --- gradients --------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients.

        If not, they are accumulated unsharded, in the dtype of the reduction, and a later backward reduces the sum.
        Changes of ``.grad`` in the meantime apply to them: see :func:`bmt_zero.no_sync`.
        """
        for group in self._groups(recurse):
            for reducer in group.reducers:
                reducer.no_sync = not requires_gradient_sync
                reducer.settings.all_reduces = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums gradients over the replicate group.

        If not, it sums them over the shard group only, and a later backward sums the sharded result over the replicate
        group.
        """
        for reducer in self._reducers(recurse):
            reducer.settings.all_reduces = bool(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Without effect: each backward completes its reductions."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the number that the gradients of this module's parameters, summed over the ranks, are divided by."""
        if not factor > 0:
            raise ValueError(f"factor={factor!r} must be positive")
        for reducer in self._reducers(recurse=False):
            reducer.settings.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: torch.cuda.Stream | None = None) -> None:
        """Call ``hook(gradient)`` with each reduced, flat gradient of this rank's rows, to change it in place.

        There is one for each dtype. On CUDA the hook runs in the stream of the reduction.
        """
        if stream is not None:
            raise ValueError("stream: the hook runs in the stream of the reduction; leave stream out")
        for reducer in self._reducers(recurse=False):
            reducer.settings.hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: gradients are always summed, and divided afterwards."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Without effect: gradients of parameters that a rank has not used always count as zeros."""

    # --- iterations and communication -------------------------------------------------------------

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next unshard wait for ``event``, which was recorded after the optimizer's step."""
        device = self._group.context.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(event)

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception has ended, and the gradients that wait to be reduced.

        The next forward does this by itself, except for waiting gradients.
        """
        for group in self._groups(recurse=True):
            group.step.begin_forward()
            group.step.cancel_prefetch()
            group.step.recover()
            group.hide()
            group.abandon_backward()
            for reducer in group.reducers:
                reducer.drop()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Without effect: collectives use the parameters' flat buffers, so there are no staging buffers.

        Raises:
            RuntimeError: ``enable`` is true.
        """
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "has no staging buffers")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises RuntimeError."""
        _refuse("set_symm_mem_for_comm", "has no staging buffers")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises RuntimeError."""
        _refuse("set_custom_all_gather", "communicates through bmt_comm.Communicator")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises RuntimeError."""
        _refuse("set_custom_reduce_scatter", "communicates through bmt_comm.Communicator")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Without effect: the memory of unsharded parameters is released when they are resharded.

        Raises:
            RuntimeError: ``keep`` is true.
        """
        if keep:
            _refuse("set_keep_unsharded_storage", "releases the memory of unsharded parameters")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Without effect: each backward completes its reductions.

        Raises:
            RuntimeError: ``enabled`` is true.
        """
        if enabled:
            _refuse("set_manual_backward_finalization", "completes the reductions of each backward at its end")

    def finalize_backward(self, *, async_op: bool = False) -> None:
        """Raises RuntimeError, as in torch without :meth:`set_manual_backward_finalization`."""
        _refuse("finalize_backward", "completes the reductions of each backward at its end")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Without effect: all collectives of a module use one process group.

        Raises:
            RuntimeError: ``enable`` is true.
        """
        if enable:
            _refuse("set_separate_reduce_scatter_group", "uses one process group for all collectives of a module")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Without effect: one reduction is in flight at a time.

        Raises:
            TypeError: ``max_input_buffers`` is not an integer.
            ValueError: it is not 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers must be an int, not {type(max_input_buffers).__name__}")
        if max_input_buffers != 1:
            raise ValueError(
                f"max_input_buffers={max_input_buffers}: bmt_zero has one reduction in flight at a time; use 1"
            )

    # --- internal ---------------------------------------------------------------------------------

    @property
    def _hooks(self) -> ForwardHooks:
        sharding = sharding_of(self)
        assert sharding is not None
        return sharding.hooks

    @property
    def _group(self) -> ParameterGroup:
        return group_of(cast(nn.Module, self))

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        modules = cast(nn.Module, self).modules() if recurse else (self,)
        return list(dict.fromkeys(module._group for module in modules if isinstance(module, FSDPModule)))

    def _reducers(self, recurse: bool) -> Iterable[Any]:
        return [reducer for group in self._groups(recurse) for reducer in group.reducers]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecision(),  # noqa: B008 (frozen)
    offload_policy: Any = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> T:
    """Shard a module's parameters in place, as ``torch.distributed.fsdp.fully_shard`` does.

    Call it for inner modules first and for the model last. Parameters of inner modules that are already sharded are not
    changed. The module's class becomes a subclass of its original class and of :class:`FSDPModule`. ``.grad`` is the
    mean over the ranks of the mesh. Parameters and buffers take the values of the mesh's first rank; those on the meta
    device get values from ``reset_parameters`` or a state dict.

    Without ``init_distributed``, the layout of ranks is made from ``torch.distributed``'s process group. All ranks must
    then make the first call.

    Args:
        module: the module, or several modules whose parameters are unsharded and reduced together.
        mesh: of one dimension: the ranks that share the parameters, by default all (for tensor-parallel parameters of
            ``bmt_tp``: all of the same tensor-parallel index); of two dimensions: (replicate, shard).
        reshard_after_forward: whether parameters are resharded between forward and backward; None: they are, except
            those of the root, which is the outermost such module that is called. A number of ranks to which FSDP2
            would reshard counts as True, and 1 as False.
        shard_placement_fn: may return None or ``Shard(0)``.
        mp_policy: dtypes; a :class:`MixedPrecisionPolicy`, or that of torch.
        offload_policy: a :class:`CPUOffloadPolicy`, or that of torch, keeps shards in host memory.
        ignored_params: parameters that are not sharded.

    Returns:
        ``module``.

    Raises:
        RuntimeError: ranks pass different modules.
        TypeError: ``module`` or a policy is of another type.
        ValueError: the module is sharded already, is a container without a forward, shares a parameter with another
            sharded module, or cannot be sharded (see :func:`shard`); an argument is out of range. The modules are not
            changed then.
    """
    modules = _root_modules(module)
    context = _context_for(mesh)
    offload, pin_memory = _offload(offload_policy)
    precision = _precision(mp_policy)
    communicators, divisor = _communicators_of(mesh, context)
    shard_size = context.outer_tp_zero.size if communicators is None else communicators[0].size
    resharded = _check_resharding(reshard_after_forward, shard_size)
    ignored = list(ignored_params or ())
    slots = [slot for each in modules for slot in find_slots(each, context, ignored)]
    if shard_placement_fn is not None:
        for slot in slots:
            _check_placement(slot.path, shard_placement_fn(slot.param))
    name = " and ".join(f"a {type(each).__name__}" for each in modules)
    options = Options(3, precision, communicators, False, resharded, offload, pin_memory, name)
    group = build_group(slots, context, options)
    if mesh is not None:
        group.mesh = mesh
    for reducer in group.reducers:
        reducer.settings = ReductionSettings(divisor, keeps_unsharded=True)
    for each in modules:
        share_buffers(each, context, options)
        add_sharding(each, group)
        each.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        each.register_state_dict_pre_hook(_reshard_before)
        each.register_load_state_dict_pre_hook(_reshard_before)
        each.__class__ = _fsdp_class(type(each))
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method unshard and reshard the module's parameters as its forward does.

    Does nothing for a module that was not passed to :func:`fully_shard`.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"method_name={method_name!r} is no method of {type(module).__name__}")
    # Not bound to this module, because copies of it have the method, too.
    function = method.__func__ if getattr(method, "__self__", None) is module else None

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self._hooks
        for before in (_before_forward, hooks.before):
            args, kwargs = before(self, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        except BaseException:
            hooks.after(self, args, None)
            raise
        result = hooks.after(self, args, output)
        return output if result is None else result

    setattr(module, method_name, MethodType(forward, module))


# --- arguments ------------------------------------------------------------------------------------


def _root_modules(module: Any) -> list[nn.Module]:
    """The modules to shard, checked, without those that are inside of others."""
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module or a list of them, not {type(each).__name__}")
        if type(each).forward is nn.Module.forward and isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"module {type(each).__name__} has no forward; pass the modules in it")
        if sharding_of(each) is not None:
            raise ValueError(f"module {type(each).__name__} is sharded already; shard each module once")
    if not given:
        raise ValueError("module is an empty list; pass at least one module")
    inside = {inner for each in given for inner in each.modules() if inner is not each}
    return [each for each in dict.fromkeys(given) if each not in inside]


def _context_for(mesh: DeviceMesh | None) -> ParallelContext:
    """The parallel context of ``init_distributed``, or one made from torch's process group."""
    if is_initialized() and dist.is_initialized() and current_context().world.group is not dist.group.WORLD:
        shutdown()  # the script has destroyed that process group and made another
    if not is_initialized():
        init_distributed(device=None if mesh is None else mesh.device_type)
    context = current_context()
    if mesh is not None and mesh.device_type != context.device.type:
        raise ValueError(f"mesh is of device type {mesh.device_type!r}, and this rank computes on {context.device}")
    return context


_communicators: WeakKeyDictionary[ParallelContext, dict[Any, Communicator]] = WeakKeyDictionary()


def _communicators_of(
    mesh: DeviceMesh | None, context: ParallelContext
) -> tuple[tuple[Communicator, Communicator] | None, float]:
    """The shard group and the replicate group of a mesh (None: the context's), and the number of replicas."""
    if mesh is None:
        return None, float(context.replicas)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} dimensions; pass one (shard) or two (replicate, shard)")
    known = _communicators.setdefault(context, {})
    communicators = []
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if group not in known:
            ranks = tuple(dist.get_process_group_ranks(group))
            alone = Communicator(None, context.device)
            same = [comm for comm in (context.outer_zero, context.outer_tp_zero, alone) if comm.ranks == ranks]
            known[group] = same[0] if same else Communicator(group, context.device)
        communicators.append(known[group])
    if mesh.ndim == 1:
        if communicators[0].ranks == context.outer_tp_zero.ranks:  # the context also covers tensor-parallel parameters
            return None, float(context.replicas)
        communicators.insert(0, Communicator(None, context.device))
    return (communicators[1], communicators[0]), float(communicators[0].size * communicators[1].size)


def _precision(policy: Any) -> MixedPrecision:
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, not {type(policy).__name__}")
    options: dict[str, Any] = {name: getattr(policy, name) for name in names}
    options |= {name: getattr(policy, name, None) for name in ("param_dtype_override_fn", "compression")}  # newer ones
    return MixedPrecision(**options)


def _offload(policy: Any) -> tuple[bool, bool]:
    """Whether shards are in host memory, and whether that memory is pinned."""
    if not isinstance(policy, OffloadPolicy):
        from torch.distributed import fsdp  # takes long to import

        if not isinstance(policy, fsdp.OffloadPolicy):
            raise TypeError(f"offload_policy must be an OffloadPolicy, not {type(policy).__name__}")
    return hasattr(policy, "pin_memory"), bool(getattr(policy, "pin_memory", True))


def _check_resharding(value: bool | int | None, shard_size: int) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(f"reshard_after_forward={value!r} must be True, False, None or a divisor of {shard_size}")
    return value != 1


def _check_placement(name: str, placement: Any) -> None:
    if placement is None:
        return
    from torch.distributed.tensor import Shard  # takes long to import

    if not (isinstance(placement, Shard) and placement.dim == 0):
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}; bmt_zero shards rows: return None or "
            f"Shard(0)"
        )


def _refuse(method: str, reason: str) -> None:
    raise RuntimeError(f"{method}: bmt_zero {reason}; remove this call")


# --- modules --------------------------------------------------------------------------------------

_classes: dict[type, type] = {}


def _fsdp_class(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes[cls]


def _hooks_of(modules: Sequence[FSDPModule]) -> list[ForwardHooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"modules must be a list of FSDPModules; it has a {type(module).__name__}")
    return [module._hooks for module in modules]


@serves_shards
@not_compiled
def _reshard_before(module: Any, *_: Any) -> None:
    """A hook before a state dict is made or loaded, so that modules have the sharded parameters."""
    module.reshard()


_PREPARED = "_bmt_fsdp_prepared"  # set on modules whose root is known


@not_compiled
def _before_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """A hook before forward. In its first call outside of other calls, the module is a root: see :func:`_prepare`."""
    group: ParameterGroup = module._group
    group.step.begin_forward()
    if group.step.calls or current_backward() is not None:
        return None
    if module.__dict__.get(_PREPARED) is None:
        _prepare(module)
    if group.context.device.type == "cuda":
        return tree_map_only(Tensor, lambda x: x.to(group.context.device), (args, kwargs))
    return None


def _prepare(root: FSDPModule) -> None:
    """Set what depends on which module is the root: resharding after forward, names and prefetching."""
    before: list[ForwardHooks] = []  # in the order in which forwards begin
    after: list[ForwardHooks] = []  # in the order in which forwards end
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        if module in seen:
            return
        seen.add(module)
        sharding = sharding_of(module)
        if sharding is not None:
            sharding.group.name = f"{path} (a {type(module).__name__})" if path else f"a {type(module).__name__}"
            before.append(sharding.hooks)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)
        if sharding is not None:
            after.append(sharding.hooks)
        if isinstance(module, FSDPModule):
            module.__dict__[_PREPARED] = True
            if module._group.options.reshard_after_forward is None:
                module._group.reshard_after_forward = module is not root

    visit(cast(nn.Module, root), "")
    for order, name in ((before, "next"), (list(reversed(after)), "previous")):
        by_group = list({hooks.group: hooks for hooks in reversed(order)}.values())[::-1]
        for each, neighbour in zip(by_group, [*by_group[1:], None], strict=True):
            setattr(each, name, neighbour)

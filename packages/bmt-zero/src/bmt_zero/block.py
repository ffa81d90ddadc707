"""Block: a module whose parameters are sharded over ranks and gathered while it computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bmt_comm import Communicator, ParallelContext, check_agreement, current_context, slice_of

from .backward import in_backward
from .bucket import Bucket
from .conversion import check_buffer, check_parameter, convert, drop_weak_references, move_buffers, whole_values
from .layout import FlatLayout, plan_layouts
from .parameter import DistributedParameter
from .precision import MixedPrecision
from .reach import check_reach, check_stage
from .stage_entry import STAGE_LOCAL_ATTRIBUTE
from .state import BlockState
from .unit import Call, Slot, Unit, grad_scale_of, holders, narrow_slices, shard_comms, write_rows


class Block(BlockState, nn.Module):
    """Shard a module's parameters; gather them while it computes.

    Takes any module and any arguments, and behaves like the module in every other way: its parameters,
    buffers and children keep their names, its state dict is the plain one, and attributes that are not the
    Block's are the module's. The module is converted in place: its parameters become sharded ones, the same
    objects. Parameters on the meta device get storage for the shards alone, to be filled by
    ``init_parameters`` or a checkpoint. Other parameters take the values of rank 0.

    Outputs may be nested containers and dataclasses of tensors. A tensor that reaches the loss by another way
    than the Block's output (kept in an attribute, say) is not seen; return it instead. A parameter that is
    part of the output is returned as a copy. Parameters may be frozen and unfrozen at any time; those that
    are frozen before the module becomes a Block cost no reduction.

    Args:
        inner_module: the module.
        use_checkpoint: whether to keep only the inputs for backward, and compute the rest again there.
        zero_level: what is sharded. 0: nothing, gradients are all-reduced; 1: optimizer states; 2: gradients,
            too, and parameters from backward to forward; 3: parameters at all times. By default what
            ``init_distributed(zero_level=)`` said, which is 3.
        initialized: whether ``init_parameters`` is to leave the Block alone.
        mode: "BLOCK".
        precision: dtypes to compute and reduce in.
        shard_comm, replicate_comm: hybrid sharding: the ranks that hold a part each (of a node, say), and
            those that hold the same part. By default all ranks hold a part each.
        stage_local: whether only the ranks of this pipeline stage have the module, and share it. They take the
            values of the first of them.

    Raises:
        RuntimeError: before ``init_distributed``; ranks have built different modules.
        TypeError: ``inner_module`` is not a module.
        ValueError: the module contains or is a Block, shares a parameter with another Block, or has a
            parameter or buffer of a device or dtype that cannot be sharded; communicators that do not make up
            the ranks that have the module; ``stage_local`` with parameters that other stages have parts of
            already (:func:`stage_block` takes those). The module is as it was then.
    """

    def __init__(
        self,
        inner_module: nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
        *,
        precision: MixedPrecision | None = None,
        shard_comm: Communicator | None = None,
        replicate_comm: Communicator | None = None,
        stage_local: bool = False,
    ) -> None:
        context = current_context()
        if not isinstance(inner_module, nn.Module):
            raise TypeError(f"inner_module must be a torch.nn.Module, not {type(inner_module).__name__}")
        if mode != "BLOCK":
            raise ValueError(f"mode={mode!r} is not a mode of a Block; use 'BLOCK'")
        level = context.zero_level if zero_level is None else zero_level
        if level not in (0, 1, 2, 3):
            raise ValueError(f"zero_level={zero_level!r} is not a ZeRO level; choose 0, 1, 2 or 3")
        if (shard_comm is None) != (replicate_comm is None):
            raise ValueError("shard_comm and replicate_comm must be given together")
        slots = find_slots(inner_module, context)
        if stage_local:
            check_stage(slots, context, (shard_comm, replicate_comm))
        super().__init__()
        attributes = self.__dict__
        attributes["inner_module"] = inner_module  # not registered: names of its contents have no prefix
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            attributes[name] = getattr(inner_module, name)
        self.training = inner_module.training
        self.use_checkpoint = use_checkpoint
        self.initialized = initialized
        self.precision = precision or MixedPrecision()
        self._comms = None if shard_comm is None or replicate_comm is None else (shard_comm, replicate_comm)
        self._level = level
        self._stage_local = stage_local
        self._buffered = [module for module in inner_module.modules() if module._buffers]
        drop_weak_references(inner_module)
        self.unit = self._build_unit(context, slots)
        move_buffers(inner_module, context.device)
        self.register_state_hooks()

    # --- construction -----------------------------------------------------------------------------

    def _build_unit(self, context: ParallelContext, slots: list[Slot]) -> Unit:
        """Sort the parameters into buckets by what can be gathered at once, and shard them."""
        name = f"a Block of {type(self.inner_module).__name__}"
        paths: dict[int, str] = {}
        params: dict[int, nn.Parameter] = {}
        for slot in slots:
            param = slot.module._parameters[slot.name]
            assert param is not None
            paths.setdefault(id(param), slot.path)
            params.setdefault(id(param), param)
        facts = [
            f"{paths[i]}: {slice_of(p).shape} {p.dtype} requires_grad={p.requires_grad}{' on meta' * p.is_meta}"
            for i, p in params.items()
        ]
        if self._comms is not None and (context.tp_size > 1 or self._stage_local):
            check_reach(*self._comms, context, {paths[i]: p for i, p in params.items()}, self._stage_local)
        for comm in self._comms or (holders(context, False, self._stage_local),):
            check_agreement(comm, f"the parameters of {name} at level {self._level}", facts)
        groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for param in params.values():
            key = (param.dtype, param.requires_grad, getattr(param, "tp_mode", False))
            groups.setdefault(key, []).append(param)
        buckets: list[Bucket] = []
        for (dtype, _, tp_mode), members in groups.items():
            shard_comm, replicate_comm = self._comms or shard_comms(context, tp_mode, self._level, self._stage_local)
            shapes = [slice_of(p).piece_shape for p in members]
            for layout in plan_layouts(shapes, shard_comm.size):
                chosen = [members[p.index] for p in sorted(layout.placements, key=lambda p: p.index)]
                layout = _renumber(layout)
                shard = torch.zeros(layout.shard_numel, dtype=dtype, device=context.device)
                for placement in layout.placements:
                    # One parameter at a time: never more than one is whole beside the shards.
                    whole = whole_values(chosen[placement.index], context.device, shard_comm, replicate_comm)
                    if whole is not None:
                        write_rows(shard, layout, placement, shard_comm.rank, whole)
                before = [param.bucket for param in chosen if isinstance(param, DistributedParameter)]
                converted = [convert(param, context) for param in chosen]
                buckets.append(
                    Bucket(
                        layout,
                        converted,
                        shard,
                        shard_comm,
                        replicate_comm,
                        self._level,
                        self.precision if dtype.is_floating_point else MixedPrecision(),
                        grad_scale_of(context, tp_mode),
                    )
                )
                narrow_slices(buckets[-1])
                for bucket in before:
                    if all(param.bucket is not bucket for param in bucket.params):
                        bucket.give_up()
        if self._stage_local:
            for param in params.values():
                setattr(param, STAGE_LOCAL_ATTRIBUTE, True)
        position = {id(p): i for i, p in enumerate(p for b in buckets for p in b.params)}
        for slot in slots:
            slot.index = position[id(slot.module._parameters[slot.name])]
        return Unit(name, buckets, context, slots)

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's forward."""
        unit = self.unit
        tracker = unit.tracker
        following = None
        if in_backward() is None:
            tracker.recover()
            tracker.expect(unit)
            unit.outdate()
            following = unit.next
        try:
            unit.gather()
            if following is not None:
                tracker.prefetch(following)
            call, args, kwargs, views = self._enter(args, kwargs)
            if call is not None and self.use_checkpoint:
                run = functools.partial(self._run_twice, _Buffers(self._buffered), views, kwargs)
                output = checkpoint(run, *args, use_reentrant=False)
            else:
                output = self._run(views, args, kwargs)
            output = self._leave(call, views, output, (args, kwargs))
        except BaseException:
            tracker.expect(None)
            unit.free()
            raise
        return output

    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call | None, tuple[Any, ...], dict[str, Any], list[Tensor]]:
        unit = self.unit
        dtype = self.precision.param_dtype
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        if not torch.is_grad_enabled() or all(p.requires_grad for p in unit.params):
            call, _, views = unit.enter(())
            return call, args, kwargs, views
        leaves, spec = tree_flatten((args, kwargs))
        which = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        call, inputs, views = unit.enter([leaves[i] for i in which])
        for i, value in zip(which, inputs, strict=True):
            leaves[i] = value
        args, kwargs = tree_unflatten(leaves, spec)
        return call, args, kwargs, views

    def _run(self, views: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute with the full parameters."""
        unit = self.unit
        was_installed = unit.installed
        unit.install(views)
        try:
            return self.inner_module(*args, **kwargs)
        finally:
            if not was_installed:
                unit.uninstall()

    def _run_twice(self, buffers: _Buffers, views: list[Tensor], kwargs: dict[str, Any], /, *args: Any) -> Any:
        """Under checkpointing: compute in forward, and again in backward."""
        if in_backward() is not None:
            self.unit.tracker.enter(self.unit)
            self.unit.gather()
        with buffers.run():
            return self._run(views, args, kwargs)

    def _leave(self, call: Call | None, views: list[Tensor], output: Any, inputs: Any) -> Any:
        """Ask to be told of the output's gradients; free what is not needed until then."""
        unit = self.unit
        output = self._without_parameters(output)
        differentiable = False
        unknown = False
        if call is not None:
            tensors, unknown = _find_tensors(output)
            # What only passes through gets its gradient from elsewhere, at another time.
            passed = {id(leaf) for leaf in tree_leaves(inputs)}
            for tensor in tensors:
                if tensor.requires_grad and id(tensor) not in passed:
                    tensor.register_hook(functools.partial(unit.pre_backward, call, views))
                    differentiable = True
        if not (differentiable or unknown) or (unit.level == 3 and not unknown and not unit.begins_backward):
            unit.free()
        return output

    def _without_parameters(self, output: Any) -> Any:
        """The output with copies of those tensors that lie in the space of the parameters."""
        spaces = {b.full.untyped_storage().data_ptr() for b in self.unit.buckets if b.frees}

        def is_parameter(tensor: Tensor) -> bool:
            return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in spaces

        tensors, _ = _find_tensors(output)
        if not any(is_parameter(tensor) for tensor in tensors):
            return output
        output = tree_map_only(Tensor, lambda x: x.clone() if is_parameter(x) else x, output)
        if any(is_parameter(tensor) for tensor in _find_tensors(output)[0]):
            raise ValueError(
                f"the output of {self.unit.name}, a {type(output).__name__}, contains a parameter, which is freed when "
                f"the Block is left; return a clone of it"
            )
        return output

    # --- standing in for the module ---------------------------------------------------------------

    def train(self, mode: bool = True) -> Block:
        self.inner_module.train(mode)
        self.training = self.inner_module.training
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # What the module has of its own and the Block has not is the module's to keep.
        attributes = self.__dict__
        if "unit" in attributes and name not in attributes and name in attributes["inner_module"].__dict__:
            setattr(attributes["inner_module"], name, value)
        else:
            super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``: the inner module's class, as which others look for layers; ``type`` says Block."""
        inner = self.__dict__.get("inner_module")
        return Block if inner is None else type(inner)

    def _get_name(self) -> str:
        return "Block"

    def __getattr__(self, name: str) -> Any:
        try:
            value = super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("inner_module")
            if inner is None:
                raise
            return getattr(inner, name)
        # Read from outside of the Block's forward, which sees the gathered parameters by itself.
        return value.gather() if isinstance(value, DistributedParameter) else value

    def extra_repr(self) -> str:
        return f"{type(self.inner_module).__name__}, zero_level={self._level}, use_checkpoint={self.use_checkpoint}"


CheckpointBlock = Block


def find_slots(inner: nn.Module, context: ParallelContext) -> list[Slot]:
    """Where the module and its children have parameters, after checking that all can be sharded."""
    slots = []
    for module_path, module in inner.named_modules(remove_duplicate=False):  # a shared one has several names
        if isinstance(module, Block):
            where = f"its part {module_path!r}" if module_path else "itself"
            raise ValueError(f"inner_module has {where} in a Block already; wrap each module once, and only one level")
        prefix = f"{module_path}." if module_path else ""
        for name, param in module._parameters.items():
            if param is not None:
                check_parameter(prefix + name, param, context)
                slots.append(Slot(module, name, -1, prefix + name))
        for name, buffer in module._buffers.items():
            check_buffer(prefix + name, buffer, context)
    return slots


class _Buffers:
    """What a checkpointed forward does to buffers, such as running averages: done once, not again when it is
    computed again."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.changed: list[nn.Module] | None = None  # modules that write to their buffers; None: not run yet

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        before = [(module, dict(module._buffers)) for module in self.modules]
        if self.changed is None:
            versions = [[_version(b) for b in buffers.values()] for _, buffers in before]
            yield
            self.changed = [
                module
                for (module, buffers), old in zip(before, versions, strict=True)
                # The kernel of batch normalisation writes without counting a version.
                if isinstance(module, nn.modules.batchnorm._NormBase)
                or any(module._buffers.get(name) is not b for name, b in buffers.items())
                or [_version(b) for b in buffers.values()] != old
            ]
            return
        for module in self.changed:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            for module, buffers in before:
                module._buffers.update(buffers)


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _renumber(layout: FlatLayout) -> FlatLayout:
    """The same layout for its own parameters alone, numbered from 0 in their order."""
    rank = {index: i for i, index in enumerate(sorted(p.index for p in layout.placements))}
    return dataclasses.replace(
        layout, placements=tuple(dataclasses.replace(p, index=rank[p.index]) for p in layout.placements)
    )


def _find_tensors(output: Any) -> tuple[list[Tensor], bool]:
    """The tensors in a module's output, and whether it holds objects that were not looked into."""
    if isinstance(output, Tensor):
        return [output], False
    tensors: list[Tensor] = []
    unknown = False
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found, inside = _find_tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
            tensors += found
            unknown |= inside
        elif isinstance(leaf, Mapping):  # a dict of a kind that torch does not know
            found, inside = _find_tensors(list(leaf.values()))
            tensors += found
            unknown |= inside
        elif not isinstance(leaf, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            unknown = True
    return tensors, unknown

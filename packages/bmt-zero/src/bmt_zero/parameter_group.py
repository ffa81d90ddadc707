"""Parameters that are unsharded, resharded and reduced together.

[Note: what modules see]
    While a module's forward runs, its ``_parameters`` hold the unsharded tensors, as FSDP2's do. Otherwise, also in
    backward, they hold the sharded parameters.

[Note: backward in two parts]
    A pipeline schedule may compute the gradients of a chunk's inputs first and those of its parameters later
    (``bmt_pipe.split_backward``). The input-gradient pass does not reach :class:`Enter`: a call ends when the gradients
    of its inputs have arrived. The weight-gradient pass runs single nodes of the modules' graphs again; a call does
    not begin backward in it. ``StepContext.part`` tells which pass is running.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from bmt_comm import ParallelContext, RankFailureError, inside_checkpoint, not_compiled, select_rows, uses_compiler

from .flat_parameter import FlatParameter, State
from .gradient_reducer import GradientReducer, ReducedGradient
from .gradient_target import GradientTarget
from .options import Options
from .sharded_parameter import ShardedParameter
from .unsharded_parameter import LEAST_BYTES, UnshardedParameter


class GroupHandle:
    """Connects a sharded parameter to its group; ``param.handle``.

    Attributes:
        group: the parameter group.
        reducer: reduces its gradient.
        flat, index: the parameter is number ``index`` of this flat parameter.
        replacement: the unsharded tensor to use in its place; see :func:`replaced_parameters`.
        saved: the last unsharded copy that was made for a state dict.
    """

    __slots__ = ("flat", "group", "index", "param", "reducer", "replacement", "saved")

    def __init__(self, group: ParameterGroup, reducer: GradientReducer, index: int) -> None:
        self.group = group
        self.reducer = reducer
        self.flat = reducer.flat
        self.index = index
        self.param = self.flat.params[index]
        self.replacement: Tensor | None = None
        self.saved: TensorWeakRef | None = None

    @property
    def is_on_one_rank(self) -> bool:
        """Whether one rank holds all rows."""
        return self.flat.is_on_one_rank(self.index)

    @property
    def is_computed_with(self) -> bool:
        """Whether what is read now has the dtype of computation: in a forward, and when a checkpoint recomputes."""
        recomputes = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        return recomputes or bool(self.group.step.calls)

    @property
    def is_unsharded_in_backward(self) -> bool:
        """Whether a checkpoint recomputes in a backward pass for which the group is unsharded.

        Reading does not communicate then, so each rank may read what it needs, as in a forward.
        """
        return bool(self.group.in_backward) and self.flat.state is State.UNSHARDED and inside_checkpoint()

    @not_compiled
    def unshard(self, stored: bool = False) -> Tensor:
        """The unsharded parameter (this tensor-parallel rank's shard of it), differentiably.

        ``stored``: in the dtype that it is stored in, always.
        """
        if self.replacement is not None:
            return self.replacement
        param, flat = self.param, self.flat
        in_backward = not stored and self.is_unsharded_in_backward
        if not in_backward:
            self.begin_unsharding_one()

        def values(stored: bool) -> Tensor:
            if in_backward:
                return flat.views()[self.index]
            return flat.unshard_stored(self.index) if stored else flat.unshard_one(self.index)

        if not (torch.is_grad_enabled() and param.requires_grad):
            return values(flat.allocate and (stored or not self.is_computed_with))
        casts = stored and flat.casts
        version, cached = self.group.unsharded_alone.get(self, (-1, None))
        before = None if cached is None or casts or version != param._version else cached()
        if before is not None:
            return before  # a tied weight is used twice and unsharded once
        unsharded: Tensor
        [unsharded] = self.group.enter(self, [values(casts)])
        if self.group.step.splits_backward:
            unsharded = unsharded.view_as(unsharded)  # the view's node keeps that of Enter, which torch 2.8 would drop
        if not casts and not in_backward:  # whose storage is released when the group is resharded
            self.group.unsharded_alone[self] = param._version, TensorWeakRef(unsharded)
        return unsharded

    def unshard_stored(self, like: Tensor | None = None) -> Tensor:
        """:meth:`unshard` in the dtype that it is stored in, in separate storage; not differentiable.

        ``like``: a tensor of the shape of this rank's rows, to unshard instead.
        """
        self.begin_unsharding_one()
        return self.flat.unshard_stored(self.index, like)

    def begin_unsharding_one(self) -> None:
        """Prepare to unshard this parameter alone."""
        group = self.group
        group.step.recover()
        group.refresh([self.reducer])
        group.step.begin_unsharding(group)

    def fill(self, values: Tensor) -> None:
        """Set this rank's rows from ``values``: the first rank's unsharded parameter (its tensor-parallel shard)."""
        for comm in self.flat.communicators:
            comm.broadcast(values, 0)
        self.param.to_local().copy_(select_rows(values, self.param.bmt_slice))
        self.param.awaits_values = False

    def reduce(self, grad: Tensor | None) -> None:
        """Reduce a gradient of the unsharded parameter in the backward pass that is running."""
        grads: list[Tensor | None] = [None] * len(self.flat.params)
        grads[self.index] = grad
        self.group.reduce([(self.reducer, grads, None)])

    def params_arrived(self, grads: Sequence[Tensor | None]) -> None:
        """The gradient of the tensor that :meth:`unshard` returned has arrived: reduce it."""
        self.group.unsharded_alone.pop(self, None)
        self.reduce(grads[0])


class Enter(torch.autograd.Function):
    """() → unsharded parameters. ``receiver.params_arrived`` is called once, when all their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, receiver: Any, tensors: Sequence[Tensor], *_anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.receiver = receiver
        return tuple(tensors)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.receiver.params_arrived(grads)
        return (None,) * len(ctx.needs_input_grad)


# ``Enter.apply`` does more for transforms of torch.func, which are refused.
_apply: Any = super(torch.autograd.Function, Enter).apply


@dataclass
class Slot:
    """Where a module has a parameter: ``module.name`` is parameter ``index`` of the group.

    ``path`` is the name of that parameter in the sharded module.
    """

    module: nn.Module
    name: str
    path: str
    index: int = -1

    @property
    def param(self) -> nn.Parameter:
        param = self.module._parameters.get(self.name)
        assert param is not None
        return param


class ParameterGroup:
    """Parameters that are unsharded, resharded and reduced together.

    Args:
        reducers: one for each flat parameter; frozen and trainable parameters are in separate flat parameters.
        context: the ranks.
        options: how the parameters are sharded.
        step: the calls and passes under way (a ``backward_context.StepContext``, whose module imports this one).
        slots: where modules have the parameters.

    Attributes:
        number: of the group among those that its ranks have built; -1: a parameter outside of Blocks.
        label: identifies name, number and frozen parameters, when ranks compare the order in which they unshard groups.
        communicators: those of several ranks that reduce the gradients.
        unsharding_communicators: those of them over which parameters are unsharded.
        last_call: returns the last call (``hooks.Call``), or None if it is deleted.
        in_backward: the calls in backward, which need the parameters.
        unsharded_alone: single parameters that were unsharded for a computation: their version then, and the tensor.
        trains: which parameters are trainable, as of the last :meth:`refresh`.
        replaced: number of parameters that modules have replacements for; see :func:`replaced_parameters`.
        held: whether unsharded parameters are kept; see :meth:`hold`.
        unsharded_by_script: whether modules see unsharded parameters until they are resharded; see :meth:`show`.
        reshard_after_backward: whether parameters are resharded after backward.
        mesh: the ranks that share the parameters.
        unfilled: parameters that were built on the meta device and not seen with values yet.
    """

    def __init__(
        self,
        reducers: Sequence[GradientReducer],
        context: ParallelContext,
        options: Options,
        step: Any,
        slots: Sequence[Slot] = (),
    ) -> None:
        self.reducers = list(reducers)
        self.context = context
        self.options = options
        self.slots = list(slots)
        self.name = options.name
        self.level = level = options.level
        self.precision = options.precision
        resharded = options.reshard_after_forward
        self.reshard_after_forward = level == 3 if resharded is None else resharded
        self.flats = [reducer.flat for reducer in self.reducers]
        self.step = step
        self.communicators = list(dict.fromkeys(comm for flat in self.flats for comm in flat.communicators))
        self.unsharding_communicators = [
            comm for comm in self.communicators if any(comm is flat.shard_comm for flat in self.flats)
        ]
        self.anchor, self.anchor_node = leaf_on(context.device)
        self._anchor_of_all, _ = step.anchor_on(context.device)
        self.last_call: Callable[[], Any] = lambda: None
        self.in_backward: set[Any] = set()
        self.unsharded_alone: dict[GroupHandle, tuple[int, TensorWeakRef]] = {}
        self.trains: list[bool] = []
        self.replaced = 0
        self.held = False
        self.unsharded_by_script = False
        self.reshard_after_backward = True
        self.mesh = context.mesh
        self.number = self.label = -1
        self._labelled_name = ""
        self.places = ("", "")  # of forward and backward, for messages about failures
        self._installed = False
        self._installed_slots = self.slots  # those whose modules have them: see _check_places
        self._recurrent = list({s.module: None for s in self.slots if isinstance(s.module, nn.RNNBase)})
        self.params: list[ShardedParameter] = []
        self.unfilled: list[ShardedParameter] = []
        self._parts: list[tuple[GradientReducer, slice]] = []  # each reducer, and its range in ``params``
        # Of each parameter with two dimensions: its position in ``params``, its reducer, and its number there.
        self._matrices: list[tuple[int, GradientReducer, int]] = []
        for reducer in self.reducers:
            start = len(self.params)
            self.params += reducer.flat.params
            self._parts.append((reducer, slice(start, len(self.params))))
            shapes = [param.bmt_slice.shape for param in reducer.flat.params]
            self._matrices += [(start + n, reducer, n) for n, shape in enumerate(shapes) if len(shape) == 2]
            for index, param in enumerate(reducer.flat.params):
                param.handle = GroupHandle(self, reducer, index)
                if param.is_unfilled:
                    self.unfilled.append(param)

    @property
    def is_worth_prefetching(self) -> bool:
        """Whether unsharding takes time, so that it should begin before the parameters are needed."""
        return any(not flat.is_shard for flat in self.flats)

    @property
    def is_unsharded(self) -> bool:
        return all(flat.state is State.UNSHARDED for flat in self.flats)

    def enter(self, receiver: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``tensors`` as outputs of one node, with whose gradients ``receiver.params_arrived`` is called."""
        self._refuse_transforms()
        anchors = [self.anchor]
        if not self.step.splits_backward:  # which takes groups apart by what is behind their nodes
            anchors.append(self._anchor_of_all)
        entered: tuple[Tensor, ...] = _apply(receiver, tensors, *anchors)
        return entered

    def note_writes(self) -> None:
        """Let autograd know of writes to the parameters. Backward of an earlier forward that has saved them raises."""
        for flat in self.flats:
            flat.note_writes()

    def views(self) -> list[Tensor]:
        """The unsharded parameters, as new tensors, in the order of ``params``."""
        return [view for flat in self.flats for view in flat.views()]

    def views_with_targets(self) -> tuple[list[Tensor], dict[GradientReducer, GradientTarget]]:
        """:meth:`views` for a call that may be differentiated, and targets for the gradients of large weights.

        There are no targets if a pipeline splits backward, because autograd must see how gradients are computed then;
        nor in compiled code, which raises an error for tensors that are not plain.
        """
        views = self.views()
        targets: dict[GradientReducer, GradientTarget] = {}
        if not self._matrices or self.step.splits_backward or uses_compiler():
            return views, targets
        for position, reducer, number in self._matrices:
            view = views[position]
            if self.trains[position] and view.nbytes >= LEAST_BYTES and reducer.writes(number):
                target = targets.get(reducer)
                if target is None:
                    target = targets[reducer] = GradientTarget(reducer.targets, self.anchor_node)
                views[position] = UnshardedParameter.of(view, target, number)
        return views, targets

    # --- unsharding -------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Invalidate the unsharded parameters when a computation begins: the shards may have been written since.

        While gradients are accumulated at level 1, parameters stay unsharded from one micro-batch to the next.
        """
        if self.held or self.unsharded_by_script or not self.reshard_after_backward:
            return  # versions of the parameters tell whether they were written
        for reducer in self.reducers:
            flat = reducer.flat
            if flat.state is State.UNSHARDED and (self.level > 1 or not reducer.accumulates):
                flat.state = State.SHARDED  # not every write to a parameter can be seen

    def unshard(self, refresh: bool = False) -> None:
        """Start to unshard the flat parameters that are not unsharded.

        ``refresh``: whether parameters may have been moved, frozen or unfrozen since the last forward.
        """
        self._refuse_transforms()
        try:
            if refresh or self.label == -1:
                self.refresh(self.reducers)
            self.step.begin_unsharding(self)
            for flat in self.flats:
                flat.unshard()
            self.step.begin_use(self)
        except (torch.OutOfMemoryError, RankFailureError):  # scripts catch these classes; a report names the group
            raise
        except RuntimeError as error:
            raise RuntimeError(f"while {self.name} was unsharded: {error}") from error

    def _refuse_transforms(self) -> None:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{self.name} cannot be unsharded inside of transforms of torch.func (jvp, vmap, grad): apply them "
                f"to a plain model, or use torch.autograd.grad and torch.autograd.forward_ad"
            )

    def wait(self) -> None:
        """Make the unsharded parameters usable."""
        try:
            for flat in self.flats:
                flat.wait()
        except (torch.OutOfMemoryError, RankFailureError):
            raise
        except RuntimeError as error:
            raise RuntimeError(f"while {self.name} was unsharded: {error}") from error

    def unshard_in_backward(self) -> None:
        """Unshard the parameters for the backward pass that is running."""
        self.step.enter(self)
        self.unshard()
        self.wait()

    def refresh(self, reducers: Sequence[GradientReducer]) -> None:
        """Notice a new name, frozen or unfrozen parameters, and whether parameters of ``reducers`` were moved."""
        trains = [p.requires_grad for p in self.params]
        if trains != self.trains or self.name != self._labelled_name:
            frozen = [slot.path for slot in self.slots if not trains[slot.index]]
            name = self.name if self.number < 0 else f"{self.name}, number {self.number}"
            text = f"{name}, {f'frozen: {frozen}' if frozen else 'all parameters trained'}"
            self.trains, self._labelled_name = trains, self.name
            self.label = self.step.sequences.label(text)
            # Of tied parameters the first path.
            paths = {id(self.params[slot.index]): slot.path for slot in reversed(self.slots)}
            for flat in self.flats:
                flat.label = self.name
                flat.names = [f"{paths.get(id(param), 'a parameter')} of {self.name}" for param in flat.params]
            self.places = f"the forward of {self.name}", f"the backward of {self.name}"
        for reducer in reducers:
            reducer.rebind_storage()

    def check_values(self) -> None:
        """Raise if nothing has filled parameters that were built on the meta device."""
        waiting, self.unfilled = self.unfilled, []
        if not any(param.awaits_values for param in waiting):  # all ranks have loaded or initialised them
            return
        # Each rank has written its own rows, so ask all ranks. A write through .data does not count as one, but leaves
        # values.
        rows = [param.to_local() if param.is_unfilled else None for param in waiting]
        facts = [[x is not None and x.numel() > 0, x is not None and bool(x.any())] for x in rows]
        answers = torch.tensor(facts, dtype=torch.uint8, device=self.context.device)
        for comm in self.communicators:
            comm.all_reduce(answers, "max", label=f"whether {self.name} has values")
        unfilled = [(param, has_values) for param, (lacks, has_values) in zip(waiting, answers.tolist()) if lacks]
        if unfilled and not any(has_values for _, has_values in unfilled):
            self.unfilled = waiting
            paths = [slot.path for slot in self.slots if any(self.params[slot.index] is p for p, _ in unfilled)]
            raise RuntimeError(
                f"parameters of {self.name} were built on the meta device and nothing has filled them: {paths[:5]}; "
                f"call init_parameters(model), load a state dict or a checkpoint, or write into them"
            )
        for param in waiting:
            param.awaits_values = False

    def reshard(self) -> None:
        """Reshard, unless a call in forward or backward still needs the parameters."""
        if self.in_backward or self.held or any(call.hooks.group is self for call in self.step.calls):
            return
        self.hide()
        for flat in self.flats:
            flat.reshard()

    def hold(self) -> None:
        """Keep the unsharded parameters from one micro-batch to the next, until :meth:`release`.

        Does nothing if they are resharded after forward.
        """
        self.release()
        self.held = not self.reshard_after_forward
        for flat in self.flats:  # so that all ranks unshard it once: a rank without rows sees no change of a version
            if flat.is_shared and flat.state is State.UNSHARDED and not self.unsharded_by_script:
                flat.state = State.SHARDED

    def release(self) -> None:
        """End :meth:`hold`."""
        self.held = False
        self.reshard()

    # --- what modules see -------------------------------------------------------------------------

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules see ``tensors`` until the parameters are resharded."""
        if self.unsharded_by_script and not self._installed:
            self.install(tensors)

    def hide(self) -> None:
        """End :meth:`show`."""
        if self.unsharded_by_script:
            self.unsharded_by_script = False
            self.uninstall()

    def install(self, tensors: Sequence[Tensor]) -> bool:
        """Let the modules see ``tensors`` in place of the parameters. Returns whether they saw parameters before."""
        first = not self._installed
        if first:
            self._check_places()
        self._installed = True
        for slot in self._installed_slots:
            slot.module._parameters[slot.name] = tensors[slot.index]  # type: ignore[assignment]
        for module in self._recurrent:
            refresh_flat_weights(module)
        return first

    def _check_places(self) -> None:
        """Find the slots that have their parameters. A parametrization, or torch's pruning, has moved the others.

        Raises:
            RuntimeError: a module has another tensor in place of a sharded parameter; it would be ignored.
        """
        self._installed_slots = self.slots
        for slot in self.slots:
            param, module = self.params[slot.index], slot.module
            if module._parameters.get(slot.name) is param:
                continue
            self._installed_slots = [each for each in self._installed_slots if each is not slot]
            if slot.name in module._parameters or all(p is not param for p in module.parameters()):  # parametrized
                raise RuntimeError(
                    f"parameter {slot.path!r} of {self.name} was replaced by another tensor after it was sharded: copy "
                    f"values into it (copy_, load_state_dict), or replace or parametrize it before"
                )

    def uninstall(self) -> None:
        """Let the modules see the sharded parameters again."""
        if not self._installed:
            return
        self._installed = False
        for slot in self._installed_slots:
            parameters = slot.module._parameters
            if slot.name not in parameters:  # a parametrization was registered and removed, which sets the name again
                slot.module._buffers.pop(slot.name, None)
                slot.module.__dict__.pop(slot.name, None)
            parameters[slot.name] = self.params[slot.index]
        for module in self._recurrent:
            refresh_flat_weights(module)

    # --- gradients --------------------------------------------------------------------------------

    def reduce_call(
        self,
        trainable: Sequence[bool],
        grads: Sequence[Tensor | None],
        targets: Mapping[GradientReducer, GradientTarget],
        has_others: bool,
    ) -> None:
        """Reduce the gradients of the parameters of a call. ``grads`` has one for each ``trainable`` parameter.

        ``has_others``: whether other calls may have gradients for them in the same backward pass.
        """
        if len(grads) < len(trainable):
            arrived = iter(grads)
            grads = [next(arrived) if trains else None for trains in trainable]
        parts = [(reducer, part) for reducer, part in self._parts if any(trainable[part])]
        for reducer, _ in parts:
            reducer.has_calls_left |= has_others
        self.reduce([(reducer, grads[part], targets.get(reducer)) for reducer, part in parts])

    def reduce(self, work: Sequence[tuple[GradientReducer, Sequence[Tensor | None], GradientTarget | None]]) -> None:
        """Start to reduce gradients: for each reducer, one for each of its parameters, and a target or None."""
        self.step.enter(self)
        needed = bool(self.in_backward) or self.held or not self.reshard_after_backward
        # Backward runs without gradient mode but for create_graph=True, and ``no_grad`` takes time.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self.step.reduce(work, needed)

    def add_reduced(self, reducer: GradientReducer, gradient: ReducedGradient) -> None:
        """Add a gradient that was reduced before, in the backward pass that is running."""
        self.step.enter(self)
        reducer.add_gradient(gradient)
        self.step.use.note(reducer)

    def reshard_in_backward(self) -> None:
        """Reshard, unless gradients are accumulated at level 1 and parameters stay unsharded until the step."""
        waits = self.level <= 1 and any(reducer.no_sync for reducer in self.reducers)
        if self.reshard_after_backward and not waits:
            self.reshard()

    def end_backward(self) -> None:
        """Clear the state of a backward pass that is over."""
        self._forget_calls()
        self.reshard_in_backward()

    def abandon_backward(self) -> None:
        """Clear the state of a backward pass that an exception has ended."""
        self._forget_calls()
        for reducer in self.reducers:
            reducer.drop_pass()
            reducer.flat.reshard()

    def _forget_calls(self) -> None:
        for call in self.in_backward:
            call.forget()
        self.in_backward.clear()
        self.unsharded_alone.clear()

    # --- copying ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterGroup:
        twin = ParameterGroup.__new__(ParameterGroup)
        memo[id(self)] = twin
        reducers = [_copy_reducer(reducer, memo) for reducer in self.reducers]
        slots = copy.deepcopy(self.slots, memo)  # with the modules, whose parameters are in memo
        twin.__init__(reducers, self.context, self.options, self.step, slots)  # type: ignore[misc]
        for name in ("name", "number", "mesh", "reshard_after_forward", "reshard_after_backward"):
            setattr(twin, name, getattr(self, name))
        return twin


def leaf_on(device: torch.device) -> tuple[Tensor, Any]:
    """A leaf for nodes that have no other inputs, and its own node.

    That node runs only in backward passes that accumulate gradients of all leaves. Autograd lets the stream that called
    backward wait for gradients if leaves like this one are on the device.
    """
    leaf = torch.zeros((), requires_grad=True, device=device)
    with torch.enable_grad():
        return leaf, leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def parameters_in_forward(module: nn.Module, step: Any) -> Iterator[nn.Parameter]:
    """The parameters of a module and its submodules; sharded parameters also while modules see unsharded ones."""
    groups = [call.hooks.group for call in step.calls]
    sharded = {(slot.module, slot.name): group.params[slot.index] for group in groups for slot in group.slots}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                yield sharded.get((part, name), param)


@contextmanager
def replaced_parameters(values: Mapping[ShardedParameter, Tensor]) -> Iterator[None]:
    """Within, modules compute with ``values`` in place of the parameters, and their groups are not unsharded."""
    before: list[tuple[nn.Module, str, Any]] = []
    for param, value in values.items():
        handle: GroupHandle = param.handle
        handle.replacement = value
        handle.group.replaced += 1
        for slot in handle.group.slots:
            if handle.group.params[slot.index] is param:
                before.append((slot.module, slot.name, slot.param))
                slot.module._parameters[slot.name] = value  # type: ignore[assignment]
    recurrent = list({module: None for module, _, _ in before if isinstance(module, nn.RNNBase)})
    try:
        for each in recurrent:
            refresh_flat_weights(each)
        yield
    finally:
        for module, name, tensor in before:
            module._parameters[name] = tensor
        for each in recurrent:
            refresh_flat_weights(each)
        for param in values:
            param.handle.replacement = None
            param.handle.group.replaced -= 1


def refresh_flat_weights(module: nn.Module) -> None:
    """Update the list of weights that recurrent modules keep in addition to the attributes."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def _copy_reducer(reducer: GradientReducer, memo: dict[int, Any]) -> GradientReducer:
    """A copy with copies of the parameters, without gradients (as copies of plain parameters)."""
    reducer.finish()
    reducer.rebind_storage()
    flat = reducer.flat
    twins = []
    for param in flat.params:
        data = param.to_local().clone()  # replaced by a view of the twin's storage below
        twin = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
        twin.__dict__.update({k: v for k, v in param.__dict__.items() if k not in ("handle", "_aliases")})
        memo[id(param)] = twin
        twins.append(twin)
    communicators = flat.shard_comm, flat.replicate_comm
    shard = flat.options.new_storage(flat.layout.shard_numel, flat.shard.dtype, flat.device).copy_(flat.shard)
    result = GradientReducer(
        FlatParameter(flat.layout, twins, shard, communicators, flat.options, flat.allocate),
        reducer.grad_scale,
        reducer.has_fixed_order,
    )
    result.settings = copy.copy(reducer.settings)
    return result

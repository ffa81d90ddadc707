"""Parameters that are unsharded, resharded and reduced together, and when that happens.

[Note: how a parameter group meets autograd]
    The unsharded parameters enter a computation as the outputs of one autograd node (:class:`_Enter`) per call.
    Autograd calls that node's backward when, and only when, every gradient of the parameters has arrived,
    however often they were used: the moment to reduce. Frozen parameters get no gradient; where a group has some,
    the call is over when the gradients of its inputs have arrived, too.

    A hook on the call's outputs (and, where an output is a view, on what it is a view of, because writing into a view
    replaces its node) unshards the parameters again when backward arrives. Calls of one group that are in backward at
    the same time are counted, and the last one reshards.

    A node whose weight gradients come later (:mod:`bmt_zero.weight_gradients`) is called just so, with None in their
    place.

[Note: what modules see]
    While a module's forward runs, its ``_parameters`` hold the unsharded tensors, as FSDP2's do. Otherwise, in backward
    too, they hold the sharded parameters.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, ParallelContext

from .backward_context import StepContext, current_backward, step_context
from .flat_parameter import FlatParameter
from .gradient_reducer import GradientReducer
from .outputs import find_tensors, replaced
from .precision import MixedPrecision
from .sharded_parameter import ShardedParameter
from .weight_gradients import added, may_wait, reduce_in_time


class GroupHandle:
    """How a sharded parameter reaches its group; see :class:`bmt_zero.sharded_parameter.ParameterHandle`.

    Attributes:
        group: which unshards and reduces it.
        flat, index: which stores it, as the parameter of this index.
        replacement: what is used in its place, where it was unsharded before.
        original: the values that a standalone parameter was made of, until they are needed no more.
    """

    __slots__ = ("_cached", "flat", "group", "index", "original", "param", "replacement")

    def __init__(self, group: ParameterGroup, flat: FlatParameter, index: int) -> None:
        self.group = group
        self.flat = flat
        self.index = index
        self.param = flat.params[index]
        self.replacement: Tensor | None = None
        self.original: tuple[Tensor, int] | None = None
        self._cached: tuple[int, TensorWeakRef] | None = None

    def gather(self) -> Tensor:
        if self.replacement is not None:
            return self.replacement
        group, param = self.group, self.param
        group.begin_gather(self.flat)
        self.original = None
        if not (torch.is_grad_enabled() and param.requires_grad):
            return self.flat.gather_stored(self.index) if self.flat.allocate else self.flat.gather_one(self.index)
        if self._cached is not None:
            version, reference = self._cached
            cached = reference()
            if cached is not None and version == param._version:
                return cached  # a tied weight is used twice, and gathered once
        result: Tensor = _GatherOne.apply(group.anchor, self)
        self._cached = (param._version, TensorWeakRef(result))
        return result

    def gather_stored(self) -> Tensor:
        self.group.begin_gather(self.flat)
        return self.flat.gather_stored(self.index)

    def copy(self, memo: dict[int, Any]) -> None:
        copy.deepcopy(self.group, memo)

    def reduce(self, grad: Tensor | None) -> None:
        """Reduce a gradient of the unsharded parameter in the backward pass that is running."""
        self._reduce_with(grad, {})

    def reduce_gathered(self, receiver: _GatheredOne, grad: Tensor | None) -> None:
        """Reduce the gradient of what :meth:`gather` returned."""
        self._cached = None
        reduce_in_time(self.group, receiver, functools.partial(self._reduce_with, grad))

    def _reduce_with(self, grad: Tensor | None, late: Mapping[int, Tensor]) -> None:
        grads: list[Tensor | None] = [None] * len(self.flat.params)
        [grads[self.index]] = added([grad], late)
        self.group.reduce([(self.group.reducer_of(self.flat), grads)])

    def forget_call(self) -> None:
        self._cached = None


class Call:
    """One use of a group's unsharded parameters in a computation that may be differentiated."""

    __slots__ = ("awaited_inputs", "awaits_params", "group", "hooks", "inputs", "trainable")

    def __init__(self, group: ParameterGroup, hooks: ForwardHooks) -> None:
        self.group = group
        self.hooks = hooks
        self.trainable = [p.requires_grad for p in group.params]
        self.inputs: list[Any] = []  # nodes of inputs whose gradients end the call, beside those of the parameters
        self.awaits_params = False
        self.awaited_inputs: dict[Any, Any] = {}  # such nodes, and how to take the hooks off them

    def begin_backward(self) -> None:
        self.awaits_params = any(self.trainable)
        for node in self.inputs:
            hook = functools.partial(self.group.input_gradient, self, node)
            self.awaited_inputs[node] = node.register_prehook(hook)

    def input_arrived(self, node: Any) -> None:
        handle = self.awaited_inputs.pop(node, None)
        if handle is not None:
            handle.remove()

    def end_backward(self) -> None:
        for node in list(self.awaited_inputs):
            self.input_arrived(node)

    def accepts(self, output: int, tensors: Sequence[Tensor]) -> bool:
        """See :class:`bmt_comm.GradientReceiver`."""
        return may_wait(self.group, tensors)


class _GatheredOne:
    """One parameter that was gathered by itself; see :class:`bmt_comm.GradientReceiver`."""

    __slots__ = ("handle",)

    def __init__(self, handle: GroupHandle) -> None:
        self.handle = handle

    def accepts(self, output: int, tensors: Sequence[Tensor]) -> bool:
        return may_wait(self.handle.group, tensors)


class _Enter(torch.autograd.Function):
    """() → the trainable unsharded parameters; see [Note: how a parameter group meets autograd]."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradient_receiver = call
        return tuple(itertools.compress(call.group.views(), call.trainable))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        call: Call = ctx.gradient_receiver
        with torch._C.DisableTorchFunctionSubclass():
            call.group.parameter_gradients(call, grads)
        return None, None


class _GatherOne(torch.autograd.Function):
    """An unsharded parameter in storage of its own that lives as long as somebody uses it."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, handle: GroupHandle) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient_receiver = _GatheredOne(handle)
        return handle.flat.gather_one(handle.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        receiver: _GatheredOne = ctx.gradient_receiver
        with torch._C.DisableTorchFunctionSubclass():
            receiver.handle.reduce_gathered(receiver, grad)
        return None, None


@dataclass
class Slot:
    """Where a module has a parameter: ``module.name`` is parameter ``index`` of the group.

    ``path`` is the name of that parameter in the sharded module.
    """

    module: nn.Module
    name: str
    index: int
    path: str


class ParameterGroup:
    """Parameters that are unsharded, resharded and reduced together.

    Args:
        name: for messages.
        reducers: those of its flat parameters; frozen and trainable parameters are in flat parameters of their own.
        context: where it runs.
        level: ZeRO level.
        precision: dtypes to compute and reduce in.
        slots: where modules have the parameters.
        reshard_after_forward: whether the parameters are resharded between forward and backward; by default at level 3.
    """

    def __init__(
        self,
        name: str,
        reducers: Sequence[GradientReducer],
        context: ParallelContext,
        level: int,
        precision: MixedPrecision,
        slots: Sequence[Slot] = (),
        reshard_after_forward: bool | None = None,
    ) -> None:
        self.name = name
        self.reducers = list(reducers)
        self.context = context
        self.device = context.device
        self.level = level
        self.precision = precision
        self.slots = list(slots)
        self.reshard_after_forward = level == 3 if reshard_after_forward is None else reshard_after_forward
        self.flats = [reducer.flat for reducer in self.reducers]
        self.params = [p for flat in self.flats for p in flat.params]
        self.hooks: list[ForwardHooks] = []
        self.step: StepContext = step_context(context)
        self._ranges: dict[GradientReducer, range] = {}
        start = 0
        for reducer in self.reducers:
            self._ranges[reducer] = range(start, start + len(reducer.flat.params))
            start = self._ranges[reducer].stop
        comms = [comm for reducer in self.reducers for comm in reducer.comms if comm.size > 1]
        self.comms: list[Communicator] = list(dict.fromkeys(comms))
        self.held = False  # the unsharded parameters stay where they are; see hold()
        self.waits: bool | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        # Runs in those backward passes, and only those, that accumulate gradients of all leaves.
        self.accumulates: Any = self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._in_backward: set[Call] = set()
        self._installed = False
        self._recurrent = list({s.module: None for s in self.slots if isinstance(s.module, nn.RNNBase)})
        self._label: tuple[str, list[bool], int] | None = None
        for flat in self.flats:
            for index, param in enumerate(flat.params):
                param.handle = GroupHandle(self, flat, index)

    def reducer_of(self, flat: FlatParameter) -> GradientReducer:
        return self.reducers[self.flats.index(flat)]

    def views(self) -> list[Tensor]:
        """The unsharded parameters, as new tensors, in the order of ``params``."""
        if len(self.flats) == 1:
            return self.flats[0].views()
        return [view for flat in self.flats for view in flat.views()]

    # --- unsharding -------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """A computation begins, before which parameters may have been written.

        While gradients are accumulated at level 1, parameters stay unsharded from one micro-batch to the next.
        """
        if self.held:
            return
        for reducer in self.reducers:
            if not reducer.accumulates:
                reducer.flat.invalidate()

    def unshard(self) -> None:
        """Start to unshard what is not at hand."""
        self.step.check_unsharding(self)
        self._note_operation()
        try:
            for flat in self.flats:
                if flat.was_moved():
                    self._rebind(flat)
                flat.unshard()
        except RuntimeError as error:
            raise RuntimeError(f"while {self.name} was unsharded: {error}") from error

    def wait(self) -> None:
        """Make what was unsharded usable."""
        try:
            for flat in self.flats:
                flat.wait()
        except RuntimeError as error:
            raise RuntimeError(f"while {self.name} was unsharded: {error}") from error

    def begin_gather(self, flat: FlatParameter) -> None:
        """Before a single parameter of ``flat`` is gathered."""
        self.step.check_unsharding(self)
        self._note_operation()
        if current_backward() is None:
            self.step.recover()
        if flat.was_moved():
            self._rebind(flat)

    def _rebind(self, flat: FlatParameter) -> None:
        self.reducer_of(flat).finish()
        flat.rebind_storage()

    def _note_operation(self) -> None:
        trains = [p.requires_grad for p in self.params]
        label = self._label
        if label is None or label[1] != trains or label[0] != self.name:
            if label is not None:
                self.waits = None
            frozen = [slot.path for slot in self.slots if not trains[slot.index]]
            text = f"{self.name}, {f'frozen: {frozen}' if frozen else 'all parameters trained'}"
            label = self._label = (self.name, trains, self.step.sequences.label(text))
        self.step.note_operation(self.comms, label[2])

    def reshard(self) -> None:
        """Reshard, unless a call in backward needs the parameters."""
        if not self._in_backward and not self.held:
            for flat in self.flats:
                flat.reshard()

    def hold(self) -> None:
        """Keep the unsharded parameters from one micro-batch to the next, until :meth:`release`; where they are
        resharded after forward, that happens all the same."""
        self.release()
        self.held = not self.reshard_after_forward

    def release(self) -> None:
        """End :meth:`hold`."""
        self.held = False
        self.reshard()

    # --- what modules see -------------------------------------------------------------------------

    def install(self, tensors: Sequence[Tensor]) -> bool:
        """Let the modules see ``tensors`` in place of the parameters; whether they have not seen such before."""
        first = not self._installed
        self._installed = True
        for slot in self.slots:
            slot.module._parameters[slot.name] = tensors[slot.index]  # type: ignore[assignment]
        for module in self._recurrent:
            refresh_flat_weights(module)
        return first

    def uninstall(self) -> None:
        """Let the modules see the sharded parameters again."""
        if not self._installed:
            return
        self._installed = False
        for slot in self.slots:
            module, name = slot.module, slot.name
            if name not in module._parameters:  # a parametrization has come and gone
                _restore_place(module, name, [s.name for s in self.slots if s.module is module])
            module._parameters[name] = self.params[slot.index]
        for module in self._recurrent:
            refresh_flat_weights(module)

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, hooks: ForwardHooks) -> tuple[Call | None, list[Tensor]]:
        """Bring the unsharded parameters into a computation of ``hooks``' module.

        Returns the call (None where nothing will be differentiated), and the parameters in the order of ``params``.
        """
        views = self.views()
        if not torch.is_grad_enabled():
            return None, views
        call = Call(self, hooks)
        if any(call.trainable):
            entered = iter(_Enter.apply(call, self.anchor))
            views = [next(entered) if trains else view for trains, view in zip(call.trainable, views, strict=True)]
        return call, views

    def follow_inputs(self, call: Call, inputs: Sequence[Tensor]) -> None:
        """Let the call end when the gradients of ``inputs`` have arrived, too."""
        call.inputs = list(dict.fromkeys(get_gradient_edge(x).node for x in inputs if x.requires_grad))

    def follow_outputs(self, call: Call, outputs: Sequence[Tensor], inputs: set[int]) -> bool:
        """Ask to be told when the gradients of ``outputs`` arrive; whether any will.

        ``inputs`` are the identities of tensors that came from elsewhere: what only passes through gets its gradient
        at another time.
        """
        hooked: dict[int, Tensor] = {}
        for output in outputs:
            for tensor in (output, output._base):
                if tensor is not None and tensor.requires_grad and id(tensor) not in inputs:
                    hooked[id(tensor)] = tensor
        hook = functools.partial(self._output_gradient, call)
        for tensor in hooked.values():
            tensor.register_hook(hook)
        return bool(hooked)

    def without_parameters(self, output: Any) -> Any:
        """The output with copies of the tensors that lie in storage that is released.

        Raises:
            ValueError: they cannot be replaced.
        """

        def is_parameter(tensor: Tensor) -> bool:
            return tensor.layout is torch.strided and any(flat.owns(tensor) for flat in self.flats)

        if not any(is_parameter(tensor) for tensor in find_tensors(output)):
            return output
        output = replaced(output, is_parameter, torch.clone)
        if any(is_parameter(tensor) for tensor in find_tensors(output)):
            raise ValueError(
                f"the output of {self.name}, a {type(output).__name__}, contains a parameter, which is released after "
                f"the call; return a clone of it"
            )
        return output

    # --- backward ---------------------------------------------------------------------------------

    def _output_gradient(self, call: Call, _grad: Tensor) -> None:
        """The first gradient of a call's outputs has arrived: unshard, and start on the group before.

        Raises:
            RuntimeError: this backward is to be differentiated (``create_graph=True``), which would use
                parameters after they were released.
        """
        if call in self._in_backward:
            return
        if torch.is_grad_enabled() and any(flat.releases for flat in self.flats):
            raise RuntimeError(
                f"create_graph=True: {self.name} releases its parameters after backward (ZeRO level {self.level}), and "
                f"the backward of backward would need them; use zero_level=1 for it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            self.step.enter(self)
            self._in_backward.add(call)
            call.begin_backward()
            if call.hooks.needed_in_backward:
                self.unshard()
                self.wait()
            previous = call.hooks.previous
            if previous is not None and previous.group.reshard_after_forward and previous.needed_in_backward:
                self.step.enter(previous.group)
                previous.group.unshard()

    def needed_again(self) -> None:
        """A call is computed again within a backward pass."""
        self.step.enter(self)
        self.unshard()
        self.wait()

    def parameter_gradients(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """All gradients of a call's parameters have arrived: reduce them."""
        call.awaits_params = False
        self._end_call(call)
        if torch._C._will_engine_execute_node(self.accumulates):  # not in torch.autograd.grad(loss, inputs)
            reduce_in_time(self, call, functools.partial(self._reduce_call, call, grads))
        if not self._kept:
            self.reshard()

    def input_gradient(self, call: Call, node: Any, _grads: Sequence[Tensor | None]) -> None:
        """All gradients of an input of a call have arrived."""
        call.input_arrived(node)
        if call in self._in_backward and not call.awaits_params and not call.awaited_inputs:
            with torch._C.DisableTorchFunctionSubclass():
                self._end_call(call)
                if not self._kept:
                    self.reshard()

    def _end_call(self, call: Call) -> None:
        if call.awaits_params or call.awaited_inputs:
            return
        self._in_backward.discard(call)

    def _forget_calls(self) -> None:
        for call in self._in_backward:
            call.end_backward()
        self._in_backward.clear()
        for param in self.params:
            param.handle.forget_call()  # type: ignore[attr-defined]

    def _reduce_call(self, call: Call, grads: Sequence[Tensor | None], late: Mapping[int, Tensor]) -> None:
        arrived = iter(added(grads, late))
        by_param = [next(arrived) if trains else None for trains in call.trainable]
        reached = [r for r in self.reducers if any(call.trainable[i] for i in self._ranges[r])]
        self.reduce([(r, [by_param[i] for i in self._ranges[r]]) for r in reached])

    @property
    def _kept(self) -> bool:
        """Whether parameters stay unsharded until the step: from one micro-batch to the next."""
        return any(r.no_sync and r.level <= 1 for r in self.reducers)

    def reduce(self, work: Sequence[tuple[GradientReducer, Sequence[Tensor | None]]]) -> None:
        """Start to reduce gradients, one for each parameter of a reducer."""
        self.step.enter(self)
        self.step.finish_reductions()
        for reducer, grads in work:
            prepared = [
                None if grad is None else _prepared(param, grad, reducer.grad_scale)
                for param, grad in zip(reducer.flat.params, grads, strict=True)
            ]
            reducer.reduce(prepared, needed=bool(self._in_backward) or self.held)
        self.step.note_reducing([reducer for reducer, _ in work])

    def add_reduced(self, reducer: GradientReducer, total: Tensor) -> None:
        """Add a flat gradient that was reduced before, in the backward pass that is running."""
        self.step.enter(self)
        reducer.add_gradient(total)
        self.step.note_added(reducer)

    def end_backward(self) -> None:
        """Backward is over: whatever it has left behind is cleared."""
        self._forget_calls()
        if not self._kept:
            self.reshard()

    def abandon_backward(self) -> None:
        """Backward was ended by an exception."""
        self._forget_calls()
        for reducer in self.reducers:
            reducer.drop()
            reducer.flat.reshard()

    # --- copying ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterGroup:
        twin = ParameterGroup.__new__(ParameterGroup)
        memo[id(self)] = twin
        reducers = [_copy_reducer(reducer, memo) for reducer in self.reducers]
        # The modules are copied after, and find their parameters in memo.
        slots = copy.deepcopy(self.slots, memo)
        options = (self.level, self.precision, slots, self.reshard_after_forward)
        twin.__init__(self.name, reducers, self.context, *options)  # type: ignore[misc]
        twin.hooks = [copy.deepcopy(hooks, memo) for hooks in self.hooks]
        return twin


class ForwardHooks:
    """The hooks before and after the forward of a module whose parameters, or a part of them, are a group.

    Args:
        group: the group.
        module: the module.
        needed_in_backward: whether its backward reads the parameters' values; that of an embedding does not.
    """

    def __init__(self, group: ParameterGroup, module: nn.Module, needed_in_backward: bool = True) -> None:
        self.group = group
        self.module = module
        self.needed_in_backward = needed_in_backward
        self.chain: dict[int, ForwardHooks] = {0: self}  # by position in the order of forward, for prefetching
        self.position = 0
        group.hooks.append(self)
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after, always_call=True)

    def remove(self) -> None:
        """Take the hooks off the module."""
        self.group.hooks.remove(self)
        module = self.module
        kinds: list[tuple[Any, Any]] = [
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_always_called),
        ]
        for hooks, settings in kinds:
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key], settings[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        twin = ForwardHooks.__new__(ForwardHooks)
        memo[id(self)] = twin
        twin.group = copy.deepcopy(self.group, memo)
        twin.module = copy.deepcopy(self.module, memo)
        twin.needed_in_backward = self.needed_in_backward
        # Of a chain, those prefetch each other again that are copied together.
        twin.chain, twin.position = memo.setdefault(id(self.chain), {}), self.position
        twin.chain[twin.position] = twin
        return twin

    @property
    def begins_backward(self) -> bool:
        """Whether backward is likely to begin with this module: the last one of several."""
        return 0 < self.position == len(self.chain) - 1

    @property
    def previous(self) -> ForwardHooks | None:
        return self.chain.get(self.position - 1)

    @property
    def next(self) -> ForwardHooks | None:
        return self.chain.get(self.position + 1)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        group, step = self.group, self.group.step
        step.begin_forward()
        call = ForwardCall(self)
        with torch._C.DisableTorchFunctionSubclass():
            if any(p.handle.replacement is not None for p in group.params):  # type: ignore[attr-defined]
                step.calls.append(call)
                return None
            following = None
            if current_backward() is None:
                step.recover()
                step.cancel_prefetch(unless=group)
                group.invalidate()
                following = self.next
            try:
                group.unshard()
                if following is not None:
                    step.prefetch(following.group)
                group.wait()
                call.call, call.views = group.enter(self)
            except BaseException:
                call.abandon()
                raise
        dtype = group.precision.param_dtype if group.precision.cast_forward_inputs else None
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, functools.partial(_cast, dtype=dtype), (args, kwargs))
        if call.call is not None:
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            call.inputs = {id(leaf): leaf for leaf in leaves}
            if not all(call.call.trainable):
                group.follow_inputs(call.call, leaves)
        call.first = group.install(call.views)
        step.calls.append(call)
        return None if dtype is None else (args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        group, step = self.group, self.group.step
        call = next((c for c in reversed(step.calls) if c.hooks is self), None)
        if call is None:
            return None  # the hook before has raised
        step.end_forward(call)
        error = sys.exc_info()[1]
        if error is not None and error is not call.outer_error:
            call.abandon()
            return None
        call.uninstall()
        if not call.views:
            return None  # replacements, or no parameters
        dtype = group.precision.output_dtype
        result = output if dtype is None else tree_map_only(Tensor, functools.partial(_cast, dtype=dtype), output)
        try:
            result = group.without_parameters(result)
        except ValueError:
            call.abandon()
            raise
        differentiable = False
        if call.call is not None:
            passed = set(call.inputs)
            passed.update(id(x._base) for x in call.inputs.values() if x._base is not None)
            differentiable = group.follow_outputs(call.call, find_tensors(result), passed)
        if not differentiable or (group.reshard_after_forward and not self.begins_backward):
            group.reshard()
        return result if result is not output else None


class ForwardCall:
    """A call of a hooked module whose forward is running."""

    __slots__ = ("call", "first", "frame", "hooks", "inputs", "outer_error", "views")

    def __init__(self, hooks: ForwardHooks) -> None:
        self.hooks = hooks
        self.frame = _module_call()
        self.outer_error = sys.exc_info()[1]
        self.call: Call | None = None
        self.views: list[Tensor] = []
        self.inputs: dict[int, Tensor] = {}
        self.first = False

    def uninstall(self) -> None:
        if self.first:
            self.hooks.group.uninstall()

    def abandon(self) -> None:
        """The forward was ended by an exception."""
        group = self.hooks.group
        self.uninstall()
        group.step.cancel_prefetch()
        group.reshard()


def _module_call() -> FrameType:
    """The frame of the module's call, which lasts as long as its forward."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame


def parameters_in_forward(module: nn.Module, step: StepContext) -> Iterator[nn.Parameter]:
    """The parameters of a module and those in it; the sharded ones also while they are unsharded."""
    groups = [call.hooks.group for call in step.calls]
    sharded = {(slot.module, slot.name): group.params[slot.index] for group in groups for slot in group.slots}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                yield sharded.get((part, name), param)


@contextmanager
def replaced_parameters(values: Mapping[ShardedParameter, Tensor]) -> Iterator[None]:
    """Within, modules compute with ``values`` in place of the parameters, and unshard nothing of their groups."""
    before: list[tuple[nn.Module, str, Any]] = []
    for param, value in values.items():
        handle: GroupHandle = param.handle  # type: ignore[assignment]
        handle.replacement = value
        for slot in handle.group.slots:
            if handle.group.params[slot.index] is param:
                before.append((slot.module, slot.name, slot.module._parameters[slot.name]))
                slot.module._parameters[slot.name] = value  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, tensor in before:
            module._parameters[name] = tensor
        for param in values:
            param.handle.replacement = None  # type: ignore[attr-defined]


def link(hooks: Sequence[ForwardHooks]) -> None:
    """Let modules prefetch each other in this order."""
    chain = dict(enumerate(hooks))
    for position, each in chain.items():
        each.chain, each.position = chain, position


def refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the attributes."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def _restore_place(module: nn.Module, name: str, names: list[str]) -> None:
    """Put a name back among a module's parameters, in its old place."""
    module._buffers.pop(name, None)
    module.__dict__.pop(name, None)
    present = dict(module._parameters)
    present[name] = None
    module._parameters.clear()
    module._parameters.update({n: present.pop(n) for n in names if n in present})
    module._parameters.update(present)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _prepared(param: ShardedParameter, grad: Tensor, grad_scale: float) -> Tensor:
    """A gradient as it goes into the reduction."""
    if grad.is_sparse:
        grad = grad.to_dense()
    if param.sequence_parallel and grad_scale != 1.0:
        # The sum over tensor-parallel ranks is the gradient already; see [Note: tensor-parallel ranks] in shard.py.
        grad = grad / grad_scale
    return grad


def _copy_reducer(reducer: GradientReducer, memo: dict[int, Any]) -> GradientReducer:
    """A copy with parameters of its own; without gradients, as copies of parameters are."""
    reducer.finish()
    flat = reducer.flat
    twins = []
    for param in flat.params:
        data = param.data.clone()  # replaced by a view of the twin's storage below
        twin = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
        twin.__dict__.update({k: v for k, v in param.__dict__.items() if k != "handle"})
        memo[id(param)] = twin
        twins.append(twin)
    shard = flat.shard.detach().clone()
    options = (flat.shard_comm, flat.stream, flat.compute_dtype, flat.keep_storage, flat.allocate)
    copied = FlatParameter(flat.layout, twins, shard, *options)
    return GradientReducer(copied, reducer.replicate_comm, reducer.level, reducer.reduce_dtype, reducer.grad_scale)

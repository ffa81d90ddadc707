"""The hooks before and after the forward of a sharded module, and its calls in forward and backward.

[Note: how a parameter group meets autograd]
    The unsharded parameters enter a computation as the outputs of one autograd node (``parameter_group.Enter``) per
    call. Autograd calls that node's backward once, when all gradients of the parameters have arrived. Then they are
    reduced.
    Frozen parameters get no gradient. If a group has frozen parameters, a call ends only when the gradients of its
    inputs have arrived, too.

    A hook on the nodes of the call's outputs unshards the parameters again when backward arrives. If an output is a
    view, its base also has a hook, because writing into a view replaces its node. Several calls of one group may be in
    backward at the same time; the last one reshards.

    If a call of this rank has used no parameter (an expert that is frozen, a layer that returns its input), backward
    does not come to its node, and other ranks reduce their gradients. This rank reduces with them, when that node would
    have run: at once, or, where other modules compute within the call, before backward comes to an earlier one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bmt_comm import not_compiled, note_place

from .backward_context import BackwardPart, current_backward
from .gradient_reducer import GradientReducer
from .gradient_target import GradientTarget
from .kept_results import uncounted
from .outputs import find_tensors, map_tensors
from .parameter_group import ParameterGroup
from .readable_parameters import Reads
from .registrations import registrations
from .sharded_parameter import ShardedParameter


class Call:
    """One use of a group's unsharded parameters in a computation that may be differentiated."""

    __slots__ = (
        "__weakref__",
        "_awaited_inputs",
        "_awaits_params",
        "_entry",
        "_targets",
        "group",
        "has_inner",
        "has_others",
        "has_reduced",
        "hooks",
        "inner_entries",
        "inner_nodes",
        "inputs",
        "order",
        "returns_input",
        "trainable",
    )

    def __init__(self, hooks: ForwardHooks) -> None:
        self.hooks = hooks
        self.group = hooks.group
        self.trainable = self.group.trains
        self.inputs: list[Any] = []  # nodes of inputs: the call ends when their gradients have arrived, too
        self.inner_entries: list[Callable[[], Any]] = []  # return more such nodes: the ``Enter`` of calls within
        self.inner_nodes: Container[Any] = ()  # of the outputs of the last call within, until the forward ends
        self._awaits_params = False
        self._awaited_inputs: dict[Any, Any] = {}  # such nodes, and the handles of the hooks on them
        self._targets: dict[GradientReducer, GradientTarget] = {}
        self._entry: Callable[[], Any] = lambda: None  # returns the node of ``Enter``; None: the node is gone
        self.order = sys.maxsize  # the number of that node: backward comes to later ones first
        self.returns_input = False  # nothing in its graph reads parameters
        self.has_inner = False  # other sharded modules compute within
        self.has_reduced = False
        before = self.group.last_call()
        self.has_others = before is not None and not before.has_reduced  # one backward may reach both calls
        if self.has_others:
            before.has_others = True
        self.group.last_call = weakref.ref(self)

    def enter(self) -> list[Tensor]:
        """The unsharded parameters, in the order of ``group.params``. This call receives their gradients."""
        self.group.note_writes()
        views, self._targets = self.group.views_with_targets()
        trainable = list(itertools.compress(views, self.trainable))
        entered = self.group.enter(self, trainable) if trainable else ()
        node: Any = entered[0].grad_fn if entered else None
        if node is not None:
            self._entry = weakref.ref(node)
            self.order = node._sequence_nr()
            for outer in self.group.step.calls:  # this may be the only input of theirs that gets a gradient
                if outer.call is not None and not all(outer.call.trainable):
                    outer.call.inner_entries.append(self._entry)
        if entered and self.group.step.splits_backward:
            self.group.step.split_calls.append(self)
            entered = tuple(x.view_as(x) for x in entered)  # a node for each, so that its gradient is computed alone
        if len(entered) == len(views):
            return list(entered)
        arriving = iter(entered)
        return [next(arriving) if trains else view for trains, view in zip(self.trainable, views, strict=True)]

    def follow_outputs(self, outputs: Sequence[Tensor], inputs: Mapping[int, tuple[Tensor, Any]]) -> bool:
        """Begin backward when the first gradient of ``outputs`` arrives. Returns whether one can arrive.

        Args:
            outputs: tensors that the call has computed.
            inputs: tensors that the call was given and their nodes, by identity. If one of them is in ``outputs`` and
                the call has not written to it, it is skipped: its gradient does not come from this call.
        """
        nodes: dict[Any, None] = {}
        for output in outputs:
            for tensor in (output, output._base):
                if tensor is None or not tensor.requires_grad:
                    continue
                node, given = tensor.grad_fn, inputs.get(id(tensor))
                if given is None or given[1] is not node:
                    nodes[get_gradient_edge(tensor).node if node is None else node] = None
        for node in nodes:
            node.register_prehook(self.begin_backward)
        for outer in self.group.step.calls:
            if outer.call is not None:
                outer.call.inner_nodes = nodes
        return bool(nodes)

    @not_compiled
    def begin_backward(self, _grads: Any) -> None:
        """The first gradient of an output has arrived: unshard, and start to unshard the previous module.

        Raises:
            RuntimeError: this backward will be differentiated (``create_graph=True``), which would use parameters
                after they are released.
        """
        group, part = self.group, self.group.step.part
        if self in group.in_backward or part is BackwardPart.WEIGHTS:
            return
        if torch.is_grad_enabled() and any(flat.is_temporary for flat in group.flats):
            raise RuntimeError(
                f"create_graph=True: {group.name} releases its parameters after backward (ZeRO level {group.level}), "
                f"and the backward of backward would need them; use zero_level=1 for it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            note_place(group.places[1])
            group.note_writes()
            group.step.enter(group)
            group.step.reduce_unused(self.order)  # those that entered later
            group.in_backward.add(self)
            self._awaits_params = any(self.trainable) and part is BackwardPart.ALL
            for node in [*self.inputs, *filter(None, (entry() for entry in self.inner_entries))]:
                self._awaited_inputs[node] = node.register_prehook(functools.partial(self._input_arrived, node))
            if self.hooks.needed_in_backward:
                group.unshard_in_backward()
            previous = self.hooks.previous
            for hooks in self.hooks.prefetch_in_backward or ([] if previous is None else [previous]):
                other = hooks.group
                if other.reshard_after_forward and hooks.needed_in_backward and other.is_worth_prefetching:
                    group.step.enter(other)
                    other.unshard()
            if self._awaits_params and group.step.is_accumulating(group.context.device):
                node = self._entry()
                if node is None or not torch._C._will_engine_execute_node(node):
                    if self.has_inner:
                        group.step.await_turn(self)
                    else:
                        self.reduce_nothing()

    def params_arrived(self, grads: Sequence[Tensor | None]) -> None:
        """All gradients of the parameters have arrived: reduce them."""
        group = self.group
        group.step.reduce_unused(self.order)
        self._awaits_params = False
        self._end_if_complete()
        if torch._C._will_engine_execute_node(group.anchor_node):  # not in torch.autograd.grad(loss, inputs)
            self.has_reduced = True
            group.reduce_call(self.trainable, grads, self._targets, self.has_others)
        group.reshard_in_backward()

    def is_in(self, graph: Container[Any]) -> bool:
        """Whether a graph uses parameters of the call."""
        return self._entry() in graph

    def reduce_nothing(self) -> None:
        """Take part when other ranks reduce their gradients of this call's parameters."""
        self.has_reduced = True
        self.group.reduce_call(self.trainable, [None] * sum(self.trainable), self._targets, self.has_others)
        # Where the call's inputs are known, their gradients end it. Otherwise the end of the pass does.
        self._awaits_params = not (self.returns_input or self._awaited_inputs)
        self._end_if_complete()
        self.group.reshard_in_backward()

    @not_compiled
    def _input_arrived(self, node: Any, _grads: Any) -> None:
        self._awaited_inputs.pop(node).remove()
        self._end_if_complete()
        with torch._C.DisableTorchFunctionSubclass():
            self.group.reshard_in_backward()

    def _end_if_complete(self) -> None:
        if not self._awaits_params and not self._awaited_inputs:
            self.group.in_backward.discard(self)

    def forget(self) -> None:
        while self._awaited_inputs:
            self._awaited_inputs.popitem()[1].remove()


class ForwardHooks:
    """The hooks before and after the forward of a module whose parameters, or some of them, are a group.

    Attributes:
        group: the group.
        module: the module.
        needed_in_backward: whether its backward may read the parameters' values; that of an embedding does not.
        previous, next: the hooks of the modules that compute before and after it, for prefetching; see :func:`link`.
        prefetch_in_forward, prefetch_in_backward: hooks of modules to prefetch instead, which are kept until used.
        seen: the number of registrations when :meth:`_check_added` ran last.
        ignored: parameters of the module that are not sharded.
        calls_within: the number of calls of hooked modules in the module's last outermost call, itself included; 0:
            it was never the outermost.
        outermost_only: whether calls of the module inside another call that has unsharded the group are ignored.
    """

    def __init__(self, group: ParameterGroup, module: nn.Module, outermost_only: bool = False) -> None:
        self.group = group
        self.module = module
        self.outermost_only = outermost_only
        self.needed_in_backward = type(module) is not nn.Embedding  # subclasses may read the values
        self.previous: ForwardHooks | None = None
        self.next: ForwardHooks | None = None
        self.prefetch_in_forward: list[ForwardHooks] = []
        self.prefetch_in_backward: list[ForwardHooks] = []
        self.seen = registrations.count
        self.ignored = [param for _, _, param in self._unsharded()]
        self.calls_within = 0
        self._handles = [
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        twin = ForwardHooks.__new__(ForwardHooks)
        memo[id(self)] = twin
        twin.group = copy.deepcopy(self.group, memo)
        twin.module = copy.deepcopy(self.module, memo)
        twin._handles = copy.deepcopy(self._handles, memo)
        twin.needed_in_backward, twin.outermost_only = self.needed_in_backward, self.outermost_only
        # If neighbours are copied together, the copies prefetch each other: the one that is copied last links both.
        twin.previous, twin.next = memo.get(id(self.previous)), memo.get(id(self.next))
        twin.prefetch_in_forward, twin.prefetch_in_backward = [], []
        twin.seen, twin.ignored = self.seen, copy.deepcopy(self.ignored, memo)
        twin.calls_within = self.calls_within
        if twin.previous is not None:
            twin.previous.next = twin
        if twin.next is not None:
            twin.next.previous = twin
        return twin

    @not_compiled
    @uncounted
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        group, step = self.group, self.group.step
        step.begin_forward()
        for outer in step.calls:
            if outer.call is not None and outer.hooks.module is not module:
                outer.call.has_inner = True
        if self.outermost_only and any(call.hooks.group is group for call in step.calls):
            return None
        call = ForwardCall(self)
        if group.replaced:
            step.calls.append(call)
            step.calls[0].calls_within += 1
            return None
        if self.seen != registrations.count:
            self._check_added()
        if group.unfilled:
            group.check_values()
        with torch._C.DisableTorchFunctionSubclass():
            following: Sequence[ForwardHooks] = ()
            if current_backward() is None:
                step.recover()
                step.cancel_prefetch(unless=group, kept=False)
                group.invalidate()
                following = self.prefetch_in_forward or ([] if self.next is None else [self.next])
            try:
                group.unshard(refresh=True)
                note_place(group.places[0])
                for hooks in following:
                    if hooks.group.is_worth_prefetching:
                        step.prefetch(hooks.group, keep=bool(self.prefetch_in_forward))
                group.wait()
                group.hide()
                if torch.is_grad_enabled():
                    call.call = Call(self)
                    call.views = call.call.enter()
                else:
                    call.views = group.views()
            except BaseException:
                # An all-gather that has failed fails again here. The script is to see the first exception.
                with contextlib.suppress(RuntimeError):
                    call.abandon()
                raise
        dtype = group.precision.param_dtype if group.precision.cast_forward_inputs else None
        if dtype is not None:
            args, kwargs = _cast((args, kwargs), dtype)
        if call.call is not None:
            tensors = find_tensors((*args, *kwargs.values()) if kwargs else args, in_objects=False)
            call.inputs = {id(x): (x, x.grad_fn) for given in tensors for x in (given, given._base) if x is not None}
            if step.splits_backward or not all(call.call.trainable):
                nodes = [get_gradient_edge(x).node for x in tensors if x.requires_grad]
                call.call.inputs = list(dict.fromkeys(nodes))
        call.first = group.install(call.views)
        step.calls.append(call)
        step.calls[0].calls_within += 1
        return None if dtype is None else (args, kwargs)

    @not_compiled
    @uncounted
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        group, step = self.group, self.group.step
        call = next((c for c in reversed(step.calls) if c.hooks is self), None)
        if call is None:
            return None  # the hook before has raised, or an outer call has unsharded the group
        step.end_forward(call)
        error = sys.exc_info()[1]
        if error is not None and error is not call.outer_error:
            call.abandon()
            if not getattr(error, "bmt_on_all_stages", False):  # set where a pipeline raises on all of its ranks
                self._end_use_alone(call)
            return None
        if not step.calls:
            self.calls_within = call.calls_within
        call.uninstall()
        if call.reads is not None:
            try:
                call.reads.check(group.name)
            except RuntimeError:
                call.abandon()
                self._end_use_alone(call)
                raise
        dtype = group.precision.output_dtype
        result = output if dtype is None else _cast(output, dtype)
        if not call.views:  # replacements, or no parameters
            step.end_use()
            return result if result is not output else None
        tensors = find_tensors(result)
        if any(self._is_parameter(tensor) for tensor in tensors):
            result = map_tensors(lambda x: x.clone() if self._is_parameter(x) else x, result)
            tensors = find_tensors(result)
            if any(self._is_parameter(tensor) for tensor in tensors):
                call.abandon()
                self._end_use_alone(call)
                raise ValueError(
                    f"the output of {group.name}, a {type(output).__name__}, contains a parameter, which is released "
                    f"after the call; return a clone of it"
                )
        # Other ranks may use parameters where this one uses none, and unshard them in backward, frozen ones, too.
        if call.call is not None and group.communicators and any(call.is_of_other(tensor) for tensor in tensors):
            call.call.returns_input = all(call.is_input(x) or not x.requires_grad for x in tensors)
            # An alias has a node of its own. A write to it would leave that node out.
            result = map_tensors(lambda x: x.view_as(x) if call.is_of_other(x) else x, result)
            tensors = find_tensors(result)
        differentiable = call.call is not None and call.call.follow_outputs(tensors, call.inputs)
        if call.call is not None:
            call.call.inner_nodes = ()
        # Backward probably begins with the last one of several linked modules.
        asked = group.options.reshard_after_forward
        begins_backward = asked is None and self.next is None and self.previous is not None
        if not differentiable or (group.reshard_after_forward and not begins_backward):
            group.reshard()
        step.end_use()
        return result if result is not output else None

    def _end_use_alone(self, call: ForwardCall) -> None:
        """An exception has ended a call, perhaps on this rank only: meet the other ranks if they end their forward.

        They do if all modules of the forward had begun; how many modules there are is known from the last forward. Then
        they need not wait until this rank computes again. Otherwise they wait for this rank to unshard the next module,
        and meeting them would be a wrong operation.
        """
        if call.calls_within == self.calls_within:
            with contextlib.suppress(RuntimeError):  # communication has failed; later operations raise
                self.group.step.end_use(waits=False)

    def _unsharded(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Path, module and value of each parameter that is not sharded.

        Tensors in place of sharded parameters, and parameters of inner modules with hooks, are left out.
        """
        places = {(slot.module, slot.name) for slot in self.group.slots}

        def visit(path: str, part: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
            for name, param in part._parameters.items():
                is_plain = isinstance(param, nn.Parameter) and not isinstance(param, ShardedParameter)
                if is_plain and (part, name) not in places:
                    yield path + name, part, cast(nn.Parameter, param)
            for name, child in part.named_children():
                hooks = child._forward_pre_hooks.values()
                if not any(isinstance(getattr(hook, "__self__", None), ForwardHooks) for hook in hooks):
                    yield from visit(f"{path}{name}.", child)

        return visit("", self.module)

    def _check_added(self) -> None:
        """Raise if parameters were added to the module: each rank would train them on its part of the batch alone."""
        for path, part, param in self._unsharded():
            if all(param is not known for known in self.ignored):
                raise RuntimeError(
                    f"parameter {path!r}, of a {type(part).__name__}, came into {self.group.name} after that was "
                    f"sharded: add it before, or let BMTrainModelWrapper shard the model, which takes in what is added"
                )
        self.seen = registrations.count

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is in storage that is released after the call."""
        return tensor.layout is torch.strided and any(flat.owns(tensor) for flat in self.group.flats)


class ForwardCall:
    """A call of a hooked module whose forward is running.

    Attributes:
        frame: the frame of the module's call, which runs as long as its forward.
        outer_error: the exception that was being handled when the call began.
        call: the call in backward; None if gradients are off.
        views: the unsharded parameters; empty if the module has replacements for them.
        inputs: the tensors in the arguments and their bases, with their nodes, by identity.
        first: whether this call, and not an outer one, has installed the unsharded parameters.
        calls_within: in the outermost call: the number of calls of hooked modules that have begun, itself included.
        thread: the thread that the forward runs in.
        reads: in the outermost call: the parameters that other code has read; None: it has read none.
    """

    __slots__ = (
        "call",
        "calls_within",
        "first",
        "frame",
        "hooks",
        "inputs",
        "outer_error",
        "reads",
        "thread",
        "views",
    )

    def __init__(self, hooks: ForwardHooks) -> None:
        self.hooks = hooks
        frame: FrameType = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
            frame = frame.f_back
        self.frame, self.thread = frame, threading.get_ident()
        self.outer_error = sys.exc_info()[1]
        self.call: Call | None = None
        self.views: list[Tensor] = []
        self.inputs: dict[int, tuple[Tensor, Any]] = {}
        self.first = False
        self.calls_within = 0
        self.reads: Reads | None = None

    def is_of_other(self, tensor: Tensor) -> bool:
        """Whether the node of a tensor that is returned belongs to another call: the tensor's or one within."""
        within = self.call is not None and tensor.grad_fn is not None and tensor.grad_fn in self.call.inner_nodes
        return within or self.is_input(tensor)

    def is_input(self, tensor: Tensor) -> bool:
        """Whether a tensor is an argument that gets a gradient and was not written to."""
        given = self.inputs.get(id(tensor))
        return tensor.requires_grad and given is not None and given[1] is tensor.grad_fn

    def uninstall(self) -> None:
        if self.first:
            self.hooks.group.uninstall()

    def abandon(self) -> None:
        """The forward was ended by an exception."""
        group = self.hooks.group
        self.uninstall()
        group.step.cancel_prefetch()
        group.reshard()


def link(hooks: Sequence[ForwardHooks]) -> None:
    """Let modules prefetch each other, in this order in forward and in the reverse order in backward."""
    for each, previous, following in zip(hooks, [None, *hooks], [*hooks[1:], None], strict=False):
        each.previous, each.next = previous, following


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)

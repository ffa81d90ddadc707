"""One call of a pipeline on one stage: a loop over the stage's actions in the schedule.

[Note: failures]
    A stage that raises sends an abort message in place of each message that it has not sent, and receives what the
    others send. At the end of each pass, all stages tell each other whether they have failed. If one has, all raise. So
    an exception leaves no stage waiting and no message in flight. Before arguments and their gradients are exchanged,
    all stages allocate memory for them and tell each other whether they could. Ranks that wait for the failed one in
    another collective, of its ZeRO or tensor-parallel group, are stopped when its process ends (``bmt_comm.watch``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure, tree_unflatten

from bmt_comm import ParallelContext, note_place, without_autocast
from bmt_zero.backward_context import BackwardPart, outside_backward, step_context
from bmt_zero.block_list import stack_hidden_states
from bmt_zero.gradient_reducer import GradientReducer, ReducedGradient
from bmt_zero.hooks import Call
from bmt_zero.recording import Mark, PipelinePlace, begin_pipeline_call, inside_pipeline, marked, replayed
from bmt_zero.shard import sharding_of
from bmt_zero.written_buffers import Copies, WrittenBuffers

from ._compat import lasting_gradient_edge
from .arguments import Arguments, Plan, on_any_stage, raise_first
from .channels import Channels
from .chunk import (
    AmbientState,
    Settings,
    checkpoints,
    groups_in,
    kept_tensors,
    next_node,
    not_checkpointed,
    run_layers,
)
from .messages import Form, Message, StageLostError, connected, gets_gradient, take_apart
from .recording import Recorder
from .routes import Pass
from .schedule import Action, Kind
from .split_backward import SplitBackward
from .tail import Tail

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class _Alive(NamedTuple):
    """A chunk's computation for one micro-batch, between its forward and its backward."""

    inputs: list[Tensor]  # leaves
    arguments: dict[int, Tensor]  # leaves whose gradients are wanted, by the index of the argument
    # Edges of the tensors that get gradients: the intermediate hidden states, where they are returned, and the hidden
    # states after the last layer. None: the tensor does not require a gradient.
    outputs: list[GradientEdge | None]
    calls: list[Call]  # of Blocks, if backward is split


class Run:
    """A call of the pipeline. ``values`` are the leaves of this rank's arguments."""

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        context: ParallelContext,
        plan: Plan,
        values: list[Any],
        tail: Tail | None,
        recorder: Recorder | None,
        buffers: Sequence[WrittenBuffers],
        searched: set[int],
    ) -> None:
        self.chunks = chunks
        self.context = context
        self.plan = plan
        self.tail = tail
        self.recorder = recorder
        self.stage = context.pipe.rank
        self.arguments = Arguments(context, plan, values)
        self.recording = begin_pipeline_call()
        self._step = step_context(context)
        self._groups = groups_in([layer for chunk in chunks for layer in chunk])
        self._reducers = [reducer for group in self._groups for reducer in group.reducers]
        self._arrived: dict[GradientReducer, ReducedGradient] = {}  # where the loss is computed inside the pipeline
        # By micro-batch and place:
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}  # kept for recomputation
        self._states: dict[tuple[int, int], AmbientState] = {}
        self._copies: dict[tuple[int, int], Copies] = {}
        self._buffers = buffers
        self._searched = searched
        self._settings = Settings(chunks if plan.differentiable else (), self._groups)
        self._accumulates = True
        self._marks: dict[tuple[int, int], Mark] = {}  # what layers have recorded; recomputation records it again
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._split: dict[tuple[int, int], SplitBackward] = {}  # until the weight-gradient pass
        self._tail_grads: dict[int, list[Tensor]] = {}
        self._saved: Form  # of what autograd saves
        self._channels: Channels
        self._pass: Pass
        self._stacks: TreeSpec  # of the intermediate hidden states

    # --- passes -----------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Any], list[Any]]:
        """All forwards, for a loss that is computed outside the pipeline.

        Returns the leaves of this rank's output, and those of the intermediate hidden states, stacked, where they are
        wanted.
        """
        self.arguments.exchange()
        for group in self._groups:
            group.hold()
        self._pass = Pass(self.plan.schedule, True, False, intermediates=self.plan.return_hidden_states)

        def concatenated(results: dict[Message, list[Tensor]]) -> tuple[list[Any], list[Any]]:
            own: list[list[Any]] = []
            stacks: list[list[Any]] = []
            for i in self._pass.own(self.stage):
                outputs = [message for _, message in self._pass.results(self.stage) if message.micro_batch == i]
                *places, hidden = [self.plan.forms[message].fill(results[message]) for message in outputs]
                own.append(tree_leaves(hidden))
                stacked = stack_hidden_states([inputs for of_place in places for inputs in of_place])
                self._stacks = tree_structure(stacked)
                stacks.append(tree_leaves(stacked))
            return [_concatenated(leaf, 0) for leaf in zip(*own)], [_concatenated(leaf, 1) for leaf in zip(*stacks)]

        outputs = self._run_pass(concatenated)
        if not self.plan.differentiable:
            self._release()
        return outputs

    def filled(self, outputs: Sequence[Any], intermediates: Sequence[Any]) -> tuple[Any, ...]:
        """The hidden states, then the intermediate ones, with these leaves, in the containers of the layers."""
        form = self.plan.forms[Message("hidden", self.stage, self.plan.schedule.last + 1)]
        return (*tree_unflatten(outputs, tree_structure(form.tree)), *tree_unflatten(intermediates, self._stacks))

    def backward(
        self,
        saved: Sequence[Tensor],
        output_grads: list[Tensor | None],
        intermediate_grads: list[Tensor | None],
        problem: Exception | None,
        accumulates: bool,
    ) -> list[Tensor | None]:
        """All backwards, from the gradients of what :meth:`forward` returned.

        Args:
            saved: what :meth:`pop_tensors_to_save` returned.
            output_grads: of the outputs that get a gradient.
            intermediate_grads: of the intermediate hidden states that get a gradient.
            problem: why this rank cannot run backward. It is raised when the other stages know of it.
            accumulates: whether parameters get gradients, too.

        Returns the gradient of each leaf of this rank's arguments that wants one.
        """

        def made(message: Message) -> list[Tensor]:
            if problem is not None:
                raise problem
            return self._output_grad(message, output_grads, intermediate_grads)

        self._accumulates = accumulates
        if problem is None:
            self._inputs, self.arguments.values = self._saved.fill(saved)
        try:
            if accumulates:
                self._step.begin_pass()  # hooks of parameters run at its end, once for several calls
            with outside_backward():
                self._step.finish_reductions()  # reductions that only all stages together can finish
                with connected():
                    self.recording.exchange_grads_of_losses(self.context)
                wanted = self.plan.input_grads
                intermediates = self.plan.return_hidden_states and on_any_stage(
                    self.context, any(grad is not None for grad in intermediate_grads)
                )
                self._pass = Pass(self.plan.schedule, False, True, intermediates=intermediates, input_grads=wanted)
                grads = self._run_pass(self._input_grads, made)
                self._release()
                return self.arguments.exchange_grads(grads)
        finally:
            self._inputs, self.arguments.values = {}, []

    def forward_and_backward(self) -> tuple[Tensor, list[Tensor | None]]:
        """The whole schedule, with the loss inside the pipeline.

        Returns the mean of the tail's losses over this rank's samples, and the gradient of each leaf of its arguments
        that wants one. The gradient of the loss is taken to be ``tail.scale``.
        """
        assert self.tail is not None
        backward = self.plan.differentiable
        self._step.finish_reductions()
        self.arguments.exchange()
        for group in self._groups:
            group.hold()
        self._pass = Pass(self.plan.schedule, True, backward, tail=True, input_grads=self.plan.input_grads)
        self.tail.prepare(self.stage == self.plan.schedule.stage(self.plan.schedule.last))

        def loss_and_grads(results: dict[Message, list[Tensor]]) -> tuple[Tensor, Any]:
            [losses] = results[Message("loss", self.stage, self.plan.schedule.last)]
            return losses.sum(), self._input_grads(results) if backward else None

        try:
            loss, grads = self._run_pass(loss_and_grads)
        finally:
            self.tail.release()
        self._release()
        return loss, self.arguments.exchange_grads(grads) if backward else []

    def scale_gradients(self, factor: Tensor) -> None:
        """Add the gradients of :meth:`forward_and_backward`, times ``factor`` (0-dim), to those of parameters.

        Runs in the caller's backward pass. All stages begin it together, also those without gradients.
        """
        self._step.begin_pass()
        for entry in {id(entry): entry for mark in self._marks.values() for entry in mark}.values():
            entry.rescale(factor)
        for group in self._groups:
            for reducer in group.reducers:
                if reducer in self._arrived:
                    total = self._arrived[reducer].total
                    total.mul_(factor.to(total.device))  # that of offloaded parameters is in host memory
                    group.add_reduced(reducer, self._arrived.pop(reducer))

    def _run_pass(
        self, finish: Callable[[dict[Message, list[Tensor]]], _Result], made: Callable[[Message], Any] | None = None
    ) -> _Result:
        """This stage's part of ``self._pass``.

        Args:
            finish: called with the results of this rank's own micro-batches; its value is returned.
            made: makes the messages that the stage sends before and after its actions.
        """
        what, made = self._pass, made or self._made
        learning = what.forward and not self.plan.learned
        self._channels = Channels(self.context, self.plan.forms, learning, what.expected(self.stage))
        gradients = self._gradients() if what.backward else contextlib.nullcontext()
        later = what.backward and not what.forward
        settings = self._settings.restored() if later else contextlib.nullcontext()
        with self._step.deferring(), self._all_stages(), settings, gradients:
            for peer, message in what.before(self.stage):
                self._channels.send(peer, message, made(message))
            for action in what.actions(self.stage):
                self._do(action)
            for peer, message in what.after(self.stage):
                self._channels.send(peer, message, made(message))
            return finish({message: self._channels.take(peer, message) for peer, message in what.results(self.stage)})

    @contextlib.contextmanager
    def _all_stages(self) -> Iterator[None]:
        """See [Note: failures]."""
        problem: BaseException | None = None
        try:
            yield
        except (StageLostError, KeyboardInterrupt, SystemExit):
            self._release()
            raise
        except BaseException as error:
            problem = error
            for peer, message in self._pass.routes(self.stage):
                if message not in self._channels.sent:
                    self._channels.send_abort(peer, message)
            self._channels.drain()
        failed = on_any_stage(self.context, problem is not None)
        self._channels.close()  # every stage has received everything by now, if only to drop it
        if failed:
            self.plan.learned = False  # what layers return may have changed: the forms are sent again
            self._release()
            if self._pass.backward:
                self._step.use.drop()  # of this stage, which may be done
            try:
                raise_first(self.context, problem)
            except BaseException as error:
                if self.context.zero.size == 1:  # no rank waits for others on its way out
                    error.bmt_on_all_stages = True  # type: ignore[attr-defined]
                raise
        self.plan.learned = True

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Around backwards. At ZeRO levels 0 and 1, the gradients of micro-batches are summed locally, and the last
        micro-batch of each chunk reduces them (:meth:`_complete`), unless ``no_sync`` of the caller is active.

        Where the loss is computed inside the pipeline, gradients are collected in ``self._arrived``: the gradient of
        the loss is not known yet."""
        if not self._accumulates:
            with self._step.nested():
                yield
            return
        before = {reducer: reducer.no_sync for reducer in self._reducers}
        self._no_sync = {reducer: no_sync and self.tail is None for reducer, no_sync in before.items()}
        self._left = dict.fromkeys(range(len(self.chunks)), self.plan.schedule.micro_batches)
        with self._step.nested(), contextlib.ExitStack() as apart:
            for reducer in self._reducers:
                if self.tail is not None:
                    apart.enter_context(reducer.apart(self._arrived))
                reducer.no_sync = True  # also what is complete before the weight-gradient pass
                reducer.has_calls_left = True  # hooks for accumulated gradients run once
            try:
                yield
                for reducer in self._reducers:
                    reducer.no_sync = self._no_sync[reducer]
                self._step.reduce_accumulated(self._reducers)  # of parameters that the last micro-batch did not use
                if self.tail is not None:
                    self._step.settle(self._reducers)
            finally:
                for reducer, flag in before.items():
                    reducer.no_sync = flag

    def _complete(self, chunk: int) -> None:
        """Prepare for the gradients of one more micro-batch of a chunk: the last one is reduced."""
        self._left[chunk] -= 1
        for group in groups_in(self.chunks[chunk]):
            for reducer in group.reducers:
                reducer.no_sync = self._no_sync[reducer] or self._left[chunk] > 0

    def _release(self) -> None:
        for group in self._groups:
            group.release()
        self._alive.clear()
        self._split.clear()

    # --- what backward needs ----------------------------------------------------------------------

    def pop_tensors_to_save(self) -> list[Tensor]:
        """The tensors that backward needs, for autograd to save. This object drops them.

        Autograd frees them after backward, unless it retains the graph, and detects in-place changes."""
        own = self.arguments.values[self.stage]
        for n in self.plan.signatures[self.stage].hidden:
            own[n] = None
        self._saved, tensors = take_apart((self._inputs, self.arguments.values))
        self._inputs, self.arguments.values = {}, []
        return tensors

    def _recomputes(self, chunk: int) -> bool:
        """Whether a chunk keeps only its input after forward, and is recomputed before its backward.

        All chunks do if the loss is computed outside the pipeline. If backward is split in two passes, chunks with
        checkpointed layers do, because both passes need the same graph.
        """
        splits = self.plan.schedule.splits_backward and bool(checkpoints(self.chunks[chunk]))
        return self.plan.differentiable and (self.plan.schedule.loss_outside or splits)

    # --- actions ----------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        """Receive the inputs of an action, run it, and send its results."""
        note_place(
            f"{action.kind.name.lower()} of micro-batch {action.micro_batch}, stage {self.stage}, chunk {action.chunk}"
        )
        place = self.plan.schedule.place(self.stage, action.chunk)
        kinds: dict[Kind, Callable[..., Mapping[str, Any]]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward_of,
            Kind.INPUT: self._backward_of,
            Kind.WEIGHT: self._weight,
        }
        routes = self._pass.takes(self.stage, action)
        arrived = [tensor for peer, message in routes for tensor in self._channels.take(peer, message)]
        with contextlib.ExitStack() as around:
            if self.recorder is not None:
                around.enter_context(self.recorder.action(action))
            if self.tail is not None and action.kind is not Kind.FORWARD:
                around.enter_context(without_autocast())
            made = kinds[action.kind](action, place, arrived)
        for peer, message in self._pass.during(self.stage, action):
            self._channels.send(peer, message, made[message.kind])

    def _forward(self, action: Action, place: int, tensors: list[Tensor]) -> Mapping[str, Any]:
        i = action.micro_batch
        recomputes = self._recomputes(action.chunk)
        versions = [x._version for x in tensors] if recomputes else []
        where = PipelinePlace(self.recording.number, self.recording.before, place, i)
        with inside_pipeline(where), marked() as self._marks[i, place]:
            if recomputes:
                self._inputs[i, place], self._states[i, place] = tensors, AmbientState(self.context.device)
                self._copies[i, place] = Copies()
            buffers = self._buffers[action.chunk]
            grad = self.plan.differentiable and not recomputes
            with buffers.noting_writes(self._copies[i, place]) if recomputes else contextlib.nullcontext():
                hidden, intermediates = self._run(action.chunk, i, place, tensors, grad)
            if versions != [x._version for x in tensors if versions]:
                raise RuntimeError(
                    "a layer writes into its input, which is needed to compute it again in backward; let the layer "
                    "make a new tensor instead"
                )
            if self.tail is not None and place == self.plan.schedule.last:
                tail_args = self.arguments.of(i)[2]
                self._tail_grads[i] = self.tail.run(i, self.plan.weight(i), hidden, tail_args)
        return {"hidden": hidden, "layers": intermediates}

    def _recompute(self, action: Action, place: int, _: list[Tensor]) -> Mapping[str, Any]:
        # Backward of the last layer follows at once, so it keeps its activations.
        self._run_again(action, place, self._inputs[action.micro_batch, place], self.chunks[action.chunk][-1:])
        return {}

    def _run_again(
        self, action: Action, place: int, inputs: list[Tensor], keep_activations: Sequence[nn.Module]
    ) -> None:
        """Recompute a chunk. The layers ``keep_activations`` are not checkpointed, unless a module is around them.

        It may be another checkpoint, which computes the layer as it was computed now.
        """
        key, keep_activations = (action.micro_batch, place), [each for each in keep_activations if sharding_of(each)]
        with contextlib.ExitStack() as within:
            within.enter_context(self._states[key].restored())
            within.enter_context(self._buffers[action.chunk].restored(self._copies[key]))
            within.enter_context(not_checkpointed(keep_activations))
            within.enter_context(replayed(self._marks[key]))
            self._run(action.chunk, action.micro_batch, place, inputs, True)

    def _backward_of(self, action: Action, place: int, grads: list[Tensor]) -> Mapping[str, Any]:
        i, key = action.micro_batch, (action.micro_batch, place)
        if self.tail is not None and place == self.plan.schedule.last:
            grads = self._tail_grads.pop(i)
        if key in self._inputs and action.kind is Kind.INPUT:
            self._run_again(action, place, self._inputs.pop(key), self.chunks[action.chunk])
        alive = self._alive.pop(key)
        # Gradients of intermediate hidden states come for all of them, or for none.
        edges, grads = alive.outputs[len(alive.outputs) - len(grads) :], list(grads)
        for entry in self._marks[key]:
            if entry.grad_of_loss is not None and entry.tensor.requires_grad:
                edges.append(get_gradient_edge(entry.tensor))
                grads.append(entry.grad_of_loss)
            entry.grad_of_loss = None
        pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        roots, grads = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        leaves = [x for x in (*alive.inputs, *alive.arguments.values()) if x.requires_grad]
        if not self._accumulates:
            if roots and leaves:
                with _explained(), self._step.computing(BackwardPart.INPUTS):
                    torch.autograd.backward(roots, grads, inputs=leaves)
        elif action.kind is Kind.INPUT:
            hooked = {get_gradient_edge(e.tensor).node for e in self._marks[key] if e.tensor.requires_grad}
            self._split[key] = SplitBackward(roots, grads, leaves, self._step, hooked, alive.calls)
            with _explained():
                self._split[key].run_input_pass()
        elif roots:
            self._complete(action.chunk)
            with _explained():
                torch.autograd.backward(roots, grads)
        self.arguments.add_grads(i, alive.arguments)
        wants = [leaf.requires_grad for leaf in self._hidden(i)] if place == 0 else []
        wanted = [x for n, x in enumerate(alive.inputs) if gets_gradient(x) and (place or wants[n])]
        input_grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
        for x in (*alive.inputs, *alive.arguments.values()):
            x.grad = None
        return {"hidden_grad": input_grads, "input_grad": input_grads}

    def _weight(self, action: Action, place: int, _: list[Tensor]) -> Mapping[str, Any]:
        if self._accumulates:
            split = self._split.pop((action.micro_batch, place))
            self._complete(action.chunk)
            split.run_weight_pass()
        return {}

    def _run(
        self, chunk: int, micro_batch: int, place: int, tensors: list[Tensor], grad: bool
    ) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Run a chunk on a micro-batch's hidden states. ``grad``: record the graph, for a backward that follows.

        Returns the hidden states after the last layer, and the intermediate hidden states where they are wanted.
        """
        arguments: dict[int, Tensor] = {}
        inputs = tensors
        if grad:
            wanted = [True] * len(tensors) if place else [leaf.requires_grad for leaf in self._hidden(micro_batch)]
            inputs = [x.detach().requires_grad_(want and gets_gradient(x)) for x, want in zip(tensors, wanted)]
        form = self.plan.forms[Message("hidden" if place else "input", micro_batch, place)]
        splits = grad and self.plan.schedule.splits_backward
        splitting: contextlib.AbstractContextManager[list[Call]]
        splitting = self._step.splitting() if splits else contextlib.nullcontext([])
        with torch.set_grad_enabled(grad), splitting as calls:
            args, kwargs, _ = self.arguments.of(micro_batch, arguments)
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_inference()]
            versions = [x._version for x in given]
            searches = grad and chunk not in self._searched
            first = next_node() if searches else 0
            hidden, intermediates = run_layers(self.chunks[chunk], form.fill(inputs), args, kwargs)
            if searches:
                self._warn_of_kept_tensors(chunk, micro_batch, place, first)
        if versions != [x._version for x in given]:
            raise RuntimeError(
                "a layer writes into an argument, which other micro-batches, and the layer when it is computed again, "
                "would get with what was written; let the layer make a new tensor instead"
            )
        rows = self.plan.rows(micro_batch)
        for x in take_apart(hidden)[1]:
            if x.dim() == 0 or len(x) != rows.stop - rows.start:
                raise ValueError(
                    f"a layer returned a hidden state of shape {tuple(x.shape)} for {rows.stop - rows.start} samples; "
                    f"its first dimension must be the batch"
                )
        if not self.plan.return_hidden_states:
            intermediates = []
        if grad:
            outputs = [x for x in take_apart((intermediates, hidden))[1] if gets_gradient(x)]
            # Edges do not keep the outputs themselves alive after they have been sent.
            edges = [lasting_gradient_edge(x) if x.requires_grad else None for x in outputs]
            self._alive[micro_batch, place] = _Alive(inputs, arguments, edges, calls)
        return hidden, intermediates

    def _warn_of_kept_tensors(self, chunk: int, micro_batch: int, place: int, first: int) -> None:
        """Warn, once in the first forward of a chunk with gradients, of tensors in attributes of its layers."""
        self._searched.add(chunk)
        recorded = {id(entry.tensor) for entry in self._marks[micro_batch, place]}
        for index, name, tensor in kept_tensors(self.chunks[chunk], first):
            if id(tensor) not in recorded:
                _log.warning(
                    "layer %d of a pipeline keeps a tensor in %r: a loss that is computed of it gets no gradient; let "
                    "layers return it as a hidden state (num_hidden), or use record_tensor",
                    *(self.plan.layers[place][index], name),
                )
                return

    def _hidden(self, micro_batch: int) -> list[Any]:
        """The leaves of a micro-batch's hidden states, as they were passed in, that are tensors."""
        signature = self.plan.signature(micro_batch)
        return [signature.leaves[n] for n in signature.hidden if signature.leaves[n].is_tensor]

    # --- this rank as an origin -------------------------------------------------------------------

    def _made(self, message: Message) -> Any:
        """A message that this stage sends before or after its actions."""
        if message.kind == "loss":
            assert self.tail is not None
            return torch.stack([self.tail.losses[i] for i in self._pass.own(message.micro_batch)])
        rows, signature = self.plan.rows(message.micro_batch), self.plan.signatures[self.stage]
        values = [self.arguments.values[self.stage][n] for n in signature.hidden if signature.leaves[n].is_tensor]
        return self.plan.forms[message].fill(value.detach()[rows].contiguous() for value in values)

    def _output_grad(
        self, message: Message, outputs: list[Tensor | None], intermediates: list[Tensor | None]
    ) -> list[Tensor]:
        """A micro-batch's part of the gradients of outputs, or of intermediate hidden states. None counts as zeros."""
        rows = self.plan.rows(message.micro_batch)
        if message.kind == "hidden_grad":
            grads = [None if g is None else g[rows] for g in outputs]
        else:
            layers = self.plan.layers[message.place]
            grads = [None if g is None else g[layer, rows] for layer in layers for g in intermediates]
        forms, device = self.plan.forms[message].tensors, self.context.device
        return [form.zeros(device) if g is None else g.contiguous() for form, g in zip(forms, grads, strict=True)]

    def _input_grads(self, results: Mapping[Message, list[Tensor]]) -> list[Tensor | None]:
        """The gradients of the leaves of this rank's hidden states that want one."""
        parts = [results[m] for _, m in self._pass.results(self.stage) if m.kind == "input_grad"]
        return [_concatenated(of_leaf, 0) for of_leaf in zip(*parts)]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Around the backward of a micro-batch, whose graph is new; that of a tensor from outside may be freed already."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "a layer of a pipeline uses a tensor that was computed outside of the list, or for another micro-batch, "
            "and requires a gradient: pass it as an argument of the list"
        ) from error


def _concatenated(parts: Sequence[Any], dim: int) -> Any:
    """The parts of micro-batches as one tensor. If they are no tensors, the first one."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)

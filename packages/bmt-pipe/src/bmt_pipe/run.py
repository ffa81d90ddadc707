"""One call of a pipeline on one stage: its part of the schedule, action by action.

[Note: failures]
    A stage that raises still sends something in place of each message that the others wait for, and receives what
    they send. At the end of each pass all stages tell each other how it went, and then all of them raise. So an
    exception leaves no stage waiting, and no message on its way. Ranks that wait for the failed one in another
    collective, of its ZeRO or tensor-parallel group, are stopped when its process ends (``bmt_comm.watch``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten

from bmt_comm import ParallelContext, note_place
from bmt_zero.backward_context import outside_backward, step_context
from bmt_zero.gradient_reducer import GradientReducer, ReducedGradient
from bmt_zero.recording import Mark, PipelinePlace, begin_pipeline_call, inside_pipeline, marked, replayed
from bmt_zero.shard import group_of

from .arguments import Arguments
from .chunk import Surroundings, checkpoints, not_checkpointed, run_layers
from .messages import (
    Message,
    Post,
    StageLostError,
    connected,
    put_together,
    take_apart,
)
from .plan import Plan
from .recording import Recorder
from .routes import Pass
from .schedule import Action, Kind
from .signature import raise_first
from .split_backward import SplitBackward
from .tail import Tail


class _Alive(NamedTuple):
    """A chunk's computation for one micro-batch, between its forward and its backward."""

    inputs: list[Tensor]  # leaves
    arguments: dict[int, Tensor]  # leaves whose gradients are wanted, by the index of the argument
    outputs: list[GradientEdge | None]  # of floating-point tensors, where there is a gradient to pass on
    taps: list[GradientEdge | None]


class Run:
    """A call of the pipeline.

    Args:
        chunks: this stage's layers.
        context: the ranks.
        plan: what the call consists of.
        values: the leaves of this rank's arguments.
        tail: the loss, where it is computed inside.
        recorder: told when each action runs.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        context: ParallelContext,
        plan: Plan,
        values: list[Any],
        tail: Tail | None,
        recorder: Recorder | None,
    ) -> None:
        self.chunks = chunks
        self.context = context
        self.plan = plan
        self.arrived: dict[GradientReducer, ReducedGradient] = {}  # flat gradients, where the loss is computed inside
        self.tail = tail
        self.recorder = recorder
        self.stage = context.pipe.rank
        self.groups = list(dict.fromkeys(group_of(block) for chunk in chunks for block in chunk))
        self.reducers = [reducer for group in self.groups for reducer in group.reducers]
        self.arguments = Arguments(context, plan, values)
        self.inputs: dict[tuple[int, int], list[Tensor]] = {}  # by micro-batch and place: kept for recomputation
        self.surroundings: dict[tuple[int, int], Surroundings] = {}
        self._marks: dict[tuple[int, int], Mark] = {}  # what layers have recorded, to be recorded again
        self._recording = begin_pipeline_call()
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._retains = False  # the backward that is running may be run again
        self._split: dict[tuple[int, int], SplitBackward] = {}  # whose second part is still to come
        self._tail_grads: dict[int, list[Tensor]] = {}
        self._post: Post
        self._pass: Pass

    def _keeps_input_alone(self, chunk: int) -> bool:
        """Whether a chunk keeps nothing but its input from its forward on, and is computed again before its backward.

        If the loss is computed outside, all are, but a single checkpointed Block, which does so by itself. Backward in
        two parts needs one graph for both, so it takes the place of checkpointing.
        """
        if not self.plan.differentiable:
            return False
        checkpointed = checkpoints(self.chunks[chunk])
        if self.plan.schedule.loss_outside:
            return len(self.chunks[chunk]) > 1 or not checkpointed or self.plan.taps
        return self.plan.schedule.splits_backward and bool(checkpointed)

    # --- passes -----------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Any], list[Any]]:
        """All forwards, for a loss that is computed outside.

        Returns the leaves of this rank's output, and of the layers' inputs where they are wanted, stacked.
        """
        self.arguments.exchange()
        kept: list[tuple[list[Any], list[Any]]] = []
        self._begin(Pass(self.plan.schedule, True, False, taps=self.plan.taps))
        for group in self.groups:
            group.hold()
        with self._all_stages():
            self._send_inputs()
            self._work()
            for i in self._pass.own(self.stage):
                kept.append((self._output(i), self._layer_inputs(i)))
        if not self.plan.differentiable:
            self._release()
        outputs = [_joined([each[0][n] for each in kept], 0) for n in range(len(kept[0][0]))]
        taps = [_joined([each[1][n] for each in kept], 1) for n in range(len(kept[0][1]))]
        return outputs, taps

    def backward(
        self, output_grads: list[Tensor | None], tap_grads: list[Tensor | None], problem: Exception | None
    ) -> list[Tensor | None]:
        """All backwards, from the gradients of the outputs of :meth:`forward` (of floating-point tensors).

        Returns the gradient of each leaf of this rank's arguments. Raises ``problem``, why this rank cannot do its
        part, when the other stages know.
        """
        self._retains = torch._C._autograd._get_current_graph_task_keep_graph()
        with outside_backward():
            step_context(self.context).finish_reductions()  # those whose end would need all stages
            wanted = self._exchange_wanted(tap_grads)
            with connected():
                self._recording.exchange_grads_of_losses(self.context)
            flags = tuple(any(leaf.requires_grad for leaf in s.leaves[: s.num_hidden]) for s in self.plan.signatures)
            self._begin(Pass(self.plan.schedule, False, True, tap_grads=wanted, input_grads=flags))
            with self._all_stages(), step_context(self.context).nested(), self._reducing_once():
                if problem is not None:
                    raise problem
                self._send_output_grads(output_grads, tap_grads)
                self._work()
                hidden = self._input_grads()
            self._release()
            return self.arguments.exchange_grads(hidden)

    def forward_and_backward(self) -> tuple[Tensor, list[Tensor | None]]:
        """The whole schedule, with the loss inside.

        Returns the mean of the tail's losses over this rank's samples, and the gradient of each leaf of its
        arguments, for the gradient of the loss that the tail was told.
        """
        assert self.tail is not None
        backward = self.plan.differentiable
        step_context(self.context).finish_reductions()
        self.arguments.exchange()
        flags = tuple(any(leaf.requires_grad for leaf in s.leaves[: s.num_hidden]) for s in self.plan.signatures)
        self._begin(Pass(self.plan.schedule, True, backward, tail=True, input_grads=flags))
        for group in self.groups:
            group.hold()
        self.tail.prepare(self.stage == self._pass.stage(self._pass.last))
        hidden: list[Tensor | None] = []
        nested = step_context(self.context).nested()
        apart = contextlib.ExitStack()
        with self._all_stages(), nested, apart, self._reducing_once(), self.tail.closing():
            for reducer in self.reducers:  # what arrives within is no parameter's gradient yet
                apart.enter_context(reducer.apart(self.arrived))
            self._send_inputs()
            self._work()
            loss = self._losses()
            if backward:
                hidden = self._input_grads()
        self._release()
        return loss, self.arguments.exchange_grads(hidden) if backward else []

    @property
    def number(self) -> int:
        """Which call of a pipeline since recording began."""
        return self._recording.number

    def rescale_recorded(self, factor: Tensor) -> None:
        """The gradients of what layers have recorded are to be multiplied by ``factor`` (0-dim)."""
        for entry in {id(entry): entry for mark in self._marks.values() for entry in mark}.values():
            entry.rescale(factor)

    def _begin(self, what: Pass) -> None:
        self._pass = what
        self._post = Post(self.context, self.plan.forms, what.forward and not self.plan.learned)
        self._post.expect(what.expected(self.stage))

    def _work(self) -> None:
        for action in self._pass.actions(self.stage):
            self._do(action)

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
                if message not in self._post.sent:
                    self._post.send_broken(peer, message)
            self._post.drain()
        comm = self.context.pipe_host
        failed = torch.zeros(comm.size, dtype=torch.uint8)
        with connected():
            comm.all_gather(failed, torch.tensor([problem is not None], dtype=torch.uint8))
        self._post.close()  # also what others have received only to be rid of it
        if bool(failed.any()):
            self._release()
            raise_first(self.context, problem)
        self.plan.learned = True

    def _release(self) -> None:
        for group in self.groups:
            group.release()
        if not self._retains:
            self._alive.clear()
        self._split.clear()

    @contextlib.contextmanager
    def _reducing_once(self) -> Iterator[None]:
        """At ZeRO levels 0 and 1, gradients of micro-batches are summed before ranks exchange them.

        :meth:`_backward` lets the last one of each chunk reduce, unless the caller's ``no_sync`` is to."""
        reducers = self.reducers
        self._no_sync = {reducer: reducer.no_sync and self.tail is None for reducer in reducers}
        before = {reducer: reducer.no_sync for reducer in reducers}
        self._left = dict.fromkeys(range(len(self.chunks)), self.plan.schedule.micro_batches)
        for reducer in reducers:  # also what is complete before the weight-gradient pass
            reducer.no_sync = True
        try:
            yield
            for reducer in reducers:
                reducer.no_sync = self._no_sync[reducer]
            step = step_context(self.context)
            step.reduce_accumulated(reducers)  # of those that the last micro-batch has not used
            step.settle(reducers)
        finally:
            for reducer, flag in before.items():
                reducer.no_sync = flag

    @contextlib.contextmanager
    def _one_less(self, chunk: int) -> Iterator[None]:
        """A micro-batch's gradients of a chunk become complete."""
        self._left[chunk] -= 1
        for block in self.chunks[chunk]:
            for reducer in group_of(block).reducers:
                reducer.no_sync = self._no_sync[reducer] or self._left[chunk] > 0
        yield

    # --- actions ----------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        note_place(
            f"{action.kind.name.lower()} of micro-batch {action.micro_batch}, stage {self.stage}, chunk {action.chunk}"
        )
        kinds: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weight,
        }
        kinds[action.kind](action)

    def _recorded(self, action: Action) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.action(action)

    def _forward(self, action: Action) -> None:
        i, place = action.micro_batch, self._pass.place(self.stage, action.chunk)
        message = Message("hidden" if place else "input", i, place)
        source = self._pass.stage(place - 1) if place else self._pass.origin(i)
        tensors = self._post.take(source, message)
        again = self._keeps_input_alone(action.chunk)
        versions = [x._version for x in tensors] if again else []
        where = PipelinePlace(self._recording.number, self._recording.before, place, i)
        with self._recorded(action), inside_pipeline(where), marked() as self._marks[i, place]:
            if again:
                self.inputs[i, place] = tensors
                self.surroundings[i, place] = Surroundings(self.context.device)
            if again or not self.plan.differentiable:
                with torch.no_grad():
                    hidden, inputs = self._run(action.chunk, i, tensors, {})
            else:
                hidden, inputs = self._run_with_grad(action.chunk, i, tensors)
            if versions != [x._version for x in tensors if versions]:
                raise RuntimeError(
                    "a layer writes into its input, which is needed to compute it again in backward; let the layer "
                    "make a new tensor instead"
                )
            form, outputs = take_apart(hidden)
            if self.tail is not None and place == self._pass.last:
                _, _, tail_args = self.arguments.of(i)
                self._tail_grads[i] = self.tail.run(i, self.plan.weight(i), hidden, tail_args)
        taps = take_apart(inputs)
        for peer, message in self._pass.during(self.stage, action):
            self._post.send(peer, message, *(taps if message.kind == "taps" else (form, outputs)))

    def _recompute(self, action: Action) -> None:
        place = self._pass.place(self.stage, action.chunk)
        with self._recorded(action):
            if (action.micro_batch, place) not in self._alive:
                # Backward of the last layer follows at once.
                self._compute_again(action, self.inputs[action.micro_batch, place], self.chunks[action.chunk][-1:])

    def _compute_again(self, action: Action, inputs: list[Tensor], keep_activations: Sequence[nn.Module]) -> None:
        key = action.micro_batch, self._pass.place(self.stage, action.chunk)
        with self.surroundings[key].again(), not_checkpointed(keep_activations), replayed(self._marks[key]):
            self._run_with_grad(action.chunk, action.micro_batch, inputs)

    def _backward(self, action: Action) -> None:
        i, place = action.micro_batch, self._pass.place(self.stage, action.chunk)
        last = place == self._pass.last
        if last and self.tail is not None:
            grads = self._tail_grads.pop(i)
        elif last:
            grads = self._post.take(self._pass.origin(i), Message("output_grad", i, place))
        else:
            grads = self._post.take(self._pass.stage(place + 1), Message("hidden_grad", i, place + 1))
        tap_grads: list[Tensor] = []
        origin = self._pass.origin(i)
        if self._pass.tap_grads and self._pass.tap_grads[origin][place]:
            tap_grads = self._post.take(origin, Message("taps_grad", i, place))
        with self._recorded(action):
            if (i, place) in self.inputs and action.kind is Kind.INPUT:
                self._compute_again(action, self.inputs.pop((i, place)), self.chunks[action.chunk])
            retain = self._retains and not self._keeps_input_alone(action.chunk)  # others are computed again
            alive = self._alive[i, place] if retain else self._alive.pop((i, place))
            edges = [*alive.outputs, *(alive.taps if tap_grads else ())]
            grads = [*grads, *tap_grads]
            for entry in self._marks[i, place]:
                if entry.grad_of_loss is not None and entry.tensor.requires_grad:
                    edges.append(get_gradient_edge(entry.tensor))
                    grads.append(entry.grad_of_loss)
                entry.grad_of_loss = None
            pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
            edges, grads = [edge for edge, _ in pairs], [grad for _, grad in pairs]
            if action.kind is Kind.INPUT:
                leaves = [*alive.inputs, *alive.arguments.values()]
                hooked = {get_gradient_edge(e.tensor).node for e in self._marks[i, place] if e.tensor.requires_grad}
                split = SplitBackward(edges, grads, leaves, step_context(self.context), hooked)
                split.inputs()
                self._split[i, place] = split
            elif edges:
                with self._one_less(action.chunk):
                    torch.autograd.backward(edges, grads, retain_graph=retain)
            self.arguments.add_grads(i, alive.arguments)
        floating = [x for x in alive.inputs if x.is_floating_point()]
        for peer, message in self._pass.during(self.stage, action):
            if message.kind == "input_grad":
                tensors = [x for x, leaf in zip(alive.inputs, self._hidden_leaves(origin)) if leaf.requires_grad]
            else:
                tensors = floating
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
            self._post.send(peer, message, self.plan.forms[message], found)
        for x in (*alive.inputs, *alive.arguments.values()):
            x.grad = None

    def _weight(self, action: Action) -> None:
        i, place = action.micro_batch, self._pass.place(self.stage, action.chunk)
        split = self._split.pop((i, place))
        with self._recorded(action), self._one_less(action.chunk):
            if split.reads_parameters:
                for group in dict.fromkeys(map(group_of, self.chunks[action.chunk])):
                    group.unshard()
                    group.wait()
            split.weights()

    def _run(
        self, chunk: int, micro_batch: int, tensors: list[Tensor], leaves: dict[int, Tensor]
    ) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Run a chunk on a micro-batch's hidden states. ``leaves``: gets the arguments whose gradients are wanted."""
        place = self._pass.place(self.stage, chunk)
        form = self.plan.forms[Message("hidden" if place else "input", micro_batch, place)]
        args, kwargs, _ = self.arguments.of(micro_batch, leaves)
        hidden, inputs = run_layers(self.chunks[chunk], put_together(form, tensors), args, kwargs)
        rows = self.plan.rows(micro_batch)
        for x in take_apart(hidden)[1]:
            if x.dim() == 0 or len(x) != rows.stop - rows.start:
                raise ValueError(
                    f"a layer returned a hidden state of shape {tuple(x.shape)} for {rows.stop - rows.start} samples; "
                    f"its first dimension must be the batch"
                )
        return hidden, inputs

    def _run_with_grad(
        self, chunk: int, micro_batch: int, tensors: list[Tensor]
    ) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """The same, for a backward to follow."""
        place = self._pass.place(self.stage, chunk)
        wanted = [True] * len(tensors)
        if place == 0:
            wanted = [leaf.requires_grad for leaf in self._hidden_leaves(self._pass.origin(micro_batch))]
        inputs = [
            x.detach().requires_grad_(want and x.is_floating_point()) for x, want in zip(tensors, wanted, strict=True)
        ]
        leaves: dict[int, Tensor] = {}
        splits = self.plan.schedule.splits_backward
        with torch.enable_grad(), step_context(self.context).splitting() if splits else contextlib.nullcontext():
            hidden, taps = self._run(chunk, micro_batch, inputs, leaves)
        # Not the outputs themselves, which can go once they have been sent.
        edges = [
            [get_gradient_edge(x) if x.requires_grad else None for x in take_apart(tree)[1] if x.is_floating_point()]
            for tree in (hidden, taps)
        ]
        self._alive[micro_batch, place] = _Alive(inputs, leaves, *edges)
        return hidden, taps

    def _hidden_leaves(self, origin: int) -> list[Any]:
        signature = self.plan.signatures[origin]
        return [signature.leaves[n] for n in signature.tensors(hidden=True)]

    # --- this rank as an origin -------------------------------------------------------------------

    def _send_inputs(self) -> None:
        signature = self.plan.signatures[self.stage]
        for peer, message in self._pass.before(self.stage):
            rows = self.plan.rows(message.micro_batch)
            tensors = [self.arguments.values[self.stage][n].detach()[rows] for n in signature.tensors(hidden=True)]
            self._post.send(peer, message, self.plan.forms[message], [x.contiguous() for x in tensors])

    def _output(self, micro_batch: int) -> list[Any]:
        """The leaves of the output for a micro-batch of this rank."""
        message = Message("output", micro_batch, self._pass.last)
        tensors = self._post.take(self._pass.stage(self._pass.last), message)
        return tree_flatten(put_together(self.plan.forms[message], tensors))[0]

    def _layer_inputs(self, micro_batch: int) -> list[Any]:
        """What went into each layer: for each hidden state, stacked over layers."""
        if not self.plan.taps:
            return []
        layers: list[tuple[Any, ...]] = []
        for place in range(self._pass.last + 1):
            message = Message("taps", micro_batch, place)
            tensors = self._post.take(self._pass.stage(place), message)
            layers += put_together(self.plan.forms[message], tensors)
        return [torch.stack(inputs) for inputs in zip(*layers, strict=True)]

    def _exchange_wanted(self, tap_grads: list[Tensor | None]) -> tuple[tuple[bool, ...], ...]:
        """For each origin and place, whether there are gradients of the layers' inputs."""
        if not self.plan.taps:
            return ()
        comm = self.context.pipe_host
        flags = torch.zeros(comm.size, dtype=torch.uint8)
        with connected():
            comm.all_gather(flags, torch.tensor([any(g is not None for g in tap_grads)], dtype=torch.uint8))
        last = self.plan.schedule.stages * self.plan.schedule.chunks
        return tuple((bool(flag),) * last for flag in flags)

    def _send_output_grads(self, output_grads: list[Tensor | None], tap_grads: list[Tensor | None]) -> None:
        for peer, message in self._pass.before(self.stage):
            form, rows = self.plan.forms[message], self.plan.rows(message.micro_batch)
            if message.kind == "output_grad":
                found = [None if g is None else g[rows] for g in output_grads]
            else:
                layers = self.plan.layers[message.place]
                found = [None if g is None else g[layer, rows] for layer in layers for g in tap_grads]
            tensors = [
                torch.zeros(f.shape, dtype=f.dtype, device=self.context.device) if g is None else g.contiguous()
                for f, g in zip(form.tensors, found, strict=True)
            ]
            self._post.send(peer, message, form, tensors)

    def _input_grads(self) -> list[Tensor | None]:
        """The gradients of the leaves of this rank's hidden states."""
        signature = self.plan.signatures[self.stage]
        grads: list[Tensor | None] = [None] * signature.num_hidden
        wanted = [n for n in range(signature.num_hidden) if signature.leaves[n].requires_grad]
        if wanted:
            parts = [self._post.take(0, Message("input_grad", i, 0)) for i in self._pass.own(self.stage)]
            for n, pieces in zip(wanted, zip(*parts, strict=True), strict=True):
                grads[n] = _joined(list(pieces), 0)
        return grads

    def _losses(self) -> Tensor:
        """The tail's losses, sent to the origins; their mean for this rank."""
        assert self.tail is not None
        for peer, message in self._pass.after(self.stage):
            losses = torch.stack([self.tail.losses[i] for i in self._pass.own(peer)])
            form, tensors = take_apart(losses)
            self._post.send(peer, message, form, tensors)
        last = self._pass.stage(self._pass.last)
        [losses] = self._post.take(last, Message("loss", self.stage, self._pass.last))
        return losses.sum()


def _joined(parts: list[Any], dim: int) -> Any:
    """The parts of micro-batches in one; what is no tensor is taken from the first."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

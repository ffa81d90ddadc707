"""Calls of a pipeline, as a function of PyTorch: arguments, outputs and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bmt_comm import ParallelContext, differentiable_once, inside_checkpoint, not_compiled
from bmt_zero.recording import link_pipeline_call
from bmt_zero.written_buffers import WrittenBuffers

from .arguments import Plan, Signature, exchange_signatures, remember, sign
from .chunk import autocast_state, groups_in
from .messages import StageFailedError, connected, gets_gradient
from .recording import Recorder
from .run import Run
from .schedule import Schedule, make_schedule, recompute
from .tail import Tail


class Pipeline:
    """This stage's part of a pipeline, and what calls remember for later ones.

    Args:
        layers: the indices of the layers at each place in the chain.
        num_hidden: how many hidden states the layers take and return.
        context: the ranks.
        tail_schedule: the schedule of calls with a tail.
    """

    def __init__(
        self,
        layers: Sequence[range],
        num_hidden: int,
        context: ParallelContext,
        tail_schedule: str,
    ) -> None:
        self.layers = layers
        self.num_hidden = num_hidden
        self.context = context
        self.tail_schedule = tail_schedule
        self.recorder: Recorder | None = None
        self.last_schedule: Schedule | None = None
        self._signatures: dict[bytes, list[Signature]] = {}
        self._plans: dict[tuple[bytes, int], Plan] = {}
        self._factor = torch.ones((), dtype=torch.float64, device=context.device)  # see Tail
        self._chunks: list[list[nn.Module]] = []  # of the last call
        self._version = 0  # how often they have changed
        self._buffers: list[WrittenBuffers] = []  # of these layers
        self._searched: set[int] = set()  # the chunks of these layers that were searched for tensors that they keep
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")

    @not_compiled
    def __call__(
        self,
        chunks: list[list[nn.Module]],
        hidden: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_related: Sequence[int | str] | None,
        return_hidden_states: bool,
        tail: Callable[..., Tensor] | None,
        tail_args: tuple[Any, ...],
        tail_modules: Sequence[nn.Module],
        training: bool,
    ) -> tuple[Any, ...] | Tensor:
        """The hidden states after the last layer, then the intermediate ones as from :class:`TransformerBlockList` if
        they are wanted; or the loss. ``chunks``: this stage's layers, by chunk, as they are now."""
        if chunks != self._chunks:
            self._chunks, self._buffers = chunks, [WrittenBuffers(chunk) for chunk in chunks]
            self._searched, self._version = set(), self._version + 1
        context = self.context
        grad = torch.is_grad_enabled()
        signature: Signature | None = None
        values: list[Any] = []
        problem: Exception | None = None
        prepared: Tail | None = None
        try:
            if len(hidden) < self.num_hidden:
                raise ValueError(f"{len(hidden)} hidden states were passed, and num_hidden={self.num_hidden}")
            if tail is None:
                if tail_args or tail_modules:
                    raise ValueError(f"{'tail_args' if tail_args else 'tail_modules'} were given without a tail")
            else:
                _check_tail(return_hidden_states)
                prepared = Tail(tail, tail_modules, context, self._factor, grad)
            signature, values = sign(
                hidden,
                args,
                kwargs,
                tail_args,
                batch_related,
                device=context.device,
                grad=grad,
                trains=any(p.requires_grad for chunk in chunks for group in groups_in(chunk) for p in group.params),
                version=self._version,
                options={
                    "return_hidden_states": return_hidden_states,
                    "shapes of the tail's parameters": prepared and prepared.shapes,
                    "chunks of the list": len(self.layers),
                    "tail_schedule": self.tail_schedule,
                    "training": training,  # dtypes may depend on it, and on autocast
                    "autocast": autocast_state(context.device),
                },
            )
        except Exception as error:  # of any kind: the other ranks must learn of it
            problem = error
        key, signatures, per_stage = self._agree(signature, problem)
        differentiable = grad and (_train(signatures) or (prepared is not None and prepared.may_train))
        plan = self._plans.get((key, per_stage))
        if plan is None or plan.differentiable != differentiable:
            schedule = self._schedule(per_stage, has_tail=tail is not None)
            plan = Plan(signatures, schedule, differentiable, return_hidden_states, self.layers)
            if key in self._signatures:
                remember(self._plans, (key, per_stage), plan)
        if self.recorder is not None:
            self.last_schedule = plan.schedule
        run = Run(chunks, context, plan, values, prepared, self.recorder, self._buffers, self._searched)
        try:
            return self._outputs(run) if prepared is None else self._loss(run, prepared)
        finally:
            if not plan.learned:
                self._plans.pop((key, per_stage), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A pipeline on the same ranks that remembers no calls."""
        return Pipeline(self.layers, self.num_hidden, self.context, self.tail_schedule)

    def _agree(self, signature: Signature | None, problem: Exception | None) -> tuple[bytes, list[Signature], int]:
        """The key under which the signatures of all stages are remembered, these, and the micro-batches per stage.

        Raises:
            The ``problem`` of this rank's call, or StageFailedError: that of another rank.
        """
        try:
            key, signatures = exchange_signatures(self.context, self._signatures, signature, problem)
        except Exception:
            self._agree_on_micro_batches(0)
            raise
        # The same number on every stage, and no empty micro-batch if the batches are not empty.
        wanted = -(-self.context.num_micro_batches // self.context.pipe_size)
        per_stage = self._agree_on_micro_batches(max(1, min(wanted, *(s.batch for s in signatures))))
        if not per_stage:
            raise StageFailedError(
                "another data-parallel or tensor-parallel rank's call of the pipeline has failed; see its error"
            )
        return key, signatures, per_stage

    def _schedule(self, per_stage: int, has_tail: bool) -> Schedule:
        """The schedule of a call with so many micro-batches per stage."""
        sizes = self.context.pipe_size, per_stage * self.context.pipe_size, len(self._chunks)
        schedule = make_schedule(self.tail_schedule, *sizes)
        return schedule if has_tail else recompute(*sizes, schedule.v_shaped)

    def _agree_on_micro_batches(self, per_stage: int) -> int:
        """The number of micro-batches of each stage's batch: the smallest of the stage's ranks. 0: one has failed."""
        smallest = torch.tensor([per_stage], device="cpu")
        self.context.zero_host.all_reduce(smallest, "min")
        return int(smallest)

    def _outputs(self, run: Run) -> tuple[Any, ...]:
        outputs, intermediates = run.forward()
        leaves = [*outputs, *intermediates]
        if run.plan.differentiable:
            which = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            wanted = [value for leaf, value in run.arguments.own if leaf.requires_grad]
            tensors = [leaves[n] for n in which]
            num_outputs = sum(isinstance(leaf, Tensor) for leaf in outputs)
            *attached, link = _Outputs.apply(run, num_outputs, self._anchor, tensors, *wanted)
            link_pipeline_call(run.recording.number, link)
            for n, tensor in zip(which, attached, strict=True):
                leaves[n] = tensor
        return run.filled(leaves[: len(outputs)], leaves[len(outputs) :])

    def _loss(self, run: Run, tail: Tail) -> Tensor:
        loss, grads = run.forward_and_backward()
        if not run.plan.differentiable or not (_train(run.plan.signatures) or tail.grads or tail.plain):
            return loss
        tail.agree_on_use(run.plan.schedule.stage(run.plan.schedule.last))
        wanted = [value for leaf, value in run.arguments.own if leaf.requires_grad]
        grads += tail.plain.values()
        run.arguments.values = []
        return _Loss.apply(run, tail, self._anchor, loss, grads, *wanted, *tail.plain)


def _check_tail(return_hidden_states: bool) -> None:
    """Raise ValueError if a tail cannot be part of a call."""
    if return_hidden_states:
        raise ValueError("return_hidden_states and tail cannot be combined: a tail returns the loss alone")
    if inside_checkpoint():
        raise ValueError(
            "a tail was passed inside of torch.utils.checkpoint, which would compute all of it a second time; call the "
            "pipeline outside of it: it keeps little between forward and backward by itself"
        )


def _train(signatures: Sequence[Signature]) -> bool:
    """Whether layers or arguments of any rank get gradients."""
    return any(s.trains or any(leaf.requires_grad for leaf in s.leaves) for s in signatures)


class _Outputs(torch.autograd.Function):
    """The outputs of a pipeline whose layers are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, num_outputs: int, anchor: Tensor, outputs: list[Tensor], *wanted: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.anchor = run, get_gradient_edge(anchor).node
        ctx.num_outputs = num_outputs
        ctx.get_gradients = [gets_gradient(x) for x in outputs]
        ctx.save_for_backward(*run.pop_tensors_to_save())
        results = tuple(x.detach() for x in outputs)
        link = torch.zeros((), device=run.context.device)  # see bmt_zero.recording.link_pipeline_call
        ctx.mark_non_differentiable(*(x for x in results if not gets_gradient(x)))
        return *results, link

    @staticmethod
    @differentiable_once("a pipeline", lambda ctx: True)
    def backward(ctx: Any, *all_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ()
        problem: Exception | None = None
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:  # they were changed in place, or an earlier backward has freed them
            problem = error
        outputs, intermediates = (
            [grad for grad, is_wanted in zip(all_grads[part], ctx.get_gradients[part]) if is_wanted]
            for part in (slice(ctx.num_outputs), slice(ctx.num_outputs, len(ctx.get_gradients)))
        )
        grads = ctx.run.backward(saved, outputs, intermediates, problem, _accumulates(ctx.anchor))
        return None, None, None, None, *grads


class _Loss(torch.autograd.Function):
    """A loss whose gradients are computed already, up to a factor that backward determines."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, tail: Tail, anchor: Tensor, loss: Tensor, grads: list[Tensor | None], *wanted: Tensor
    ) -> Tensor:
        ctx.run, ctx.tail, ctx.grads, ctx.anchor = run, tail, grads, get_gradient_edge(anchor).node
        return loss.detach()

    @staticmethod
    @differentiable_once("a pipeline", lambda ctx: True)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("backward from the loss of a pipeline's tail for a second time: its gradients are gone")
        grad = _same_on_stages(ctx.run.context, grad.double())
        factor = grad / ctx.tail.scale
        ctx.tail.note(grad)
        if _accumulates(ctx.anchor):
            ctx.run.scale_gradients(factor)
            ctx.tail.reduce(factor)
        scaled = [None if g is None else g * factor for g in ctx.grads]
        ctx.run = ctx.tail = ctx.grads = None  # the loss may be kept after backward
        return None, None, None, None, None, *scaled


def _accumulates(anchor: Any) -> bool:
    """Whether the running backward pass accumulates gradients of parameters.

    ``torch.autograd.grad``, and ``backward`` with ``inputs``, do not: they run no nodes of other leaves, such as
    ``anchor``.
    """
    return bool(torch._C._will_engine_execute_node(anchor))


def _same_on_stages(context: ParallelContext, grad: Tensor) -> Tensor:
    """The gradient of a loss, which must be the same on all stages: it scales sums over micro-batches of all stages.

    Raises:
        ValueError: it is not the same. On a GPU, NaN is returned instead, because raising would need to synchronize.
    """
    if context.pipe.size == 1:
        return grad
    bounds = torch.stack([grad, -grad])
    with connected():
        context.pipe.all_reduce(bounds, "max")
    if context.device.type != "cpu":
        return torch.where(bounds[0] == -bounds[1], grad, torch.nan)
    if bounds[0] != -bounds[1] and not bounds.isnan().any():
        raise ValueError(
            f"the loss of a pipeline's tail got the gradient {-bounds[1]:g} on one stage and {bounds[0]:g} on "
            f"another; weigh samples inside of the tail instead"
        )
    return grad

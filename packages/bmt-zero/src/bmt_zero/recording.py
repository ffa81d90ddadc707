"""Record tensors of a forward, once each, also if the forward is recomputed.

[Note: recomputation]
    A checkpointed forward runs twice. A forward inside a backward records nothing. A pipeline runs its layers first
    without gradients and later, before their backward, with them. The first run returns the entries that it has made
    (:func:`marked`). The second run gets these entries and replaces their tensors by its own (:func:`replayed`), so
    that they have gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bmt_comm import ParallelContext, current_context, forget_scale, is_initialized, scale_in_backward

from .backward_context import step_context


class PipelinePlace(NamedTuple):
    """Where in a pipeline a tensor was recorded."""

    call: int
    """Which call of a pipeline since recording began."""
    before: int
    """How many tensors had been recorded outside of pipelines."""
    place: int
    """The number of the chunk in the chain of layers."""
    micro_batch: int


class Entry:
    """A recorded tensor.

    Attributes:
        name, group: as given to :func:`record_tensor`.
        tensor: the tensor itself.
        place: None outside of pipelines.
        grad_of_loss: the gradient of a loss that uses the tensor of a pipeline, for the pipeline's backward.
    """

    grad_of_loss: Tensor | None = None

    def __init__(self, name: str, group: str | None, tensor: Tensor, place: PipelinePlace | None) -> None:
        self.name = name
        self.group = group
        self.place = place
        self._arrived = _Arrived(weakref.ref(tensor))
        self.tensor = tensor
        self.set_tensor(tensor)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the tensor, without the loss scale."""
        grad = self.tensor.grad if self._arrived.grad is None else self._arrived.grad
        scale = self._arrived.loss_scale
        return grad if grad is None or scale is None else grad / scale

    def rescale(self, factor: Tensor) -> None:
        """Multiply the gradient that has arrived by ``factor`` (0-dim, fp64)."""
        self._arrived.loss_scale = scale_in_backward() / factor

    def set_tensor(self, tensor: Tensor) -> None:
        """Replace the tensor by one that the same call has computed, and ask autograd for its gradient.

        Gradients that have arrived at the previous tensor, in a backward with ``retain_graph=True``, are included.
        """
        before = self._arrived
        grad = self.tensor.grad if before.grad is None and before.loss_scale is not None else before.grad
        self.tensor = tensor
        if tensor.requires_grad:
            tensor.retain_grad()
            self._arrived = _Arrived(weakref.ref(tensor), tensor.is_leaf, before.loss_scale, grad)
            tensor.register_hook(self._arrived.note)


@dataclass
class _Arrived:
    """The gradients that a tensor's hook has seen."""

    tensor: weakref.ref[Tensor]  # weak, because the tensor refers to this object
    keeps: bool = False
    """Whether to keep the gradient, because a pipeline clears that of the leaves of its micro-batches."""
    loss_scale: float | Tensor | None = None
    """The scale of ``grad``, or of the tensor's own gradient where ``grad`` is None; None before any has arrived."""
    grad: Tensor | None = None
    """The sum of the gradients, if it is kept or they have different loss scales."""

    def note(self, grad: Tensor) -> None:
        scale = scale_in_backward()
        before = self.grad
        if self.loss_scale is None:
            self.loss_scale = scale
        elif before is None and scale != self.loss_scale:
            tensor = self.tensor()
            before = None if tensor is None else tensor.grad
        if before is not None:
            self.grad = before + grad.detach() * (self.loss_scale / scale)
        elif self.keeps:
            self.grad = grad.detach().clone()


class SharedTensor:
    """A tensor that a pipeline stage has recorded. Each stage has the part with its samples.

    Attributes:
        stage: the stage that has recorded it.
        forms: shape and dtype of each stage's part; None if it has none.
        entries: on the stage that has recorded it: the entries that were concatenated to each stage's part.
    """

    def __init__(
        self,
        stage: int,
        forms: Sequence[tuple[torch.Size, torch.dtype] | None],
        entries: Sequence[Sequence[Entry]],
    ) -> None:
        self.stage = stage
        self.forms = forms
        self.entries = entries
        self._grad: tuple[int, Tensor] | None = None  # the backward pass, and the gradient of this rank's part

    def add_grad(self, grad: Tensor) -> None:
        """Add a gradient that a loss has for this rank's part, for the pipeline's backward."""
        task = torch._C._current_graph_task_id()
        before = self._grad
        self._grad = (task, grad if before is None or before[0] != task else before[1] + grad)

    def take_grad(self) -> Tensor | None:
        """The gradient that losses have added in the running backward pass, or None."""
        task, grad = self._grad or (None, None)
        self._grad = None
        return grad if task == torch._C._current_graph_task_id() else None


@dataclass
class Session:
    """The tensors that were recorded since recording began."""

    entries: list[Entry] = field(default_factory=list)
    pipeline_calls: int = 0
    links: dict[int, Tensor] = field(default_factory=dict)
    """By pipeline call: an output, through which a loss that uses recorded tensors reaches the call's backward."""
    shared: dict[int, list[SharedTensor]] = field(default_factory=dict)
    """By pipeline call: the tensors that all stages have recorded."""


Mark = list[Entry]
"""The entries that one run of a forward has made or replaced."""

_session: Session | None = None
_marks: list[Mark] = []
_replays: list[Iterator[Entry]] = []
_place: PipelinePlace | None = None


def begin_recording() -> Session:
    """Begin to record.

    Raises:
        RuntimeError: recording has begun already.
    """
    global _session
    if _session is not None:
        raise RuntimeError("inspect_tensor() is in use already; leave its context before you enter another one")
    if torch._C._current_graph_task_id() == -1:
        forget_scale()  # of a backward that has failed
    _session = Session()
    return _session


def end_recording() -> None:
    """Stop recording."""
    global _session
    _session = None


def record_tensor(x: Tensor, name: str, group: str | None = None) -> None:
    """Record a tensor inside of :func:`bmt_zero.inspect_tensor`. Outside of it, do nothing.

    The tensor itself is kept, and a loss may use it. In a Block, it counts as an output of the Block then.

    Args:
        x: any dense tensor, not a parameter.
        name: a name; several tensors may have it.
        group: a prefix of the name.

    Raises:
        RuntimeError: ``x`` is a parameter; see :func:`bmt_zero.inspect_model`.
        TypeError: ``x`` is no tensor, or sparse or nested.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, not {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else f"of layout {x.layout}"
        raise TypeError(f"{name!r} is {kind}; record a dense tensor, as x.to_dense() or x.values()")
    if isinstance(x, torch.nn.Parameter):
        raise RuntimeError(f"{name!r} is a parameter; inspect_model shows parameters, record_tensor other tensors")
    entry: Entry | None
    if _replays:
        entry = next(_replays[-1], None)
        if entry is None or entry.tensor is x:
            return
        entry.set_tensor(x)
    elif _session is None or torch._C._current_graph_task_id() != -1:  # recomputed by checkpointing
        return
    else:
        entry = Entry(name, group, x, _place)
        _session.entries.append(entry)
    for mark in _marks:
        mark.append(entry)
    _follow(x)


def _follow(x: Tensor) -> None:
    """Let the running calls of Blocks begin backward when a gradient of ``x`` arrives, as for their outputs."""
    if x.grad_fn is None or not is_initialized():
        return
    for call in step_context(current_context()).calls:
        if call.call is not None:
            call.call.follow_outputs([x], call.inputs)


@contextmanager
def marked() -> Iterator[Mark]:
    """Yields the entries that are recorded within, for a computation that is repeated under :func:`replayed`."""
    mark: Mark = []
    _marks.append(mark)
    try:
        yield mark
    finally:
        _marks.pop()


@contextmanager
def replayed(mark: Mark) -> Iterator[None]:
    """Within, the computation that has made the entries in ``mark`` runs again."""
    _replays.append(iter(list(mark)))
    try:
        yield
    finally:
        _replays.pop()


class PipelineCall(NamedTuple):
    """A pipeline's call in a session."""

    number: int
    """Of the call, in the session."""
    before: int
    """How many tensors had been recorded outside of pipelines."""
    shared: list[SharedTensor]
    """The tensors that all stages have recorded in it, in the same order on each stage."""

    def exchange_grads_of_losses(self, context: ParallelContext) -> None:
        """Send the gradients that losses have for recorded tensors to the stages that have recorded them.

        Every stage must call it, in a backward pass.
        """
        if not self.shared:
            return
        for each in self.shared:
            for entry in (entry for entries in each.entries for entry in entries):
                entry.grad_of_loss = None
        mine = [each.take_grad() for each in self.shared]
        exists = context.pipe_host.all_gather_object([grad is not None for grad in mine])
        for number, (each, grad) in enumerate(zip(self.shared, mine, strict=True)):
            for rank, form in enumerate(each.forms):
                if form is None or not exists[rank][number]:
                    continue
                received = torch.empty(form[0], dtype=form[1], device=context.device)
                if rank == context.pipe_rank:
                    assert grad is not None
                    received.copy_(grad)
                context.pipe.broadcast(received, rank)
                if context.pipe_rank == each.stage:
                    entries = each.entries[rank]
                    parts = received.split([len(entry.tensor) if entry.tensor.dim() else 1 for entry in entries])
                    for entry, part in zip(entries, parts, strict=True):
                        entry.grad_of_loss = part.reshape(entry.tensor.shape)


def begin_pipeline_call() -> PipelineCall:
    """Begin a call of a pipeline."""
    if _session is None:
        return PipelineCall(0, 0, [])
    _session.pipeline_calls += 1
    before = sum(entry.place is None for entry in _session.entries)
    shared = _session.shared[_session.pipeline_calls] = []
    return PipelineCall(_session.pipeline_calls, before, shared)


def link_pipeline_call(call: int, link: Tensor) -> None:
    """Let a loss that uses recorded tensors of a pipeline's call reach its backward through ``link``, an output."""
    if _session is not None:
        _session.links[call] = link


@contextmanager
def inside_pipeline(place: PipelinePlace) -> Iterator[None]:
    """Within, a chunk of a pipeline's layers computes."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before

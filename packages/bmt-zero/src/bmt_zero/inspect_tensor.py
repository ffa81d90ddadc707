"""Statistics of recorded tensors and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmt_comm import ParallelContext, check_agreement, context_or_none

from .recording import Entry, PipelinePlace, Session, SharedTensor, begin_recording, end_recording
from .statistics import WIDTH, as_statistics, describe, over_ranks, summary_of


class InspectTensorManager:
    """The context manager that :func:`inspect_tensor` returns."""

    def __enter__(self) -> InspectTensor:
        self._inspector = InspectTensor(begin_recording())
        return self._inspector

    def __exit__(self, error: object, *_: object) -> None:
        end_recording()
        if error is None:
            self._inspector.exchange_with_stages()


def inspect_tensor() -> InspectTensorManager:
    """A context manager within which :func:`record_tensor` records; it yields an :class:`InspectTensor`.

    Backward may run inside or later::

        with inspect_tensor() as inspector:
            loss = model(inputs)
            loss.backward()
        print(format_summary(inspector.get_summary()))

    With a pipeline every rank must enter and leave it: stages then exchange what they have recorded.

    Raises:
        RuntimeError: inside of another one.
    """
    return InspectTensorManager()


class InspectTensor:
    """The tensors that were recorded inside of :func:`inspect_tensor`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._elsewhere: list[_Label] = []  # the tensors that all stages of a pipeline have recorded
        self._parts: dict[_Label, tuple[int, Tensor]] | None = None
        """The tensors that stages have recorded inside of pipelines: the stage, and the part with this rank's samples.
        None: the context was not left yet."""

    def exchange_with_stages(self) -> None:
        """Get the tensors that other stages of a pipeline have recorded: the part with this rank's samples.

        Every rank must call it. Leaving the context calls it.
        """
        self._parts = {}
        context = context_or_none()
        if context is None:
            return
        mine = self._tensors()
        entries = {each.label: _of_stages(each, context) for each in mine if each.place is not None}
        parts = {label: [_in_order(part) for part in of_stages] for label, of_stages in entries.items()}
        facts = {
            label: [None if part is None else (part.shape, part.dtype) for part in of_stages]
            for label, of_stages in parts.items()
        }
        stages = context.pipe_host.all_gather_object(([each.label for each in mine], facts))
        self._elsewhere = [label for labels, _ in stages for label in labels]
        for stage, (_, recorded) in enumerate(stages):
            for label, forms in recorded.items():
                shared = SharedTensor(stage, forms, entries.get(label, ()))
                self._session.shared[label.key[1]].append(shared)
                for rank, form in enumerate(forms):
                    if form is None:
                        continue
                    part = parts[label][rank] if stage == context.pipe_rank else None
                    if part is None:
                        part = torch.empty(form[0], dtype=form[1], device=context.device)
                    context.pipe.broadcast(part, stage)
                    if rank == context.pipe_rank:
                        link = self._session.links.get(label.key[1])
                        with torch.enable_grad():
                            value = _OfPipeline.apply(shared, part, link is not None, _ANCHOR if link is None else link)
                        self._parts[label] = stage, value

    @property
    def summary(self) -> list[dict[str, Any]]:
        """A dictionary for each recorded tensor, in the order in which they were first recorded.

        ``name``, ``group``, ``index`` (of those with the same name and group), ``summary_name`` (as in
        :meth:`get_summary`), ``shape``, ``requires_grad``, ``tensor``, and ``inside_pipe`` (for a tensor that layers of
        a pipeline have recorded, a dictionary with their ``stage_id``; otherwise None). A loss may use the tensor,
        which has the values of this rank's samples. This also holds for a tensor that layers of a pipeline have
        recorded, on any stage; its backward raises if the pipeline has a tail.

        Raises:
            RuntimeError: a pipeline has recorded tensors, and the context of :func:`inspect_tensor` was not left yet.
        """
        values: dict[_Label, tuple[int | None, Tensor]] = {
            each.label: (None, each.value) for each in self._tensors() if each.place is None
        }
        if self._parts is not None:
            values.update(self._parts)
        elif any(entry.place is not None for entry in self._session.entries):
            raise RuntimeError(
                "stages of a pipeline exchange what they have recorded when the context of inspect_tensor() is left: "
                "use recorded tensors after it"
            )
        indices = _indices([*self._elsewhere, *values])
        return [
            {
                "name": label.name,
                "group": label.group,
                "index": indices[label],
                "summary_name": _summary_name(label, indices),
                "shape": tuple(value.shape),
                "requires_grad": value.requires_grad,
                "tensor": value,
                "inside_pipe": None if stage is None else {"stage_id": stage},
            }
            for label, (stage, value) in sorted(values.items(), key=lambda item: item[0].key)
        ]

    @property
    def _summary(self) -> list[dict[str, Any]]:
        """``name``, ``group`` and ``tensor`` of each tensor that this rank has recorded, one for each micro-batch."""
        return [{"name": each.name, "group": each.group, "tensor": each.tensor} for each in self._session.entries]

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> Tensor | None:
        """A recorded tensor, as in :attr:`summary`; None if there is no such one.

        Args:
            name, group: as given to :func:`record_tensor`.
            index: which one of several with the same name and group; by default the first.
        """
        for item in self.summary:
            if (item["name"], item["group"]) == (name, group) and index in (None, item["index"]):
                tensor: Tensor = item["tensor"]
                return tensor
        return None

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics of each recorded tensor over all ranks. Every rank must call it.

        Returns:
            The same on every rank: for each tensor a dictionary with ``name`` (the group, a number for those with the
            same name and group, and the name, joined by dots), ``shape``, ``max``, ``min``, ``mean``, ``std``,
            ``grad_max``, ``grad_min``, ``grad_mean`` and ``grad_std``. The tensors of different samples are
            concatenated along the first dimension. If ranks have other lengths in other dimensions, ``shape`` has
            those of the rank that reads it. A tensor that is the same on all tensor-parallel ranks counts once.
            Gradients are those of the loss without the loss scale of ``OptimManager``; None if there is none.

        Raises:
            RuntimeError: ranks have recorded different tensors.
        """
        tensors = self._tensors()
        outside = [each for each in tensors if each.place is None]
        inside = [each for each in tensors if each.place is not None]
        context = context_or_none()
        if context is not None:
            check_agreement(context.world, "the recorded tensors", [each.fact for each in outside])
            check_agreement(
                context.zero, "the tensors that a pipeline stage has recorded", [each.fact for each in inside]
            )
        everywhere, here = _describe(outside, context), _describe(inside, context)
        for theirs in (
            [here] if context is None or context.pipe_size == 1 else context.pipe_host.all_gather_object(here)
        ):
            everywhere.update(theirs)
        indices = _indices(everywhere)
        return [{"name": _summary_name(label, indices), **everywhere[label]} for label in indices]

    def tensors(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """The tensors that this rank has recorded: names as in :meth:`get_summary`, values, and gradients."""
        mine = self._tensors()
        indices = _indices([*self._elsewhere, *(each.label for each in mine)])
        return [(_summary_name(each.label, indices), each.value, each.grad) for each in mine]

    def _tensors(self) -> list[_Tensor]:
        """The tensors that this rank has recorded, with the micro-batches of a pipeline concatenated."""
        tensors: list[_Tensor] = []
        parts: dict[PipelinePlace, list[list[Entry]]] = {}
        counts: dict[PipelinePlace, int] = {}
        outside = 0
        for entry in self._session.entries:
            if entry.place is None:
                outside += 1
                label = _Label((outside, 0, 0, 0), entry.name, entry.group)
                tensors.append(_Tensor(label, None, entry.tensor, entry.grad))
                continue
            place = entry.place._replace(micro_batch=0)
            number = counts[entry.place] = counts.get(entry.place, -1) + 1
            same = parts.setdefault(place, [])
            if number == len(same):
                same.append([])
            same[number].append(entry)
        for place, numbered in parts.items():
            for number, entries in enumerate(numbered):
                value = _concatenated([each.tensor.detach() for each in entries])
                grads = [grad for each in entries if (grad := each.grad) is not None]
                grad = _concatenated(grads) if len(grads) == len(entries) else None
                label = _Label((place.before, place.call, place.place, number), entries[0].name, entries[0].group)
                tensors.append(_Tensor(label, place, value, grad, entries))
        return sorted(tensors, key=lambda each: each.label.key)


_ANCHOR = torch.empty(0, requires_grad=True, device="cpu")


class _OfPipeline(torch.autograd.Function):
    """(this rank's part, link) → the part, differentiable. Its gradient waits for the backward of the pipeline."""

    @staticmethod
    def forward(ctx: Any, shared: SharedTensor, part: Tensor, linked: bool, link: Tensor) -> Tensor:
        ctx.shared, ctx.linked, ctx.link = shared, linked, link.detach()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.linked:
            raise RuntimeError(
                "a loss uses a tensor that was recorded inside of a pipeline with a tail, whose backward is over: "
                "compute the loss in the tail, or let the pipeline return hidden states, without a tail and with "
                "return_hidden_states=True"
            )
        ctx.shared.add_grad(grad)
        return None, None, None, torch.zeros_like(ctx.link)


class _Label(NamedTuple):
    """Identifies a recorded tensor on all stages."""

    key: tuple[int, int, int, int]
    """The sort key, which is unique."""
    name: str
    group: str | None


@dataclass
class _Tensor:
    """A recorded tensor of this rank."""

    label: _Label
    place: PipelinePlace | None
    value: Tensor
    grad: Tensor | None
    entries: Sequence[Entry] = ()
    """Of the micro-batches of a pipeline."""

    @property
    def fact(self) -> str:
        """A description that is the same on ranks that compute the same layer."""
        where = "" if self.place is None else f" in {self.place}"
        return f"{self.label.group}.{self.label.name}{where}"


def _indices(labels: Iterable[_Label]) -> dict[_Label, int]:
    """For each label, how many tensors before it (in the order of the keys) have the same name and group."""
    counts: Counter[Any] = Counter()
    indices = {}
    for label in sorted(set(labels), key=lambda label: label.key):
        indices[label] = counts[label.name, label.group]
        counts[label.name, label.group] += 1
    return indices


def _summary_name(label: _Label, indices: dict[_Label, int]) -> str:
    name = f"{indices[label]}.{label.name}"
    return name if label.group is None else f"{label.group}.{name}"


def _describe(tensors: Sequence[_Tensor], context: ParallelContext | None) -> dict[_Label, dict[str, Any]]:
    """The shapes and statistics over all ranks. ``tensors`` are all inside of a pipeline, or all outside."""
    if not tensors:
        return {}
    numbers = torch.stack([describe(x).cpu() for each in tensors for x in (each.value, each.grad)])
    rows = torch.tensor([len(each.value) if each.value.dim() else 0 for each in tensors], device="cpu")
    if context is not None:
        samples = context.outer_tp_zero if tensors[0].place is None else context.tp_zero
        numbers = over_ranks(over_ranks(numbers.to(context.device), context.tp, replicas=True), samples)
        rows = rows.to(context.device)
        samples.all_reduce(rows)
    described = {}
    for each, pair, count in zip(tensors, numbers.view(-1, 2, WIDTH), rows.tolist(), strict=True):
        shape = (count, *each.value.shape[1:]) if each.value.dim() else ()
        values, grad = as_statistics(pair)
        described[each.label] = {"shape": shape, **summary_of(values, grad, None)}
    return described


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of several micro-batches, concatenated along the first dimension."""
    return torch.cat([part if part.dim() else part[None] for part in parts]) if len(parts) > 1 else parts[0]


def _of_stages(tensor: _Tensor, context: ParallelContext) -> list[list[Entry]]:
    """The micro-batches of each stage's samples, in their order."""
    assert all(entry.place is not None for entry in tensor.entries)
    ordered = sorted(tensor.entries, key=lambda entry: entry.place.micro_batch)  # type: ignore[union-attr]
    return [
        [entry for entry in ordered if entry.place.micro_batch % context.pipe_size == stage]  # type: ignore[union-attr]
        for stage in range(context.pipe_size)
    ]


def _in_order(entries: Sequence[Entry]) -> Tensor | None:
    """The tensors of one stage's micro-batches, concatenated along the first dimension; None: there are none."""
    parts = [entry.tensor.detach() for entry in entries]
    return torch.cat([part if part.dim() else part[None] for part in parts]).contiguous() if parts else None

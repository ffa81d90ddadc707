"""Statistics of tensors that a forward has recorded, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bmt_comm import ParallelContext, check_agreement, current_context, is_initialized

from .recording import Entry, PipelinePlace, Session, begin_recording, end_recording
from .statistics import WIDTH, Statistics, as_statistics, describe, over_ranks


class InspectTensorManager:
    """The context manager that :func:`inspect_tensor` returns."""

    _inspector: InspectTensor

    def __enter__(self) -> InspectTensor:
        self._inspector = InspectTensor(begin_recording())
        return self._inspector

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_recording()


def inspect_tensor() -> InspectTensorManager:
    """A context manager within which :func:`record_tensor` records; it yields an :class:`InspectTensor`.

    Gradients are seen whether backward runs inside or later::

        with inspect_tensor() as inspector:
            loss = model(inputs)
            loss.backward()
        print(format_summary(inspector.get_summary()))

    Raises:
        RuntimeError: inside of another one.
    """
    return InspectTensorManager()


class InspectTensor:
    """The tensors that were recorded inside of :func:`inspect_tensor`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def summary(self) -> list[dict[str, Any]]:
        """A dictionary for each tensor that this rank has recorded, in the order in which they were first recorded.

        ``name``, ``group``, ``index`` (of those with the same name and group), ``summary_name`` (as in
        :meth:`get_summary`), ``shape``, ``requires_grad``, ``tensor``. A loss may use the tensor, except if a pipeline
        has recorded it: that one has the values of all micro-batches that this stage has computed, and its
        backward raises.
        """
        return [
            {
                "name": tensor.name,
                "group": tensor.group,
                "index": index,
                "summary_name": _summary_name(tensor.name, tensor.group, index),
                "shape": tuple(tensor.value.shape),
                "requires_grad": tensor.value.requires_grad,
                "tensor": tensor.value,
                "inside_pipe": None if tensor.place is None else {"stage_id": current_context().pipe_rank},
            }
            for tensor, index in _numbered(self._tensors())
        ]

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> Tensor | None:
        """A recorded tensor of this rank; None if there is no such one.

        Args:
            name, group: as given to :func:`record_tensor`.
            index: which one of several with the same name and group; by default the first.
        """
        for item in self.summary:
            if (item["name"], item["group"], item["index"]) == (name, group, index or 0):
                tensor: Tensor = item["tensor"]
                return tensor
        return None

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics of each recorded tensor over all ranks. Every rank must call it.

        Returns:
            The same on every rank: for each tensor a dictionary with ``name`` (the group, a number for those with the
            same name and group, and the name, joined by dots), ``shape``, ``max``, ``min``, ``mean``, ``std``,
            ``grad_max``, ``grad_min``, ``grad_mean`` and ``grad_std``. The tensors of different samples are
            joined along the first dimension; a tensor that is the same on all tensor-parallel ranks counts once.
            Gradients are those of the loss without the loss scale of ``OptimManager``, None where there is none.

        Raises:
            RuntimeError: ranks have recorded different tensors.
        """
        tensors = self._tensors()
        if not is_initialized():
            return [each.item(index) for each, index in _numbered(_describe(tensors, None))]
        context = current_context()
        facts = [f"{each.group}.{each.name}" for each in tensors if each.place is None]
        check_agreement(context.world, "the recorded tensors", facts)
        facts = [f"{each.group}.{each.name} in {each.place}" for each in tensors if each.place is not None]
        check_agreement(context.zero, "the tensors that a pipeline stage has recorded", facts)
        described = _describe(tensors, context)
        if context.pipe_size > 1:
            mine = [each for each in described if each.place is not None]
            described = [each for each in described if each.place is None]
            for theirs in context.pipe_host.all_gather_object(mine):
                described += theirs
            described.sort(key=lambda each: each.key)
        return [each.item(index) for each, index in _numbered(described)]

    def tensors(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """The tensors that this rank has recorded: names as in :meth:`get_summary`, values, and gradients.

        Every rank must call it: stages number their tensors together.
        """
        mine = self._tensors()
        named = [(each.name, each.group, each.key) for each in mine]
        stages = [named]
        if is_initialized() and current_context().pipe_size > 1:
            stages = current_context().pipe_host.all_gather_object(named)
        together = sorted({entry for stage in stages for entry in stage}, key=lambda entry: entry[2])
        names: dict[Any, str] = {}
        counts: dict[Any, int] = {}
        for name, group, key in together:
            index = counts[name, group] = counts.get((name, group), -1) + 1
            names[key] = _summary_name(name, group, index)
        return [(names[each.key], each.value, each.grad) for each in mine]

    def _tensors(self) -> list[_Tensor]:
        """What was recorded, with the micro-batches of a pipeline together."""
        tensors: list[_Tensor] = []
        parts: dict[PipelinePlace, list[list[Entry]]] = {}
        counts: dict[PipelinePlace, int] = {}
        outside = 0
        for entry in self._session.entries:
            if entry.place is None:
                outside += 1
                tensors.append(_Tensor(entry.name, entry.group, (outside, 0, 0, 0), None, entry.tensor, entry.grad))
                continue
            place = entry.place._replace(micro_batch=0)
            number = counts[entry.place] = counts.get(entry.place, -1) + 1
            same = parts.setdefault(place, [])
            if number == len(same):
                same.append([])
            same[number].append(entry)
        for place, numbered in parts.items():
            for number, entries in enumerate(numbered):
                values = _joined([each.tensor.detach() for each in entries])
                value = _OnlyToLookAt.apply(values, torch.empty(0, requires_grad=True))
                grads = [grad for each in entries if (grad := each.grad) is not None]
                grad = _joined(grads) if len(grads) == len(entries) else None
                key = (place.before, place.call, place.place, number)
                tensors.append(_Tensor(entries[0].name, entries[0].group, key, place, value, grad))
        return sorted(tensors, key=lambda each: each.key)


class _OnlyToLookAt(torch.autograd.Function):
    """The identity; backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        raise RuntimeError(
            "a loss uses a tensor that was recorded inside of a pipeline, where no gradient can reach it: let the "
            "pipeline return it, with return_hidden_states=True"
        )


@dataclass
class _Tensor:
    """A recorded tensor of this rank."""

    name: str
    group: str | None
    key: tuple[int, int, int, int]
    """By which recorded tensors of all stages are in order."""
    place: PipelinePlace | None
    value: Tensor
    grad: Tensor | None


@dataclass
class _Described:
    """A recorded tensor of all ranks that compute the same layer."""

    name: str
    group: str | None
    key: tuple[int, int, int, int]
    place: PipelinePlace | None
    shape: tuple[int, ...]
    values: Statistics | None
    grad: Statistics | None

    def item(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"name": _summary_name(self.name, self.group, index), "shape": self.shape}
        for prefix, found in (("", self.values), ("grad_", self.grad)):
            for key in ("max", "min", "mean", "std"):
                item[prefix + key] = None if found is None else getattr(found, key)
        return item


def _summary_name(name: str, group: str | None, index: int) -> str:
    return f"{index}.{name}" if group is None else f"{group}.{index}.{name}"


def _numbered(tensors: Sequence[Any]) -> list[tuple[Any, int]]:
    """Each with how many before it have the same name and group."""
    counts: dict[tuple[str, str | None], int] = {}
    numbered = []
    for each in tensors:
        kind = (each.name, each.group)
        counts[kind] = counts.get(kind, -1) + 1
        numbered.append((each, counts[kind]))
    return numbered


def _describe(tensors: Sequence[_Tensor], context: ParallelContext | None) -> list[_Described]:
    described = []
    for inside in (False, True):
        chosen = [each for each in tensors if (each.place is not None) == inside]
        if not chosen:
            continue
        numbers = torch.stack([describe(x).cpu() for each in chosen for x in (each.value, each.grad)])
        rows = torch.tensor([len(each.value) if each.value.dim() else 0 for each in chosen])
        if context is not None:
            samples = context.tp_zero if inside else context.outer_tp_zero
            numbers = over_ranks(over_ranks(numbers.to(context.device), context.tp, replicas=True), samples)
            rows = rows.to(context.device)
            samples.all_reduce(rows)
        for each, pair, count in zip(chosen, numbers.view(-1, 2, WIDTH), rows.tolist(), strict=True):
            values, grad = as_statistics(pair)
            shape = (count, *each.value.shape[1:]) if each.value.dim() else ()
            described.append(_Described(each.name, each.group, each.key, each.place, shape, values, grad))
    return sorted(described, key=lambda each: each.key)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of several micro-batches, along the first dimension."""
    return torch.cat([part if part.dim() else part[None] for part in parts]) if len(parts) > 1 else parts[0]

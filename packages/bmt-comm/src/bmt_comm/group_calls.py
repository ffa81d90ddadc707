"""What one call of ``torch.distributed`` does in a process group "bmt"; see [Note: the process group "bmt"]."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .memory_ranges import (
    addresses,
    as_in_memory,
    copy_between,
    is_as_in_memory,
    overlap,
    overlap_in_part,
    vector,
    without_the_inner,
)
from .plain import is_dense
from .progress import CollectiveWork, HostWork, Progress
from .shared_memory import MessageWork
from .work import Pending, Work

_NO_LIMIT = datetime.timedelta(0)
_profiler_enabled = torch.autograd._profiler_enabled


class GroupMessageWork(HostWork):
    """A single message in flight. A wait without a time-out may take ``seconds``."""

    def __init__(self, message: MessageWork, seconds: float) -> None:
        super().__init__()
        self._message, self._seconds = message, seconds

    def wait(self, timeout: datetime.timedelta = _NO_LIMIT) -> bool:
        self._message.wait(timeout.total_seconds() if timeout else self._seconds)
        return True

    def is_completed(self) -> bool:
        return self._message.is_completed()

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> Exception | None:
        return self._message.error

    def _source_rank(self) -> int:
        return -1 if self._message.peer is None else self._message.peer

    source_rank = _source_rank


class CallingGroup(Protocol):
    """The process group of a call, as far as the call uses it."""

    own_rank: int
    progress: Progress
    done: CollectiveWork

    def begin(self, kind: str, detail: object, flat: Tensor, method: str, arguments: tuple[Any, ...]) -> Work: ...

    def notify(self, name: str) -> None: ...


class GroupCall:
    """The collectives and copies of one call of torch.distributed.

    Attributes:
        copies: (target, source) pairs to copy after the collectives.
        own_copies: (target, source) pairs to copy before them, because they may overwrite the sources.
    """

    __slots__ = ("_group", "_in_inference", "_opts", "_outputs", "_steps", "copies", "own_copies")

    def __init__(self, group: CallingGroup, opts: Any, outputs: list[Tensor]) -> None:
        self._group, self._opts, self._outputs = group, opts, outputs
        self._steps: list[tuple[str, object, Tensor, str, tuple[Any, ...]]] = []
        self._in_inference = False
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.own_copies: list[tuple[Tensor, Tensor]] = []

    def ins(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors that are read, as vectors.

        If the call has several collectives, one for each of ``outputs``, and one would write what another one reads,
        these are copies.
        """
        flats = [vector(as_in_memory(tensor.data)) for tensor in tensors]
        if len(outputs) > 1:
            pairs = zip(map(addresses, tensors), map(addresses, outputs), strict=True)
            if overlap(each for pair in pairs for each in without_the_inner(*pair)):
                return [flat.clone() for flat in flats]
        return flats

    def outs(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors that are written, as vectors."""
        return [self._written(tensor) for tensor in tensors]

    def in_and_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that are read and written, as vectors. If they share memory, these are copies of the values now."""
        alone = len(tensors) == 1 or not overlap(map(addresses, tensors))
        return [self._written(tensor, read=True, alone=alone) for tensor in tensors]

    def _written(self, tensor: Tensor, read: bool = False, alone: bool = True) -> Tensor:
        # An alias: writing must not increment the version of a tensor that autograd has saved.
        data = tensor.data
        self._in_inference |= tensor.is_inference()
        if alone and is_as_in_memory(data):
            return vector(data)
        try:
            _check_writable(data)
        except ValueError:
            self._group.notify("a collective that cannot write to its tensor, which raises ValueError")
            raise
        with torch.inference_mode(False):  # it may be written outside of inference mode later
            if read:
                dense = as_in_memory(data) if alone else as_in_memory(data).clone()
            else:
                dense = torch.empty(data.shape, dtype=data.dtype, device="cpu")
        self.copies.append((data, dense))
        return vector(dense)

    def add(self, kind: str, detail: object, flat: Tensor, method: str, *arguments: Any) -> None:
        """Add a collective: what ranks compare of it, and the method of :class:`SharedMemoryCollectives` to call."""
        self._steps.append((kind, detail, flat, method, arguments))

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor) -> None:
        target = chunks[self._group.own_rank]
        if target.data_ptr() != mine.data_ptr():
            self.own_copies.append((target, mine))
        self.add("all_gather", "", target, "all_gather", chunks, target)

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str | None, full: Tensor | None = None) -> None:
        """``full``: the tensor that the chunks are equal parts of, if there is one."""
        detail: object = op
        named = out
        if full is None and any(chunk.numel() != out.numel() for chunk in chunks):  # ``out`` differs between ranks
            detail, named = f"{op} in parts of {[chunk.numel() for chunk in chunks]}", out[:0]
        may_overlap = full is None or overlap_in_part(out, full)
        if may_overlap and any(overlap_in_part(out, chunk) for chunk in chunks):  # they are read while out is written
            chunks = [chunk.clone() for chunk in chunks]
        self.add("reduce_scatter", detail, named, "reduce_scatter", out, chunks, op)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], joined: Sequence[Tensor] | None = None
    ) -> None:
        """``joined``: the tensor that the outputs are parts of and that of the inputs, if there are such."""
        me = self._group.own_rank
        if outputs[me].nbytes != inputs[me].nbytes:
            self._group.notify("an all_to_all whose own part does not fit, which raises ValueError")
            raise ValueError(
                f"all_to_all: rank {me} sends {inputs[me].nbytes} bytes to rank {me}, whose output takes "
                f"{outputs[me].nbytes}"
            )
        if overlap(map(addresses, joined or (*outputs, *inputs))):
            inputs = [chunk.clone() for chunk in inputs]
        self.own_copies.append((outputs[me].view(torch.uint8), inputs[me].view(torch.uint8)))
        nothing = inputs[0][:0]  # lengths differ between ranks
        self.add("all_to_all", "", nothing, "all_to_all", outputs, inputs)

    def post(self) -> CollectiveWork:
        if _profiler_enabled() and self._steps:
            kind = self._steps[0][0].partition(" ")[0]
            with torch.profiler.record_function(f"bmt:{kind}"):
                return self._post()
        return self._post()

    def _post(self) -> CollectiveWork:
        group, opts = self._group, self._opts
        progress, limit = group.progress, opts.timeout
        seconds = limit.total_seconds() if limit.days >= 0 else 0.0
        if not getattr(opts, "asyncOp", True) and not self._in_inference:
            progress.run(self._begin, self._finish, seconds)
            return group.done
        work = CollectiveWork(progress, self._begin, self._outputs, self._finish, self._in_inference)
        work.limit = seconds
        return progress.leave(progress.post(work))

    def _begin(self) -> Work:
        if self.own_copies:
            # Only the copies: the collectives keep buffers, which must not be inference tensors.
            with torch.inference_mode() if self._in_inference else contextlib.nullcontext():
                for target, source in self.own_copies:
                    copy_between(target, source)
        if len(self._steps) == 1:
            return self._group.begin(*self._steps[0])
        works = [self._group.begin(*step) for step in self._steps]
        return Pending(works[::-1], None, None)  # Pending waits for the last work first

    def _finish(self) -> None:
        for target, source in self.copies:
            copy_between(target, source)


def _check_writable(tensor: Tensor) -> None:
    if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"a collective cannot write to a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            "whose elements share memory; pass tensor.contiguous()"
        )


class CopyingWork(HostWork):
    """A collective of torch's process group that writes copies of its outputs, and copies them back after the wait."""

    def __init__(self, work: dist.Work, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._pairs, self._lock = work, pairs, threading.Lock()
        self._outputs = [tensor for tensor, _ in pairs]

    def _copy_back(self) -> None:
        with self._lock:  # a callback of the future may do it in another thread
            while self._pairs:
                tensor, copy = self._pairs.pop()
                with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
                    copy_between(tensor.data, copy)

    def wait(self, timeout: datetime.timedelta = _NO_LIMIT) -> bool:
        self._work.wait(timeout)
        self._copy_back()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        def finish(future: torch.futures.Future[Any]) -> list[Tensor]:
            future.value()  # raises the error of the collective
            self._copy_back()
            return self._outputs

        return self._work.get_future().then(finish)

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._work.is_success():
            self._copy_back()
        return True

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._outputs


def call_with_contiguous(method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a collective of torch's process group, which reads and writes strided tensors as if they were contiguous.

    It gets copies of CPU tensors that are not contiguous. Those in the first list or tensor of ``arguments``, which are
    its outputs, get the results after the wait.

    Raises:
        ValueError: elements of an output share memory.
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def contiguous(leaf: Any) -> Any:
        if not is_dense(leaf) or is_as_in_memory(leaf):
            return leaf
        return copies.setdefault(id(leaf), (leaf, as_in_memory(leaf.data)))[1]

    with torch.inference_mode(False):  # copies may be written outside of inference mode later
        given = tree_map(contiguous, list(arguments))
    if not copies:
        return method(*arguments)
    outputs = tree_leaves(next(each for each in arguments if isinstance(each, (Tensor, list))))
    written = [copies[id(each)] for each in outputs if id(each) in copies]
    for tensor, _ in written:
        _check_writable(tensor)
    return CopyingWork(method(*given), written)

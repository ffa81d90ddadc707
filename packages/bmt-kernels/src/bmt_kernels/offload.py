"""Work on tensors in other memory, chunk by chunk, overlapped with the H2D and D2H copies of other chunks.

[Note: a pipeline of chunks]
    An optimizer whose state is in host memory works either on the host or on the device. On the host, it needs D2H
    copies of gradients and H2D copies of parameters. On the device, it needs H2D and D2H copies of the state. The
    pipeline treats both alike. It takes *rows* of tensors; the tensors that are not where the work is done are
    *remote*, the others *local*. Rows are split into *chunks*. The remote tensors of a chunk share one *slot*, a
    staging buffer of fixed size where the work is done. Each chunk goes through three queues:

        fetch   remote tensors into the slot          (a separate CUDA stream)
        work    on the slot, and on local tensors     (the host, or the caller's CUDA stream)
        store   the slot into remote tensors          (a separate CUDA stream)

    With three slots, one chunk is fetched and another stored while a third is worked on. Events mark when a slot is
    filled, and when it may be filled again. A queue waits for events of other queues. The host waits only for the
    chunks that it works on itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: for fast vector instructions and copies
_STEP = 64  # elements: ranges that begin at multiples of it are aligned in every dtype


class OffloadRow(NamedTuple):
    """Tensors with corresponding elements: 1-D, contiguous, of the same length; dtypes may differ.

    Each is on the device or on the host. No tensor that is written may share memory with another one of the
    same run.
    """

    read: tuple[Tensor, ...] = ()
    """Tensors that the work only reads."""
    update: tuple[Tensor, ...] = ()
    """Tensors that it reads and writes."""
    write: tuple[Tensor, ...] = ()
    """Tensors of which it writes every element, without reading."""


Work = Callable[[list[OffloadRow]], None]
"""Works on one chunk: ranges of rows, in which all tensors are local."""


class OffloadPipeline:
    """Runs work on rows of tensors, some of which are in the memory of the other side (host or device).

    Staging buffers (page-locked if they are on the host) are made in the first run that needs them, and
    kept: ``slots`` times ``chunk_bytes``. Local tensors are not copied. If all tensors are local (parameters
    on the CPU, say), there are no copies and no buffers.

    Args:
        device: the device that tensors may be on, besides the CPU.
        compute: where the work is done. ``"host"``: :meth:`run` waits for the D2H copies, chunk by chunk, and
            returns when all work is done. The H2D copies of the results may still be running; the caller's
            stream waits for them. ``"device"``: the work is launched on the caller's stream, and :meth:`run`
            does not wait. Call :meth:`synchronize` before reading the results in host memory.
        chunk_bytes: size of a staging buffer.
        slots: number of staging buffers; with 3, fetching, work and storing all overlap.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        compute: Literal["host", "device"] = "host",
        chunk_bytes: int = 16 << 20,
        slots: int = 3,
    ) -> None:
        if compute not in ("host", "device"):
            raise ValueError(f"compute={compute!r} must be 'host' or 'device'")
        if chunk_bytes < 4096:
            raise ValueError(f"chunk_bytes={chunk_bytes!r} must be at least 4096")
        if slots < 1:
            raise ValueError(f"slots={slots!r} must be at least 1")
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.compute = compute
        self.chunk_bytes = chunk_bytes // _ALIGNMENT * _ALIGNMENT
        self.slots = slots
        self._buffers: list[Tensor] = []
        self._free: list[Any] = [None] * slots  # per slot: the event after its last chunk was stored
        self._stored: Any = None  # the event after the results of the last run were stored
        self._streams: tuple[Queue, Queue] | None = None

    @torch.no_grad()
    def run(self, batches: Iterable[tuple[Sequence[OffloadRow], Work]]) -> None:
        """Run each batch's work on its rows. No chunk has rows of two batches.

        Fetching waits for everything that is queued on the caller's stream, and for the stores of the last run.

        Raises:
            TypeError, ValueError: a row is not as :class:`OffloadRow` says; nothing has been changed.
        """
        checked = [([self._checked(row) for row in rows], work) for rows, work in batches]
        has_remote = any(row.sizes for rows, _ in checked for row in rows)
        if has_remote and not self._buffers:
            self._buffers = [self._new_buffer() for _ in range(self.slots)]
        fetch, store, worker, caller = self._queues()
        start = caller.record()
        fetch.wait(start)
        store.wait(start)
        fetch.wait(self._stored)
        ahead: deque[_Staged] = deque()
        slot = 0
        try:
            for rows, work in checked:
                for chunk in plan_chunks([(row.length, row.sizes) for row in rows], self.chunk_bytes):
                    ranges = [(rows[each.row].row, each) for each in chunk]
                    staged = _Staged(ranges, self._buffers[slot] if has_remote else None, self._is_remote, work, slot)
                    if not staged.fetches and not staged.stores:
                        worker.run(lambda staged=staged: staged.work(staged.rows))  # type: ignore[misc]
                        continue
                    slot = (slot + 1) % self.slots
                    fetch.wait(self._free[staged.slot])
                    for pair in staged.fetches:
                        fetch.run(lambda pair=pair: self._copy(*pair))  # type: ignore[misc]
                    staged.ready = fetch.record()
                    ahead.append(staged)
                    if len(ahead) == self.slots:
                        self._finish(ahead.popleft(), worker, store)
            while ahead:
                self._finish(ahead.popleft(), worker, store)
        finally:
            self._stored = store.record()
            if self.compute == "host":
                caller.wait(self._stored)

    def synchronize(self) -> None:
        """Make the host wait until all stores are done."""
        _Host().wait(self._stored)
        self._stored = None

    def _finish(self, staged: _Staged, worker: Queue, store: Queue) -> None:
        # The slot is filled. Its last chunk was stored before that, so the work may also write to it.
        worker.wait(staged.ready)
        worker.run(lambda: staged.work(staged.rows))
        store.wait(worker.record())
        for pair in staged.stores:
            store.run(lambda pair=pair: self._copy(*pair))  # type: ignore[misc]
        self._free[staged.slot] = store.record()

    # --- rows ---------------------------------------------------------------------------------------

    def _checked(self, row: OffloadRow) -> _CheckedRow:
        length: int | None = None
        sizes = []
        for name, field in zip(row._fields, row):
            for i, tensor in enumerate(field):
                if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                    raise TypeError(f"{name}[{i}] of a row is a {type(tensor).__name__}; it must be a dense tensor")
                if tensor.dim() != 1 or not tensor.is_contiguous():
                    raise ValueError(
                        f"{name}[{i}] of a row has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must "
                        "be 1-D and contiguous (use .view(-1))"
                    )
                device = tensor.device
                if device.type != "cpu" and device != self.device:
                    raise ValueError(f"{name}[{i}] of a row is on {device}; it must be on {self.device} or the CPU")
                if length is None:
                    length = tensor.numel()
                elif tensor.numel() != length:
                    raise ValueError(f"{name}[{i}] of a row has {tensor.numel()} elements and the row has {length}")
                if self._is_remote(tensor):
                    sizes.append(tensor.element_size())
        least = _STEP * sum(sizes)
        if least > self.chunk_bytes:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must be at least {least} for a row of so many tensors")
        return _CheckedRow(row, length or 0, sizes)

    def _is_remote(self, tensor: Tensor) -> bool:
        """Whether the tensor is not where the work is done."""
        return tensor.device.type != "cpu" if self.compute == "host" else tensor.device != self.device

    # --- places -------------------------------------------------------------------------------------

    def _new_buffer(self) -> Tensor:
        if self.compute == "host":
            pinned = self.device.type == "cuda"
            return torch.empty(self.chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8, device=self.device)
        for queue in self._queues()[:2]:
            if isinstance(queue, _Stream):
                buffer.record_stream(queue.stream)  # its memory is not reused before the streams are done with it
        return buffer

    def _queues(self) -> tuple[Queue, Queue, Queue, Queue]:
        """The queues of fetching, storing and the work, and that of the caller."""
        if self.device.type != "cuda":
            return _Host(), _Host(), _Host(), _Host()
        if self._streams is None:
            self._streams = _Stream(torch.cuda.Stream(self.device)), _Stream(torch.cuda.Stream(self.device))
        caller = _Stream(torch.cuda.current_stream(self.device))
        return *self._streams, _Host() if self.compute == "host" else caller, caller

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=self.device.type == "cuda")


class RowRange(NamedTuple):
    """A range of a row's elements, and the offsets of its remote tensors in the slot, in bytes."""

    row: int
    start: int
    stop: int
    offsets: tuple[int, ...]


class _CheckedRow(NamedTuple):
    row: OffloadRow
    length: int
    sizes: list[int]  # bytes per element of each remote tensor


def plan_chunks(rows: Sequence[tuple[int, Sequence[int]]], capacity: int) -> Iterator[list[RowRange]]:
    """Split rows into chunks whose remote tensors fit in a slot.

    Args:
        rows: of each row the number of elements, and the bytes per element of each remote tensor. Rows without
            remote tensors take no room and are not split.
        capacity: bytes in a slot, enough for 64 elements of every remote tensor of a row.

    Yields:
        chunks, in the order of the rows. Tensors start at multiples of 64 bytes in the slot, and rows are split
        at multiples of 64 elements.
    """
    chunk: list[RowRange] = []
    used = 0
    for index, (length, sizes) in enumerate(rows):
        start = 0
        while start < length:
            count = _fitting(length - start, sizes, capacity - used)
            if count == 0:
                assert chunk, f"{capacity} bytes do not hold {_STEP} elements of {sizes} bytes each"
                yield chunk
                chunk, used = [], 0
                continue
            offsets = []
            for size in sizes:
                offsets.append(used)
                used += _aligned(count * size)
            chunk.append(RowRange(index, start, start + count, tuple(offsets)))
            start += count
    if chunk:
        yield chunk


def _fitting(length: int, sizes: Sequence[int], room: int) -> int:
    """How many of ``length`` elements fit: all, or a multiple of the step."""
    if sum(_aligned(length * size) for size in sizes) <= room:
        return length
    return room // sum(sizes) // _STEP * _STEP


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _Staged:
    """A chunk with its slot: the rows that the work sees, and the copies before and after it."""

    def __init__(
        self,
        ranges: list[tuple[OffloadRow, RowRange]],
        buffer: Tensor | None,
        is_remote: Callable[[Tensor], bool],
        work: Work,
        slot: int,
    ) -> None:
        self.work, self.slot = work, slot
        self.ready: Any = None
        self.rows: list[OffloadRow] = []
        self.fetches: list[tuple[Tensor, Tensor]] = []  # (target, source)
        self.stores: list[tuple[Tensor, Tensor]] = []
        for row, row_range in ranges:
            if not row_range.offsets:
                self.rows.append(row)
                continue
            offsets = iter(row_range.offsets)
            fields: list[tuple[Tensor, ...]] = []
            for name, field in zip(row._fields, row):
                local = []
                for tensor in field:
                    part = tensor[row_range.start : row_range.stop]
                    if not is_remote(tensor):
                        local.append(part)
                        continue
                    assert buffer is not None
                    offset = next(offsets)
                    staging = buffer[offset : offset + part.numel() * part.element_size()].view(part.dtype)
                    if name != "write":
                        self.fetches.append((staging, part))
                    if name != "read":
                        self.stores.append((part, staging))
                    local.append(staging)
                fields.append(tuple(local))
            self.rows.append(OffloadRow(*fields))


class _Host:
    """The host, which runs functions at once."""

    def run(self, function: Callable[[], None]) -> None:
        function()

    def record(self) -> None:
        """An event after everything so far; ``None``: everything has run already."""
        return

    def wait(self, event: Any) -> None:
        """Run nothing more before ``event``."""
        if event is not None:
            event.synchronize()


class _Stream:
    """A CUDA stream, which runs functions later, in order."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, function: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            function()

    def record(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            self.stream.wait_event(event)


Queue = _Host | _Stream


def pinned_zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 1-D tensor of zeros in page-locked host memory, for H2D and D2H copies by the GPU itself.

    PyTorch's own ``pin_memory=True`` takes the next power of two of bytes, up to twice what is needed; this
    takes what is needed, in whole pages. The memory is released with the last view of it.

    Raises:
        RuntimeError: CUDA cannot lock the memory.
    """
    nbytes = numel * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # Shared memory: after a fork, a write would copy a private page, and CUDA would go on using the other copy.
    region = mmap.mmap(-1, nbytes)
    owner = (ctypes.c_char * nbytes).from_buffer(region)
    tensor = torch.frombuffer(owner, dtype=dtype)  # keeps the owner
    runtime = _cuda_runtime()
    portable = 1  # page-locked for every device
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, portable))
    if error:
        if torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda").neg_()  # CUDA reports the error again after the next launch
        raise RuntimeError(
            f"CUDA cannot lock {nbytes} bytes of host memory (error {error}); is there as much, and may it be locked?"
        )
    # A finalizer of the region would run after it is unmapped. This one keeps the region until it has run.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    weakref.finalize(owner, _release, runtime, tensor.data_ptr(), device, region).atexit = False
    return tensor


def _release(runtime: Any, address: int, device: int | None, region: mmap.mmap) -> None:
    for other in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(other):  # otherwise there is no copy, and waiting would create a context
            torch.cuda.synchronize(other)  # a copy may still be under way
    # Any thread may come here, and in a new one the current device is the first, on which there may be no context yet.
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        runtime.cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()

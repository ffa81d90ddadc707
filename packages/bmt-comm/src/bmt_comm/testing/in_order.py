"""A transport for CPU tensors with NCCL's rules: programs that hang or race on GPUs fail here, at once.

Inside :func:`nccl_rules`, communicators on process groups of the backend ``"in_order"`` obey the rules of
:mod:`bmt_comm.testing.rules`:

- The first message from one rank of a process group to another blocks both until both are there, and the group's first
  collective or batch until all are. With ``eager`` process groups are made by all ranks of the job, their first
  collective does not block, and single messages are in the same order as everything else; else each pair of ranks has a
  connection for those.
- Results arrive in ``wait`` and not before. Until then the buffers contain NaN (all bits set). It is an error if the
  caller has written to a buffer of a send or of a result in the meantime.
- Ranks that wait for each other get a :class:`WaitCycleError`, which says where each of them waits.

Communicators on gloo keep gloo's rules (no order, and sends that never wait). The referee gets their operations, too,
so that it detects cycles that go through both. It does not get calls of ``torch.distributed`` that bypass
:class:`~bmt_comm.Communicator`; these have gloo's rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmt_comm.combine import combine
from bmt_comm.operation import Operation as Begun
from bmt_comm.testing.protocol import receive, send
from bmt_comm.testing.rules import MESSAGES, Message, Operation
from bmt_comm.transport import transports
from bmt_comm.work import Work

BACKEND = "in_order"
_LONGEST_DELAY = 5e-4  # seconds that the result of an operation is held back at most
_delays = random.Random(0)  # not the global generator, which belongs to the tests


class WaitCycleError(RuntimeError):
    """Ranks wait for each other, or have posted operations that do not fit together."""


@contextlib.contextmanager
def nccl_rules(address: str, rank: int, eager: bool) -> Iterator[None]:
    """Within, communicators on process groups of the backend ``"in_order"`` have NCCL's rules; see above.

    Args:
        address: of the job's :class:`~bmt_comm.testing.referee.Referee`.
        rank: of this process.
        eager: as if ``init_process_group`` had been given a ``device_id``.
    """
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, dist.ProcessGroupGloo, devices=["cpu"])
    connection = _Connection(address, rank)
    new_group, split_group = dist.new_group, dist.split_group

    def together(ranks: object) -> None:
        everyone = tuple(range(dist.get_world_size()))
        connection.collective(("making groups",), everyone, "split", (str(ranks),), b"").wait()

    def new_group_of_all(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        # Splitting NCCL's communicators takes all ranks, including those outside of the new group.
        if eager and (backend or dist.get_backend()) == BACKEND:
            together(ranks)
        return new_group(ranks, timeout, backend, **options)

    def split_group_by_gloo(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, **options: Any
    ) -> dist.ProcessGroup | None:
        # PyTorch refuses to split a group that is not bound to a device.
        assert eager
        assert parent_pg is None
        together(split_ranks)
        groups = [new_group(ranks, timeout, BACKEND) for ranks in split_ranks]
        return next((group for group in groups if isinstance(group, dist.ProcessGroup)), None)

    transports[BACKEND] = lambda group: _Transport(group, connection, in_order=True, eager=eager)
    transports["gloo"] = lambda group: _Transport(group, connection, in_order=False, eager=False)
    dist.new_group = new_group_of_all  # type: ignore[assignment]
    dist.split_group = split_group_by_gloo  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group, dist.split_group = new_group, split_group
        del transports[BACKEND], transports["gloo"]
        connection.close()


class _Connection:
    """This rank's connection to the referee."""

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self.connected: set[Any] = set()  # communicators whose ranks have met
        self.times: dict[Any, Iterator[int]] = {}  # counts of operations without order, by group and kind
        self._connection = Client(address, "AF_UNIX")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._ended: dict[int, list[bytes]] = {}
        self._failure = ""
        self._news = threading.Condition()
        send(self._connection, rank)
        self._thread = threading.Thread(target=self._listen, name="bmt-referee-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._failure = self._failure or "the test has ended"
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that reads
        self._thread.join()
        self._connection.close()

    def post(self, operation: Operation) -> None:
        if self._failure:
            raise WaitCycleError(self._failure)
        with self._lock:
            send(self._connection, ("post", operation))

    def operation(self, key: Any, ranks: tuple[int, ...], kind: str, **details: Any) -> Operation:
        aside = threading.current_thread() is not threading.main_thread()
        return Operation(self.rank, next(self._numbers), key, ranks, kind, aside=aside, **details)

    def collective(
        self, key: Any, ranks: tuple[int, ...], kind: str, form: tuple[object, ...], payload: bytes
    ) -> _Posted:
        return _Posted(self, self.operation(key, ranks, kind, form=form, payload=payload))

    def result(self, number: int, block: bool) -> list[bytes] | None:
        """The result of an operation, once. If it has not ended: waits with ``block``, else returns None."""
        with self._news:
            if number in self._ended:
                return self._ended.pop(number)
        if not block:
            return None
        if threading.current_thread() is threading.main_thread():
            with self._lock:
                send(self._connection, ("wait", number, _place()))
        with self._news:
            self._news.wait_for(lambda: number in self._ended or self._failure)
            if number not in self._ended:
                raise WaitCycleError(self._failure)
            return self._ended.pop(number)

    def _listen(self) -> None:
        while True:
            try:
                kind, *details = receive(self._connection)
            except (EOFError, OSError):
                kind, details = "failed", ["the referee is gone"]
            with self._news:
                if kind == "ended":
                    self._ended[details[0]] = details[1]
                else:
                    self._failure = self._failure or details[0]
                self._news.notify_all()
                if details == ["the referee is gone"]:
                    return


def _place() -> str:
    """Where in the caller's code this thread is: the innermost lines outside of bmt_comm."""
    frame: Any = sys._getframe(1)
    places: list[str] = []
    while frame is not None and len(places) < 4:
        name = frame.f_code.co_filename
        if f"{os.sep}bmt_comm{os.sep}" not in name and f"{os.sep}torch{os.sep}" not in name:
            places.append(f"{frame.f_code.co_name} ({os.path.basename(name)}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places)


class BufferInUseError(RuntimeError):
    """The caller has written to memory that an operation in flight reads or writes."""


class _Buffer:
    """Memory that an operation reads, writes, or both."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # kept alive
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def poison(self) -> None:
        ctypes.memset(self.address, 0xFF, self.nbytes)  # NaN, in every floating-point format

    def is_poisoned(self) -> bool:
        return self.read() == b"\xff" * self.nbytes

    def write(self, data: bytes) -> None:
        assert len(data) == self.nbytes
        ctypes.memmove(self.address, data, self.nbytes)


class _Posted:
    """An operation in flight.

    Args:
        connection: to the referee.
        operation: to be posted.
        sent: the buffers that it reads, with their contents when it was posted.
        received: the buffers that it writes.
        finish: makes the contents of ``received`` from the data that have arrived.
    """

    def __init__(
        self,
        connection: _Connection,
        operation: Operation,
        sent: Sequence[tuple[_Buffer, bytes]] = (),
        received: Sequence[_Buffer] = (),
        finish: Callable[[list[bytes]], list[bytes]] = lambda data: data,
    ) -> None:
        self.result: list[bytes] | None = None
        self._connection, self._operation = connection, operation
        self._sent, self._received, self._finish = sent, received, finish
        self._polls = _delays.randrange(3)  # calls of is_completed that return False in any case
        for buffer in received:
            buffer.poison()
        connection.post(operation)

    def wait(self) -> None:
        if self.result is None:
            result = self._connection.result(self._operation.number, block=True)
            assert result is not None
            if _delays.random() < 0.25:
                time.sleep(_delays.random() * _LONGEST_DELAY)
            self._arrive(result)

    def is_completed(self) -> bool:
        if self.result is None and self._polls > 0:
            self._polls -= 1
        elif self.result is None:
            result = self._connection.result(self._operation.number, block=False)
            if result is not None:
                self._arrive(result)
        return self.result is not None

    def _arrive(self, result: list[bytes]) -> None:
        self.result = result
        for buffer, before in self._sent:
            if buffer.read() != before:
                raise BufferInUseError(f"a buffer was written into while it was sent: {self._operation}")
        for buffer in self._received:
            if not buffer.is_poisoned():
                raise BufferInUseError(f"a buffer was written into while a result was to arrive: {self._operation}")
        if self._received:
            for buffer, data in zip(self._received, self._finish(result), strict=True):
                buffer.write(data)
        self._sent, self._received = (), ()


class _Transport:
    """The transport of one process group; see above.

    Attributes:
        in_order: whether it has NCCL's rules; else gloo's.
        eager: whether process groups are made by all ranks of the job together.
    """

    def __init__(self, group: dist.ProcessGroup, connection: _Connection, in_order: bool, eager: bool) -> None:
        self.in_order, self.eager = in_order, eager
        self.rank = dist.get_rank(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._connection = connection
        self._group = (list(self.ranks), group.group_name[:8])
        self._name = (str(self._group[0]), str(self._group[1]))

    # --- collectives ------------------------------------------------------------------------------

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor, operation: Begun, waits_at_once: bool = False) -> Work:
        source = _Buffer(mine)
        in_place = chunks[self.rank].data_ptr() == mine.data_ptr()
        received = [_Buffer(chunk) for r, chunk in enumerate(chunks) if r != self.rank or not in_place]

        def finish(gathered: list[bytes]) -> list[bytes]:
            return [data for r, data in enumerate(gathered) if r != self.rank or not in_place]

        return self._collective(
            "all_gather", (mine.nbytes, operation.name), source, [(source, source.read())], received, finish
        )

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Begun, waits_at_once: bool = False
    ) -> Work:
        source = _Buffer(torch.cat([chunk.reshape(-1) for chunk in chunks]))  # posted; ``chunks`` must not change
        sent = [(buffer, buffer.read()) for buffer in map(_Buffer, chunks)]
        mine = chunks[self.rank]

        def finish(inputs: list[bytes]) -> list[bytes]:
            part = slice(self.rank * mine.nbytes, (self.rank + 1) * mine.nbytes)
            return [_combined([data[part] for data in inputs], mine.dtype, out.dtype, op)]

        return self._collective("reduce_scatter", (mine.nbytes, operation.name), source, sent, [_Buffer(out)], finish)

    def all_reduce(self, flat: Tensor, op: str, operation: Begun) -> Work:
        buffer = _Buffer(flat)

        def finish(inputs: list[bytes]) -> list[bytes]:
            return [_combined(inputs, flat.dtype, flat.dtype, op)]

        return self._collective("all_reduce", (flat.nbytes, operation.name), buffer, [], [buffer], finish)

    def broadcast(self, flat: Tensor, root: int, operation: Begun) -> Work:
        buffer = _Buffer(flat)
        if self.rank == root:
            return self._collective("broadcast", (flat.nbytes, operation.name), buffer, [(buffer, buffer.read())])
        return self._collective(
            "broadcast", (flat.nbytes, operation.name), None, [], [buffer], lambda inputs: [inputs[root]]
        )

    def all_gather_object(self, obj: Any) -> list[Any]:
        work = self._collective("all_gather_object", (), pickle.dumps(obj))
        work.wait()
        assert work.result is not None
        return [pickle.loads(data) for data in work.result]

    def broadcast_object(self, obj: Any, root: int) -> Any:
        work = self._collective("broadcast_object", (root,), pickle.dumps(obj if self.rank == root else None))
        work.wait()
        assert work.result is not None
        return pickle.loads(work.result[root])

    def _collective(
        self,
        kind: str,
        form: tuple[object, ...],
        source: _Buffer | bytes | None,
        sent: Sequence[tuple[_Buffer, bytes]] = (),
        received: Sequence[_Buffer] = (),
        finish: Callable[[list[bytes]], list[bytes]] = lambda data: data,
    ) -> _Posted:
        payload = source.read() if isinstance(source, _Buffer) else source or b""
        key = self._communicator() if self.in_order else self._next(*self._name, "on the host")
        operation = self._connection.operation(key, self.ranks, kind, form=form, payload=payload)
        return _Posted(self._connection, operation, sent, received, finish)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, data: Tensor, peer: int, tag: int) -> Work:
        return self._message(True, data, peer, tag)

    def recv(self, data: Tensor, peer: int, tag: int) -> Work:
        return self._message(False, data, peer, tag)

    def send_recv(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> list[Work]:
        """Post a batch of messages."""
        if not self.in_order:
            works = [self.recv(data, peer, 0) for data, peer in recvs]
            return works + [self.send(data, peer, 0) for data, peer in sends]
        batch = [(True, *message) for message in sends] + [(False, *message) for message in recvs]
        key = self._communicator()
        self._connect((sends, peer) for sends, _, peer in batch)
        return [self._post_messages(key, batch)]

    def _message(self, sends: bool, data: Tensor, peer: int, tag: int) -> Work:
        if not self.in_order:
            ends = (self.rank, peer) if sends else (peer, self.rank)
            work = self._post_messages((*self._name, *ends, f"tag {tag}", "on the host"), [(sends, data, peer)])
            return _Sent(work) if sends else work
        pair = (min(self.rank, peer), max(self.rank, peer))
        key = self._communicator() if self.eager else self._communicator(*pair)
        self._connect([(sends, peer)])
        return self._post_messages(key, [(sends, data, peer)])

    def _post_messages(self, key: Any, batch: Sequence[tuple[bool, Tensor, int]]) -> _Posted:
        messages, sent, received = [], [], []
        for sends, data, peer in batch:
            buffer = _Buffer(data)
            content = buffer.read() if sends else None
            messages.append(Message(sends, self.ranks[peer], buffer.nbytes, content))
            if content is None:
                received.append(buffer)
            else:
                sent.append((buffer, content))
        operation = self._connection.operation(key, self.ranks, MESSAGES, messages=messages)
        return _Posted(self._connection, operation, sent, received)

    def _communicator(self, *pair: int) -> Any:
        """The key of the communicator of all ranks, or of a pair, whose ranks have connected."""
        key = (*self._name, *(["-".join(map(str, pair))] if pair else []))
        if not self.eager:
            self._meet({(*key, "first use"): pair or range(len(self.ranks))})
        return key

    def _connect(self, messages: Iterable[tuple[bool, int]]) -> None:
        """The first message from one rank of a communicator to another blocks both."""
        pairs = [(self.rank, peer) if sends else (peer, self.rank) for sends, peer in messages]
        self._meet(
            {(*self._name, f"first message from {source} to {target}"): (source, target) for source, target in pairs}
        )

    def _meet(self, places: Mapping[Any, Sequence[int]]) -> None:
        """For each key, wait for its ranks, the first time only."""
        new = {place: ranks for place, ranks in places.items() if place not in self._connection.connected}
        meetings = [
            self._connection.collective(place, tuple(self.ranks[rank] for rank in ranks), "connect", (), b"")
            for place, ranks in new.items()
        ]
        for meeting in meetings:
            meeting.wait()
        self._connection.connected.update(new)

    def _next(self, *name: str) -> Any:
        """A new key for each operation, the same on all ranks."""
        return (*name, next(self._connection.times.setdefault(name, itertools.count())))


class _Sent:
    """A sent message that gloo has buffered."""

    def __init__(self, work: _Posted) -> None:
        work.result = []

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


def _combined(parts: list[bytes], dtype: torch.dtype, out_dtype: torch.dtype, op: str) -> bytes:
    tensors = [torch.frombuffer(bytearray(part), dtype=dtype) for part in parts]
    out = torch.empty_like(tensors[0], dtype=out_dtype)
    combine(out, tensors, op)
    return _Buffer(out).read()

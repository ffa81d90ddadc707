"""A channel of collectives through shared memory: their steps, sent and read in the order of the calls.

See the notes of :mod:`bmt_comm.shared_memory`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .operation import Operation
from .work import Pending, Work

_AHEAD = 2  # steps that a rank that waits sends before it reads the first
_RUN_AHEAD_BYTES = 1 << 28  # that others have not received, of collectives that they may not have called yet


class Exchange(Protocol):
    """What ``bmt_kernels.SharedMemoryExchange`` does."""

    @property
    def handle(self) -> tuple[int, int, int]: ...

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool: ...

    def wait_for_room(self, size: int) -> None: ...

    def wait_for_others(self, most: int) -> None: ...

    def try_send(self, parts: Sequence[Tensor], operation: int, name: bytes) -> bool: ...

    def reserve(self, size: int) -> int | None: ...

    def reserved(self, place: int, dtype: torch.dtype) -> Tensor: ...

    def send_reserved(self, place: int, operation: int, name: bytes) -> bool: ...

    def give_back(self, place: int) -> None: ...

    def receive(self, sizes: Sequence[int | None], dtype: torch.dtype, operation: int, name: bytes) -> list[Tensor]: ...

    def release(self) -> None: ...

    def abandon(self) -> None: ...

    def stop(self, why: str) -> None: ...


@dataclass(eq=False, slots=True)
class Step:
    """One message of every rank, and what this rank does with them.

    Attributes:
        parts: what this rank sends, end to end.
        sizes: the bytes that each rank sends; 0 where this rank does not read them, None where it does not know.
        dtype: of the messages.
        read: called with the ranks' messages as vectors.
        needs: how many steps of the collective must have been read before ``parts`` may be sent.
        place: the reserved place where this rank's message lies already, in place of ``parts``.
        runs_ahead: whether this rank receives nothing, and so could run ahead of the others.
        number, name: of the operation; ranks compare them.
    """

    parts: Sequence[Tensor]
    sizes: Sequence[int | None]
    dtype: torch.dtype
    read: Callable[[list[Tensor]], None]
    needs: int = 0
    place: int | None = None
    runs_ahead: bool = False
    number: int = 0
    name: bytes = b""

    @property
    def sent_bytes(self) -> int:
        """Of this rank's message."""
        return sum(part.nbytes for part in self.parts)


class InterruptedCollectiveError(RuntimeError):
    """An exception has left an earlier collective half done."""


class Order:
    """The order of the steps of several channels. It ends with the first exception that is raised in one of them.

    The caller may catch the exception and use the tensors for something else. Going on would write messages of the old
    collective into these tensors, and send their new contents to the others: ranks would get different results.
    """

    def __init__(self) -> None:
        self._channels: list[tuple[Exchange, tuple[deque[Step], ...]]] = []
        self._end: tuple[type[RuntimeError], str] | None = None

    def add(self, exchange: Exchange, *queues: deque[Step]) -> None:
        self._channels.append((exchange, queues))

    def check(self) -> None:
        """Raise if it has ended."""
        if self._end is not None:
            kind, text = self._end
            raise kind(text)

    def fail(self, error: BaseException) -> None:
        if self._end is None:
            # Not the exception itself, whose traceback keeps alive what the functions have held.
            kind = RuntimeError if type(error) is RuntimeError else InterruptedCollectiveError
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = "a collective was interrupted in its middle: its result is lost, and so is the order of later ones"
            self._end = kind, f"{text} ({cause})"
        for exchange, queues in self._channels:
            exchange.abandon()  # the others do not wait for messages that this process will not send
            for queue in queues:
                queue.clear()


class Channel:
    """An exchange, and the steps that are to go through it, in the order of the calls."""

    def __init__(self, exchange: Exchange, order: Order) -> None:
        self._exchange, self._order = exchange, order
        self._unsent: deque[Step] = deque()
        self._unread: deque[Step] = deque()
        self._started = self._read = 0  # steps
        order.add(exchange, self._unsent, self._unread)

    def start(self, steps: Iterable[Step], operation: Operation, waits_at_once: bool = False) -> Work:
        """Begin a collective."""
        self._order.check()
        before = self._started
        try:
            for step in steps:
                step.number, step.name = operation.number, operation.name
                if step.needs:
                    step.needs += before
                self._unsent.append(step)
                self._unread.append(step)
                self._started += 1
            self._send_ahead(self._read + _AHEAD if waits_at_once else self._started)
        except BaseException as error:
            self._order.fail(error)
            raise
        return Pending([], partial(self._complete, self._started), None)

    def stop(self, why: str) -> None:
        self._exchange.stop(why)

    def _complete(self, last: int) -> None:
        if self._read >= last:
            return
        self._order.check()
        try:
            while self._read < last:
                step = self._unread[0]
                if self._unsent:
                    if self._unsent[0] is step:
                        self._exchange.wait_for_room(step.sent_bytes)
                    self._send_ahead(self._read + _AHEAD)
                step.read(self._exchange.receive(step.sizes, step.dtype, step.number, step.name))
                self._exchange.release()
                self._unread.popleft()
                self._read += 1
                if step.runs_ahead:
                    self._exchange.wait_for_others(_RUN_AHEAD_BYTES)
            self._send_ahead(self._started)
        except BaseException as error:
            self._order.fail(error)
            raise

    def _send_ahead(self, last: int) -> None:
        """Send steps up to number ``last``, as far as there is room."""
        while self._unsent and self._started - len(self._unsent) < last:
            step = self._unsent[0]
            if step.needs > self._read or not self._try_send(step):
                return
            self._unsent.popleft()

    def _try_send(self, step: Step) -> bool:
        if step.place is not None:
            return self._exchange.send_reserved(step.place, step.number, step.name)
        return self._exchange.try_send(step.parts, step.number, step.name)

"""Messages from one process to another of the same host, through memory that they share.

[Note: mailboxes]
    Each process owns memory, as in [Note: memory of messages] of :mod:`bmt_kernels.shared_memory`. For each other
    process it has a *mailbox*: entries for 4096 messages, with their tags and sizes, that the other process has not
    received. A message may keep its entry for any time: later ones take other entries. The other process compares
    entries with the receives that were posted, in the order in which messages were sent, and marks in the entry how far
    it has read. A process that has changed an entry rings the *bell* of the other one, a counter on which that process
    sleeps while it waits.

    The other process does not see message 4097 until it has received one of the 4096 before it. A program hangs if it
    sends more than that asynchronously and waits for a later tag first; gloo has no such limit.

    A message goes one of two ways. If there is room, its data is copied into the memory at once (the *stage*, 64 MiB
    for all messages that others have not received), and the send is done. Otherwise there is only the entry. When the
    receiver has a matching receive, the data goes through a *window* of 2 MiB, in parts that stay in the caches, while
    both processes wait for something in this exchange. So messages that are not received never block others.

    Memory that is not needed any more is released when this process sends again, beyond 64 MiB that it keeps over all
    exchanges of this kind.

    Messages make progress while a process waits for a message or for a collective through shared memory, and in every
    call that asks whether a message is done. [Note: progress without a wait] in :mod:`bmt_kernels.progress_thread`
    describes the other cases.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bmt_kernels import _native
from bmt_kernels.process_memory import CLOSED, close, open_all, own_memory
from bmt_kernels.processors import processors
from bmt_kernels.progress_thread import need_progress
from bmt_kernels.shared_memory import (
    SPIN,
    MismatchError,
    add_exchange,
    exchanges_between_two,
    longest_sleep,
    make_progress,
)

_STAGE_BYTES = 1 << 26
_ANY = -1
_MISMATCH, _CANCELLED, _GONE = 1, 2, 3  # outcomes, of csrc/cpu/messages.cpp


class SharedMemoryMessages:
    """Messages between any two processes of one host. Threads may use it at the same time.

    Args:
        rank: this process's place among the processes.
        names: of the processes, for messages of errors.
        timeout: seconds that this one waits for another, or a function that returns them.
        stage_bytes: of messages that others have not received and whose senders need not wait; the same for all.
        local_size: how many processes share the processors of this host, if they are more than have ``names``.

    Raises:
        OSError: the system does not give such memory.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        timeout: float | Callable[[], float] = 1800.0,
        stage_bytes: int = _STAGE_BYTES,
        local_size: int = 0,
    ) -> None:
        if _native.cpu_module is None:
            raise RuntimeError("bmt_kernels was built without its compiled module for the CPU")
        self.rank, self.names, self.timeout = rank, tuple(names), timeout
        self._make = _native.cpu_module.Messages
        self._stage_bytes = stage_bytes
        self._header_bytes = self._make.header_bytes(len(names))
        self._data_bytes = self._make.data_bytes(len(names), stage_bytes)
        own, self.handle = own_memory(self._data_bytes, self._header_bytes)
        """The handle by which other processes map this one's memory: three integers below 2⁶²."""
        self._memories = {rank: own}
        self._native: Any = None
        self._unfinished: dict[int, MessageWork] = {}  # keeps them, and their tensors, alive
        self._ending = threading.RLock()  # held while works end; a signal handler in the same thread may end some, too
        self._numbers = itertools.count(1)
        self._late: set[int] = set()  # a wait for these ranks has timed out; they are not waited for before a message
        self._stopped = ""
        self._spin = SPIN if max(len(names), local_size) <= processors() else 0.0
        weakref.finalize(self, close, own, *self.handle[:2]).atexit = False

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool:
        """Map the memory of all processes, whose handles are given by rank; returns whether that has worked.

        It must have worked for every process before any of them sends.
        """
        memories = open_all(self._memories[self.rank], self.rank, handles, self._data_bytes, self._header_bytes)
        if memories is None:
            return False
        self._memories = memories
        addresses = [memory.address for memory in memories.values()]
        self._native = self._make(self.rank, addresses, self._header_bytes, self._stage_bytes)
        add_exchange(exchanges_between_two, self)
        return True

    def send(self, data: Tensor, peer: int, tag: int = 0, stage: bool = True) -> MessageWork | None:
        """Send ``data`` (CPU, contiguous), which must not change until the work is done; None: it is done.

        ``stage``: copy it into the memory at once, if there is room. Without ``stage``, more than 256 KiB are sent when
        the other process receives and this one waits, which is less work for the processors.
        """
        self._check(data, peer)
        work = MessageWork(self, next(self._numbers), data, peer, tag, is_receive=False)
        self._unfinished[work.number] = work  # before another thread can end it
        if self._native.send(work.number, data.data_ptr(), work.nbytes, peer, tag, stage):
            del self._unfinished[work.number]
            return None
        need_progress()
        return work

    def receive(self, data: Tensor, peer: int | None, tag: int = 0) -> MessageWork:
        """Receive into ``data`` (CPU, contiguous) the next message of ``peer`` with this tag; None: of any process."""
        self._check(data, peer)
        work = MessageWork(self, next(self._numbers), data, peer, tag, is_receive=True)
        self._unfinished[work.number] = work
        try:
            self._native.receive(work.number, data.data_ptr(), work.nbytes, _ANY if peer is None else peer, tag)
            self._conclude()
            if not work.is_done:
                need_progress()
        except BaseException as error:  # the caller has no work that could be cancelled
            work.cancel(RuntimeError(f"the receive was interrupted ({type(error).__name__})"))
            raise
        return work

    def _check(self, data: Tensor, peer: int | None) -> None:
        if self._native is None:
            raise RuntimeError("the processes are not connected; call connect first")
        if peer is not None and (not 0 <= peer < len(self.names) or peer == self.rank):
            raise ValueError(f"peer={peer} is none of the other processes (0 to {len(self.names) - 1})")
        if not data.is_cpu or not data.is_contiguous():
            raise ValueError(f"data on {data.device} with strides {data.stride()}; it must be contiguous, on the CPU")
        if data.is_neg() or data.is_conj():
            raise ValueError("data is negated or conjugated when it is read; pass data.resolve_conj().resolve_neg()")

    def progress(self) -> None:
        """Receive and send without waiting."""
        self._native.progress()
        self._conclude()

    def progress_alone(self, idle: float, most: float) -> bool:
        """Receive and send in the progress thread; returns whether messages are still under way.

        It does nothing if there were other calls since the last time. It ends when nothing has happened for ``idle``
        seconds, after ``most`` seconds, or when there are other calls.
        """
        if self.is_under_way:
            self._native.progress_alone(idle, most)
            self._conclude()
        return self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether there are receives and sends that are not done."""
        return bool(self._unfinished)

    def abandon(self) -> None:
        """Mark that this process sends no more, so that the others do not wait for its messages."""
        self._memories[self.rank].words[CLOSED // 8] = 1

    def stop(self, why: str) -> None:
        """Make waits in other threads raise a RuntimeError within a tenth of a second.

        Messages that are not done fail, and tensors of receives are not written any more.
        """
        self._stopped = why
        for work in list(self._unfinished.values()):
            work.cancel(RuntimeError(why))

    def _conclude(self) -> None:
        """End the works that are done.

        Other threads may do so at the same time, and an exception from outside may interrupt this anywhere. So the
        native module forgets the works last.
        """
        finished = self._native.finished()
        if not finished:
            return
        for number, outcome, peer, size in finished:
            work = self._unfinished.get(number)
            if work is None:
                continue
            if outcome == _MISMATCH:
                work._end(peer, self._mismatch(work, peer, size))
            elif outcome == _CANCELLED:
                work._end(work.peer, work.error)
            elif outcome == _GONE:
                named = " and ".join(self.names[rank] for rank in (self._peers(work) if peer == _ANY else [peer]))
                gone = f"{named} has ended or closed its memory, and a message with it is missing"
                work._end(work.peer, work.error or RuntimeError(gone))
            else:
                work._end(peer, None)
                self._late.discard(peer)
            self._unfinished.pop(number, None)
        self._native.forget([number for number, *_ in finished])

    def _cancel(self, work: MessageWork) -> None:
        """Stop writing to the tensor of a receive."""
        if work.is_receive:
            self._native.cancel(work.number)
        self._conclude()  # with success, if it was done before that

    def _mismatch(self, work: MessageWork, peer: int, theirs: int) -> MismatchError:
        me, other, mine = self.names[self.rank], self.names[peer], work.nbytes
        if work.is_receive:
            return MismatchError(f"{other} has sent {theirs} bytes with tag {work.tag} where {me} expects {mine}")
        return MismatchError(f"{me} has sent {mine} bytes with tag {work.tag} where {other} expects {theirs}")

    def _peers(self, work: MessageWork) -> list[int]:
        """The ranks that may be the other end of a message."""
        return [rank for rank in self._memories if rank != self.rank] if work.peer is None else [work.peer]

    def _lose_gone(self, peers: Sequence[int]) -> None:
        """End the works with those of ``peers`` that have gone. Messages sent before the end are still received."""
        gone = [rank for rank in peers if self._memories[rank].is_gone()]
        if gone:  # also one of several: a receive from any process may have begun with a message of it
            self._native.lose(gone)
            self._conclude()

    def _wait(self, work: MessageWork, timeout: float | None = None) -> None:
        native, number = self._native, work.number
        usual = self.timeout() if callable(self.timeout) else self.timeout
        if timeout is None:
            timeout = usual
        peers = self._peers(work)
        late = self._late.issuperset(peers)
        deadline = time.monotonic() + (0.0 if late else timeout)
        while True:
            native.wait(number, *((0.0, 0.0) if late else (self._spin, longest_sleep(self))))
            self._conclude()
            if work.is_done or work.error is not None:
                return
            make_progress(self)
            if self._stopped:
                raise RuntimeError(self._stopped)
            self._lose_gone(peers)
            if work.is_done or work.error is not None:
                return
            if time.monotonic() > deadline:
                named = " and ".join(self.names[rank] for rank in peers)
                waited = "since an earlier wait has timed out" if late else f"for {timeout:g} seconds"
                work.cancel(RuntimeError(f"{named} has not sent or received a message {waited}"))
                if work.error is not None and timeout >= usual:  # not done at the last moment
                    self._late.update(peers)
                return


class MessageWork:
    """A message in flight.

    Attributes:
        is_done: whether it was received, or ``data`` has been read.
        error: how it has failed, if it has.
        peer: the other process's rank; of a receive from any process None until it is done.
    """

    __slots__ = ("_data", "error", "exchange", "is_done", "is_receive", "nbytes", "number", "peer", "tag")

    def __init__(
        self, exchange: SharedMemoryMessages, number: int, data: Tensor, peer: int | None, tag: int, is_receive: bool
    ) -> None:
        self.exchange, self.number = exchange, number
        self._data: Tensor | None = data
        self.nbytes, self.peer, self.tag, self.is_receive = data.nbytes, peer, tag, is_receive
        self.error: Exception | None = None
        self.is_done = False

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done, for ``timeout`` seconds if given.

        A receive whose wait ends with an exception, also one from outside as ``KeyboardInterrupt``, has failed. Nothing
        is written into its tensor after that. A message that has not begun to come is left to the next receive. The
        rest of one that has begun is dropped. A send stays under way, and may be waited for again after an exception
        from outside.

        Raises:
            MismatchError: one has sent as many bytes as the other does not expect.
            RuntimeError: the other process has gone, or has not sent or received in time.
        """
        if not self.is_done and self.error is None:
            try:
                self.exchange._wait(self, timeout)
            except Exception as error:
                self.cancel(error)
                if not self.is_done or self.error is not None:
                    raise
            except BaseException as error:
                if self.is_receive:
                    self.cancel(RuntimeError(f"the wait for the message was interrupted ({type(error).__name__})"))
                raise
        if self.error is not None:
            raise self.error

    def cancel(self, error: Exception) -> None:
        """Make it fail with ``error``, unless it is done. The tensor of a receive is not written after that.

        The tensor of a send must not change until it is done, in any case.
        """
        with self.exchange._ending:
            if self.is_done:
                return
            self.error = self.error or error
        self.exchange._cancel(self)

    def is_completed(self) -> bool:
        """Whether it is done or the other process has gone, after progress without waiting."""
        if not self.is_done:
            self.exchange.progress()
        if not self.is_done:
            self.exchange._lose_gone(self.exchange._peers(self))
        return self.is_done

    def _end(self, peer: int | None, error: Exception | None) -> None:
        with self.exchange._ending:
            self.peer, self.error = peer, error
            self._data = None  # the caller may use it for something else
            self.is_done = True

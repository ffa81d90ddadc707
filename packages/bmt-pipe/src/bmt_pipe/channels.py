"""Point-to-point channels between the stages of a pipeline.

[Note: matching]
    Every rank knows the schedule of every rank, and so the order in which each other rank sends to it. It starts its
    receives in that order, whichever message it needs first. So sends and receives match without negotiation, also over
    NCCL, which has no tags, and a receive can start before its message is needed. Sending never waits: the tensors are
    kept alive until they have been sent.

    Each pair of stages has a channel for each direction (``ParallelContext.pipe_channels``). A message waits only for
    the earlier messages of its channel. So stages never wait for each other in a cycle, whatever the schedule is.
    tests/test_routes.py runs every schedule by NCCL's rules.

    The tensors of a message are known from an earlier call with the same arguments. In the first call, the
    :class:`Form` of each message is sent before it, in host memory.

[Note: abort messages]
    A stage that has failed sends an abort message in place of each message that it cannot send, so that the receiver
    does not wait. Where forms are sent, it is an empty form. Otherwise it is zeros, and the stages learn of the failure
    at the end of the pass.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import pickle
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bmt_comm import Communicator, ParallelContext, Work, named_range
from bmt_comm.memory_ranges import as_in_memory
from bmt_comm.plain import check_in_memory

from .messages import Forms, Message, StageFailedError, StageLostError, take_apart

_ABORT = b""  # in place of a form; see [Note: abort messages]


class _Receive(NamedTuple):
    """A receive that has started. ``form`` is pickled; it is empty where the form is known."""

    peer: int
    form: bytes
    tensors: list[Tensor]
    works: list[Work]


class Channels:
    """This rank's channels to and from the other stages, for one pass through a pipeline.

    Args:
        context: the ranks.
        forms: the forms of messages. Those of messages that are sent or received are added while ``learning``.
        learning: whether the forms are unknown, and are sent before the messages.
        expected: the messages that each other rank sends to this one, in order.
    """

    def __init__(
        self, context: ParallelContext, forms: Forms, learning: bool, expected: Mapping[int, Sequence[Message]]
    ) -> None:
        self.context = context
        self.forms = forms
        self.learning = learning
        self.sent: set[Message] = set()
        self._rank = context.pipe.rank
        self._expected = {peer: deque(messages) for peer, messages in expected.items()}
        self._receives: dict[Message, _Receive | None] = {}  # None: an abort message has come
        self._headers: dict[int, bytes] = {}  # forms of messages whose receives have not started, by peer
        self._to_self: dict[Message, list[Tensor]] = {}
        self._sends: deque[tuple[Work, Tensor]] = deque()  # keeps tensors alive until they have been sent

    def send(self, peer: int, message: Message, tree: Any) -> None:
        """Send nested containers, whose tensors must not be written to later.

        Raises:
            TypeError: a tensor has no memory of its own, such as a ``DTensor``.
            ValueError: a tensor is sparse or on another device.
            RuntimeError: their form differs from that of the same message in an earlier call with the same arguments.
        """
        form, tensors = take_apart(tree)
        for x in tensors:
            if x.layout is not torch.strided or x.device != self.context.device:
                raise ValueError(
                    f"a tensor for the next stage has layout {x.layout} and is on {x.device}; only dense tensors on "
                    f"{self.context.device} go through a pipeline"
                )
        if self.learning:
            self.forms[message] = form
        elif self.forms[message] != form:
            raise RuntimeError(
                f"a chunk returned {form.leaves}, and {self.forms[message].leaves} at an earlier call with arguments "
                f"of the same shapes; shapes must follow from those of the arguments"
            )
        if peer == self._rank:
            self.sent.add(message)
            self._to_self[message] = [tensor.detach() for tensor in tensors]
            return
        # The receiver allocates the tensors before it unpickles the form, which may fail.
        data = pickle.dumps((form.tensors, pickle.dumps(form))) if self.learning else b""
        tensors = [as_in_memory(tensor.detach()) for tensor in tensors]
        for tensor in tensors:
            check_in_memory("a tensor for the next stage", tensor)
        self.sent.add(message)  # after everything that can fail: unsent messages get an abort message
        if self.learning:
            self._send_bytes(peer, data)
        with named_range("send", message):
            self._send_tensors(peer, tensors)

    def send_abort(self, peer: int, message: Message) -> None:
        """Send an abort message in place of ``message``."""
        if peer != self._rank and self.learning:
            self._send_bytes(peer, _ABORT)
        elif peer != self._rank:
            self._send_tensors(peer, [form.zeros(self.context.device) for form in self.forms[message].tensors])

    def take(self, peer: int, message: Message) -> list[Tensor]:
        """The tensors of a message from ``peer``. Waits until they have arrived.

        Raises:
            Exception: what an object's own code raises when this rank loads it.
            StageFailedError: an abort message has come in its place.
            StageLostError: ``peer`` cannot be reached.
        """
        if peer == self._rank:
            if message not in self._to_self:
                raise StageFailedError("an earlier action of this stage has failed")
            return self._to_self.pop(message)
        while message not in self._receives:
            self._start_receive(peer)
        receive = self._receives.pop(message)
        if not self.learning and self._expected[peer]:
            self._start_receive(peer)  # overlaps with this rank's computation
        if receive is None:
            raise StageFailedError(f"stage {peer} has failed")
        with named_range("recv", message):
            for work in receive.works:
                self._wait(work, peer)
        if receive.form:
            self.forms[message] = pickle.loads(receive.form)  # from a rank of this job
        return receive.tensors

    def drain(self) -> None:
        """Receive and drop all expected messages, one at a time to limit memory."""
        self._to_self.clear()
        self._drop_receives()
        for peer, expected in self._expected.items():
            while expected:
                self._start_receive(peer)
                self._drop_receives()

    def _drop_receives(self) -> None:
        for receive in filter(None, self._receives.values()):
            for work in receive.works:
                self._wait(work, receive.peer)
        self._receives.clear()

    def close(self) -> None:
        """Wait for all sends. Call it when every stage has received everything."""
        while self._sends:
            work, _ = self._sends.popleft()
            work.wait()
        _pending_sends.join()

    def _transfer(self, source: int, target: int, on_host: bool = False) -> tuple[Communicator, dict[str, Any]]:
        """The communicator of the next transfer from ``source`` to ``target``, and the options of ``send`` or ``recv``.

        This rank is one of the two.
        """
        comm = self.context.pipe_host if on_host else self.context.pipe_channels[source, target]
        other = self.context.pipe.ranks[target if source == self._rank else source]
        tags = _tags.setdefault(self.context, {}).setdefault((comm, source, target), itertools.count())
        tag = 1 + next(tags) % _TAGS  # send_recv() uses tag 0
        return comm, {"peer": comm.ranks.index(other), "tag": tag, "async_op": True}

    def _send_tensors(self, peer: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                comm, options = self._transfer(self._rank, peer)
                work = comm.send(tensor, **options)
                if comm.in_order:
                    self._sends.append((work, tensor))
                else:
                    _keep_until_sent(work)
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def _send_bytes(self, peer: int, data: bytes) -> None:
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)], device="cpu"), payload):
            comm, options = self._transfer(self._rank, peer, on_host=True)
            _keep_until_sent(comm.send(tensor, **options))

    def _receive_bytes(self, peer: int) -> bytes:
        length = self._receive_on_host(torch.empty(1, dtype=torch.int64, device="cpu"), peer)
        payload = self._receive_on_host(torch.empty(max(int(length), 1), dtype=torch.uint8, device="cpu"), peer)
        return payload.numpy().tobytes() if int(length) else _ABORT

    def _receive_on_host(self, tensor: Tensor, peer: int) -> Tensor:
        comm, options = self._transfer(peer, self._rank, on_host=True)
        self._wait(comm.recv(tensor, **options), peer)
        return tensor

    def _start_receive(self, peer: int) -> None:
        """Start to receive the next message from ``peer``. If there is no memory for it, it remains the next one."""
        message = self._expected[peer][0]
        form = b""
        if self.learning:
            data = self._headers[peer] = self._headers.get(peer) or self._receive_bytes(peer)
            if data == _ABORT:
                del self._headers[peer]
                self._receives[self._expected[peer].popleft()] = None
                return
            tensor_forms, form = pickle.loads(data)  # from a rank of this job
        else:
            tensor_forms = self.forms[message].tensors
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=self.context.device) for each in tensor_forms]
        self._headers.pop(peer, None)
        works = []
        for tensor in tensors:
            if tensor.numel():
                comm, options = self._transfer(peer, self._rank)
                works.append(comm.recv(tensor, **options))
        self._receives[self._expected[peer].popleft()] = _Receive(peer, form, tensors, works)

    def _wait(self, work: Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            rank = self.context.pipe.ranks[peer]
            raise StageLostError(f"the connection to stage {peer} (rank {rank}) is lost: {error}") from error


_TAGS = (1 << 30) - 1
_tags: WeakKeyDictionary[ParallelContext, dict[tuple[Communicator, int, int], itertools.count[int]]]
_tags = WeakKeyDictionary()

_pending_sends: queue.Queue[Work | None] = queue.Queue()
_waiter: threading.Thread | None = None


def _keep_until_sent(work: Work) -> None:
    """Keep a send alive until it completes. A thread waits for it: CPU backends report completion only to a wait."""
    global _waiter
    if work.is_completed():  # the message is in shared memory
        return
    if _waiter is None or not _waiter.is_alive():
        _waiter = threading.Thread(target=_wait_in_order, name="bmt-pipe-sends", daemon=True)
        _waiter.start()
        # The interpreter would abort at exit if the thread still waited in the backend.
        atexit.register(_end_thread, _waiter)
    _pending_sends.put(work)


def _wait_in_order() -> None:
    while (work := _pending_sends.get()) is not None:
        with contextlib.suppress(RuntimeError):  # the peer is gone: whoever receives from it raises
            work.wait()
        del work
        _pending_sends.task_done()
    _pending_sends.task_done()


def _end_thread(thread: threading.Thread) -> None:
    _pending_sends.put(None)
    thread.join(timeout=5)  # longer only where a peer is gone

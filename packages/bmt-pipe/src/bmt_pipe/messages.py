"""Messages between the stages of a pipeline: sent when they are made, received in the order in which they were.

[Note: matching]
    Every rank knows every rank's schedule, and so the order in which each other rank sends to it. It posts its
    receives in that order, whatever it needs first. So messages match without negotiation, also over NCCL, which
    knows no tags, and a receive can be posted ahead. Sending never waits: what is sent is held until it has left.

    Each pair of stages has a channel for each direction (``ParallelContext.pipe_channels``), on which a message waits
    for those before it on its way, and for nothing else. So stages never wait for each other in a circle, whatever the
    schedule. tests/test_routes.py runs every schedule by NCCL's rules.

    What a message consists of is known from an earlier call with the same arguments. At the first call its
    :class:`Form` travels ahead of it, in host memory.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import pickle
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bmt_comm import Communicator, ParallelContext, Work, named_range


class Message(NamedTuple):
    """What is sent: ``kind`` of the micro-batch at a place in the chain of chunks."""

    kind: str
    micro_batch: int
    place: int


class StageLostError(RuntimeError):
    """Another stage cannot be reached any more, or takes part in something else."""


class StageFailedError(RuntimeError):
    """Another stage has raised an exception."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Around collectives of a pipeline: if one fails, a stage is gone or does something else."""
    try:
        yield
    except RuntimeError as error:
        raise StageLostError(
            f"the connection to another stage is lost, or that stage is doing something else: {error}"
        ) from error


# --- forms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Form:
    """Nested containers with a :class:`TensorForm` in the place of each tensor, and other leaves as they are."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(tree: Any) -> Form:
        return take_apart(tree)[0]

    @property
    def tree(self) -> Any:
        return tree_unflatten(self.leaves, self.spec)

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """The containers with these tensors."""
        arriving = iter(tensors)
        leaves = [next(arriving) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return Form.of, (self.tree,)  # specs cannot be pickled


def take_apart(tree: Any) -> tuple[Form, list[Tensor]]:
    """The form and the tensors of nested containers."""
    leaves, spec = tree_flatten(tree)
    forms = tuple(TensorForm(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return Form(forms, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def gets_gradient(x: Tensor | TensorForm) -> bool:
    """Whether it has a dtype of gradients."""
    return x.dtype.is_floating_point or x.dtype.is_complex


class Forms(dict[Message, Form]):
    """The form of each message. A gradient is a list, of those tensors that get one in what it is the gradient of."""

    def __missing__(self, message: Message) -> Form:
        if not message.kind.endswith("_grad"):
            raise KeyError(message)
        forms = self[message._replace(kind=message.kind.removesuffix("_grad"))].tensors
        self[message] = Form.of([form for form in forms if gets_gradient(form)])
        return self[message]


# --- sending and receiving ------------------------------------------------------------------------

_BROKEN = b""  # in place of a form: the sender has failed and sends nothing


class _Arriving(NamedTuple):
    """A message whose tensors are on their way from ``peer``; ``form`` is pickled, and empty where it is known."""

    peer: int
    form: bytes
    tensors: list[Tensor]
    works: list[Work]


class Post:
    """What this rank sends to and receives from the others, in one pass through a pipeline.

    ``learning``: forms are not known, and travel ahead of messages. ``expected``: what each other rank sends, in order.
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
        self._posted: dict[Message, _Arriving | None] = {}
        self._headers: dict[int, bytes] = {}  # that have come ahead of messages whose receives are not posted
        self._kept: dict[Message, list[Tensor]] = {}  # to this rank itself
        self._leaving: deque[tuple[Work, Tensor]] = deque()

    def send(self, peer: int, message: Message, tree: Any) -> None:
        """Send nested containers, whose tensors must stay as they are.

        Raises:
            ValueError: a tensor is sparse or on another device.
            RuntimeError: they are not what the same message was at an earlier call with the same arguments.
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
            self._kept[message] = [tensor.detach() for tensor in tensors]
            return
        # The receiver can make room for the tensors without the pickle of the form, which it may fail to load.
        data = pickle.dumps((form.tensors, pickle.dumps(form))) if self.learning else b""
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        self.sent.add(message)  # after all that can fail: send_broken() takes the place of what is not sent
        if self.learning:
            self._send_bytes(peer, data)
        with named_range("send", message):
            self._send_tensors(peer, tensors)

    def send_broken(self, peer: int, message: Message) -> None:
        """Send something in place of a message that there will never be, for ``peer`` not to wait."""
        if peer != self._rank and self.learning:
            self._send_bytes(peer, _BROKEN)
        elif peer != self._rank:
            self._send_tensors(peer, [form.zeros(self.context.device) for form in self.forms[message].tensors])

    def take(self, peer: int, message: Message) -> list[Tensor]:
        """The tensors of a message from ``peer``.

        Raises:
            Exception: what an object's own code raises when this rank loads it.
            StageFailedError: there will never be any.
            StageLostError: ``peer`` cannot be reached.
        """
        if peer == self._rank:
            if message not in self._kept:
                raise StageFailedError("an earlier action of this stage has failed")
            return self._kept.pop(message)
        while message not in self._posted:
            self._post_next(peer)
        arrived = self._posted.pop(message)
        if not self.learning and self._expected[peer]:
            self._post_next(peer)  # its data may come while this rank computes
        if arrived is None:
            raise StageFailedError(f"stage {peer} has failed")
        with named_range("recv", message):
            for work in arrived.works:
                self._wait(work, peer)
        if arrived.form:
            self.forms[message] = pickle.loads(arrived.form)  # from a rank of this job
        return arrived.tensors

    def drain(self) -> None:
        """Receive what is still to come and is not wanted any more, one by one: memory may be short."""
        self._kept.clear()
        self._drop_posted()
        for peer, expected in self._expected.items():
            while expected:
                self._post_next(peer)
                self._drop_posted()

    def _drop_posted(self) -> None:
        for arrived in filter(None, self._posted.values()):
            for work in arrived.works:
                self._wait(work, arrived.peer)
        self._posted.clear()

    def close(self) -> None:
        """All has been received everywhere: give up what was sent."""
        while self._leaving:
            work, _ = self._leaving.popleft()
            work.wait()
        _held.join()

    def _way(self, source: int, target: int, on_host: bool = False) -> tuple[Communicator, dict[str, Any]]:
        """What carries the next message from ``source`` to ``target``, one of which is this rank, and its options."""
        comm = self.context.pipe_host if on_host else self.context.pipe_channels[source, target]
        other = self.context.pipe.ranks[target if source == self._rank else source]
        tags = _tags.setdefault(self.context, {}).setdefault((comm, source, target), itertools.count())
        return comm, {
            "peer": comm.ranks.index(other),
            "tag": 1 + next(tags) % _TAGS,
            "async_op": True,
        }  # 0: send_recv()

    def _send_tensors(self, peer: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                comm, way = self._way(self._rank, peer)
                work = comm.send(tensor, **way)
                if comm.in_order:
                    self._leaving.append((work, tensor))
                else:
                    _hold(work)
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def _send_bytes(self, peer: int, data: bytes) -> None:
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)], device="cpu"), payload):
            comm, way = self._way(self._rank, peer, on_host=True)
            _hold(comm.send(tensor, **way))

    def _receive_bytes(self, peer: int) -> bytes:
        length = self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), peer)
        payload = self._receive(torch.empty(max(int(length), 1), dtype=torch.uint8, device="cpu"), peer)
        return payload.numpy().tobytes() if int(length) else _BROKEN

    def _receive(self, tensor: Tensor, peer: int) -> Tensor:
        comm, way = self._way(peer, self._rank, on_host=True)
        self._wait(comm.recv(tensor, **way), peer)
        return tensor

    def _post_next(self, peer: int) -> None:
        """Post the receive of the next message from ``peer``. It stays the next one if there is no memory for it."""
        message = self._expected[peer][0]
        packed = b""
        if self.learning:
            data = self._headers[peer] = self._headers.get(peer) or self._receive_bytes(peer)
            if data == _BROKEN:
                del self._headers[peer]
                self._posted[self._expected[peer].popleft()] = None
                return
            forms, packed = pickle.loads(data)  # from a rank of this job
        else:
            forms = self.forms[message].tensors
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self.context.device) for form in forms]
        self._headers.pop(peer, None)
        works = []
        for tensor in tensors:
            if tensor.numel():
                comm, way = self._way(peer, self._rank)
                works.append(comm.recv(tensor, **way))
        self._posted[self._expected[peer].popleft()] = _Arriving(peer, packed, tensors, works)

    def _wait(self, work: Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            rank = self.context.pipe.ranks[peer]
            raise StageLostError(f"the connection to stage {peer} (rank {rank}) is lost: {error}") from error


_TAGS = (1 << 30) - 1
_tags: WeakKeyDictionary[ParallelContext, dict[tuple[Communicator, int, int], itertools.count[int]]]
_tags = WeakKeyDictionary()

_held: queue.Queue[Work | None] = queue.Queue()
_holder: threading.Thread | None = None


def _hold(work: Work) -> None:
    """Keep what is being sent until it has left; CPU backends tell only those that wait for it."""
    global _holder
    if work.is_completed():  # it is in the memory that ranks share
        return
    if _holder is None or not _holder.is_alive():
        _holder = threading.Thread(target=_release_in_order, name="bmt-pipe-sends", daemon=True)
        _holder.start()
        # A thread that still waits in the backend when the interpreter goes would be an abort.
        atexit.register(_end_thread, _holder)
    _held.put(work)


def _release_in_order() -> None:
    while (work := _held.get()) is not None:
        with contextlib.suppress(RuntimeError):  # the peer is gone: whoever waits for it raises
            work.wait()
        del work
        _held.task_done()
    _held.task_done()


def _end_thread(thread: threading.Thread) -> None:
    _held.put(None)
    thread.join(timeout=5)  # longer only where a peer is gone

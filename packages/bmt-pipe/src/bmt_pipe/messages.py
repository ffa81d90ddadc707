"""Messages between the stages of a pipeline: sent when they are made, received in the order in which they were.

[Note: matching]
    Every rank knows every rank's schedule, and so the order in which each other rank sends to it. It posts its
    receives in that order, whatever it needs first. So messages match without negotiation, also over NCCL, which
    knows no tags, and a receive can be posted ahead. Sending never waits: what is sent is held until it has left.

    Each pair of stages has a channel for each direction (``ParallelContext.pipe_channels``), on which a message waits
    for those before it on its way, and for nothing else. So stages never wait for each other in a circle, whatever the
    schedule. tests/test_routes.py runs every schedule by NCCL's rules.

    What a message consists of is known from an earlier call with the same arguments; at the first one, a
    description travels ahead of each message, in host memory.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import pickle
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bmt_comm import Communicator, ParallelContext, Work


class Message(NamedTuple):
    """What is sent: ``kind`` of the micro-batch at a place in the chain of chunks."""

    kind: str
    micro_batch: int
    place: int


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Structure:
    """Nested containers without their leaves; it can be sent."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def fill(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(list(leaves), self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return structure_of, (self.fill([None] * self.spec.num_leaves),)  # the containers: specs cannot be pickled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(repr(self.spec))

    def __repr__(self) -> str:
        return repr(self.fill(["*"] * self.spec.num_leaves))


def structure_of(tree: Any) -> Structure:
    return Structure(tree_flatten(tree)[1])


class Form(NamedTuple):
    """What nested containers consist of: a :class:`TensorForm` for each tensor, other leaves as they are."""

    structure: Structure
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def differentiable(self) -> Form:
        """The form of the gradients: of floating-point tensors alone, in a list."""
        forms = [form for form in self.tensors if form.dtype.is_floating_point]
        return Form(structure_of([None] * len(forms)), tuple(forms))


class Forms(dict[Message, Form]):
    """What each message consists of; a gradient follows from what it is the gradient of."""

    def __missing__(self, message: Message) -> Form:
        if not message.kind.endswith("_grad"):
            raise KeyError(message)
        self[message] = self[message._replace(kind=message.kind.removesuffix("_grad"))].differentiable()
        return self[message]


def take_apart(tree: Any) -> tuple[Form, list[Tensor]]:
    leaves, spec = tree_flatten(tree)
    described = tuple(TensorForm(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return Form(Structure(spec), described), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def put_together(form: Form, tensors: Sequence[Tensor]) -> Any:
    found = iter(tensors)
    return form.structure.fill([next(found) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves])


class StageLostError(RuntimeError):
    """Another stage cannot be reached any more."""


class StageFailedError(RuntimeError):
    """Another stage has raised an exception."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Around collectives of a pipeline, which fail where a stage is gone.

    Raises:
        StageLostError: they do.
    """
    try:
        yield
    except RuntimeError as error:
        raise StageLostError(f"the connection to another stage is lost: {error}") from error


_BROKEN = b""  # in place of a description: the sender has failed and sends nothing


class Post:
    """What this rank sends to and receives from the others, in one pass through a pipeline.

    Args:
        context: the ranks.
        forms: what each message consists of, as far as it is known; learning adds to it.
        learning: whether messages are announced by a description.
    """

    def __init__(self, context: ParallelContext, forms: Forms, learning: bool) -> None:
        self.context = context
        self.forms = forms
        self.learning = learning
        self._rank = context.pipe.rank
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[list[Tensor], list[Work]] | None] = {}
        self._kept: dict[Message, list[Tensor]] = {}  # to this rank itself
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self.sent: set[Message] = set()

    def expect(self, orders: Mapping[int, Sequence[Message]]) -> None:
        """Further messages from each other rank, in the order in which it sends them."""
        for peer, messages in orders.items():
            self._expected.setdefault(peer, deque()).extend(messages)

    def send(self, peer: int, message: Message, form: Form, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` of ``form``; they must stay as they are.

        Raises:
            RuntimeError: they are not what the same message was at an earlier call with the same arguments.
        """
        if self.learning:
            self.forms[message] = form
        elif self.forms[message] != form:
            raise RuntimeError(
                f"a chunk returned {form.leaves}, and {self.forms[message].leaves} at an earlier call with "
                f"arguments of the same shapes; shapes must follow from those of the arguments"
            )
        self.sent.add(message)
        if peer == self._rank:
            self._kept[message] = [tensor.detach() for tensor in tensors]
            return
        if self.learning:
            self._send_bytes(peer, pickle.dumps(form))
        self._send_tensors(peer, tensors)

    def send_broken(self, peer: int, message: Message) -> None:
        """Send something in place of a message that there will never be, for ``peer`` not to wait."""
        if peer == self._rank:
            return
        if self.learning:
            self._send_bytes(peer, _BROKEN)
            return
        forms = self.forms[message].tensors
        self._send_tensors(peer, [torch.zeros(f.shape, dtype=f.dtype, device=self.context.device) for f in forms])

    def take(self, peer: int, message: Message) -> list[Tensor]:
        """The tensors of a message from ``peer``.

        Raises:
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
        tensors, works = arrived
        for work in works:
            self._wait(work, peer)
        return tensors

    def drain(self) -> None:
        """Receive what is still to come and is not wanted any more."""
        for peer, expected in self._expected.items():
            while expected:
                self._post_next(peer)
        for message, arrived in list(self._posted.items()):
            for work in arrived[1] if arrived is not None else ():
                self._wait(work, message.place)
        self._posted.clear()
        self._kept.clear()

    def close(self) -> None:
        """All has been received everywhere: give up what was sent."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()
        _held.join()

    # --- transport --------------------------------------------------------------------------------

    def _channel(self, source: int, target: int) -> tuple[Communicator, dict[str, int]]:
        """What carries a message from ``source`` to ``target``, one of which is this rank, and the way to say so."""
        comm = self.context.pipe_channels[source, target]
        other = self.context.pipe.ranks[target if source == self._rank else source]
        tag = 0 if comm.in_order else self._tag(comm, source, target)
        return comm, {"peer": comm.ranks.index(other), "tag": tag}

    def _tag(self, comm: Communicator, source: int, target: int) -> int:
        counters = _counters.setdefault(self.context, {})
        return 1 + next(counters.setdefault((comm, source, target), itertools.count())) % _TAGS  # 0: send_recv()

    def _send_tensors(self, peer: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                data = tensor.detach().contiguous()
                comm, way = self._channel(self._rank, peer)
                work = comm.send(data, **way, async_op=True)
                if comm.in_order:
                    self._sent.append((work, data))
                else:
                    _hold(work)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _send_bytes(self, peer: int, data: bytes) -> None:
        comm = self.context.pipe_host
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), payload):
            _hold(comm.send(tensor, peer, self._tag(comm, self._rank, peer), async_op=True))

    def _receive_bytes(self, peer: int) -> bytes:
        comm = self.context.pipe_host
        length = torch.empty(1, dtype=torch.int64)
        self._wait(comm.recv(length, peer, self._tag(comm, peer, self._rank), async_op=True), peer)
        payload = torch.empty(max(int(length), 1), dtype=torch.uint8)
        self._wait(comm.recv(payload, peer, self._tag(comm, peer, self._rank), async_op=True), peer)
        return payload.numpy().tobytes() if int(length) else _BROKEN

    def _post_next(self, peer: int) -> None:
        """Post the receive of the next message from ``peer``."""
        message = self._expected[peer].popleft()
        if self.learning:
            found = self._receive_bytes(peer)
            if found == _BROKEN:
                self._posted[message] = None
                return
            self.forms[message] = pickle.loads(found)  # from a rank of this job
        tensors, works = [], []
        for form in self.forms[message].tensors:
            tensors.append(torch.empty(form.shape, dtype=form.dtype, device=self.context.device))
            if tensors[-1].numel():
                comm, way = self._channel(peer, self._rank)
                works.append(comm.recv(tensors[-1], **way, async_op=True))
        self._posted[message] = tensors, works

    def _wait(self, work: Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            rank = self.context.pipe.ranks[peer]
            raise StageLostError(f"the connection to stage {peer} (rank {rank}) is lost: {error}") from error


_TAGS = (1 << 30) - 1
_counters: WeakKeyDictionary[ParallelContext, dict[tuple[Communicator, int, int], itertools.count[int]]] = (
    WeakKeyDictionary()
)

_held: queue.Queue[Work | None] = queue.Queue()
_holder: threading.Thread | None = None


def _hold(work: Work) -> None:
    """Keep what is being sent until it has left; CPU backends tell only those that wait for it."""
    global _holder
    if _holder is None or not _holder.is_alive():
        _holder = threading.Thread(target=_release_in_order, name="bmt-pipe-sends", daemon=True)
        _holder.start()
        # A thread that still waits in the backend when the interpreter goes would be an abort.
        atexit.register(_end_thread, _holder)
    _held.put(work)


def _release_in_order() -> None:
    while True:
        work = _held.get()
        try:
            if work is None:
                return
            work.wait()
        except RuntimeError:
            continue  # the peer is gone: whoever waits for it raises
        finally:
            del work
            _held.task_done()


def _end_thread(thread: threading.Thread) -> None:
    _held.put(None)
    thread.join(timeout=5)  # longer only where a peer is gone

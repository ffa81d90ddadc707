"""NCCL's rules for operations between ranks, without communication: which operations may run, and which ranks wait.

[Note: rules]
    - Operations of one communicator run one at a time on each rank, in the order in which the rank has posted them.
    - A collective runs when it is the first operation of every rank of its communicator.
    - A message runs when the send and the receive are each among the first operation of their rank; so a send ends only
      when its receive has been posted. The messages of a batch are one operation, and run in any order.
    - A rank that waits runs nothing else, unless it has posted from several threads. If ranks wait for each other,
      nothing more will ever run: that is a failure, and it is known as soon as the last of these ranks waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

Key = Hashable
"""A communicator: the same on all its ranks."""

MESSAGES = "messages"


@dataclass(eq=False)
class Message:
    """A part of an operation: a message to a peer, or from it (then ``payload`` is set when it has arrived)."""

    sends: bool
    peer: int
    nbytes: int
    payload: bytes | None = None

    def __str__(self) -> str:
        return f"{'send' if self.sends else 'recv'} of {self.nbytes} bytes {'to' if self.sends else 'from'} {self.peer}"


@dataclass(eq=False)
class Operation:
    """An operation that a rank has posted.

    Attributes:
        number: of the operation on its rank.
        key: the communicator.
        ranks: those of the communicator, in its order.
        kind: the collective, or ``MESSAGES``.
        form: what must be the same on all ranks of a collective (sizes, the root).
        payload: what the rank contributes to a collective.
        messages: of a batch.
        aside: whether it was posted by another thread than the one that waits.
        results: of a collective that has run: the payloads of all ranks, in the order of ``ranks``.
    """

    rank: int
    number: int
    key: Key
    ranks: tuple[int, ...]
    kind: str
    form: tuple[object, ...] = ()
    payload: bytes = b""
    messages: list[Message] = field(default_factory=list)
    aside: bool = False
    results: list[bytes] = field(default_factory=list)

    def __str__(self) -> str:
        what = ", ".join(map(str, self.messages)) or " ".join([self.kind, *map(str, self.form)])
        return f"{what} on {_name(self.key)}"


class RulesError(RuntimeError):
    """Operations that can never run."""


@dataclass(eq=False)
class _Entry:
    """An operation that has not ended, and its messages that have not run."""

    operation: Operation
    left: list[Message]


_Queues = dict[Key, dict[int, deque[_Entry]]]


class Rules:
    """The operations of all ranks.

    Attributes:
        failure: why nothing more will run; "": nothing is known to have failed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure = ""
        self._queues: _Queues = {}
        self._waiting: dict[int, tuple[Operation, str]] = {}
        self._unended: dict[tuple[int, int], Operation] = {}
        self._left: set[int] = set()
        self._threaded: set[int] = set()

    def post(self, operation: Operation) -> list[Operation]:
        """A rank posts an operation. Returns the operations, of all ranks, that have ended because of it."""
        if self.failure:
            return []
        if operation.aside:
            self._threaded.add(operation.rank)
        queues = self._queues.setdefault(operation.key, {})
        queues.setdefault(operation.rank, deque()).append(_Entry(operation, list(operation.messages)))
        self._unended[operation.rank, operation.number] = operation
        try:
            ended = _run(queues, (), exchange=True)
        except RulesError as error:
            self.failure = str(error)
            return []
        for each in ended:
            del self._unended[each.rank, each.number]
            waited = self._waiting.get(each.rank)
            if waited is not None and waited[0] is each:
                del self._waiting[each.rank]
        if not any(queues.values()):
            del self._queues[operation.key]
        return ended

    def wait(self, rank: int, number: int, where: str) -> None:
        """A rank does nothing more until its operation of this number has ended; ``where`` is for messages."""
        operation = self._unended.get((rank, number))
        if operation is not None and not self.failure:
            self._waiting[rank] = operation, where
            self._look_for_a_cycle()

    def leave(self, rank: int) -> None:
        """A rank will post nothing more."""
        self._left.add(rank)
        self._waiting.pop(rank, None)
        self._look_for_a_cycle()

    def unended(self) -> list[Operation]:
        """Operations that were posted and have not ended."""
        return list(self._unended.values())

    def _look_for_a_cycle(self) -> None:
        if self.failure:
            return
        try:
            stuck = self._stuck()
        except RulesError as error:
            self.failure = str(error)
            return
        if stuck:
            lines = [self._position(rank) for rank in sorted(stuck)]
            if self._left:
                lines.append(f"rank {', '.join(map(str, sorted(self._left)))} has ended")
            self.failure = "\n  ".join([f"ranks {', '.join(map(str, sorted(stuck)))} wait for ever:", *lines])

    def _stuck(self) -> set[int]:
        """The ranks whose operations would not end whatever the ranks that go on may post.

        Raises:
            RulesError: operations of ranks that wait will meet and do not fit together.
        """
        free = set(range(self.size)) - (self._waiting.keys() - self._threaded) - self._left
        queues = {
            key: {rank: deque(_Entry(e.operation, list(e.left)) for e in queue) for rank, queue in of_key.items()}
            for key, of_key in self._queues.items()
        }
        while True:
            for of_key in queues.values():
                for rank in free:
                    of_key.pop(rank, None)  # its peers may go on, whatever it has posted
            ended = {each for of_key in queues.values() for each in _run(of_key, free, exchange=False)}
            more = {rank for rank, (each, _) in self._waiting.items() if rank not in free and each in ended}
            if not more:
                return self._waiting.keys() - free
            free |= more

    def _position(self, rank: int) -> str:
        operation, where = self._waiting[rank]
        first = self._queues[operation.key][rank][0].operation
        behind = f", behind its {first}" if first is not operation else ""
        return f"rank {rank} waits in {where} for its {operation}{behind}"


def _run(queues: dict[int, deque[_Entry]], free: Collection[int], exchange: bool) -> list[Operation]:
    """Run the operations of one communicator that can run, and return those that have ended.

    Args:
        queues: of each rank.
        free: ranks that do whatever is needed; they have no queues.
        exchange: whether to hand payloads over.

    Raises:
        RulesError: operations that meet do not fit together.
    """
    ended: list[Operation] = []
    moved = True
    while moved:
        moved = False
        for rank in [rank for rank, queue in queues.items() if queue]:
            if not queues[rank]:
                continue  # ended together with another's
            entry = queues[rank][0]
            if entry.operation.kind == MESSAGES:
                for message in list(entry.left):
                    moved |= _run_message(queues, entry, message, free, exchange)
                together = [rank] if not entry.left else []
            else:
                together = _run_collective(queues, entry.operation, free, exchange)
            for each in together:
                ended.append(queues[each].popleft().operation)
                moved = True
    return ended


def _run_message(
    queues: dict[int, deque[_Entry]], entry: _Entry, message: Message, free: Collection[int], exchange: bool
) -> bool:
    if message.peer in free:
        entry.left.remove(message)
        return True
    first = queues.get(message.peer)
    if not first:
        return False
    rank = entry.operation.rank
    for other in first[0].left:
        if other.peer == rank and other.sends != message.sends:
            if other.nbytes != message.nbytes:
                raise RulesError(
                    f"rank {rank} posts a {message} and rank {message.peer} a {other}, on {_name(entry.operation.key)}"
                )
            entry.left.remove(message)
            first[0].left.remove(other)
            if exchange:
                source, target = (message, other) if message.sends else (other, message)
                target.payload = source.payload
            return True
    return False


def _run_collective(
    queues: dict[int, deque[_Entry]], operation: Operation, free: Collection[int], exchange: bool
) -> list[int]:
    """The ranks whose first operation has ended."""
    firsts: dict[int, Operation] = {}
    for rank in operation.ranks:
        if queues.get(rank):
            firsts[rank] = queues[rank][0].operation
        elif rank not in free:
            return []
    for rank, other in firsts.items():
        same = (other.kind, other.form) == (operation.kind, operation.form)
        if other.kind == MESSAGES:
            return []
        if not same:
            raise RulesError(f"rank {operation.rank} posts {operation}, and rank {rank} {other}")
    if exchange:
        results = [firsts[rank].payload for rank in operation.ranks]
        for other in firsts.values():
            other.results = results
    return list(firsts)


def _name(key: Key) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)

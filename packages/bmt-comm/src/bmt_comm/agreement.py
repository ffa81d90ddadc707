"""Ranks that disagree get an error that names the first difference, not a hang."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from .communicator import Communicator

_MASK = (1 << 63) - 1


def check_agreement(comm: Communicator, what: str, facts: Sequence[str]) -> None:
    """Raise unless every rank of ``comm`` came here with the same ``what`` and ``facts``.

    Costs one all-gather of 32 bytes per rank while they agree.  Every call has the same wire format, so
    ranks that have come to different calls are told so as well.

    Raises:
        RuntimeError: on every rank, naming the first difference and the ranks.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256(repr((what, list(facts))).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(comm.device)
    everyone = torch.empty(comm.size, 32, dtype=torch.uint8, device=comm.device)
    comm.all_gather(everyone, mine, label="an agreement")
    if bool((everyone == everyone[0]).all()):
        return
    reports = comm.all_gather_object((what, list(facts)))
    other = next(r for r in range(comm.size) if reports[r] != reports[0])
    names = [f"rank {comm.ranks[0]}", f"rank {comm.ranks[other]}"]
    (what_a, facts_a), (what_b, facts_b) = reports[0], reports[other]
    if what_a != what_b:
        raise RuntimeError(f"ranks disagree on what comes next: {names[0]} is at {what_a}, {names[1]} at {what_b}")
    for index, (a, b) in enumerate(zip_longest(facts_a, facts_b, fillvalue=None)):
        if a != b:
            a, b = ("nothing" if fact is None else fact for fact in (a, b))
            raise RuntimeError(f"ranks disagree on {what}: item {index} is {a} on {names[0]} and {b} on {names[1]}")


_steps = 0


def note_step() -> None:
    """An optimizer steps; ranks compare how often they have."""
    global _steps
    _steps += 1


def forget_steps() -> None:
    """A job begins."""
    global _steps
    _steps = 0


class CallSequences:
    """Compares the order of the named operations that ranks have started, after they have run.

    Collectives of equal sizes do not notice that one rank means another parameter than the others. Each operation adds
    its label to a digest for its communicator; :meth:`compare` exchanges a digest of 8 bytes per rank, and the labels
    only where digests differ.
    """

    _KEPT = 512  # operations since the last comparison whose labels can be named

    def __init__(self) -> None:
        self._digests: dict[Communicator, int] = {}
        self._operations: dict[Communicator, deque[int]] = {}
        self._names: dict[int, str] = {}
        self._late: list[tuple[torch.Tensor, torch.cuda.Event, Communicator, deque[int]]] = []

    def label(self, name: str) -> int:
        """The number for ``name``, the same on every rank."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        self._names[number] = name
        return number

    def add(self, comm: Communicator, label: int) -> None:
        """An operation over ``comm`` is started."""
        operations = self._operations.get(comm)
        if operations is None:
            operations = self._operations[comm] = deque(maxlen=self._KEPT)
        operations.append(label)
        self._digests[comm] = (self._digests.get(comm, 0) * 1000003 + label) & _MASK

    def compare(self) -> None:
        """Raise where ranks have started different operations. Every rank of the communicators must call this.

        On CUDA the host does not wait: a difference is raised by a later comparison.

        Raises:
            RuntimeError: on every rank, naming the first difference.
        """
        late, self._late = self._late, []
        for everyone, event, comm, operations in late:
            event.synchronize()  # of the step before, long done
            self._check(everyone, comm, operations)
        digests, self._digests = self._digests, {}
        started, self._operations = self._operations, {}
        for comm, digest in digests.items():
            mine = torch.tensor([digest ^ _steps], dtype=torch.int64, device=comm.device)
            everyone = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
            comm.all_gather(everyone, mine, label="the order of operations")
            if comm.device.type == "cuda":
                on_host = torch.empty(comm.size, dtype=torch.int64, pin_memory=True).copy_(everyone, non_blocking=True)
                event = torch.cuda.current_stream(comm.device).record_event()
                self._late.append((on_host, event, comm, started[comm]))
            else:
                self._check(everyone, comm, started[comm])

    def _check(self, everyone: torch.Tensor, comm: Communicator, operations: Iterable[int]) -> None:
        digests = everyone.tolist()
        if digests.count(digests[0]) == len(digests):
            return
        self._digests, self._operations, self._late = {}, {}, []
        told = comm.all_gather_object((_steps, [self._names[label] for label in operations]))
        steps, reports = [steps for steps, _ in told], [names for _, names in told]
        other = next(rank for rank in range(comm.size) if digests[rank] != digests[0])
        for number, (a, b) in enumerate(zip_longest(reports[0], reports[other], fillvalue="nothing")):
            if a != b:
                raise RuntimeError(
                    f"ranks disagree on the order of operations: operation {number} is {a} on rank {comm.ranks[0]} and "
                    f"{b} on rank {comm.ranks[other]}; what was computed since the last step is wrong"
                )
        if steps[0] != steps[other]:
            raise RuntimeError(
                f"ranks have stepped their optimizers differently often: rank {comm.ranks[0]} {steps[0]} times, "
                f"rank {comm.ranks[other]} {steps[other]} times"
            )
        raise RuntimeError(f"ranks {comm.ranks} disagree on the order of operations, too long ago to say where")

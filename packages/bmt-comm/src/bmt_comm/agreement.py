"""Checks that ranks agree: ranks that differ get an error that names the first difference, instead of a hang.

[Note: agreement over the store]
    A check uses the rendezvous store, not a collective, so a rank that does not come to it costs the others no more
    than the time-out of the check. If all ranks agree, each needs one request, and some more while it waits
    (:class:`Tally`). If they differ, two values are exchanged: that of rank 0, and that of the lowest rank that differs
    from it. The last rank to come removes the keys of the previous check, which all ranks have left.

    A check is one of the communicator's operations. A rank that is at another operation in its place is detected as it
    is between collectives, and the watch describes a rank that is elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ._compat import not_compiled
from .communicator import Communicator
from .journal import limits
from .report import ranks_in_words
from .tally import Tally, missing, read_soon

_MASK = (1 << 63) - 1
_PAUSES = 0.0001, 0.02  # seconds between two looks at the store, the first and the last
_PAUSE_PER_RANK = 1e-4  # seconds; ranks that wait leave the store time for others
_LATE = 0.5  # seconds of waiting after which a rank writes that it is here
TIMEOUT = 300.0
"""Seconds that a check waits for other ranks by default."""


class DisagreementError(RuntimeError):
    """Ranks have passed different values to a check."""


@dataclass
class _Settings:
    """Settings of the checks of this process; see :func:`begin_agreements`.

    Attributes:
        store: of the checks; None: that of the default process group.
        timeout: seconds that a check waits for the other ranks.
        stopped: why checks are to end; "": they are not.
    """

    store: Any = None
    timeout: float = TIMEOUT
    stopped: str = ""


_settings = _Settings()


def begin_agreements(store: Any, timeout: float) -> None:
    """Let checks use ``store`` from now on, and wait for ``timeout`` seconds."""
    _settings.store, _settings.timeout, _settings.stopped = store, timeout, ""


def stop_agreements(why: str) -> None:
    """End checks that wait for other ranks with an error."""
    _settings.stopped = why


@contextlib.contextmanager
def agreement_time() -> Iterator[None]:
    """Within, this thread's waits for collectives may take as long as :func:`check_agreement`, and no longer."""
    thread = threading.get_ident()
    before = limits.get(thread)
    limits[thread] = _settings.timeout
    try:
        yield
    finally:
        if before is None:
            del limits[thread]
        else:
            limits[thread] = before


@not_compiled
def check_agreement(comm: Communicator, what: str, facts: Sequence[str]) -> None:
    """Raise unless every rank of ``comm`` came here with the same ``what`` and ``facts``.

    Costs a few requests to the rendezvous store; see [Note: agreement over the store].

    Raises:
        DisagreementError: on every rank, naming the first difference and the ranks.
        RuntimeError: a rank has not come within ``agreement_timeout`` of :func:`bmt_comm.init_distributed`.
    """
    if comm.size == 1 or comm.is_planned:
        return
    check = _Check(comm, what, facts)
    comm.wait_for(check, f"agreement on {what}")
    if check.differs:
        _raise_difference(comm, *check.differs)


class _Check:
    """One check, as an operation that can be waited for.

    Attributes:
        differs: the values of rank 0 and of another rank, and the other rank; None: all values are the same.
    """

    def __init__(self, comm: Communicator, what: str, facts: Sequence[str]) -> None:
        assert comm.group is not None
        base = _settings.store or dist.distributed_c10d._get_default_store()
        # Process groups of other ranks may have the same name.
        ranks = hashlib.sha256(str(comm.ranks).encode()).hexdigest()[:16]
        store = dist.PrefixStore(f"bmt_comm/agreement/{comm.group.group_name}/{ranks}", base)
        if comm.group not in _last:  # a group that was destroyed may have had the name, the ranks and the store
            _last[comm.group] = store.add(f"groups/{comm.rank}", 1), 0, []
        group, number, self._before = _last[comm.group]
        self._store = dist.PrefixStore(str(group), store)
        self._rank, self._size, self._ranks = comm.rank, comm.size, comm.ranks
        self._what, self._value = what, json.dumps([what, list(facts)])
        self._key = str(number + 1)
        self._keys = [f"{self._key}/came"]
        _last[comm.group] = group, number + 1, self._keys
        self.differs: tuple[str, str, int] | None = None

    def wait(self) -> None:
        tally = Tally(self._store, self._keys[0], self._size, self._value)
        self._begun = time.monotonic()
        self._wait_for(tally)
        if not tally.agrees:
            self._exchange()
        if tally.last:
            for key in self._before:
                self._store.delete_key(key)

    def is_completed(self) -> bool:
        return False

    def _wait_for(self, tally: Tally) -> None:
        """Wait until all ranks have come."""
        pause, is_written = _PAUSES[0], False
        longest = max(_PAUSES[1], _PAUSE_PER_RANK * self._size)
        while not tally.complete:
            self._stop_late()
            if not is_written and time.monotonic() - self._begun > _LATE:
                self._store.set(f"{self._key}/{self._rank}", "")
                is_written = True
            time.sleep(pause)
            pause = min(2 * pause, longest)
            tally.look()
        if is_written:
            self._store.delete_key(f"{self._key}/{self._rank}")

    def _stop_late(self) -> None:
        """Raise if checks were stopped, or the time-out has passed."""
        if _settings.stopped:
            raise RuntimeError(_settings.stopped)
        if time.monotonic() - self._begun > _settings.timeout:
            absent = missing(self._store, [f"{self._key}/{rank}" for rank in range(self._size)])
            raise RuntimeError(
                f"{ranks_in_words([self._ranks[rank] for rank in absent])} did not come to the agreement on "
                f"{self._what} in {_settings.timeout:g} seconds"
            )

    def _exchange(self) -> None:
        """Exchange the values of rank 0 and of the lowest rank that differs from it."""
        first, lowest, compared, second = (f"{self._key}/{name}" for name in ("first", "lowest", "compared", "second"))
        self._keys += [first, lowest, compared, second]
        if self._rank == 0:
            self._store.set(first, self._value)
        reference = read_soon(self._store, first, self._stop_late)
        if reference != self._value:
            seen = ""
            while seen == "" or int(seen) > self._rank:
                now = self._store.compare_set(lowest, seen, str(self._rank)).decode()
                if now == str(self._rank):
                    break
                seen = now
        self._wait_for(Tally(self._store, compared, self._size, ""))
        other = int(read_soon(self._store, lowest, self._stop_late))
        if other == self._rank:
            self._store.set(second, self._value)
        self.differs = reference, read_soon(self._store, second, self._stop_late), other


_last: WeakKeyDictionary[dist.ProcessGroup, tuple[int, int, list[str]]] = WeakKeyDictionary()
"""How many process groups have had this one's name, ranks and store, the number of its last check, and its keys."""


def _raise_difference(comm: Communicator, first: str, second: str, other: int) -> None:
    (what_a, facts_a), (what_b, facts_b) = json.loads(first), json.loads(second)
    names = [f"rank {comm.ranks[0]}", f"rank {comm.ranks[other]}"]
    if what_a != what_b:
        raise DisagreementError(f"ranks disagree on what comes next: {names[0]} is at {what_a}, {names[1]} at {what_b}")
    for index, (a, b) in enumerate(zip_longest(facts_a, facts_b, fillvalue=None)):
        if a != b:
            a, b = ("nothing" if fact is None else fact for fact in (a, b))
            raise DisagreementError(
                f"ranks disagree on {what_a}: item {index} is {a} on {names[0]} and {b} on {names[1]}"
            )


_steps = 0
_rates: deque[list[str]] = deque(maxlen=64)
"""The learning rates of the last steps, as texts: hosts may compute the last digit of a rate differently."""
_rates_digest = 0


def note_step(rates: Sequence[float] = ()) -> None:
    """Count a step of an optimizer, with its learning rates. Ranks compare the counts and the rates."""
    global _steps, _rates_digest
    _steps += 1
    _rates.append([f"{rate:.6g}" for rate in rates])
    _rates_digest = (_rates_digest * 1000003 + zlib.crc32(str(_rates[-1]).encode())) & _MASK


def forget_steps() -> None:
    """A job begins: forget the steps of the one before."""
    global _steps, _rates_digest
    _steps = _rates_digest = 0
    _rates.clear()


class CallSequences:
    """Compares the order of the named operations that ranks have started, after they have run.

    A collective does not fail if one rank passes another parameter of the same size. Each operation adds its label to a
    digest for its communicator. :meth:`compare` exchanges a digest of 8 bytes per rank, and the labels only if digests
    differ. The digest also covers the steps of optimizers and their learning rates.
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

        On CUDA the host does not wait for this one: a difference is raised by the next comparison.

        Raises:
            RuntimeError: on every rank, naming the first difference.
        """
        late, self._late = self._late, []
        for everyone, event, comm, operations in late:
            event.synchronize()  # of the comparison before
            self._check(everyone, comm, operations)
        digests, self._digests = self._digests, {}
        started, self._operations = self._operations, {}
        for comm, digest in digests.items():
            mine = torch.full((1,), digest ^ _steps ^ _rates_digest, dtype=torch.int64, device=comm.device)
            everyone = comm.stacked(mine, "the order of operations").flatten()
            if comm.device.type == "cuda":
                on_host = torch.empty(comm.size, dtype=torch.int64, pin_memory=True, device="cpu").copy_(
                    everyone, non_blocking=True
                )
                event = torch.cuda.current_stream(comm.device).record_event()
                self._late.append((on_host, event, comm, started[comm]))
            else:
                self._check(everyone, comm, started[comm])

    def _check(self, everyone: torch.Tensor, comm: Communicator, operations: Iterable[int]) -> None:
        digests = everyone.tolist()
        if digests.count(digests[0]) == len(digests):
            return
        self._digests, self._operations, self._late = {}, {}, []
        gathered = comm.all_gather_object((_steps, list(_rates), [self._names[label] for label in operations]))
        steps, rates, reports = zip(*gathered, strict=True)
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
        for number, each in enumerate(zip(rates[0], rates[other], strict=True), steps[0] - len(rates[0]) + 1):
            for index, (a, b) in enumerate(zip_longest(*each, fillvalue="none")):
                if a != b:
                    raise RuntimeError(
                        f"ranks have stepped with different learning rates: step {number} of this job, parameter group "
                        f"{index}: {a} on rank {comm.ranks[0]} and {b} on rank {comm.ranks[other]}; what was trained "
                        f"since is wrong. Give schedulers the same numbers on all ranks: the mean of a loss, not that "
                        f"of one rank"
                    )
        raise RuntimeError(
            f"ranks {comm.ranks} disagree on the order of operations or on learning rates, too long ago to say where"
        )

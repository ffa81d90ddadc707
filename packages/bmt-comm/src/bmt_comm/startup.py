"""The first meeting of a job's processes, over the rendezvous store: which have come, and with which arguments."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from .report import ranks_in_words
from .tally import Tally, missing, read_many, read_soon

_PAUSES = 0.001, 0.1  # seconds between two looks at the store, the first and the last
_PATIENCE = 30.0  # seconds after which a warning names the missing ranks
_PERIOD = 0.25  # seconds between two looks at the processes of this host
_READ_TIMEOUT = 2.0  # seconds that all ranks have to read what differs
_log = logging.getLogger("bmt_comm")


@dataclass(frozen=True)
class Peer:
    """A process of the job.

    Attributes:
        host: the same for processes that see each other's ids.
        process: its id.
        started: when it started; a later process with the same id has another value.
    """

    host: str
    process: int
    started: str

    @classmethod
    def here(cls) -> Peer:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, process: int) -> Peer:
        """A process of this host."""
        host = "|".join(_first_line(path) for path in ("/proc/sys/kernel/random/boot_id", "/etc/hostname"))
        try:
            host += os.readlink("/proc/self/ns/pid")
        except OSError:
            host += f"unknown {os.getpid()}"
        return cls(host, process, _stat(process)[1])

    def state(self) -> str:
        """ "ended", "stopped", "alive", or "" where it cannot be known: it is on another host."""
        if self.host != _here().host:
            return ""
        state, started = _stat(self.process)
        if state in ("", "Z", "X") or started != self.started:
            return "ended"
        return "stopped" if state in "Tt" else "alive"


_cached: Peer | None = None


def _here() -> Peer:
    global _cached
    if _cached is None or _cached.process != os.getpid():
        _cached = Peer.here()
    return _cached


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _stat(process: int) -> tuple[str, str]:
    """The state of a process and when it started; two empty strings if there is none."""
    try:
        # The name of a process, in parentheses, may be cut within a character.
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def connect(init_method: str, rank: int, size: int, timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store where the job's processes meet, this process's rank, and the number of ranks.

    As ``torch.distributed.rendezvous``, but rank 0, if it keeps the store, does not wait for the others to connect:
    :func:`meet` does that, and notices processes that end in the meantime. ``rank`` and ``size`` are -1 if
    ``init_method`` contains them.

    Raises:
        RuntimeError: rank 0 cannot be reached.
    """
    url = urlparse(init_method)
    query = dict(parse_qsl(url.query))
    is_ambiguous = "rank" in query and rank != -1  # torch raises
    number, count = (int(query.get(name, -1)) if v == -1 else v for name, v in (("rank", rank), ("world_size", size)))
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store
    if launched or is_ambiguous or url.scheme not in ("env", "tcp") or not host or not port or number < 0 or count < 1:
        store, rank, size = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
        return store, rank, size
    settings: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    settings["use_libuv"] = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    if number == 0:
        return dist.TCPStore(host, port, count, True, timeout, **settings), number, count
    begun, has_warned = time.monotonic(), False
    while True:
        left = timeout.total_seconds() - (time.monotonic() - begun)
        attempt = datetime.timedelta(seconds=max(0.1, min(left, _PATIENCE)))
        try:
            return dist.TCPStore(host, port, count, False, attempt, **settings), number, count
        except RuntimeError as error:
            if time.monotonic() - begun >= timeout.total_seconds():
                seconds = timeout.total_seconds()
                raise RuntimeError(
                    f"rank {number} could not reach rank 0 at {host}:{port} in {seconds:g} seconds"
                ) from error
        if not has_warned:
            has_warned = True
            _log.warning("rank %d could not reach rank 0 at %s:%d in %g seconds yet", number, host, port, _PATIENCE)


class Start:
    """Names one start of the job in a store that may hold the keys of earlier ones, as torchrun's does.

    Rank 0 draws the name. Each other rank writes a call with a fresh token, and rank 0 writes the answer under that
    token. So a rank gets the name from a rank 0 that runs now, never that of an earlier start whose rank 0 has ended.
    Rank 0 also answers calls of ranks that have ended; these answers are not read.

    Attributes:
        name: of this start.
    """

    def __init__(self, store: Any, rank: int, timeout: float) -> None:
        self._store, self._rank = dist.PrefixStore("bmt_comm/starts", store), rank
        token = self.name = uuid.uuid4().hex
        if rank == 0:
            self._number = int(self._store.get("heard")) if self._store.check(["heard"]) else 0
            self._unset: set[int] = set()  # numbers of calls that are not there yet
            self._called: set[int] = set()  # ranks
            return
        self._store.set(f"call/{self._store.add('calls', 1)}", json.dumps([rank, token]))
        begun, pause = time.monotonic(), _PAUSES[0]
        while not self._store.check([f"answer/{token}"]):
            if time.monotonic() - begun > timeout:
                raise RuntimeError(f"rank 0 did not come to init_distributed() in {timeout:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        self.name = self._store.get(f"answer/{token}").decode()
        self._store.delete_key(f"answer/{token}")

    def answer(self, meeting: Any) -> None:
        """On rank 0, answer the ranks that have called since the last time.

        Raises:
            RuntimeError: a rank that has come to the meeting calls again.
        """
        if self._rank != 0:
            return
        number = self._store.add("calls", 0)
        numbers = sorted(self._unset | set(range(self._number + 1, number + 1)))
        self._number = number
        self._unset = {numbers[index] for index in missing(self._store, [f"call/{each}" for each in numbers])}
        for call in read_many(self._store, [f"call/{each}" for each in numbers if each not in self._unset]):
            rank, token = json.loads(call)
            if rank in self._called and meeting.check([f"here/{rank}"]):
                raise RuntimeError(f"rank {rank} came to init_distributed() again before all ranks had come")
            self._called.add(rank)
            self._store.set(f"answer/{token}", self.name)

    def end(self) -> None:
        """All ranks have come: a later rank 0 need not read these calls."""
        if self._rank == 0:
            self._store.set("heard", str(self._number))


def meet(
    store: Any, rank: int, size: int, facts: Mapping[str, object], timeout: float, start: Start | None = None
) -> dict[int, Peer]:
    """Wait until every rank has come here, and compare their facts.

    Args:
        store: a store that nothing else uses.
        facts: what must be the same on all ranks, by name.
        timeout: seconds to wait for the others.
        start: the :class:`Start` that has named ``store``.

    Returns:
        The processes on this host, this one among them, by rank.

    Raises:
        ValueError: a fact differs; on all ranks, with the values of all.
        RuntimeError: a rank has not come in time, or has ended in the meantime.
    """
    mine = _here()
    value = json.dumps({name: str(value) for name, value in facts.items()})
    host = f"host/{hashlib.sha256(mine.host.encode()).hexdigest()[:16]}"
    store.set(f"here/{rank}", value)
    store.set(f"{host}/{store.add(host, 1)}", json.dumps([rank, mine.process, mine.started]))
    tally = Tally(store, "came", size, value)
    begun = time.monotonic()
    looked, has_warned, pause = begun, False, _PAUSES[0]
    while not tally.complete:
        if start is not None:
            start.answer(store)
        now = time.monotonic()
        if now - looked > _PERIOD:
            looked = now
            _check_peers(store, host, rank, size)
        if now - begun > timeout:
            raise RuntimeError(
                f"{ranks_in_words(_missing(store, size))} did not come to init_distributed() in {timeout:g} seconds"
            )
        if now - begun > _PATIENCE and not has_warned:
            has_warned = True
            _warn_of_missing(store, rank, size)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
        tally.look()
    if start is not None:
        start.end()
    if not tally.agrees:
        raise ValueError(_read_difference(store, rank, size, begun + timeout + _PATIENCE))
    return _on_this_host(store, host)


def _check_peers(store: Any, host: str, rank: int, size: int) -> None:
    """Raise RuntimeError if a process of this host that has come has ended."""
    ended = [other for other, peer in _on_this_host(store, host).items() if peer.state() == "ended"]
    if ended:
        raise RuntimeError(
            f"{ranks_in_words(sorted(ended))} ended while rank {rank} waited for "
            f"{ranks_in_words(_missing(store, size))} to start"
        )


def _warn_of_missing(store: Any, rank: int, size: int) -> None:
    """Warn, on the first rank that has come, of those that have not."""
    absent = _missing(store, size)
    if absent and rank == min(set(range(size)) - set(absent)):
        _log.warning("%s did not come to init_distributed() in %g seconds yet", ranks_in_words(absent), _PATIENCE)


def _read_difference(store: Any, rank: int, size: int, deadline: float) -> str:
    """What differs between the ranks, in words, from rank 0. ``deadline``: on the clock ``time.monotonic``."""
    if rank == 0:
        store.set("differs", _difference([json.loads(each) for each in _of_all(store, size)]))

    def until() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError("ranks call init_distributed() with different arguments")

    difference = read_soon(store, "differs", until)
    store.add("read", 1)
    # Rank 0 may keep the store, from which the others still read.
    last = time.monotonic() + _READ_TIMEOUT
    while rank == 0 and store.add("read", 0) < size and time.monotonic() < last:
        time.sleep(_PAUSES[0])
    return difference


def _missing(store: Any, size: int) -> list[int]:
    return missing(store, [f"here/{rank}" for rank in range(size)])


def _of_all(store: Any, size: int) -> list[str]:
    return read_many(store, [f"here/{rank}" for rank in range(size)])


def _on_this_host(store: Any, host: str) -> dict[int, Peer]:
    """The processes that have come from this host, by rank."""
    keys = [f"{host}/{number + 1}" for number in range(store.add(host, 0))]
    absent = set(missing(store, keys))
    came = read_many(store, [key for number, key in enumerate(keys) if number not in absent])
    mine = _here()
    return {rank: Peer(mine.host, process, started) for rank, process, started in map(json.loads, came)}


def _difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """The first fact that differs, with the value of every rank."""
    for name in everyone[0]:
        values = [facts.get(name, "nothing") for facts in everyone]
        if len(set(values)) > 1:
            by_rank = ", ".join(
                f"{value} on {ranks_in_words([rank for rank, each in enumerate(values) if each == value])}"
                for value in dict.fromkeys(values)
            )
            return f"ranks call init_distributed() with different arguments: {name} is {by_rank}"
    return "ranks call init_distributed() of different versions of bmt_comm"

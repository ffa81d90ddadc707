"""The first meeting of a job's processes, over the rendezvous store: who has come, and with which arguments."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import ranks_in_words

_PAUSES = 0.001, 0.1  # seconds between two looks at the store, the first and the last
_PATIENCE = 30.0  # seconds after which it is said who is missing
_log = logging.getLogger("bmt_comm")


@dataclass(frozen=True)
class Peer:
    """A process of the job.

    Attributes:
        host: the same for processes that see each other's numbers.
        process: its number.
        started: when it started, which tells it from a later process of that number.
    """

    host: str
    process: int
    started: str

    @classmethod
    def here(cls) -> Peer:
        """This process."""
        host = "|".join(_first_line(path) for path in ("/proc/sys/kernel/random/boot_id", "/etc/hostname"))
        try:
            host += os.readlink("/proc/self/ns/pid")
        except OSError:
            host += f"unknown {os.getpid()}"
        return cls(host, os.getpid(), _stat(os.getpid())[1])

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
    """The state of a process and when it started; "" and "" of one that is not there."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def meet(store: Any, rank: int, size: int, facts: Mapping[str, object], timeout: float) -> list[Peer]:
    """Wait until every rank has come here, and compare what they bring.

    Args:
        store: which nothing else uses.
        facts: what must be the same on all ranks, by name.
        timeout: seconds to wait for the others.

    Returns:
        The processes, by rank.

    Raises:
        ValueError: a fact differs; on all ranks, with everybody's values.
        RuntimeError: a rank has not come in time, or has ended meanwhile.
    """
    mine = _here()
    told = {name: str(value) for name, value in facts.items()}
    store.set(f"here/{rank}", json.dumps([told, [mine.host, mine.process, mine.started]]))
    came: dict[int, tuple[dict[str, str], Peer]] = {}
    begun, said, pause = time.monotonic(), False, _PAUSES[0]
    while len(came) < size:
        missing = [other for other in range(size) if other not in came]
        for other in missing:
            if store.check([f"here/{other}"]):
                theirs, peer = json.loads(store.get(f"here/{other}"))
                came[other] = theirs, Peer(*peer)
        missing = [other for other in missing if other not in came]
        if not missing:
            break
        ended = [other for other, (_, peer) in came.items() if peer.state() == "ended"]
        if ended:
            raise RuntimeError(
                f"{ranks_in_words(ended)} ended while rank {rank} waited for {ranks_in_words(missing)} to start"
            )
        waited = time.monotonic() - begun
        if waited > timeout:
            raise RuntimeError(f"{ranks_in_words(missing)} did not come to init_distributed() in {timeout:g} seconds")
        if waited > _PATIENCE and not said and rank == min(came):
            said = True
            _log.warning("%s did not come to init_distributed() in %g seconds yet", ranks_in_words(missing), _PATIENCE)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    _compare([came[other][0] for other in range(size)])
    return [came[other][1] for other in range(size)]


def _compare(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise unless all facts are the same."""
    for name in everyone[0]:
        values = [facts.get(name, "nothing") for facts in everyone]
        if len(set(values)) > 1:
            told = ", ".join(
                f"{value} on {ranks_in_words([rank for rank, each in enumerate(values) if each == value])}"
                for value in dict.fromkeys(values)
            )
            raise ValueError(f"ranks call init_distributed() with different arguments: {name} is {told}")

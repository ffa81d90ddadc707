"""Which ranks keep others waiting: pure functions of the status of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

_NAMED = 16  # ranks that have a line of their own


class Waiting(TypedDict):
    """An operation that a rank waits for.

    ``key`` is the process group, ``group`` its name in messages, ``number`` the place of a collective in its order (0:
    a message), ``peers`` the ranks without which it does not end, ``seconds`` how long the rank has waited for it.
    """

    key: str
    group: str
    number: int
    name: str
    peers: list[int]
    seconds: float
    place: str


class Status(TypedDict):
    """The status of a rank, which it writes itself.

    ``groups`` has, by the process group's key, how many collectives the rank has begun, and the names of the last ones
    by number. ``last`` describes the last operation. ``line`` is the innermost line of the user's code, ``stack`` the
    Python stack of the main thread, ``raised`` the traceback of the exception that has ended the rank, ``error`` the
    first line of the exception alone.
    """

    waiting: list[Waiting]
    groups: dict[str, tuple[int, dict[str, str]]]
    last: str
    place: str
    line: str
    stack: str
    raised: str
    error: str


def awaited(statuses: Mapping[int, Status], processes: Mapping[int, str]) -> dict[int, set[int]]:
    """The ranks that each waiting rank waits for: they have not begun the same operation, or have ended.

    ``processes`` has the states of processes, as far as they are known; see ``Peer.state``.
    """
    missing: dict[int, set[int]] = {}
    for rank, status in statuses.items():
        for waiting in status["waiting"]:
            for peer in waiting["peers"]:
                if peer != rank and _is_missing(waiting, statuses.get(peer), processes.get(peer, "")):
                    missing.setdefault(rank, set()).add(peer)
    return missing


def _is_missing(waiting: Waiting, status: Status | None, process: str) -> bool:
    if status is None or status["raised"] or process == "ended":
        return True
    if waiting["number"] == 0:
        return True  # a message: its sender or receiver is known
    count, names = status["groups"].get(waiting["key"], (0, {}))
    name = names.get(str(waiting["number"]), waiting["name"])
    return count < waiting["number"] or name != waiting["name"]


def culprits(statuses: Mapping[int, Status], processes: Mapping[int, str], size: int) -> list[int]:
    """The ranks that have failed. If none has: those that others wait for and that do not wait; or all that wait."""
    failed = [rank for rank in range(size) if processes.get(rank) in ("ended", "stopped") or rank not in statuses]
    failed += [rank for rank, status in statuses.items() if status["raised"]]
    if failed:
        return sorted(set(failed))
    waits = awaited(statuses, processes)
    wanted = set().union(*waits.values()) if waits else set()
    return sorted(wanted - set(waits)) or sorted(wanted)


def describe(reason: str, statuses: Mapping[int, Status], processes: Mapping[int, str], size: int) -> str:
    """The message: the reason, the culprits with their stacks, and the ranks that wait for them."""
    blamed = culprits(statuses, processes, size)
    lines = [reason]
    for rank in blamed[:_NAMED]:
        lines.append(f"  rank {rank}: {_where(statuses.get(rank), processes.get(rank, ''))}")
    if len(blamed) > _NAMED:
        lines.append(f"  and {ranks_in_words(blamed[_NAMED:])}")
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        if rank not in blamed and rank in statuses:
            groups.setdefault(_where(statuses[rank], ""), []).append(rank)
    lines += [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in groups.items()]
    for rank in blamed[:2]:
        status = statuses.get(rank)
        if status is not None:
            title = "Traceback" if status["raised"] else "Python stack"
            lines.append(f"{title} of rank {rank}:\n{(status['raised'] or status['stack']).rstrip()}")
    # Names of files may be in exceptions, and need not be Unicode; the store takes nothing else.
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def _where(status: Status | None, process: str) -> str:
    """Where a rank is, in words."""
    if status is not None and status["raised"]:
        return f"raised {status['error']}"
    if process == "ended":
        return "has ended"
    if status is None:
        why = "it is stopped" if process == "stopped" else "it may be in native code that holds the interpreter's lock"
        return f"does not answer; {why}"
    if not status["waiting"]:
        last = f"; {status['last']}" if status["last"] else ""
        return f"is at {status['line']}, and waits for no operation{_last_place(status['place'])}{last}"
    first = status["waiting"][0]
    number = f"operation {first['number']} of " if first["number"] else ""
    return f"waits in {number}{first['group']}, {first['name']}, at {status['line']}{_last_place(first['place'])}"


def _last_place(place: str) -> str:
    return f"; last in {place}" if place else ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as a list in words; from the ninth on they are only counted."""
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"

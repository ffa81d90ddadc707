"""Who keeps whom waiting: pure functions of what each rank has told about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

_NAMED = 16  # ranks that have a line of their own


class Waiting(TypedDict):
    """An operation that a rank waits for.

    ``key`` is the process group, ``group`` its name for people, ``number`` the place of a collective in its order (0:
    a message), ``peers`` the ranks without which it does not end, ``seconds`` how long it has been waited for.
    """

    key: str
    group: str
    number: int
    name: str
    peers: list[int]
    seconds: float
    place: str


class Word(TypedDict):
    """What a rank tells about itself.

    ``groups`` has, by the process group's key, how many collectives the rank has begun and the names of the last ones,
    by number. ``last`` is the last operation in words. ``line`` is the innermost line of the user's code, ``stack`` the
    Python stack of the main thread, ``raised`` the traceback of the exception that has ended the rank.
    """

    waiting: list[Waiting]
    groups: dict[str, tuple[int, dict[str, str]]]
    last: str
    place: str
    line: str
    stack: str
    raised: str


def awaited(words: Mapping[int, Word], states: Mapping[int, str]) -> dict[int, set[int]]:
    """The ranks that each waiting rank waits for: they have not begun the same operation, or have ended."""
    found: dict[int, set[int]] = {}
    for rank, word in words.items():
        for waiting in word["waiting"]:
            for peer in waiting["peers"]:
                if peer != rank and _is_missing(waiting, words.get(peer), states.get(peer, "")):
                    found.setdefault(rank, set()).add(peer)
    return found


def _is_missing(waiting: Waiting, word: Word | None, state: str) -> bool:
    if word is None or word["raised"] or state == "ended":
        return True
    if waiting["number"] == 0:
        return True  # a message: its sender or receiver is known
    count, names = word["groups"].get(waiting["key"], (0, {}))
    name = names.get(str(waiting["number"]), waiting["name"])
    return count < waiting["number"] or name != waiting["name"]


def culprits(words: Mapping[int, Word], states: Mapping[int, str], size: int) -> list[int]:
    """The ranks that others wait for and that wait for nobody; where all wait for each other, all of them."""
    failed = [rank for rank in range(size) if states.get(rank) in ("ended", "stopped") or rank not in words]
    failed += [rank for rank, word in words.items() if word["raised"]]
    if failed:
        return sorted(set(failed))
    waits = awaited(words, states)
    wanted = set().union(*waits.values()) if waits else set()
    return sorted(wanted - set(waits)) or sorted(wanted)


def describe(reason: str, words: Mapping[int, Word], states: Mapping[int, str], size: int) -> str:
    """The message: the reason, the culprits with their stacks, and who waits for them."""
    blamed = culprits(words, states, size)
    lines = [reason]
    for rank in blamed[:_NAMED]:
        lines.append(f"  rank {rank}: {_where(words.get(rank), states.get(rank, ''))}")
    if len(blamed) > _NAMED:
        lines.append(f"  and {ranks_in_words(blamed[_NAMED:])}")
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        if rank not in blamed and rank in words:
            groups.setdefault(_where(words[rank], ""), []).append(rank)
    lines += [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in groups.items()]
    for rank in blamed[:2]:
        word = words.get(rank)
        if word is not None:
            title = "Traceback" if word["raised"] else "Python stack"
            lines.append(f"{title} of rank {rank}:\n{(word['raised'] or word['stack']).rstrip()}")
    return "\n".join(lines)


def _where(word: Word | None, state: str) -> str:
    """Where a rank is."""
    if word is not None and word["raised"]:
        return f"raised {word['raised'].rstrip().splitlines()[-1]}"
    if state == "ended":
        return "has ended"
    if word is None:
        why = "it is stopped" if state == "stopped" else "it may be in native code that holds the interpreter's lock"
        return f"does not answer; {why}"
    if not word["waiting"]:
        last = f"; {word['last']}" if word["last"] else ""
        return f"is at {word['line']}, and waits for no operation{_last_place(word['place'])}{last}"
    first = word["waiting"][0]
    number = f"operation {first['number']} of " if first["number"] else ""
    return f"waits in {number}{first['group']}, {first['name']}, at {word['line']}{_last_place(first['place'])}"


def _last_place(place: str) -> str:
    return f"; last in {place}" if place else ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as a list, which is cut where it is long."""
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"

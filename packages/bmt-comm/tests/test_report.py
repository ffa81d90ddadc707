"""Which ranks are blamed, from the statuses of all."""

from __future__ import annotations

from typing import Any

from bmt_comm.report import awaited, culprits, describe


def waiting(number: int, name: str = "all_reduce", peers: tuple[int, ...] = (0, 1, 2), key: str = "g") -> Any:
    return {
        "key": key,
        "group": "world",
        "number": number,
        "name": name,
        "peers": list(peers),
        "seconds": 9.0,
        "place": "the forward of layer 1",
    }


def status(
    count: int, *waits: Any, names: dict[str, str] | None = None, raised: str = "", key: str = "g", error: str = ""
) -> Any:
    return {
        "waiting": list(waits),
        "groups": {key: (count, names or {})},
        "last": "its last operation was x",
        "place": "",
        "line": "train.py:3 in f",
        "stack": "the stack\n",
        "raised": raised,
        "error": error,
    }


def test_the_rank_that_has_not_begun_the_operation():
    statuses = {0: status(5, waiting(5)), 1: status(4), 2: status(5, waiting(5))}
    assert awaited(statuses, {}) == {0: {1}, 2: {1}}
    assert culprits(statuses, {}, 3) == [1]
    said = describe("why", statuses, {}, 3)
    assert said.splitlines()[:3] == [
        "why",
        "  rank 1: is at train.py:3 in f, and waits for no operation; its last operation was x",
        "  ranks 0, 2: waits in operation 5 of world, all_reduce, at train.py:3 in f; last in the forward of layer 1",
    ]
    assert said.endswith("Python stack of rank 1:\nthe stack")


def test_the_last_of_a_chain():
    statuses = {
        0: status(5, waiting(5, peers=(0, 1))),
        1: {**status(4, waiting(0, "receive from 1", peers=(2,), key="p"))},
        2: status(0, key="other"),
    }
    assert culprits(statuses, {}, 3) == [2]


def test_all_of_a_circle():
    statuses = {0: status(0, waiting(0, "receive", peers=(1,))), 1: status(0, waiting(0, "receive", peers=(0,)))}
    assert culprits(statuses, {}, 2) == [0, 1]


def test_ranks_that_call_different_operations():
    statuses = {
        0: status(5, waiting(5, "all_reduce"), names={"5": "all_reduce"}),
        1: status(5, waiting(5, "all_gather"), names={"5": "all_gather"}),
        2: status(6, names={"5": "all_reduce"}),
    }
    assert awaited(statuses, {}) == {0: {1}, 1: {0, 2}}


def test_ranks_that_have_ended_raised_or_do_not_answer():
    statuses = {0: status(5, waiting(5)), 2: status(3)}
    assert culprits(statuses, {1: "ended"}, 3) == [1]
    assert "rank 1: has ended" in describe("why", statuses, {1: "ended"}, 3)
    assert "rank 1: does not answer; it is stopped" in describe("why", statuses, {1: "stopped"}, 3)
    assert "rank 1: does not answer; it may be in native code" in describe("why", statuses, {1: "alive"}, 3)
    statuses[1] = status(3, raised="Traceback\nValueError: no\n", error="ValueError: no")
    assert culprits(statuses, {}, 3) == [1]
    assert describe("why", statuses, {}, 3).splitlines()[1] == "  rank 1: raised ValueError: no"


def test_a_message_that_quotes_what_is_not_unicode_can_be_written_to_the_store():
    said = describe("no file b\udce4.txt", {0: status(3), 1: status(3)}, {}, 2)
    assert said.encode().startswith(b"no file b\\udce4.txt\n")

"""Who is blamed, from what each rank tells about itself."""

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


def word(count: int, *waits: Any, names: dict[str, str] | None = None, raised: str = "", key: str = "g") -> Any:
    return {
        "waiting": list(waits),
        "groups": {key: (count, names or {})},
        "last": "its last operation was x",
        "place": "",
        "line": "train.py:3 in f",
        "stack": "the stack\n",
        "raised": raised,
    }


def test_the_rank_that_has_not_begun_the_operation():
    words = {0: word(5, waiting(5)), 1: word(4), 2: word(5, waiting(5))}
    assert awaited(words, {}) == {0: {1}, 2: {1}}
    assert culprits(words, {}, 3) == [1]
    said = describe("why", words, {}, 3)
    assert said.splitlines()[:3] == [
        "why",
        "  rank 1: is at train.py:3 in f, and waits for no operation; its last operation was x",
        "  ranks 0, 2: waits in operation 5 of world, all_reduce, at train.py:3 in f; last in the forward of layer 1",
    ]
    assert said.endswith("Python stack of rank 1:\nthe stack")


def test_the_last_of_a_chain():
    words = {
        0: word(5, waiting(5, peers=(0, 1))),
        1: {**word(4, waiting(0, "receive from 1", peers=(2,), key="p"))},
        2: word(0, key="other"),
    }
    assert culprits(words, {}, 3) == [2]


def test_all_of_a_circle():
    words = {0: word(0, waiting(0, "receive", peers=(1,))), 1: word(0, waiting(0, "receive", peers=(0,)))}
    assert culprits(words, {}, 2) == [0, 1]


def test_ranks_that_call_different_operations():
    words = {
        0: word(5, waiting(5, "all_reduce"), names={"5": "all_reduce"}),
        1: word(5, waiting(5, "all_gather"), names={"5": "all_gather"}),
        2: word(6, names={"5": "all_reduce"}),
    }
    assert awaited(words, {}) == {0: {1}, 1: {0, 2}}


def test_ranks_that_have_ended_raised_or_do_not_answer():
    words = {0: word(5, waiting(5)), 2: word(3)}
    assert culprits(words, {1: "ended"}, 3) == [1]
    assert "rank 1: has ended" in describe("why", words, {1: "ended"}, 3)
    assert "rank 1: does not answer; it is stopped" in describe("why", words, {1: "stopped"}, 3)
    assert "rank 1: does not answer; it may be in native code" in describe("why", words, {1: "alive"}, 3)
    words[1] = word(3, raised="Traceback\nValueError: no\n")
    assert culprits(words, {}, 3) == [1]
    assert describe("why", words, {}, 3).splitlines()[1] == "  rank 1: raised ValueError: no"

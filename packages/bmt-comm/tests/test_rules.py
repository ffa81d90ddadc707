"""NCCL's rules, without communication: what ends, and what is reported."""

from __future__ import annotations

import itertools

import pytest

from bmt_comm.testing.rules import MESSAGES, Message, Operation, Rules

numbers = itertools.count()


def collective(rank: int, kind: str = "all_reduce", key: str = "world", ranks: tuple[int, ...] = (0, 1)) -> Operation:
    return Operation(rank, next(numbers), key, ranks, kind, payload=bytes([rank]))


def messages(rank: int, *ways: tuple[str, int], key: str = "world", nbytes: int = 4) -> Operation:
    batch = [Message(kind == "to", peer, nbytes, b"data" if kind == "to" else None) for kind, peer in ways]
    return Operation(rank, next(numbers), key, (0, 1, 2), MESSAGES, messages=batch)


def wait(rules: Rules, operation: Operation) -> None:
    rules.wait(operation.rank, operation.number, f"line {operation.rank}")


def test_a_collective_ends_when_all_ranks_have_come_to_it() -> None:
    rules = Rules(2)
    first, second = collective(0), collective(1)
    assert rules.post(first) == []
    wait(rules, first)
    assert not rules.failure
    assert set(rules.post(second)) == {first, second}
    assert first.results == second.results == [b"\0", b"\1"]
    assert not rules.unended()


def test_operations_run_in_the_order_in_which_they_were_posted() -> None:
    rules = Rules(2)
    send, early, late = messages(0, ("to", 1)), collective(0), collective(1)
    assert rules.post(send) == []
    assert rules.post(early) == []
    assert rules.post(late) == []  # rank 0 has a send before it
    wait(rules, late)
    assert not rules.failure  # rank 0 may do whatever is needed, for all that is known
    wait(rules, early)
    assert "rank 0 waits in line 0 for its all_reduce on world, behind its send of 4 bytes to 1" in rules.failure
    assert "rank 1 waits in line 1 for its all_reduce on world" in rules.failure


def test_a_send_ends_with_its_receive_and_what_is_sent_arrives() -> None:
    rules = Rules(3)
    send, receive = messages(0, ("to", 1)), messages(1, ("from", 0))
    assert rules.post(send) == []
    assert set(rules.post(receive)) == {send, receive}
    assert receive.messages[0].payload == b"data"


def test_sends_that_face_each_other_hang_and_batches_do_not() -> None:
    rules = Rules(2)
    for rank in (0, 1):
        send = messages(rank, ("to", 1 - rank))
        rules.post(send)
        rules.post(messages(rank, ("from", 1 - rank)))
        wait(rules, send)
    assert rules.failure.startswith("ranks 0, 1 wait for ever")
    rules = Rules(2)
    batches = [messages(rank, ("to", 1 - rank), ("from", 1 - rank)) for rank in (0, 1)]
    assert not rules.post(batches[0])
    assert set(rules.post(batches[1])) == set(batches)


def test_a_batch_meets_several_operations_of_a_peer() -> None:
    rules = Rules(3)
    batch = messages(0, ("to", 1), ("from", 2), ("from", 1))
    singles = [messages(1, ("from", 0)), messages(1, ("to", 0)), messages(2, ("to", 0))]
    assert rules.post(batch) == []
    assert rules.post(singles[0]) == [singles[0]]
    assert rules.post(singles[1]) == [singles[1]]
    assert set(rules.post(singles[2])) == {batch, singles[2]}


def test_a_circle_of_three_is_found_when_it_closes_and_not_before() -> None:
    rules = Rules(4)
    for rank in range(3):
        receive = messages(rank, ("from", (rank + 1) % 3), key=f"{rank}")  # which no rank will post
        rules.post(receive)
        assert not rules.failure
        wait(rules, receive)
    assert rules.failure.startswith("ranks 0, 1, 2 wait for ever")


def test_messages_that_wait_behind_others_are_not_taken_for_later_ones() -> None:
    rules = Rules(3)
    first, second, third = messages(0, ("to", 2)), messages(0, ("to", 1)), messages(0, ("to", 1), nbytes=8)
    early, late = messages(1, ("from", 2)), messages(1, ("from", 0))
    for each in (first, second, third, early, late):
        assert rules.post(each) == []
    wait(rules, first)
    assert not rules.failure
    batch = messages(2, ("from", 0), ("to", 1))
    assert set(rules.post(batch)) == {first, second, early, late, batch}


def test_messages_of_ranks_that_wait_and_do_not_fit_are_reported_before_they_meet() -> None:
    rules = Rules(3)
    first, second, theirs = messages(0, ("to", 2)), messages(0, ("to", 1)), messages(1, ("from", 0), nbytes=8)
    for each in (first, second, theirs):
        rules.post(each)
    wait(rules, second)
    assert not rules.failure
    wait(rules, theirs)
    assert "rank 1 posts a recv of 8 bytes from 0 and rank 0 a send of 4 bytes to 1, on world" in rules.failure


def test_a_rank_with_several_threads_may_still_post() -> None:
    rules = Rules(2)
    aside = messages(0, ("to", 1), key="aside")
    aside.aside = True
    rules.post(aside)
    for rank in range(2):
        receive = messages(rank, ("from", 1 - rank), key=f"{rank}")
        rules.post(receive)
        wait(rules, receive)
    assert not rules.failure


def test_a_rank_that_has_ended_posts_nothing() -> None:
    rules = Rules(2)
    operation = collective(0)
    rules.post(operation)
    wait(rules, operation)
    rules.leave(1)
    assert "rank 1 has ended" in rules.failure
    assert rules.unended() == [operation]


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        ((collective(0), collective(1, "broadcast")), "rank 0 posts all_reduce on world, and rank 1 broadcast"),
        (
            (messages(0, ("to", 1)), messages(1, ("from", 0), nbytes=8)),
            "rank 0 posts a send of 4 bytes to 1 and rank 1 a recv",
        ),
    ],
)
def test_what_does_not_fit_together_is_reported(pair: tuple[Operation, Operation], match: str) -> None:
    rules = Rules(2)
    for operation in pair:
        rules.post(operation)
    assert match in rules.failure

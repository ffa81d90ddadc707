"""Messages between two processes: which receive gets which, room, errors, and memory that is given back."""

import gc
import mmap
import os
import random
import signal
import threading
import time
from unittest import mock

import pytest
import torch

from bmt_kernels import (
    SharedMemoryExchange,
    SharedMemoryMessages,
    message_places,
    messages,
    progress_thread,
    shared_memory,
)
from bmt_kernels.shared_memory import MismatchError, exchanges_between_two, make_progress

pytestmark = pytest.mark.skipif(not SharedMemoryExchange.available(), reason="this system cannot share memory")

PAGE = mmap.PAGESIZE
PIECE = 1 << 18
WINDOW = 8 * PIECE
ENTRIES = 4096


def connected(count, timeout=20.0, stage_bytes=1 << 20):
    """Exchanges between members of this process, each of which maps the others' memory like any process would."""
    names = [f"member {i}" for i in range(count)]
    members = [SharedMemoryMessages(i, names, timeout, stage_bytes) for i in range(count)]
    handles = [member.handle for member in members]
    for member in members:
        assert member.connect(handles)
    return members


def numbered(number, size=8):
    return (torch.arange(size) * 13 + number * 31).to(torch.uint8)


def wait_all(*works):
    """Wait for works of several members, as their processes would at the same time."""
    pending = [work for work in works if work is not None]
    deadline = time.monotonic() + 20
    while any(not work.is_done for work in pending):
        for exchange in {work.exchange for work in pending}:
            exchange.progress()
        assert time.monotonic() < deadline
    for work in pending:
        work.wait()


@pytest.mark.parametrize("posted_first", [False, True])
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize(
    "size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3 * PIECE + 5]
)
def test_every_size_arrives_as_it_was_sent(size, stage, posted_first):
    a, b = connected(2, stage_bytes=3 * WINDOW)
    box = torch.zeros(size, dtype=torch.uint8)
    receive = b.receive(box, 0) if posted_first else None
    send = a.send(numbered(1, size), 1, stage=stage)
    assert (send is None) == (stage or size <= PIECE)
    wait_all(send, receive or b.receive(box, 0))
    assert torch.equal(box, numbered(1, size))
    assert not a.is_under_way
    assert not b.is_under_way


def test_tags_and_sources_are_told_apart_and_each_keeps_its_order():
    a, b, c = connected(3)
    for number, (sender, tag) in enumerate([(a, 1), (b, 1), (a, 2), (a, 1), (b, 2), (b, 1)]):
        sender.send(numbered(number), 2, tag)
    boxes = [torch.zeros(8, dtype=torch.uint8) for _ in range(6)]
    calls = [(1, 2, 4), (0, 2, 2), (1, 1, 1), (0, 1, 0), (0, 1, 3), (1, 1, 5)]  # source, tag, expected
    for (source, tag, number), box in zip(calls, boxes):
        c.receive(box, source, tag).wait()
        assert torch.equal(box, numbered(number))


def test_receives_of_any_process_stand_in_one_line_with_the_others():
    a, b, c = connected(3)
    boxes = [torch.zeros(8, dtype=torch.uint8) for _ in range(4)]
    works = [c.receive(box, source) for box, source in zip(boxes, [None, 0, None, 0])]
    b.send(numbered(0), 2)
    assert works[0].is_completed()
    for number in (1, 2, 3):
        a.send(numbered(number), 2)
    for work in reversed(works):
        work.wait()
    assert [work.peer for work in works] == [1, 0, 0, 0]
    for number, box in enumerate(boxes):
        assert torch.equal(box, numbered(number))
    a.send(numbered(9), 2, 5)
    work = c.receive(boxes[0], None, 5)
    work.wait()
    assert work.peer == 0


@pytest.mark.parametrize("size", [8, PIECE + 1])
def test_more_messages_than_entries_wait_for_their_turn(size):
    a, b = connected(2, stage_bytes=PAGE)
    count = ENTRIES + 50
    works = [a.send(numbered(number, size if number == 3 else 8), 1, number % 2) for number in range(count)]
    boxes = [torch.zeros(size if number == 3 else 8, dtype=torch.uint8) for number in range(count)]
    order = sorted(range(count), key=lambda number: (number % 2 == 0, number))
    works += [b.receive(boxes[number], 0, number % 2) for number in order]
    wait_all(*works)
    for number, box in enumerate(boxes):
        assert torch.equal(box, numbered(number, len(box)))


def test_a_message_that_waits_keeps_one_entry_and_no_more():
    """A receiver may leave early messages for long, whatever comes and goes in between."""
    a, b = connected(2, stage_bytes=PAGE)
    kept = [a.send(numbered(tag, size), 1, tag) for tag, size in ((1, 8), (2, 2 * PIECE), (3, 8))]
    box = torch.zeros(8, dtype=torch.uint8)
    for number in range(2 * ENTRIES + 10):
        if number % 100 == 0:
            a.send(numbered(number, 5), 1)
            with pytest.raises(MismatchError):
                b.receive(box, 0).wait()
        assert a.send(numbered(number), 1) is None
        b.receive(box, 0).wait()
        assert torch.equal(box, numbered(number))
    boxes = {3: box, 2: torch.zeros(2 * PIECE, dtype=torch.uint8), 1: torch.zeros(8, dtype=torch.uint8)}
    wait_all(*kept, *(b.receive(into, 0, tag) for tag, into in boxes.items()))
    for tag, into in boxes.items():
        assert torch.equal(into, numbered(tag, len(into)))


@pytest.mark.parametrize("sizes", [[2 * PAGE], [3 * WINDOW + 5], [8, WINDOW, PIECE - 1, 3 * PIECE]])
def test_messages_go_on_while_both_do_something_else(sizes):
    for _ in range(3):
        a, b = connected(2, stage_bytes=PAGE)
        boxes = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        works = [a.send(numbered(tag, size), 1, tag) for tag, size in enumerate(sizes)]
        works += [b.receive(box, 0, tag) for tag, box in reversed(list(enumerate(boxes)))]
        deadline = time.monotonic() + 20
        while any(work is not None and not work.is_done for work in works):  # which does not look for messages
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        for tag, box in enumerate(boxes):
            assert torch.equal(box, numbered(tag, len(box)))
        assert not a.is_under_way
        assert not b.is_under_way


def test_a_large_message_goes_on_between_small_ones_for_which_nobody_waits():
    a, b, c = connected(3)
    large, box, small = numbered(0, 4 * WINDOW), torch.zeros(4 * WINDOW, dtype=torch.uint8), torch.zeros(8).byte()
    send, receive = a.send(large, 1, stage=False), b.receive(box, 0)
    deadline = time.monotonic() + 20
    while not (send.is_done and receive.is_done):  # which does not look for messages
        assert time.monotonic() < deadline
        a.send(numbered(1), 2)
        c.receive(small, 0)
        c.send(numbered(2), 0)
        a.receive(small, 2)
        time.sleep(1e-3)
    assert torch.equal(box, large)


def wait_without_a_look(*works):
    """Wait while this process does not look for messages: the thread does."""
    deadline = time.monotonic() + 20
    while not all(work.is_done for work in works):
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_an_exchange_that_raises_in_the_thread_stands_in_no_others_way(caplog):
    a, b = connected(2)
    boxes = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    with (
        mock.patch.object(progress_thread._thread, "_has_failed", False),
        mock.patch.object(a, "progress_alone", side_effect=RuntimeError("broken")) as broken,
    ):
        works = [a.receive(boxes[0], 1), b.receive(boxes[1], 0)]
        a.send(numbered(0), 1)
        b.send(numbered(1), 0)
        wait_without_a_look(works[1])
        deadline = time.monotonic() + 20
        while broken.call_count < 3:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
    assert [record.exc_info[1].args for record in caplog.records] == [("broken",)]
    wait_without_a_look(works[0])  # it is looked after again


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_followed_by_another():
    a, b = connected(2)
    boxes = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    with mock.patch.object(progress_thread._ProgressThread, "_progress_all", side_effect=SystemExit):
        works = [b.receive(boxes[0], 0)]
        thread = progress_thread._thread._thread
        thread.join(20)
        assert not thread.is_alive()
    works.append(b.receive(boxes[1], 0))
    for number in range(2):
        a.send(numbered(number), 1)
    wait_without_a_look(*works)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_leaves_the_messages_of_its_parent_alone():
    a, b = connected(2)
    box = torch.zeros(8, dtype=torch.uint8)
    work = b.receive(box, 0)
    child = os.fork()
    if child == 0:
        make_progress()
        own, other = connected(2)
        works = [other.receive(box, 0), own.send(numbered(1), 1)]
        deadline = time.monotonic() + 20
        while not works[0].is_done and time.monotonic() < deadline:  # it has a thread of its own
            time.sleep(1e-3)
        os._exit(0 if works[0].is_done and list(exchanges_between_two) and b not in exchanges_between_two else 1)
    assert os.waitpid(child, 0)[1] == 0
    a.send(numbered(2), 1)
    work.wait()
    assert torch.equal(box, numbered(2))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_may_be_forked_while_a_thread_holds_a_lock():
    connected(1)
    parents = SharedMemoryExchange(0, ["member 0"], PAGE)
    with shared_memory._adding, message_places._adding:  # which no thread gives back in the child
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            own, other = connected(2)
            box = torch.zeros(8, dtype=torch.uint8)
            own.send(numbered(1), 1)
            other.receive(box, 0).wait()
            exchange = SharedMemoryExchange(0, ["member 0"], PAGE)
            exchange.send([box])
            every = list(message_places.MessagePlaces._all)
            os._exit(0 if parents._places not in every and exchange._places in every else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_nobody_receives_stands_in_no_others_way():
    a, b, c = connected(3, stage_bytes=PAGE)
    large = [a.send(numbered(number, WINDOW + number), 1, tag=number) for number in range(3)]
    small = a.send(numbered(7, 2 * PAGE), 1, tag=7)
    other = a.send(numbered(8, 2 * PAGE), 2)
    boxes = [torch.zeros(2 * PAGE, dtype=torch.uint8) for _ in range(2)]
    wait_all(small, other, b.receive(boxes[0], 0, 7), c.receive(boxes[1], 0))
    assert torch.equal(boxes[0], numbered(7, 2 * PAGE))
    assert torch.equal(boxes[1], numbered(8, 2 * PAGE))
    boxes = [torch.zeros(WINDOW + number, dtype=torch.uint8) for number in range(3)]
    wait_all(*large, *(b.receive(boxes[number], 0, number) for number in (2, 0, 1)))
    for number, box in enumerate(boxes):
        assert torch.equal(box, numbered(number, WINDOW + number))


def test_random_messages_between_three():
    for seed in range(5):
        chosen = random.Random(seed)
        members = connected(3, stage_bytes=chosen.choice([PAGE, 16 * PAGE]))
        sends, receives = {}, {}
        works = []
        for number in range(150):
            source, target = chosen.sample(range(3), 2)
            key = source, target, chosen.randrange(2)
            sends.setdefault(key, []).append(numbered(number, chosen.choice([0, 5, 3000, PIECE + 9])))
        line = [key for key, sent in sends.items() for _ in sent]
        calls = [(kind, key) for kind in ("send", "receive") for key in line]
        chosen.shuffle(calls)
        begun = dict.fromkeys([(kind, key) for kind, key in calls], 0)
        for kind, key in calls:
            place = begun[kind, key]
            begun[kind, key] += 1
            source, target, tag = key
            if kind == "send":
                works.append(members[source].send(sends[key][place], target, tag))
            else:
                box = torch.zeros(len(sends[key][place]), dtype=torch.uint8)
                receives.setdefault(key, []).append(box)
                works.append(members[target].receive(box, source, tag))
        wait_all(*works)
        for key, sent in sends.items():
            assert all(map(torch.equal, sent, receives[key]))


@pytest.mark.parametrize("size", [8, 2 * PIECE])
def test_a_message_of_another_size_fails_on_both_sides_if_it_has_not_gone(size):
    a, b = connected(2, stage_bytes=PAGE)
    work = a.send(numbered(0, size), 1, 4)
    with pytest.raises(MismatchError, match=f"member 0 has sent {size} bytes with tag 4 where member 1 expects 5"):
        b.receive(torch.zeros(5, dtype=torch.uint8), 0, 4).wait()
    if size == 8:
        assert work is None
    else:
        with pytest.raises(MismatchError, match=f"member 0 has sent {size} bytes with tag 4 where member 1 expects 5"):
            work.wait()
    box = torch.zeros(8, dtype=torch.uint8)
    a.send(numbered(1), 1, 4)
    b.receive(box, 0, 4).wait()
    assert torch.equal(box, numbered(1))


def test_waits_end_when_they_should():
    a, b = connected(2, timeout=0.2, stage_bytes=PAGE)
    box = torch.zeros(8, dtype=torch.uint8)
    start = time.monotonic()
    works = [b.receive(box, 0) for _ in range(3)]
    late = "since an earlier wait has timed out"  # who was late once is not waited for again
    for work, text in zip([*works, *works], [r"for 0\.2 seconds", late, late] * 2, strict=True):
        with pytest.raises(RuntimeError, match=f"member 0 has not sent or received a message {text}"):
            work.wait()
    assert time.monotonic() - start < 0.55
    a.send(numbered(3), 1)  # none of those gets it
    assert box.tolist() == [0] * 8
    b.receive(box, 0).wait()
    assert torch.equal(box, numbered(3))
    # A message has come, so the member is waited for again. After a shorter wait than usual it is, too.
    for short in (0.1, None):
        with pytest.raises(RuntimeError, match=r"for 0\.1 seconds" if short else r"for 0\.2 seconds"):
            b.receive(box, 0).wait(short)
    a.send(numbered(1), 1)
    b.receive(box, 0).wait()
    work = a.receive(box, None, 1)
    thread = threading.Timer(0.05, a.stop, ["enough"])
    thread.start()
    with pytest.raises(RuntimeError, match="enough"):
        work.wait(20.0)
    thread.join()


@pytest.mark.parametrize("is_receive", [True, False])
def test_a_message_that_goes_at_the_last_moment_is_not_late(is_receive):
    a, b = connected(2, stage_bytes=PAGE)
    box, sent = torch.zeros(2 * PIECE, dtype=torch.uint8), numbered(1, 2 * PIECE)
    work = b.receive(box, 0) if is_receive else a.send(sent, 1)
    cancel = messages.MessageWork.cancel

    def go_and_cancel(each, error):
        other = a.send(sent, 1) if is_receive else b.receive(box, 0)
        while not work.exchange._native.wait(work.number, 0.0, 0.0):
            other.exchange._native.progress()
        cancel(each, error)

    with (
        mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True),
        mock.patch.object(messages.MessageWork, "cancel", go_and_cancel),
    ):
        work.wait(0.0)
    assert work.is_done
    assert not work.exchange._late


def test_a_work_that_is_done_gets_no_error():
    """One thread cancels while another has just found that the message is there."""
    a, b = connected(2)
    work = b.receive(torch.zeros(8, dtype=torch.uint8), 0)
    looks, goes_on = threading.Event(), threading.Event()

    class Late(RuntimeError):
        def __bool__(self):
            looks.set()
            goes_on.wait(0.2)
            return True

    work.error = Late()  # asked for between the look at is_done and the change
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        thread = threading.Thread(target=work.cancel, args=[RuntimeError("enough")])
        thread.start()
        assert looks.wait(10)
        a.send(numbered(1), 1)
        b.progress()
        goes_on.set()
        thread.join()
    assert work.is_done
    assert work.error is None


def interrupted(work):
    """A wait that gets an exception from outside, as from Ctrl-C."""
    with mock.patch.object(messages, "make_progress", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        work.wait()


def test_a_receive_whose_wait_was_interrupted_leaves_its_message_to_the_next_one():
    a, b = connected(2)
    box, again = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    work = b.receive(box, 0)
    interrupted(work)
    a.send(numbered(1), 1)
    b.receive(again, 0).wait()
    assert box.tolist() == [0] * 8
    assert torch.equal(again, numbered(1))
    with pytest.raises(RuntimeError, match=r"wait for the message was interrupted \(KeyboardInterrupt\)"):
        work.wait()
    assert not b.is_under_way


def test_a_receive_that_was_interrupted_while_it_was_posted_leaves_its_message_to_the_next_one():
    a, b = connected(2)
    box, again = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    with mock.patch.object(messages, "need_progress", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        b.receive(box, 0)
    assert not b.is_under_way
    a.send(numbered(1), 1)
    b.receive(again, 0).wait()
    assert box.tolist() == [0] * 8
    assert torch.equal(again, numbered(1))


def test_a_receive_whose_wait_was_interrupted_in_the_middle_drops_the_rest():
    a, b = connected(2, stage_bytes=PAGE)
    size = 3 * WINDOW
    box, again = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        works = [a.send(numbered(number, size), 1) for number in (1, 2)]
        work = b.receive(box, 0)
        a.progress()
        b.progress()
        assert box.any()
        interrupted(work)
    before = box.clone()
    assert torch.equal(before[-PIECE:], torch.zeros(PIECE, dtype=torch.uint8))
    wait_all(*works, b.receive(again, 0))
    assert torch.equal(box, before)
    assert torch.equal(again, numbered(2, size))
    with pytest.raises(RuntimeError, match="interrupted"):
        work.wait()
    assert not b.is_under_way


def test_a_large_message_that_has_not_begun_to_come_is_left_to_the_next_receive():
    a, b = connected(2, stage_bytes=PAGE)
    boxes = [torch.zeros(2 * WINDOW, dtype=torch.uint8) for _ in range(4)]
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        sends = [a.send(numbered(number, 2 * WINDOW), 1, stage=False) for number in range(3)]
        works = [b.receive(box, 0) for box in boxes]
        works[1].cancel(RuntimeError("enough"))  # the last receive, which waits, gets the second message
        works[0].cancel(RuntimeError("enough"))  # the next receive gets the first one
        works[2].cancel(RuntimeError("enough"))
        assert [work.is_done for work in works] == [True, True, True, False]
    later = [torch.zeros(2 * WINDOW, dtype=torch.uint8) for _ in range(2)]
    wait_all(*sends, works[3], *(b.receive(box, 0) for box in later))
    for box, number in zip([boxes[3], *later], [1, 0, 2]):
        assert torch.equal(box, numbered(number, 2 * WINDOW))
    for box, work in zip(boxes[:3], works):
        assert not box.any()
        with pytest.raises(RuntimeError, match="enough"):
            work.wait()


def test_a_large_message_that_is_not_wanted_any_more_does_not_hold_the_window():
    a, b = connected(2, stage_bytes=PAGE)
    boxes = [torch.zeros(2 * WINDOW, dtype=torch.uint8) for _ in range(2)]
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        sends = [a.send(numbered(tag, 2 * WINDOW), 1, tag, stage=False) for tag in range(2)]
        b.receive(boxes[0], 0, 0).cancel(RuntimeError("enough"))
    wait_all(sends[1], b.receive(boxes[1], 0, 1))
    wait_all(sends[0], b.receive(boxes[0], 0, 0))
    for tag, box in enumerate(boxes):
        assert torch.equal(box, numbered(tag, 2 * WINDOW))


def test_a_send_whose_wait_was_interrupted_goes_on():
    a, b = connected(2, stage_bytes=PAGE)
    work, box = a.send(numbered(1, WINDOW), 1), torch.zeros(WINDOW, dtype=torch.uint8)
    interrupted(work)
    wait_all(work, b.receive(box, 0))
    assert torch.equal(box, numbered(1, WINDOW))


def test_after_stop_no_receive_is_written():
    a, b = connected(2)
    box = torch.zeros(8, dtype=torch.uint8)
    work = b.receive(box, 0)
    b.stop("enough")
    a.send(numbered(1), 1)
    b.progress()
    assert box.tolist() == [0] * 8
    with pytest.raises(RuntimeError, match="enough"):
        work.wait()


def test_a_thread_that_ends_while_it_tells_what_is_done_keeps_nobody_waiting():
    a, b = connected(2)
    box = torch.zeros(8, dtype=torch.uint8)
    work = b.receive(box, 0)
    with (
        mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True),
        mock.patch.object(messages.MessageWork, "_end", side_effect=KeyboardInterrupt),
    ):
        a.send(numbered(1), 1)
        with pytest.raises(KeyboardInterrupt):
            b.progress()
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert torch.equal(box, numbered(1))
    assert not b.is_under_way


def test_of_one_that_has_gone_what_it_has_sent_still_arrives():
    a, b = connected(2, stage_bytes=PAGE)
    a.send(numbered(2), 1)
    box, large = torch.zeros(8, dtype=torch.uint8), numbered(0, 2 * PIECE)
    work = b.send(large, 0)
    a.abandon()
    b.receive(box, 0).wait()
    assert torch.equal(box, numbered(2))
    for waiting in (work, b.receive(box, 0), b.receive(box, None)):
        with pytest.raises(RuntimeError, match="member 0 has ended or closed its memory, and a message with it"):
            waiting.wait()


def test_a_program_that_only_asks_sees_that_the_other_one_has_gone():
    a, b = connected(2, stage_bytes=PAGE)
    box = torch.zeros(8, dtype=torch.uint8)
    works = [b.send(numbered(0, 2 * PIECE), 0), b.receive(box, 0), b.receive(box, None)]
    assert not any(work.is_completed() for work in works)
    a.abandon()
    assert all(work.is_completed() for work in works)
    for work in works:
        with pytest.raises(RuntimeError, match="member 0 has ended or closed its memory, and a message with it"):
            work.wait()


def test_one_that_has_gone_leaves_nothing_under_way():
    a, b, c = connected(3, stage_bytes=PAGE)
    size = 3 * WINDOW
    box = torch.zeros(size, dtype=torch.uint8)
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        works = [a.send(numbered(0, size), 1, 1), b.receive(box, 0, 1)]
        a.progress()
        b.progress()
        works[1].cancel(RuntimeError("enough"))  # after it has begun to come
        others = [b.send(numbered(0, size), 0), b.receive(box[:8], 0), b.receive(box[:8], None, 7)]
        kept = c.send(numbered(3), 1, 7), b.send(numbered(4, size), 2)
        a.abandon()
    with pytest.raises(RuntimeError, match="member 0 has ended or closed its memory, and a message with it"):
        others[1].wait()
    with pytest.raises(RuntimeError, match="member 0 has ended or closed its memory, and a message with it"):
        others[0].wait()
    with pytest.raises(RuntimeError, match="enough"):
        works[1].wait()
    wait_all(*kept, c.receive(box, 1), others[2])
    assert torch.equal(box[8:], numbered(4, size)[8:])
    assert not b.is_under_way


def test_a_receive_of_any_process_ends_with_the_one_whose_message_has_begun_to_come():
    a, b, c = connected(3, stage_bytes=PAGE)
    size = 3 * WINDOW
    box = torch.zeros(size, dtype=torch.uint8)
    with mock.patch.object(SharedMemoryMessages, "progress_alone", return_value=True):
        a.send(numbered(0, size), 2)
        first, second = c.receive(box, None), c.receive(box[:8], None)
        a.progress()
        c.progress()
        exchanges_between_two.discard(a)  # as if its process had ended
        a.abandon()
        with pytest.raises(RuntimeError, match="member 0 has ended or closed its memory, and a message with it"):
            first.wait(10.0)
    b.send(numbered(1), 2)
    second.wait()
    assert torch.equal(box[:8], numbered(1))
    assert not c.is_under_way


def test_tensors_are_kept_until_they_are_sent():
    a, b = connected(2, stage_bytes=PAGE)
    a.send(numbered(5, 2 * PIECE), 1)  # the work and the tensor are dropped
    gc.collect()
    noise = [torch.zeros(2 * PIECE, dtype=torch.uint8) for _ in range(4)]
    box = torch.zeros(2 * PIECE, dtype=torch.uint8)
    work = b.receive(box, 0)
    while not work.is_completed():
        a.progress()
    assert torch.equal(box, numbered(5, 2 * PIECE))
    assert not any(each.any() for each in noise)


def test_memory_is_given_back_beyond_what_the_process_keeps():
    kept = 1 << 26
    groups = [connected(2, stage_bytes=3 << 25) for _ in range(2)]
    for a, b in groups:
        large = torch.ones(3 << 25, dtype=torch.uint8)
        box = torch.empty_like(large)
        for _ in range(2):
            assert a.send(large, 1) is None
            b.receive(box, 0).wait()
        wait_all(a.send(large, 1, stage=False), b.receive(box, 0))
        for sender, receiver in ((a, 1), (b, 0)):
            sender.send(large[:8], receiver)
        a.receive(box[:8], 1).wait()
        b.receive(box[:8], 0).wait()
        a.progress()
    held = sum(512 * os.fstat(member.handle[1]).st_blocks for group in groups for member in group)
    assert held <= kept + 1_000_000 * 4


def test_arguments_that_no_process_has():
    first, _ = connected(2)
    for peer in (0, 2, -1):
        with pytest.raises(ValueError, match=f"peer={peer} is none of the other processes"):
            first.send(torch.ones(2), peer)
        with pytest.raises(ValueError, match=f"peer={peer} is none of the other processes"):
            first.receive(torch.ones(2), peer)
    with pytest.raises(ValueError, match="it must be contiguous, on the CPU"):
        first.receive(torch.ones(4)[::2], 1)
    for lazy in (torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match="data is negated or conjugated when it is read"):
            first.send(lazy, 1)
        with pytest.raises(ValueError, match="data is negated or conjugated when it is read"):
            first.receive(lazy, 1)
    with pytest.raises(RuntimeError, match="call connect first"):
        SharedMemoryMessages(0, ["one", "two"]).send(torch.ones(2), 1)

"""Messages through shared memory: order, places, waiting, errors, and processes that end."""

import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import pytest
import torch

from bmt_kernels import (
    SharedMemoryExchange,
    SharedMemoryMessages,
    message_places,
    messages,
    process_memory,
    shared_memory,
)
from bmt_kernels.processors import processors

pytestmark = pytest.mark.skipif(not SharedMemoryExchange.available(), reason="this system cannot share memory")

PAGE = mmap.PAGESIZE
MOST = 4096  # messages in flight
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]


def connected(count, timeout=20.0, capacity=8 * PAGE):
    """Exchanges between members of this process, each of which maps the others' memory like any process would."""
    names = [f"member {i}" for i in range(count)]
    members = [SharedMemoryExchange(i, names, capacity, timeout) for i in range(count)]
    handles = [member.handle for member in members]
    for member in members:
        assert member.connect(handles)
    return members


def pattern(rank, number, size):
    return (torch.arange(size) * 13 + rank * 101 + number * 31).to(torch.uint8)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_member_receives_every_message_in_order(count):
    members = connected(count)
    for number in range(MOST + 100):
        sizes = [(7 * number + rank) % 50 for rank in range(count)]
        for rank, member in enumerate(members):
            member.send([pattern(rank, number, sizes[rank])])
        for member in members:
            messages = member.receive(sizes, torch.uint8)
            assert [m.tolist() for m in messages] == [pattern(r, number, sizes[r]).tolist() for r in range(count)]
            member.release()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_lie_end_to_end_in_any_dtype(dtype):
    a, b = connected(2)
    parts = [torch.tensor([1, 0, 1]).to(dtype), torch.empty(0, dtype=dtype), torch.tensor([0, 1]).to(dtype)]
    whole = torch.cat(parts)
    a.send(parts)
    b.send([])
    mine, nothing = b.receive([whole.nbytes, 0], dtype)
    assert torch.equal(mine, whole)
    assert nothing.numel() == 0


def test_parts_that_are_not_contiguous_are_sent_by_their_elements():
    a, b = connected(2)
    for part in (torch.arange(16.0)[::2], torch.arange(12.0).view(3, 4).t()):
        a.send([part])
        b.send([])
        received = b.receive([part.nbytes, 0], torch.float32)[0]
        assert torch.equal(received, part.flatten())
        b.release()
        a.receive([part.nbytes, 0], torch.float32)
        a.release()


def test_the_largest_message_fits_and_a_larger_one_is_refused():
    a, b = connected(2, capacity=3 * PAGE - 1)  # in whole pages
    for refused in (
        lambda: a.send([torch.zeros(3 * PAGE // 4), torch.zeros(1)]),
        lambda: a.wait_for_room(3 * PAGE + 4),
    ):
        with pytest.raises(ValueError, match=f"{3 * PAGE + 4} bytes is larger than the capacity of {3 * PAGE}"):
            refused()
    largest = torch.arange(3 * PAGE // 8)
    a.send([largest])
    assert torch.equal(b.receive([3 * PAGE, 0], torch.int64)[0], largest)


def test_a_place_is_used_again_only_when_all_have_received_its_message():
    a, b = connected(2, timeout=0.3, capacity=3 * PAGE)
    for number in range(3):
        assert a.has_room(4)
        a.send([pattern(0, number, 4)])
        b.send([])
    assert not a.has_room(4)
    with pytest.raises(RuntimeError, match="no room for another message"):
        a.send([pattern(0, 0, 4)])
    with pytest.raises(RuntimeError, match=r"member \d has not sent or received a message for 0\.3 seconds"):
        a.wait_for_room(4)
    for member in (b, a):
        assert not a.has_room(4)
        assert member.receive([4, 0], torch.uint8)[0].tolist() == pattern(0, 0, 4).tolist()
        member.release()
    assert not a.has_room(PAGE + 1)
    a.wait_for_room(PAGE)
    a.send([pattern(0, 3, PAGE)])
    b.wait_for_room(0)
    b.send([])
    for number, size in ((1, 4), (2, 4), (3, PAGE)):
        assert b.receive([size, 0], torch.uint8)[0].tolist() == pattern(0, number, size).tolist()
        b.release()


@pytest.mark.parametrize("size", [3, 5000])
def test_messages_have_the_numbers_that_autograd_and_lazy_tensors_show(size):
    a, b = connected(2, capacity=64 * PAGE)
    needs_grad = torch.ones(size, dtype=torch.complex64, requires_grad=True)
    for part in (needs_grad, needs_grad * 2j, (needs_grad.detach() * 2j).conj(), torch._neg_view(torch.ones(size))):
        a.send([part])
        b.send([part[:0]])
        (message,) = b.receive([part.nbytes, 0], part.dtype)[:1]
        assert torch.equal(message, part)
        assert not message.requires_grad
        sent = a.receive([part.nbytes, 0], part.dtype)[0]
        assert not sent.requires_grad
        a.release()
        b.release()


def test_an_error_says_the_seconds_of_a_long_wait_in_full():
    a, _ = connected(2, timeout=lambda: 1799.99)  # what is left of half an hour
    with (
        mock.patch.object(shared_memory, "time", mock.Mock(monotonic=mock.Mock(side_effect=[0.0, 1800.0]))),
        pytest.raises(RuntimeError, match="member 1 has not sent or received a message for 1800 seconds"),
    ):
        a.receive([0, 8], torch.float32)


def test_empty_messages_are_not_waited_for():
    a, b = connected(2, timeout=0.2)
    a.send([pattern(0, 0, 3)])
    assert a.receive([3, 0], torch.uint8)[0].tolist() == pattern(0, 0, 3).tolist()  # b has not come
    a.release()
    b.send([])
    assert b.receive([3, 0], torch.uint8)[0].tolist() == pattern(0, 0, 3).tolist()


def test_a_message_of_another_size_or_none_is_an_error_and_stays_the_next_one():
    a, b = connected(2, timeout=0.2)
    a.send([torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"member 1 has not sent or received a message for 0\.2 seconds"):
        a.receive([12, 12], torch.float32)
    b.send([torch.zeros(2)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="member 1 has sent 8 bytes where member 0 expects 12: they call"):
            a.receive([12, 12], torch.float32)
    assert a.receive([12, 8], torch.float32)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("theirs", [(1, b"all_reduce max"), (2, b"all_reduce sum"), (1, b"all_reduce summ"), (0, b"")])
def test_a_message_of_another_operation_is_an_error_and_stays_the_next_one(theirs):
    a, b = connected(2)
    a.send([torch.zeros(2)], 1, b"all_reduce sum")
    b.send([torch.zeros(2)], *theirs)
    name = theirs[1].decode() or "which has no name"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"member 1 is at operation {theirs[0]}, {name}, member 0 at"):
            a.receive([8, 8], torch.float32, 1, b"all_reduce sum")
    with pytest.raises(RuntimeError, match="member 0 is at operation 1, all_reduce sum, member 1 at operation"):
        b.receive([8, 8], torch.float32, *theirs)
    assert a.receive([8, 8], torch.float32, *theirs)


def test_only_the_first_part_of_a_long_name_is_compared():
    a, b = connected(2)
    long = b"x" * 96
    for member, name in ((a, long + b"a"), (b, long + b"b")):
        member.send([torch.zeros(2)], 1, name)
    a.receive([8, 8], torch.float32, 1, long + b"a")


def test_the_operation_of_an_empty_message_is_compared_when_it_is_there():
    a, b = connected(2)
    for number in (1, 2):
        a.send([torch.zeros(2)], number, b"from 0")
        a.receive([8, 0], torch.float32, number, b"from 0")  # does not wait
        a.release()
    b.send([], 1, b"from 0")
    b.send([torch.zeros(1)], 2, b"from 1")
    a.send([], 3, b"from 1")
    with pytest.raises(RuntimeError, match="member 1 is at operation 2, from 1, member 0 at operation 2, from 0"):
        a.receive([0, 4], torch.float32, 3, b"from 1")


def test_what_empty_messages_were_for_is_not_kept_for_ever():
    a, b = connected(2, capacity=1 << 30)
    for number in range(MOST):
        a.send([torch.zeros(1)], number, b"x")
        a.receive([4, 0], torch.float32, number, b"x")
        a.release()
    for number in range(MOST):
        b.send([], number, b"x")
        b.receive([4, 0], torch.float32, number, b"x")
        b.release()
    a.send([torch.zeros(1)])
    a.receive([4, 0], torch.float32)
    assert sum(map(len, a._uncompared.values())) == 1


def test_one_that_sleeps_is_woken(monkeypatch):
    monkeypatch.setattr(shared_memory, "_SLEEP", 30.0)
    a, b = connected(2, timeout=60.0)
    arrived = []

    def receive():
        a.send([torch.zeros(1)])
        a.receive([4, 4], torch.float32)
        arrived.append(time.monotonic())

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.1)
    sent = time.monotonic()
    b.send([torch.ones(1)])  # for which it has left the lock of the interpreter
    thread.join(60)
    assert 0 <= arrived[0] - sent < 10


def test_threads_ask_at_the_same_time_whether_a_process_has_ended():
    process = process_memory.Process(os.getpid())
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lambda: any(process.has_ended() for _ in range(10000))) for _ in range(4)]
        assert not any(task.result(timeout=60) for task in asked)


def test_members_at_different_speeds():
    # A property of the whole: whatever the members' pace, all see the same messages.
    count, messages = 3, 400
    members = connected(count)

    def work(rank):
        random_ = random.Random(rank)
        member, sent, total = members[rank], 0, 0
        for number in range(messages):
            while sent <= number or (sent < messages and member.has_room(sent % 70) and random_.random() < 0.6):
                member.wait_for_room(sent % 70)
                member.send([pattern(rank, sent, sent % 70)])
                sent += 1
            received = member.receive([number % 70] * count, torch.uint8)
            total += sum(int(m.sum()) for m in received)
            assert [m.tolist() for m in received] == [pattern(r, number, number % 70).tolist() for r in range(count)]
            member.release()
            if random_.random() < 0.05:
                time.sleep(0.001)
        return total

    with ThreadPoolExecutor(count) as pool:
        tasks = [pool.submit(work, rank) for rank in range(count)]
        ended, others = wait(tasks, timeout=60, return_when=FIRST_EXCEPTION)  # the others wait for one that has raised
        totals = {task.result() for task in ended}
    assert not others
    assert len(totals) == 1


@pytest.mark.parametrize("before", [0, 2**31, 2**32])
def test_counters_wrap_around(before):
    members = connected(2, capacity=64 * PAGE)
    before -= min(before, 100)
    for member in members:  # as if so many messages had been
        member._sent = member._received = before
        for counter in (64, 128):
            member._set(counter, before)
    for number in range(400):
        assert all(member.has_room(5) for member in members)
        for rank, member in enumerate(members):
            member.send([pattern(rank, number, 5)])
        if number % 3 == 2:
            for member in members:
                for earlier in range(number - 2, number + 1):
                    messages = member.receive([5, 5], torch.uint8)
                    assert [m.tolist() for m in messages] == [pattern(r, earlier, 5).tolist() for r in range(2)]
                    member.release()


def test_memory_that_is_not_what_was_told_is_not_mapped(tmp_path):
    a, b = connected(2)
    process, fd, token = b.handle
    fresh = SharedMemoryExchange(0, ["x", "y"], 8 * PAGE)
    assert not fresh.connect([fresh.handle, (process, fd, token + 1)])
    assert not fresh.connect([fresh.handle, (process, 10_000, token)])
    assert not fresh.connect([fresh.handle, (2**22 + 1, fd, token)])  # above the largest process number
    with (tmp_path / "file").open("wb") as other:
        other.write(b"0" * 100)
        assert not fresh.connect([fresh.handle, (process, other.fileno(), token)])
    assert fresh.connect([fresh.handle, b.handle])
    assert a.handle[2] != b.handle[2]


def test_a_rank_without_a_name_and_no_capacity_are_refused():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank} must be"):
            SharedMemoryExchange(rank, ["a", "b"], 1)
    with pytest.raises(ValueError, match="capacity=0 must be a positive number"):
        SharedMemoryExchange(0, ["a", "b"], 0)


def test_so_many_messages_are_in_flight_and_no_more():
    members = connected(2, capacity=1 << 30)
    for turn in range(2):
        for number in range(MOST):
            assert all(member.has_room(9) for member in members)
            for rank, member in enumerate(members):
                member.send([pattern(rank, number, turn + 1)])
        assert not any(member.has_room(0) for member in members)
        for number in range(MOST):
            for member in members:
                messages = member.receive([turn + 1] * 2, torch.uint8)
                assert [m.tolist() for m in messages] == [pattern(r, number, turn + 1).tolist() for r in range(2)]
                member.release()


def test_messages_of_many_sizes_do_not_overwrite_each_other():
    members, random_ = connected(2, capacity=40 * PAGE), random.Random(0)
    sizes = [random_.choice([0, 1, PAGE, PAGE + 1, 5 * PAGE, 17 * PAGE]) for _ in range(300)]
    sent = received = 0
    while received < len(sizes):
        while sent < len(sizes) and random_.random() < 0.8 and all(m.has_room(sizes[sent]) for m in members):
            for rank, member in enumerate(members):
                member.send([pattern(rank, sent, sizes[sent])])
            sent += 1
        if received < sent:
            for member in members:
                messages = member.receive([sizes[received]] * 2, torch.uint8)
                for rank in range(2):
                    assert torch.equal(messages[rank], pattern(rank, received, sizes[received]))
                member.release()
            received += 1


def test_memory_is_taken_of_what_is_in_use_only_and_much_is_given_back(monkeypatch):
    def taken(member):
        return os.stat(f"/proc/self/fd/{member.handle[1]}").st_blocks * 512

    monkeypatch.setattr(message_places, "_KEPT", 16 * PAGE)
    members = connected(2, capacity=1 << 40)
    message = torch.arange(6 * PAGE // 8)
    for _ in range(50):
        for member in members:
            member.send([message])
        for member in members:
            member.receive([6 * PAGE] * 2, torch.int64)
            member.release()
    assert [taken(member) for member in members] == [8 * PAGE] * 2  # with two of the header
    for _ in range(5):
        for member in members:
            member.send([message])
    assert [taken(member) for member in members] == [32 * PAGE] * 2
    for _ in range(5):
        for member in members:
            assert all(torch.equal(each, message) for each in member.receive([6 * PAGE] * 2, torch.int64))
            member.release()
    assert all(member.has_room(1) for member in members)
    assert sum(taken(member) for member in members) == (16 + 2 * 2) * PAGE


def test_all_exchanges_of_a_process_keep_so_much_together(monkeypatch):
    monkeypatch.setattr(message_places, "_KEPT", 8 * PAGE)
    gc.collect()
    groups = [connected(2, capacity=1 << 30) for _ in range(3)]
    message = torch.arange(3 * PAGE // 8)
    for members in groups:
        for _ in range(2):
            for member in members:
                member.send([message])
            for member in members:
                member.receive([3 * PAGE] * 2, torch.int64)
                member.release()
        assert all(member.has_room(1) for member in members)
    kept = [member._places.kept for members in groups for member in members]
    assert sum(kept) == 8 * PAGE
    assert min(kept) == PAGE  # those that came last have a part
    taken = [os.stat(f"/proc/self/fd/{member.handle[1]}").st_blocks * 512 for members in groups for member in members]
    assert sum(taken) <= (8 + 2 * 6) * PAGE  # with two of each header


def test_one_that_is_late_is_waited_for_once():
    a, b = connected(2, timeout=0.5)
    a.send([torch.ones(2)])
    start = time.monotonic()
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"for 0\.5 seconds"):
            a.receive([8, 8], torch.float32)
    assert time.monotonic() - start < 0.95
    b.send([torch.ones(2)])
    assert a.receive([8, 8], torch.float32)[1].tolist() == [1.0, 1.0]


def test_one_that_is_closed_is_missed_but_what_it_has_sent_still_counts():
    a, b = connected(2)
    for member in (a, b):
        member.send([torch.ones(2)])
    del b, member
    gc.collect()
    assert a.receive([8, 8], torch.float32)[1].tolist() == [1.0, 1.0]
    a.release()
    a.send([torch.ones(2)])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="member 1 has ended or closed its memory, and a message of it is missing"):
        a.receive([8, 8], torch.float32)
    assert time.monotonic() - start < 10


def test_what_is_sent_just_before_the_end_counts(monkeypatch):
    a, b = connected(2)
    a.send([torch.ones(1)])

    def send_and_go(memory):
        b.send([torch.ones(1)])
        return True

    monkeypatch.setattr(process_memory.Memory, "is_gone", send_and_go)
    assert a.receive([4, 4], torch.float32)[1].tolist() == [1.0]


def test_one_that_has_gone_after_another_operation_is_told_by_that(monkeypatch):
    a, b = connected(2)
    a.send([torch.empty(0)], 1, b"mine")
    a.receive([0, 0], torch.float32, 1, b"mine")
    a.release()
    is_gone = process_memory.Memory.is_gone

    def send_and_go(memory):
        if not b._sent:
            b.send([torch.empty(0)], 1, b"theirs")
            b.abandon()
        return is_gone(memory)

    monkeypatch.setattr(process_memory.Memory, "is_gone", send_and_go)
    with pytest.raises(RuntimeError, match="ranks call different operations"):
        a.receive([0, 4], torch.float32, 2, b"next")


def test_a_fork_that_ends_is_not_the_process():
    a, b = connected(2)
    child = os.fork()
    if child == 0:
        del a, b
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not any(memory.is_gone() for member in (a, b) for memory in member._memories.values())


def test_nothing_stays_open():
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:bmt_kernels")

    before = open_files()
    members = connected(3)
    assert open_files() == (before[0] + 4, before[1] + 9)  # one for each memory, none for each map, one for the process
    message = members[0]
    message.send([torch.ones(1)])
    del members, message
    assert open_files() == before


OTHER = """
import sys, time, torch
from bmt_kernels import SharedMemoryExchange
other = SharedMemoryExchange(1, ["a", "b"], 1 << 20, timeout=20.0)
print(*other.handle, flush=True)
assert other.connect([tuple(int(x) for x in sys.stdin.readline().split()), other.handle])
for number in range(50):
    other.wait_for_room(4000)
    other.send([torch.full((1000,), float(number))])
    first, _ = other.receive([4000, 4000], torch.float32)
    assert set(first.tolist()) == {-float(number)}
    other.release()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_between_processes_of_which_one_is_killed(how):
    command = [sys.executable, "-W", "error", "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            a = SharedMemoryExchange(0, ["a", "b"], 1 << 20, timeout=20.0)
            handle = tuple(int(x) for x in other.stdout.readline().split())
            other.stdin.write(" ".join(str(x) for x in a.handle) + "\n")
            other.stdin.flush()
            assert a.connect([a.handle, handle])
            for number in range(50):
                a.wait_for_room(4000)
                a.send([torch.full((1000,), -float(number))])
                _, second = a.receive([4000, 4000], torch.float32)
                assert set(second.tolist()) == {float(number)}
                a.release()
            assert other.stdout.readline() == "ready\n"
            threading.Timer(0.2, other.send_signal, [how]).start()  # while this one sleeps
            a.send([torch.zeros(1)])
            with pytest.raises(RuntimeError, match="b has ended"):
                a.receive([4, 4], torch.float32)
        finally:
            other.kill()


def test_waiting_can_be_interrupted():
    code = """
import signal, torch
from bmt_kernels import SharedMemoryExchange
a, b = (SharedMemoryExchange(i, ["a", "b"], 1) for i in range(2))
assert a.connect([a.handle, b.handle])
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    a.receive([4, 4], torch.float32)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr


def test_a_process_spins_where_all_that_share_the_processors_have_one(monkeypatch):
    for module in (shared_memory, messages):
        monkeypatch.setattr(module, "processors", lambda: 2.0)
    for local_size, spin in ((0, shared_memory.SPIN), (2, shared_memory.SPIN), (3, 0.0)):
        exchange = SharedMemoryExchange(0, ["a", "b"], PAGE, local_size=local_size)
        assert exchange._spin == SharedMemoryMessages(0, ["a", "b"], local_size=local_size)._spin == spin


def test_a_share_of_processor_time_counts_as_so_many_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processors(tmp_path) == 8  # there are no limits

    def grant(text, *lines):
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(text)
        for path, content in lines:
            file = tmp_path / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return processors(tmp_path)

    assert grant("0::/job/rank\n", ("job/rank/cpu.max", "max 100000\n")) == 8
    assert grant("0::/job/rank\n", ("job/cpu.max", "150000 100000\n")) == 1.5
    assert grant("0::/job/rank\n", ("job/rank/cpu.max", "50000 100000\n")) == 0.5
    version_1 = "3:cpuset:/\n2:cpuacct,cpu:/pod\n1:name=systemd:/pod\n"
    assert grant(version_1, ("cpu/pod/cpu.cfs_quota_us", "-1\n"), ("cpu/pod/cpu.cfs_period_us", "100000\n")) == 8
    assert grant(version_1, ("cpu/pod/cpu.cfs_quota_us", "300000\n")) == 3
    assert 0 < processors() <= 8


def test_messages_of_inference_mode_leave_no_trace():
    a, b = connected(2)
    with torch.inference_mode():
        a.send([torch.ones(4)])
    b.send([])
    for member in (a, b):
        member.receive([16, 0], torch.float32)
        member.release()
    a.send([torch.full((4,), 2.0)])
    b.send([])
    assert b.receive([16, 0], torch.float32)[0].tolist() == [2.0] * 4

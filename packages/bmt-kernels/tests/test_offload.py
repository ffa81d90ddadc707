"""The offload pipeline: which ranges are staged, in which order, on streams that run as late or early as possible."""

from __future__ import annotations

import gc
import random
from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bmt_kernels import OffloadPipeline, OffloadRow, adam_step, offload, pinned_zeros
from bmt_kernels.offload import plan_chunks

# --- the plan -----------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.integers(0, 3000), st.lists(st.sampled_from([1, 2, 4, 8]), max_size=4)), max_size=8)


@given(ROWS, st.integers(2048, 20000).map(lambda n: n // 64 * 64))
@settings(deadline=None)
@example([(5, [])], 2048)
@example([(64 * 64, [4]), (1, [4])], 64 * 64 * 4)
def test_a_plan_covers_every_element_once_in_order_and_fits(rows, capacity):
    chunks = list(plan_chunks(rows, capacity))
    assert all(chunks)
    ranges = [each for chunk in chunks for each in chunk]
    covered = [(each.row, i) for each in ranges for i in range(each.start, each.stop)]
    assert covered == [(r, i) for r, (length, _) in enumerate(rows) for i in range(length)]
    for chunk in chunks:
        end = 0
        for each in chunk:
            length, sizes = rows[each.row]
            assert each.start % 64 == 0
            assert len(each.offsets) == len(sizes)
            if not sizes:
                assert (each.start, each.stop) == (0, length), "a row without remote tensors is not split"
            for offset, size in zip(each.offsets, sizes):
                assert offset % 64 == 0
                assert offset >= end
                end = offset + (each.stop - each.start) * size
        assert end <= capacity


@given(ROWS)
@settings(deadline=None)
def test_a_plan_leaves_no_slot_half_empty(rows):
    capacity = 4096
    total = sum(-(-length * size // 64) * 64 for length, sizes in rows for size in sizes)
    waste = 64 * max((sum(sizes) for _, sizes in rows), default=0) + 64 * 4 * len(rows)
    staged = [chunk for chunk in plan_chunks(rows, capacity) if any(each.offsets for each in chunk)]
    assert len(staged) <= total // max(capacity - waste, 1) + 1 or waste >= capacity


# --- streams that run late, early or anyhow -----------------------------------------------------------------------


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.happened = False

    def synchronize(self):
        while not self.happened:
            self.stream.advance()


class Stream:
    """A queue that runs what it holds when an event of it is waited for, or whenever ``eagerness`` makes it."""

    def __init__(self, machine):
        self.machine = machine
        self.queue = deque()

    def run(self, function):
        self.queue.append(function)
        self.machine.stir()

    def record(self):
        event = Event(self)

        def happen():
            event.happened = True

        self.queue.append(happen)
        self.machine.stir()
        return event

    def wait(self, event):
        self.queue.append(event)
        self.machine.stir()

    def blocked(self):
        """Drop waits for what has happened; whether nothing can run now."""
        while self.queue and (self.queue[0] is None or (isinstance(self.queue[0], Event) and self.queue[0].happened)):
            self.queue.popleft()
        return not self.queue or isinstance(self.queue[0], Event)

    def advance(self):
        if self.blocked():
            assert self.queue, "the stream waits for an event that will not happen"
            self.queue[0].stream.advance()
        else:
            self.queue.popleft()()


class Machine:
    """A device whose streams interleave at random: ``eagerness`` is how much runs before it must."""

    def __init__(self, eagerness, seed=0):
        self.eagerness = eagerness
        self.random = random.Random(seed)
        self.streams = []

    def stream(self):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def stir(self):
        while self.random.random() < self.eagerness:
            ready = [stream for stream in self.streams if not stream.blocked()]
            if not ready:
                return
            self.random.choice(ready).advance()


class SimulatedPipeline(OffloadPipeline):
    """A pipeline between the host and a simulated device, whose tensors are those in ``on_device``."""

    def __init__(self, compute, eagerness, seed=0, slots=3, chunk_bytes=4096):
        super().__init__("cpu", compute=compute, chunk_bytes=chunk_bytes, slots=slots)
        self.machine = Machine(eagerness, seed)
        self.fetch, self.store, self.caller = (self.machine.stream() for _ in range(3))
        self.on_device = set()

    def place(self, *tensors):
        self.on_device |= {t.untyped_storage().data_ptr() for t in tensors}

    def _is_remote(self, tensor):
        return (tensor.untyped_storage().data_ptr() in self.on_device) == (self.compute == "host")

    def _new_buffer(self):
        return super()._new_buffer().fill_(255)  # NaN, read as a floating-point number

    def _queues(self):
        worker = offload._Host() if self.compute == "host" else self.caller
        return self.fetch, self.store, worker, self.caller


def parameters(shapes, dtypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n, dtype in zip(shapes, dtypes)]


def adam_rows(params, grads, states, masters):
    rows = []
    for p, g, (m, v), master in zip(params, grads, states, masters):
        if master is None:
            rows.append(OffloadRow(read=(g,), update=(m, v, p)))
        else:
            rows.append(OffloadRow(read=(g,), update=(m, v, master), write=(p,)))
    return rows


def adam_work(step, calls):
    def work(rows):
        calls.append(sum(len(row.read[0]) for row in rows))
        for row in rows:  # one by one: dtypes are mixed
            adam_step(
                [row.write[0] if row.write else row.update[2]],
                [row.read[0]],
                [row.update[0]],
                [row.update[1]],
                masters=[row.update[2]] if row.write else None,
                lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, step=step,
            )  # fmt: skip

    return work


LENGTHS = [700, 0, 1, 130, 4000, 64, 65, 63, 1500]
HALF = (torch.bfloat16, torch.float16)
DTYPES = [torch.float32, *HALF, torch.bfloat16, torch.bfloat16, *[torch.float32] * 2, torch.float16, torch.float32]


@pytest.mark.parametrize("compute", ["host", "device"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@given(eagerness=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=12)
@example(eagerness=0.0, seed=0)
@example(eagerness=1.0, seed=0)
def test_an_update_through_the_pipeline_is_that_without_whenever_streams_run(compute, slots, eagerness, seed):
    params, expected = (parameters(LENGTHS, DTYPES) for _ in range(2))
    masters = [None if p.dtype is torch.float32 else p.float() for p in params]
    states = [(torch.zeros(len(p)), torch.zeros(len(p))) for p in params]
    reference = [(None if m is None else m.clone(), torch.zeros(n), torch.zeros(n)) for m, n in zip(masters, LENGTHS)]
    grads = [torch.full_like(p, torch.nan) for p in params]
    pipeline = SimulatedPipeline(compute, eagerness, seed, slots)
    pipeline.place(*params, *grads)
    for step in (1, 2, 3):
        new = parameters(LENGTHS, DTYPES, seed=step)
        for target, source in zip(grads, new):  # backward is still to run
            pipeline.caller.run(lambda target=target, source=source: target.copy_(source))
        chunks = []
        half = len(params) // 2
        rows = adam_rows(params, grads, states, masters)
        work = adam_work(step, chunks)
        pipeline.run([(rows[:half], work), (rows[half:], work)])
        for target in grads:  # zero_grad, which may run long before a later step's backward
            pipeline.caller.run(lambda target=target: target.zero_())
        for p, g, (master, m, v) in zip(expected, new, reference):
            masters_ = None if master is None else [master]
            adam_step([p], [g], [m], [v], masters=masters_, lr=0.1, betas=(0.8, 0.9), eps=1e-6,
                      weight_decay=0.1, step=step)  # fmt: skip
    seen = []
    pipeline.caller.run(lambda: seen.extend(p.clone() for p in params))  # the next forward
    pipeline.caller.record().synchronize()
    for p, q in zip(seen, expected):
        assert torch.equal(p, q)
    pipeline.synchronize()
    for (m, v), master, (q, n, w) in zip(states, masters, reference):
        assert torch.equal(m, n)
        assert torch.equal(v, w)
        assert master is None or torch.equal(master, q)
    assert sum(chunks) == sum(LENGTHS)
    assert len(chunks) > 3


def test_copies_of_other_chunks_are_under_way_while_one_is_worked_on():
    source, target = torch.arange(8 * 1024.0), torch.zeros(8 * 1024)
    pipeline = SimulatedPipeline("host", eagerness=0.0)
    pipeline.place(source, target)
    waiting = []

    def work(rows):
        waiting.append((len(pipeline.fetch.queue) > 0, len(pipeline.store.queue) > 1))
        for row in rows:
            assert len(waiting) > 3 or row.write[0].isnan().all(), "what is only written is not fetched"
            row.write[0].copy_(row.read[0]).neg_()

    pipeline.run([([OffloadRow(read=(source,), write=(target,))], work)])
    assert len(waiting) == 16
    assert waiting[0] == (True, False), "the second chunk is being fetched"
    assert waiting[1:-2] == [(True, True)] * 13, "the next is being fetched, and the last stored"
    assert waiting[-1] == (False, True)
    pipeline.caller.record().synchronize()
    assert torch.equal(target, -source)


def test_the_host_waits_for_nothing_if_the_device_works():
    x = torch.arange(8 * 1024.0)
    pipeline = SimulatedPipeline("device", eagerness=0.0)
    for _ in range(2):
        pipeline.run([([OffloadRow(update=(x,))], lambda rows: [row.update[0].mul_(2) for row in rows])])
    assert torch.equal(x, torch.arange(8 * 1024.0)), "nothing has run yet"
    pipeline.synchronize()
    assert torch.equal(x, 4 * torch.arange(8 * 1024.0))


def test_what_the_last_run_still_stores_is_not_fetched_before():
    x, y = torch.ones(1024), torch.ones(1024)  # a chunk each
    pipeline = SimulatedPipeline("device", eagerness=0.0)

    def work(rows):
        for row in rows:
            row.update[0].mul_(2)

    pipeline.run([([OffloadRow(update=(x,)), OffloadRow(update=(y,))], work)])
    pipeline.run([([OffloadRow(update=(y,))], work)])  # in the slot that x was in
    pipeline.caller.record().synchronize()  # which needs no more of the first run's stores than there must be
    pipeline.synchronize()
    assert (x[0], y[0]) == (2, 4)


def test_nothing_is_copied_if_all_tensors_are_local():
    x, y = torch.ones(100_000), torch.zeros(100_000, dtype=torch.bfloat16)
    pipeline = OffloadPipeline("cpu", chunk_bytes=4096)
    seen = []
    pipeline.run([([OffloadRow(read=(x,), write=(y,)), OffloadRow(update=(x,))], seen.extend)])
    assert [t.data_ptr() for row in seen for field in row for t in field] == [x.data_ptr(), y.data_ptr(), x.data_ptr()]
    assert [len(row.read + row.update) for row in seen] == [1, 1]
    assert pipeline._buffers == []


@pytest.mark.parametrize("compute", ["host", "device"])
def test_work_that_fails_leaves_a_pipeline_that_works(compute):
    x = torch.zeros(8 * 1024)
    pipeline = SimulatedPipeline(compute, eagerness=0.0)
    if compute == "host":
        pipeline.place(x)
    else:
        pipeline.caller = offload._Host()  # so that the work fails at once
    calls = []

    def work(rows):
        calls.append(rows)
        if len(calls) == 4:
            raise KeyError("work")
        for row in rows:
            row.update[0].add_(1)

    with pytest.raises(KeyError, match="work"):
        pipeline.run([([OffloadRow(update=(x,))], work)])
    pipeline.synchronize()
    assert x.sum() == 3 * 1024
    pipeline.run([([OffloadRow(update=(x,))], work)])
    pipeline.synchronize()
    assert x.sum() == (3 + 8) * 1024


def test_autograd_notices_what_is_stored():
    x = torch.ones(4, requires_grad=True)
    loss = (x * x).sum()
    pipeline = SimulatedPipeline("host", eagerness=1.0)
    pipeline.place(x)
    pipeline.run([([OffloadRow(update=(x.detach(),))], lambda rows: [row.update[0].mul_(2) for row in rows])])
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (OffloadRow(read=(torch.zeros(3), torch.zeros(4))), ValueError, r"read\[1\] of a row has 4 elements"),
        (OffloadRow(update=(torch.zeros(3, 1),)), ValueError, r"update\[0\] .* \(3, 1\) .* 1-D"),
        (OffloadRow(write=(torch.zeros(6)[::2],)), ValueError, r"write\[0\] .* contiguous"),
        (OffloadRow(read=(None,)), TypeError, r"read\[0\] .* NoneType"),
        (OffloadRow(read=(torch.zeros(3, device="meta"),)), ValueError, r"on meta; it must be on cpu"),
        (OffloadRow(read=tuple(torch.zeros(3) for _ in range(20))), ValueError, r"chunk_bytes=4096 .* 5120"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_runs(row, error, message):
    x = torch.zeros(3)
    pipeline = SimulatedPipeline("host", eagerness=1.0)
    pipeline.place(x, *[t for t in row.read if t is not None and t.device.type == "cpu"])
    calls = []
    with pytest.raises(error, match=message):
        pipeline.run([([OffloadRow(update=(x,))], calls.append), ([row], calls.append)])
    assert calls == []


@pytest.mark.parametrize(
    ("options", "name"),
    [({"compute": "gpu"}, "compute"), ({"chunk_bytes": 100}, "chunk_bytes"), ({"slots": 0}, "slots")],
)
def test_settings_out_of_range(options, name):
    with pytest.raises(ValueError, match=name):
        OffloadPipeline("cpu", **options)


def test_a_default_device_is_not_where_host_memory_is():
    with torch.device("meta"):
        assert OffloadPipeline("cpu")._new_buffer().device.type == "cpu"
        assert pinned_zeros(0).device.type == "cpu"


# --- page-locked memory -------------------------------------------------------------------------------------------


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


class Runtime:
    def __init__(self, error=0):
        self.error = error
        self.locked = {}
        self.log = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        assert is_mapped(address), "CUDA refuses memory that is not there any more"
        self.log.append(("unlock", self.locked.pop(address)))
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(offload, "_cuda_runtime", lambda: made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4096 * (device != 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.log.append(f"synchronize {device}"))
    return made


def test_locked_memory_is_of_the_right_size_and_released_with_its_last_view(runtime):
    tensor = pinned_zeros(1000, torch.float32)
    assert runtime.locked == {tensor.data_ptr(): 4000}
    assert tensor.shape == (1000,)
    assert tensor.count_nonzero() == 0
    view = tensor.detach()[10:20].view(2, 5)
    del tensor
    gc.collect()
    assert runtime.log == []
    view.fill_(3)
    address = view.data_ptr()
    del view
    gc.collect()
    assert runtime.log == ["synchronize 0", "synchronize 2", ("unlock", 4000)], "after all devices that are in use"
    assert not is_mapped(address), "and unmapped after that"


def test_nothing_is_locked_for_nothing_and_a_refusal_is_reported(runtime):
    assert pinned_zeros(0).shape == (0,)
    assert runtime.locked == {}
    runtime.error = 2
    with pytest.raises(RuntimeError, match="cannot lock 4000 bytes"):
        pinned_zeros(1000)
    gc.collect()
    assert runtime.log == []


# --- a real device ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compute", ["host", "device"])
def test_on_a_gpu_the_update_is_that_of_the_cpu(compute):
    lengths, dtypes = [100_000, 3, 0, 70_001], [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    expected = parameters(lengths, dtypes)
    params = [p.cuda() for p in expected]
    masters = [None if p.dtype is torch.float32 else p.float() for p in expected]
    reference = [None if m is None else m.clone() for m in masters]
    states = [(pinned_zeros(n), pinned_zeros(n)) for n in lengths]
    moments = [(torch.zeros(n), torch.zeros(n)) for n in lengths]
    pipeline = OffloadPipeline("cuda", compute=compute, chunk_bytes=1 << 14)
    for step in (1, 2, 3):
        new = parameters(lengths, dtypes, seed=step)
        grads = [g.cuda() for g in new]
        pipeline.run([(adam_rows(params, grads, states, masters), adam_work(step, []))])
        for row in adam_rows(expected, new, moments, reference):
            adam_work(step, [])([row])
    assert all(torch.equal(p.cpu(), q) for p, q in zip(params, expected))
    pipeline.synchronize()
    assert all(torch.equal(a, b) for s, m in zip(states, moments) for a, b in zip(s, m))
    assert pinned_zeros(1000).is_pinned()

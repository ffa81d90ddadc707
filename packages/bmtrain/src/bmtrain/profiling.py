"""One profile of all ranks, with aligned clocks, in a file for Perfetto and Chrome."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from bmt_comm import Communicator, current_context, errors_on_all, raise_on_all

_EXCHANGES = 8


@contextlib.contextmanager
def profile(path: str | os.PathLike[str], memory: bool = False) -> Iterator[torch.profiler.profile]:
    """Within, profile all ranks. Afterwards rank 0 writes one trace. All ranks must call this.

    Every rank is a process of the trace. Besides torch's operations, there are ranges for what the packages do:
    "unshard", "wait for unshard", "reshard", "reduce", "wait for reduce", "send" and "recv", each with the name of the
    layer, or the micro-batch; and "optimizer round" and "optimizer, what one rank holds". Open the file with
    https://ui.perfetto.dev or chrome://tracing.

    The clocks of hosts differ. They are aligned to the clock of rank 0, by the times at which ranks leave a barrier,
    with an error of about the time of a barrier.

    Args:
        path: the file, ending in .json or .json.gz.
        memory: whether the trace has the memory of each rank over time.

    Yields:
        this rank's ``torch.profiler.profile``.

    Raises:
        ValueError: ``path`` has another ending.
        FileNotFoundError: its folder does not exist.
        RuntimeError: before ``init_distributed``; or another profiler runs around this one or within it, which torch
            does not support.

        An error on one rank is raised on all.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"path={str(path)!r} must end in .json or .json.gz")
    context = current_context()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with errors_on_all(context.world):
        if context.rank == 0 and not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} for the profile {path.name}")
        if torch.autograd._profiler_enabled():
            raise RuntimeError("bmt.profile: a profiler runs already, and torch can have one at a time")
    problem: Exception | None = None
    offset = _clock_offset(context.world)
    try:
        with torch.profiler.profile(activities=activities, profile_memory=memory) as profiler:
            yield profiler
            if not torch.autograd._profiler_enabled():
                problem = RuntimeError("bmt.profile: another profiler ran within it, and torch can have one at a time")
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)
    except RuntimeError:
        if problem is None:
            raise
        # Otherwise torch 2.6 cannot end its profiler, and the other ranks have to hear of the problem.
    raise_on_all(context.world, problem)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(own))
        events = _aligned(json.loads(own.read_text(errors="replace")), context.rank, offset)
    _begin_at_zero(context.world, events)
    lines = ",\n".join(json.dumps(event) for event in events)
    compressed = gzip.compress(lines.encode(), 3)
    del events, lines
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(path)) if context.rank == 0 else None
        for rank in range(context.world_size):  # one at a time: rank 0 never holds more than one rank's part
            part = _from_rank(context.world, compressed, rank)
            if file is not None:
                file.write(",\n" if rank else '{"displayTimeUnit": "ms", "traceEvents": [')
                file.write(gzip.decompress(part).decode())
        if file is not None:
            file.write("]}")
    context.world.barrier()


def _clock_offset(world: Communicator) -> float:
    """Microseconds to add to this rank's clock to get that of rank 0: the median of several barriers."""
    differences = []
    for _ in range(_EXCHANGES if world.size > 1 else 0):
        world.barrier()
        mine = time.time_ns()
        times = world.all_gather_object(mine)
        differences.append((times[0] - mine) / 1e3)
    return sorted(differences)[len(differences) // 2] if differences else 0.0


def _aligned(trace: dict[str, Any], rank: int, offset: float) -> list[dict[str, Any]]:
    """The events by the clock of rank 0. This rank's host and each of its devices are processes of the trace."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = []
    numbers: dict[Any, int] = {}
    for event in trace["traceEvents"]:
        if event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        pid = numbers.setdefault(event.get("pid"), 16 * rank + len(numbers))
        event = {**event, "pid": pid}
        if "ts" in event and event.get("ph") != "M":
            event["ts"] = event["ts"] + base + offset
        if "id" in event and event.get("ph") in ("s", "f", "t"):
            event["id"] = f"{rank}/{event['id']}"
        events.append(event)
    for source, pid in numbers.items():
        is_main = source == os.getpid()
        name = f"rank {rank}" if is_main else f"rank {rank}, {source}"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    return events


def _from_rank(world: Communicator, mine: bytes, rank: int) -> bytes:
    """The bytes ``mine`` of ``rank``, on rank 0; nothing on other ranks."""
    if world.size == 1:
        return mine
    sizes = world.all_gather_object(len(mine) if world.rank == rank else 0)
    if rank == 0:
        return mine if world.rank == 0 else b""
    data = torch.empty(sizes[rank], dtype=torch.uint8, device=world.device)
    if world.rank == rank:
        data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        world.send(data, 0)
    elif world.rank == 0:
        world.recv(data, rank)
        return data.cpu().numpy().tobytes()
    return b""


def _begin_at_zero(world: Communicator, events: list[dict[str, Any]]) -> None:
    """Shift times so that the first event of all ranks is at 0."""
    timed = [event for event in events if event.get("ph") != "M" and "ts" in event]
    first = min(world.all_gather_object(min((event["ts"] for event in timed), default=float("inf"))))
    for event in timed:
        event["ts"] = round(event["ts"] - first, 3)


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "wt") if path.name.endswith(".gz") else path.open("w")

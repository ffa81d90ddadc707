"""Checks of the collectives between processes of this machine, for ``bmtrain doctor``.

:func:`run_self_test` starts the processes; each of them runs :func:`main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bmt_comm import Communicator

_SIZES = (1024, 1 << 20)
"""Elements of the fp32 messages, about: multiples of the number of processes."""
_SECONDS = 0.1  # the time for which an operation of one size is repeated


@dataclass(frozen=True)
class SelfTest:
    """The result of :func:`run_self_test`.

    Attributes:
        processes: the number of processes.
        problem: what went wrong; None if all results were right.
        shared_memory: whether the collectives used shared memory; None if the processes did not run them.
        microseconds: median times by operation and size.
        seconds: the duration of the test, including the start of the processes.
    """

    processes: int
    problem: str | None
    shared_memory: bool | None
    seconds: float
    microseconds: dict[str, float] = field(default_factory=dict)


def run_self_test(device: str = "cpu", processes: int = 2, timeout: float = 120.0) -> SelfTest:
    """Run collectives between new processes of this machine and check their results.

    Args:
        device: ``cpu`` or ``cuda``; on ``cuda``, process i takes GPU i.
        processes: the number of processes.
        timeout: seconds after which the processes are killed. Their imports take most of the time.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bmtrain-doctor-") as name:
        folder = Path(name)
        workers = [_start(folder, device, rank, processes) for rank in range(processes)]
        problem = None
        try:
            problem = _wait(workers, folder, start + timeout, timeout)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        seconds = time.monotonic() - start
        answers = [_read_json(folder / f"result-{rank}.json") for rank in range(processes)]
        problem = problem or next((answer["problem"] for answer in answers if answer.get("problem")), None)
        first = answers[0]
        return SelfTest(processes, problem, first.get("shared_memory"), seconds, first.get("microseconds", {}))


def _start(folder: Path, device: str, rank: int, processes: int) -> subprocess.Popen[bytes]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    environment = {**os.environ, **{key: str(value) for key, value in ranks.items()}, "OMP_NUM_THREADS": "1"}
    with (folder / f"errors-{rank}").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bmtrain.self_test", str(folder), device],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,  # so that what it starts is killed with it
        )


def _wait(workers: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float) -> str | None:
    """Wait until all workers have ended or one has failed; returns what went wrong."""
    while True:
        states = [worker.poll() for worker in workers]
        for rank, state in enumerate(states):
            if state:
                lines = (folder / f"errors-{rank}").read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else f"it ended with status {state} and said nothing"
                return f"process {rank} failed during {_stage(folder, rank)}: {reason}"
        if all(state == 0 for state in states):
            return None
        if time.monotonic() > deadline:
            stages = ", ".join(f"process {rank} in {_stage(folder, rank)}" for rank in range(len(workers)))
            return f"no result after {timeout:.0f} s: {stages}"
        time.sleep(0.02)


def _stage(folder: Path, rank: int) -> str:
    path = folder / f"stage-{rank}"
    return path.read_text() if path.exists() else "import"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main(arguments: list[str]) -> None:
    """One of the processes: ``python -m bmtrain.self_test FOLDER DEVICE``, with the ranks in the environment."""
    folder, device = Path(arguments[0]), arguments[1]
    rank = os.environ["RANK"]

    def enter(stage: str) -> None:
        (folder / f"stage-{rank}").write_text(stage)

    enter("import")
    import bmt_comm

    enter("start-up")
    context = bmt_comm.init_distributed(f"file://{folder}/store", device=device, timeout=30.0)
    shared = context.world.share_memory()  # init_distributed has tried; this says whether it worked
    microseconds, problem = check_collectives(context.world, enter)
    answer = {"shared_memory": shared, "microseconds": microseconds, "problem": problem}
    (folder / f"result-{rank}.json").write_text(json.dumps(answer))
    enter("shutdown")
    bmt_comm.shutdown()


def check_collectives(comm: Communicator, enter: Callable[[str], None]) -> tuple[dict[str, float], str | None]:
    """Run every collective in every size and compare its result with what it must be.

    Args:
        comm: the ranks that take part.
        enter: called with the name of each collective before it runs.

    Returns:
        The median times in microseconds, and the first wrong result or None.
    """
    import torch

    microseconds: dict[str, float] = {}
    problem = None
    for size in _SIZES:
        for name, run, result, expected in _cases(comm, -(-size // comm.size) * comm.size):
            enter(name)
            label = f"{name} of {size * 4 // 1024} KiB"
            times = []
            for _ in range(_repetitions(comm, run)):
                comm.barrier()
                start = time.perf_counter()
                run()
                if comm.device.type == "cuda":
                    torch.cuda.synchronize(comm.device)
                times.append(time.perf_counter() - start)
            microseconds[label] = round(sorted(times)[len(times) // 2] * 1e6, 1)
            if problem is None and not torch.equal(result, expected):
                wrong = int((result != expected).sum())
                problem = f"{label}: {wrong} of {expected.numel()} elements are wrong on rank {comm.rank}"
    return microseconds, problem


def _cases(comm: Communicator, numel: int) -> list[tuple[str, Callable[[], object], Tensor, Tensor]]:
    """For each collective its name, a call of it, and the tensors that hold its result and what that must be."""
    import torch

    size = comm.size
    total = size * (size + 1) / 2  # rank r contributes r + 1 times the pattern; all sums are exact in fp32
    pattern = torch.arange(numel, dtype=torch.float32, device=comm.device) % 64 + 1
    mine = pattern * (comm.rank + 1)
    part = pattern.view(size, -1)[comm.rank]
    gathered = torch.cat([pattern * (r + 1) for r in range(size)])
    summed, sent = torch.empty_like(pattern), torch.empty_like(pattern)
    wide, chunk = torch.empty_like(gathered), torch.empty_like(part)
    return [
        ("all-reduce", lambda: comm.all_reduce(summed.copy_(mine)), summed, pattern * total),
        ("all-gather", lambda: comm.all_gather(wide, mine), wide, gathered),
        ("reduce-scatter", lambda: comm.reduce_scatter(chunk, mine), chunk, part * total),
        ("broadcast", lambda: comm.broadcast(sent.copy_(mine), size - 1), sent, pattern * size),
    ]


def _repetitions(comm: Communicator, run: Callable[[], object]) -> int:
    """The number of times to run an operation: the same on every rank."""
    import torch

    comm.barrier()
    start = time.perf_counter()
    run()
    once = torch.tensor([time.perf_counter() - start], device=comm.device)
    comm.all_reduce(once, "max")
    return max(3, min(50, int(_SECONDS / once.item())))


if __name__ == "__main__":
    main(sys.argv[1:])

"""How fast the ranks of this job communicate: ``torchrun --nproc-per-node 2 -m bmt_comm.benchmark``.

Bandwidths are in GB/s (10⁹ bytes per second). S is the size of the all-gather's output, the reduce-scatter's input, or
the message that one rank sends, in bytes. The algorithm bandwidth is S / time. The bus bandwidth counts the bytes that
each rank's link carries: with n ranks (n-1)/n of S for the two collectives, and S for send/recv. It is comparable
between numbers of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .communicator import Communicator
from .context import current_context, init_distributed, is_initialized, shutdown
from .printing import print_rank
from .work import Work

SIZES = tuple(4**k * 1024 for k in range(9))
"""Bytes of the messages that are measured by default: 1 KiB to 64 MiB."""

_WARM_UP = 2
_SECONDS = 0.5  # a size is repeated until it took this long, but at least _LEAST times
_LEAST, _MOST = 5, 50


@dataclass(frozen=True)
class Row:
    """One line of the table: message size in bytes, median time in seconds, bandwidths in GB/s."""

    size: int
    time: float
    algorithm_bandwidth: float
    bus_bandwidth: float


def all_gather(sizes: Sequence[int] = SIZES, comm: Communicator | None = None) -> list[Row]:
    """Measure all-gathers whose outputs have ``sizes`` bytes (rounded up to a multiple of the ranks)."""
    comm = comm or current_context().world

    def prepare(size: int) -> Callable[[], Work]:
        out = torch.zeros(size, dtype=torch.uint8, device=comm.device)
        mine = out.view(comm.size, -1)[comm.rank]
        return lambda: comm.all_gather(out, mine)

    return _measure("all-gather", sizes, comm, prepare, (comm.size - 1) / comm.size)


def reduce_scatter(sizes: Sequence[int] = SIZES, comm: Communicator | None = None) -> list[Row]:
    """Measure float32 reduce-scatters whose inputs have ``sizes`` bytes (rounded up to whole elements per rank)."""
    comm = comm or current_context().world

    def prepare(size: int) -> Callable[[], Work]:
        src = torch.zeros(size // 4, device=comm.device)
        out = torch.empty(src.numel() // comm.size, device=comm.device)
        return lambda: comm.reduce_scatter(out, src)

    return _measure("reduce-scatter", sizes, comm, prepare, (comm.size - 1) / comm.size)


def send_recv(sizes: Sequence[int] = SIZES, comm: Communicator | None = None) -> list[Row]:
    """Measure a ring: every rank sends ``sizes`` bytes to the next and receives as much from the previous.

    A single rank copies instead.
    """
    comm = comm or current_context().world

    def prepare(size: int) -> Callable[[], object]:
        src = torch.zeros(size, dtype=torch.uint8, device=comm.device)
        box = torch.empty_like(src)
        if comm.size == 1:
            return lambda: box.copy_(src)
        to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        return lambda: comm.send_recv([(src, to)], [(box, source)])

    return _measure("send/recv", sizes, comm, prepare, 1.0)


def _measure(
    name: str, sizes: Sequence[int], comm: Communicator, prepare: Callable[[int], Callable[[], object]], share: float
) -> list[Row]:
    """Time the call that ``prepare`` makes for each size, and print the table row by row."""
    print_rank(f"{name}, {comm.size} ranks on {comm.device.type}", rank=comm.ranks[0])
    print_rank(f"{'bytes':>12} {'time (us)':>12} {'algorithm GB/s':>15} {'bus GB/s':>10}", rank=comm.ranks[0])
    rows = []
    unit = 4 * comm.size
    for wanted in sizes:
        if wanted < 1:
            raise ValueError(f"sizes must be positive numbers of bytes, got {wanted}")
        size = -(-wanted // unit) * unit
        seconds = _median_time(prepare(size), comm)
        bandwidth = size / seconds / 1e9
        row = Row(size, seconds, bandwidth, bandwidth * share)
        rows.append(row)
        print_rank(
            f"{size:12d} {seconds * 1e6:12.1f} {bandwidth:15.3f} {row.bus_bandwidth:10.3f}",
            rank=comm.ranks[0],
            flush=True,
        )
    return rows


def _median_time(call: Callable[[], object], comm: Communicator) -> float:
    """The median over repetitions of the time of the slowest rank, the same on every rank."""

    def once() -> float:
        comm.barrier()
        start = time.perf_counter()
        call()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=comm.device)
        comm.all_reduce(seconds, "max")
        return max(seconds.item(), 1e-9)

    trial = [once() for _ in range(_WARM_UP)][-1]
    repetitions = min(_MOST, max(_LEAST, int(_SECONDS / trial)))  # the same number on every rank
    return statistics.median(once() for _ in range(repetitions))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bmt_comm.benchmark",
        description="Measure the collectives between the ranks of a job. Start it with torchrun.",
    )
    benchmarks = {"all-gather": all_gather, "reduce-scatter": reduce_scatter, "send-recv": send_recv}
    parser.add_argument(
        "what", nargs="*", metavar="what", help=f"any of {', '.join(benchmarks)} (default: all of them)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest message (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.what:
        if name not in benchmarks:
            parser.error(f"{name!r} is not a benchmark; choose from {', '.join(benchmarks)}")
    sizes = [size for size in SIZES if size <= options.max_bytes]
    if not sizes:
        parser.error(f"--max-bytes must be at least {SIZES[0]}")
    mine = not is_initialized()
    if mine:
        init_distributed(device=options.device)
    for name in options.what or benchmarks:
        benchmarks[name](sizes)
    if mine:
        shutdown()


if __name__ == "__main__":
    main()

"""Collectives between CPU ranks: shared memory, messages between all ranks, and gloo's own, in one run.

Shared memory is measured twice: through communicators, and through torch.distributed with the backend "bmt". The last
column is a copy of as many bytes, on all ranks at once. With --hosts, ranks behave as if they were on several hosts:
they share memory within a host and send messages between hosts.

The candidates live in the same processes and take turns. A time is that of the slowest rank; reported are medians over
rounds, and the median of gloo's time relative to each of the others within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from launch import launched, machine, on_ranks
from timing import median_ratio

import bmt_comm
import bmt_comm.hosts
from bmt_comm._compat import all_gather_single, reduce_scatter_single

SHARED, BACKEND, HOSTS = "shared memory", "backend bmt", "hosts"
MESSAGES, GLOO, COPY = "messages", "gloo", "copy"


def candidates(
    ways: dict[str, bmt_comm.Communicator], ours: dist.ProcessGroup, ranks: int, elements: int
) -> dict[str, dict[str, Callable[[], object]]]:
    """What to time on ``elements`` fp32 numbers, by collective and candidate."""
    whole, part = torch.ones(elements), torch.ones(elements // ranks)

    copy = torch.ones(elements)

    def of(
        call: Callable[[bmt_comm.Communicator], object], torchs: Callable[[dist.ProcessGroup | None], object]
    ) -> dict[str, Callable[[], object]]:
        found = {name: lambda comm=comm: call(comm) for name, comm in ways.items()}
        return {**found, BACKEND: lambda: torchs(ours), GLOO: lambda: torchs(None), COPY: lambda: copy.copy_(whole)}

    maximum = dist.ReduceOp.MAX
    return {
        "all-reduce": of(
            lambda comm: comm.all_reduce(whole, "max"), lambda group: dist.all_reduce(whole, maximum, group=group)
        ),
        "all-gather": of(
            lambda comm: comm.all_gather(whole, part), lambda group: all_gather_single(whole, part, group=group)
        ),
        "reduce-scatter": of(
            lambda comm: comm.reduce_scatter(part, whole, "max"),
            lambda group: reduce_scatter_single(part, whole, maximum, group=group),
        ),
    }


def slowest(call: Callable[[], object], world: bmt_comm.Communicator, repeat: int) -> float:
    """Seconds of a call, on the rank that takes longest."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    seconds = torch.tensor((time.perf_counter() - start) / repeat)
    world.all_reduce(seconds, "max")
    return seconds.item()


def over_hosts(context: bmt_comm.ParallelContext, count: int) -> dict[str, bmt_comm.Communicator]:
    """A communicator whose ranks say that they are on so many hosts."""
    if count == 1:
        return {}
    on_each, real = context.world_size // count, bmt_comm.hosts.host_identity
    bmt_comm.hosts.host_identity = lambda: context.rank // on_each
    comm = bmt_comm.Communicator(dist.new_group(list(range(context.world_size))))
    comm.share_memory()
    bmt_comm.hosts.host_identity = real
    return {HOSTS: comm}


def measure(arguments: argparse.Namespace) -> None:
    context = bmt_comm.init_distributed(device="cpu")
    if not context.world.share_memory():
        sys.exit("the ranks cannot share memory: is bmt-kernels installed, with its compiled module?")
    bmt_comm.print_rank(f"{machine()}; {context.world_size} ranks")
    others = bmt_comm.Communicator(dist.new_group(list(range(context.world_size))))
    ways = {SHARED: context.world, **over_hosts(context, arguments.hosts), MESSAGES: others}
    ours = dist.new_group(backend="bmt")
    titles = ("bytes", SHARED, BACKEND, *([HOSTS] if HOSTS in ways else []), MESSAGES, GLOO, COPY)
    for name in ("all-reduce", "all-gather", "reduce-scatter"):
        bmt_comm.print_rank(f"\n{name}, µs\n" + "".join(f"{title:>18s}" for title in titles))
        for size in arguments.bytes:
            elements = -(-size // (4 * context.world_size)) * context.world_size
            repeat = max(1, min(10, (1 << 20) // size))
            functions = candidates(ways, ours, context.world_size, elements)[name]
            times: dict[str, list[float]] = {way: [] for way in functions}
            for round_ in range(-2, arguments.rounds):
                for way, function in functions.items():
                    seconds = slowest(function, context.world, repeat)
                    if round_ >= 0:
                        times[way].append(seconds)
            cells = [str(4 * elements)]
            for way in titles[1:]:
                found = times[way]
                ratio = f" ({median_ratio(times[GLOO], found):.1f}x)" if way != GLOO else ""
                cells.append(f"{statistics.median(found) * 1e6:.0f}{ratio}")
            bmt_comm.print_rank("".join(f"{cell:>18s}" for cell in cells), flush=True)
    bmt_comm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, help="of the whole (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=1, help="that ranks behave as if they were on (default: 1)")
    arguments = parser.parse_args()
    if not launched():
        return on_ranks(__file__, arguments.ranks, sys.argv[1:])
    torch.set_num_threads(1)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

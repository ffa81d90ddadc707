"""Collectives and messages between CPU ranks: shared memory, messages between all ranks, and gloo's own.

Shared memory is measured through communicators, and through torch.distributed with the backend "bmt". With --hosts,
ranks behave as if they were on several hosts: they share memory within a host and send messages between hosts.

Each candidate runs in fresh processes of its own, and the candidates take turns. A time is that of the slowest rank in
a row of calls, the median over rows. The table has medians over rounds, the median of gloo's time relative to each of
the others in the same round, and, of a copy, what share of its speed they reach: a copy of as many bytes in a rank's
own memory, on all ranks at once, and one of what another rank has just written to memory that both share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from launch import launched, machine, on_ranks
from timing import median_ratio, timed

import bmt_comm
import bmt_comm.hosts
from bmt_comm._compat import all_gather_single, reduce_scatter_single

SHARED, BACKEND, HOSTS, MESSAGES, GLOO = "shared memory", "backend bmt", "hosts", "messages", "gloo"
COPY = "copy"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "send and receive")
OWN, OTHERS = "a copy in own memory", "a copy of what another rank has written"
Times = dict[str, dict[str, float]]  # seconds, by collective and bytes
ROWS = 7
CPU = torch.device("cpu")


def communicator(name: str, hosts: int) -> bmt_comm.Communicator:
    """The ranks of a candidate, which they send through their communicator."""
    context = bmt_comm.init_distributed(device="cpu")
    if name == MESSAGES:
        return bmt_comm.Communicator(dist.new_group(list(range(context.world_size))))
    if name == HOSTS:
        bmt_comm.hosts.host_identity = lambda: context.rank * hosts // context.world_size
    comm = bmt_comm.Communicator(dist.new_group(list(range(context.world_size))))
    if not comm.share_memory():
        sys.exit("the ranks cannot share memory: is bmt-kernels installed, with its compiled module?")
    return comm


def calls_of_communicator(comm: bmt_comm.Communicator, elements: int) -> list[Callable[[], object]]:
    whole, part, peer = torch.ones(elements), torch.ones(elements // comm.size), comm.rank ^ 1

    def send_and_receive() -> None:
        for turn in (0, 1):
            (comm.send if comm.rank % 2 == turn else comm.recv)(whole, peer)

    return [
        lambda: comm.all_reduce(whole, "max"),
        lambda: comm.all_gather(whole, part),
        lambda: comm.reduce_scatter(part, whole, "max"),
        *([send_and_receive] if comm.size % 2 == 0 else []),
    ]


def calls_of_torch(elements: int) -> list[Callable[[], object]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, part, maximum = torch.ones(elements), torch.ones(elements // ranks), dist.ReduceOp.MAX

    def send_and_receive() -> None:
        for turn in (0, 1):
            (dist.send if rank % 2 == turn else dist.recv)(whole, rank ^ 1)

    return [
        lambda: dist.all_reduce(whole, maximum),
        lambda: all_gather_single(whole, part),
        lambda: reduce_scatter_single(part, whole, maximum),
        *([send_and_receive] if ranks % 2 == 0 else []),
    ]


def slowest(seconds: float) -> float:
    """Of all ranks."""
    most = torch.tensor(seconds)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def copies(comm: bmt_comm.Communicator, elements: int, count: int) -> dict[str, float]:
    source, target = torch.ones(elements), torch.ones(elements)
    shared = comm.shared_vector(elements * comm.size, torch.float32)
    assert shared is not None
    vectors = shared.view(comm.size, elements)
    seconds = []
    for _ in range(ROWS * count):
        vectors[comm.rank].fill_(1)
        comm.barrier()
        seconds.append(timed(lambda: target.copy_(vectors[comm.rank - 1]), CPU))
        comm.barrier()
    own = [timed(lambda: target.copy_(source), CPU, count) for _ in range(ROWS)]
    return {OWN: slowest(statistics.median(own)), OTHERS: slowest(statistics.median(seconds))}


def run_alone(name: str, arguments: argparse.Namespace) -> None:
    """Measure one candidate, on the ranks that this process is one of."""
    comm = None
    if name in (BACKEND, GLOO):
        dist.init_process_group("gloo" if name == GLOO else "bmt")
    else:
        comm = communicator(name, arguments.hosts)
    ranks, times = dist.get_world_size(), Times()
    for size in arguments.bytes:
        elements = -(-size // (4 * ranks)) * ranks
        count = max(3, min(100, (1 << 24) // size))
        if comm is not None and name == COPY:
            for kind, seconds in copies(comm, elements, count).items():
                times.setdefault(kind, {})[str(size)] = seconds
            continue
        calls = calls_of_torch(elements) if comm is None else calls_of_communicator(comm, elements)
        for collective, call in zip(COLLECTIVES, calls, strict=False):  # an odd number of ranks has no pairs
            dist.barrier()
            timed(call, CPU, count)
            median = statistics.median(timed(call, CPU, count) for _ in range(ROWS))
            # There and back are two messages.
            times.setdefault(collective, {})[str(size)] = slowest(median) / (2 if collective == COLLECTIVES[-1] else 1)
    if dist.get_rank() == 0:
        Path(arguments.into).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, arguments: argparse.Namespace) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "times.json")
        flags = ["--alone", name, "--into", str(into), "--hosts", str(arguments.hosts)]
        code = on_ranks(__file__, arguments.ranks, [*flags, "--bytes", *map(str, arguments.bytes)])
        if code:
            sys.exit(f"{name} has failed")
        return json.loads(into.read_text())


def table(collective: str, rounds: dict[str, list[Times]], sizes: Sequence[int]) -> str:
    """Of one collective; a cell has µs, and how many times faster than gloo that is."""
    names = [name for name, starts in rounds.items() if collective in starts[0]]
    lines = [
        f"| {collective} |" + "".join(f" {name}, µs |" for name in names) + " of a copy | of a copy of another's |"
    ]
    lines.append("|---|" + "---|" * (len(names) + 2))
    for size in map(str, sizes):
        seconds = {name: [times[collective][size] for times in rounds[name]] for name in names}
        cells = []
        for name, starts in seconds.items():
            ratio = "" if name == GLOO else f" ({median_ratio(seconds[GLOO], starts):.1f} ×)"
            cells.append(f"{statistics.median(starts) * 1e6:.0f}{ratio}")
        for kind in (OWN, OTHERS):
            share = median_ratio([times[kind][size] for times in rounds[COPY]], seconds[SHARED])
            cells.append(f"{100 * share:.0f} %")
        lines.append(f"| {_told(int(size))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _told(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, help="of the whole (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each candidate (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=1, help="that ranks behave as if they were on (default: 1)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if launched():
        torch.set_num_threads(1)
        run_alone(arguments.alone, arguments)
        return 0
    names = [SHARED, BACKEND, *([HOSTS] if arguments.hosts > 1 else []), MESSAGES, GLOO, COPY]
    rounds: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names:
            rounds[name].append(measure(name, arguments))
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr)
    print(f"{machine()}; {arguments.ranks} ranks, {arguments.rounds} rounds")
    for collective in COLLECTIVES[: 4 if arguments.ranks % 2 == 0 else 3]:
        print("\n" + table(collective, rounds, arguments.bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())

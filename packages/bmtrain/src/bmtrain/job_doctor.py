"""``torchrun ... -m bmtrain doctor``: whether processes of a job on several hosts communicate, and how fast."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .doctor import PACKAGES, Check, collect_info, lines_of, report
from .self_test import check_collectives

if TYPE_CHECKING:
    from torch import Tensor

    from bmt_comm import Communicator, ParallelContext

_ROUND_TRIPS, _COPIES = 50, 3
_NUMBERS = 1 << 22  # of fp32 in the long message between two hosts
_SLOW = 2.0  # links that take so many times the median are reported
Pair = tuple[int, int]
"""Two hosts, by their numbers."""


def is_launched() -> bool:
    """Whether this process is one of several that a launcher has started."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def diagnose_job(as_json: bool) -> int:
    """Run the checks. Rank 0 prints their results; other ranks print what fails before the rendezvous.

    Returns:
        The exit status: 1 if a check failed, else 0.
    """
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        return report(run_job_checks(), as_json)
    status = 0
    for check in run_job_checks():
        if check.status != "ok" and not dist.is_initialized():
            print(f"rank {os.environ['RANK']}:\n{lines_of(check)}", flush=True)
        status |= check.status == "failed"
    return status


def run_job_checks(timeout: float = 60.0) -> Iterable[Check]:
    """Run the checks of a job: all its processes must call it, and see the same results after the rendezvous.

    Args:
        timeout: seconds for the rendezvous, and for a collective.
    """
    import bmt_comm

    address = check_address()
    yield address
    if address.status == "failed":
        return
    begun = time.monotonic()
    try:
        context = bmt_comm.init_distributed(timeout=timeout)
    except RuntimeError as error:
        advice = "start the same number of processes on every host, within this time; open the port between the hosts"
        yield Check("rendezvous", "failed", str(error).splitlines()[0], advice)
        return
    except ValueError as error:  # the devices are fewer than the processes, or other ones than on other ranks
        advice = "look at the drivers, at CUDA_VISIBLE_DEVICES and at the number of processes of every host"
        yield Check("rendezvous", "failed", str(error), advice)
        return
    yield Check("rendezvous", "ok", f"{context.world_size} processes after {time.monotonic() - begun:.1f} s")
    facts = context.world.all_gather_object(_facts(context.world))
    yield check_versions(facts)
    hosts = hosts_of(facts)
    yield check_placement(hosts, facts)
    yield check_transport(context)
    if len(hosts) > 1:
        names = [facts[ranks[0]]["host"] for ranks in hosts]
        yield check_links(names, *measure_links(context.world, [ranks[0] for ranks in hosts]))
    figures, problem = check_collectives(context.world, lambda stage: None)
    problem = next((p for p in context.world.all_gather_object(problem) if p is not None), None)
    if problem is None:
        yield Check("collectives", "ok", "right results", figures=figures)
    else:
        yield Check("collectives", "failed", problem, "send this report with a bug report", figures)
    bmt_comm.shutdown()


def check_address() -> Check:
    """This host can connect to the address of rank 0, and its own name resolves to an address for other hosts."""
    name = "addresses"
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    here = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, ValueError) as error:
        advice = "give torchrun an address: --rdzv-endpoint HOST:PORT, or --master-addr and --master-port"
        return Check(name, "failed", f"{here} does not find the address of rank 0, {host!r}:{port!r}: {error}", advice)
    # Without torchrun, rank 0 opens the port itself, at the rendezvous.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((host, int(port)), timeout=30).close()
        except OSError as error:
            advice = f"open port {port} between the hosts; look whether torchrun runs on that of rank 0"
            return Check(name, "failed", f"{here} does not reach rank 0 at {address}:{port}: {error}", advice)
    own = _address_of(here)
    several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if several and own.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        detail = f"the name of this host, {here}, leads to {own}, which other hosts do not reach"
        return Check(name, "warning", detail, "set GLOO_SOCKET_IFNAME to the network interface, or correct /etc/hosts")
    return Check(name, "ok", f"rank 0 is at {address}:{port}; {here} is at {own or 'no address'}")


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _facts(world: Communicator) -> dict[str, Any]:
    """What the other processes must know of this one. All call it at once."""
    world.barrier()
    clock = time.time()
    info = collect_info()
    platform, kernels = info["platform"], info["kernels"]
    versions = {name: platform[name] for name in ("python", "torch", "torch built for CUDA", "NCCL")}
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text() + socket.gethostname()
    except OSError:
        host = socket.gethostname()
    return {
        "host": socket.gethostname(),
        "machine": host,
        "versions": {**versions, **info["packages"], "CPU kernels": kernels["cpu_variant"]},
        "clock": clock,
    }


def hosts_of(facts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        hosts.setdefault(each["machine"], []).append(rank)
    return list(hosts.values())


def check_versions(facts: Sequence[dict[str, Any]]) -> Check:
    """All processes have the same versions."""
    differences = []
    for name in facts[0]["versions"]:
        by_value: dict[Any, str] = {}
        for each in facts:
            by_value.setdefault(each["versions"][name], each["host"])
        if len(by_value) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value} on {host}" for value, host in by_value.items()))
    if not differences:
        return Check("versions", "ok", "the same on all hosts")
    serious = any(line.startswith(("torch", *PACKAGES)) for line in differences)
    advice = "install the same environment on all hosts"
    return Check("versions", "failed" if serious else "warning", "; ".join(differences), advice)


def check_placement(hosts: Sequence[Sequence[int]], facts: Sequence[dict[str, Any]]) -> Check:
    """All hosts have the same number of processes, with consecutive ranks, and their clocks agree."""
    name = "hosts"
    parts = [f"{facts[ranks[0]]['host']} has ranks {ranks[0]} to {ranks[-1]}" for ranks in hosts]
    detail = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    clocks = [facts[ranks[0]]["clock"] for ranks in hosts]
    if any(ranks[-1] - ranks[0] + 1 != len(ranks) for ranks in hosts):
        return Check(name, "warning", f"{detail}: not neighbours", "give tensor parallelism ranks of one host")
    if max(clocks) - min(clocks) > 2:
        late = f"clocks differ by {max(clocks) - min(clocks):.0f} s"
        return Check(name, "warning", f"{detail}; {late}", "run a time service, so that logs of hosts can be compared")
    if len({len(ranks) for ranks in hosts}) > 1:
        return Check(name, "warning", f"{detail}: not as many each", "start as many processes on every host")
    return Check(name, "ok", detail)


def check_transport(context: ParallelContext) -> Check:
    """The transport between the processes."""
    name, world = "transport", context.world
    if context.device.type == "cuda":
        interface = os.environ.get("NCCL_SOCKET_IFNAME", "NCCL's choice")
        return Check(name, "ok", f"NCCL, interface: {interface}")
    if world.share_memory():
        return Check(name, "ok", "shared memory: all processes are on one host")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host's name")
    way = "shared memory within hosts, gloo messages between them" if world.shares_within_hosts else "gloo messages"
    return Check(name, "ok", f"{way}, interface: {interface}")


def measure_links(world: Communicator, leaders: Sequence[int]) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """The times of a round trip, and of a long message, between each two hosts; in microseconds.

    The first ranks of the hosts send, in rounds of disjoint pairs. A collective of ``world``.
    """
    import torch

    short = torch.zeros(1, device=world.device)
    long = torch.zeros(_NUMBERS, device=world.device)
    mine: dict[Pair, tuple[float, float]] = {}
    for meetings in tournament(len(leaders)):
        world.barrier()
        for a, b in meetings:
            if world.rank in (leaders[a], leaders[b]):
                first, peer = world.rank == leaders[a], leaders[b if world.rank == leaders[a] else a]
                _round_trips(world, long, peer, first, 1)  # connects
                trip = _round_trips(world, short, peer, first, _ROUND_TRIPS)
                copy = _round_trips(world, long, peer, first, _COPIES) / 2
                if first:
                    mine[a, b] = trip, copy
    times = sorted(item for each in world.all_gather_object(mine) for item in each.items())
    return {pair: trip for pair, (trip, _) in times}, {pair: copy for pair, (_, copy) in times}


def tournament(players: int) -> list[list[Pair]]:
    """Rounds of pairs: each two players meet once, and each player at most once in a round (the circle method)."""
    count = players + players % 2
    rounds = []
    for turn in range(count - 1):
        circle = [0, *(1 + (turn + i) % (count - 1) for i in range(count - 1))]
        pairs = [tuple(sorted((circle[i], circle[-1 - i]))) for i in range(count // 2)]
        rounds.append([(a, b) for a, b in pairs if b < players])
    return rounds


def _round_trips(world: Communicator, message: Tensor, peer: int, first: bool, count: int) -> float:
    """The median time of a round trip in microseconds; ``first``: this rank sends first."""
    import torch

    times = []
    for _ in range(count):
        begun = time.perf_counter()
        for send in (first, not first):
            (world.send if send else world.recv)(message, peer)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def check_links(names: Sequence[str], trips: dict[Pair, float], copies: dict[Pair, float]) -> Check:
    """No link between two hosts is much slower than the others."""

    def link(pair: Pair) -> str:
        return " and ".join(names[n] for n in pair)

    def speed(pair: Pair) -> float:
        return _NUMBERS * 4 / copies[pair] / 1e3

    figures = {
        "round trip, median": statistics.median(trips.values()),
        "round trip, slowest": max(trips.values()),
        f"{_NUMBERS * 4 >> 20} MiB, median": statistics.median(copies.values()),
        f"{_NUMBERS * 4 >> 20} MiB, slowest": max(copies.values()),
    }
    slow = [p for p in copies if copies[p] > _SLOW * statistics.median(copies.values())]
    late = [p for p in trips if trips[p] > _SLOW * statistics.median(trips.values()) and p not in slow]
    if not slow and not late:
        low, high = min(map(speed, copies)), max(map(speed, copies))
        return Check(
            "links", "ok", f"{len(trips)} between {len(names)} hosts, {low:.2f} to {high:.2f} GB/s", "", figures
        )
    told = [f"{link(p)}: {speed(p):.2f} GB/s" for p in sorted(slow, key=speed)[:8]]
    told += [f"{link(p)}: {trips[p]:.0f} µs a round trip" for p in sorted(late, key=lambda p: -trips[p])[:8]]
    advice = "look at cables, ports and the load of these hosts; run again without them"
    return Check("links", "warning", "slower than half of the median: " + "; ".join(told), advice, figures)

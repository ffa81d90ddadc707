"""Ranks on hosts of their own, with a link of a given speed between them: network namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from launch import run_ranks

PORT = "29500"  # in namespaces of their own


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """``count`` network namespaces, 10.78.0.1 and so on, on one switch; each sends ``rate`` at most (``1gbit``).

    Needs Linux, ``ip``, ``tc`` and the right to make namespaces.
    """
    names = [f"bmt-link-{os.getpid()}-{number}" for number in range(count)]
    switch = f"{names[0]}-switch"
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", f"port{number}", "netns", switch)
            run("ip", "-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            run("ip", "-n", name, "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            limit = ("rate", rate, "burst", "512kb", "latency", "100ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def on_hosts(script: str, ranks: int, arguments: Sequence[str], rate: str) -> int:
    """Run ``script`` on ``ranks`` hosts, one process each, one thread each; returns an exit code."""
    own = {"GLOO_SOCKET_IFNAME": "eth0", "LOCAL_RANK": "0", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": PORT}
    with hosts(ranks, rate) as names:
        command = [sys.executable, "-W", "ignore", script, *arguments]
        return run_ranks([["ip", "netns", "exec", name, *command] for name in names], [own] * ranks)

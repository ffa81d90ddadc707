"""Ranks on hosts of their own, with a link of a given speed between them: network namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

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


def on_hosts(script: str, ranks: int, arguments: list[str], rate: str) -> int:
    """Run ``script`` on ``ranks`` hosts, one process each, one thread each; an exit code that is not 0, if one is."""
    with hosts(ranks, rate) as names:
        processes = []
        for rank, name in enumerate(names):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                "LOCAL_RANK": "0",
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "10.78.0.1",
                "MASTER_PORT": PORT,
            }
            command = ["ip", "netns", "exec", name, sys.executable, script, *arguments]
            processes.append(subprocess.Popen(command, env=environment))
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.1)
        for process in processes:  # of ranks that wait for one that has failed
            process.kill()
    return next((process.returncode for process in processes if process.returncode), 0)

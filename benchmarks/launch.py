"""Starting a benchmark on several ranks, and describing the machine it ran on."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def on_ranks(script: str, ranks: int, arguments: Sequence[str]) -> int:
    """Run ``script`` on ``ranks`` processes of this machine, one thread each on CPU; returns an exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    local = [{**address, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    command = [sys.executable, "-W", "ignore", script, *arguments]
    return run_ranks([command] * ranks, local)


def run_ranks(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> int:
    """Run one process per rank, each with a few variables of its own; if one fails, the others are killed.

    There is no launcher beside the ranks: it would take seconds to start, and share the memory of libraries with them.

    Returns the first exit code that is not 0, or 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks end, too
    processes = []
    try:
        for rank, (command, own) in enumerate(zip(commands, environments, strict=True)):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(commands))}
            processes.append(subprocess.Popen(command, env=environment))
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    return next((code for code in codes if code), 0)


def launched() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ


def default_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def machine() -> str:
    """Device, versions and commit, for the record."""
    return f"{device()}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}"


def device() -> str:
    """The GPUs or the processor of this machine, and how many."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def commit() -> str:
    """The commit of this checkout, and whether its code differs from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    code = ["status", "--porcelain", "--untracked-files=no", "--", "packages", "benchmarks"]
    changed = subprocess.run([*git, *code], capture_output=True, text=True, check=False).stdout
    return f"{head.strip() or 'unknown'}{' with changes' if changed else ''}"

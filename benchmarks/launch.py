"""Starting a benchmark on several ranks, and describing the machine it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import torch


def on_ranks(script: str, ranks: int, arguments: list[str]) -> int:
    """Run ``script`` on ``ranks`` processes of this machine, one thread each on CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*command, script, *arguments], env=environment, check=False).returncode


def launched() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ


def default_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def machine() -> str:
    """Device, versions and commit, for the record."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit.stdout.strip()}"

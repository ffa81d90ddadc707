"""The number of processors that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def processors(root: Path = Path("/")) -> float:
    """The number of processors that this process may run on, or its share of their time if that is less.

    Control groups, also those around its own, grant the share: of version 2 in ``cpu.max``, of version 1 in two files.
    ``root`` is where the system's files are.
    """
    share = float(len(os.sched_getaffinity(0)))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return share
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            share = min(share, _granted(folder, bool(controllers)))
            if folder == top:
                break
    return share


def _granted(folder: Path, first_version: bool) -> float:
    """Processors that a control group grants; infinite where it does not say."""
    try:
        if first_version:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)

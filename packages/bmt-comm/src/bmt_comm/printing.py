"""Printing from one rank, and what memory is in use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from .config import rank as own_rank
from .context import current_context, is_initialized

_WIDTH = 80


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``print`` on rank ``rank`` only; before ``init_distributed`` every process is rank 0."""
    if own_rank() == rank:
        print(*args, **kwargs)


def print_dict(title: str, content: Mapping[Any, Any], file: TextIO | None = None) -> None:
    """Print a titled block with a line per item, on every rank that calls it."""
    print_block(title, "\n".join(f"{key}: {value}" for key, value in content.items()), file)


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print ``title`` in a ruled line, and ``content`` under it, on every rank that calls it."""
    file = sys.stdout if file is None else file
    print(f" {title} ".center(_WIDTH, "="), file=file)
    if content is not None:
        print(content, file=file)


def see_memory(message: str, detail: bool = False) -> dict[str, float] | str:
    """Print, on rank 0, what memory this process uses, and return it on every rank.

    Returns gigabytes (10⁹ bytes) by name. On CUDA: allocated and peak allocated device memory, and the peak
    counter is reset; with ``detail`` torch's full summary (a string). On CPU: the resident set and its peak.
    """
    device = current_context().device if is_initialized() else torch.device("cpu")
    report: dict[str, float] | str
    if device.type == "cuda":
        if detail:
            report = torch.cuda.memory_summary(device)
        else:
            report = {
                "allocated": round(torch.cuda.memory_allocated(device) / 1e9, 3),
                "max_allocated": round(torch.cuda.max_memory_allocated(device) / 1e9, 3),
            }
        torch.cuda.reset_peak_memory_stats(device)
    else:
        report = {name: round(size / 1e9, 3) for name, size in _resident_bytes().items()}
    if own_rank() == 0:
        if isinstance(report, str):
            print_block(message, report)
        else:
            print_dict(message, report)
    return report


def _resident_bytes() -> dict[str, int]:
    """Bytes resident now (Linux) and at the peak."""
    sizes: dict[str, int] = {}
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status if ":" in line)
        sizes["resident"] = int(fields["VmRSS"].split()[0]) * 1024
        sizes["max_resident"] = int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        sizes["max_resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return sizes

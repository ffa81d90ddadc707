"""The entries of PyTorch's flight recorder, for the files that ranks write when a job fails.

The recorder keeps the last operations of NCCL's process groups: whether each has begun and ended on the device, which
the host does not know. New versions of torch also keep gloo's collectives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

PREFIX = "bmt-flight-rank-"
_KEPT = 8  # operations in the text


def write_record(folder: Path, rank: int) -> str:
    """Write what torch has recorded to a file in ``folder``, as its tool ``torchfrtrace`` reads it.

    Returns the last operations that have not ended, one in each line; "" if torch records nothing.
    """
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        if not hasattr(c10d, f"{name}_json"):  # this build of torch lacks it
            continue
        entries: list[dict[str, Any]] = json.loads(getattr(c10d, f"{name}_json")()).get("entries", [])
        if entries:
            path = folder / f"{PREFIX}{rank}"
            path.write_bytes(getattr(c10d, name)())
            last = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
            lines = [_line(entry) for entry in last[-_KEPT:]] or ["  none"]
            return "\n".join([f"PyTorch's flight recorder ({path}), operations that have not ended:", *lines])
    return ""


def _line(entry: dict[str, Any]) -> str:
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return (
        f"  {entry.get('profiling_name')} number {number} of process group {entry.get('process_group')}, "
        f"{entry.get('input_dtypes')} {entry.get('input_sizes')}: {entry.get('state')}"
    )

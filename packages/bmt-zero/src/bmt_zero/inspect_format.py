"""Summaries of tensors as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")


def format_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each tensor of a summary.

    Args:
        summary: what :func:`bmt_zero.inspect_model` or :meth:`bmt_zero.InspectTensor.get_summary` has returned, or
            several of these added.
    """
    lines = [_COLUMNS, *(tuple(_cell(item[column]) for column in _COLUMNS) for item in summary)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

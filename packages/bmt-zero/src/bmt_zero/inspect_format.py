"""Summaries of tensors as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")
_WIDTHS = (0, 16, 9, 9, 9, 9, 9, 9)  # at least, so that lines of several summaries can be compared


def format_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each tensor of a summary.

    Args:
        summary: the result of :func:`bmt_zero.inspect_model` or :meth:`bmt_zero.InspectTensor.get_summary`, or the sum
            of several of them.
    """
    lines = [_COLUMNS, *(tuple(_cell(item[column]) for column in _COLUMNS) for item in summary)]
    widths = [max(least, *(len(line[i]) for line in lines)) for i, least in enumerate(_WIDTHS)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.3e}"

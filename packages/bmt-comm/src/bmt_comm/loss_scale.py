"""The scale of the gradients that backward has computed last, for those who show gradients."""

from __future__ import annotations

_last = 1.0


def note_loss_scale(scale: float) -> None:
    """Say by how much the loss whose backward comes next is multiplied (``OptimManager`` does)."""
    global _last
    _last = float(scale)


def last_loss_scale() -> float:
    """The scale noted last; 1 if there was none."""
    return _last

"""Computations of ours inside of ``torch.autocast``, which is meant for the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Within, nothing is computed in other dtypes than its operands have, as outside of ``torch.autocast``."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield

"""The callers of a function: some functions of torch do not identify themselves to the functions that they call."""

from __future__ import annotations

import sys
from typing import Any


def is_called_from(module: str) -> bool:
    """Whether a function of the module of this name is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False

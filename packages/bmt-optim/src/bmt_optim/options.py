"""Checks of options that many optimizers have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def check_not_negative(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options are numbers, finite and not negative."""
    for name in names:
        if not 0 <= options[name] < math.inf:
            raise ValueError(f"{name}={options[name]!r} must be finite and not negative")


def check_betas(betas: Any, count: int) -> None:
    """Raise ValueError unless ``betas`` are ``count`` decay rates."""
    if len(betas) != count or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be {count} numbers in [0, 1)")


def check_positive(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options are numbers, finite and above 0."""
    for name in names:
        if not 0 < options[name] < math.inf:
            raise ValueError(f"{name}={options[name]!r} must be finite and positive")


def check_pair_not_negative(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the option is two numbers, finite and not negative."""
    pair = options[name]
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(0 <= number < math.inf for number in pair):
        raise ValueError(f"{name}={pair!r} must be two numbers, finite and not negative")

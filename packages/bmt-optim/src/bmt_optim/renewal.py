"""In which steps parameters renew what is costly."""

from __future__ import annotations

_GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, in whatever period parameters of a kind recur


def place_of(number: int, every: int) -> int:
    """When what has this number is due among ``every`` steps: evenly spread, so that no step does the work of all."""
    return int(every * (number * _GOLDEN % 1))

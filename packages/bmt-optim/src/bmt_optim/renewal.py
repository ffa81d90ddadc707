"""The steps in which parameters renew costly state."""

from __future__ import annotations

_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly, whatever the period of the numbers


def place_of(number: int, every: int) -> int:
    """The offset of this number's renewals among ``every`` steps. Offsets are spread: steps have about equal work."""
    return int(every * (number * _GOLDEN % 1))

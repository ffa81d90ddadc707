"""The partition of a chain of layers into pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Split a chain of layers into contiguous stages so that the most expensive stage is as cheap as possible.

    A pipeline is as fast as its most expensive stage. Every stage gets at least one layer. Among the best partitions,
    the result is the most even one (the smallest sum of squared stage costs). Among those, it is the one with the
    longest first stages: ten equal layers in four stages are 3 + 3 + 2 + 2. Sums are exact, and the result depends only
    on the arguments, so ranks agree on it without communication.

    Args:
        costs: the cost of each layer in any unit (seconds, FLOPs, parameters), finite and not negative.
        num_stages: how many stages, from 1 to the number of layers.

    Returns:
        A range of layer indices for each stage, in order; together they cover all layers.

    Raises:
        ValueError: an argument out of range.
    """
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages={num_stages!r} must be a positive integer")
    if num_stages > len(costs):
        raise ValueError(f"num_stages={num_stages} is more than the {len(costs)} layers, and a stage needs one")
    for index, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs[{index}]={cost!r} must be a finite number, 0 or more")
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))
    integers = [int(cost * scale) for cost in exact]
    return _most_even(integers, num_stages, _smallest_limit(integers, num_stages))


def _smallest_limit(costs: list[int], num_stages: int) -> int:
    """The cost of the most expensive stage in an optimal partition."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(costs: list[int], limit: int) -> int:
    """The smallest number of stages that cost at most ``limit`` each. ``limit`` is at least ``max(costs)``."""
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0
        filled += cost
    return stages


def _most_even(costs: list[int], num_stages: int, limit: int) -> list[range]:
    """The partition with the smallest sum of squares among those whose stages cost at most ``limit``."""
    count = len(costs)
    before = [0, *accumulate(costs)]
    # squares[i]: the smallest sum of squares of layers i, i + 1, ... in the stages so far; None: impossible.
    squares: list[int | None] = [*[None] * count, 0]
    stops: list[list[int]] = []  # for each number of stages: the stop of the first of them, by its start
    for _ in range(num_stages):
        best: list[int | None] = [None] * (count + 1)
        stop_of = [0] * (count + 1)
        for start in range(count):
            for stop in range(start + 1, count + 1):
                cost = before[stop] - before[start]
                if cost > limit:
                    break
                rest, smallest = squares[stop], best[start]
                if rest is not None and (smallest is None or cost * cost + rest <= smallest):
                    best[start], stop_of[start] = cost * cost + rest, stop
        squares = best
        stops.append(stop_of)
    ranges = []
    start = 0
    for stop_of in reversed(stops):
        ranges.append(range(start, stop_of[start]))
        start = stop_of[start]
    return ranges

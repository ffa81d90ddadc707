"""Timing candidates that take turns, so that what else the machine does meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def timed(function: Callable[[], object], device: torch.device, repeat: int = 1) -> float:
    """Seconds that one of ``repeat`` calls takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeat


def take_turns(
    functions: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, repeat: int = 1, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round: the mean of ``repeat`` calls, on a GPU of 20 at least.

    A GPU computes while the host prepares what comes next; of a single call one would time the preparation.
    """
    if device.type == "cuda":
        repeat = max(repeat, 20)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(-warm_up, rounds):
        for name, function in functions.items():
            seconds = timed(function, device, repeat)
            if round_ >= 0:
                times[name].append(seconds)
    return times


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def thread_counts(wanted: Sequence[int], device: torch.device) -> Sequence[int]:
    """The numbers of threads to measure on: on a GPU they do not matter."""
    return wanted if device.type == "cpu" else [1]

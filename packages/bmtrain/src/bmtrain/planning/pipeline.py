"""The bubble and the held activations of pipeline schedules, from the schedules of ``bmt_pipe``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from bmt_pipe import Kind, idle_share, make_schedule, simulate


@dataclass(frozen=True)
class Held:
    """The largest numbers that a rank holds at a time, and the bubble.

    Attributes:
        inputs: inputs of chunks, each of one micro-batch, that are kept for recomputation.
        activations: micro-batches, times chunks, whose activations are held.
        bubble: the share of time that ranks wait, from 0 to 1.
    """

    inputs: int
    activations: int
    bubble: float


@functools.cache
def held(
    schedule: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    forward: Fraction,
    recompute: Fraction,
    backward: Fraction,
) -> Held:
    """Simulate a schedule. The costs are the times of a micro-batch in all chunks of a rank together.

    Raises:
        ValueError: the schedule does not support these sizes.
    """
    plan = make_schedule(schedule, stages, micro_batches, chunks)
    timeline = simulate(plan, {Kind.FORWARD: forward, Kind.RECOMPUTE: recompute, Kind.BACKWARD: backward})
    return Held(max(timeline.inputs), max(timeline.activations), max(idle_share(timeline)))

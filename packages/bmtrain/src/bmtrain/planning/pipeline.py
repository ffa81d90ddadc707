"""Pipelines: what a schedule waits for and holds, from ``bmt_pipe``'s own schedules."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from bmt_pipe import Kind, idle_share, make_schedule, simulate


@dataclass(frozen=True)
class Held:
    """What the rank that holds most has at most at a time, and the share of time that ranks wait.

    Attributes:
        inputs: inputs of chunks, each of one micro-batch, that are kept for recomputation.
        activations: micro-batches, times chunks, whose activations are held.
        bubble: from 0 to 1.
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
    """Of a schedule, in which a micro-batch takes so long in all chunks of a rank together.

    Raises:
        ValueError: the schedule cannot be of these sizes.
    """
    plan = make_schedule(schedule, stages, micro_batches, chunks)
    timeline = simulate(plan, {Kind.FORWARD: forward, Kind.RECOMPUTE: recompute, Kind.BACKWARD: backward})
    return Held(max(timeline.inputs), max(timeline.activations), max(idle_share(timeline)))

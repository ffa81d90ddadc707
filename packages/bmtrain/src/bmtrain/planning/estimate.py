"""Estimates of a job with given settings: memory, bytes sent and time per step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from bmt_pipe import Kind, idle_share, make_schedule, simulate

from .live_memory import Memory
from .models import PlannedModel
from .settings import Job, Settings
from .trace import PHASES, Trace, trace_step

EMBEDDING, FORWARD, HEAD, BACKWARD, EMBEDDING_BACKWARD = PHASES


@dataclass(frozen=True)
class Estimate:
    """The rank of a job that needs most.

    Attributes:
        settings: the settings of the job.
        peak: the memory at the peak.
        phase: the phase of the step that has the peak.
        host: bytes of optimizer state in the host's memory.
        sent: bytes that the rank sends in a step, by parallelism: "data", "tensor" or "pipe".
        bubble: the share of the pipeline's time that ranks wait.
        compute: seconds of computation.
        seconds: the duration of a step.
        tokens_per_second: tokens per second of all devices together.
        mfu: model FLOPs utilization: floating-point operations without recomputation, as a share of the peak of the
            devices.
    """

    settings: Settings
    peak: Memory
    phase: str
    host: float
    sent: dict[str, float]
    bubble: float
    compute: float
    seconds: float
    tokens_per_second: float
    mfu: float

    def fits(self, job: Job) -> bool:
        return self.peak.total <= job.device_memory


def estimate(model: PlannedModel, job: Job, settings: Settings) -> Estimate:
    """Estimate what a rank needs.

    Raises:
        ValueError: the sizes do not divide the ranks, layers, heads or the batch, or the sequence is too long.
    """
    if model.positions is not None and job.sequence > model.positions:
        raise ValueError(f"{job.sequence} tokens are more than the {model.positions} positions of {model.name}")
    of_layout = _pipelined if settings.pipe > 1 else _single_stage
    peaks, sent, compute, bubble, shards = of_layout(model, job, settings)
    device_state, host_state = settings.state_bytes(job)
    phase = max(peaks, key=lambda name: peaks[name].total)
    peak = replace(peaks[phase], state=shards * device_state)
    seconds = _step_seconds(job, settings, sent, compute, shards)
    tokens = job.world_size * job.batch * job.sequence
    limit = job.device.peak if job.is_half else job.device.fp32_peak
    # Forward and the gradients of activations use all parameters but idle experts; only trained ones have gradients.
    useful = (4 * model.parameters + 2 * model.trained - 6 * model.idle) * tokens
    return Estimate(
        settings,
        peak,
        phase,
        shards * host_state,
        sent,
        bubble,
        compute,
        seconds,
        tokens / seconds,
        useful / (seconds * job.world_size * limit),
    )


_Parts = tuple[dict[str, Memory], dict[str, float], float, float, float]
"""Peaks by phase, bytes sent, seconds of computation, bubble, and elements of this rank's shards."""


def _single_stage(model: PlannedModel, job: Job, settings: Settings) -> _Parts:
    trace = trace_step(model, job, settings, settings.micro_batch(job))
    compute = sum(trace.seconds.values()) * settings.micro_batches
    sent = {"data": trace.traffic["stage"] + trace.traffic["data"], "tensor": trace.traffic["tensor"]}
    return trace.peaks, sent, compute, 0.0, trace.shards


def _pipelined(model: PlannedModel, job: Job, settings: Settings) -> _Parts:
    """A stage has a part of the layers. The rest of the model runs data-parallel on all ranks.

    One trace is of the micro-batches that the stage computes. Another is of this rank's batch outside the pipeline.
    """
    if not model.uniform:
        raise ValueError("a pipeline is planned for models with one list of equal layers")
    if model.depth < settings.pipe:
        raise ValueError(f"{model.depth} layers are too few for {settings.pipe} stages of a pipeline")
    if settings.micro_batches % settings.pipe:
        raise ValueError(f"micro_batches={settings.micro_batches} is no multiple of the {settings.pipe} stages")
    layers = math.ceil(model.depth / settings.pipe)
    inside = trace_step(model, job, settings, settings.micro_batch(job), layers)
    outside = trace_step(model, job, replace(settings, micro_batches=1), job.batch * settings.tp, layers)
    forward, backward = inside.seconds[FORWARD], inside.seconds[BACKWARD]
    if settings.checkpoint:  # the trace's backward has the recomputation, a separate action here
        backward -= forward
    costs = [Fraction(max(seconds, 1e-9)).limit_denominator(10**9) for seconds in (forward, backward)]
    inputs, bubble = _simulated(settings.pipe, settings.micro_batches, *costs)
    # A layer's gradients are reduced while the next micro-batch is computed.
    in_flight = model.layer_trained * job.dtype.itemsize / settings.tp
    peaks = _pipeline_peaks(inside, outside, settings, inputs, in_flight)
    boundary = inside.ends[EMBEDDING].activations
    gathers = settings.micro_batches if settings.zero == 3 else 1
    sent = {
        "data": inside.traffic["stage"] * gathers + inside.traffic["data"],
        "tensor": inside.traffic["tensor"] * settings.micro_batches,
        "pipe": 2 * settings.micro_batches * boundary,
    }
    in_pipe = (2 * forward + backward) * settings.micro_batches / (1 - bubble)
    around = sum(outside.seconds[name] for name in (EMBEDDING, HEAD, EMBEDDING_BACKWARD))
    return peaks, sent, in_pipe + around, bubble, inside.shards


@functools.cache
def _simulated(stages: int, micro_batches: int, forward: Fraction, backward: Fraction) -> tuple[int, float]:
    """How many inputs of micro-batches a rank keeps for recomputation, at most, and the bubble: a share of the time.

    The costs are the times of a micro-batch in all layers of a rank.
    """
    plan = make_schedule("recompute", stages, micro_batches)
    timeline = simulate(plan, {Kind.FORWARD: forward, Kind.RECOMPUTE: forward, Kind.BACKWARD: backward})
    return max(timeline.inputs), max(idle_share(timeline))


def _pipeline_peaks(
    inside: Trace, outside: Trace, settings: Settings, inputs: int, in_flight: float
) -> dict[str, Memory]:
    """The peaks of the phases on the rank that keeps most.

    Args:
        inputs: the number of micro-batches whose input is kept.
        in_flight: bytes that are being reduced.
    """
    embedding = outside.ends[EMBEDDING].activations
    boundary = inside.ends[EMBEDDING].activations
    layers = inside.ends[FORWARD].activations - inside.ends[EMBEDDING].activations
    temporary = {
        name: inside.peaks[name].activations - inside.ends[end].activations
        for name, end in ((FORWARD, EMBEDDING), (BACKWARD, HEAD))
    }
    kept = embedding + inputs * boundary
    share = settings.micro_batches // settings.pipe  # micro-batches whose output this rank has
    in_head = kept + share * boundary + outside.peaks[HEAD].activations - outside.ends[FORWARD].activations
    in_forward = kept + max(0.0, temporary[FORWARD] - layers) + share * boundary
    # The gradients of the outputs, and of the inputs, are exchanged once for all micro-batches.
    in_backward = kept + 3 * share * boundary + layers + max(temporary[BACKWARD], 0.0) + in_flight
    return {
        EMBEDDING: outside.peaks[EMBEDDING],
        FORWARD: replace(inside.peaks[FORWARD], activations=in_forward),
        HEAD: replace(inside.peaks[HEAD], activations=in_head),
        BACKWARD: replace(inside.peaks[BACKWARD], activations=in_backward),
        EMBEDDING_BACKWARD: outside.peaks[EMBEDDING_BACKWARD],
    }


def _step_seconds(job: Job, settings: Settings, sent: dict[str, float], compute: float, shards: float) -> float:
    """The duration of a step: computation, the communication that does not overlap with it, and the optimizer.

    Unsharding, gradient reduction, and messages between stages overlap with computation. Half of the tensor-parallel
    communication overlaps.
    """
    replicas = job.world_size // (settings.tp * settings.pipe)
    data = sent["data"] / job.link(replicas, settings.tp)
    pipe = sent.get("pipe", 0.0) / job.link(settings.pipe, job.world_size // settings.pipe)
    tensor = sent["tensor"] / job.link(settings.tp)
    device_state, host_state = settings.state_bytes(job)
    optimizer = 2 * shards * device_state / job.device.memory + 2 * shards * 4 * bool(host_state) / job.device.host_link
    return max(compute, data, pipe) + tensor / 2 + optimizer

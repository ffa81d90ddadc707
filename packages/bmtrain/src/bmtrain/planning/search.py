"""The search for settings that fit, and for the fastest of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .estimate import Estimate, estimate
from .models import PlannedModel
from .settings import Job, Settings


@dataclass(frozen=True)
class Choices:
    """The values that a search tries. None: the values that are likely to work.

    Attributes:
        zero: ZeRO levels.
        tp, pipe: numbers of tensor-parallel ranks, and of stages.
        micro_batches: numbers of micro-batches.
        checkpoint: whether activations are recomputed.
        optimizers: names in ``OPTIMIZERS``.
    """

    zero: Sequence[int] = (2, 3)
    tp: Sequence[int] | None = None
    pipe: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    checkpoint: Sequence[bool] = (False, True)
    optimizers: Sequence[str] = ("adam",)


def search(model: PlannedModel, job: Job, choices: Choices = Choices()) -> list[Estimate]:
    """Estimates of reasonable settings: first those that fit, the fastest first; then the others, the smallest first.

    Lower ZeRO levels need more memory than the highest of ``choices``, and are tried only where that one fits.

    Raises:
        ValueError: no settings are possible with the model and the ranks.
    """
    estimates: list[Estimate] = []
    *lower, highest = sorted(set(choices.zero))
    problem: object = "no product of tp and pipe divides the number of devices"
    layouts = list(dict.fromkeys(_layouts(model, job, choices, highest)))
    is_chosen = choices.tp is not None and choices.pipe is not None
    possible = [each for each in layouts if is_chosen or _least(model, job, each) <= job.device_memory]
    for settings in possible or layouts:
        try:
            best = _largest_micro_batch(model, job, settings, choices.micro_batches)
        except ValueError as error:
            problem = error
            continue
        estimates.append(best)
        for level in lower if best.fits(job) else ():
            if _least(model, job, dataclasses.replace(settings, zero=level)) <= job.device_memory:
                estimates.append(estimate(model, job, dataclasses.replace(best.settings, zero=level)))
    if not estimates:
        raise ValueError(f"no settings go together with {model.name} and {job.world_size} devices: {problem}")
    return sorted(estimates, key=lambda each: (not each.fits(job), each.seconds if each.fits(job) else each.peak.total))


def _largest_micro_batch(model: PlannedModel, job: Job, settings: Settings, counts: Sequence[int] | None) -> Estimate:
    """The estimate with the smallest number of micro-batches that fits, or with the largest number if none fits.

    Memory is linear in the size of a micro-batch, so two estimates predict which numbers fit.
    """
    candidates = _micro_batches(job, settings)
    if counts:
        given = sorted(set(counts))
        candidates = [n for n in given if not settings.sequences(job) % n and not n % settings.pipe] or given
    few = estimate(model, job, dataclasses.replace(settings, micro_batches=candidates[0]))
    if few.fits(job) or len(candidates) == 1:
        return few
    many = estimate(model, job, dataclasses.replace(settings, micro_batches=candidates[-1]))
    if not many.fits(job):
        return many
    sizes = [dataclasses.replace(settings, micro_batches=count).micro_batch(job) for count in candidates]
    slope = (few.peak.total - many.peak.total) / max(1, sizes[0] - sizes[-1])
    for count, size in zip(candidates[1:-1], sizes[1:-1], strict=True):
        if many.peak.total + slope * (size - sizes[-1]) <= job.device_memory:
            between = estimate(model, job, dataclasses.replace(settings, micro_batches=count))
            if between.fits(job):
                return between
    return many


def _layouts(model: PlannedModel, job: Job, choices: Choices, zero: int) -> Iterator[Settings]:
    """Settings with every layout, checkpointing and optimizer, one ZeRO level and one micro-batch."""
    widths = [n for n in (1, 2, 4, 8) if n <= job.node_size and (n == 1 or model.tp_plan)]
    depths = [n for n in (1, 2, 4) if n == 1 or (4 * n <= model.depth and model.uniform)]
    for tp in choices.tp or widths:
        for pipe in choices.pipe or depths:
            if job.world_size % (tp * pipe) or (pipe > 1 and choices.pipe is None and tp not in (1, widths[-1])):
                continue
            for checkpoint in choices.checkpoint:
                if pipe > 1 and not checkpoint and len(choices.checkpoint) > 1:
                    continue  # a pipeline recomputes in any case
                for optimizer in choices.optimizers:
                    yield Settings(zero, tp, pipe, 1, checkpoint, optimizer)


def _least(model: PlannedModel, job: Job, settings: Settings) -> float:
    """A lower bound of a rank's memory in bytes: parameters, gradients and optimizer state."""
    shared = settings.tp * settings.pipe
    everyone = max(shared, job.world_size)
    state = model.trained * settings.state_bytes(job)[0]
    parameters = model.parameters * job.dtype.itemsize / (everyone if settings.zero == 3 else shared)
    gradients = model.trained * job.dtype.itemsize / (everyone if settings.zero >= 2 else shared)
    return parameters + gradients + state / (shared if settings.zero == 0 else everyone)


def _micro_batches(job: Job, settings: Settings) -> list[int]:
    """Numbers of micro-batches, from few large ones to many small ones."""
    sequences, pipe = settings.sequences(job), settings.pipe
    if pipe > 1:
        return [n for n in (4 * pipe, 8 * pipe, 16 * pipe) if sequences % n == 0] or sorted({pipe, sequences})
    return [n for n in range(1, 65) if n < sequences and sequences % n == 0] + [sequences]

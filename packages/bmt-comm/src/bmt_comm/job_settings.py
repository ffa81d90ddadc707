"""The settings of a job: the arguments of ``init_distributed`` that are the same on all ranks, and their checks."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from .agreement import TIMEOUT

_SHORTEST, _LONGEST = 1e-3, 1e9  # seconds of a timeout; torch counts in milliseconds


@dataclass(frozen=True)
class JobSettings:
    """See :func:`bmt_comm.init_distributed`.

    Attributes:
        timeout: as a timedelta.
        agreement_timeout: seconds.
    """

    seed: int | None
    pipe_size: int
    num_micro_batches: int
    tp_size: int
    zero_level: int
    timeout: datetime.timedelta
    agreement_timeout: float
    deterministic: bool

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError unless so many processes can be laid out."""
        if world_size % (self.pipe_size * self.tp_size) != 0:
            raise ValueError(
                f"pipe_size={self.pipe_size} × tp_size={self.tp_size} = {self.pipe_size * self.tp_size} does not "
                f"divide the world size {world_size}; choose sizes whose product does"
            )
        if not self.deterministic:
            return
        if self.pipe_size > 1:
            raise ValueError(
                "deterministic=True: a pipeline adds up its micro-batches in its own order; use pipe_size=1"
            )
        replicas = world_size // self.tp_size
        if replicas & (replicas - 1) or self.tp_size & (self.tp_size - 1):
            raise ValueError(
                f"deterministic=True takes numbers of replicas and of tensor-parallel ranks that are powers of two, "
                f"and there are {replicas} and {self.tp_size}"
            )


def check_settings(
    seed: int | None,
    pipe_size: int,
    num_micro_batches: int | None,
    tp_size: int,
    zero_level: int,
    timeout: float | datetime.timedelta,
    agreement_timeout: float | datetime.timedelta | None,
    deterministic: bool,
) -> JobSettings:
    """The settings, from the arguments of ``init_distributed``.

    Raises:
        ValueError: an argument is out of range.
    """
    pipe_size = 1 if pipe_size == -1 else pipe_size
    num_micro_batches = pipe_size if num_micro_batches is None else num_micro_batches
    for name, value in (("pipe_size", pipe_size), ("tp_size", tp_size), ("num_micro_batches", num_micro_batches)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if zero_level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level={zero_level!r} is not a ZeRO level; choose 0, 1, 2 or 3")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be at least -2**63 and below 2**64")
    seconds = _seconds(timeout)
    if not _SHORTEST <= seconds <= _LONGEST:
        raise ValueError(f"timeout={seconds:g} must be at least {_SHORTEST:g} and at most {_LONGEST:g} seconds")
    agreement = min(seconds, TIMEOUT) if agreement_timeout is None else _seconds(agreement_timeout)
    if not 0 < agreement <= seconds:
        raise ValueError(
            f"agreement_timeout={agreement:g} must be more than 0 and not more than timeout={seconds:g}, both in "
            "seconds"
        )
    limit = datetime.timedelta(seconds=seconds)
    return JobSettings(seed, pipe_size, num_micro_batches, tp_size, zero_level, limit, agreement, deterministic)


def _seconds(time: float | datetime.timedelta) -> float:
    return time.total_seconds() if isinstance(time, datetime.timedelta) else time

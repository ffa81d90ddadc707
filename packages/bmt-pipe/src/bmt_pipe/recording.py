"""Measured timelines: when each rank ran its actions.

[Note: clocks]
    A rank measures times by its own clock, and ``Recorder.timeline`` aligns the clocks of ranks. Ranks on one machine
    share its clock: on CPU, their times are compared directly. Times of different machines are relative to the instant
    just after a barrier, which is the same on all machines up to the time of a message.

    On a GPU, an action begins and ends when the stream reaches these points. Recording does not synchronize: CUDA
    events are recorded, and read in ``timeline``. The first event is recorded while the stream is idle, and relates the
    clock of the GPU to that of the host.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from bmt_comm import Communicator

from .schedule import Action, Schedule
from .simulate import Timeline, timeline_of

_Instant: TypeAlias = "float | torch.cuda.Event"


class Recorder:
    """Records when this rank begins and ends its actions.

    Waiting, for a receive for example, belongs between two actions. Making a recorder is a collective call.

    Args:
        comm: the ranks of the pipeline, in the order of their stages. Its device is measured.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._cuda = comm.device.type == "cuda"
        self._actions: list[tuple[Action, _Instant, _Instant]] = []
        self.restart()

    def restart(self) -> None:
        """Drop what was recorded. Every rank must call this before each run of the schedule."""
        self._actions = []
        self.comm.barrier()
        if self._cuda:
            torch.cuda.synchronize(self.comm.device)
        self._origin = self._now()
        if isinstance(self._origin, float):
            self._zero = self._origin
        else:
            self._origin.synchronize()
            self._zero = time.perf_counter()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record what runs within as ``action``. On CUDA, it must run on the current stream, always the same one.

        An action that raises is not recorded.
        """
        start = self._now()
        yield
        self._actions.append((action, start, self._now()))

    def timeline(self, schedule: Schedule) -> Timeline:
        """What all ranks recorded in one run of ``schedule``, in seconds since the start of the earliest action.

        Every rank must call this with the same schedule, and gets the same result.

        Raises:
            ValueError: the number of ranks is not that of the schedule, or a rank did not run exactly its actions. It
                is raised on every rank.
        """
        mine = [(action, self._seconds(start), self._seconds(end)) for action, start, end in self._actions]
        reports = self.comm.all_gather_object((_machine(), self._zero, mine))
        if schedule.stages != self.comm.size:
            raise ValueError(f"a schedule of {schedule.stages} stages was not run by {self.comm.size} ranks")
        for rank, (_, _, records) in enumerate(reports):
            _check_order(rank, schedule.actions[rank], [action for action, _, _ in records])
        # For each machine, the time just after the barrier, by its clock: that of its last rank.
        zeros: dict[str, float] = {}
        for machine, zero, _ in reports:
            zeros[machine] = max(zero, zeros.get(machine, zero))
        begun = [[start + zero - zeros[machine] for _, start, _ in records] for machine, zero, records in reports]
        ended = [[end + zero - zeros[machine] for _, _, end in records] for machine, zero, records in reports]
        earliest = min((starts[0] for starts in begun if starts), default=0.0)
        return timeline_of(
            schedule,
            [[start - earliest for start in starts] for starts in begun],
            [[end - earliest for end in ends] for ends in ended],
        )

    def _now(self) -> _Instant:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.comm.device))
        return event

    def _seconds(self, instant: _Instant) -> float:
        """Seconds since this rank's recording began."""
        if isinstance(instant, float):
            return instant - self._zero
        assert isinstance(self._origin, torch.cuda.Event)
        instant.synchronize()
        return self._origin.elapsed_time(instant) / 1e3


def _machine() -> str:
    """An identifier of the machine: processes share a clock if and only if it is the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


def _check_order(rank: int, wanted: tuple[Action, ...], recorded: list[Action]) -> None:
    for index in range(max(len(wanted), len(recorded))):
        names = [repr(actions[index]) if index < len(actions) else "nothing" for actions in (recorded, wanted)]
        if names[0] != names[1]:
            raise ValueError(
                f"rank {rank} recorded {names[0]} as its action {index}, where the schedule has {names[1]}; "
                "call restart() before each run of a schedule, and timeline() after it with the same schedule"
            )

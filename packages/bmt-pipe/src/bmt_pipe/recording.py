"""When each rank did what: a schedule as it was measured.

[Note: clocks]
    A rank notes times of its own clock, and ``Recorder.timeline`` brings the ranks' clocks together. Ranks on one
    machine share its clock: on CPU their times are compared as they are. From one machine to another they are taken
    from the instant just after a barrier, which is the same one but for the time that a message takes.

    A GPU's times are those at which its stream came to an action's begin and end. Nobody waits for it while it works:
    CUDA events are recorded, and read in ``timeline``. A first one is recorded with the stream idle, which ties the
    GPU's clock to the host's.
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
    """Notes when this rank begins and ends its actions.

    What a rank waits for, such as a receive, belongs between two actions. Making a recorder is a collective call.

    Args:
        comm: the ranks of the pipeline, in the order of their stages. Its device is the one that is measured.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._cuda = comm.device.type == "cuda"
        self._actions: list[tuple[Action, _Instant, _Instant]] = []
        self.restart()

    def restart(self) -> None:
        """Forget what was recorded, and begin anew: before each run of the schedule. Every rank must call this."""
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
        """Around what the rank does for ``action``. On CUDA, on the stream that is current at begin and end."""
        start = self._now()
        yield
        self._actions.append((action, start, self._now()))

    def timeline(self, schedule: Schedule) -> Timeline:
        """What all ranks recorded in one run of ``schedule``, in seconds from the earliest action on.

        Every rank must call this, with the same schedule, and gets the same.

        Raises:
            ValueError: on every rank: the schedule has other ranks, or a rank did not do just what it says.
        """
        mine = [(action, self._seconds(start), self._seconds(end)) for action, start, end in self._actions]
        reports = self.comm.all_gather_object((_machine(), self._zero, mine))
        if schedule.stages != self.comm.size:
            raise ValueError(f"a schedule of {schedule.stages} stages was not run by {self.comm.size} ranks")
        for rank, (_, _, records) in enumerate(reports):
            _check_order(rank, schedule.actions[rank], [action for action, _, _ in records])
        # For each machine, the instant of its clock that counts as just after the barrier.
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
        """From when this rank's recording began."""
        if isinstance(instant, float):
            return instant - self._zero
        assert isinstance(self._origin, torch.cuda.Event)
        instant.synchronize()
        return self._origin.elapsed_time(instant) / 1e3


def _machine() -> str:
    """Something that processes have in common just where they share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


def _check_order(rank: int, wanted: tuple[Action, ...], found: list[Action]) -> None:
    for index in range(max(len(wanted), len(found))):
        names = [repr(actions[index]) if index < len(actions) else "nothing" for actions in (found, wanted)]
        if names[0] != names[1]:
            raise ValueError(
                f"rank {rank} recorded {names[0]} as its action {index}, where the schedule has {names[1]}; "
                "call restart() before each run of a schedule, and timeline() after it with the same schedule"
            )

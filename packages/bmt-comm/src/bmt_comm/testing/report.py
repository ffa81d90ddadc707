"""The outcome of one call on every rank, and a text that describes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Outcome(enum.Enum):
    """How a call ended on one rank."""

    RETURNED = "returned"
    RAISED = "raised an exception"
    DIED = "died"
    TIMED_OUT = "was still running at the timeout"
    STOPPED = "was still running when another rank had failed"


@dataclass
class RankReport:
    """The end of one call on one rank."""

    rank: int
    outcome: Outcome
    value: Any = None
    """What the function returned (``Outcome.RETURNED`` only)."""
    detail: str = ""
    """The traceback, the exit status, or the stacks of all threads, depending on the outcome."""
    error_type: str = ""
    """Qualified name of the exception's class (``Outcome.RAISED`` only)."""
    after: float = 0.0
    """Seconds from the start of the call to this outcome."""
    stdout: str = ""
    stderr: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome is not Outcome.RETURNED


def describe(reports: Sequence[RankReport]) -> str:
    """A text that names the failing ranks, first failure first, and says what the others were doing."""
    order = [Outcome.DIED, Outcome.RAISED, Outcome.TIMED_OUT, Outcome.STOPPED]
    failed = sorted((r for r in reports if r.failed), key=lambda r: (order.index(r.outcome) > 1, r.after))
    lines = []
    for report in failed:
        title = f" rank {report.rank} of {len(reports)} {report.outcome.value} ({report.after:.1f} s) "
        lines += [title.center(100, "-"), report.detail.rstrip(), ""]
    returned = [str(r.rank) for r in reports if not r.failed]
    if returned:
        lines.append(f"returned normally: rank {', '.join(returned)}")
    return "\n".join(lines).rstrip()


class RankError(RuntimeError):
    """A call failed on at least one rank. ``reports`` holds the end of every rank, by rank."""

    def __init__(self, reports: Sequence[RankReport]) -> None:
        self.reports = list(reports)
        super().__init__("\n" + describe(reports))

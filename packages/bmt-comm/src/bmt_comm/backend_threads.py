"""The threads of the gloo backend, at the end of the interpreter.

[Note: exit]
    A gloo thread first marks a collective as done, and then drops its tensors, for which it needs the interpreter's
    lock. If the last collective of a process comes right before its end, the interpreter may be finalizing by then.
    CPython ends a thread that asks for the lock so late. That happens in the middle of a C++ destructor, which aborts
    the process ("terminate called without an active exception"). So the threads must be idle before.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"  # of those that hold tensors
_PAUSE = 1e-3
_LONGEST = 1.0  # seconds; a thread that is stuck in a collective sleeps, and is not waited for
_BLIND = 0.05  # seconds to wait if the states of threads cannot be read


def let_backend_threads_rest() -> None:
    """Wait, without the interpreter's lock, until all gloo threads sleep."""
    if not _THREADS.is_dir():
        time.sleep(_BLIND)
        return
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)  # a thread that waits for the lock looks asleep, and gets it here
        if all(_sleeps(stat) for stat in _stats() if f"({_NAME})" in stat):
            return


def _stats() -> list[str]:
    """The stat file of each thread: number (name) state ..."""
    stats = []
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            stats.append((thread / "stat").read_text())
    return stats


def _sleeps(stat: str) -> bool:
    return stat.rpartition(")")[2].split()[0] == "S"

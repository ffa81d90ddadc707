"""The threads of the gloo backend, at the end of the interpreter.

[Note: exit]
    A gloo thread tells that a collective is done, and after that drops the collective's tensors, for which it needs
    the interpreter's lock. A process whose last collective comes right before its end may be finalizing by then:
    CPython ends a thread that asks for the lock so late, in the middle of a C++ destructor, which aborts the
    process ("terminate called without an active exception"). So the threads must have come to rest before.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"  # of those that hold tensors
_PAUSE = 1e-3
_LONGEST = 1.0  # seconds; what is stuck in a collective sleeps, and is not waited for
_BLIND = 0.05  # seconds, where threads cannot be looked at


def let_backend_threads_rest() -> None:
    """Wait, without the interpreter's lock, until no gloo thread has anything to do but to wait for others."""
    if not _THREADS.is_dir():
        time.sleep(_BLIND)
        return
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)  # a thread that waits for the lock looks asleep, and gets it here
        if all(_sleeps(stat) for stat in _stats() if f"({_NAME})" in stat):
            return


def _stats() -> list[str]:
    """What the system tells of each thread: number (name) state ..."""
    found = []
    for thread in _THREADS.iterdir():
        try:
            found.append((thread / "stat").read_text())
        except OSError:  # it has ended
            continue
    return found


def _sleeps(stat: str) -> bool:
    return stat.rpartition(")")[2].split()[0] == "S"

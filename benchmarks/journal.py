"""What it costs to note an operation, and a wait for it, for messages about failures (docs/faults.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from bmt_comm.journal import Journal, begin_wait, waits
from bmt_comm.operation import describe

_RUNS, _CALLS = 20, 5000


def microseconds(function: Callable[[], object]) -> float:
    """Of one call, in the best of several runs."""
    best = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            function()
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return 1e6 * best


def main() -> None:
    journal, tensor = Journal("world", (0, 1)), torch.ones(3, 4)
    dtype, shape = tensor.dtype, tensor.shape
    operation = journal.begin(*describe("all_gather", "", dtype, shape, "layer 1 (a Block)"))

    def wait() -> None:
        begin_wait(journal, operation, (0, 1))
        waits.pop(threading.get_ident(), None)

    name, tag = describe("all_gather", "", dtype, shape, "layer 1 (a Block)")
    nothing = microseconds(lambda: None)
    for what, function in (
        ("to find an operation's name", lambda: describe("all_gather", "", dtype, shape, "layer 1 (a Block)")),
        ("to note the operation", lambda: journal.begin(name, tag)),
        ("to note that it is waited for", wait),
    ):
        print(f"{what:30} {microseconds(function) - nothing:6.2f} µs")


if __name__ == "__main__":
    main()

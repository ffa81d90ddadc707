"""Signals that ask a run to save and leave, at a step on which all ranks agree."""

from __future__ import annotations

import signal

import torch

import bmtrain as bmt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what torchrun and schedulers send to end a job; what schedulers send some time before."""

_early: list[int] = []


def note_signals() -> None:
    """Let SIGTERM and SIGUSR1 not end this process. Those that come before training end its first step."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: _early.append(number))


class Interruption:
    """Notes signals while it is active. All ranks leave at the same step: otherwise some would wait for others.

    Each call of :meth:`agreed` starts to ask all ranks whether they got a signal, and returns the answer to the call
    before. So the host does not wait for the GPU.
    """

    def __init__(self) -> None:
        self._asked = False
        self._sum: torch.Tensor | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._asked = bool(_early)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, *_: object) -> None:
        self._asked = True

    def agreed(self) -> bool:
        """Whether to stop now. All ranks must call this, and get the same."""
        before = self._sum
        self._sum = bmt.sum_loss(torch.tensor(float(self._asked), device=bmt.config["device"]))
        return before is not None and before.item() > 0

"""The most memory that a process takes for a while."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch

_SMAPS = Path("/proc/self/smaps_rollup")
_PSS = re.compile(rb"^Pss: +(\d+) kB", re.M)


def memory_taken(device: torch.device) -> int:
    """Bytes of this process: on a GPU those that tensors have there, otherwise the proportional set size.

    In the proportional set size a page that n processes share counts as 1/n of a page. So the sum over the ranks is the
    memory that they take from the host; resident set sizes count a shared page on every rank.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    match = _PSS.search(_SMAPS.read_bytes())
    assert match is not None
    return int(match[1]) * 1024


class MemoryPeak:
    """A context manager: ``bytes`` is the most that :func:`memory_taken` was inside.

    A thread samples the host's memory every 10 ms. It slows the process down a little: don't measure times inside.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> MemoryPeak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._sample)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self._ended.set()
            self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_taken(self.device))
            if self._ended.wait(0.01):
                return

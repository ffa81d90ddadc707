"""How much host memory a block of code takes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType


class MemoryGrowth:
    """The most host memory that a process holds while a block of code runs, beyond what it held before.

    Anonymous and shared memory count. Pages of mapped files do not: the kernel drops and reads those of libraries as
    it likes, so the process's resident size as a whole can grow by hundreds of MiB that the code has not asked for.
    Memory is read every half millisecond by a thread; what lives for less can be missed. Linux only.

    Example:
        >>> with MemoryGrowth() as memory:
        ...     load(model, path)
        >>> assert memory.peak < 64 << 20
    """

    peak: int
    "Bytes."

    def __enter__(self) -> MemoryGrowth:
        self._before, self.peak = held(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, held() - self._before)


def held() -> int:
    """Bytes of anonymous and shared memory of this process that are resident."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024

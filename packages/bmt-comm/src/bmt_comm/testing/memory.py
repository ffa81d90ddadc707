"""How much host memory a block of code takes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType


class MemoryGrowth:
    """The most host memory that a process holds while a block of code runs, beyond what it held before.

    What the process has mapped of files at the end, and had not before, does not count: the kernel drops and reads the
    pages of libraries as it likes, so the resident size can grow by hundreds of MiB that the code has not asked for.
    Linux only.

    Example:
        >>> with MemoryGrowth() as memory:
        ...     load(model, path)
        >>> assert memory.peak < 64 << 20
    """

    peak: int
    "Bytes."

    def __enter__(self) -> MemoryGrowth:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured anew
        self._before = _sizes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = _sizes()
        of_files = max(0, after["RssFile"] - self._before["RssFile"])
        self.peak = after["VmHWM"] - self._before["VmRSS"] - of_files


def held() -> int:
    """Bytes of anonymous and shared memory of this process that are resident."""
    sizes = _sizes()
    return sizes["RssAnon"] + sizes["RssShmem"]


def _sizes() -> dict[str, int]:
    """Bytes, by the names that Linux has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name.startswith(("Vm", "Rss"))
    }

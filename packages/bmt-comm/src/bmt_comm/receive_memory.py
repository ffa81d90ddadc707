"""Receive buffers that later operations reuse.

The system provides new memory page by page. For many megabytes that takes about as long as receiving them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_MOST = 1 << 26  # bytes that are kept
_LEAST = 1 << 17  # bytes; the allocator keeps smaller blocks itself


class ReceiveMemory:
    """A cache of receive buffers.

    Args:
        most: bytes that are kept; of the buffers that were given back, the latest ones.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._spare: list[torch.UntypedStorage] = []  # the latest last
        self._lock = threading.Lock()

    def take(self, rows: int, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of shape (rows, numel)."""
        size = rows * numel * dtype.itemsize
        with torch.inference_mode(False):  # it may be written outside of inference mode later
            if size < _LEAST:
                return torch.empty(rows, numel, dtype=dtype, device="cpu")
            with self._lock:
                fitting = [n for n, spare in enumerate(self._spare) if size <= spare.nbytes() <= 2 * size]
                memory = self._spare.pop(fitting[-1]) if fitting else torch.UntypedStorage(size)
            tensor: Any = torch.empty(0, dtype=dtype, device="cpu")
            return tensor.set_(memory, 0, (rows, numel))

    def give_back(self, tensor: Tensor) -> None:
        """Return a tensor of :meth:`take`, which is neither written nor read any more."""
        memory = tensor.untyped_storage()
        if memory.nbytes() < _LEAST:
            return
        with self._lock:
            self._spare.append(memory)
            while sum(spare.nbytes() for spare in self._spare) > self._most:
                self._spare.pop(0)


of_process = ReceiveMemory()
"""Shared by all process groups, so that the memory that is kept does not grow with their number."""

"""Host memory as bytes, and copies of tensors in host memory, from which checkpoints are written."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from bmt_comm import page_locked

_ALIGNMENT = 64


def view_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU. The tensor must outlive the view."""
    assert tensor.is_contiguous()
    assert tensor.dtype is torch.uint8
    assert tensor.device.type == "cpu"
    if not tensor.numel():
        return memoryview(b"")
    if not tensor.data_ptr():
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own, so its bytes cannot be written")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


class Snapshot:
    """Copies of tensors in host memory, which the next copies reuse.

    The memory is page-locked if a tensor is on a CUDA device. Otherwise it is in huge pages if the system has them. It
    grows to the largest set of tensors so far.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of contiguous tensors, as bytes: uint8, 1-D. They are valid until the next call.

        The host waits for D2H copies.
        """
        _, size = places_of(tensor.nbytes for tensor in tensors)
        return copy_into(self.room(size, any(tensor.is_cuda for tensor in tensors)), tensors)

    def room(self, size: int, is_locked: bool) -> Tensor:
        """Memory of ``size`` bytes or more."""
        if self._memory.numel() < size or (is_locked and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # release before the larger allocation
            self._memory = page_locked(size, torch.uint8) if is_locked else _huge_pages(size)
        return self._memory


def places_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The first byte of each of several consecutive, aligned copies of these sizes, and the end of the last one."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, end


@torch.no_grad()
def copy_into(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors in ``memory`` (uint8, 1-D), as bytes. The host waits for D2H copies."""
    starts, _ = places_of(tensor.nbytes for tensor in tensors)
    copies = [memory[start : start + tensor.nbytes] for tensor, start in zip(tensors, starts)]
    for tensor, copied in zip(tensors, copies):
        if copied.numel():  # in the tensor's dtype: copying bytes on the CPU takes longer
            copied.view(tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _huge_pages(size: int) -> Tensor:
    """Memory in huge pages, if the system has them: writing to it needs fewer address translations."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

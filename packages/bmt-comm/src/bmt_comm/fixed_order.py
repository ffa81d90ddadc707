"""Sums whose order does not depend on the number of ranks, and torch's settings for runs with the same bits.

[Note: the same bits]
    ``init_distributed(deterministic=True)``: the same seed, data and micro-batches give the same bits on 1, 2, 4, ...
    data-parallel ranks. A step consists of a fixed number of micro-batches, of a fixed size. They are distributed
    round-robin: of R replicas, replica r computes micro-batches r, r + R, r + 2R, ...

    The sum over micro-batches is a binary tree over their numbers: pairs of neighbours, pairs of pairs, and so on. R is
    a power of two, so the micro-batches that all replicas compute at a time are one subtree. :func:`tree_sum` adds up
    this subtree over the ranks. :class:`TreeSum` adds up the rest of the tree over time. It holds at most as many
    partial sums as the number of micro-batches of a replica has binary digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TREE_SUM = "tree_sum"
"""The reduction of ``Communicator.reduce_scatter`` and ``all_reduce`` that is :func:`tree_sum` over the ranks."""


def tree_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of ``parts``, in the order of a binary tree; see [Note: the same bits].

    Consecutive sums give the same bits: ``tree_sum(x[:8]) == tree_sum([tree_sum(x[:4]), tree_sum(x[4:8])])``.

    Args:
        parts: tensors of one shape and dtype, one at least. They are only read.
        out: where the sum is written; it may be one of ``parts``. The sum of one part is that part itself.
    """
    if len(parts) == 1:
        return parts[0]
    left = 1 << ((len(parts) - 1).bit_length() - 1)  # the largest power of two below the number of parts
    return torch.add(tree_sum(parts[:left]), tree_sum(parts[left:]), out=out)


class TreeSum:
    """The :func:`tree_sum` of tensors that are added one after the other."""

    def __init__(self) -> None:
        self._partial: list[Tensor | None] = []  # entry k: the sum of 2ᵏ tensors, which are later than those of k + 1

    def add(self, value: Tensor) -> None:
        """Add a tensor. The sum may overwrite it from now on."""
        for k, earlier in enumerate(self._partial):
            if earlier is None:
                self._partial[k] = value
                return
            value, self._partial[k] = earlier.add_(value), None
        self._partial.append(value)

    @property
    def partials(self) -> list[Tensor]:
        """The partial sums, which :meth:`total` adds up."""
        return [partial for partial in self._partial if partial is not None]

    def total(self) -> Tensor:
        """The sum; no more can be added."""
        total, *earlier = self.partials
        for partial in earlier:
            total = partial.add_(total)
        self._partial = []
        return total


def use_deterministic_kernels(is_cuda: bool) -> Callable[[], None]:
    """Let torch choose kernels that give the same bits each time; returns a function that restores the settings."""
    kernels, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, tries = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    if is_cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # filling costs time and only helps debugging
    torch.backends.cudnn.benchmark = False

    def restore() -> None:
        torch.use_deterministic_algorithms(kernels, warn_only=warns)
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tries

    return restore

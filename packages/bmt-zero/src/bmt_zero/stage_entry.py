"""Entries of one pipeline stage's parameters in a state dict of all stages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from bmt_comm import Communicator


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts ``layers.2`` before ``layers.10``. Not empty. Different names have different keys."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((1, int(part), part) if number % 2 else (0, 0, part) for number, part in enumerate(parts))


@dataclass(frozen=True, eq=False)
class StageEntry:
    """An entry of a state dict whose value one rank of ``comm`` has. Every rank has such an entry.

    Attributes:
        value: on the rank that has it; None elsewhere.
        shape: of the logical tensor; None if the value is no tensor.
        dtype: of the tensor.
        comm: over the stages (or, for a file that rank 0 reads, over all ranks).
        owner: the rank in ``comm`` that has the value.
    """

    value: Any
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    comm: Communicator
    owner: int

    @property
    def is_here(self) -> bool:
        """Whether this rank has the value."""
        return self.comm.rank == self.owner

    def spread(self, value: Any) -> Any:
        """The owner's ``value`` (the logical tensor, or another object) on every rank. All ranks must call it."""
        if self.shape is None:
            return self.comm.broadcast_object(value, self.owner)
        assert self.dtype is not None
        if self.is_here:
            tensor = value.detach().to(self.comm.device).contiguous()
        else:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.comm.device)
        self.comm.broadcast(tensor, self.owner)
        return tensor

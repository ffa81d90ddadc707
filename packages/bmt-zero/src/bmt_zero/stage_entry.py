"""What one pipeline stage alone has: how its parameters say so, and its entries in a state dict of all stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator

STAGE_LOCAL_ATTRIBUTE = "bmt_stage_local"
"""A parameter with this attribute set is shared by the ranks of its pipeline stage alone."""


def is_stage_local(tensor: Tensor) -> bool:
    """Whether only this pipeline stage has a parameter."""
    return bool(getattr(tensor, STAGE_LOCAL_ATTRIBUTE, False))


@dataclass(frozen=True, eq=False)
class StageEntry:
    """An entry of a state dict whose value one pipeline stage has. Every rank of every stage has such an entry.

    Attributes:
        value: on the stage that has it; None elsewhere.
        shape: of the whole tensor; None for what is no tensor.
        dtype: of the tensor.
        comm: over the stages.
        owner: the rank in ``comm`` that has the value.
    """

    value: Any
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    comm: Communicator
    owner: int

    @property
    def is_here(self) -> bool:
        """Whether this rank's stage has the value."""
        return self.comm.rank == self.owner

    def spread(self, whole: Any) -> Any:
        """The owner's ``whole`` (a whole tensor, or what is no tensor) on every stage. All ranks must call it."""
        if self.shape is None:
            return self.comm.broadcast_object(whole, self.owner)
        assert self.dtype is not None
        if self.is_here:
            tensor = whole.detach().to(self.comm.device).contiguous()
        else:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.comm.device)
        self.comm.broadcast(tensor, self.owner)
        return tensor

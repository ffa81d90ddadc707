"""Vectors for tokens or positions, and scores of tokens from vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt


class Embedding(bmt.DistributedModule):
    """A table of ``count`` vectors."""

    def __init__(self, count: int, hidden_size: int, init_std: float = 0.02, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(count, hidden_size, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of ``ids``: (...) to (..., H)."""
        return F.embedding(ids, self.weight)

    def scores(self, x: Tensor) -> Tensor:
        """The dot product of each vector of ``x`` with each of the table: (..., H) to (..., count)."""
        return F.linear(x, self.weight)

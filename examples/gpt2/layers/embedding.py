"""Vectors for tokens and for positions, and scores of tokens from vectors."""

import torch
from torch import Tensor

import bmtrain as bmt


class TokenEmbedding(bmt.nn.VPEmbedding):
    """A table of ``count`` vectors, of which every tensor-parallel rank has a range.

    Its vectors come out as a part of the sequence; ``projection=True`` scores such vectors against its range.
    """

    def __init__(self, count: int, hidden_size: int, dtype: torch.dtype | None = None):
        with torch.device("meta"):
            super().__init__(count, hidden_size, dtype or torch.get_default_dtype(), 0.0, 0.02, sequence_parallel=True)


class PositionEmbedding(bmt.DistributedModule):
    """A vector for each of ``count`` positions."""

    def __init__(self, count: int, hidden_size: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(count, hidden_size, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.01),
        )
        bmt.nn.sequence_parallel(self)

    def forward(self, length: int) -> Tensor:
        """The vectors of this rank's part of ``length`` positions: (length / ranks, H)."""
        count = length // bmt.config["tp_size"]
        start = count * bmt.config["tp_rank"]
        return self.weight[start : start + count]

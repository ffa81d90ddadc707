"""The feed-forward half of a transformer layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt

from .linear import Linear


class FeedForward(bmt.DistributedModule):
    """H to 4H, GELU, and back to H; each position by itself."""

    def __init__(self, hidden_size: int, dropout: float = 0.0, out_std: float = 0.02, dtype: torch.dtype | None = None):
        super().__init__()
        self.up = Linear(hidden_size, 4 * hidden_size, dtype=dtype)
        self.down = Linear(4 * hidden_size, hidden_size, init_std=out_std, dtype=dtype)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))
        return F.dropout(x, self.dropout, self.training)

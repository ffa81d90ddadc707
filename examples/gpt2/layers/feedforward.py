"""The feed-forward half of a transformer layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt

from .dropout import dropout
from .linear import ColumnLinear, RowLinear, SequenceLinear, float8_linear


class FeedForward(bmt.DistributedModule):
    """H to 4H, GELU, and back to H; each position by itself.

    Tensor-parallel ranks share out the 4H, or with ``context_parallel`` or ``float8`` the positions.
    """

    def __init__(
        self,
        hidden_size: int,
        dropout: float = 0.0,
        out_std: float = 0.02,
        dtype: torch.dtype | None = None,
        context_parallel: bool = False,
        float8: bool = False,
    ):
        super().__init__()
        if context_parallel or float8:
            linear = float8_linear if float8 else SequenceLinear
            self.up = linear(hidden_size, 4 * hidden_size, dtype=dtype)
            self.down = linear(4 * hidden_size, hidden_size, out_std, dtype)
        else:
            self.up = ColumnLinear(hidden_size, 4 * hidden_size, dtype)
            self.down = RowLinear(4 * hidden_size, hidden_size, out_std, dtype)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))
        return dropout(x, self.dropout, self.training)

"""The attention half of a transformer layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt

from .linear import Linear


class Attention(bmt.DistributedModule):
    """Causal self-attention with several heads: each position looks at itself and those before it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        out_std: float = 0.02,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = Linear(hidden_size, 3 * hidden_size, dtype=dtype)
        self.out = Linear(hidden_size, hidden_size, init_std=out_std, dtype=dtype)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, S, H / heads)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = self.out(x.transpose(1, 2).reshape(batch, length, hidden))
        return F.dropout(x, self.dropout, self.training)

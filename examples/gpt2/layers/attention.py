"""The attention half of a transformer layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt

from .dropout import dropout
from .linear import ColumnLinear, RowLinear, SequenceLinear, float8_linear


class Attention(bmt.DistributedModule):
    """Causal self-attention with several heads: each position looks at itself and those before it.

    Tensor-parallel ranks share out the heads. With ``context_parallel`` they have whole weights, and a part of the
    sequence each but for the attention itself.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        out_std: float = 0.02,
        dtype: torch.dtype | None = None,
        context_parallel: bool = False,
        float8: bool = False,
    ):
        super().__init__()
        self.head_size = hidden_size // num_heads
        if context_parallel or float8:
            linear = float8_linear if float8 else SequenceLinear
            self.query_key_value = linear(hidden_size, 3 * hidden_size, dtype=dtype)
            self.out = linear(hidden_size, hidden_size, out_std, dtype)
        else:
            self.query_key_value = ColumnLinear(hidden_size, 3 * hidden_size, dtype, parts=3)
            self.out = RowLinear(hidden_size, hidden_size, out_std, dtype)
        self.attend = bmt.nn.ulysses_attention if context_parallel else F.scaled_dot_product_attention
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x)  # (B, S, 3 · my heads · head size); in context parallelism, my S and all heads
        query, key, value = heads.unflatten(2, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        probability = self.dropout if self.training else 0.0
        with bmt.nn.per_rank_random():
            x = self.attend(query, key, value, dropout_p=probability, is_causal=True)
        x = self.out(x.transpose(1, 2).flatten(2))
        return dropout(x, self.dropout, self.training)

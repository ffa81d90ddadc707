"""The feed-forward half of a transformer layer as a mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt

from .dropout import dropout
from .linear import SequenceLinear


class ExpertFeedForward(bmt.DistributedModule):
    """Feed-forwards of which each position has the two that a router gives the highest scores, weighted by these.

    Tensor-parallel ranks share out the experts, and send each other the positions (arXiv 2101.03961 and 2401.04088).

    Args:
        num_experts: a multiple of the number of tensor-parallel ranks.
    """

    CHOSEN = 2

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        dropout: float = 0.0,
        out_std: float = 0.02,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_experts, self.dropout = num_experts, dropout
        held, inner = num_experts // bmt.config["tp_size"], 4 * hidden_size
        self.router = SequenceLinear(hidden_size, num_experts, dtype=dtype)
        self.up = self.packed((held, inner, hidden_size), 0.02, dtype)
        self.down = self.packed((held, hidden_size, inner), out_std, dtype)

    @staticmethod
    def packed(shape: tuple[int, int, int], std: float, dtype: torch.dtype | None) -> torch.nn.Parameter:
        """A weight of this tensor-parallel rank's experts."""
        initializer = bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=std)
        weight = torch.empty(shape, dtype=dtype, device="meta")
        return bmt.DistributedParameter(weight, init_method=initializer, tp_mode=True, tp_split_dim=0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).float().softmax(-1).topk(self.CHOSEN)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = bmt.nn.expert_parallel(self.compute, tokens, experts, weights, self.num_experts, split_tokens=True)
        return dropout(y.view_as(x), self.dropout, self.training)

    def compute(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens (P, H) by this rank's ``experts`` (P, k), weighted by ``weights`` (P, k) and summed over k."""
        total = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind())):
            rows, places = torch.where(experts == expert)
            y = F.linear(F.gelu(F.linear(tokens[rows], up), approximate="tanh"), down)
            total = total.index_add(0, rows, y * weights[rows, places, None])
        return total

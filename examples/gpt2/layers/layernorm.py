"""Layer normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt


class LayerNorm(bmt.DistributedModule):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift it (arXiv 1607.06450).

    Every tensor-parallel rank does so with its part of the sequence.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = bmt.DistributedParameter(
            torch.empty(hidden_size, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.ones_),
        )
        self.bias = bmt.DistributedParameter(
            torch.empty(hidden_size, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
        )
        bmt.nn.sequence_parallel(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

"""A linear map."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt


class Linear(bmt.DistributedModule):
    """x Wᵀ + b, for x of shape (..., in_features).

    The weight is built on the meta device: ``bmt.init_parameters`` or ``bmt.load`` fills it, and no rank ever
    holds more of it than its share.
    """

    def __init__(self, in_features: int, out_features: int, init_std: float = 0.02, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )
        self.bias = bmt.DistributedParameter(
            torch.empty(out_features, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

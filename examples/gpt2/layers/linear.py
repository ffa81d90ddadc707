"""Linear maps, which tensor-parallel ranks share out: one by its outputs, the next by its inputs."""

from typing import Any

import torch

import bmtrain as bmt


class ColumnLinear(bmt.nn.ColumnParallelLinear):
    """x Wᵀ + b for a part of the sequence x, (B, S / ranks, in); each rank computes its part of the outputs.

    The weight is built on the meta device: ``bmt.init_parameters`` or ``bmt.load`` fills it, one parameter at a
    time, and a rank keeps its share.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype | None = None, parts: int = 1):
        with torch.device("meta"):
            super().__init__(in_features, out_features, dtype=dtype, parts=parts)
        initialize_as_gpt2(self, 0.02)


class RowLinear(bmt.nn.RowParallelLinear):
    """x Wᵀ + b for this rank's part of the inputs x, (B, S, in / ranks); a part of the sequence comes out."""

    def __init__(self, in_features: int, out_features: int, init_std: float = 0.02, dtype: torch.dtype | None = None):
        with torch.device("meta"):
            super().__init__(in_features, out_features, dtype=dtype)
        initialize_as_gpt2(self, init_std)


class SequenceLinear(bmt.nn.Linear):
    """x Wᵀ + b for a part of the sequence x, (B, S / ranks, in), with the whole weight."""

    def __init__(self, in_features: int, out_features: int, init_std: float = 0.02, dtype: torch.dtype | None = None):
        with torch.device("meta"):
            super().__init__(in_features, out_features, dtype=dtype)
        initialize_as_gpt2(self, init_std)
        bmt.nn.sequence_parallel(self)


def float8_linear(
    in_features: int, out_features: int, init_std: float = 0.02, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """A :class:`SequenceLinear` that multiplies, and whose weight travels between ranks, in float8 (torchao)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    with torch.device("meta"):
        layer = torch.nn.Linear(in_features, out_features, dtype=dtype)
    layer = convert_to_float8_training(layer, config=config)
    initialize_as_gpt2(layer, init_std)
    return bmt.nn.sequence_parallel(layer)


def initialize_as_gpt2(layer: torch.nn.Module, std: float) -> None:
    """Let ``bmt.init_parameters`` draw weights from a normal distribution, and begin with biases of 0."""
    initializers = {"weight": bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=std)}
    initializers["bias"] = bmt.ParameterInitializer(torch.nn.init.zeros_)
    param: Any
    for name, param in layer.named_parameters():
        param.init_method = initializers[name]

"""Weights of float8 linear layers, which are gathered in float8.

[Note: float8 weights]
    Linear layers of ``torchao.float8`` that were made with ``enable_fsdp_float8_all_gather=True`` have weights of a
    special class. Its method ``fsdp_post_all_gather`` turns float8 numbers and a scale into the tensor that the layer
    multiplies with. FSDP2 calls it, too. This module does not import torchao.

    The shards are plain numbers in the dtype of the weights, as of other parameters. To unshard them, the ranks compute
    the absmax of each weight (one all-reduce for all weights of a flat parameter). A number x becomes x × scale in
    float8, where scale is the largest number of float8 divided by the absmax. So the layer gets the numbers that it
    would compute from the unsharded weight, and an all-gather moves one byte for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Communicator

_LEAST = 1e-12  # torchao computes scales from absmax values of at least this
_ATTRIBUTE = "bmt_float8_weight"


def float8_dtype(param: Tensor) -> torch.dtype | None:
    """The dtype in which a weight of a float8 linear layer is gathered; None for any other parameter."""
    weight = getattr(param, _ATTRIBUTE, param)
    return weight._dtype if hasattr(type(weight), "fsdp_post_all_gather") and hasattr(weight, "_dtype") else None


def make_plain(param: nn.Parameter) -> None:
    """Turn a weight of a float8 linear layer, the same object, into a plain parameter that remembers its class."""
    if type(param) is nn.Parameter or float8_dtype(param) is None or hasattr(param, _ATTRIBUTE):
        return
    weight: Any = param
    empty = type(weight)(weight._tensor.new_empty(0), weight._linear_mm_config, weight._dtype)
    plain = nn.Parameter(weight._tensor.detach(), param.requires_grad)
    vars(plain).update({name: value for name, value in vars(param).items() if name not in vars(empty)})
    torch.utils.swap_tensors(param, plain)
    setattr(param, _ATTRIBUTE, empty)


class Float8Weights:
    """The weights of a flat parameter in float8.

    Args:
        params: the weights.
        device: where the scales are.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._weights: list[Any] = [getattr(param, _ATTRIBUTE) for param in params]
        self.dtype: torch.dtype = self._weights[0]._dtype
        self._largest = torch.finfo(self.dtype).max
        # One tensor that is kept, because backward reads it, too.
        self._scales = torch.ones(len(params), dtype=torch.float32, device=device)

    def write(self, rows: Sequence[Tensor], values: Sequence[Tensor], comm: Communicator, label: str) -> None:
        """Write this rank's rows of each weight, ``values``, into ``rows`` in float8; all ranks of ``comm`` call it."""
        absmax = torch.stack([_absmax(value) for value in values])
        comm.all_reduce(absmax, "max", label=label)
        self._scales.copy_(self._largest / absmax.double().clamp(min=_LEAST))
        for row, value, scale in zip(rows, values, self._scales.unbind(), strict=True):
            row.copy_((value.float() * scale).clamp_(-self._largest, self._largest))

    def tensors(self, views: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The tensors that the layers multiply with: unsharded float8 numbers with scales, in place of ``dtype``."""
        scales = self._scales.data.unbind()
        return [
            weight.fsdp_post_all_gather((view,), (scale,), dtype)[0]
            for weight, view, scale in zip(self._weights, views, scales, strict=True)
        ]


def _absmax(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.zeros((), dtype=torch.float32, device=values.device)
    least, most = values.aminmax()
    return torch.maximum(most, -least).float()

"""Dropout of activations of which every tensor-parallel rank has a part."""

import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Each rank drops others of its elements."""
    if p == 0 or not training:
        return x
    with bmt.nn.per_rank_random():
        return F.dropout(x, p)

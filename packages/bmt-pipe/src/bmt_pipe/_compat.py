"""The place where PyTorch versions differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

_KEEPS_GRAPH = "ownership_token" in GradientEdge._fields


def lasting_gradient_edge(tensor: Tensor) -> GradientEdge:
    """Where the gradient of ``tensor`` arrives; the graph stays as long as this does, also if the tensor goes.

    Before torch 2.9 an edge to the node of a custom function does not keep that node. A view's node does.
    """
    edge = get_gradient_edge(tensor)
    if _KEEPS_GRAPH or not isinstance(edge.node, BackwardCFunction):
        return edge
    with torch.enable_grad():
        return get_gradient_edge(tensor.view_as(tensor))


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The hooks that what autograd saves now is passed to; None: there are none, or torch does not tell."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(False)

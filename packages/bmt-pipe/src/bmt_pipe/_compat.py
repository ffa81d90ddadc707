"""Differences between versions of PyTorch, and of transformers."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

_KEEPS_GRAPH = "ownership_token" in GradientEdge._fields


def lasting_gradient_edge(tensor: Tensor) -> GradientEdge:
    """The gradient edge of ``tensor``. It keeps the graph alive, also after the tensor is dropped.

    Before torch 2.9, an edge does not keep the node of a custom function alive, and an edge of a view does.
    """
    edge = get_gradient_edge(tensor)
    if _KEEPS_GRAPH or not isinstance(edge.node, BackwardCFunction):
        return edge
    with torch.enable_grad():
        return get_gradient_edge(tensor.view_as(tensor))


def recorded_outputs() -> list[str]:
    """The kinds of outputs that a running Hugging Face model records by hooks on its layers."""
    module = sys.modules.get("transformers.utils.output_capturing")  # of transformers 5
    collector = getattr(module, "_active_collector", None)
    return [] if collector is None else sorted(key for key in collector.get() or () if not key.startswith("_"))

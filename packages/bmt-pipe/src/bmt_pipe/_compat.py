"""Differences between versions of PyTorch, and of transformers."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import checkpoint

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


def inside_checkpoint() -> bool:
    """Whether a non-reentrant ``torch.utils.checkpoint`` is active."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if ask is not None:
        hooks = ask(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    # torch 2.6 does not expose the hooks. The innermost running function of torch.utils.checkpoint tells.
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("checkpoint", "recompute_fn")


def recorded_outputs() -> list[str]:
    """The kinds of outputs that a running Hugging Face model records by hooks on its layers."""
    module = sys.modules.get("transformers.utils.output_capturing")  # of transformers 5
    collector = getattr(module, "_active_collector", None)
    return [] if collector is None else sorted(key for key in collector.get() or () if not key.startswith("_"))

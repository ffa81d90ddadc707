"""The place where versions of PyTorch, and of transformers, differ."""

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
    """Where the gradient of ``tensor`` arrives; the graph stays as long as this does, also if the tensor goes.

    Before torch 2.9 an edge to the node of a custom function does not keep that node. A view's node does.
    """
    edge = get_gradient_edge(tensor)
    if _KEEPS_GRAPH or not isinstance(edge.node, BackwardCFunction):
        return edge
    with torch.enable_grad():
        return get_gradient_edge(tensor.view_as(tensor))


def inside_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` (not reentrant) takes what autograd saves now."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if ask is not None:
        hooks = ask(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    # torch 2.6 does not tell of hooks: the function of torch's that was called last, and is running, does.
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("checkpoint", "recompute_fn")


def recorded_outputs() -> list[str]:
    """What a Hugging Face model that is running was told to return of its layers, which have hooks for it."""
    module = sys.modules.get("transformers.utils.output_capturing")  # of transformers 5
    collector = getattr(module, "_active_collector", None)
    return [] if collector is None else sorted(key for key in collector.get() or () if not key.startswith("_"))

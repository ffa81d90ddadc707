"""The places where PyTorch versions differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _find_increment_version() -> Callable[[Sequence[Tensor]], None]:
    one_or_many = getattr(torch.autograd.graph, "increment_version", None)
    if one_or_many is None:
        return lambda tensors: None
    try:
        one_or_many(())
    except (TypeError, AttributeError):  # this version takes one tensor at a time

        def each(tensors: Sequence[Tensor]) -> None:
            for tensor in tensors:
                one_or_many(tensor)

        return each
    return one_or_many


keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether the backward that is running leaves the graph for another one; True where that cannot be told."""

increment_version = _find_increment_version()
"""Tells autograd that tensors were written to behind its back."""

"""Registering operations with PyTorch, so that torch.compile and torch.export take each as one node of the graph.

Eager calls go straight to the kernels: the dispatcher would cost more than many small tensors do. A public function
asks `tracing` and, while a graph is being made, calls the registered operation instead, which calls the same code
when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("bmt_kernels", "FRAGMENT")


def register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``torch.ops.bmt_kernels.<name>`` and return it.

    Args:
        schema: name, arguments and results, as ``torch.library.define`` takes them; what is written to is marked.
        function: what it does, on any device.
        fake: makes empty results of the right shapes and dtypes, without reading data.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bmt_kernels::{name}", fake, lib=_library)
    operation: Callable[..., Any] = getattr(torch.ops.bmt_kernels, name).default
    return operation


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Give a registered operation a backward, as ``torch.library.register_autograd`` takes it."""
    torch.library.register_autograd(f"bmt_kernels::{name}", backward, setup_context=setup_context, lib=_library)


def tracing() -> bool:
    """Whether a graph is being made rather than a computation done."""
    return torch.compiler.is_compiling()

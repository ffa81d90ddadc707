"""Registering operations with PyTorch, so that torch.compile and torch.export take each as one node of the graph.

Eager calls go straight to the kernels: the dispatcher would cost more than many small tensors do. A public function
asks `tracing` and, while a graph is being made, calls the registered operation instead, which calls the same code
when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("bmt_kernels", "FRAGMENT")


def _make_nothing(*arguments: object, **options: object) -> None:
    """The fake of an operation that returns nothing."""


def register(schema: str, function: Callable[..., Any], fake: Callable[..., Any] = _make_nothing) -> Callable[..., Any]:
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


def without_gaps(masters: Sequence[Tensor | None] | None) -> tuple[list[Tensor], list[int]]:
    """The masters that there are, and their indices. Lists of operations have no gaps."""
    present = [(i, master) for i, master in enumerate(masters or ()) if master is not None]
    return [master for _, master in present], [i for i, _ in present]


def with_gaps(masters: Sequence[Tensor], indices: Sequence[int], count: int) -> list[Tensor | None] | None:
    """The masters of ``count`` parameters, from what :func:`without_gaps` returned."""
    by_index = dict(zip(indices, masters))
    return [by_index.get(i) for i in range(count)] if by_index else None


def tracing() -> bool:
    """Whether a graph is being made rather than a computation done."""
    return torch.compiler.is_compiling()

"""The flat gradient that the backward of one call fills, so that nothing has to be copied into it.

The gradient of a weight is a matrix product. Operations of :mod:`unsharded_parameter` compute it where the reduction
reads it, or add it there to that of earlier micro-batches. Other gradients are copied there when all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flat_parameter import FlatParameter


class Place(NamedTuple):
    """Where a gradient is to be computed.

    Attributes:
        view: of the flat gradient, of the parameter's shape.
        adds: whether the gradient is to be added to what lies there.
        is_first: whether autograd is to be given ``view``. The nodes of later uses give it nothing.
    """

    view: Tensor
    adds: bool
    is_first: bool


class GradientTarget:
    """The flat gradient of one flat parameter that the backward of one call fills.

    Args:
        flat: the flat parameter.
        open: gives a flat gradient, and tells whether to add to what it has.
        accumulates: the node that runs only in backward passes whose gradients are reduced.
    """

    def __init__(
        self, flat: FlatParameter, open: Callable[[GradientTarget], tuple[Tensor, bool]], accumulates: Any
    ) -> None:
        self._flat, self._open, self._accumulates = flat, open, accumulates
        self._total: Tensor | None = None  # from when an operation writes until the reduction takes it
        self._views: list[Tensor] = []
        self._adds = False
        self._written: set[int] = set()
        self._others: set[int] = set()

    def note_other_use(self, index: int) -> None:
        """An operation uses parameter ``index`` that does not write here: autograd will add up its gradients."""
        self._others.add(index)

    def place(self, index: int) -> Place | None:
        """Where to compute a gradient of parameter ``index``; None: wherever autograd has it."""
        if index in self._others or not torch._C._will_engine_execute_node(self._accumulates):
            return None
        if self._total is None:
            self._total, self._adds = self._open(self)
            self._views = self._flat.unsharded_views(self._total)
        is_first = index not in self._written
        if (self._adds or not is_first) and self._total.dtype.itemsize < 4:
            return None  # autograd rounds a gradient before it is added
        self._written.add(index)
        return Place(self._views[index], self._adds or not is_first, is_first)

    def take(self) -> Filled | None:
        """What operations have written, which the reduction has from now on; None: nothing."""
        if self._total is None:
            return None
        filled = Filled(self._total, self._views, self._written)
        self._total, self._views, self._written = None, [], set()
        return filled


class Filled(NamedTuple):
    """A flat gradient that was filled in part.

    Attributes:
        total: the flat gradient.
        views: of all parameters.
        written: indices of the parameters whose gradients lie there.
    """

    total: Tensor
    views: list[Tensor]
    written: set[int]

    def holds(self, index: int, grad: Tensor | None) -> bool:
        """Whether ``grad``, which autograd has given parameter ``index``, is what was written."""
        return index in self.written and grad is not None and grad.data_ptr() == self.views[index].data_ptr()

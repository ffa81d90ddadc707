"""The flat gradient that the backward of one call fills, so that nothing has to be copied into it.

The gradient of a weight is a matrix product. Operations of :mod:`unsharded_parameter` compute it where the reduction
reads it, or add it there to that of earlier micro-batches. Autograd is given nothing for it. Other gradients are copied
there when all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flat_parameter import FlatParameter


class Place(NamedTuple):
    """Where a gradient is to be computed.

    Attributes:
        view: of the flat gradient, of the parameter's shape.
        adds: whether the gradient is to be added to what lies there.
    """

    view: Tensor
    adds: bool


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

    def with_given(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients: those that lie here, to which what autograd has given of other uses is added, and the rest."""
        found = list(grads)
        for index in self.written:
            given = grads[index]
            if given is not None:
                self.views[index].add_(given)
            found[index] = self.views[index]
        return found


class GradientTarget:
    """The flat gradient of one flat parameter that the backward of one call fills.

    Args:
        flat: the flat parameter.
        open: gives a flat gradient, and tells whether to add to what it has.
        close: takes back one that will not be reduced.
        accumulates: the node that runs only in backward passes whose gradients are reduced.
    """

    def __init__(
        self,
        flat: FlatParameter,
        open: Callable[[GradientTarget], tuple[Tensor, bool]],
        close: Callable[[GradientTarget], object],
        accumulates: Any,
    ) -> None:
        self._flat, self._open, self._close, self._accumulates = flat, open, close, accumulates
        self._total: Tensor | None = None  # from when an operation writes until the reduction takes it
        self._views: list[Tensor] = []
        self._adds = False
        self._written: set[int] = set()
        self._others: set[int] = set()
        self._uses: dict[int, int] = {}
        self._task = -1  # the backward pass that writes

    def note_other_use(self, index: int) -> None:
        """An operation uses parameter ``index`` that does not write here: autograd adds up its gradients."""
        self._others.add(index)

    def note_use(self, index: int) -> None:
        """An operation of the forward uses parameter ``index`` that will ask for a place."""
        if torch._C._current_graph_task_id() == -1:  # otherwise a checkpoint computes it again
            self._uses[index] = self._uses.get(index, 0) + 1

    def place(self, index: int) -> Place | None:
        """Where to compute a gradient of parameter ``index``, for autograd to be given nothing; None: as usual."""
        if index in self._others or not torch._C._will_engine_execute_node(self._accumulates):
            return None
        task = torch._C._current_graph_task_id()
        if self._total is not None and task != self._task:
            self._close(self)  # a pass before has failed
        if self._total is None:
            self._total, self._adds = self._open(self)
            self._views = self._flat.unsharded_views(self._total)
            self._task = task
        adds = self._adds or index in self._written
        if self._total.dtype.itemsize < 4 and (adds or self._uses.get(index, 0) > 1):
            return None  # autograd rounds each gradient before it is added, in an order of its own
        self._written.add(index)
        return Place(self._views[index], adds)

    def take(self) -> Filled | None:
        """What operations have written, which the reduction has from now on; None: nothing."""
        if self._total is None:
            return None
        filled = Filled(self._total, self._views, self._written)
        self._total, self._views, self._written = None, [], set()
        return filled

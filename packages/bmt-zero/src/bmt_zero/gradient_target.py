"""The flat gradient that the backward of one call fills, so that nothing has to be copied into it.

The gradient of a weight is a matrix product. Operations of :mod:`unsharded_parameter` compute it where the reduction
reads it, or add it there to that of earlier micro-batches. Autograd is given nothing for it. Other gradients are copied
there when all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flat_gradient import Filled
from .flat_parameter import FlatParameter


class Place(NamedTuple):
    """Where a gradient is to be computed.

    Attributes:
        view: of the flat gradient, of the parameter's shape.
        adds: whether the gradient is to be added to what lies there.
    """

    view: Tensor
    adds: bool


class GradientTargets:
    """The targets of a flat parameter.

    Args:
        flat: the flat parameter.
        accumulated: the flat gradient to add to, or None.
        new: makes another one.
    """

    def __init__(
        self, flat: FlatParameter, accumulated: Callable[[], Tensor | None], new: Callable[[], Tensor]
    ) -> None:
        self.flat = flat
        self._accumulated, self._new = accumulated, new
        self._opened: dict[GradientTarget, Tensor] = {}  # flat gradients that are being filled
        self._adding: dict[GradientTarget, None] = {}  # to the accumulated one

    def for_call(self, accumulates: Any) -> GradientTarget:
        """For a call; ``accumulates`` is the node that runs only in backward passes whose gradients are reduced."""
        return GradientTarget(self, accumulates)

    def open(self, target: GradientTarget) -> tuple[Tensor, bool]:
        """A flat gradient for a call's backward to fill, and whether to add to what it has."""
        with torch.no_grad():
            accumulated = self._accumulated()
            if accumulated is not None:
                self._adding[target] = None
                return accumulated, True
            total = self._opened[target] = self._new()
            return total, False

    def close(self, target: GradientTarget) -> None:
        """The flat gradient of a target will not be reduced: the backward that has filled it has failed."""
        total = self._opened.get(target)
        self.take(target)
        if total is not None:
            self.flat.shard_comm.discard(total)

    def take(self, target: GradientTarget) -> Filled | None:
        """What a call's backward has written, which the reduction has from now on; None: nothing."""
        self._opened.pop(target, None)
        self._adding.pop(target, None)
        return target.take()

    def take_accumulated(self) -> set[int]:
        """The accumulated gradient is reduced from now on: calls that have added to it and go on do so in others.

        Returns the indices of what they have written.
        """
        written: set[int] = set()
        for target in list(self._adding):
            filled = self.take(target)
            written |= filled.written if filled is not None else set()
        return written

    def drop(self) -> None:
        """Close all that were opened."""
        for target in [*self._opened, *self._adding]:
            self.close(target)

    @property
    def totals(self) -> list[Tensor]:
        """The flat gradients that are being filled, but for accumulated ones."""
        return list(self._opened.values())


class GradientTarget:
    """The flat gradient of one flat parameter that the backward of one call fills.

    Args:
        targets: of the flat parameter, which opens and closes it.
        accumulates: the node that runs only in backward passes whose gradients are reduced.
    """

    def __init__(self, targets: GradientTargets, accumulates: Any) -> None:
        self._targets, self._accumulates = targets, accumulates
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
            self._targets.close(self)  # a pass before has failed
        if self._total is None:
            self._total, self._adds = self._targets.open(self)
            self._views = self._targets.flat.unsharded_views(self._total)
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

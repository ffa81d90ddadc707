"""The flat gradient that the backward of one call writes to, so that gradients of weights need no copy.

The gradient of a weight is a matrix product. Operations of :mod:`unsharded_parameter` compute it in the flat gradient,
or add it there to the gradient of earlier micro-batches, and return None to autograd. Other gradients are copied into
the flat gradient when all have arrived.
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
        adds: whether the gradient is added to the values there.
    """

    view: Tensor
    adds: bool


class GradientTargets:
    """The targets of a flat parameter.

    Args:
        flat: the flat parameter.
        accumulated: the flat gradient to add to, or None.
        new: makes a flat gradient.
    """

    def __init__(
        self, flat: FlatParameter, accumulated: Callable[[], Tensor | None], new: Callable[[], Tensor]
    ) -> None:
        self.flat = flat
        self._accumulated, self._new = accumulated, new
        self._opened: dict[GradientTarget, Tensor] = {}  # the new flat gradients that targets write to
        self._adding: dict[GradientTarget, None] = {}  # targets that add to the accumulated flat gradient

    def open(self, target: GradientTarget) -> tuple[Tensor, bool]:
        """The flat gradient that a call's backward writes to, and whether it adds to the values there."""
        with torch.no_grad():
            accumulated = self._accumulated()
            if accumulated is not None:
                self._adding[target] = None
                return accumulated, True
            total = self._opened[target] = self._new()
            return total, False

    def close(self, target: GradientTarget) -> None:
        """Discard the flat gradient of a target: the backward that has written to it has failed."""
        total = self._opened.get(target)
        self.take(target)
        if total is not None:
            self.flat.shard_comm.discard(total)

    def take(self, target: GradientTarget) -> Filled | None:
        """Hand over the gradients that a call's backward has written; None: it has written none."""
        self._opened.pop(target, None)
        self._adding.pop(target, None)
        return target.take()

    def take_accumulated(self) -> set[int]:
        """Hand over the accumulated gradient. Calls that added to it write to new flat gradients from now on.

        Returns the indices of the parameters whose gradients they have written.
        """
        written: set[int] = set()
        for target in list(self._adding):
            filled = self.take(target)
            written |= filled.written if filled is not None else set()
        return written

    def drop(self) -> None:
        """Close all open targets."""
        for target in [*self._opened, *self._adding]:
            self.close(target)

    @property
    def totals(self) -> list[Tensor]:
        """The flat gradients that targets write to, without the accumulated one."""
        return list(self._opened.values())


class GradientTarget:
    """The flat gradient of one flat parameter that the backward of one call writes to.

    Args:
        targets: of the flat parameter; opens and closes this one.
        anchor_node: runs only in backward passes that reduce gradients.
    """

    def __init__(self, targets: GradientTargets, anchor_node: Any) -> None:
        self._targets, self._anchor_node = targets, anchor_node
        self._total: Tensor | None = None  # from when an operation writes until the reduction takes it
        self._views: list[Tensor] = []
        self._adds = False
        self._written: set[int] = set()
        self._others: set[int] = set()
        self._uses: dict[int, int] = {}
        self._task = -1  # the backward pass that writes

    def note_other_use(self, index: int) -> None:
        """An operation that does not write here uses parameter ``index``: autograd adds up its gradients."""
        self._others.add(index)

    def note_use(self, index: int) -> None:
        """An operation of the forward that will ask for a place uses parameter ``index``."""
        if torch._C._current_graph_task_id() == -1:  # otherwise it is the recomputation of a checkpoint
            self._uses[index] = self._uses.get(index, 0) + 1

    def place(self, index: int) -> Place | None:
        """Where to compute a gradient of parameter ``index``; None: return it to autograd as usual."""
        if index in self._others or not torch._C._will_engine_execute_node(self._anchor_node):
            return None
        task = torch._C._current_graph_task_id()
        if self._total is not None and task != self._task:
            self._targets.close(self)  # an earlier pass has failed
        if self._total is None:
            self._total, self._adds = self._targets.open(self)
            self._views = self._targets.flat.unsharded_views(self._total)
            self._task = task
        adds = self._adds or index in self._written
        if self._total.dtype.itemsize < 4 and (adds or self._uses.get(index, 0) > 1):
            return None  # autograd rounds each gradient before it adds it, and adds them in another order
        self._written.add(index)
        return Place(self._views[index], adds)

    def take(self) -> Filled | None:
        """Hand over the gradients that operations have written; None: they have written none."""
        if self._total is None:
            return None
        filled = Filled(self._total, self._views, self._written)
        self._total, self._views, self._written = None, [], set()
        return filled

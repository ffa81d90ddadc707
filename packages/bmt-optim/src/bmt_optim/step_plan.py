"""What an optimizer knows of its parameters from the first step on, and the portions in which it steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator, slice_of

from .logical_params import Presence, plan_logical_params

CACHED = 1 << 21
"""How many elements are stepped together on the CPU, so that gradients and weights stay in a cache."""


class StepPlan:
    """The logical parameters, in the order of the groups, and their owners.

    Args:
        groups: the optimizer's parameter groups.
        cost: the cost of a step, as a function of the logical shape and the options of its group.
        height: how many rows form a matrix that is stepped apart, as a function of the slice and those options.
        replicas: as for :func:`bmt_optim.logical_params.plan_logical_params`.

    Raises:
        RuntimeError: as :func:`bmt_optim.logical_params.plan_logical_params`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        cost: Callable[..., float],
        height: Callable[..., int],
        replicas: Communicator | None,
    ) -> None:
        self._params = [list(group["params"]) for group in groups]
        params = [(p, number) for number, group in enumerate(groups) for p in group["params"]]
        self.group_of = [number for _, number in params]
        costs = [float(cost(slice_of(p).shape, groups[number])) for p, number in params]
        self.heights = [height(slice_of(p), groups[number]) for p, number in params]
        self.options: list[dict[str, Any]] = [{} for _ in groups]
        """Those of each group that its states have been compared with."""
        self.logical_params = plan_logical_params([p for p, _ in params], costs, self.heights, replicas)
        self.presence = Presence(self.logical_params)
        self.kept: dict[tuple[str | int, ...], dict[str, Any]] = {}
        """What rules keep for batches, by their parameters. Entries that a step does not use are dropped."""
        self._cache: Tensor | None = None

    def holds(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the parameters are still these: scripts may change the lists of groups."""
        return len(groups) == len(self._params) and all(
            len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, params in zip(groups, self._params)
        )

    def cache(self, numel: int) -> Tensor | None:
        """``numel`` elements of memory that all batches share, one after the other; ``None`` if they are too many."""
        if numel > CACHED:
            return None
        if self._cache is None:
            self._cache = torch.empty(CACHED, dtype=torch.float32, device="cpu")
        return self._cache[:numel]


def portions_of(members: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """``members`` in portions that fit into a cache. A member that does not fit is a portion by itself."""
    portions: list[list[int]] = []
    total = CACHED
    for member, size in zip(members, sizes):
        total += size
        if total > CACHED:
            portions.append([])
            total = size
        portions[-1].append(member)
    return portions

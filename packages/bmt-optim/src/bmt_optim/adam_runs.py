"""What an Adam step works on: parameters end to end in memory, and their flat state.

See the note in :mod:`bmt_optim.adam`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bmt_comm import local_tensor

from .batch import HALF, Batch, sync_masters
from .logical_params import LogicalParam
from .runs import extent_of, flat_over, flat_view, local_grad, places_of, plan_runs

Optimizer = Any
"""An :class:`~bmt_optim.adam.Adam`, whose module imports this one."""


class RunLists:
    """The lists of a batch: runs, and single parameters, of one step, dtype, device and sharing."""

    def __init__(self, sharing: Hashable) -> None:
        self.sharing = sharing
        self.locals: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[dict[str, Any]] = []
        self.logical_params: list[LogicalParam] = []  # of single parameters that are rounded stochastically
        self.entries: list[dict[str, Any]] = []  # of the state, whose step this is
        self.in_runs: list[Tensor] = []  # parameters that the kernel sees only as part of a run


class RunBatch(Batch):
    """A batch of runs: ``params`` are flat, or single parameters; ``sharing`` as in ``Adam._sharing_of``."""

    def __init__(self, lists: RunLists, *settings: Any) -> None:
        self.sharing, self.params = lists.sharing, lists.locals
        super().__init__(lists.logical_params, lists.locals, lists.grads, lists.states, *settings)

    def __len__(self) -> int:
        return len(self.grads)


class GroupPlan:
    """The runs of one parameter group, whose first parameter is number ``first`` of the optimizer."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], first: int) -> None:
        self.params, self.first = list(params), first
        locals_ = [local_tensor(p) for p in params]
        # A DTensor has no memory of its own: its local tensor has. Other parameters are their local tensors.
        self.plain = all(p.data_ptr() == t.data_ptr() for p, t in zip(params, locals_))
        self.places = places_of(locals_)
        sharings = [optimizer._sharing_of(p) for p in params]
        extents = [
            # stochastic rounding depends on the position in the logical tensor, which a run has not
            None if optimizer.stochastic_rounding and p.dtype in HALF else extent_of(t, key=(p.requires_grad, sharing))
            for p, t, sharing in zip(params, locals_, sharings)
        ]
        self.runs = [
            Run([self.params[i] for i in run], [locals_[i] for i in run], sharings[run[0]], first + run[0])
            for run in plan_runs(extents)
        ]

    def holds(self, params: Sequence[Tensor], first: int, state: Mapping[Tensor, Any]) -> bool:
        """Whether the parameters, their addresses and their state in ``state`` are unchanged."""
        if first != self.first or len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        if places_of(params if self.plain else [local_tensor(p) for p in params]) != self.places:
            return False
        return all(run.has_state_in(state) for run in self.runs)


class Run:
    """Parameters end to end in memory (or one that has no neighbour), and their flat state."""

    def __init__(self, params: list[Tensor], locals_: list[Tensor], sharing: Hashable, index: int) -> None:
        first = locals_[0]
        self.sharing = sharing
        self.index = index  # of the first parameter
        self.params = params
        self.locals = [t.detach() for t in locals_]
        self.device = first.device
        self.key = (first.dtype, first.device, sharing)  # the same in a batch
        self.rounds = False  # stochastically
        *self.offsets, self.numel = accumulate((t.numel() for t in locals_), initial=0)
        # Keeps the memory of the run alive, so that no other tensor can get an address that is compared with it.
        self.flat = flat_view(first.detach(), self.numel) if len(params) > 1 else self.locals[0]
        self.flats: dict[str, Tensor] = {}  # the state
        self.states: list[dict[str, Any]] = []  # of the parameters: views of it, and steps
        self.views: list[dict[str, Tensor]] = []  # these views

    # --- state ------------------------------------------------------------------------------------

    def materialize(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Give every parameter its state, as views of flat tensors, keeping what there is."""
        if self.states:
            return
        state = optimizer.state
        entries = [state.get(p) or {} for p in self.params]
        layout = optimizer._layout(self.params[0], group)
        self.rounds = self.params[0].dtype in HALF and "master" not in layout
        self.flats = {key: self._flat_state(optimizer, group, key, kind, entries) for key, kind in layout.items()}
        self.views = []
        for i, (param, local) in enumerate(zip(self.params, self.locals)):
            views = {key: self._view(flat, i, local.shape) for key, flat in self.flats.items()}
            if "master" in views and "master" not in entries[i]:
                views["master"].copy_(local)
            state[param] = {"step": entries[i].get("step", 0), **views}
            self.views.append(views)
        self.states = [state[p] for p in self.params]

    def has_state_in(self, state: Mapping[Tensor, Any]) -> bool:
        """Whether ``state`` still has what this run put there, if anything: scripts may change or drop it."""
        return all(map(is_, map(state.get, self.params), self.states)) and all(
            all(map(is_, map(entry.get, views), views.values())) for entry, views in zip(self.states, self.views)
        )

    def _flat_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], key: str, kind: Any, entries: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        tensors = [entry[key] for entry in entries if key in entry]
        if self.numel and len(tensors) == len(entries) and optimizer._keeps(tensors[0], self.device):
            flat_state = flat_over(tensors, self.offsets, self.numel)
            if flat_state is not None:
                return flat_state
        flat = optimizer.new_state(key, kind, (self.numel,), self.device, group)
        for i, entry in enumerate(entries):
            if key in entry:
                self._view(flat, i, entry[key].shape).copy_(entry[key])
        return flat

    def _view(self, flat: Tensor, i: int, shape: Sequence[int]) -> Tensor:
        return flat[self.offsets[i] : self.offsets[i] + math.prod(shape)].view(shape)

    # --- a step -----------------------------------------------------------------------------------

    def collect(
        self, optimizer: Optimizer, group: Mapping[str, Any], batches: dict[Any, RunLists], without: Set[Tensor]
    ) -> None:
        """Add what the next step works on to its batch in ``batches``.

        ``without`` are empty parameters that are stepped although they have no gradient on this rank.
        """
        params, states = self.params, self.states
        if len(params) == 1:
            grad = local_grad(params[0])
            if grad is None and without and params[0] in without:
                grad = torch.zeros_like(self.flat)
            grads = [grad]
        else:
            grads = [local_grad(p) for p in params]
        if not states:
            if not [True for grad in grads if grad is not None]:
                return
            self.materialize(optimizer, group)
            states = self.states
        if len(params) > 1:
            steps = [entry["step"] for entry in states]
            flat_grad = flat_over(grads, self.offsets, self.numel) if steps.count(steps[0]) == len(steps) else None
            if flat_grad is not None:
                lists = self._add(batches, steps[0], self.flat, flat_grad, self.flats)
                lists.entries.extend(states)
                lists.in_runs.extend(params)
                return
        for local, grad, entry in zip(self.locals, grads, states):
            if grad is not None:
                lists = self._add(batches, entry["step"], local, grad, entry)
                lists.entries.append(entry)
                if self.rounds:
                    lists.logical_params.append(optimizer._current_plan().logical_params[self.index])

    def _add(
        self, batches: dict[Any, RunLists], steps: int, local: Tensor, grad: Tensor, state: dict[str, Any]
    ) -> RunLists:
        if steps == 0:
            sync_masters([state], [local])
        key = (steps + 1, grad.dtype, self.key)
        lists = batches.get(key)
        if lists is None:
            lists = batches[key] = RunLists(self.sharing)
        lists.locals.append(local)
        lists.grads.append(grad.contiguous().resolve_neg())
        lists.states.append(state)
        return lists

"""What an Adam step works on: parameters end to end in memory, their flat state, and the kernel calls.

See the note in :mod:`bmt_optim.adam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bmt_comm import local_tensor
from bmt_kernels import pinned_zeros

from .runs import extent_of, flat_over, flat_view, local_grad, plan_runs

HALF = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Home:
    """Where state is kept: beside the parameters, or in host memory.

    Attributes:
        on_host: in host memory, wherever the parameters are.
        pinned: page-locked there, if the parameters are on a CUDA device.
    """

    on_host: bool = False
    pinned: bool = False

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        """New fp32 state for parameters on ``device``."""
        if self._locks(device):
            return pinned_zeros(numel)
        return torch.zeros(numel, dtype=torch.float32, device="cpu" if self.on_host else device)

    def holds(self, tensor: Tensor, device: torch.device) -> bool:
        """Whether ``tensor`` can stay what it is: state of parameters on ``device``."""
        if tensor.dtype is not torch.float32 or tensor.device != (torch.device("cpu") if self.on_host else device):
            return False
        return not self._locks(device) or tensor.is_pinned()

    def _locks(self, device: torch.device) -> bool:
        return self.pinned and device.type == "cuda"


class Launch:
    """The tensors of one kernel call: those that share step, dtypes, device and whom they are shared with."""

    def __init__(self, device: torch.device, share: Hashable) -> None:
        self.device = device
        self.share = share
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.exp_avg_sqs: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []  # (contiguous stand-in, parameter), to be copied back
        self.in_runs: list[Tensor] = []  # parameters that the kernel sees only as part of a run
        self.entries: list[dict[str, Any]] = []  # of the state, whose step this is

    def add(self, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None) -> None:
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(exp_avg)
        self.exp_avg_sqs.append(exp_avg_sq)
        if master is not None:
            self.masters.append(master)


class GroupPlan:
    """The runs of one parameter group.

    Args:
        home: where the state is kept.
        share_of: parameters for which it differs are put into no run, and no kernel call, together.
    """

    def __init__(self, params: Sequence[Tensor], home: Home, share_of: Callable[[Tensor], Hashable]) -> None:
        self.params = list(params)
        locals_ = [local_tensor(p) for p in params]
        shares = [share_of(p) for p in params]
        extents = [extent_of(t, key=(p.requires_grad, share)) for p, t, share in zip(params, locals_, shares)]
        self.runs = [
            Run([self.params[i] for i in run], [locals_[i] for i in run], home, shares[run[0]])
            for run in plan_runs(extents)
        ]

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether these are still the parameters, and lie where they did."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        return all(run.holds() for run in self.runs)


class Run:
    """Parameters end to end in memory (or one that has no neighbour), and their flat state."""

    def __init__(self, params: list[Tensor], locals_: list[Tensor], home: Home, share: Hashable) -> None:
        first = locals_[0]
        self.home, self.share = home, share
        self.params = params
        self.locals = locals_
        # A DTensor has no memory of its own and is asked for its local tensor each time; others lie where that does.
        self.plain = all(p.data_ptr() == t.data_ptr() for p, t in zip(params, locals_))
        self.dtype, self.device = first.dtype, first.device
        self.half = first.dtype in HALF
        self.addresses = [t.data_ptr() for t in locals_]
        sizes = [t.numel() for t in locals_]
        *self.offsets, self.numel = accumulate(sizes, initial=0)
        self.contiguous = first.is_contiguous()
        # Holds the memory of the run, so that an address in it can belong to nothing else while it is compared.
        self.flat = flat_view(first.detach(), self.numel) if len(params) > 1 else first.detach()
        self.materialized = False

    def holds(self) -> bool:
        tensors = self.params if self.plain else [local_tensor(p) for p in self.params]
        if [t.data_ptr() for t in tensors] != self.addresses:
            return False
        first = tensors[0]
        return first.dtype is self.dtype and (len(tensors) > 1 or first.is_contiguous() == self.contiguous)

    # --- state ------------------------------------------------------------------------------------

    def materialize(self, state: dict[Tensor, Any]) -> None:
        """Give every parameter its state, as views of flat tensors, keeping what there is."""
        if self.materialized:
            return
        entries = [state.get(p, {}) for p in self.params]
        flats = {key: self._flat_state(key, entries) for key in MOMENTS}
        if self.half:
            flats["master"] = self._flat_state("master", entries)
        self.exp_avg, self.exp_avg_sq = flats["exp_avg"], flats["exp_avg_sq"]
        self.master = flats.get("master")
        for i, (param, local) in enumerate(zip(self.params, self.locals)):
            views = {key: self._view(flat, i, local.shape) for key, flat in flats.items()}
            if self.half and "master" not in entries[i]:
                views["master"].copy_(local.detach())
            state[param] = {"step": entries[i].get("step", 0), **views}
        self.states = [state[p] for p in self.params]
        self.materialized = True

    def _flat_state(self, key: str, entries: list[dict[str, Any]]) -> Tensor:
        tensors = [entry[key] for entry in entries if key in entry]
        if self.numel and len(tensors) == len(entries) and self.home.holds(tensors[0], self.device):
            found = flat_over(tensors, self.offsets, self.numel)
            if found is not None:
                return found
        flat = self.home.zeros(self.numel, self.device)
        for i, entry in enumerate(entries):
            if key in entry:
                self._view(flat, i, entry[key].shape).copy_(entry[key])
        return flat

    def _view(self, flat: Tensor, i: int, shape: Sequence[int]) -> Tensor:
        return flat[self.offsets[i] : self.offsets[i] + math.prod(shape)].view(shape)

    def sync_masters(self, indices: Iterable[int]) -> None:
        for i in indices:
            master = self.states[i]["master"]
            local = self.locals[i].detach().to(master.device)
            torch.where(master.to(self.dtype) == local, master, local.float(), out=master)

    def load(self, state: dict[Tensor, Any], entries: Mapping[Tensor, dict[str, Any] | None]) -> None:
        for param, local in zip(self.params, self.locals):
            mine, theirs = state[param], entries[param]
            if theirs is None:
                mine["step"] = 0
                for key in MOMENTS:
                    mine[key].zero_()
            else:
                mine["step"] = theirs["step"]
                for key in MOMENTS:
                    mine[key].copy_(theirs[key])
            if self.half:
                mine["master"].copy_(local if theirs is None or "master" not in theirs else theirs["master"])

    # --- a step -----------------------------------------------------------------------------------

    def collect(self, state: dict[Tensor, Any], launches: dict[Any, Launch]) -> None:
        """Put what the next step works on into the kernel call where it belongs. The step is not counted yet."""
        params = self.params
        grads = [local_grad(p) for p in params]
        if not any(grad is not None for grad in grads):
            return
        if not self.materialized:
            self.materialize(state)
        states = self.states
        steps = [entry["step"] for entry in states]
        if self.half and 0 in steps:
            self.sync_masters(i for i, grad in enumerate(grads) if grad is not None and steps[i] == 0)
        if len(params) > 1 and steps.count(steps[0]) == len(steps):
            flat_grad = flat_over(grads, self.offsets, self.numel)
            if flat_grad is not None:
                launch = self._launch(launches, steps[0] + 1, flat_grad)
                launch.entries.extend(states)
                launch.add(self.flat, flat_grad.detach(), self.exp_avg, self.exp_avg_sq, self.master)
                launch.in_runs.extend(params)
                return
        for i, (grad, entry) in enumerate(zip(grads, states)):
            if grad is None:
                continue
            grad = grad.detach()
            launch = self._launch(launches, steps[i] + 1, grad)
            launch.entries.append(entry)
            local = self.locals[i].detach()
            if not local.is_contiguous():
                stand_in = local.contiguous()
                launch.copies.append((stand_in, local))
                local = stand_in
            launch.add(local, grad.contiguous(), entry["exp_avg"], entry["exp_avg_sq"], entry.get("master"))

    def _launch(self, launches: dict[Any, Launch], step: int, grad: Tensor) -> Launch:
        key = (step, self.dtype, grad.dtype, self.device, self.share)
        found = launches.get(key)
        if found is None:
            found = launches[key] = Launch(self.device, self.share)
        return found

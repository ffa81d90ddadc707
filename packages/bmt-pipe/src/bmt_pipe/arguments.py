"""What layers get beside hidden states: every stage's arguments on all stages, and their gradients back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from bmt_comm import ParallelContext

from .messages import connected
from .plan import Plan
from .signature import OWN_VALUE, Signature


class Arguments:
    """The arguments of one call.

    Args:
        context: the ranks.
        plan: what the call consists of.
        values: the leaves of this rank's arguments, hidden states included.

    Attributes:
        values: the leaves of each stage's arguments.
    """

    def __init__(self, context: ParallelContext, plan: Plan, values: list[Any]) -> None:
        self.context = context
        self.plan = plan
        self.stage = context.pipe.rank
        self.values: list[list[Any]] = [[]] * plan.stages
        self.values[self.stage] = values
        self._grads: dict[tuple[int, int], Tensor] = {}  # by origin and leaf

    def exchange(self) -> None:
        """Get every stage's arguments, other than hidden states, for its micro-batches. A collective."""
        comms = (self.context.pipe, self.context.pipe_host)
        sends: tuple[list[Any], list[Any]] = ([], [])
        recvs: tuple[list[Any], list[Any]] = ([], [])
        for origin, signature in enumerate(self.plan.signatures):
            if origin == self.stage:
                continue
            found: list[Any] = []
            for n, leaf in enumerate(signature.leaves):
                if self.stage not in self._readers(signature, n):
                    found.append(None)
                elif leaf.value is OWN_VALUE:
                    found.append(self.values[self.stage][n])
                elif not leaf.is_tensor:
                    found.append(copy.deepcopy(leaf.value))  # layers may change it
                else:
                    device = "cpu" if leaf.on_host else self.context.device
                    found.append(torch.empty(leaf.value.shape, dtype=leaf.value.dtype, device=device))
                    if found[-1].numel():
                        recvs[leaf.on_host].append((found[-1], origin))
            self.values[origin] = found
        mine = self.plan.signatures[self.stage]
        for n in mine.tensors(hidden=False):
            value = self.values[self.stage][n].detach().contiguous()
            if value.numel():
                sends[mine.leaves[n].on_host].extend((value, s) for s in self._readers(mine, n) if s != self.stage)
        with connected():
            for on_host, comm in enumerate(comms):
                comm.send_recv(sends[on_host], recvs[on_host])

    def _readers(self, signature: Signature, leaf: int) -> range:
        """The stages that need an argument of another one: all, or for the tail's the last."""
        if leaf < signature.num_hidden:
            return range(0)
        in_tail = leaf >= len(signature.leaves) - signature.num_tail
        schedule = self.plan.schedule
        last = schedule.stage(schedule.last)
        return range(last, last + 1) if in_tail else range(self.plan.stages)

    def of(
        self, micro_batch: int, leaves: dict[int, Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """A micro-batch's arguments and those of the tail. ``leaves`` gets those whose gradients are wanted."""
        origin = self.plan.origin(micro_batch)
        signature, rows = self.plan.signatures[origin], self.plan.rows(micro_batch)
        values: list[Any] = [None] * signature.num_hidden
        for n in range(signature.num_hidden, len(signature.leaves)):
            leaf, value = signature.leaves[n], self.values[origin][n]
            if leaf.is_tensor and value is not None:  # None: of the tail, which runs elsewhere
                value = value.detach()[rows] if leaf.batched else value.detach()
                if leaf.requires_grad and torch.is_grad_enabled() and leaves is not None:
                    value = leaves[n] = value.detach().requires_grad_()
            values.append(value)
        _, args, kwargs, tail_args = signature.structure.fill(values)
        return args, kwargs, tail_args

    def add_grads(self, micro_batch: int, leaves: dict[int, Tensor]) -> None:
        origin = self.plan.origin(micro_batch)
        signature = self.plan.signatures[origin]
        for n, leaf in leaves.items():
            if leaf.grad is None:
                continue
            whole = self._grads.get((origin, n))
            if whole is None:
                whole = self._grads[origin, n] = torch.zeros(
                    signature.leaves[n].value.shape, dtype=leaf.dtype, device=leaf.device
                )
            (whole[self.plan.rows(micro_batch)] if signature.leaves[n].batched else whole).add_(leaf.grad)

    def exchange_grads(self, hidden: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all leaves of this rank's arguments, given those of the hidden states. A collective."""
        comms = (self.context.pipe, self.context.pipe_host)
        sends: tuple[list[Any], list[Any]] = ([], [])
        recvs: tuple[list[Any], list[Any]] = ([], [])
        mine: dict[int, list[Tensor]] = {}
        for origin, signature in enumerate(self.plan.signatures):
            for n in signature.tensors(hidden=False):
                leaf = signature.leaves[n]
                if not leaf.requires_grad:
                    continue
                grad = self._grads.pop((origin, n), None)
                if grad is None:
                    device = "cpu" if leaf.on_host else self.context.device
                    grad = torch.zeros(leaf.value.shape, dtype=leaf.value.dtype, device=device)
                if origin != self.stage:
                    sends[leaf.on_host].append((grad, origin))
                    continue
                mine[n] = [grad if s == self.stage else torch.empty_like(grad) for s in range(self.plan.stages)]
                recvs[leaf.on_host].extend((g, s) for s, g in enumerate(mine[n]) if s != self.stage)
        with connected():
            for on_host, comm in enumerate(comms):
                comm.send_recv(sends[on_host], recvs[on_host])
        grads = [*hidden, *[None] * (len(self.plan.signatures[self.stage].leaves) - len(hidden))]
        for n, parts in mine.items():
            grads[n] = torch.stack(parts).sum(0)
        return grads

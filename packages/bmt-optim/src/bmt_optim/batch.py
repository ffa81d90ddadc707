"""What a rule works on: some parameters of one parameter group, with their gradients, weights and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .logical_params import LogicalParam
from .rounding import round_stochastically

HALF = (torch.float16, torch.bfloat16)
_SPAN = 1 << 24
"""How many elements of weights without masters have an fp32 copy at a time, or one parameter if it is larger."""


class Batch:
    """The parameters of one parameter group that are at the same step and on the same device.

    There is at least one. All lists have one entry per parameter. Tensors are this rank's shards. Some may be empty.

    Attributes:
        logical_params: the logical parameters.
        options: the group's options.
        step: the number of this step, counted from 1.
        grads: contiguous, fp32 or half precision, multiplied by the loss scale. Only read them; zero_grad may be
            called as soon as the step is over.
        grad_scale: what the gradients have been multiplied by.
        grad_factor: what they must still be multiplied by, such as a clip coefficient: 0-dim fp32 on their device;
            or ``None``.
        found_inf: for an optimizer that ``takes_found_inf``: nothing may change if it is not zero. 0-dim fp32 on the
            device; or ``None``.
        weights: the weights to compute with, contiguous: fp32 masters, or the parameters themselves. Read them
            here; write them through :meth:`writable`.
        kept: what a rule keeps for later steps of a batch of the same parameters. It must not depend on gradients.
    """

    def __init__(
        self,
        logical_params: Sequence[LogicalParam],
        locals_: Sequence[Tensor],
        grads: list[Tensor],
        states: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        step: int,
        grad_scale: float,
        grad_factor: Tensor | None,
        found_inf: Tensor | None,
        kept: dict[str, Any],
        cache: Tensor | None,
    ) -> None:
        self.logical_params = logical_params
        self.options = options
        self.step = step
        self.grads = grads
        self.grad_scale = grad_scale
        # The factor is on the device that the ranks communicate on; offloaded gradients are in host memory.
        self.grad_factor = None if grad_factor is None else grad_factor.to(grads[0].device)
        self.found_inf = found_inf
        self.states = states
        self.kept = kept
        self._cache = cache
        self._locals = locals_
        self.weights = [entry["master"] if "master" in entry else t.contiguous() for entry, t in zip(states, locals_)]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.weights[0].device

    def __len__(self) -> int:
        return len(self.logical_params)

    def state(self, key: str, indices: Sequence[int] | None = None) -> list[Tensor]:
        """The state tensors under ``key``, of all parameters or of some."""
        return [self.states[i][key] for i in (range(len(self)) if indices is None else indices)]

    def scratch(self) -> list[Tensor] | None:
        """fp32 memory of the weights' shapes, for what one pass over a batch leaves to the next.

        ``None`` where the batch does not stay in a cache between passes.
        """
        if self._cache is None:
            return None
        if "scratch" not in self.kept:
            parts = self._cache.split([w.numel() for w in self.weights])
            self.kept["scratch"] = [part.view(w.shape) for part, w in zip(parts, self.weights)]
        return self.kept["scratch"]

    def pick(self, values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Those entries of a list of the batch."""
        return [values[i] for i in indices]

    def fp32_grad(self, i: int) -> Tensor:
        """A parameter's gradient in fp32, without the loss scale and with ``grad_factor``. Only read it."""
        grad = self.grads[i].float()
        if self.grad_scale != 1:
            grad = grad / self.grad_scale
        if self.grad_factor is not None:
            grad = grad * self.grad_factor
        return grad

    def writable(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """The weights, to be updated in place: fp32 tensors, in portions of indices and weights.

        A parameter in half precision gets its rounded weight when the loop goes on to the next portion. A master is
        rounded to nearest, a weight without a master stochastically. Most often there is one portion. Iterate to the
        end::

            for indices, weights in batch.writable():
                for i, weight in zip(indices, weights):
                    weight.sub_(updates[i])
        """
        direct, rest = self._by_way(None)
        if direct:
            yield direct, [self.weights[i] for i in direct]
            self._store(i for i in direct if self.weights[i] is not self._locals[i])
        yield from self._rounded(rest)

    def for_kernels(
        self, indices: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], list[Tensor], list[Tensor | None] | None]]:
        """As :meth:`writable`, for kernels that update masters and store their rounded copies in one pass.

        Portions of indices, parameters and masters. Entries of the masters, or all of them, may be ``None``: the
        parameter is then an fp32 tensor, to be updated itself.
        """
        direct, rest = self._by_way(indices)
        if direct:
            copied = [self._locals[i].is_contiguous() and "master" in self.states[i] for i in direct]
            params = [self._locals[i] if there else self.weights[i] for i, there in zip(direct, copied)]
            masters = [self.weights[i] if there else None for i, there in zip(direct, copied)]
            yield direct, params, masters if any(copied) else None
            self._store(i for i, param in zip(direct, params) if param is not self._locals[i])
        for portion, weights in self._rounded(rest):
            yield portion, weights, None

    def _by_way(self, indices: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Those of the indices whose weights are fp32, and the others."""
        wanted = list(range(len(self)) if indices is None else indices)
        direct = [i for i in wanted if self.weights[i].dtype is torch.float32]
        return direct, wanted if not direct else [i for i in wanted if self.weights[i].dtype is not torch.float32]

    def _store(self, indices: Iterable[int]) -> None:
        """Give the parameters their weights."""
        stale = list(indices)
        if stale:
            torch._foreach_copy_([self._locals[i] for i in stale], [self.weights[i] for i in stale])

    def _rounded(self, indices: Sequence[int]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Copies in fp32 of weights without a master, in portions. Each is rounded into its weight afterwards."""
        sizes = [self.weights[i].numel() for i in indices]
        portion: list[int] = []
        total = 0
        for n, i in enumerate(indices):
            portion.append(i)
            total += sizes[n]
            if n + 1 < len(indices) and total + sizes[n + 1] <= _SPAN:
                continue
            weights = [self.weights[j].float() for j in portion]
            yield portion, weights
            for j, weight in zip(portion, weights):
                logical = self.logical_params[j]
                rounded = round_stochastically(weight, logical.where, self._locals[j].dtype, self._seed(logical))
                self._locals[j].copy_(rounded)
            portion, total = [], 0

    def _seed(self, logical: LogicalParam) -> int:
        """Differs between a parameter's steps, and between parameters."""
        return self.step * 0x9E3779B1 + logical.number


def sync_masters(states: Iterable[Mapping[str, Any]], locals_: Iterable[Tensor]) -> None:
    """Give each master whose rounded value is not its parameter the parameter's value."""
    for entry, local in zip(states, locals_):
        if "master" in entry:
            master, here = entry["master"], local.to(entry["master"].device)
            torch.where(master.to(here.dtype) == here, master, here.float(), out=master)

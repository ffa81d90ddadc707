"""What a rule works on: some matrices of one parameter group, with their gradients, weights and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .matrix import Matrix
from .rounding import round_stochastically

HALF = (torch.float16, torch.bfloat16)
_SPAN = 1 << 24
"""How many elements of weights without masters have an fp32 copy at a time, or one matrix if it is larger."""


class Batch:
    """The matrices of one parameter group that are at the same step and on the same device.

    There is at least one, and all lists have one entry per matrix. Tensors are this rank's parts, some of them
    perhaps empty.

    Attributes:
        matrices: the logical tensors.
        options: the group's options.
        step: the number of this step, counted from 1.
        grads: contiguous, fp32 or half precision, multiplied by the loss scale. Only read them; zero_grad may be
            called as soon as the step is over.
        grad_scale: what the gradients have been multiplied by.
        grad_factor: what they are to be multiplied by besides, such as a clip coefficient: 0-dim fp32 on their
            device; or ``None``.
        found_inf: of an optimizer that ``takes_found_inf``: nothing may change if it is not zero. 0-dim fp32 on the
            device; or ``None``.
        weights: the weights to compute with, contiguous: fp32 masters, or the parameters themselves. Read them
            here; write them through :meth:`writable`.
        kept: what a rule keeps for later steps of a batch of the same matrices, none of it of a gradient.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
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
        self.matrices = matrices
        self.options = options
        self.step = step
        self.grads = grads
        self.grad_scale = grad_scale
        # It is on the device that the ranks communicate on; offloaded gradients are in host memory.
        self.grad_factor = None if grad_factor is None else grad_factor.to(grads[0].device)
        self.found_inf = found_inf
        self.states = states
        self.kept = kept
        self._cache = cache
        self._locals = locals_
        self.weights = [entry["master"] if "master" in entry else t.contiguous() for entry, t in zip(states, locals_)]

    @property
    def device(self) -> torch.device:
        """On which everything is."""
        return self.weights[0].device

    def __len__(self) -> int:
        return len(self.matrices)

    def state(self, key: str, indices: Sequence[int] | None = None) -> list[Tensor]:
        """The state tensors under ``key``, of all matrices or of some."""
        return [self.states[i][key] for i in (range(len(self)) if indices is None else indices)]

    def scratch(self) -> list[Tensor] | None:
        """Memory of the weights' shapes, fp32, for what one pass over a batch leaves to the next.

        ``None`` where the batch does not stay in a cache meanwhile.
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
        """A matrix's gradient in fp32, without the loss scale and with ``grad_factor``. Only read it."""
        grad = self.grads[i].float()
        if self.grad_scale != 1:
            grad = grad / self.grad_scale
        if self.grad_factor is not None:
            grad = grad * self.grad_factor
        return grad

    def writable(self, indices: Sequence[int] | None = None) -> Iterator[tuple[list[int], list[Tensor]]]:
        """The weights, to be updated in place: fp32 tensors, in portions of indices and weights.

        Parameters in half precision get their weight, rounded, when the loop goes on to the next portion: a master
        is rounded to nearest, a weight without a master stochastically. Most often there is one portion. To be
        iterated to its end::

            for indices, weights in batch.writable():
                for i, weight in zip(indices, weights):
                    weight.sub_(updates[i])
        """
        direct, rest = self._by_way(indices)
        if direct:
            yield direct, [self.weights[i] for i in direct]
            self._store(i for i in direct if self.weights[i] is not self._locals[i])
        yield from self._rounded(rest)

    def for_kernels(
        self, indices: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], list[Tensor], list[Tensor | None] | None]]:
        """As :meth:`writable`, for kernels that update masters and store their rounded copies in one pass.

        Portions of indices, parameters and masters: entries of these, or all of them, may be ``None``, and then the
        parameter is an fp32 tensor that is itself to be updated.
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
        """Copies in fp32 of weights without a master, in portions, which are rounded into them afterwards."""
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
                matrix = self.matrices[j]
                rounded = round_stochastically(weight, matrix.where, self._locals[j].dtype, self._seed(matrix))
                self._locals[j].copy_(rounded)
            portion, total = [], 0

    def _seed(self, matrix: Matrix) -> int:
        """Differs between a parameter's steps, and between parameters."""
        return self.step * 0x9E3779B1 + matrix.number


def sync_masters(states: Iterable[Mapping[str, Any]], locals_: Iterable[Tensor]) -> None:
    """Give the masters whose rounded value is not their parameter the value of that."""
    for entry, local in zip(states, locals_):
        if "master" in entry:
            master, here = entry["master"], local.to(entry["master"].device)
            torch.where(master.to(here.dtype) == here, master, here.float(), out=master)

"""Second moments kept as row and column statistics, of tensors of which each rank may hold a part.

[Note: factored averages of parts]
    Of a matrix (R x C) of squares, Adafactor and CAME keep r, the average over time of the mean of each row, and c,
    of each column, and take rᵢ·cⱼ / mean(r) for the average of an element. Of a tensor with more dimensions, the last
    two are matrices, each by itself. What a rank has of a matrix gives it parts of the sums:

    - r needs sums over the columns of others, where columns are cut, and is then that of this rank's rows;
    - c needs sums over the rows of others, where rows are cut;
    - mean(r), of all rows, is decay·mean(r before) + (1-decay)·mean(squares). Both means are sums of what is there
      before anything has been communicated, so they travel with the sums above, in one round. The first is summed
      over the cuts of rows only: ranks that hold other columns of the same rows have the same r.

    A vector (C) of squares is a matrix of one row of which no dimension is averaged: rᵢ / mean(r) is 1 and c is the
    average of the vector itself. So vectors and numbers go through the same kernels as matrices, in the same calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer
from .matrix import Matrix
from .requests import Rule, Sum
from .state_layout import StateTensor, column_statistic, like_parameter, row_statistic


def is_factored(shape: Sequence[int]) -> bool:
    """Whether a parameter of the global ``shape`` has rows and columns."""
    return len(shape) >= 2


def factored_layout(name: str, shape: tuple[int, ...]) -> dict[str, StateTensor]:
    """The state of the averages ``name`` of a parameter of the global ``shape``."""
    if is_factored(shape):
        return {f"{name}_row": row_statistic(shape), f"{name}_col": column_statistic(shape)}
    return {name: like_parameter(shape)}


class Parts:
    """Tensors of a batch as matrices, (\\*, R, C): those that are, and then vectors and numbers as single rows.

    Args:
        batch: the batch.
        chosen: of which of its matrices; by default of all.

    Attributes:
        batch: the batch.
        order: indices of the batch in the order of the lists here.
        count: how many are matrices.
        matrices, grads: as in the batch, in this order; the gradients as matrices.
        scaling: ``grad_scale`` and ``grad_factor``, for the kernels.
    """

    def __init__(self, batch: Batch, chosen: Sequence[int] | None = None) -> None:
        self.batch = batch
        wanted = range(len(batch)) if chosen is None else chosen
        matrices = [i for i in wanted if is_factored(batch.matrices[i].where.shape)]
        vectors = [i for i in wanted if not is_factored(batch.matrices[i].where.shape)]
        self.order = matrices + vectors
        self.count = len(matrices)
        self.matrices: list[Matrix] = batch.pick(batch.matrices, self.order)
        self.grads = _as_matrices(batch.pick(batch.grads, self.order))
        factor = batch.grad_factor
        self.scaling: Mapping[str, Any] = {
            "grad_scale": batch.grad_scale,
            "grad_factor": None if factor is None else factor.to(batch.device),
        }

    def halves(self) -> tuple[Parts, Parts]:
        """Two with about half of the elements each."""
        half = sum(g.numel() for g in self.grads) / 2
        before = itertools.accumulate((g.numel() for g in self.grads), initial=0)
        first = [i for i, start in zip(self.order, before) if start < half]
        return Parts(self.batch, first), Parts(self.batch, self.order[len(first) :])

    def state(self, key: str) -> list[Tensor]:
        """State tensors of the parameters' shapes, as matrices."""
        return _as_matrices(self.batch.state(key, self.order))

    def averages(self, name: str, of_vectors: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """The state's row and column averages under ``name``, of matrices and, if they are kept, of vectors.

        A vector's column average is its own, and its row average one that nobody keeps.
        """
        matrices, vectors = self.order[: self.count], self.order[self.count :] if of_vectors else []
        rows = self.batch.state(f"{name}_row", matrices) + [torch.zeros(1, device=self.batch.device) for _ in vectors]
        return rows, self.batch.state(f"{name}_col", matrices) + _flat(self.batch.state(name, vectors))

    def for_kernels(self) -> Iterator[tuple[list[int], list[Tensor], list[Tensor | None] | None]]:
        """As the batch's, with places in the lists here for indices, and parameters and masters as matrices."""
        place = {i: n for n, i in enumerate(self.order)}
        for indices, params, masters in self.batch.for_kernels(self.order):
            if masters is not None:
                masters = [None if m is None else _as_matrices([m])[0] for m in masters]
            yield [place[i] for i in indices], _as_matrices(params), masters

    def root_mean_squares(self, sums: Sequence[Tensor]) -> Tensor:
        """From the sum of squares (0-dim) of each whole tensor: fp32, of shape (matrices,)."""
        return torch.stack(
            torch._foreach_mul(list(sums), [1 / max(1, math.prod(m.where.shape)) for m in self.matrices])
        ).sqrt()

    def update_weights(
        self,
        grads: list[Tensor],
        average: FactoredAverage,
        step_sizes: Tensor,
        decay_factors: Tensor | None,
        exp_avgs: list[Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Call :func:`bmt_kernels.factored_update`, with the factors of ``average``, on all weights.

        Args:
            grads, exp_avgs: matrices in the order of ``self``.
            step_sizes, decay_factors: fp32, of shape (matrices,).
            options: further ones of the kernel.
        """
        for chosen, params, masters in self.for_kernels():
            bmt_kernels.factored_update(
                params,
                self.batch.pick(grads, chosen),
                self.batch.pick(average.row_factors, chosen),
                self.batch.pick(average.col_factors, chosen),
                _entries(step_sizes, chosen),
                decay_factors=None if decay_factors is None else _entries(decay_factors, chosen),
                exp_avgs=None if exp_avgs is None else self.batch.pick(exp_avgs, chosen),
                masters=masters,
                **options,
            )


class FactoredOptimizer(DistributedOptimizer):
    """An optimizer with factored averages, whose step has a way for matrices of one rank, and one for those of many."""

    def rule(self, batch: Batch) -> Rule:
        whole, cut = batch.by_division()
        alone = Parts(batch, whole)
        if cut:
            yield from self.step_together(Parts(batch, cut), alone)
        else:
            yield []
            self.step_alone(alone)

    def step_together(self, parts: Parts, alone: Parts) -> Rule:
        """The step of matrices that are cut between ranks, and ``step_alone`` in the meantime."""
        raise NotImplementedError

    def step_alone(self, parts: Parts) -> None:
        """The step of matrices, perhaps none, that this rank holds as a whole."""
        raise NotImplementedError


class FactoredAverage:
    """Row and column averages of squares within a step.

    A kernel writes sums of squares into ``row_sums`` and ``col_sums``, the ranks add up what :meth:`requests` asks
    for, and :meth:`update` moves the averages and makes factors of them, of which the products are 1/√average.

    Args:
        parts: of what.
        name: of the averages in the state.
        of_vectors: whether those of vectors are kept, too. If not, their factors are 1.

    Attributes:
        row_sums, col_sums: fp32, (\\*, R) and (\\*, C) of this rank, not initialized.
        row_factors, col_factors: the same shapes, after :meth:`update`.
    """

    def __init__(self, parts: Parts, name: str, of_vectors: bool = True) -> None:
        batch, count = parts.batch, parts.count
        self._matrices = parts.matrices[:count]
        self._rows = batch.state(f"{name}_row", parts.order[:count])
        self._cols = batch.state(f"{name}_col", parts.order[:count])
        if of_vectors:
            self._cols += _flat(batch.state(name, parts.order[count:]))
        self.row_sums = _empty([g.shape[:-1] for g in parts.grads], batch.device)
        self.col_sums = _empty([(*g.shape[:-2], g.shape[-1]) for g in parts.grads], batch.device)
        self.row_factors: list[Tensor] = []
        self.col_factors: list[Tensor] = []

    def requests(self) -> list[Sum]:
        """What to ask for once the sums are there."""
        count = len(self._matrices)
        sums = _totals([*self.row_sums[:count], *self._rows])
        return [
            Sum(self.row_sums[:count], self._matrices, (-1,)),
            Sum(self.col_sums[:count], self._matrices, (-2,)),
            Sum(sums[:count], self._matrices, (-2, -1)),
            Sum(sums[count:], self._matrices, (-2,)),
        ]

    def update(self, results: Sequence[list[Tensor]], decay: float) -> None:
        """Move the averages: average ← decay·average + (1-decay)·mean.

        Args:
            results: of the requests, for whole rows, columns and matrices.
        """
        row_sums, col_sums, totals, before = results
        count = len(self._matrices)
        heights = [max(1, m.where.shape[-2]) for m in self._matrices]
        widths = [max(1, m.where.shape[-1]) for m in self._matrices]
        _average(self._rows, row_sums, widths, decay)
        vectors = self.col_sums[count : len(self._cols)]
        _average(self._cols, [*col_sums, *vectors], heights + [1] * len(vectors), decay)
        row_factors, col_factors = [], _flat(self._cols)
        if count:
            old = torch._foreach_mul(before, [decay / h for h in heights])
            new = torch._foreach_mul(totals, [(1 - decay) / (h * w) for h, w in zip(heights, widths)])
            means = torch._foreach_add(old, new)
            each = _flat([m.unsqueeze(-1).expand(r.shape) for m, r in zip(means, self._rows)])
            quotients = torch.cat(_flat(self._rows)).div_(torch.cat(each))
            row_factors = list(quotients.rsqrt_().split([r.numel() for r in self._rows]))
        if col_factors:
            col_factors = list(torch.cat(col_factors).rsqrt_().split([c.numel() for c in col_factors]))
        missing = max((c.numel() for c in self.col_sums[count:]), default=0)
        ones = torch.ones(max(1, missing), device=self.row_sums[0].device)
        row_factors += [ones[:1]] * (len(self.row_sums) - count)
        col_factors += [ones[: c.numel()] for c in self.col_sums[len(col_factors) :]]
        self.row_factors = _shaped(row_factors, [s.shape for s in self.row_sums])
        self.col_factors = _shaped(col_factors, [s.shape for s in self.col_sums])


def _as_matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of contiguous tensors."""
    return [t if t.dim() >= 2 else t.view(1, -1) for t in tensors]


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of their elements. What is a vector stays as it is, here and in `_shaped`: a view costs time, too."""
    return [t if t.dim() == 1 else t.reshape(-1) for t in tensors]


def _shaped(vectors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [v if len(shape) == 1 else v.view(shape) for v, shape in zip(vectors, shapes)]


def _empty(shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """fp32 tensors, end to end in one buffer."""
    sizes = [math.prod(shape) for shape in shapes]
    return _shaped(torch.empty(sum(sizes), device=device).split(sizes), shapes)


def _average(averages: list[Tensor], sums: Sequence[Tensor], counts: Sequence[int], decay: float) -> None:
    """average ← decay·average + (1-decay)·sum/count"""
    if averages:
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, torch._foreach_mul(list(sums), [(1 - decay) / n for n in counts]))


def _totals(statistics: list[Tensor]) -> list[Tensor]:
    """The sums over the last dimension of numbers that are not negative: (\\*, R) to (\\*)."""
    vectors = [s for s in statistics if s.dim() == 1]
    found = iter(torch._foreach_norm(vectors, 1) if vectors else [])
    return [next(found) if s.dim() == 1 else s.sum(-1) for s in statistics]


def _entries(vector: Tensor, chosen: Sequence[int]) -> Tensor:
    """Those entries of a vector on the device, without indices that would have to get there."""
    if len(chosen) == len(vector) and list(chosen) == list(range(len(vector))):
        return vector
    entries = vector.unbind()
    return torch.stack([entries[n] for n in chosen])

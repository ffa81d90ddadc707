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

    def root_mean_squares(self, sums: Tensor) -> Tensor:
        """From the sum of squares of each whole tensor: fp32, of shape (matrices,), as what is returned."""
        counts = [1 / max(1, math.prod(m.where.shape)) for m in self.matrices]
        return torch.stack(torch._foreach_mul(sums.unbind(), counts)).sqrt()

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
                self.batch.pick(average.rows, chosen),
                self.batch.pick(average.cols, chosen),
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

    A kernel writes sums of squares into ``rows`` and ``cols``, the ranks add up what :meth:`requests` asks for, and
    :meth:`update` moves the averages and puts factors in the place of the sums, of which the products are 1/√average.

    Args:
        parts: of what.
        name: of the averages in the state.
        of_vectors: whether those of vectors are kept, too. If not, their factors are 1.

    Attributes:
        rows, cols: fp32, (\\*, R) and (\\*, C) of this rank, not initialized.
    """

    def __init__(self, parts: Parts, name: str, of_vectors: bool = True) -> None:
        batch, count = parts.batch, parts.count
        self._matrices = parts.matrices[:count]
        self._row_averages = batch.state(f"{name}_row", parts.order[:count])
        self._col_averages = batch.state(f"{name}_col", parts.order[:count])
        if of_vectors:
            self._col_averages += _flat(batch.state(name, parts.order[count:]))
        self._heights = [max(1, m.where.shape[-2]) for m in self._matrices]
        self._widths = [max(1, m.where.shape[-1]) for m in self._matrices]
        self._all_rows, self.rows = _end_to_end([g.shape[:-1] for g in parts.grads], batch.device)
        self._all_cols, self.cols = _end_to_end([(*g.shape[:-2], g.shape[-1]) for g in parts.grads], batch.device)

    def requests(self) -> list[Sum]:
        """What to ask for once the sums are there."""
        count = len(self._matrices)
        row_sizes, col_sizes = [a.numel() for a in self._row_averages], [a.numel() for a in self._col_averages[:count]]
        batches = [a.shape[:-1].numel() for a in self._row_averages]
        rows, cols = self._all_rows[: sum(row_sizes)], self._all_cols[: sum(col_sizes)]
        totals, before = rows.new_empty(2, sum(batches)).unbind()
        bmt_kernels.factored_totals(self._row_averages, rows, totals, before)
        return [
            Sum(rows, self._matrices, (-1,), row_sizes),
            Sum(cols, self._matrices, (-2,), col_sizes),
            Sum(totals, self._matrices, (-2, -1), batches),
            Sum(before, self._matrices, (-2,), batches),
        ]

    def update(self, results: Sequence[Tensor], decay: float) -> None:
        """Move the averages: average ← decay·average + (1-decay)·mean.

        Args:
            results: of the requests, for whole rows, columns and matrices.
        """
        rows, cols, totals, before = results
        vectors = self._col_averages[len(self._matrices) :]
        if vectors:
            own = self._all_cols[cols.numel() : cols.numel() + sum(v.numel() for v in vectors)]
            cols = torch.cat([cols, own])
        bmt_kernels.factored_averages(
            self._row_averages,
            self._col_averages,
            rows,
            cols,
            totals,
            before,
            self._all_rows,
            self._all_cols,
            heights=self._heights + [1] * len(vectors),
            widths=self._widths,
            decay=decay,
        )


def _as_matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of contiguous tensors."""
    return [t if t.dim() >= 2 else t.view(1, -1) for t in tensors]


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of their elements. What is a vector stays as it is: a view costs time, too."""
    return [t if t.dim() == 1 else t.reshape(-1) for t in tensors]


def _end_to_end(shapes: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A new fp32 vector, and tensors of ``shapes`` in it, one after the other."""
    sizes = [math.prod(shape) for shape in shapes]
    vector = torch.empty(sum(sizes), device=device)
    return vector, [v if len(shape) == 1 else v.view(shape) for v, shape in zip(vector.split(sizes), shapes)]


def _entries(vector: Tensor, chosen: Sequence[int]) -> Tensor:
    """Those entries of a vector on the device, without indices that would have to get there."""
    if len(chosen) == len(vector) and list(chosen) == list(range(len(vector))):
        return vector
    entries = vector.unbind()
    return torch.stack([entries[n] for n in chosen])

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

    Of packed experts a rank may hold some rows of one expert, then whole experts, and then some rows of another. Each
    of the three is an entry of its own for the kernels. Sums of columns, and both means, are then sums over the ranks
    that hold other rows of the same expert; they are sent for all experts, with zeros for those that this rank has not.

    A vector (C) of squares is a matrix of one row of which no dimension is averaged: rᵢ / mean(r) is 1 and c is the
    average of the vector itself. So vectors and numbers go through the same kernels as matrices, in the same calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer
from .experts import Pieces, expert_pieces, experts_of
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

    Lists have an entry per tensor, or, of packed experts that are cut inside of an expert, several: see the note.

    Args:
        batch: the batch.
        chosen: of which of its matrices; by default of all.

    Attributes:
        batch: the batch.
        order: indices of the batch in the order of ``matrices``.
        count: how many of these have rows and columns.
        matrices: as in the batch, in this order.
        grads: a gradient per entry, as a matrix.
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
        self._pieces = [expert_pieces(m.where) for m in self.matrices]
        self._owners = [n for n, pieces in enumerate(self._pieces) for _ in pieces or (None,)]
        self.grads = _as_matrices(batch.pick(batch.grads, self.order), self._pieces)
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
        """State tensors of the parameters' shapes, as matrices, one per entry."""
        return _as_matrices(self.batch.state(key, self.order), self._pieces)

    def factored_state(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """The row averages, (\\*, R), and the column averages, (\\*, C), of each entry that has them."""
        rows, cols = (self.batch.state(f"{name}_{kind}", self.order[: self.count]) for kind in ("row", "col"))
        return (
            _split(rows, self._pieces, lambda piece, _: piece),
            _split(cols, self._pieces, lambda piece, col: (piece[0], col.shape[-1])),
        )

    def sizes(self) -> tuple[list[int], list[int]]:
        """The rows and the columns, over all ranks, of the matrices of each entry that has them."""
        shapes = [self.matrices[n].where.shape for n in self._owners if n < self.count]
        return [max(1, shape[-2]) for shape in shapes], [max(1, shape[-1]) for shape in shapes]

    def per_matrix(self, values: Tensor) -> Tensor:
        """The sums of the entries' values, (entries,), by matrix: (matrices,)."""
        if len(self._owners) == len(self.matrices):
            return values
        index = torch.tensor(self._owners, device=values.device)
        return values.new_zeros(len(self.matrices)).index_add_(0, index, values)

    def per_entry(self, values: Tensor) -> Tensor:
        """The matrices' values, (matrices,), by entry: (entries,)."""
        return values if len(self._owners) == len(self.matrices) else _entries(values, self._owners)

    def averages(self, name: str, of_vectors: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """The state's row and column averages under ``name``, of matrices and, if they are kept, of vectors.

        A vector's column average is its own, and its row average one that nobody keeps.
        """
        vectors = self.order[self.count :] if of_vectors else []
        rows, cols = self.factored_state(name)
        rows = rows + [torch.zeros(1, device=self.batch.device) for _ in vectors]
        return rows, cols + _flat(self.batch.state(name, vectors))

    def for_kernels(self) -> Iterator[tuple[list[int], list[Tensor], list[Tensor | None] | None]]:
        """As the batch's, with numbers of entries for indices, and parameters and masters as matrices."""
        place = {i: n for n, i in enumerate(self.order)}
        entries: dict[int, list[int]] = {}
        for entry, n in enumerate(self._owners):
            entries.setdefault(n, []).append(entry)
        for indices, params, masters in self.batch.for_kernels(self.order):
            places = [place[i] for i in indices]
            pieces = [self._pieces[n] for n in places]
            yield (
                [entry for n in places for entry in entries[n]],
                _as_matrices(params, pieces),
                None if masters is None else _as_matrices(masters, pieces),
            )

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
        batch = parts.batch
        self._matrices = parts.matrices[: parts.count]
        # Where rows are counted along two dimensions: the experts of which this rank holds rows, of how many.
        self._experts = {
            n: (experts_of(m.where), m.where.tp_shard_shape[0])
            for n, m in enumerate(self._matrices)
            if m.where.row_dims == 2
        }
        rows, cols = (batch.state(f"{name}_{kind}", parts.order[: parts.count]) for kind in ("row", "col"))
        self._row_sizes, self._col_widths = [r.numel() for r in rows], [c.shape[-1] for c in cols]
        self._batch_sizes = [c.shape[:-1].numel() for c in cols]
        self._row_averages, self._col_averages = parts.factored_state(name)
        self._count = len(self._row_averages)
        if of_vectors:
            self._col_averages = self._col_averages + _flat(batch.state(name, parts.order[parts.count :]))
        self._heights, self._widths = parts.sizes()
        self._all_rows, self.rows = _end_to_end([g.shape[:-1] for g in parts.grads], batch.device)
        self._all_cols, self.cols = _end_to_end([(*g.shape[:-2], g.shape[-1]) for g in parts.grads], batch.device)

    def requests(self) -> list[Sum]:
        """What to ask for once the sums are there."""
        rows = self._all_rows[: sum(self._row_sizes)]
        cols = self._all_cols[: sum(a.numel() for a in self._col_averages[: self._count])]
        totals, before = rows.new_empty(2, sum(self._batch_sizes)).unbind()
        bmt_kernels.factored_totals(self._row_averages, rows, totals, before)
        ones = [1] * len(self._matrices)
        return [
            Sum(rows, self._matrices, (-1,), self._row_sizes),
            self._over_experts(cols, (-2,), self._col_widths),
            self._over_experts(totals, (-2, -1), ones),
            self._over_experts(before, (-2,), ones),
        ]

    def _over_experts(self, values: Tensor, over: tuple[int, ...], widths: Sequence[int]) -> Sum:
        """The request for sums of ``widths`` numbers per matrix of a batch; those of other ranks' experts are zeros."""
        parts = list(values.split([n * width for n, width in zip(self._batch_sizes, widths)]))
        for n, (experts, count) in self._experts.items():
            parts[n] = nn.functional.pad(parts[n], (experts.start * widths[n], (count - experts.stop) * widths[n]))
        if self._experts:
            values = torch.cat(parts)
        return Sum(values, self._matrices, over, [p.numel() for p in parts])

    def _of_own_experts(self, sums: Tensor, widths: Sequence[int]) -> Tensor:
        """Of the answer to such a request, what this rank holds rows of."""
        if not self._experts:
            return sums
        counts = [self._experts[n][1] if n in self._experts else size for n, size in enumerate(self._batch_sizes)]
        parts = list(sums.split([n * width for n, width in zip(counts, widths)]))
        for n, (experts, _) in self._experts.items():
            parts[n] = parts[n][experts.start * widths[n] : experts.stop * widths[n]]
        return torch.cat(parts)

    def update(self, results: Sequence[Tensor], decay: float) -> None:
        """Move the averages: average ← decay·average + (1-decay)·mean.

        Args:
            results: of the requests, for whole rows, columns and matrices.
        """
        rows, cols, totals, before = results
        cols = self._of_own_experts(cols, self._col_widths)
        ones = [1] * len(self._matrices)
        totals, before = self._of_own_experts(totals, ones), self._of_own_experts(before, ones)
        vectors = self._col_averages[self._count :]
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


def _as_matrices(tensors: Sequence[Tensor | None], pieces: Sequence[Pieces]) -> list[Any]:
    """Views of contiguous tensors, (\\*, R, C), one per entry; ``None`` stays ``None``."""
    return [
        part if part is None or part.dim() >= 2 else part.view(1, -1)
        for part in _split(tensors, pieces, lambda piece, tensor: (*piece, tensor.shape[-1]))
    ]


def _split(
    tensors: Sequence[Any], pieces: Sequence[Pieces], shape: Callable[[tuple[int, int], Tensor], Sequence[int]]
) -> list[Any]:
    """A tensor per entry: for each piece, a view of that shape."""
    if not any(pieces):
        return list(tensors)
    parts: list[Tensor | None] = []
    for tensor, cuts in zip(tensors, pieces):
        if cuts is None or tensor is None:
            parts += [tensor] * len(cuts or (None,))
            continue
        shapes = [tuple(shape(piece, tensor)) for piece in cuts]
        flat = tensor.view(-1).split([math.prod(s) for s in shapes])
        parts += [part.view(s) for part, s in zip(flat, shapes)]
    return parts


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

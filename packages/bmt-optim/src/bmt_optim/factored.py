"""Second moments as row and column statistics of sharded tensors.

[Note: factored averages of shards]
    For a matrix (R x C) of squares, Adafactor and CAME keep r, the average over time of the mean of each row, and c,
    that of each column. They estimate the average of an element by rᵢ·cⱼ / mean(r). In a tensor with more dimensions,
    the last two are matrices, each with its own statistics. The shard of a matrix that a rank holds gives it parts of
    the sums:

    - r needs sums over other ranks' columns where columns are sharded, and is then that of this rank's rows;
    - c needs sums over other ranks' rows where rows are sharded;
    - mean(r), of all rows, is decay·mean(r before) + (1-decay)·mean(squares). Both means are sums of what is there
      before any communication, so they are sent with the sums above, in one round. The first is summed over the ranks
      that shard rows only: ranks that hold other columns of the same rows have the same r.

    Of packed experts a rank may hold some rows of one expert, complete experts, and some rows of another. Each of the
    three is an entry of its own for the kernels. Sums of columns, and both means, are then sums over the ranks that
    hold other rows of the same expert. They are sent for all experts, with zeros for those that this rank does not
    have.

    A vector (C) of squares is treated as a matrix of one row, of which no dimension is averaged: rᵢ / mean(r) is 1 and
    c is the average of the vector itself. So vectors and numbers go through the same kernels as matrices, in the same
    calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import bmt_kernels

from .batch import Batch
from .experts import ExpertBlocks, expert_blocks, experts_of
from .logical_params import LogicalParam
from .requests import Sum
from .state_layout import StateTensor, column_statistic, like_parameter, row_statistic


def is_factored(shape: Sequence[int]) -> bool:
    """Whether a parameter of the global ``shape`` has rows and columns."""
    return len(shape) >= 2


def factored_layout(name: str, shape: tuple[int, ...]) -> dict[str, StateTensor]:
    """The state of the averages ``name`` of a parameter of the global ``shape``."""
    if is_factored(shape):
        return {f"{name}_row": row_statistic(shape), f"{name}_col": column_statistic(shape)}
    return {name: like_parameter(shape)}


class Plan:
    """What depends on the parameters of a batch alone: see :class:`Parts`. It is kept from step to step.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: Batch) -> None:
        matrices = [i for i, p in enumerate(batch.logical_params) if is_factored(p.where.shape)]
        vectors = [i for i, p in enumerate(batch.logical_params) if not is_factored(p.where.shape)]
        self.order = matrices + vectors
        self.count = len(matrices)
        self.logical_params: list[LogicalParam] = batch.pick(batch.logical_params, self.order)
        blocks = [expert_blocks(p.where) for p in self.logical_params]
        self.blocks = blocks if any(blocks) else None
        self.owners = [n for n, of_param in enumerate(blocks) for _ in of_param or (None,)]
        self.places: dict[int, list[int]] = {i: [] for i in self.order}
        for entry, n in enumerate(self.owners):
            self.places[self.order[n]].append(entry)
        # Of entries by parameter, which have at most three.
        apart = [3 * owner + self.owners[:entry].count(owner) for entry, owner in enumerate(self.owners)]
        self.places_apart = torch.tensor(apart, device=batch.device)
        counts = [1 / max(1, math.prod(p.where.shape)) for p in self.logical_params]
        self.inverse_counts = torch.tensor(counts, dtype=torch.float32, device=batch.device)
        self.averages: dict[str, FactoredAverage] = {}


class Parts:
    """Tensors of a batch as matrices, (\\*, R, C): first the matrices, then vectors and numbers as single rows.

    Lists have an entry per tensor. A tensor of packed experts that is sharded inside an expert has several: see the
    note.

    Args:
        batch: the batch.

    Attributes:
        batch: the batch.
        order: indices of the batch in the order of ``logical_params``.
        count: how many of these have rows and columns.
        logical_params: as in the batch, in this order.
        grads: a gradient per entry, as a matrix.
        scaling: ``grad_scale`` and ``grad_factor``, for the kernels.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        if "plan" not in batch.kept:
            batch.kept["plan"] = Plan(batch)
        self.plan: Plan = batch.kept["plan"]
        self.order, self.count = self.plan.order, self.plan.count
        self.logical_params = self.plan.logical_params
        self.grads = _as_matrices(batch.pick(batch.grads, self.order), self.plan.blocks)
        self.scaling: Mapping[str, Any] = {"grad_scale": batch.grad_scale, "grad_factor": batch.grad_factor}

    def average(self, name: str, of_vectors: bool = True) -> FactoredAverage:
        """The averages ``name`` of the state in this step.

        Args:
            of_vectors: whether those of vectors are kept, too. If not, their factors are 1.
        """
        if name not in self.plan.averages:
            self.plan.averages[name] = FactoredAverage(self, name, of_vectors)
        average = self.plan.averages[name]
        average.begin(self)
        return average

    def state(self, key: str) -> list[Tensor]:
        """State tensors of the parameters' shapes, as matrices, one per entry."""
        return _as_matrices(self.batch.state(key, self.order), self.plan.blocks)

    def factored_state(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """The row averages, (\\*, R), and the column averages, (\\*, C), of each entry that has them."""
        rows, cols = (self.batch.state(f"{name}_{kind}", self.order[: self.count]) for kind in ("row", "col"))
        return (
            _split(rows, self.plan.blocks, lambda block, _: block),
            _split(cols, self.plan.blocks, lambda block, col: (block[0], col.shape[-1])),
        )

    def sizes(self) -> tuple[list[int], list[int]]:
        """The rows and the columns, over all ranks, of the matrices of each entry that has them."""
        shapes = [self.logical_params[n].where.shape for n in self.plan.owners if n < self.count]
        return [max(1, shape[-2]) for shape in shapes], [max(1, shape[-1]) for shape in shapes]

    def per_param(self, values: Tensor) -> Tensor:
        """The sums of the entries' values, (entries,), by parameter: (parameters,)."""
        if len(self.plan.owners) == len(self.logical_params):
            return values
        apart = values.new_zeros(len(self.logical_params), 3)
        apart.view(-1)[self.plan.places_apart] = values
        return apart.sum(1)  # not index_add_: it has no fixed order on a GPU, and replicas must get the same bits

    def per_entry(self, values: Tensor) -> Tensor:
        """The parameters' values, (parameters,), by entry: (entries,)."""
        return values if len(self.plan.owners) == len(self.logical_params) else _entries(values, self.plan.owners)

    def for_kernels(self) -> Iterator[tuple[list[int], list[Tensor], list[Tensor | None] | None]]:
        """As ``batch.for_kernels``, with numbers of entries for indices, and parameters and masters as matrices."""
        places = self.plan.places
        for indices, params, masters in self.batch.for_kernels(self.order):
            blocks = self.plan.blocks and [self.plan.blocks[self.order.index(i)] for i in indices]
            yield (
                [entry for i in indices for entry in places[i]],
                _as_matrices(params, blocks),
                None if masters is None else _as_matrices(masters, blocks),
            )

    def root_mean_squares(self, sums: Tensor) -> Tensor:
        """The root mean square of each parameter from its sum of squares: fp32, (parameters,), both."""
        return (sums * self.plan.inverse_counts).sqrt_()

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
            step_sizes, decay_factors: fp32, of shape (entries,).
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


class FactoredAverage:
    """Row and column averages of squares within a step.

    A kernel writes sums of squares into ``rows`` and ``cols``. The ranks add up what :meth:`requests` asks for. Then
    :meth:`update` updates the averages, and replaces the sums by factors whose products are 1/√average.

    Args:
        parts, name, of_vectors: see :meth:`Parts.average`.

    Attributes:
        rows, cols: fp32, (\\*, R) and (\\*, C) of this rank, not initialized.
    """

    def __init__(self, parts: Parts, name: str, of_vectors: bool) -> None:
        batch = parts.batch
        self._name, self._of_vectors = name, of_vectors
        self._matrices = parts.logical_params[: parts.count]
        # For packed experts: the experts of which this rank holds rows, and the number of experts.
        self._experts = {
            n: (experts_of(p.where), p.where.tp_shard_shape[0])
            for n, p in enumerate(self._matrices)
            if p.where.row_dims == 2
        }
        rows, cols = (batch.state(f"{name}_{kind}", parts.order[: parts.count]) for kind in ("row", "col"))
        vectors = batch.state(name, parts.order[parts.count :]) if of_vectors else []
        self._row_sizes, self._col_widths = [r.numel() for r in rows], [c.shape[-1] for c in cols]
        self._batch_sizes = [c.shape[:-1].numel() for c in cols]
        self._col_sizes = [n * width for n, width in zip(self._batch_sizes, self._col_widths)]
        heights, self._widths = parts.sizes()
        self._heights = heights + [1] * len(vectors)
        self._all_rows, self.rows = _end_to_end([g.shape[:-1] for g in parts.grads], batch.device)
        self._all_cols, self.cols = _end_to_end([(*g.shape[:-2], g.shape[-1]) for g in parts.grads], batch.device)
        self._row_sums, self._col_sums = self._all_rows[: sum(self._row_sizes)], self._all_cols[: sum(self._col_sizes)]
        self._averaged = sum(self._col_sizes) + sum(v.numel() for v in vectors)
        self._totals, self._before = self._all_rows.new_empty(2, sum(self._batch_sizes)).unbind()

    def begin(self, parts: Parts) -> None:
        """Take the averages of the state."""
        self._row_averages, self._col_averages = parts.factored_state(self._name)
        if self._of_vectors:
            vectors = _flat(parts.batch.state(self._name, parts.order[parts.count :]))
            self._col_averages = self._col_averages + vectors

    def requests(self) -> list[Sum]:
        """The requests, once the sums are there."""
        bmt_kernels.factored_totals(self._row_averages, self._row_sums, self._totals, self._before)
        ones = [1] * len(self._matrices)
        return [
            Sum(self._row_sums, self._matrices, (-1,), self._row_sizes),
            self._over_experts(self._col_sums, (-2,), self._col_widths),
            self._over_experts(self._totals, (-2, -1), ones),
            self._over_experts(self._before, (-2,), ones),
        ]

    def _over_experts(self, values: Tensor, over: tuple[int, ...], widths: Sequence[int]) -> Sum:
        """The request for sums of ``widths`` numbers per matrix of a batch, with zeros for other ranks' experts."""
        sizes = [n * width for n, width in zip(self._batch_sizes, widths)]
        if not self._experts:
            return Sum(values, self._matrices, over, sizes)
        parts = list(values.split(sizes))
        for n, (experts, count) in self._experts.items():
            parts[n] = nn.functional.pad(parts[n], (experts.start * widths[n], (count - experts.stop) * widths[n]))
        return Sum(torch.cat(parts), self._matrices, over, [p.numel() for p in parts])

    def _of_own_experts(self, sums: Tensor, widths: Sequence[int]) -> Tensor:
        """The part of the answer to such a request for experts of which this rank holds rows."""
        if not self._experts:
            return sums
        counts = [self._experts[n][1] if n in self._experts else size for n, size in enumerate(self._batch_sizes)]
        parts = list(sums.split([n * width for n, width in zip(counts, widths)]))
        for n, (experts, _) in self._experts.items():
            parts[n] = parts[n][experts.start * widths[n] : experts.stop * widths[n]]
        return torch.cat(parts)

    def update(self, results: Sequence[Tensor], decay: float) -> None:
        """Update the averages: average ← decay·average + (1-decay)·mean.

        Args:
            results: of the requests, for logical rows, columns and matrices.
        """
        rows, cols, totals, before = results
        cols = self._of_own_experts(cols, self._col_widths)
        ones = [1] * len(self._matrices)
        totals, before = self._of_own_experts(totals, ones), self._of_own_experts(before, ones)
        if cols is not self._col_sums:
            self._col_sums.copy_(cols)
        bmt_kernels.factored_averages(
            self._row_averages,
            self._col_averages,
            rows,
            self._all_cols[: self._averaged],  # with the squares of vectors
            totals,
            before,
            self._all_rows,
            self._all_cols,
            heights=self._heights,
            widths=self._widths,
            decay=decay,
        )


def _as_matrices(tensors: Sequence[Tensor | None], blocks: Sequence[ExpertBlocks] | None) -> list[Any]:
    """Views of contiguous tensors, (\\*, R, C), one per entry; ``None`` stays ``None``."""
    return [
        part if part is None or part.dim() >= 2 else part.view(1, -1)
        for part in _split(tensors, blocks, lambda block, tensor: (*block, tensor.shape[-1]))
    ]


def _split(
    tensors: Sequence[Any],
    blocks: Sequence[ExpertBlocks] | None,
    shape: Callable[[tuple[int, int], Tensor], Sequence[int]],
) -> list[Any]:
    """A tensor per entry: for each block, a view of that shape."""
    if blocks is None:
        return list(tensors)
    parts: list[Tensor | None] = []
    for tensor, of_tensor in zip(tensors, blocks):
        if of_tensor is None or tensor is None:
            parts += [tensor] * len(of_tensor or (None,))
            continue
        shapes = [tuple(shape(block, tensor)) for block in of_tensor]
        flat = tensor.view(-1).split([math.prod(s) for s in shapes])
        parts += [part.view(s) for part, s in zip(flat, shapes)]
    return parts


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as vectors. A vector is returned as it is, because a view costs time."""
    return [t if t.dim() == 1 else t.reshape(-1) for t in tensors]


def _end_to_end(shapes: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A new fp32 vector, and tensors of ``shapes`` in it, one after the other."""
    sizes = [math.prod(shape) for shape in shapes]
    vector = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    return vector, [v if len(shape) == 1 else v.view(shape) for v, shape in zip(vector.split(sizes), shapes)]


def _entries(vector: Tensor, chosen: Sequence[int]) -> Tensor:
    """The chosen entries of a vector on the device, without copying indices to it."""
    if len(chosen) == len(vector) and list(chosen) == list(range(len(vector))):
        return vector
    entries = vector.unbind()
    return torch.stack([entries[n] for n in chosen])

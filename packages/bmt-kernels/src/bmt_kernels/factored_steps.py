"""Whole steps of Adafactor and CAME, for matrices that are here as a whole.

The passes of :mod:`bmt_kernels.factored`, with what lies between them. On the CPU they go matrix by matrix, so that the
later passes find in the caches what the first has read; elsewhere they are those passes over all matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels._compat import increment_version
from bmt_kernels._factored_tables import FactoredTensors, check_vector
from bmt_kernels._library import tracing
from bmt_kernels.factored import (
    _check_scalar,
    _number,
    factored_residual_square_sums,
    factored_square_sums,
    factored_update,
    factored_update_square_sum,
)
from bmt_kernels.factored_averages import factored_averages, factored_totals


def adafactor_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    row_averages: Sequence[Tensor],
    col_averages: Sequence[Tensor],
    *,
    lr: float,
    beta2: float,
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float = 0.0,
    exp_avgs: Sequence[Tensor] | None = None,
    beta1: float = 0.0,
    sizes: Tensor | None = None,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """Make a step of Adafactor.

    For each matrix of R rows and C columns, in fp32, with g = grad * grad_factor / grad_scale and RMS(x) the root of
    the mean of the squares::

        r = beta2 * r + (1 - beta2) * (mean of g^2 + eps[0] over every row)               row_averages
        c = beta2 * c + (1 - beta2) * (mean of g^2 + eps[0] over every column)            col_averages
        u = g / sqrt(r * c / mean(r))
        u = u / max(1, RMS(u) / clip_threshold)
        rate = lr * max(eps[1], RMS(p))            if sizes is given, else lr
        u = m = beta1 * m + (1 - beta1) * rate * u if exp_avgs are given, else rate * u
        p = p - rate * weight_decay * p - u

    A vector is a matrix of one row; what becomes of its row average is without meaning.

    Args:
        params: float32, bfloat16 or float16, each of its gradient's shape, contiguous. Written.
        grads: float32, bfloat16 or float16, each of shape (*batch, R, C): a matrix, or a batch of them. Only read.
        row_averages: float32, (*batch, R), contiguous. Written.
        col_averages: float32, (*batch, C), contiguous. Written.
        lr, beta2, eps, clip_threshold, weight_decay, beta1: as in the formula.
        exp_avgs: float32, each of its gradient's shape, contiguous. Written.
        sizes: float32, (len(grads),), contiguous: RMS(p) of each before the step, 0 of an empty one. Written.
        masters: as for `factored_update`.
        grad_scale, grad_factor: as for `factored_square_sums`.

    Raises:
        The same as `factored_square_sums`, for the same reasons.

    Source: Shazeer & Stern, arXiv:1804.04235, algorithms 4 and 5.
    """
    lr, beta1, settings = _settings(lr, beta1, beta2, eps[0], clip_threshold, weight_decay, grad_scale)
    least = _number("eps[1]", eps[1], 0.0)
    if exp_avgs is None and beta1 != 0.0:
        raise ValueError(f"beta1 is {beta1} without exp_avgs; pass the first moments, or leave beta1 at 0")
    scaling: dict[str, Any] = {"grad_scale": grad_scale, "grad_factor": grad_factor}
    if not tracing():
        lists = FactoredTensors(
            grads,
            params,
            exp_avgs,
            masters,
            row_sums=row_averages,
            col_sums=col_averages,
            vector=sizes,
            names={**_NAMES, "out": "sizes"},
        )
        device = lists.device()
        factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
        if sizes is not None:
            check_vector("sizes", sizes, len(grads), device)
            if not sizes.is_contiguous():
                raise ValueError(f"sizes has strides {sizes.stride()}; what is written to must be contiguous")
        rows = lists.pack(device)
        if not rows:
            return
        if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
            out = 0 if sizes is None else sizes.data_ptr()
            cpu.module.adafactor_step(cpu.variant, rows, settings, factor, least, out, torch.get_num_threads())
            _count_writes(params, masters, exp_avgs, row_averages, col_averages, None if sizes is None else [sizes])
            return
    with torch.no_grad():
        row_factors, col_factors = _square_factors(grads, row_averages, col_averages, beta2, eps[0], **scaling)
        clips = _clips(grads, row_factors, col_factors, clip_threshold, **scaling)
        rates = torch.full_like(clips, lr)
        if sizes is not None:
            weights = params if masters is None else [p if m is None else m for p, m in zip(params, masters)]
            norms = torch.stack(torch._foreach_norm([w.float() for w in weights], 2, torch.float64))
            sizes.copy_(norms / _counts(grads).sqrt())
            rates = rates * sizes.clamp(min=least)
        decays = 1 - weight_decay * rates
    factored_update(
        params,
        grads,
        row_factors,
        col_factors,
        rates / clips,
        decay_factors=decays,
        exp_avgs=exp_avgs,
        beta1=beta1,
        masters=masters,
        **scaling,
    )


def came_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    row_averages: Sequence[Tensor],
    col_averages: Sequence[Tensor],
    residual_row_averages: Sequence[Tensor] | None,
    residual_col_averages: Sequence[Tensor] | None,
    *,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float = 0.0,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """Make a step of CAME.

    For each matrix, as in `adafactor_step`::

        u = g / sqrt(r * c / mean(r)) / max(1, RMS(u) / clip_threshold)      r and c as there, with betas[1] and eps[0]
        m = betas[0] * m + (1 - betas[0]) * u                                                 exp_avgs
        R = betas[2] * R + (1 - betas[2]) * (mean of (u - m)^2 + eps[1] over every row)       residual_row_averages
        C = betas[2] * C + (1 - betas[2]) * (mean of (u - m)^2 + eps[1] over every column)    residual_col_averages
        p = p - lr * weight_decay * p - lr * m / sqrt(R * C / mean(R))

    or, where there are no residual averages (as of vectors), p = p - lr * weight_decay * p - lr * m.

    Args:
        params, grads, row_averages, col_averages, masters, grad_scale, grad_factor: as for `adafactor_step`.
        exp_avgs: float32, each of its gradient's shape, contiguous. Written.
        residual_row_averages: as row_averages, or None, for all matrices. Written.
        residual_col_averages: as col_averages, or None, for all matrices. Written.
        lr, betas, eps, clip_threshold, weight_decay: as in the formula.

    Raises:
        The same as `factored_square_sums`, for the same reasons.

    Source: Luo et al., arXiv:2307.02047, algorithm 2.
    """
    beta3 = _number("betas[2]", betas[2], 0.0, 1.0)
    lr, beta1, settings = _settings(lr, betas[0], betas[1], eps[0], clip_threshold, weight_decay, grad_scale)
    residual_eps = _number("eps[1]", eps[1], 0.0)
    if (residual_row_averages is None) != (residual_col_averages is None):
        raise ValueError("residual averages are there of rows or of columns only; pass both, or None for both")
    scaling: dict[str, Any] = {"grad_scale": grad_scale, "grad_factor": grad_factor}
    if not tracing():
        # Residual averages go where other operations have factors, whose shapes are the same.
        lists = FactoredTensors(
            grads,
            params,
            exp_avgs,
            masters,
            residual_row_averages,
            residual_col_averages,
            row_averages,
            col_averages,
            names={**_NAMES, "row_factors": "residual_row_averages", "col_factors": "residual_col_averages"},
        )
        device = lists.device()
        factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
        for name, averages in (("row", residual_row_averages), ("col", residual_col_averages)):
            for i, average in enumerate(averages or ()):
                if isinstance(average, Tensor) and not average.is_contiguous():
                    raise ValueError(
                        f"residual_{name}_averages[{i}] has strides {average.stride()}; "
                        "what is written to must be contiguous"
                    )
        rows = lists.pack(device)
        if not rows:
            return
        if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
            threads = torch.get_num_threads()
            cpu.module.came_step(cpu.variant, rows, settings, factor, beta3, residual_eps, threads)
            _count_writes(
                params, masters, exp_avgs, row_averages, col_averages, residual_row_averages, residual_col_averages
            )
            return
    with torch.no_grad():
        row_factors, col_factors = _square_factors(grads, row_averages, col_averages, betas[1], eps[0], **scaling)
        clips = _clips(grads, row_factors, col_factors, clip_threshold, **scaling)
        sums = _Sums(grads)
        factored_residual_square_sums(
            grads,
            row_factors,
            col_factors,
            1 / clips,
            exp_avgs,
            sums.rows,
            sums.cols,
            beta1=beta1,
            eps=residual_eps,
            **scaling,
        )
        if residual_row_averages is None or residual_col_averages is None:
            torch._foreach_zero_(sums.rows + sums.cols)
            torch._foreach_add_(sums.rows + sums.cols, 1.0)
        else:
            sums.become_factors(residual_row_averages, residual_col_averages, beta3)
        rates, decays = torch.full_like(clips, lr), torch.full_like(clips, 1 - lr * weight_decay)
    factored_update(params, exp_avgs, sums.rows, sums.cols, rates, decay_factors=decays, masters=masters)


_NAMES = {"row_sums": "row_averages", "col_sums": "col_averages"}


def _settings(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    clip_threshold: float,
    weight_decay: float,
    grad_scale: float,
) -> tuple[float, float, tuple[float, ...]]:
    """lr, beta1, and all numbers as csrc/cpu/factored_steps.cpp takes them."""
    lr, beta1 = _number("lr", lr, 0.0), _number("beta1", beta1, 0.0, 1.0)
    least = math.ulp(0.0)
    rest = (
        _number("beta2", beta2, 0.0, 1.0),
        _number("eps[0]", eps, 0.0),
        _number("clip_threshold", clip_threshold, least),
        _number("weight_decay", weight_decay, 0.0),
    )
    return lr, beta1, (1.0 / _number("grad_scale", grad_scale, least), lr, beta1, *rest)


def _count_writes(*lists: Sequence[Tensor | None] | None) -> None:
    for tensors in lists:
        if tensors is not None:
            increment_version([tensor for tensor in tensors if tensor is not None])


class _Sums:
    """Room for the sums of rows and of columns of all matrices, each end to end: what factors are found of at once.

    Matrices of one row, whose row factors are 1, come after the others, and empty ones last.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._order = sorted(range(len(grads)), key=lambda i: (grads[i].numel() == 0, grads[i].shape[-2] == 1))
        self._shapes = [grads[i].shape for i in self._order]
        rows, cols = [s[:-1] for s in self._shapes], [s[:-2] + s[-1:] for s in self._shapes]
        device = grads[0].device
        self._all_rows, self._all_cols = (
            torch.zeros(sum(s.numel() for s in shapes), device=device) for shapes in (rows, cols)
        )
        self.rows, self.cols = self._views(self._all_rows, rows), self._views(self._all_cols, cols)

    def _views(self, vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        parts = vector.split([shape.numel() for shape in shapes])
        views = {i: part.view(shape) for i, part, shape in zip(self._order, parts, shapes)}
        return [views[i] for i in range(len(views))]

    def become_factors(self, row_averages: Sequence[Tensor], col_averages: Sequence[Tensor], beta: float) -> None:
        """Move the averages, and put the factors that they give where the sums are."""
        there = [(i, shape) for i, shape in zip(self._order, self._shapes) if shape.numel()]
        if not there:
            return
        rows, cols = [row_averages[i] for i, _ in there], [col_averages[i] for i, _ in there]
        totals, before = self._all_rows.new_empty(2, sum(r.shape[:-1].numel() for r in rows))
        row_sums = self._all_rows[: sum(r.numel() for r in rows)]
        col_sums = self._all_cols[: sum(c.numel() for c in cols)]
        factored_totals(rows, row_sums, totals, before)
        heights, widths = ([shape[dim] for _, shape in there] for dim in (-2, -1))
        factored_averages(
            rows,
            cols,
            row_sums,
            col_sums,
            totals,
            before,
            self._all_rows,
            self._all_cols,
            heights=heights,
            widths=widths,
            decay=beta,
        )
        taller = sum(shape[:-1].numel() for _, shape in there if shape[-2] > 1)
        self._all_rows[taller:].fill_(1)


def _square_factors(
    grads: Sequence[Tensor],
    row_averages: Sequence[Tensor],
    col_averages: Sequence[Tensor],
    beta: float,
    eps: float,
    grad_scale: float,
    grad_factor: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Move the averages of squares; the factors that they give."""
    sums = _Sums(grads)
    factored_square_sums(grads, sums.rows, sums.cols, eps=eps, grad_scale=grad_scale, grad_factor=grad_factor)
    sums.become_factors(row_averages, col_averages, beta)
    return sums.rows, sums.cols


def _clips(
    grads: Sequence[Tensor],
    row_factors: Sequence[Tensor],
    col_factors: Sequence[Tensor],
    threshold: float,
    grad_scale: float,
    grad_factor: Tensor | None,
) -> Tensor:
    """max(1, RMS(u) / threshold) of each matrix."""
    totals = torch.empty(len(grads), device=grads[0].device)
    factored_update_square_sum(grads, row_factors, col_factors, totals, grad_scale=grad_scale, grad_factor=grad_factor)
    return ((totals / _counts(grads)).sqrt() / threshold).clamp(min=1)


def _counts(grads: Sequence[Tensor]) -> Tensor:
    """How many elements each has, at least 1: fp32, on their device."""
    made = _kept_counts.__wrapped__ if tracing() else _kept_counts
    return made(tuple(max(1, g.numel()) for g in grads), grads[0].device)


@functools.lru_cache(maxsize=64)
def _kept_counts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: what goes from the host to a GPU makes the host wait."""
    return torch.tensor(counts, dtype=torch.float32, device=device)

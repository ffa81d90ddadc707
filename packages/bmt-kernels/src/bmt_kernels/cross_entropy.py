"""Cross entropy of logits and class indices. It saves no further tensor of the logits' size for the backward.

The logits may be complete, or a column-wise shard: this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _library
from bmt_kernels._cross_entropy_parts import (
    Classes,
    checked_classes,
    differentiated_once,
    gradient,
    numbers_of,
    reduced,
    row_losses,
    statistics,
)
from bmt_kernels.reference.cross_entropy import computing_dtype

Gather = Callable[[Tensor], Tensor]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` for class indices, in one pass over the logits forward and one backward.

    For a row x with target t, class weights w (1 without `weight`) of sum W, V classes and smoothing e::

        loss = (1 - e) w_t (lse(x) - x_t) + e/V sum_j w_j (lse(x) - x_j)      lse(x) = log sum_j exp(x_j)
        dx_j = ((1 - e) w_t + e W/V) softmax(x)_j - e/V w_j - [j = t] (1 - e) w_t

    all in fp32. Forward keeps the logits themselves, the targets and two floats per row; backward makes one tensor,
    the gradient. Rows to be ignored are not read: whatever they hold, their loss and gradient are zero.

    Args:
        logits: (N, V); float32, bfloat16 or float16, or float64, which plain PyTorch serves in float64. Any strides;
            unless each row is contiguous they are copied.
        target: (N,), any integer dtype: a class, 0 to V - 1, or `ignore_index`.
        weight: (V,), a factor for each class; a constant for autograd.
        ignore_index: targets of this value add nothing, to the loss or to the mean's denominator.
        reduction: "none" for a loss per row, "sum", or "mean": the sum over the sum of the targets' weights. The mean
            over no targets is NaN.
        label_smoothing: how much of the target, in [0, 1], is spread evenly over all classes.
        inplace_backward: have backward write the gradient over the logits, which then takes no memory at all. The
            logits must be the result of an operation that does not need them for its own backward; autograd raises if
            it does. A second backward raises too. While torch.compile traces, this is ignored: it plans memory itself.

    Returns:
        The loss, () or (N,) for reduction "none"; float32, or float64 for float64 logits.

    Raises:
        TypeError: an argument is of a wrong type or dtype.
        ValueError: an unknown reduction, a number out of range, shapes or devices that do not match; with
            `inplace_backward`, logits that are a leaf or a view of one, or whose rows are not contiguous and apart.
        IndexError: a target is neither a class nor `ignore_index`. On CUDA the device asserts it instead, so that the
            host does not wait.
        RuntimeError: in backward: a second one with `inplace_backward`, or one to be differentiated again.
    """
    _check_logits(logits, target, inplace_backward)
    rows, size = logits.shape
    classes = checked_classes(logits, rows, target, weight, 0, size, ignore_index, label_smoothing, reduction)
    return _loss(logits, classes, None, reduction, inplace_backward)


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    gather: Gather,
    *,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """`cross_entropy` of logits that are sharded column-wise; every rank gets the same loss, to the bit.

    One small collective in forward and none in backward. The ranks' losses are copies of one loss: the gradient is
    that of the one loss with respect to this rank's columns.

    Args:
        logits: (N, V_local), columns `vocab_start` to ``vocab_start + V_local`` of the vocabulary; V_local may be 0.
        target: (N,), classes of the full vocabulary, the same on every rank.
        gather: the caller's all-gather. It is given this rank's statistics, a contiguous (K, N) tensor with K = 3, or 4
            with label smoothing (largest logit, sum of exponentials shifted by it, the target's logit or 0, weighted
            sum of the logits), and returns those of all ranks stacked in rank order, (ranks, K, N). float32, or
            float64 for float64 logits.
        vocab_start: the class of column 0.
        vocab_size: the number of classes on all ranks together.
        weight: (vocab_size,), not sharded.
        ignore_index, reduction, label_smoothing, inplace_backward: as for `cross_entropy`.

    Raises:
        As `cross_entropy` does; also ValueError if the columns do not lie within the vocabulary, or if `gather`
        returns another shape or dtype, or a tensor on another device.
    """
    _check_logits(logits, target, inplace_backward)
    rows, columns = logits.shape
    check_columns("logits", columns, vocab_start, vocab_size)
    classes = checked_classes(
        logits, rows, target, weight, vocab_start, vocab_size, ignore_index, label_smoothing, reduction
    )
    return _loss(logits, classes, gather, reduction, inplace_backward)


def check_columns(name: str, columns: int, start: int, size: int) -> None:
    """Raise unless a rank's columns lie within the vocabulary."""
    if start < 0 or start + columns > size:
        raise ValueError(
            f"{name} has {columns} classes from vocab_start={start} on, which do not lie within vocab_size={size}"
        )


def gathered_statistics(gather: Gather | None, mine: Tensor) -> Tensor:
    """(ranks, K, N) of all ranks from this rank's (K, N); without `gather` there is one rank."""
    if gather is None:
        return mine[None]
    gathered = gather(mine)
    if gathered.dim() != 3 or gathered.shape[1:] != mine.shape or gathered.dtype != mine.dtype:
        raise ValueError(
            f"gather returned {tuple(gathered.shape)} of {gathered.dtype}; for statistics of shape "
            f"{tuple(mine.shape)} it must be (ranks, *that) of {mine.dtype}"
        )
    if gathered.device != mine.device:
        raise ValueError(f"gather returned a tensor on {gathered.device}; it must be on {mine.device} like the logits")
    return gathered


def _check_logits(logits: Tensor, target: Tensor, inplace_backward: bool) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits is a {type(logits).__name__}; it must be a torch.Tensor")
    if not logits.is_floating_point():
        raise TypeError(f"logits has dtype {logits.dtype}; logits are floating-point")
    if logits.dim() != 2 or (isinstance(target, Tensor) and target.shape != logits.shape[:1]):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and target of shape {tuple(getattr(target, 'shape', ()))} are not "
            "(N, V) and (N,): flatten leading dimensions"
        )
    if inplace_backward and logits.requires_grad and torch.is_grad_enabled():
        base = None if _library.tracing() else logits._base
        if logits.is_leaf or (base is not None and base.is_leaf):
            raise ValueError(
                "logits is a leaf or a view of one, which inplace_backward=True would overwrite with its own gradient"
            )
        rows, columns = logits.shape
        if (columns > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < columns):
            raise ValueError(
                f"logits has strides {logits.stride()}; inplace_backward=True needs rows that are contiguous and "
                "apart: pass logits.contiguous()"
            )


def _loss(logits: Tensor, classes: Classes, gather: Gather | None, reduction: str, inplace_backward: bool) -> Tensor:
    if not _library.tracing():
        loss: Tensor = _CrossEntropy.apply(logits, classes, gather, reduction, inplace_backward)
        return loss
    arguments = (classes.target, classes.weight, *numbers_of(classes))
    gathered = gathered_statistics(gather, _statistics_op(logits.detach(), *arguments))
    traced: Tensor = _loss_op(logits, gathered, *arguments, reduction)[0]
    return traced


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, classes: Classes, gather: Gather | None, reduction: str, inplace_backward: bool
    ) -> Tensor:
        gathered = gathered_statistics(gather, statistics(logits, classes))
        losses, normalizers = row_losses(gathered, classes)
        loss, denominator = reduced(losses, classes, reduction)
        ctx.save_for_backward(logits, normalizers, denominator, classes.target, classes.weight)
        ctx.settings = numbers_of(classes)
        ctx.inplace = inplace_backward
        ctx.overwritten = False
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through cross_entropy with inplace_backward=True: the first has overwritten the "
                "logits with their gradient; pass inplace_backward=False"
            )
        logits, normalizers, denominator, target, weight = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else None
        ctx.overwritten = ctx.inplace
        with torch.no_grad():
            classes = Classes(target, weight, *ctx.settings)
            grad = gradient(grads[0], denominator, logits, normalizers, classes, out)
        return differentiated_once(grad, logits), None, None, None, None


_CLASSES = "Tensor target, Tensor? weight, int first, int size, int ignore_index, float label_smoothing"


def _op_statistics(logits: Tensor, *classes: Any) -> Tensor:
    return statistics(logits, Classes(*classes))


def _fake_statistics(logits: Tensor, *classes: Any) -> Tensor:
    return logits.new_empty(Classes(*classes).kinds, logits.shape[0], dtype=computing_dtype(logits.dtype))


def _op_loss(logits: Tensor, gathered: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *settings, reduction = rest
    classes = Classes(*settings)
    losses, normalizers = row_losses(gathered, classes)
    loss, denominator = reduced(losses, classes, reduction)
    return loss, normalizers, denominator


def _fake_loss(logits: Tensor, gathered: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    loss = gathered.new_empty((rows,) if rest[-1] == "none" else ())
    return loss, gathered.new_empty(2, rows), gathered.new_empty(())


def _op_gradient(scale: Tensor, denominator: Tensor, logits: Tensor, normalizers: Tensor, *classes: Any) -> Tensor:
    return gradient(scale, denominator, logits, normalizers, Classes(*classes))


def _fake_gradient(scale: Tensor, denominator: Tensor, logits: Tensor, normalizers: Tensor, *classes: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_statistics_op = _library.register(
    f"cross_entropy_statistics(Tensor logits, {_CLASSES}) -> Tensor", _op_statistics, _fake_statistics
)
_loss_op = _library.register(
    f"cross_entropy_loss(Tensor logits, Tensor gathered, {_CLASSES}, str reduction) -> (Tensor, Tensor, Tensor)",
    _op_loss,
    _fake_loss,
)
_gradient_op = _library.register(
    "cross_entropy_gradient(Tensor scale, Tensor denominator, Tensor logits, Tensor normalizers, "
    f"{_CLASSES}) -> Tensor",
    _op_gradient,
    _fake_gradient,
)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, target, weight, *settings, _ = inputs
    _, normalizers, denominator = output
    ctx.mark_non_differentiable(normalizers, denominator)
    ctx.save_for_backward(logits, normalizers, denominator, target, weight)
    ctx.settings = settings


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    logits, normalizers, denominator, target, weight = ctx.saved_tensors
    grad = _gradient_op(grads[0], denominator, logits, normalizers, target, weight, *ctx.settings)
    return grad, *[None] * 8


_library.differentiate("cross_entropy_loss", _backward, _keep_for_backward)

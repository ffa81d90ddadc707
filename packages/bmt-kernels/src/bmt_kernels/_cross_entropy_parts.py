"""Class labels, and cross entropy in three parts: statistics of the logits, losses, gradient.

Between the first two, ranks that hold different columns of the logits exchange their statistics.
"""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._tables import _DTYPE_CODES, _address
from bmt_kernels.reference.cross_entropy import computing_dtype

REDUCTIONS = ("none", "mean", "sum")


class Classes(NamedTuple):
    """The labels of N rows among the classes, of which the logits' columns are some or all."""

    target: Tensor
    """(N,) int64, contiguous: a class or `ignore_index` each."""
    weight: Tensor | None
    """(size,) in the dtype of the computation, contiguous."""
    first: int
    """The class of column 0."""
    size: int
    """How many classes there are."""
    ignore_index: int
    label_smoothing: float

    def rows(self, begin: int, end: int) -> Classes:
        return self._replace(target=self.target[begin:end])

    @property
    def kinds(self) -> int:
        """How many statistics of a row there are."""
        return 4 if self.label_smoothing > 0 else 3


def numbers_of(classes: Classes) -> tuple[int, int, int, float]:
    """All but the tensors. (torch.compile of PyTorch 2.6 follows neither a slice nor a property of the tuple.)"""
    return classes.first, classes.size, classes.ignore_index, classes.label_smoothing


def checked_classes(
    like: Tensor,
    rows: int,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    weight_name: str = "weight",
) -> Classes:
    """Raise unless these arguments of a cross entropy are right, but for the values of `target`.

    `like` has the dtype and the device of the logits.
    """
    device = like.device
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} is not between 0 and 1")
    if not isinstance(target, Tensor):
        raise TypeError(f"target is a {type(target).__name__}; it must be a tensor of class indices")
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise TypeError(f"target has dtype {target.dtype}; class indices are integers")
    if tuple(target.shape) != (rows,):
        raise ValueError(f"target has shape {tuple(target.shape)}; {rows} rows need ({rows},)")
    if target.device != device:
        raise ValueError(f"target is on {target.device}; it must be on {device} like the logits")
    if weight is not None:
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise TypeError(f"{weight_name} is {weight!r}; it must be a floating-point tensor")
        if tuple(weight.shape) != (size,):
            raise ValueError(f"{weight_name} has shape {tuple(weight.shape)}; {size} classes need ({size},)")
        if weight.device != device:
            raise ValueError(f"{weight_name} is on {weight.device}; it must be on {device} like the logits")
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{weight_name} requires a gradient, which is not computed; pass {weight_name}.detach()")
        weight = weight.detach().to(computing_dtype(like.dtype)).contiguous()
    return Classes(target.long().contiguous(), weight, first, size, ignore_index, float(label_smoothing))


def check_targets(classes: Classes) -> None:
    """Raise IndexError, or on CUDA have the device assert, unless targets are classes or to be ignored."""
    target = classes.target
    if target.device.type == "meta":
        return
    good = ((target >= 0) & (target < classes.size)) | (target == classes.ignore_index)
    if target.is_cuda:
        torch._assert_async(
            good.all(), f"a target is neither a class (0 to {classes.size - 1}) nor {classes.ignore_index}"
        )
    elif not good.all():
        raise IndexError(
            f"target {int(target[~good][0])} is neither a class (0 to {classes.size - 1}) nor "
            f"ignore_index={classes.ignore_index}"
        )


class _Kernels(NamedTuple):
    """The compiled module that serves some logits, and what its functions take first and last."""

    module: ModuleType
    where: tuple[int, ...]
    threads: tuple[int, ...]


def statistics(logits: Tensor, classes: Classes) -> Tensor:
    """Check the targets and return what `bmt_kernels.reference.cross_entropy_statistics` does, (3 or 4, N)."""
    check_targets(classes)
    smooth = classes.label_smoothing > 0
    kernels = _kernels(logits)
    if kernels is None:
        target, weight = classes.target, classes.weight
        return reference.cross_entropy_statistics(logits, target, weight, classes.first, classes.ignore_index, smooth)
    logits = _with_adjacent_columns(logits)
    out = torch.empty(classes.kinds, len(logits), dtype=torch.float32, device=logits.device)
    rows = _packed_rows(logits, classes)
    kernels.module.cross_entropy_statistics(*kernels.where, rows, smooth, out.data_ptr(), *kernels.threads)
    return out


def row_losses(gathered: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
    """Losses (N,) and normalizers (2, N) from statistics (ranks, 3 or 4, N)."""
    kernels = _kernels(gathered)
    if kernels is None:
        target, weight, _, size, ignore_index, smoothing = classes
        return reference.cross_entropy_losses(gathered, target, weight, size, ignore_index, smoothing)
    gathered = gathered.contiguous()
    rows = gathered.shape[2]
    losses, normalizers = gathered.new_empty(rows), gathered.new_empty(2, rows)
    total = _total_weight(classes)
    kernels.module.cross_entropy_losses(
        *kernels.where,
        _packed_rows(gathered.new_empty(rows, 0), classes),
        *_factors(classes, total),
        _address("what gather returns", gathered),
        len(gathered),
        losses.data_ptr(),
        normalizers.data_ptr(),
    )
    return losses, normalizers


def gradient(
    scale: Tensor, denominator: Tensor, logits: Tensor, normalizers: Tensor, classes: Classes, out: Tensor | None = None
) -> Tensor:
    """The gradient (N, V_local), in the logits' dtype, for derivatives `scale` / `denominator` of the rows' losses.

    Args:
        scale: (N,), or () for all rows, in the dtype of the computation.
        denominator: () in that dtype.
        out: where to write it; it may be the logits, if each row is contiguous.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kernels = _kernels(logits)
    if kernels is None:
        made = reference.cross_entropy_gradient(
            scale / denominator,
            logits,
            normalizers,
            classes.target,
            classes.weight,
            classes.first,
            classes.size,
            classes.ignore_index,
            classes.label_smoothing,
        )
        return out.copy_(made)
    logits = _with_adjacent_columns(logits)
    scale, normalizers = scale.contiguous().resolve_neg(), normalizers.contiguous()
    total = _total_weight(classes)
    kernels.module.cross_entropy_gradient(
        *kernels.where,
        _packed_rows(logits, classes),
        *_factors(classes, total),
        normalizers.data_ptr(),
        scale.data_ptr(),
        scale.dim(),
        denominator.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        *kernels.threads,
    )
    increment_version((out,))
    return out


def reduced(losses: Tensor, classes: Classes, reduction: str) -> tuple[Tensor, Tensor]:
    """The reduced loss, and the denominator () that the derivatives of the rows' losses have."""
    if reduction == "none":
        return losses, losses.new_ones(())
    # In double precision: however the sum is split over threads, the same float comes out.
    total = losses.sum(dtype=torch.float64)
    if reduction == "sum":
        return total.to(losses.dtype), losses.new_ones(())
    denominator = mean_denominator(classes)
    return (total / denominator).to(losses.dtype), denominator.to(losses.dtype)


def mean_denominator(classes: Classes) -> Tensor:
    """What the mean divides by, () float64: the number of targets that count, or the sum of their weights."""
    counted = classes.target != classes.ignore_index
    if classes.weight is None:
        return counted.sum().double()
    weights = classes.weight[torch.where(counted, classes.target, 0)] if classes.size else classes.weight
    return torch.where(counted, weights, 0.0).sum(dtype=torch.float64)


def differentiated_once(grad: Tensor, *inputs: Tensor) -> Tensor:
    """The gradient that the backward of `cross_entropy` returns, so that differentiating it again raises.

    Only under ``create_graph=True`` could it be; it would then be taken for a constant and give wrong results.
    """
    if not torch.is_grad_enabled():
        return grad
    result: Tensor = _DifferentiatedOnce.apply(grad, *inputs)
    return result


class _DifferentiatedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("cross_entropy can be differentiated only once; pass create_graph=False")


def _kernels(logits: Tensor) -> _Kernels | None:
    if logits.dtype not in _DTYPE_CODES:
        return None
    if logits.device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        return _Kernels(cpu.module, (cpu.variant,), (torch.get_num_threads(),))
    if (cuda := _native.cuda_kernels(logits.device)) is not None:
        return _Kernels(cuda.module, (cuda.device, cuda.stream), ())
    return None


def _with_adjacent_columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _packed_rows(logits: Tensor, classes: Classes) -> bytes:
    """``struct CrossEntropyRows`` of csrc/common/cross_entropy.h."""
    return array(
        "q",
        (
            _address("logits", logits),
            _DTYPE_CODES[logits.dtype],
            logits.stride(0),
            *logits.shape,
            _address("target", classes.target),
            classes.ignore_index,
            classes.first,
            0 if classes.weight is None else _address("weight", classes.weight),
        ),
    ).tobytes()


def _total_weight(classes: Classes) -> Tensor | None:
    """The sum of all classes' weights, where it is needed."""
    if classes.weight is None or classes.label_smoothing == 0:
        return None
    return classes.weight.sum(dtype=torch.float64).to(classes.weight.dtype)


def _factors(classes: Classes, total_weight: Tensor | None) -> tuple[float, int, int]:
    """What ``cross_entropy_factors`` of csrc/common/cross_entropy.h takes. The caller keeps `total_weight` alive."""
    total = 0 if total_weight is None else total_weight.data_ptr()
    return classes.label_smoothing, classes.size, total

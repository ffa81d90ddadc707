"""Cross entropy over logits that are whole, or split over tensor-parallel ranks along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_comm import Communicator, current_context

_REDUCTIONS = ("none", "mean", "sum")


class FusedCrossEntropy(nn.Module):
    """``torch.nn.CrossEntropyLoss`` for logits (N, V) and class indices (N,), computed in fp32 or wider.

    ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing`` mean what they mean there; as there,
    the mean over no element (all targets ignored) is NaN. Half-precision logits give an fp32 loss and a
    gradient of their own dtype.

    Args:
        weight: (V,), a factor for each class.
        ignore_index: targets of this value add nothing, to the loss or to the mean's denominator.
        reduction: "none" for a loss per row (N,), "mean" or "sum".
        label_smoothing: how much of the target, in [0, 1], is spread evenly over all classes.
        parallel: the logits are this tensor-parallel rank's columns (N, V_local) of the vocabulary, in rank
            order, and the targets are the same on every rank. Every rank gets the whole loss, and the
            gradient of that one loss with respect to its columns.
        comm: the ranks that split the vocabulary; by default the context's tensor-parallel ones.

    Raises:
        ValueError: an unknown reduction, or label smoothing out of range.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
        *,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is unknown; choose one of {', '.join(_REDUCTIONS)}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing!r} is not between 0 and 1")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel
        self.comm = comm
        self._columns: tuple[int, int, int] | None = None  # V_local, the first column, V

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, parallel={self.parallel}"
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss: 0-dim, or (N,) for reduction "none".

        Args:
            input: logits (N, V), any floating dtype and strides; (N, V_local) if parallel.
            target: (N,), any integer dtype.

        Raises:
            TypeError, ValueError: wrong dtypes or shapes.
            IndexError: a target is neither a class nor ``ignore_index``. On CUDA the device asserts instead,
                so that the host need not wait.
        """
        _check_input(input, target)
        logits = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        target = target.long()
        comm = (self.comm or current_context().tp) if self.parallel else None
        vocab = input.shape[1]
        start = 0
        if comm is not None and comm.size > 1:
            start, vocab = self._my_columns(vocab, comm)
        if not target.is_cuda:
            self._check_target(target, vocab)
        weight = self.weight
        if weight is not None:
            if tuple(weight.shape) != (vocab,):
                raise ValueError(f"weight has shape {tuple(weight.shape)}; {vocab} classes need ({vocab},)")
            weight = weight.to(logits)
        if comm is None or comm.size == 1:
            return F.cross_entropy(
                logits,
                target,
                weight,
                ignore_index=self.ignore_index,
                reduction=self.reduction,
                label_smoothing=self.label_smoothing,
            )
        return self._parallel_loss(logits, target, weight, start, vocab, comm)

    def _parallel_loss(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int, comm: Communicator
    ) -> Tensor:
        if target.is_cuda:  # torch's own kernel would have asserted this
            self._check_target(target, vocab)
        counted = target != self.ignore_index
        labels = torch.where(counted, target, 0)
        # A shift by the largest logit of the row; log-sum-exp does not depend on it, so it needs no gradient.
        if logits.shape[1]:
            largest = logits.detach().amax(dim=1)
        else:
            largest = logits.new_full(target.shape, -torch.inf)
        comm.all_reduce(largest, "max")
        column = labels - start
        mine = (column >= 0) & (column < logits.shape[1])
        if logits.shape[1]:
            picked = logits.gather(1, torch.where(mine, column, 0)[:, None])[:, 0]
            parts = [(logits - largest[:, None]).exp().sum(dim=1), torch.where(mine, picked, 0)]
        else:
            parts = [logits.sum(dim=1), logits.sum(dim=1)]
        if self.label_smoothing > 0:
            parts.append(logits.sum(dim=1) if weight is None else logits @ weight[start : start + logits.shape[1]])
        sums = _SumOfOneLoss.apply(torch.stack(parts), comm)  # (2 or 3, N)
        log_normalizer = sums[0].log() + largest
        factor = torch.ones_like(log_normalizer) if weight is None else weight[labels]
        loss = (log_normalizer - sums[1]) * factor
        if self.label_smoothing > 0:
            total_weight = vocab if weight is None else weight.sum()
            spread = (log_normalizer * total_weight - sums[2]) / vocab
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * spread
        loss = torch.where(counted, loss, 0)
        if self.reduction == "none":
            return loss
        if self.reduction == "sum":
            return loss.sum()
        return loss.sum() / torch.where(counted, factor, 0).sum()

    def _my_columns(self, width: int, comm: Communicator) -> tuple[int, int]:
        """The first column of this rank, and the size of the vocabulary; asked of the others once per width."""
        if self._columns is None or self._columns[0] != width:
            widths = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
            comm.all_gather(widths, torch.tensor([width], device=comm.device))
            counts = widths.tolist()
            self._columns = (width, sum(counts[: comm.rank]), sum(counts))
        return self._columns[1:]

    def _check_target(self, target: Tensor, vocab: int) -> None:
        bad = ((target < 0) | (target >= vocab)) & (target != self.ignore_index)
        if target.is_cuda:
            torch._assert_async(~bad.any(), f"a target is neither a class (0 to {vocab - 1}) nor {self.ignore_index}")
        elif bad.any():
            raise IndexError(
                f"target {int(target[bad][0])} is neither a class (0 to {vocab - 1}) nor "
                f"ignore_index={self.ignore_index}"
            )


class _SumOfOneLoss(torch.autograd.Function):
    """The sum over ranks on the way to one loss that all of them compute alike.

    The ranks' losses are copies of one loss, so the gradient of that loss is the gradient as it arrives; the
    gradient of the sum of the ranks' losses would be as many times larger.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def _check_input(input: Tensor, target: Tensor) -> None:
    if not input.is_floating_point():
        raise TypeError(f"input has dtype {input.dtype}; logits are floating-point")
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise TypeError(f"target has dtype {target.dtype}; class indices are integers")
    if input.dim() != 2 or target.dim() != 1 or len(input) != len(target):
        raise ValueError(
            f"input of shape {tuple(input.shape)} and target of shape {tuple(target.shape)} are not (N, V) and (N,)"
        )

"""Cross entropy over logits that are unsharded, or sharded over tensor-parallel ranks along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Communicator, current_context
from bmt_kernels import cross_entropy, parallel_cross_entropy

_REDUCTIONS = ("none", "mean", "sum")


class FusedCrossEntropy(nn.Module):
    """``torch.nn.CrossEntropyLoss`` for logits (N, V) and class indices (N,), computed in fp32 or wider.

    ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing`` are those of torch. As in torch, the mean over
    no element (all targets ignored) is NaN. Half-precision logits give an fp32 loss and a gradient of their own
    dtype. Only the logits are kept for backward: see ``bmt_kernels.cross_entropy``.

    Args:
        weight: (V,), a factor for each class.
        ignore_index: targets of this value add nothing, to the loss or to the mean's denominator.
        reduction: "none" for a loss per row (N,), "mean" or "sum".
        label_smoothing: how much of the target, in [0, 1], is spread evenly over all classes.
        parallel: the logits are this tensor-parallel rank's columns (N, V_local) of the vocabulary, in rank
            order, and the targets are the same on every rank. Every rank gets the loss over the vocabulary,
            and the gradient of that one loss with respect to its columns.
        comm: the ranks that shard the vocabulary; by default the context's tensor-parallel ones.

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
        settings: dict[str, Any] = {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }
        comm = (self.comm or current_context().tp) if self.parallel else None
        if comm is None or comm.size == 1:
            return cross_entropy(input, target, **settings)
        if input.dim() != 2:
            raise ValueError(f"logits of shape {tuple(input.shape)} are not (N, V_local)")
        start, vocab = self._my_columns(input.shape[1], comm)
        return parallel_cross_entropy(input, target, comm.stacked, vocab_start=start, vocab_size=vocab, **settings)

    def _my_columns(self, width: int, comm: Communicator) -> tuple[int, int]:
        """The first column of this rank, and the size of the vocabulary. A collective, once per width.

        If two vocabularies have shards of equal width on some ranks but not on all, give each its own object.
        """
        if self._columns is None or self._columns[0] != width:
            counts = comm.stacked(torch.tensor([width], device=comm.device)).flatten().tolist()
            self._columns = (width, sum(counts[: comm.rank]), sum(counts))
        return self._columns[1:]

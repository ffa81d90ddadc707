"""Cross entropy of scores that are split along the vocabulary over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from torch import Tensor

from bmt_comm import Communicator, DisagreementError, check_agreement, not_compiled
from bmt_kernels import parallel_cross_entropy, parallel_linear_cross_entropy

from .parameters import unsharded
from .regions import copy_to_ranks, gather_along, tensor_comm


@not_compiled
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """The cross entropy of scores that are split along the vocabulary. The scores are not gathered.

    The forward does one all-gather of three numbers per row and rank (four with label smoothing). The backward does
    not communicate.

    Args:
        logits: (\\*, V / ranks), the scores of this rank's range of the classes, such as the output of
            :class:`bmt_tp.VPEmbedding` or of a column-parallel layer.
        target: (\\*), classes of the whole vocabulary (any integer dtype), the same on every rank.
        comm: the tensor-parallel ranks; by default the context's.
        weight, ignore_index, reduction, label_smoothing, inplace_backward: as for ``bmt_kernels.cross_entropy``.

    Returns:
        The loss, bitwise the same on every rank: (), or (\\*) for reduction "none". Gradients are those of this one
        loss.

    Raises:
        ValueError: ``target`` does not have the leading shape of ``logits``; or, on every rank, ranks have different
            numbers of classes.
        TypeError, ValueError, IndexError: as ``bmt_kernels.cross_entropy`` does.
    """
    comm = tensor_comm(comm)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; for logits of shape {tuple(logits.shape)} it must be "
            f"{tuple(logits.shape[:-1])}"
        )
    columns = logits.shape[-1]
    gather = _gather_of(columns, comm)
    loss = parallel_cross_entropy(
        logits.flatten(0, -2) if logits.dim() > 1 else logits[None],
        target.reshape(-1),
        gather,
        vocab_start=comm.rank * columns,
        vocab_size=comm.size * columns,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        inplace_backward=inplace_backward,
    )
    return loss.view(target.shape) if reduction == "none" else loss


@not_compiled
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    comm: Communicator | None = None,
    *,
    gather_input: bool = False,
    sequence_dim: int = -2,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """The projection to scores and their cross entropy. Only chunks of this rank's scores are in memory at a time.

    Args:
        hidden: (\\*, H), replicated; with ``gather_input`` this rank's part of ``sequence_dim``.
        weight: (V / ranks, H), this rank's rows, such as ``VPEmbedding.weight``.
        target: (\\*), classes of the whole vocabulary, the same on every rank.
        bias: (V / ranks,).
        comm: the tensor-parallel ranks; by default the context's.
        gather_input, sequence_dim: whether, and along which dimension, hidden is gathered first.
        class_weight, ignore_index, reduction, label_smoothing, chunk_size: as for
            ``bmt_kernels.linear_cross_entropy``.

    Returns:
        The loss, bitwise the same on every rank: (), or (\\*) for reduction "none". Gradients are those of this one
        loss.

    Raises:
        ValueError: on every rank: ranks have different numbers of classes.
        TypeError, ValueError, IndexError: as ``bmt_kernels.linear_cross_entropy`` does.
    """
    comm = tensor_comm(comm)
    weight, bias = unsharded(weight), unsharded(bias)
    gather = _gather_of(len(weight), comm)
    if gather_input:
        hidden = gather_along(hidden, sequence_dim, comm, partial_grad=True)
    else:
        hidden = copy_to_ranks(hidden, comm)
    return parallel_linear_cross_entropy(
        hidden,
        weight,
        target,
        gather,
        bias,
        vocab_start=comm.rank * len(weight),
        vocab_size=comm.size * len(weight),
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        chunk_size=chunk_size,
    )


_checked: WeakKeyDictionary[Communicator, set[int]] = WeakKeyDictionary()
"""The numbers of classes of this rank for which all ranks are known to have as many."""


def _gather_of(columns: int, comm: Communicator) -> Callable[[Tensor], Tensor]:
    """``comm.stacked`` for the statistics of ``columns`` classes on each rank.

    Each number of classes is compared once over the ranks, and later by the label of the all-gather.

    Raises:
        ValueError: ranks have different numbers of classes.
    """
    gather = partial(comm.stacked, label=f"statistics of {columns} classes per rank")
    if comm.size == 1 or comm.is_planned:
        return gather
    known = _checked.setdefault(comm, set())
    if columns in known:
        return gather
    try:
        check_agreement(comm, "the classes of a vocabulary-parallel cross entropy", [f"{columns} on each rank"])
    except DisagreementError as error:
        raise ValueError(
            f"the tensor-parallel ranks must have the same number of classes: {error}; pad the vocabulary to a "
            "multiple of the ranks"
        ) from error
    known.add(columns)
    return gather

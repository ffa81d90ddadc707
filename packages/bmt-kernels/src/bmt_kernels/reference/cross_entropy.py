"""Cross entropy in plain PyTorch, in the parts that the kernels have."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, first_class: int, ignore_index: int, smooth: bool
) -> Tensor:
    """What these columns (N, V_local) of the logits contribute to the losses, (3 or 4, N) in the dtype of `computing`.

    Largest logit, sum of exponentials shifted by it, the target's logit or 0, and for smoothing the sum of the logits
    times their weights. Zeros where the target is to be ignored.
    """
    x = logits.to(computing_dtype(logits.dtype))
    columns = x.shape[1]
    column = target - first_class
    mine = (column >= 0) & (column < columns)
    if columns:
        largest = x.amax(dim=1)
        at_target = torch.where(mine, x.gather(1, torch.where(mine, column, 0)[:, None])[:, 0], 0.0)
    else:
        largest = x.new_full(target.shape, -torch.inf)
        at_target = torch.zeros_like(largest)
    parts = [largest, (x - _shift(largest)[:, None]).exp().sum(dim=1), at_target]
    if smooth:
        parts.append((x if weight is None else x * weight[first_class : first_class + columns]).sum(dim=1))
    return torch.where(target == ignore_index, 0.0, torch.stack(parts))


def cross_entropy_losses(
    gathered: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """The losses (N,) from the statistics (ranks, 3 or 4, N) of all ranks, and what the gradient needs, (2, N)."""
    largest = gathered[:, 0].amax(dim=0)
    shift = _shift(largest)
    sums = (gathered[:, 1] * (gathered[:, 0] - shift).exp()).sum(dim=0)
    log_sum = sums.log()
    counted = target != ignore_index
    label_weight = 1.0 if weight is None else weight[torch.where(counted, target, 0)]
    losses = (1 - label_smoothing) * label_weight * (log_sum + (shift - gathered[:, 2].sum(dim=0)))
    if label_smoothing > 0:
        total = classes if weight is None else weight.sum()
        losses = losses + label_smoothing / classes * (total * (log_sum + shift) - gathered[:, 3].sum(dim=0))
    return torch.where(counted, losses, 0.0), torch.stack([largest, sums])


def cross_entropy_gradient(
    scale: Tensor,
    logits: Tensor,
    normalizers: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first_class: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The gradient (N, V_local) in the logits' dtype, for derivatives `scale`, (N,) or (), of the losses."""
    columns = logits.shape[1]
    counted = target != ignore_index
    label_weight = 1.0 if weight is None else weight[torch.where(counted, target, 0)]
    hit = scale * (1 - label_smoothing) * label_weight * torch.ones_like(normalizers[0])
    factor = hit
    if label_smoothing > 0:
        factor = factor + scale * (label_smoothing / classes) * (classes if weight is None else weight.sum())
    x = logits.to(normalizers.dtype)
    grad = (x - _shift(normalizers[0])[:, None]).exp() * (factor / normalizers[1])[:, None]
    if label_smoothing > 0:
        spread = (scale * (label_smoothing / classes)).expand(len(target))[:, None]
        grad = grad - (spread if weight is None else spread * weight[first_class : first_class + columns])
    is_target = torch.arange(first_class, first_class + columns, device=logits.device) == target[:, None]
    grad = torch.where(is_target, grad - hit[:, None], grad)
    return torch.where(counted[:, None], grad, 0.0).to(logits.dtype)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that logits of some dtype are computed in: float32, or float64 for that."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _shift(largest: Tensor) -> Tensor:
    """What to subtract before the exponential; not -inf, where all logits are that."""
    return torch.where(largest == -torch.inf, 0.0, largest)

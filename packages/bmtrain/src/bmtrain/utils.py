"""Small helpers for training scripts."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from bmt_comm import config, print_block, print_dict, print_rank, see_memory

__all__ = [
    "AverageRecorder",
    "check_torch_version",
    "print_block",
    "print_dict",
    "print_rank",
    "round_up",
    "see_memory",
    "storage_type_cuda",
    "tp_split_tensor",
]


def round_up(x: int, d: int) -> int:
    """The smallest multiple of ``d`` that is at least ``x``.

    Raises:
        ValueError: ``d`` is not positive.
    """
    if d <= 0:
        raise ValueError(f"d={d!r} must be positive")
    return -(-x // d) * d


def storage_type_cuda(storage_type: type) -> type:
    """The storage class on the GPU of a storage class of torch: ``torch.cuda.HalfStorage`` of ``torch.HalfStorage``.

    Raises:
        ValueError: it is not a storage class of a real dtype.
    """
    for kind in ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int"):
        cuda: type = getattr(torch.cuda, f"{kind}Storage")
        if storage_type in (cuda, getattr(torch, f"{kind}Storage")):
            return cuda
    raise ValueError(f"storage_type={storage_type!r} is no storage class of a real dtype")


def check_torch_version(version_str: str) -> int:
    """Compare the installed torch with a version: below 0 if it is older, 0 if it is the same, above 0 if it is newer.

    Args:
        version_str: a version such as "2.6.0".

    Raises:
        ValueError: ``version_str`` is not a version.
    """
    mine, asked = _numbers(torch.__version__), _numbers(version_str)
    return (mine > asked) - (mine < asked)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"version_str={version!r} is not a version such as '2.6.0'")
    return tuple(int(number or 0) for number in match.groups())


def tp_split_tensor(tensor: Tensor, split_dim: int) -> Tensor:
    """This tensor-parallel rank's shard of ``tensor``, which is sharded evenly along ``split_dim``; contiguous.

    Raises:
        ValueError: ``split_dim`` is not a dimension of ``tensor``, or cannot be sharded evenly.
        RuntimeError: before ``init_distributed``.
    """
    size, index = config["tp_size"], config["tp_rank"]
    if not -tensor.dim() <= split_dim < tensor.dim():
        raise ValueError(f"split_dim={split_dim} is not a dimension of a tensor of shape {tuple(tensor.shape)}")
    extent = tensor.shape[split_dim]
    if extent % size:
        raise ValueError(
            f"dimension {split_dim} of a tensor of shape {tuple(tensor.shape)} cannot be sharded evenly over "
            f"{size} tensor-parallel ranks; pad it to {round_up(extent, size)}"
        )
    return tensor.narrow(split_dim, index * (extent // size), extent // size).contiguous()


class AverageRecorder:
    """An exponential moving average that is unbiased from the first value on.

    After n values, the weight of the i-th is proportional to alphaⁿ⁻ⁱ, and the weights sum to 1: the start value does
    not bias the first averages (Kingma & Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, section 3).

    Args:
        alpha: the weight of the old average when a value is recorded, in [0, 1).
        start_value: the value before anything is recorded. It does not enter the average.

    Raises:
        ValueError: ``alpha`` out of range.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha={alpha!r} must be at least 0 and below 1")
        self.alpha = alpha
        self._start_value = start_value
        self._sum = 0.0
        self._weight = 0.0

    def record(self, v: float) -> None:
        """Record a value."""
        self._sum = self._sum * self.alpha + v * (1 - self.alpha)
        self._weight = self._weight * self.alpha + (1 - self.alpha)

    @property
    def value(self) -> float:
        """The average; ``start_value`` if nothing was recorded."""
        return self._sum / self._weight if self._weight else self._start_value

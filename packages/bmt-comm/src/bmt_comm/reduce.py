"""Averages and collections over ranks, as training loops log them."""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import all_gather
from .communicator import Communicator
from .context import current_context, is_deterministic
from .fixed_order import TREE_SUM


def synchronize() -> None:
    """Wait until every rank has come here and its device has finished."""
    current_context().synchronize()


def wait_loader() -> None:
    """Wait for this process's device. Collectives order themselves; scripts call it before measuring time."""
    device = current_context().device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sum_loss(loss: Tensor, comm: Communicator | None = None) -> Tensor:
    """The **mean** of ``loss`` over the ranks of ``comm`` (by default the world); not differentiable.

    Integers are averaged in torch's default dtype, half-precision numbers in fp32. With
    ``init_distributed(deterministic=True)``, the order of the sum is that of :func:`tree_sum`.
    """
    comm = comm or current_context().world
    dtype = loss.dtype if loss.is_floating_point() or loss.is_complex() else torch.get_default_dtype()
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # a sum of halves may overflow
    result = torch.empty(loss.shape, dtype=wide, device=comm.device).copy_(loss.detach())
    if is_deterministic():
        comm.all_reduce(result, TREE_SUM)
        result /= comm.size
    else:
        comm.all_reduce(result, "avg")
    return result.to(loss.device, dtype)


def gather_result(result: Tensor) -> Tensor:
    """Every rank's ``result``, joined along dim 0 (0-dim results: one element each), on the device of ``result``."""
    stacked = all_gather(result.detach().to(current_context().device))
    return (stacked.flatten(0, 1) if result.dim() else stacked).to(result.device)

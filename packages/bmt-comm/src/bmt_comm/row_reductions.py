"""Reductions of logical tensors whose rows are spread; see [Note: operations on sharded rows] in sharded_rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .communicator import Communicator
from .context import is_deterministic
from .slice import is_stage_local


def of_all(name: str, part: Any, dtype: torch.dtype | None) -> Tensor:
    """A reduction over all elements of the logical tensor: 0-dim, on every rank."""
    rows: Tensor = part.detach()
    if name in ("amax", "amin", "max", "min"):
        name = f"a{name[-3:]}"
        if not rows.numel():
            limits = (False, True) if rows.dtype == torch.bool else _limits(rows.dtype)
            rows = rows.new_full((1,), limits[name == "amin"])
        value, combine = getattr(torch, name)(rows), getattr(torch, name)
    elif name in ("all", "any"):
        value, combine = getattr(rows, name)(), getattr(torch, name)
    elif name == "count_nonzero":
        value, combine = torch.count_nonzero(rows), torch.sum
    else:
        result = rows.new_empty(0).sum(dtype=dtype).dtype if name != "mean" else dtype or rows.dtype
        wide = torch.promote_types(result, torch.float32) if result.is_floating_point else result
        total = (torch.nansum if name == "nansum" else torch.sum)(rows, dtype=wide)
        total = over_ranks(total, part, torch.sum)
        return (total / math.prod(part.bmt_slice.shape) if name == "mean" else total).to(result)
    return over_ranks(value, part, combine)


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def over_ranks(value: Tensor, part: Any, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """A number of each rank, 0-dim, combined over the ranks that have other elements of a tensor."""
    for comm in part.bmt_slice.communicators:
        there = value.to(comm.device).reshape(1)
        every = comm.stacked(there, f"{combine.__name__} of {part.bmt_slice.shape}")
        value = combine(every).to(value.device)
    return value


def norms(
    name: str,
    parts: Any,
    ord: Any = 2,
    dim: None = None,
    keepdim: bool = False,
    *,
    p: Any = None,
    dtype: torch.dtype | None = None,
    **_options: Any,
) -> Any:
    """Norms of logical tensors, 0-dim; for ``_foreach_norm`` a list of them, with a collective for each group."""
    given = ord if p is None else p
    order = 2.0 if given in (None, "fro") else float(given)
    several = name == "_foreach_norm"
    chosen = list(parts) if several else [parts]
    is_spread = any(hasattr(part, "bmt_slice") and part.bmt_slice.communicators for part in chosen)
    is_sum = order not in (0, float("inf"), -float("inf"))
    if is_sum and is_spread and is_deterministic():
        raise RuntimeError(
            "deterministic=True: this norm of gradients depends on the number of ranks in its last bits; use "
            "OptimManager.clip_grad_norm, or grad.to_local() for this rank's rows"
        )
    dtypes = [dtype or part.dtype for part in chosen]
    powers = [_power(part.detach(), order) for part in chosen]
    by_communicators: dict[tuple[Communicator, ...], list[int]] = {}
    for index, part in enumerate(chosen):
        if hasattr(part, "bmt_slice"):
            by_communicators.setdefault(tuple(spreading_communicators([part])), []).append(index)
    op = "sum" if abs(order) != float("inf") else "max" if order > 0 else "min"
    for communicators, members in sorted(by_communicators.items(), key=lambda item: [comm.ranks for comm in item[0]]):
        together = torch.stack([powers[index] for index in members])
        reduce_over(together, communicators, op)
        for index, power in zip(members, together.unbind(), strict=True):
            powers[index] = power
    if op == "sum" and order != 0:
        powers = [power ** (1 / order) for power in powers]
    results = [power.to(dtype) for power, dtype in zip(powers, dtypes, strict=True)]
    return results if several else results[0]


def _power(rows: Tensor, order: float) -> Tensor:
    """This rank's contribution to a norm, to be added up or compared over ranks: 0-dim, fp32 or wider."""
    # High powers may exceed the range of fp32 although the numbers do not.
    is_narrow = order in (0, 1, 2) or abs(order) == float("inf")
    dtype = torch.float32 if is_narrow and rows.dtype != torch.float64 else torch.float64
    if not rows.numel():
        return torch.full((), float("inf") if order == -float("inf") else 0.0, dtype=dtype, device=rows.device)
    norm = torch.linalg.vector_norm(rows, order, dtype=dtype)
    return norm if order == 0 or abs(order) == float("inf") else norm**order


def spreading_communicators(parts: Sequence[Tensor]) -> list[Communicator]:
    """The communicators whose ranks have other elements of ``parts``, in an order that all ranks agree on: rows first.

    Raises:
        RuntimeError: a parameter belongs to a pipeline stage; other stages would not take part.
    """
    rows: dict[Communicator, None] = {}
    columns: dict[Communicator, None] = {}
    for part in parts:
        if hasattr(part, "bmt_slice"):
            # torch sums the norms of gradients over the model.
            if getattr(part, "_is_gradient", False) and is_stage_local(part):
                raise RuntimeError(
                    "this function sees the gradients of one pipeline stage only; use OptimManager, whose "
                    "clip_grad_norm and loss scale take all stages into account, or full_tensor() of this one"
                )
            for comm in part.bmt_slice.communicators:
                (columns if comm is part.bmt_slice.tp_comm else rows)[comm] = None
    return [comm for communicators in (rows, columns) for comm in sorted(communicators, key=lambda comm: comm.ranks)]


def reduce_over(value: Tensor, communicators: Sequence[Communicator], op: str) -> None:
    """Reduce ``value`` in place over each of the communicators."""
    for comm in communicators:
        there = value.to(comm.device)  # gradients of offloaded parameters are in host memory
        comm.all_reduce(there, op)
        if there is not value:
            value.copy_(there)

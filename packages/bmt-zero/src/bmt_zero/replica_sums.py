"""Check that ranks that hold the same part of a parameter hold the same bits."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, allgather_objects, current_context, local_tensor, slice_of


@torch.no_grad()
def verify_replicas(module: nn.Module, context: ParallelContext | None = None) -> None:
    """Raise unless ranks that hold the same part of a parameter hold the same values.

    Replicas differ after a bit has flipped in memory, or if code changes a parameter on some ranks only. Each rank adds
    up the bits of its values, and the ranks compare 16 bytes for each parameter. A single wrong element is always
    detected. At ZeRO levels 1 to 3 each rank holds other rows, so only replicate groups, tensor-parallel ranks and
    parameters that are not sharded have replicas.

    Every rank must call this, between two steps: once every few hundred steps, for example.

    Args:
        module: the module whose parameters are compared, sharded or not. Buffers may differ and are not compared.
        context: the ranks; by default those of the process-wide context.

    Raises:
        RuntimeError: on every rank, with the names of the parameters and the ranks that differ from most others. Of two
            ranks, both are named.
    """
    world = (context or current_context()).world
    names: dict[int, str] = {}
    rows: list[list[int]] = []
    for name, param in module.named_parameters():
        values = local_tensor(param).detach()
        if values.numel():
            where = slice_of(param)
            part = (name, where.shape, where.tp_offset, where.tp_extent, where.row_start, where.row_stop)
            key = int.from_bytes(hashlib.sha256(repr(part).encode()).digest()[:8], "little", signed=True)
            names[key] = name
            rows.append([key, int(_sum_of_bits(values))])
    count = torch.tensor([len(rows)], device=world.device)
    world.all_reduce(count, "max")
    mine = torch.zeros(int(count), 2, dtype=torch.int64, device=world.device)  # rows of zeros are padding
    if rows:
        mine[: len(rows)] = torch.tensor(rows, device=world.device)
    everyone = world.stacked(mine)
    sums: dict[int, dict[int, int]] = {}  # by part and rank
    for rank, of_rank in enumerate(everyone.tolist()):
        for key, total in of_rank:
            if key:
                sums.setdefault(key, {})[rank] = total
    different = {key: _odd_ones(of_ranks) for key, of_ranks in sums.items() if len(set(of_ranks.values())) > 1}
    if not different:
        return
    known: dict[int, str] = {}
    for of_rank in allgather_objects({key: names[key] for key in different if key in names}, world):
        known.update(of_rank)
    listing = "; ".join(f"{known[key]} on rank {', '.join(map(str, ranks))}" for key, ranks in different.items())
    raise RuntimeError(
        f"parameters differ between ranks that hold the same part of them: {listing}. A bit has changed in memory, or "
        "code has changed a parameter on some ranks only. Go on from the newest checkpoint that was saved before"
    )


def _sum_of_bits(values: Tensor) -> Tensor:
    """The sum of the elements' bits, read as integers: 0-dim int64."""
    values = torch.view_as_real(values) if values.is_complex() else values
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().reshape(-1).view(dtype).sum(dtype=torch.int64)


def _odd_ones(totals: dict[int, int]) -> list[int]:
    """The ranks that differ from most others; all of them if no value is the most frequent."""
    (value, most), *others = Counter(totals.values()).most_common(2)
    if others and others[0][1] == most:
        return sorted(totals)
    return sorted(rank for rank, total in totals.items() if total != value)

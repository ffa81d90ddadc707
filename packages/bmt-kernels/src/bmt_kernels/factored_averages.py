"""Averages of factored second moments, of matrices that are sharded over ranks.

Between the passes of :mod:`bmt_kernels.factored`, ranks add up their sums over rows and columns. A rank has some or all
rows of a matrix. It has, for each of these rows, the average over time of the mean of the row's squares, and the same
for each column. Ranks exchange one vector, with the sums of all matrices end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels._compat import increment_version
from bmt_kernels._library import tracing
from bmt_kernels._tables import _DLPACK_DEVICES, _address, _check_overlaps, _check_tensor, check_memory, check_sequence


def factored_totals(row_averages: Sequence[Tensor], row_sums: Tensor, totals: Tensor, before: Tensor) -> None:
    """Add up this rank's sums of rows, and its row averages, of every matrix.

    Args:
        row_averages: float32, (*batch, R) each, contiguous. Only read.
        row_sums: float32, all the sums of rows end to end, in the order of row_averages. Only read.
        totals: float32, one element for every matrix of every batch: the sum of its row_sums. Written.
        before: likewise, the sum of its row averages. Written.

    Raises:
        TypeError: something is no tensor, or not float32.
        ValueError: tensors do not fit each other, are not contiguous, or overlap what is written.
    """
    device = _device("row_averages", row_averages, totals)
    if _launched("totals", device, (row_averages, row_sums, totals, before)):
        increment_version([totals, before])
        return
    _check_list("row_averages", row_averages, device)
    count = sum(_matrices(r) for r in row_averages)
    _check_vector("row_sums", row_sums, sum(r.numel() for r in row_averages), device)
    _check_vector("totals", totals, count, device)
    _check_vector("before", before, count, device)
    vectors = {"row_sums": row_sums, "totals": totals, "before": before}
    _check_memory({"row_averages": row_averages}, vectors, written=("totals", "before"))
    with torch.no_grad():
        totals.copy_(_totals([s.view(r.shape) for s, r in zip(_split(row_sums, row_averages), row_averages)], totals))
        before.copy_(_totals(row_averages, before))


def factored_averages(
    row_averages: Sequence[Tensor],
    col_averages: Sequence[Tensor],
    row_sums: Tensor,
    col_sums: Tensor,
    totals: Tensor,
    before: Tensor,
    row_factors: Tensor,
    col_factors: Tensor,
    *,
    heights: Sequence[int],
    widths: Sequence[int],
    decay: float,
) -> None:
    """Update the averages, and compute the factors; row factor * column factor = 1 / sqrt(average of the element).

    For each matrix, with the sums of all ranks::

        r = decay * r + (1 - decay) * row_sums / width            row_averages
        c = decay * c + (1 - decay) * col_sums / height           col_averages
        mean = decay * before / height + (1 - decay) * totals / (height * width)      the mean of all r
        row_factors = 1 / sqrt(r / mean)
        col_factors = 1 / sqrt(c)

    Entries of col_averages beyond the length of row_averages belong to matrices without row averages, which get only
    column factors.

    Args:
        row_averages: float32, (*batch, R) each, contiguous. Written.
        col_averages: float32, (*batch, C) each, contiguous. Written.
        row_sums, col_sums: float32, vectors with an element for each of the averages, end to end. Only read.
        totals, before: the results of :func:`factored_totals`, added up over the ranks. Only read.
        row_factors, col_factors: float32, vectors, contiguous, at least as long as row_sums and col_sums; further
            elements become 1. They may be the memory of row_sums and col_sums. Written.
        heights: the number of rows on all ranks together, for each of col_averages.
        widths: the number of columns on all ranks together, for each of row_averages.
        decay: as in the formula, from 0 to 1.

    Raises:
        TypeError: something is no tensor, or not float32; a height or width is no integer.
        ValueError: tensors do not fit each other, are not contiguous, or overlap what is written; a number out of
            range.

    Source: Shazeer & Stern, arXiv:1804.04235, algorithm 4; the mean of r is linear in r, so it follows from the sums of
    the ranks.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay is {decay}; it must be from 0 to 1")
    for name, counts in (("heights", heights), ("widths", widths)):
        if not all(isinstance(count, int) for count in counts):
            raise TypeError(f"{name} is {counts!r}; it must be a list of integers")
        if min(counts, default=1) < 1:
            raise ValueError(f"{name} has the entry {min(counts)}; it must be at least 1")
    device = _device("col_averages", col_averages, col_factors)
    given = (row_averages, col_averages, row_sums, col_sums, totals, before, heights, widths, row_factors, col_factors)
    if not _launched("averages", device, given, decay):
        _check_list("row_averages", row_averages, device)
        _check_list("col_averages", col_averages, device)
        for name, counts, averages in (("heights", heights, col_averages), ("widths", widths, row_averages)):
            if len(counts) != len(averages):
                raise ValueError(f"{name} has {len(counts)} entries; it must be {len(averages)}, one for each average")
        if len(col_averages) < len(row_averages):
            raise ValueError(
                f"col_averages has {len(col_averages)} entries; it must be {len(row_averages)} or more, as row_averages"
            )
        rows, cols = (sum(a.numel() for a in averages) for averages in (row_averages, col_averages))
        _check_vector("row_sums", row_sums, rows, device)
        _check_vector("col_sums", col_sums, cols, device)
        _check_vector("totals", totals, sum(_matrices(r) for r in row_averages), device)
        _check_vector("before", before, sum(_matrices(r) for r in row_averages), device)
        _check_vector("row_factors", row_factors, rows, device, or_more=True)
        _check_vector("col_factors", col_factors, cols, device, or_more=True)
        vectors = {"totals": totals, "before": before, "row_factors": row_factors, "col_factors": col_factors}
        for name, sums, factors in (("row_sums", row_sums, row_factors), ("col_sums", col_sums, col_factors)):
            if tracing() or sums.data_ptr() != factors.data_ptr():
                vectors[name] = sums
        lists = {"row_averages": row_averages, "col_averages": col_averages}
        _check_memory(lists, vectors, written=(*lists, "row_factors", "col_factors"))
        with torch.no_grad():
            _move(row_averages, row_sums, widths, decay)
            _move(col_averages, col_sums, heights, decay)
            if row_averages:
                shapes = [r.shape[:-1] for r in row_averages]
                scales = [(decay / h, (1 - decay) / (h * w)) for h, w in zip(heights, widths)]
                means = torch._foreach_mul(_shaped(before, shapes), [old for old, _ in scales])
                torch._foreach_add_(means, torch._foreach_mul(_shaped(totals, shapes), [new for _, new in scales]))
                each = torch.cat([m.unsqueeze(-1).expand(r.shape).reshape(-1) for m, r in zip(means, row_averages)])
                row_factors[:rows].copy_((_flat(row_averages) / each).rsqrt_())
            if col_averages:
                col_factors[:cols].copy_(_flat(col_averages).rsqrt_())
            row_factors[rows:].fill_(1)
            col_factors[cols:].fill_(1)
        return
    increment_version([*row_averages, *col_averages, row_factors, col_factors])


def _device(name: str, averages: Sequence[Tensor], vector: Tensor) -> torch.device:
    check_sequence(name, averages)
    for where, tensor in ((f"{name}[0]", averages[0] if len(averages) else vector), ("a vector", vector)):
        _check_tensor(where, tensor)
    return averages[0].device if len(averages) else vector.device


def _launched(operation: str, device: torch.device, arguments: Sequence[object], *numbers: float) -> bool:
    """Run a kernel if there is one; returns whether it ran. It does not for arguments that are unusual, or wrong."""
    code = _DLPACK_DEVICES.get(device.type)
    if tracing() or _native.cpu_module is None or code is None:
        return False
    cpu = _native.cpu_kernels() if device.type == "cpu" else None
    cuda = None if cpu is not None else _native.cuda_kernels(device)
    if cpu is None and cuda is None:
        return False
    table = getattr(_native.cpu_module, f"pack_{operation}")(*arguments, device, code, device.index or 0)
    if table is None:
        return False
    if cpu is not None:
        getattr(cpu.module, f"factored_{operation}")(table, *numbers)
    elif cuda is not None:
        getattr(cuda.module, f"factored_{operation}")(cuda.device, cuda.stream, table, *numbers)
    return True


def _check_list(name: str, averages: Sequence[Tensor], device: torch.device) -> None:
    check_sequence(name, averages)
    for i, average in enumerate(averages):
        _check(f"{name}[{i}]", average, device)
        if average.dim() < 1:
            raise ValueError(f"{name}[{i}] has no dimension; it must be of shape (*batch, length)")


def _check_vector(name: str, vector: Tensor, count: int, device: torch.device, or_more: bool = False) -> None:
    _check(name, vector, device)
    if vector.dim() != 1 or vector.numel() < count or (vector.numel() > count and not or_more):
        wanted = f"({count},)" + (" or longer" if or_more else "")
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it must be {wanted}, for the averages end to end")


def _check(where: str, tensor: Tensor, device: torch.device) -> None:
    _check_tensor(where, tensor)
    check_memory(where, tensor)
    if tensor.dtype is not torch.float32:
        raise TypeError(f"{where} has dtype {tensor.dtype}; it must be torch.float32")
    if tensor.device != device:
        raise ValueError(f"{where} is on {tensor.device}; it must be on {device} like the others")
    if not tensor.is_contiguous():
        raise ValueError(f"{where} has strides {tensor.stride()}; it must be contiguous")


def _check_memory(lists: Mapping[str, Sequence[Tensor]], vectors: Mapping[str, Tensor], written: Sequence[str]) -> None:
    if tracing():
        return  # a graph's tensors have no addresses yet
    named = [
        (f"{name}[{i}]", tensor, name in written) for name, list_ in lists.items() for i, tensor in enumerate(list_)
    ]
    named += [(name, tensor, name in written) for name, tensor in vectors.items()]
    extents = [(_address(where, t), t.nbytes, where, is_written) for where, t, is_written in named]
    _check_overlaps([(at, at + size, where, is_written) for at, size, where, is_written in extents if at])


def _matrices(average: Tensor) -> int:
    return average.shape[:-1].numel()


def _split(vector: Tensor, averages: Sequence[Tensor]) -> Sequence[Tensor]:
    return vector.split([a.numel() for a in averages])


def _shaped(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(vector.split([s.numel() for s in shapes]), shapes)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _totals(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sums over the last dimension; the numbers are not negative."""
    if not rows:
        return torch.empty_like(like)
    vectors = [r for r in rows if r.dim() == 1]
    vector_sums = iter(torch._foreach_norm(vectors, 1) if vectors else [])  # in one launch
    return _flat([next(vector_sums) if r.dim() == 1 else r.sum(-1) for r in rows])


def _move(averages: Sequence[Tensor], sums: Tensor, counts: Sequence[int], decay: float) -> None:
    if averages:
        parts = [part.view(a.shape) for part, a in zip(_split(sums, averages), averages)]
        torch._foreach_mul_(list(averages), decay)
        torch._foreach_add_(list(averages), torch._foreach_mul(parts, [(1 - decay) / count for count in counts]))

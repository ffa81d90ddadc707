"""Runs: tensors that lie end to end in memory, treated as one flat tensor.

ZeRO keeps the parameters of a Block, and their gradients, in flat buffers. So most neighbours in an optimizer's
parameter list are neighbours in memory, and one kernel or one fill over a run replaces one per tensor.
:func:`plan_runs` is pure: it sees addresses, not tensors. The other functions look at tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from bmt_comm import is_dtensor, without_autocast

P = ParamSpec("P")
R = TypeVar("R")
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one contiguous tensor.

    Attributes:
        key: extents with different keys (dtype, device) are never in one run.
        start: address of the first byte.
        nbytes: length, more than 0.
        limit: address after the last byte of the allocation. Adjacent extents form a run only inside one
            allocation: allocators put unrelated tensors side by side, too.
    """

    key: Hashable
    start: int
    nbytes: int
    limit: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def plan_runs(extents: Sequence[Extent | None]) -> list[list[int]]:
    """Group the indices of ``extents`` into maximal runs, each in ascending order of address.

    ``None`` (a tensor that is empty or not contiguous) is a run by itself, and so is an extent that
    overlaps another. Every index appears exactly once. Runs are ordered by their smallest index.
    """
    runs = [[index] for index, extent in enumerate(extents) if extent is None]
    chains: dict[Hashable, list[tuple[Extent, int]]] = {}
    for index, extent in enumerate(extents):
        if extent is not None:
            chains.setdefault(extent.key, []).append((extent, index))
    for chain in chains.values():
        chain.sort(key=lambda item: (item[0].start, item[0].nbytes, item[1]))
        previous: Extent | None = None
        for extent, index in chain:
            if previous is not None and previous.stop == extent.start and extent.stop <= previous.limit:
                runs[-1].append(index)
            else:
                runs.append([index])
            previous = extent
    return sorted(runs, key=min)


def extent_of(tensor: Tensor, key: Hashable = None) -> Extent | None:
    """The bytes of ``tensor``; ``None`` if it is empty or not contiguous.

    Extents of another dtype, device or ``key`` are never put in one run.
    """
    start = tensor.data_ptr()
    if start == 0 or not tensor.is_contiguous():
        return None
    storage = tensor.untyped_storage()
    return Extent(
        (tensor.dtype, tensor.device, key),
        start,
        tensor.nbytes,
        storage.data_ptr() + storage.nbytes(),
    )


def places_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[torch.dtype], list[bool]]:
    """Address, dtype, and whether it is contiguous, of each tensor."""
    return list(map(Tensor.data_ptr, tensors)), list(map(_dtype, tensors)), list(map(Tensor.is_contiguous, tensors))


def flat_view(first: Tensor, numel: int) -> Tensor:
    """The ``numel`` elements from the first element of ``first`` on, as a 1-D view of its storage."""
    return first.as_strided((numel,), (1,))


def flat_over(tensors: Sequence[Tensor | None], offsets: Sequence[int], numel: int) -> Tensor | None:
    """One flat view over ``tensors`` if they lie at ``offsets`` (in elements) from the first.

    ``None`` if they do not, one is missing, or one has another dtype, is not contiguous or is negated.
    """
    first = tensors[0]
    if first is None:
        return None
    there = [tensor for tensor in tensors if tensor is not None]
    base, itemsize = first.data_ptr(), first.element_size()
    addresses, dtypes, are_contiguous = places_of(there)
    if addresses != [base + offset * itemsize for offset in offsets] or not all(are_contiguous):
        return None
    if dtypes.count(first.dtype) < len(dtypes):
        return None
    if numel == len(there) and any(map(Tensor.is_neg, there)):
        return None  # the parts of one complex number, of which PyTorch negates one when it is read
    storage = first.untyped_storage()
    if base + numel * itemsize > storage.data_ptr() + storage.nbytes():
        return None  # adjacent by chance, in another allocation
    return flat_view(first, numel)


def merge_adjacent(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in as few tensors: flat views over tensors that follow one another in memory.

    Empty tensors are dropped. A tensor that is not contiguous is passed on as it is.
    """
    merged: list[Tensor] = []
    first: Tensor | None = None  # of the current run, which spans [start of first, stop)
    start = stop = limit = count = 0
    for tensor in tensors:
        address = tensor.data_ptr()
        if address == 0:
            continue
        if first is not None and address == stop and tensor.dtype is first.dtype and tensor.is_contiguous():
            end = address + tensor.nbytes
            if end <= limit:
                stop, count = end, count + 1
                continue
        if first is not None:
            merged.append(first if count == 1 else flat_view(first, (stop - start) // first.element_size()))
        if not tensor.is_contiguous():
            merged.append(tensor)
            first = None
            continue
        storage = tensor.untyped_storage()
        first, start, stop, count = tensor, address, address + tensor.nbytes, 1
        limit = storage.data_ptr() + storage.nbytes()
    if first is not None:
        merged.append(first if count == 1 else flat_view(first, (stop - start) // first.element_size()))
    return merged


def on_local_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without gradient mode, autocast, and the torch functions of tensor subclasses.

    These torch functions intercept an access to ``.grad`` or an address. That would cost more than all else that an
    optimizer does for a small parameter.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), without_autocast():
            return function(*args, **kwargs)

    return run


def local_grad(param: Tensor) -> Tensor | None:
    """The plain tensor that holds this rank's part of ``param.grad``; ``None`` where there is none.

    A DTensor gradient is redistributed to its parameter's placements if it has others: all of its ranks must call this.

    Raises:
        RuntimeError: the gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return None
    if type(grad) is Tensor and grad.layout is torch.strided:
        return grad
    if hasattr(grad, "to_local"):
        with torch.no_grad():
            if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
                # Autograd may leave a sum over ranks undone (a Partial placement). Keep the result for later readers.
                grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
                param.grad = grad
            grad = grad.to_local()
    if grad.layout is not torch.strided:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} is sparse; sparse gradients are not supported")
    return grad


@on_local_tensors
def zero_grads(params: Iterable[Tensor]) -> None:
    """Fill all gradients with zeros. Those that are adjacent in memory take one fill."""
    grads = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.grad_fn is not None:
            grad.detach_()
        elif grad.requires_grad:
            grad.requires_grad_(False)
        # A Partial placement is zeroed without its sum.
        local: Any = grad.to_local() if is_dtensor(grad) else local_grad(param)  # type: ignore[attr-defined]
        assert local is not None
        grads.append(local)
        if hasattr(grad, "was_overwritten"):  # tells bmt_zero to drop what it was going to add to it
            grad.was_overwritten = True
    for flat in merge_adjacent(grads):
        flat.zero_()

"""The memory ranges of tensors, and whether they overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor


def is_as_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and is neither conjugated nor negated lazily."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_in_memory(tensor: Tensor) -> Tensor:
    return tensor if is_as_in_memory(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def addresses(tensor: Tensor) -> tuple[int, int]:
    """The address of the first element, and the address behind the last one."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return begin, begin + size * tensor.numel()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + size * (last + 1)


def overlap(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether any two ranges of addresses overlap."""
    in_order = sorted((begin, end) for begin, end in ranges if begin < end)
    return any(second[0] < first[1] for first, second in itertools.pairwise(in_order))


def without_the_inner(a: tuple[int, int], b: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Both ranges of addresses, or only the outer one if it contains the other."""
    if a[0] <= b[0] and b[1] <= a[1]:
        return (a,)
    return (b,) if b[0] <= a[0] and a[1] <= b[1] else (a, b)


def overlap_in_part(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, but do not lie at the same addresses."""
    first, second = addresses(a), addresses(b)
    return first != second and first[0] < second[1] and second[0] < first[1]


def copy_between(target: Tensor, source: Tensor) -> None:
    """Copy, also between tensors that overlap; torch refuses that."""
    target.copy_(source.clone() if overlap_in_part(target, source) else source)


def received(tensor: Tensor) -> Tensor:
    """The tensor into which a single message is received.

    Raises:
        ValueError: it is not contiguous, or is conjugated or negated lazily.
    """
    data: Tensor = tensor.data
    if not is_as_in_memory(data):
        raise ValueError("a message cannot be received into a tensor that is conjugated or negated lazily")
    return data


def vector(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a vector of stride 1. A view would keep another stride of a single element."""
    return tensor.as_strided((tensor.numel(),), (1,))

"""Filling tensors from a source. Each rank reads its own parts, in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bmt_comm import unsharded_slice
from bmt_zero.state import some_names

from .contents import Content
from .headers import DTYPES, DamagedError, Entry
from .regions import Region, clip, flat_bytes, local_view, logical_view, regions_of
from .sources import CHUNK, IN_PLACE, Source

_MOST_SHARING = 16
"""The most bytes of tensors per byte of the files. Tensors in a file may share memory."""


def check_fit(
    offered: Iterable[Entry], wanted: Sequence[Entry], what: str, strict: bool = True, exact: bool = False
) -> list[str]:
    """The differences between the tensors that a source has and those that are needed; empty if the source fits.

    Args:
        what: names the source in the messages.
        strict: whether the source must have exactly the needed tensors.
        exact: whether dtypes must be equal. Otherwise floating-point numbers may be converted.
    """
    has, needs = {entry.name: entry for entry in offered}, {entry.name: entry for entry in wanted}
    problems = []
    missing, surplus = [n for n in needs if n not in has], [n for n in has if n not in needs]
    if strict and missing:
        problems.append(f"{what} lacks {some_names(missing)}")
    if strict and surplus:
        problems.append(f"{what} has {some_names(surplus)}, which is not wanted")
    for name, entry in needs.items():
        theirs = has.get(name)
        if theirs is None:
            continue
        if theirs.shape != entry.shape:
            problems.append(f"{name!r} has shape {theirs.shape} in {what}, and {entry.shape} here")
        elif theirs.dtype != entry.dtype and (exact or not converts(DTYPES[theirs.dtype], DTYPES[entry.dtype])):
            problems.append(f"{name!r} has dtype {theirs.dtype} in {what}, and {entry.dtype} here")
        if len(problems) > 5:
            return [*problems[:5], "and more"]
    return problems


def converts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether numbers of one dtype may be read into tensors of another."""
    return source == target or (source is not None and source.is_floating_point and target.is_floating_point)


def check_range(contents: Iterable[Content], source: Source) -> None:
    """Check that no finite number of a source becomes infinite in the dtype of the tensor that it is read into.

    Only tensors whose own dtype has a smaller range than the source's are read for this. The tensors of ``contents``
    may be on the meta device.

    Raises:
        ValueError: a finite number becomes infinite.
        DamagedError: the source cannot be read.
    """
    for content in contents:
        entry, target = source.entries[content.entry.name], content.tensor.dtype
        dtype = DTYPES[entry.dtype]
        if not (dtype.is_floating_point and target.is_floating_point):
            continue
        if torch.finfo(target).max >= torch.finfo(dtype).max:
            continue
        for chunk in _chunks(regions_of(content.where, entry.itemsize), CHUNK):
            values = _numbers(source.read(entry.name, chunk.start, chunk.stop), dtype)
            if not torch.equal(_wide(values.to(target)).isfinite(), _wide(values).isfinite()):
                raise ValueError(
                    f"{entry.name!r} has numbers of {dtype} that are infinite in {target}; use a wider dtype. Nothing "
                    "was loaded"
                )


def _wide(values: Tensor) -> Tensor:
    """Numbers of one byte as float32, which torch can compute with; others as they are."""
    return values.float() if values.dtype.itemsize == 1 else values


def fill(contents: Iterable[Content], source: Source) -> None:
    """Read this rank's parts of tensors from a source, which has tensors of the same shapes.

    Raises:
        DamagedError: the source cannot be read. Some tensors may be written already.
    """
    with torch.no_grad():
        for content in contents:
            target = Target(content, source.entries[content.entry.name])
            for chunk in target.chunks():
                target.read(chunk, source)
            target.finish()
    source.finish()


class Target:
    """This rank's part of a tensor, while it is being written.

    Args:
        content: the part.
        stored: the tensor in the source, with the same name and shape. The dtype may differ.
    """

    def __init__(self, content: Content, stored: Entry) -> None:
        self._name, self._dtype = stored.name, DTYPES[stored.dtype]
        self._regions = regions_of(content.where, stored.itemsize)
        self._tensor = content.tensor.detach()
        self._in_place = self._dtype == self._tensor.dtype and self._tensor.device.type == "cpu"
        self._written = self._tensor
        if not self._tensor.is_contiguous() or self._tensor.is_conj() or self._tensor.is_neg():
            self._written = torch.empty_like(self._tensor, memory_format=torch.contiguous_format)

    def chunks(self) -> Iterator[Region]:
        return _chunks(self._regions, IN_PLACE if self._in_place else CHUNK)

    def read(self, chunk: Region, source: Source) -> None:
        """Read a chunk."""
        if self._in_place and chunk.runs == 1:
            flat = flat_bytes(self._written)
            source.read_into(self._name, chunk.start, flat[chunk.local : chunk.local + chunk.run])
        else:
            self._put(chunk, source.read(self._name, chunk.start, chunk.stop))

    def take(self, low: int, window: Tensor) -> None:
        """Write this rank's part of ``window``: the bytes of the logical tensor from ``low`` on; uint8, 1-D, on any
        device."""
        for region in self._regions:
            for part in clip(region, low, low + len(window)):
                self._put(part, window[part.start - low : part.stop - low])

    def _put(self, chunk: Region, window: Tensor) -> None:
        """Write the runs of a region from a window that begins with the first run."""
        if self._dtype == self._tensor.dtype:
            local_view(flat_bytes(self._written), chunk).copy_(logical_view(window, chunk, chunk.start))
            return
        size = self._dtype.itemsize
        in_elements = Region(0, *(n if k == 2 else n // size for k, n in enumerate(chunk[1:])))
        numbers = logical_view(_numbers(window, self._dtype), in_elements, 0)
        local_view(self._written.view(-1), in_elements).copy_(numbers)

    def finish(self) -> None:
        """Complete the tensor after all its bytes were written."""
        if self._written is not self._tensor:
            self._tensor.copy_(self._written)
        torch.autograd.graph.increment_version([self._tensor])  # reading in place does not increment it


def _numbers(window: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. They are copied if their offset is not aligned."""
    return (window.clone() if window.storage_offset() % dtype.itemsize else window).view(dtype)


def read_tensor(source: Source, name: str) -> Tensor:
    """A tensor of a source, in memory."""
    entry = source.entries[name]
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
    fill([Content(entry, unsharded_slice(tensor), tensor)], source)
    return tensor


@torch.inference_mode(False)  # a model's own code may keep the tensors
@torch.no_grad()
def read_unsharded(source: Source) -> dict[str, Tensor]:
    """All tensors of a source, unsharded, as a state dict. Tied ones are one tensor.

    Raises:
        DamagedError: the source cannot be read, or :func:`check_total` raises it.
    """
    check_total(source)
    tensors: dict[str, Tensor] = {}
    for name in source.entries:
        first = source.tied.get(name, name)
        tensors[name] = tensors[first] if first in tensors else read_tensor(source, name)
    return tensors


def check_total(source: Source) -> None:
    """Raise DamagedError if all tensors together would take far more memory than the files have bytes.

    Tensors in a ``torch.save`` file may share memory. A hostile file could use this to fill the memory of the machine.
    """
    total = sum(entry.nbytes for name, entry in source.entries.items() if name not in source.tied)
    if total > _MOST_SHARING * source.nbytes:
        raise DamagedError(
            f"the file has {source.nbytes} bytes, and its {len(source.entries)} tensors, which share memory, have "
            f"{total}; they are not all read at once"
        )


def _chunks(regions: Iterable[Region], most: int) -> Iterator[Region]:
    """The same runs, in regions that span at most :data:`CHUNK` bytes, or ``most`` bytes if they have one run."""
    for region in regions:
        start, run, local, count, stride, local_stride = region
        together = 1 if count == 1 or run > CHUNK else max(1, (CHUNK - run) // stride + 1)
        for number in range(0, count, together):
            several = min(together, count - number)
            at, local_at = start + number * stride, local + number * local_stride
            if several > 1:
                yield Region(at, run, local_at, several, stride, local_stride)
                continue
            for begin in range(0, run, most):
                yield Region(at + begin, min(most, run - begin), local_at + begin)


def is_finite(flat: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a tensor, given as bytes, are finite."""
    if not (dtype.is_floating_point or dtype.is_complex) or not flat.numel():
        return True
    values, step = flat.view(dtype), 1 << 20
    return all(bool(torch.isfinite(_wide(values[at : at + step])).all()) for at in range(0, values.numel(), step))

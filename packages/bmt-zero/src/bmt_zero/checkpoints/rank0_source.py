"""A file that rank 0 reads and broadcasts, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmt_comm import ParallelContext, errors_on_all, local_tensor, raise_on_all, slice_of, unsharded_slice
from bmt_zero.stage_entry import StageEntry
from bmt_zero.state import dtype_of, shape_of

from .contents import Content
from .headers import DTYPES, Entry
from .pretrained import open_source
from .reader import Target, check_range, check_total, converts, read_tensor
from .sources import CHUNK, IN_PLACE


class Rank0Source:
    """A file that rank 0 reads for all ranks.

    After an error on rank 0, methods continue with arbitrary values, so that other ranks do not wait. :meth:`check`
    then raises the error on every rank.

    Args:
        at_once: whether all tensors will be in memory at the same time.

    Attributes:
        facts: the name, the shape (``None`` if it is not a tensor) and the dtype of all entries.
        tied: the first name of each tensor that has several.
        versions: of the modules; see :func:`~bmt_zero.state.with_versions`.
    """

    def __init__(self, path: Path, context: ParallelContext, at_once: bool) -> None:
        self.path, self.context = path, context
        self._source: Any = None
        self._problem: Exception | None = None
        facts: list[tuple[str, tuple[int, ...] | None, torch.dtype | None]] = []
        tied: dict[str, str] = {}
        versions: Any = None
        with errors_on_all(context.world):
            if context.rank == 0:
                self._source = open_source(path)
                if at_once:
                    check_total(self._source)
                tied, versions = dict(self._source.tied), self._source.versions
                facts = [(name, each.shape, DTYPES[each.dtype]) for name, each in self._source.entries.items()]
                facts += [(name, shape_of(value), dtype_of(value)) for name, value in self._source.others.items()]
        self.facts, self.tied, self.versions = context.world.broadcast_object((facts, tied, versions))

    def _read(self, name: str, low: int, high: int) -> Tensor | None:
        """Bytes of a tensor, on rank 0; ``None`` on other ranks and after an error, which :meth:`check` raises."""
        if self._source is None:
            return None
        try:
            window: Tensor = self._source.read(name, low, high)
            return window.to(self.context.world.device)
        except Exception as error:
            self._problem = self._problem or error
            return None

    def receive(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Any:
        """The value of an entry, on every rank."""
        value: Any = None
        if self._source is not None:
            value = self._source.others.get(name)
            if name in self._source.entries:
                value = torch.zeros(shape or (), dtype=dtype, device="cpu")
                try:
                    value = read_tensor(self._source, name)
                except Exception as error:
                    self._problem = self._problem or error
        return StageEntry(value, shape, dtype, self.context.world, owner=0).spread(value)

    def check_dtypes(self, dtypes: Mapping[str, torch.dtype | None]) -> None:
        """Raise ValueError on every rank if entries cannot be converted to these dtypes.

        They can if the dtypes are equal, or if both are floating-point dtypes and no finite number becomes infinite.
        """
        for name, _, dtype in self.facts:
            mine = dtypes.get(name)
            if mine is not None and not converts(dtype, mine):
                raise ValueError(f"{self.path}: {name!r} has dtype {dtype}, the model's has {mine}; nothing was loaded")
        with errors_on_all(self.context.world):
            if self._source is None:
                return
            entries: Mapping[str, Entry] = self._source.entries
            known = [entry for entry in entries.values() if dtypes.get(entry.name) is not None]
            targets = [torch.empty(entry.shape, dtype=dtypes[entry.name], device="meta") for entry in known]
            check_range([Content(each, unsharded_slice(t), t) for each, t in zip(known, targets)], self._source)

    def stream(self, entry: Entry, target: Tensor | None) -> None:
        """Broadcast a tensor in chunks, and write this rank's part of it into ``target``, if that is not ``None``."""
        comm, part = self.context.world, None
        if target is not None:
            part = Target(Content(entry, slice_of(target), local_tensor(target)), entry)
        # One buffer for all chunks: separate ones fragment the heap, which grows by many times their size.
        buffer = torch.empty(min(CHUNK, entry.nbytes), dtype=torch.uint8, device=comm.device)
        for low in range(0, entry.nbytes, CHUNK):
            high = min(low + CHUNK, entry.nbytes)
            window = self._read(entry.name, low, high)
            window = buffer[: high - low] if window is None else window
            comm.broadcast(window, root=0)
            if part is not None:
                with torch.no_grad():
                    part.take(low, window)
            if high % IN_PLACE == 0:
                comm.barrier()  # limits how far rank 0 runs ahead, since pending broadcasts take memory
        if part is not None:
            with torch.no_grad():
                part.finish()

    def check(self) -> None:
        """Raise rank 0's error on every rank."""
        raise_on_all(self.context.world, self._problem)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

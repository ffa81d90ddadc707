"""``config``: the layout as the read-only mapping that BMTrain scripts look things up in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import context as _context
from .context import ParallelContext

_LOOKUP: dict[str, Callable[[ParallelContext], Any]] = {
    "rank": lambda c: c.rank,
    "local_rank": lambda c: c.local_rank,
    "world_size": lambda c: c.world_size,
    "local_size": lambda c: c.local_size,
    "device": lambda c: c.device,
    "pipe_enabled": lambda c: c.pipe_size > 1,
    "pipe_size": lambda c: c.pipe_size,
    "pipe_rank": lambda c: c.pipe_rank,
    "data_size": lambda c: c.data_size,
    "data_rank": lambda c: c.data_rank,
    "micros": lambda c: c.num_micro_batches,
    "tp_size": lambda c: c.tp_size,
    "tp_rank": lambda c: c.tp_rank,
    "zero_level": lambda c: c.zero_level,
    "zero_size": lambda c: c.outer_zero.size,
    "zero_rank": lambda c: c.outer_zero.rank,
    "tp_zero_size": lambda c: c.outer_tp_zero.size,
    "tp_zero_rank": lambda c: c.outer_tp_zero.rank,
    "topology": lambda c: c,
    "comm": lambda c: c.world,
    "zero_comm": lambda c: c.outer_zero,
    "tp_zero_comm": lambda c: c.outer_tp_zero,
    "pp_zero_comm": lambda c: c.zero,
    "pp_tp_zero_comm": lambda c: c.tp_zero,
    "tp_comm": lambda c: c.tp,
    "pipe_comm": lambda c: c.pipe,
    "load_stream": lambda c: c.zero.stream,
    "calc_stream": lambda c: torch.cuda.current_stream(c.device) if c.device.type == "cuda" else None,
}


class Config(Mapping[str, Any]):
    """Read-only view of the process-wide :class:`ParallelContext` under BMTrain's names.

    Before ``init_distributed`` it holds ``initialized`` alone.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return _context.is_initialized()
        if key not in _LOOKUP:
            raise KeyError(key)
        if not _context.is_initialized():
            raise KeyError(f"{key}: there is none before init_distributed()")
        return _LOOKUP[key](_context.current_context())

    def __iter__(self) -> Iterator[str]:
        yield "initialized"
        if _context.is_initialized():
            yield from _LOOKUP

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Config({dict(self)})"


config = Config()


def rank() -> int:
    """This process's rank in the world."""
    return _context.current_context().rank


def world_size() -> int:
    """The number of processes of the job."""
    return _context.current_context().world_size

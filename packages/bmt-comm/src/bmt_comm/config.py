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
    "deterministic": lambda c: c.deterministic,
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
    "barrier_stream": lambda c: c.world.stream,
    "tp_comm_stream": lambda c: c.tp.stream,
    "pp_comm_stream": lambda c: c.pipe.stream,
    "calc_stream": lambda c: torch.cuda.current_stream(c.device) if c.device.type == "cuda" else None,
}


_BEFORE_INIT: dict[str, Any] = {
    **dict.fromkeys(("rank", "local_rank", "pipe_rank", "data_rank", "tp_rank", "zero_rank", "tp_zero_rank"), 0),
    **dict.fromkeys(("world_size", "local_size", "pipe_size", "data_size", "tp_size", "zero_size", "tp_zero_size"), 1),
    "pipe_enabled": False,
}
"""One process by itself."""


class Config(Mapping[str, Any]):
    """Read-only view of the process-wide :class:`ParallelContext` under BMTrain's names.

    Before ``init_distributed`` ranks are 0 and sizes 1, and there are no communicators.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return _context.is_initialized()
        if key not in _LOOKUP:
            raise KeyError(key)
        if not _context.is_initialized():
            if key in _BEFORE_INIT:
                return _BEFORE_INIT[key]
            raise KeyError(f"{key}: there is none before init_distributed()")
        return _LOOKUP[key](_context.current_context())

    def __iter__(self) -> Iterator[str]:
        yield "initialized"
        yield from _LOOKUP if _context.is_initialized() else _BEFORE_INIT

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Config({dict(self)})"


config = Config()


def rank() -> int:
    """This process's rank in the world; 0 before ``init_distributed``."""
    value: int = config["rank"]
    return value


def world_size() -> int:
    """The number of processes of the job; 1 before ``init_distributed``."""
    value: int = config["world_size"]
    return value

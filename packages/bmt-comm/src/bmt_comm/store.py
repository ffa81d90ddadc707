"""Python objects between the ranks of one job.

Objects travel as pickles, which is safe only between processes that one user has started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .communicator import Communicator
from .context import current_context


def broadcast_object(obj: Any, comm: Communicator | None = None, src: int = 0) -> Any:
    """Rank ``src``'s ``obj`` on every rank of ``comm`` (by default the world)."""
    return (comm or current_context().world).broadcast_object(obj, src)


def allgather_objects(obj: Any, comm: Communicator | None = None) -> list[Any]:
    """Every rank's ``obj``, in rank order."""
    return (comm or current_context().world).all_gather_object(obj)


class DistributedStateDictWrapper(Mapping[str, Any]):
    """The state dict of rank 0 on every rank; the other ranks pass an empty one.

    Looking up an entry broadcasts it: every rank looks up the same ones in the same order. (``bmt.load`` reads a file
    with less memory and communication.)

    Args:
        state_dict: names to tensors or other objects; only that of rank 0 is used.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._entries = dict(state_dict)
        self._kinds: dict[str, tuple[torch.Size, torch.dtype] | None] = broadcast_object(
            {name: (x.shape, x.dtype) if isinstance(x, Tensor) else None for name, x in self._entries.items()}
        )

    def __getitem__(self, name: str) -> Any:
        kind = self._kinds[name]
        world = current_context().world
        if kind is None:
            return broadcast_object(self._entries.get(name))
        result = torch.empty(kind[0], dtype=kind[1], device=world.device)
        if world.rank == 0:
            result.copy_(self._entries[name])
        world.broadcast(result, 0)
        return result

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

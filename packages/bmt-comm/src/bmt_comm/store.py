"""Python objects between the ranks of one job.

Objects travel as pickles: fine among processes that one user started, and used for nothing else.
"""

from __future__ import annotations

from typing import Any

from .communicator import Communicator
from .context import current_context


def broadcast_object(obj: Any, comm: Communicator | None = None, src: int = 0) -> Any:
    """Rank ``src``'s ``obj`` on every rank of ``comm`` (by default the world)."""
    return (comm or current_context().world).broadcast_object(obj, src)


def allgather_objects(obj: Any, comm: Communicator | None = None) -> list[Any]:
    """Every rank's ``obj``, in rank order."""
    return (comm or current_context().world).all_gather_object(obj)

"""Messages between the pool and its rank processes: pickles of these classes, sent over a socket pair.

The pickles are made with the plain :mod:`pickle` module, not with ``multiprocessing``'s, so that tensors
travel by value and not through shared memory that a dying process would leave behind.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Ready:
    """Rank to pool: torch is imported, calls are welcome."""


@dataclass(frozen=True)
class Call:
    """Pool to rank: run ``function(*args)``, both pickled in ``payload``."""

    number: int  # of this call, counted by the pool
    payload: bytes
    module: Any  # a ModuleSource to load before unpickling, or None
    environ: dict[str, str]
    directory: str
    path: list[str]


@dataclass(frozen=True)
class Done:
    """Rank to pool: the call returned; ``value`` is the pickled result."""

    value: bytes


@dataclass(frozen=True)
class Failed:
    """Rank to pool: the call, or the cleaning up after it, raised."""

    traceback: str
    error_type: str = ""


@dataclass(frozen=True)
class CleanUp:
    """Pool to rank: every rank is done, so process groups may be torn down."""


@dataclass(frozen=True)
class Clean:
    """Rank to pool: as good as new."""


@dataclass
class FormattedError(BaseException):
    """Raised on a rank by code that formats its traceback itself."""

    traceback: str
    error_type: str = field(default="")

    def __post_init__(self) -> None:
        super().__init__(self.traceback)


def send(connection: Connection, message: object) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())

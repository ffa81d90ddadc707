"""A process-wide place to put values while debugging: each rank has its own, and nothing reads it by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_values: dict[str, Any] = {}


def clear(key: str | None = None) -> None:
    """Forget what is under ``key`` (nothing, if nothing is), or everything."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)


def set(key: str, value: Any) -> None:
    """Put ``value`` under ``key``, in place of what was there."""
    _values[key] = value


def get(key: str, default: Any = None) -> Any:
    """What is under ``key``, or ``default``."""
    return _values.get(key, default)


def append(key: str, value: Any) -> None:
    """Add ``value`` to the list under ``key``, which is made if it is not there.

    Raises:
        TypeError: something else than a list is under ``key``.
    """
    _list(key).append(value)


def extend(key: str, value: Iterable[Any]) -> None:
    """Add each of ``value`` to the list under ``key``, which is made if it is not there.

    Raises:
        TypeError: something else than a list is under ``key``.
    """
    _list(key).extend(value)


def _list(key: str) -> list[Any]:
    found = _values.setdefault(key, [])
    if not isinstance(found, list):
        raise TypeError(f"key={key!r} holds a {type(found).__name__}, not a list; clear it first, or use another key")
    return found

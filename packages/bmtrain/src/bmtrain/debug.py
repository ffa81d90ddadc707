"""A dictionary of values for debugging. Each process has its own, and only the user reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_values: dict[str, Any] = {}


def clear(key: str | None = None) -> None:
    """Remove the value of ``key``, if there is one. Without ``key``, remove everything."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)


def set(key: str, value: Any) -> None:
    """Store ``value`` under ``key``, in place of an earlier value."""
    _values[key] = value


def get(key: str, default: Any = None) -> Any:
    """The value of ``key``, or ``default``."""
    return _values.get(key, default)


def append(key: str, value: Any) -> None:
    """Append ``value`` to the list under ``key``. The list is made if it does not exist.

    Raises:
        TypeError: the value of ``key`` is not a list.
    """
    _list(key).append(value)


def extend(key: str, value: Iterable[Any]) -> None:
    """Append each of ``value`` to the list under ``key``. The list is made if it does not exist.

    Raises:
        TypeError: the value of ``key`` is not a list.
    """
    _list(key).extend(value)


def _list(key: str) -> list[Any]:
    value = _values.setdefault(key, [])
    if not isinstance(value, list):
        raise TypeError(f"key={key!r} holds a {type(value).__name__}, not a list; clear it first, or use another key")
    return value

"""Options that many optimizers have: their declaration, and checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

_NO_OPTIONS = ("self", "__class__", "params", "stochastic_rounding", "args", "conventions")


def declared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer: the ``locals()`` of its ``__init__``, whose signature declares them."""
    conventions = check_conventions(arguments["conventions"])
    return {**{name: value for name, value in arguments.items() if name not in _NO_OPTIONS}, **conventions}


def check_conventions(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of torch's optimizers that are options here.

    Raises:
        TypeError: torch's optimizers have no such argument.
        ValueError: an argument asks for something that is not supported.
    """
    for name, value in given.items():
        if name in ("capturable", "differentiable") and value:
            why = "its steps count on the host" if name == "capturable" else "steps are not recorded by autograd"
            raise ValueError(f"{name}={value!r} is not supported: {why}; leave it out")
        if name not in ("foreach", "fused", "maximize", "capturable", "differentiable"):
            raise TypeError(f"an optimizer got an unexpected keyword argument {name!r}")
    return {"maximize": bool(given["maximize"])} if "maximize" in given else {}


def check_not_negative(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options are numbers, finite and not negative."""
    for name in names:
        if not 0 <= options[name] < math.inf:
            raise ValueError(f"{name}={options[name]!r} must be finite and not negative")


def check_betas(betas: Any, count: int) -> None:
    """Raise ValueError unless ``betas`` are ``count`` decay rates."""
    if len(betas) != count or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be {count} numbers in [0, 1)")


def check_positive(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options are numbers, finite and above 0."""
    for name in names:
        if not 0 < options[name] < math.inf:
            raise ValueError(f"{name}={options[name]!r} must be finite and positive")


def is_whole(value: Any) -> bool:
    """Whether ``value`` is an integer, such as an ``int`` or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options are whole numbers above 0."""
    for name in names:
        if not is_whole(options[name]) or options[name] < 1:
            raise ValueError(f"{name}={options[name]!r} must be a whole number above 0")


def check_pair_not_negative(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the option is two numbers, finite and not negative."""
    pair = options[name]
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(0 <= number < math.inf for number in pair):
        raise ValueError(f"{name}={pair!r} must be two numbers, finite and not negative")

"""Where the tests run: every CPU variant that this machine has, and the GPU if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch

from bmt_kernels import _native


class Place(NamedTuple):
    """A device, and the CPU variant that serves it."""

    device: str
    variant: str


PLACES = [Place("cpu", variant) for variant in _native.runnable_variants()]
if torch.cuda.is_available():
    PLACES.append(Place("cuda", _native.runnable_variants()[-1]))


@contextlib.contextmanager
def _use_variant(name: str) -> Iterator[None]:
    _native.use_cpu_variant(name)
    try:
        yield
    finally:
        _native.use_cpu_variant(None)


@pytest.fixture(params=PLACES, ids=lambda place: f"{place.device}-{place.variant}")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device to test on, with one of its variants in use."""
    with _use_variant(request.param.variant):
        yield torch.device(request.param.device)


@pytest.fixture(scope="session")
def use_variant() -> Callable[[str], AbstractContextManager[None]]:
    return _use_variant


@pytest.fixture(scope="session")
def places() -> list[Place]:
    return PLACES

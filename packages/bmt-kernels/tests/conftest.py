"""Where the tests run: every CPU variant that this machine has, the GPU, and the CUDA kernels on the host if built.

On the host, thread blocks and the threads in them run in an order that is random for each test. The seed is printed
where a test fails: the same order comes of ``BMT_CUDA_SEED``.
"""

from __future__ import annotations

import contextlib
import os
import random
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
if _native.cuda_on_host_module is not None:
    PLACES.append(Place("cpu", _native.CUDA_ON_HOST))
if torch.cuda.is_available():
    PLACES.append(Place("cuda", _native.runnable_variants()[-1]))


@contextlib.contextmanager
def _use_variant(name: str) -> Iterator[None]:
    _native.use_cpu_variant(name)
    try:
        yield
    finally:
        _native.use_cpu_variant(None)


SEED = os.environ.get("BMT_CUDA_SEED") or str(random.SystemRandom().randrange(10**6))


@pytest.fixture(autouse=True)
def order_of_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of blocks and threads of the CUDA kernels on the host: each test's own."""
    if _native.cuda_on_host_module is not None:
        monkeypatch.setenv("BMT_CUDA_ON_HOST_ORDER", f"{SEED} {request.node.nodeid}")
        print(f"the order of thread blocks: BMT_CUDA_SEED={SEED}")  # pytest shows it where the test fails


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

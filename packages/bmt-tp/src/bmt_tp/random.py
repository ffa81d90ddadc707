"""Random numbers inside a tensor-parallel region.

Outside of it, tensor-parallel ranks compute the same and must drop the same activations, so their generators must have
the same seed (and other seeds than those of other data-parallel ranks). Inside, each rank has different features or
another part of the sequence, and must draw different numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bmt_comm import Communicator

from .regions import tensor_comm


@contextmanager
def per_rank_random(comm: Communicator | None = None, device: torch.device | str | None = None) -> Iterator[None]:
    """A context in which tensor-parallel ranks draw different random numbers. After it, all draw the same again.

    The numbers depend only on the generator's state before and on the rank. Activation checkpointing, which restores
    that state, draws them again. Nothing waits for the device.

    Args:
        comm: the tensor-parallel ranks; by default the context's.
        device: the device whose default generator is used; by default that of ``comm``.
    """
    comm = tensor_comm(comm)
    if comm.size == 1:
        yield
        return
    generator = default_generator(comm.device if device is None else torch.device(device))
    state = generator.get_state()
    digest = hashlib.sha256(state.numpy().tobytes() + comm.rank.to_bytes(4, "little")).digest()
    try:
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
    finally:
        generator.set_state(state)
        # One draw, so that the next region does not repeat this one.
        torch.empty(1, device=generator.device).uniform_(generator=generator)


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator

"""Random numbers inside a tensor-parallel region.

Outside, tensor-parallel ranks compute the same thing and must drop the same activations: their generators are to be
seeded alike (and differently over data-parallel ranks). Inside, each rank has other features or another part of the
sequence, and must drop others.
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
    """Within, every tensor-parallel rank draws other random numbers; after it, all draw the same again.

    The numbers follow from the generator's state before and the rank, so what recomputes an activation from a
    saved state (activation checkpointing) draws them again. Nothing waits for the device.

    Args:
        comm: the tensor-parallel ranks; by default the context's.
        device: whose default generator; by default that of ``comm``.
    """
    comm = tensor_comm(comm)
    if comm.size == 1:
        yield
        return
    generator = _default_generator(comm.device if device is None else torch.device(device))
    state = generator.get_state()
    digest = hashlib.sha256(state.numpy().tobytes() + comm.rank.to_bytes(4, "little")).digest()
    try:
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
    finally:
        generator.set_state(state)
        # One draw, so that the next region does not repeat this one.
        torch.empty(1, device=generator.device).uniform_(generator=generator)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator

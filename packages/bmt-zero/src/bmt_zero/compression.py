"""Communicate parameters and gradients as block-wise 8-bit numbers.

[Note: compressed communication]
    Consecutive numbers form a block, which has one scale (fp32): the absmax divided by the largest 8-bit number. This
    takes one byte for each number, and four for each block.

    An all-gather sends packed shards. Every rank, including the owner, computes with the unpacked numbers, so all have
    the same weights. Shards, which optimizers and checkpoints read, are never rounded.

    A reduce-scatter exchanges packed gradients, which are unpacked and summed in fp32, in the order of the ranks. Each
    number is rounded at most once. The gradients that a rank has for its own shard are not rounded. On several hosts
    whose ranks share memory, each host first sums in fp32, and then exchanges its packed sums with the other hosts. The
    sums that a host has for its own shards are not rounded. The sums are added up in the order of the hosts.

    If a block has an infinite number or NaN, all of its numbers are infinite or NaN after unpacking, so checks for
    overflow see it. Blocks whose scale would be below the smallest normal number of fp32 become zeros.

    This is the communication of ZeRO++ (https://arxiv.org/abs/2306.10209).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bmt_comm import Communicator, Work, packing
from bmt_comm.packing import Packing
from bmt_comm.work import Pending

Kind = Literal["int8", "float8"]


@dataclass(frozen=True)
class Compression:
    """How parameters and gradients are communicated: as 8-bit numbers with a scale for each block.

    Attributes:
        parameters: in all-gathers: "int8", "float8" (e4m3), or None: not compressed.
        gradients: the same, in reduce-scatters.
        block: the number of elements that share a scale.

    Raises:
        ValueError: an unknown kind, or no block.
        RuntimeError: bmt-kernels is not installed.
    """

    parameters: Kind | None = "int8"
    gradients: Kind | None = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients"):
            kind = getattr(self, name)
            if kind is not None and kind not in get_args(Kind):
                raise ValueError(f"{name}={kind!r} is not a compression; choose 'int8', 'float8' or None")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be a whole number above 0")
        packing.kernels()

    def all_gather(self, comm: Communicator, out: Tensor, shard: Tensor, async_op: bool, label: str) -> Work:
        """Concatenate every rank's ``shard``, rounded, into ``out``, in rank order."""
        assert self.parameters is not None
        numel, how = shard.numel(), Packing(self.parameters, self.block)
        packed = out.new_empty((comm.size, how.bytes(numel)), dtype=torch.uint8)
        how.pack(packed[comm.rank], shard)
        work = comm.all_gather(packed, packed[comm.rank], async_op, label)
        chunks = out.view(comm.size, numel)

        def unpack_all() -> None:
            for values, each in zip(chunks.unbind(), packed.unbind(), strict=True):
                how.unpack(values, each)

        unpacking = Pending([work], unpack_all, None)
        if not async_op:
            unpacking.wait()
        return unpacking

    def reduce_scatter(self, comm: Communicator, out: Tensor, src: Tensor, async_op: bool, label: str) -> Work:
        """Sum ``src``, rounded by packing, over the ranks, and keep this rank's part in ``out`` (fp32).

        ``src`` must stay unchanged until ``wait``.
        """
        assert self.gradients is not None
        return comm.packed_reduce_scatter(out, src, Packing(self.gradients, self.block), async_op, label)

"""Collectives under NCCL's names, over communicators."""

from bmt_comm import nccl as _nccl
from bmt_comm.nccl import (
    NCCLCommunicator,
    allGather,
    allReduce,
    broadcast,
    commCount,
    commDestroy,
    commRank,
    groupEnd,
    groupStart,
    recv,
    reduce,
    reduceScatter,
    send,
)

__all__ = [
    "NCCLCommunicator",
    "allGather",
    "allReduce",
    "broadcast",
    "commCount",
    "commDestroy",
    "commRank",
    "groupEnd",
    "groupStart",
    "recv",
    "reduce",
    "reduceScatter",
    "send",
]


def __getattr__(name: str) -> object:
    return getattr(_nccl, name)  # which says what replaces the names that are not here

"""Collectives under NCCL's names, over communicators."""

from bmt_comm.nccl import (
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

"""Checks of which ranks share a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bmt_comm import Communicator, ParallelContext

from .parameter import DistributedParameter
from .unit import Slot, holders


def check_stage(slots: Sequence[Slot], context: ParallelContext, comms: Sequence[Communicator | None] = ()) -> None:
    """Raise if ranks of other pipeline stages are among ``comms``, or hold parts of the parameters."""
    stage = set(context.zero.ranks)
    for comm in comms:
        if comm is not None and not stage.issuperset(comm.ranks):
            raise ValueError(
                f"shard_comm and replicate_comm include ranks {comm.ranks}; those of this pipeline stage are "
                f"{context.zero.ranks}, and a module that belongs to one stage is shared by its ranks alone"
            )
    for slot in slots:
        param = slot.module._parameters[slot.name]
        if isinstance(param, DistributedParameter) and not stage.issuperset(param.bucket.shard_comm.ranks):
            raise ValueError(
                f"parameter {slot.path!r} is sharded over ranks {param.bucket.shard_comm.ranks}, and those of this "
                f"pipeline stage are {context.zero.ranks}; let every rank pass the module through stage_block"
            )


def check_reach(
    shard_comm: Communicator,
    replicate_comm: Communicator,
    context: ParallelContext,
    params: Mapping[str, nn.Parameter],
    stage_local: bool,
) -> None:
    """Raise unless two communicators together reach all ranks that hold the parameters, and only those."""
    ranks = shard_comm.size * replicate_comm.size
    for path, param in params.items():
        is_cut = getattr(param, "tp_mode", False)
        wanted = holders(context, is_cut, stage_local).size
        if ranks != wanted:
            raise ValueError(
                f"shard_comm and replicate_comm spread parameters over {ranks} ranks; parameter {path!r}, which "
                f"tensor-parallel ranks {'hold pieces of' if is_cut else 'have in common'}, belongs to {wanted}. Put "
                f"the two kinds into Blocks of their own, each with communicators of its own"
            )

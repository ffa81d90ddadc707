"""Blocks that belong to one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from bmt_comm import ParallelContext, current_context

from .block import Block, find_slots
from .bucket import Bucket
from .conversion import convert, whole_values
from .parameter import DistributedParameter
from .reach import check_reach, check_stage
from .stage_entry import STAGE_LOCAL_ATTRIBUTE
from .unit import make_standalone


def stage_block(module: nn.Module, keep: bool) -> Block | None:
    """The Block of a module that belongs to one pipeline stage. Every rank of every stage must call it.

    A module becomes a Block. A Block, or parameters, that are sharded over all stages are gathered, which is why
    all ranks take part, and sharded over this one: the same objects, with the same values, level, precision and
    other settings, but without gradients. Parameters on the meta device that await their values are not gathered.
    A Block of this stage's ranks (``stage_local=True``, or communicators of its own) stays as it is.

    Args:
        module: any module, or a Block.
        keep: whether this rank's stage is the one.

    Returns:
        The Block; None where it is not kept. Sharded parameters that are passed there give their memory back, and
        nothing of it must be used any more.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: on every rank: it cannot become a Block (see :class:`Block`), or it is one with communicators
            that include ranks of other stages. It is as it was then.
    """
    context = current_context()
    if not isinstance(module, nn.Module):
        raise TypeError(f"modules must consist of torch.nn.Modules, and one of them is a {type(module).__name__}")
    if isinstance(module, Block):
        _move_block(module, context, keep)
        if keep:
            return module
    else:
        slots = find_slots(module, context)
        _move_parameters([slot.module._parameters[slot.name] for slot in slots], context, keep)
        if keep:
            return Block(module, stage_local=True)
    for bucket in _buckets(module.parameters()):
        bucket.give_up()
    return None


def _move_block(block: Block, context: ParallelContext, keep: bool) -> None:
    unit = block.unit
    if block._stage_local:
        return
    if block._comms is not None:
        check_stage((), context, block._comms)
        check_reach(*block._comms, context, {slot.path: unit.params[slot.index] for slot in unit.slots}, True)
    elif context.pipe_size > 1:
        unit.check_agreement()
        _move_parameters(unit.params, context, keep)
        if keep:
            block._stage_local = True
            block.unit = block._build_unit(context, unit.slots)
        return
    block._stage_local = True
    for param in unit.params:
        setattr(param, STAGE_LOCAL_ATTRIBUTE, True)


def _move_parameters(params: Iterable[nn.Parameter | None], context: ParallelContext, keep: bool) -> None:
    """Gather what is sharded over several stages, one bucket at a time, and shard it over this one."""
    for bucket in _buckets(params):
        if set(bucket.shard_comm.ranks) <= set(context.zero.ranks):
            continue
        wholes: list[Tensor | None] = []
        for param in bucket.params:
            whole = whole_values(param, context.device, bucket.shard_comm, bucket.replicate_comm)
            wholes.append(whole if keep else None)
        if keep:
            for param, whole in zip(bucket.params, wholes, strict=True):
                make_standalone(convert(param, context), context, whole, level=3, stage_local=True)
            bucket.give_up()


def _buckets(params: Iterable[nn.Parameter | None]) -> list[Bucket]:
    return list(dict.fromkeys(p.bucket for p in params if isinstance(p, DistributedParameter)))

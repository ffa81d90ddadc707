"""Sharded modules that belong to one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from bmt_comm import ParallelContext, current_context

from .block import Block, check_no_blocks
from .flat_parameter import FlatParameter
from .precision import MixedPrecision
from .shard import (
    Options,
    build_standalone,
    check_groups,
    check_stage,
    convert,
    find_slots,
    forget_sharding,
    group_of,
    sharding_of,
    values_of,
)
from .sharded_parameter import ShardedParameter
from .stage_entry import STAGE_LOCAL_ATTRIBUTE


def stage_block(module: nn.Module, keep: bool) -> nn.Module | None:
    """The Block of a module that belongs to one pipeline stage. Every rank of every stage must call it.

    A module becomes a Block. A Block, or parameters, that are sharded over all stages are gathered, which is why
    all ranks take part, and sharded over this one: the same objects, with the same values, level, precision and
    other settings, but without gradients. Parameters on the meta device that await their values are not gathered.
    A Block of this stage's ranks (``stage_local=True``, or communicators of its own) stays as it is.

    Args:
        module: any module, or a Block.
        keep: whether this rank's stage is the one.

    Returns:
        The Block; None where it is not kept. Sharded parameters that are passed there release their memory, and
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
        check_no_blocks(module)
        slots = find_slots(module, context)
        _move_parameters([slot.module._parameters[slot.name] for slot in slots], context, keep)
        if keep:
            return Block(module, stage_local=True)
    for flat in _flats(module.parameters()):
        flat.drop_storage()
    return None


def _move_block(block: nn.Module, context: ParallelContext, keep: bool) -> None:
    group, sharding = group_of(block), sharding_of(block)
    assert sharding is not None
    if sharding.stage_local:
        return
    if sharding.shard_comm is not None and sharding.replicate_comm is not None:
        comms = (sharding.shard_comm, sharding.replicate_comm)
        check_stage((), context, comms)
        check_groups(comms, context, {slot.path: group.params[slot.index] for slot in group.slots}, True)
    elif context.pipe_size > 1:
        _move_parameters(group.params, context, keep, level_zero=True)
        if keep:
            use_checkpoint = sharding.checkpoint is not None
            forget_sharding(block)
            Block(
                block,
                use_checkpoint,
                group.level,
                sharding.initialized,
                precision=group.precision,
                stage_local=True,
            )
        return
    sharding.stage_local = True
    for param in group.params:
        setattr(param, STAGE_LOCAL_ATTRIBUTE, True)


def _move_parameters(
    params: Iterable[nn.Parameter | None], context: ParallelContext, keep: bool, level_zero: bool = False
) -> None:
    """Gather what is sharded over several stages, one flat parameter at a time, and shard it over this one.

    ``level_zero``: also what is on every rank.
    """
    for flat in _flats(params):
        if set(flat.shard_comm.ranks) <= set(context.zero.ranks) and not level_zero:
            continue
        values: list[Tensor | None] = []
        for param in flat.params:
            found = values_of(param, context.device, flat.shard_comm, flat.shard_comm)
            values.append(found if keep else None)
        if keep:
            options = Options(3, MixedPrecision(), stage_local=True)
            for param, value in zip(list(flat.params), values, strict=True):
                build_standalone(convert(param, context), context, value, options)
            flat.drop_storage()


def _flats(params: Iterable[nn.Parameter | None]) -> list[FlatParameter]:
    return list(dict.fromkeys(p.handle.flat for p in params if isinstance(p, ShardedParameter)))  # type: ignore[attr-defined]

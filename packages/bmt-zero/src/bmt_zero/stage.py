"""Shard modules that belong to one pipeline stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from bmt_comm import STAGE_LOCAL_ATTRIBUTE, ParallelContext, current_context

from .block import Block, check_no_blocks
from .flat_parameter import FlatParameter
from .options import Options
from .shard import (
    build_standalone,
    check_groups,
    check_stage,
    find_slots,
    forget_sharding,
    sharding_of,
    values_of,
)
from .sharded_parameter import ShardedParameter


def stage_block(module: nn.Module, keep: bool) -> nn.Module | None:
    """The Block of a module that belongs to one pipeline stage. Every rank of every stage must call it.

    A module becomes a Block. A Block, or parameters, that are sharded over all stages are unsharded (so all ranks take
    part) and sharded over this stage: the same objects, with the same values, level, precision and other settings, but
    without gradients. Parameters on the meta device that await their values are not unsharded. A Block of this stage's
    ranks (``stage_local=True``, or with its own communicators) is not changed.

    Args:
        module: any module, or a Block.
        keep: whether the module belongs to this rank's stage.

    Returns:
        The Block, or None without ``keep``. In that case sharded parameters release their memory and must not be used
        any more.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: on every rank: it cannot become a Block (see :class:`Block`), or it has communicators that include
            ranks of other stages. It is not changed then.
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
        _move_parameters([slot.param for slot in find_slots(module, context)], context, keep)
        if keep:
            return Block(module, stage_local=True)
    for flat in _flats(module.parameters()):
        flat.drop_storage()
    return None


def _move_block(block: nn.Module, context: ParallelContext, keep: bool) -> None:
    sharding = sharding_of(block)
    assert sharding is not None
    group = sharding.group
    options = group.options
    if options.stage_local:
        return
    if options.communicators is None and context.pipe_size > 1:
        _move_parameters(group.params, context, keep, level_zero=True)
        if keep:
            forget_sharding(block)
            Block(
                block,
                False if sharding.checkpoint is None else sharding.checkpoint.kept.use_checkpoint,
                group.level,
                sharding.initialized,
                precision=group.precision,
                reshard_after_forward=options.reshard_after_forward,
                stage_local=True,
                offload=options.offload,
            )
        return
    if options.communicators is not None:
        check_stage((), context, options.communicators)
        check_groups(options.communicators, context, group.slots, True)
    group.options = dataclasses.replace(options, stage_local=True)
    for param in group.params:
        setattr(param, STAGE_LOCAL_ATTRIBUTE, True)


def _move_parameters(
    params: Iterable[nn.Parameter], context: ParallelContext, keep: bool, level_zero: bool = False
) -> None:
    """Unshard parameters of several stages, one flat parameter at a time, and shard them over this stage.

    ``level_zero``: also move parameters that are replicated on every rank.
    """
    for flat in _flats(params):
        if set(flat.shard_comm.ranks) <= set(context.zero.ranks) and not level_zero:
            continue
        values = []
        for param in flat.params:
            value = values_of(param, context.device, flat.shard_comm, flat.shard_comm)
            values.append(value if keep else None)
        if keep:
            options = Options(3, stage_local=True)
            for param, value in zip(list(flat.params), values, strict=True):
                build_standalone(param, context, value, options)
            flat.drop_storage()


def _flats(params: Iterable[nn.Parameter]) -> list[FlatParameter]:
    return list(dict.fromkeys(p.handle.flat for p in params if isinstance(p, ShardedParameter)))

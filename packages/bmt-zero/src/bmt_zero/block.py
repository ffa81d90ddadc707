"""Block: BMTrain's name for a sharded module."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from bmt_comm import current_context

from .groups import grouped_parameters
from .initialize import init_parameters
from .kept_operations import UseCheckpoint, kept_results
from .shard import check_level, check_offload, shard, sharding_of
from .wrapped import blocks_of_wrappers, unwrap


def check_no_blocks(inner_module: nn.Module) -> None:
    """Raise if a module is, or contains, a sharded module that its ``BMTrainModelWrapper`` has not made."""
    of_wrappers = blocks_of_wrappers(inner_module)
    for path, module in inner_module.named_modules():
        if sharding_of(module) is not None and module not in of_wrappers:
            where = f"its part {path!r}" if path else "itself"
            raise ValueError(f"inner_module has {where} in a Block already; wrap each module once, and only one level")


class _ShardedByBlock(type(nn.Module)):  # type: ignore[misc]
    """``isinstance(x, Block)`` is true of modules that were passed to ``Block``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        sharding = sharding_of(instance)
        return sharding is not None and sharding.is_block


class Block(nn.Module, metaclass=_ShardedByBlock):
    """Shard a module in place, with activation checkpointing. Returns the module itself.

    Its submodules may have been passed to :func:`bmt_zero.BMTrainModelWrapper` before: the Block takes over their
    parameters, without gradients.

    Args:
        inner_module: the module.
        use_checkpoint, zero_level, initialized: see :func:`shard`.
        mode: "BLOCK" or "PIPE", which mean the same: a ``PipelineTransformerBlockList`` takes either.
        options: further options of :func:`shard`: ``precision``, ``shard_comm``, ``replicate_comm``, ``stage_local``,
            ``offload``.

    Where the module has no attributes of these names, it gets ``_module`` (itself), ``grouped_parameters()`` and
    ``init_parameters()``, which are :func:`bmt_zero.grouped_parameters` and :func:`bmt_zero.init_parameters` of it.

    Raises:
        RuntimeError: before ``init_distributed``; ranks have built different modules.
        TypeError: ``inner_module`` is not a module.
        ValueError: the module contains or is a Block, or cannot be sharded (see :func:`shard`). It is not changed then.
    """

    def __new__(  # type: ignore[misc]
        cls,
        inner_module: nn.Module,
        use_checkpoint: UseCheckpoint = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
        **options: Any,
    ) -> nn.Module:
        if not isinstance(inner_module, nn.Module):
            raise TypeError(f"inner_module must be a torch.nn.Module, not {type(inner_module).__name__}")
        if mode not in ("BLOCK", "PIPE"):
            raise ValueError(f"mode={mode!r} is not a mode of a Block; use 'BLOCK' or 'PIPE'")
        check_no_blocks(inner_module)
        check_level(zero_level, current_context())  # before anything is changed
        kept_results(use_checkpoint)
        check_offload(options.get("offload", False))
        unwrap(inner_module, current_context())
        shard(inner_module, zero_level, use_checkpoint=use_checkpoint, initialized=initialized, **options)
        sharding = sharding_of(inner_module)
        assert sharding is not None
        sharding.is_block = True
        names = {
            "_module": inner_module,
            "grouped_parameters": functools.partial(grouped_parameters, inner_module),
            "init_parameters": functools.partial(init_parameters, inner_module),
        }
        for name, value in names.items():
            if not hasattr(inner_module, name):
                inner_module.__dict__[name] = value  # not as a submodule of itself
        return inner_module


CheckpointBlock = Block

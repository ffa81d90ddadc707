"""ZeRO-sharded parameters and modules, initialisation and state dicts."""

from ._version import __version__
from .block import Block, CheckpointBlock
from .block_list import TransformerBlockList, link_blocks
from .checkpoint import load, save
from .distributed import DistributedModule, DistributedParameter, ParameterInitializer
from .fully_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from .groups import grouped_parameters, no_sync
from .initialize import init_parameters
from .layout import FlatLayout, Placement, plan_layouts
from .precision import MixedPrecision
from .shard import shard
from .sharded_parameter import ShardedParameter
from .stage import stage_block
from .stage_entry import StageEntry, is_stage_local
from .state import entries_of_stages, load_state_dict, serves_shards
from .wrapper import BMTrainModelWrapper

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CPUOffloadPolicy",
    "CheckpointBlock",
    "DistributedModule",
    "DistributedParameter",
    "FSDPModule",
    "FlatLayout",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParameterInitializer",
    "Placement",
    "ShardedParameter",
    "StageEntry",
    "TransformerBlockList",
    "UnshardHandle",
    "__version__",
    "entries_of_stages",
    "fully_shard",
    "grouped_parameters",
    "init_parameters",
    "is_stage_local",
    "link_blocks",
    "load",
    "load_state_dict",
    "no_sync",
    "plan_layouts",
    "register_fsdp_forward_method",
    "save",
    "serves_shards",
    "shard",
    "stage_block",
]

"""ZeRO-sharded parameters and modules, initialisation and state dicts."""

from bmt_comm import is_stage_local

from ._version import __version__
from .block import Block, CheckpointBlock
from .block_list import TransformerBlockList, link_blocks
from .checkpoint import load, save
from .checkpoints import Checkpointer, DamagedError, MemorySnapshots, SaveError
from .compression import Compression
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
from .gathered_parameters import gathered_parameters
from .granularity import set_granularity
from .groups import grouped_parameters, no_sync
from .histograms import Histograms
from .initialize import init_parameters
from .inspect_format import format_summary
from .inspect_model import inspect_model
from .inspect_tensor import InspectTensor, InspectTensorManager, inspect_tensor
from .layout import FlatLayout, Placement, plan_layouts
from .precision import MixedPrecision
from .rank0_state import rank0_state_dict
from .recording import record_tensor
from .replica_sums import verify_replicas
from .shard import shard
from .sharded_parameter import ShardedParameter
from .stage import stage_block
from .stage_entry import StageEntry
from .state import entries_of_stages, has_own_stage_only, load_state_dict, serves_shards
from .wrapper import BMTrainModelWrapper

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CPUOffloadPolicy",
    "CheckpointBlock",
    "Checkpointer",
    "Compression",
    "DamagedError",
    "DistributedModule",
    "DistributedParameter",
    "FSDPModule",
    "FlatLayout",
    "Histograms",
    "InspectTensor",
    "InspectTensorManager",
    "MemorySnapshots",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParameterInitializer",
    "Placement",
    "SaveError",
    "ShardedParameter",
    "StageEntry",
    "TransformerBlockList",
    "UnshardHandle",
    "__version__",
    "entries_of_stages",
    "format_summary",
    "fully_shard",
    "gathered_parameters",
    "grouped_parameters",
    "has_own_stage_only",
    "init_parameters",
    "inspect_model",
    "inspect_tensor",
    "is_stage_local",
    "link_blocks",
    "load",
    "load_state_dict",
    "no_sync",
    "plan_layouts",
    "rank0_state_dict",
    "record_tensor",
    "register_fsdp_forward_method",
    "save",
    "serves_shards",
    "set_granularity",
    "shard",
    "stage_block",
    "verify_replicas",
]

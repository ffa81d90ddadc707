"""ZeRO-sharded parameters, Blocks, initialisation and state dicts."""

from ._version import __version__
from .block import Block, CheckpointBlock
from .block_list import TransformerBlockList
from .checkpoint import load, save
from .groups import grouped_parameters, no_sync
from .initialize import init_parameters
from .layout import FlatLayout, Placement, plan_layouts
from .module import DistributedModule
from .parameter import DistributedParameter, ParameterInitializer
from .precision import MixedPrecision
from .state import load_state_dict
from .wrapper import BMTrainModelWrapper

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "DistributedModule",
    "DistributedParameter",
    "FlatLayout",
    "MixedPrecision",
    "ParameterInitializer",
    "Placement",
    "TransformerBlockList",
    "__version__",
    "grouped_parameters",
    "init_parameters",
    "load",
    "load_state_dict",
    "no_sync",
    "plan_layouts",
    "save",
]

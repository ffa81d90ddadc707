"""Pipeline parallelism: how layers are spread over stages, and in which order the stages work."""

from ._version import __version__
from .block_list import PipelineTransformerBlockList
from .partition import split_layers
from .schedule import (
    Action,
    Kind,
    Schedule,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
    recompute,
    zero_bubble_h1,
)
from .simulate import UNIT_COSTS, Timeline, simulate

__all__ = [
    "UNIT_COSTS",
    "Action",
    "Kind",
    "PipelineTransformerBlockList",
    "Schedule",
    "Timeline",
    "__version__",
    "interleaved_one_forward_one_backward",
    "one_forward_one_backward",
    "recompute",
    "simulate",
    "split_layers",
    "zero_bubble_h1",
]

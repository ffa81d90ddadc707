"""Pipeline parallelism: how layers are spread over stages, and in which order the stages work."""

from ._version import __version__
from .block_list import PipelineTransformerBlockList
from .partition import split_layers
from .recording import Recorder
from .schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    interleaved_one_forward_one_backward,
    make_schedule,
    one_forward_one_backward,
    recompute,
    zero_bubble_h1,
)
from .simulate import UNIT_COSTS, Timeline, idle_share, mean_costs, simulate, timeline_of

__all__ = [
    "SCHEDULES",
    "UNIT_COSTS",
    "Action",
    "Kind",
    "PipelineTransformerBlockList",
    "Recorder",
    "Schedule",
    "Timeline",
    "__version__",
    "idle_share",
    "interleaved_one_forward_one_backward",
    "make_schedule",
    "mean_costs",
    "one_forward_one_backward",
    "recompute",
    "simulate",
    "split_layers",
    "timeline_of",
    "zero_bubble_h1",
]

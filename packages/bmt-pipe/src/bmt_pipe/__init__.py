"""Pipeline parallelism: how layers are spread over stages, and in which order the stages work."""

from ._version import __version__
from .block_list import AbsentLayer, PipelineTransformerBlockList
from .messages import StageFailedError, StageLostError
from .partition import split_layers
from .plot import plot_timeline, plot_timelines, timeline_figure
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
    zero_bubble_v,
)
from .simulate import UNIT_COSTS, Timeline, idle_share, mean_costs, simulate, timeline_of
from .timeline_file import read_timeline, write_timeline

__all__ = [
    "SCHEDULES",
    "UNIT_COSTS",
    "AbsentLayer",
    "Action",
    "Kind",
    "PipelineTransformerBlockList",
    "Recorder",
    "Schedule",
    "StageFailedError",
    "StageLostError",
    "Timeline",
    "__version__",
    "idle_share",
    "interleaved_one_forward_one_backward",
    "make_schedule",
    "mean_costs",
    "one_forward_one_backward",
    "plot_timeline",
    "plot_timelines",
    "read_timeline",
    "recompute",
    "simulate",
    "split_layers",
    "timeline_figure",
    "timeline_of",
    "write_timeline",
    "zero_bubble_h1",
    "zero_bubble_v",
]

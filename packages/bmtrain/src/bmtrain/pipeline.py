"""Pipelines: the partition of layers into stages, schedules, planned and measured timelines, and their pictures."""

from bmt_pipe import (
    SCHEDULES,
    Schedule,
    Timeline,
    idle_share,
    make_schedule,
    mean_costs,
    plot_timeline,
    plot_timelines,
    read_timeline,
    simulate,
    split_layers,
    timeline_figure,
    write_timeline,
)

__all__ = [
    "SCHEDULES",
    "Schedule",
    "Timeline",
    "idle_share",
    "make_schedule",
    "mean_costs",
    "plot_timeline",
    "plot_timelines",
    "read_timeline",
    "simulate",
    "split_layers",
    "timeline_figure",
    "write_timeline",
]

"""Pictures of planned and measured timelines. They need matplotlib."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .schedule import Kind, Schedule
from .simulate import Timeline, check_times, idle_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel: TypeAlias = tuple[str, Schedule, Timeline]
"""A timeline in a picture: its title, schedule and timeline."""

SUFFIXES = (".png", ".svg", ".pdf")

# From the palette of Okabe and Ito, which suits colour-blind people: https://jfly.uni-koeln.de/color/
_KINDS = {
    Kind.FORWARD: ("forward", "#0072B2"),
    Kind.RECOMPUTE: ("recomputation", "#F0E442"),
    Kind.BACKWARD: ("backward", "#D55E00"),
    Kind.INPUT: ("backward, inputs", "#E69F00"),
    Kind.WEIGHT: ("backward, weights", "#009E73"),
}
_WAITING, _CHUNK, _INK = "#E9ECEF", "#6C757D", "#212529"
_PALEST = 0.55  # the share of white in the colour of the last chunk

# Inches.
_LEFT, _RIGHT, _ABOVE, _BELOW, _LEGEND = 0.75, 0.7, 0.42, 0.48, 0.3
_WIDTHS = (7.5, 15.0)
_ROWS = 3.2  # the height of all ranks together, within the limits of _ROW_HEIGHTS for each
_ROW_HEIGHTS = (0.15, 0.36)
_MOST_ROWS = 40.0  # the limit of that height: file formats limit the size of a picture
_BOX = 0.2  # a width in which the number of a micro-batch is easy to read
_BOX_HEIGHT = 0.88  # as a share of the row's height


def plot_timeline(schedule: Schedule, timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Draw a timeline: a row for each rank, a box for each action, and the share of time that each rank is idle.

    Args:
        schedule: the schedule that was planned or run.
        timeline: its timeline, from ``simulate``, ``Recorder.timeline`` or ``read_timeline``.
        path: the file to write: .png, .svg or .pdf.
        title: the text above it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` ends in something else, or ``timeline`` is not one of ``schedule``.
    """
    plot_timelines([(title or "", schedule, timeline)], path)


def plot_timelines(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw timelines (title, schedule and timeline of each) below each other, to compare them; see ``plot_timeline``.

    Timelines with the same unit have the same scale.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path={str(path)!r} must end in one of {', '.join(SUFFIXES)}")
    figure = timeline_figure(panels)
    import matplotlib

    # Without dates and random names, the same timelines make the same file.
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with matplotlib.rc_context({"svg.hashsalt": "bmt-pipe"}):
        figure.savefig(path, dpi=140, metadata=metadata)


def timeline_figure(panels: Sequence[Panel]) -> Figure:
    """The figure that ``plot_timelines`` writes, to change or to embed. It is not a figure of pyplot.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a timeline is not one of its schedule, or ``panels`` is empty.
    """
    if not panels:
        raise ValueError("panels must have one timeline or more")
    for _, schedule, timeline in panels:
        check_times(schedule, timeline.starts, timeline.ends)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing timelines needs matplotlib: pip install matplotlib") from error

    limits = [
        max(_scale(other) * float(other.length) for _, _, other in panels if other.in_seconds == timeline.in_seconds)
        or 1.0
        for _, _, timeline in panels
    ]
    drawn = [_boxes(schedule, timeline) for _, schedule, timeline in panels]
    typical = [statistics.median(box.end - box.start for box in boxes) if boxes else 0.0 for boxes in drawn]
    widths = [_BOX * limit / box if box else 0.0 for limit, box in zip(limits, typical)]
    across = min(max(_WIDTHS[0], *widths), _WIDTHS[1])
    rows = [
        min(max(_ROWS / schedule.stages, _ROW_HEIGHTS[0]), _ROW_HEIGHTS[1], _MOST_ROWS / schedule.stages)
        for _, schedule, _ in panels
    ]
    heights = [row * schedule.stages for row, (_, schedule, _) in zip(rows, panels)]
    width, height = _LEFT + across + _RIGHT, sum(heights) + len(panels) * (_ABOVE + _BELOW) + _LEGEND
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height
    for panel, boxes, limit, row, tall in zip(panels, drawn, limits, rows, heights):
        top -= _ABOVE + tall
        axes = figure.add_axes((_LEFT / width, top / height, across / width, tall / height))
        axes.set_xlim(0, limit)
        _draw(axes, panel, boxes, across / limit, row)
        top -= _BELOW
    _add_legend(figure, panels, width)
    return figure


class _Box(NamedTuple):
    """A drawn action. Times are in milliseconds, or in the unit of the costs if they are planned."""

    kind: Kind
    rank: int
    start: float
    end: float
    colour: tuple[float, float, float]
    text: str


def _boxes(schedule: Schedule, timeline: Timeline) -> list[_Box]:
    scale = _scale(timeline)
    return [
        _Box(a.kind, r, scale * float(s), scale * float(e), _shade(_KINDS[a.kind][1], a.chunk, schedule.chunks), str(i))
        for r, (actions, starts, ends) in enumerate(zip(schedule.actions, timeline.starts, timeline.ends))
        for a, s, e in zip(actions, starts, ends)
        for i in [a.micro_batch]
    ]


def _scale(timeline: Timeline) -> float:
    return 1e3 if timeline.in_seconds else 1.0


def _shade(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a chunk: later chunks are paler."""
    white = _PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return white + (1 - white) * red, white + (1 - white) * green, white + (1 - white) * blue


def _draw(axes: Any, panel: Panel, boxes: list[_Box], inches: float, row: float) -> None:
    """Draw one timeline. A unit of time is ``inches`` wide, and the row of a rank is ``row`` inches high."""
    from matplotlib.collections import PolyCollection

    title, schedule, timeline = panel
    widths = [(box.end - box.start) * inches for box in boxes]
    edge = min(0.8, 72 * 0.06 * statistics.median(widths)) if widths else 0.0  # points
    length = _scale(timeline) * float(timeline.length)
    layers: dict[str, list[tuple[int, float, float, Any]]] = {
        "waiting": [(rank, 0.0, length, _WAITING) for rank in range(schedule.stages)]
    }
    for box in boxes:
        layers.setdefault(box.kind.value, []).append((box.rank, box.start, box.end, box.colour))
    half = _BOX_HEIGHT / 2
    for label, shapes in layers.items():
        corners = [[(a, r - half), (b, r - half), (b, r + half), (a, r + half)] for r, a, b, _ in shapes]
        colours = [colour for *_, colour in shapes]
        axes.add_collection(
            PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=edge, label=label)
        )
    font = min(8.0, 72 * row * 0.6)
    for box, width in zip(boxes, widths) if font >= 5.0 else ():
        if 72 * width >= font * (0.65 * len(box.text) + 0.3):
            dark = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), box.colour)) < 0.55
            place = (box.start + box.end) / 2, box.rank
            colour = "white" if dark else _INK
            axes.text(*place, box.text, fontsize=font, color=colour, ha="center", va="center_baseline")

    font = max(min(8.0, 72 * row * 0.75), 5.0)
    named = range(0, schedule.stages, math.ceil(0.1 / row))
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.tick_params(axis="y", length=0, labelsize=font, labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=8, color=_INK, labelcolor=_INK)
    axes.set_xlabel("time (ms)" if timeline.in_seconds else "time (unit of the costs)", fontsize=8, color=_INK)
    axes.set_facecolor("white")
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, color=_INK, pad=7)

    right = axes.get_yaxis_transform()  # x in shares of the width, y in ranks
    axes.set_title("idle", loc="right", x=1.01, ha="left", fontsize=8, color=_INK, pad=7)
    shares = idle_share(timeline)
    for rank in named:
        axes.text(1.01, rank, f"{shares[rank]:.1%}", transform=right, fontsize=font, color=_INK, va="center")


def _add_legend(figure: Figure, panels: Sequence[Panel], width: float) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for _, schedule, _ in panels for actions in schedule.actions for action in actions}
    chunks = max(schedule.chunks for _, schedule, _ in panels)
    patches = [Patch(color=colour, label=name) for kind, (name, colour) in _KINDS.items() if kind in kinds]
    patches.append(Patch(color=_WAITING, label="waiting"))
    shown: Sequence[int] = [] if chunks == 1 else range(chunks) if chunks <= 4 else (0, chunks - 1)
    patches += [Patch(color=_shade(_CHUNK, chunk, chunks), label=f"chunk {chunk}") for chunk in shown]
    figure.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(_LEFT / width, 0.0),
        ncols=len(patches),
        fontsize=8,
        labelcolor=_INK,
        frameon=False,
        borderpad=0.0,
        borderaxespad=0.6,
        handlelength=1.2,
        columnspacing=1.4,
    )

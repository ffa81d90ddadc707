"""Pictures of timelines, as planned and as measured; they need matplotlib."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .schedule import Action, Kind, Schedule
from .simulate import Timeline, check_times, idle_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel: TypeAlias = tuple[str, Schedule, Timeline]
"""One of the timelines in a picture, with its title."""

SUFFIXES = (".png", ".svg", ".pdf")

# From the palette of Okabe and Ito, which colour-blind people tell apart: https://jfly.uni-koeln.de/color/
_COLOURS = {
    Kind.FORWARD: "#0072B2",
    Kind.RECOMPUTE: "#F0E442",
    Kind.BACKWARD: "#D55E00",
    Kind.INPUT: "#E69F00",
    Kind.WEIGHT: "#009E73",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recomputation",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, inputs",
    Kind.WEIGHT: "backward, weights",
}
_WAITING = "#E9ECEF"
_INK = "#212529"
_PALEST = 0.55  # how much white is in the colour of the last chunk

# Inches.
_LEFT, _RIGHT, _ABOVE, _BELOW, _LEGEND = 0.75, 0.7, 0.42, 0.48, 0.3
_WIDTHS = (7.5, 15.0)
_ROWS = 3.2  # of all ranks together, if rows are neither thicker nor thinner than
_ROW_HEIGHTS = (0.15, 0.36)
_MOST_ROWS = 40.0  # and never more than this, for the sake of the formats
_BOX = 0.2  # the width at which a micro-batch's number is easily read
_BOX_HEIGHT = 0.88  # of a row


@dataclass(frozen=True)
class Box:
    """An action as it is drawn: from ``start`` to ``end`` on the time axis, in the row of ``rank``."""

    rank: int
    action: Action
    start: float
    end: float


def plot_timeline(schedule: Schedule, timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Draw a timeline: a row for each rank, a box for each action, and which share of the time each rank waits.

    Args:
        schedule: what was planned or run.
        timeline: when; from ``simulate``, ``Recorder.timeline`` or ``read_timeline``.
        path: the file to write: .png, .svg or .pdf.
        title: what to write above it.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: ``path`` ends in something else, or ``timeline`` is not one of ``schedule``.
    """
    plot_timelines([(title or "", schedule, timeline)], path)


def plot_timelines(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw timelines below each other, to compare them. Those of the same unit have the same scale.

    Args:
        panels: title, schedule and timeline of each; see ``plot_timeline``.
        path: the file to write: .png, .svg or .pdf.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: ``path`` ends in something else, a timeline is not one of its schedule, or there is none.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path={str(path)!r} must end in one of {', '.join(SUFFIXES)}")
    figure = timeline_figure(panels)
    import matplotlib

    # Without dates, and with names that do not change, the same timelines make the same file.
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with matplotlib.rc_context({"svg.hashsalt": "bmt-pipe"}):
        figure.savefig(path, dpi=140, metadata=metadata)


def timeline_figure(panels: Sequence[Panel]) -> Figure:
    """What ``plot_timelines`` writes, as a figure to change or to embed. It is not one of pyplot's.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: a timeline is not one of its schedule, or there is none.
    """
    if not panels:
        raise ValueError("panels must have one timeline or more")
    for _, schedule, timeline in panels:
        check_times(schedule, timeline.starts, timeline.ends)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing timelines needs matplotlib: pip install matplotlib") from error

    drawn = [boxes(schedule, timeline) for _, schedule, timeline in panels]
    lengths = [_scale(timeline) * float(timeline.length) for _, _, timeline in panels]
    limits = [
        max((length for length, other in zip(lengths, panels) if other[2].in_seconds == panel[2].in_seconds)) or 1.0
        for panel in panels
    ]
    across = min(max(_WIDTHS[0], *map(_width, drawn, limits)), _WIDTHS[1])
    rows = [_row_height(schedule.stages) for _, schedule, _ in panels]
    heights = [row * schedule.stages for row, (_, schedule, _) in zip(rows, panels)]
    width = _LEFT + across + _RIGHT
    height = sum(heights) + len(panels) * (_ABOVE + _BELOW) + _LEGEND

    figure = Figure(figsize=(width, height), facecolor="white")
    top = height
    for panel, found, limit, row, tall in zip(panels, drawn, limits, rows, heights):
        top -= _ABOVE + tall
        axes = figure.add_axes((_LEFT / width, top / height, across / width, tall / height))
        _draw(axes, panel, found, limit, across / limit, row)
        top -= _BELOW
    _add_legend(figure, panels, width)
    return figure


def boxes(schedule: Schedule, timeline: Timeline) -> list[Box]:
    """Every action, with its times in milliseconds, or in the unit of the costs if they are planned."""
    scale = _scale(timeline)
    return [
        Box(rank, action, scale * float(start), scale * float(end))
        for rank, (actions, starts, ends) in enumerate(zip(schedule.actions, timeline.starts, timeline.ends))
        for action, start, end in zip(actions, starts, ends)
    ]


def _scale(timeline: Timeline) -> float:
    return 1e3 if timeline.in_seconds else 1.0


def _width(found: list[Box], limit: float) -> float:
    """In inches, at which a typical box is wide enough for its number."""
    typical = statistics.median(box.end - box.start for box in found) if found else 0.0
    return _BOX * limit / typical if typical else 0.0


def _row_height(ranks: int) -> float:
    return min(max(_ROWS / ranks, _ROW_HEIGHTS[0]), _ROW_HEIGHTS[1], _MOST_ROWS / ranks)


def _draw(axes: Any, panel: Panel, found: list[Box], limit: float, inches: float, row: float) -> None:
    """Fill the axes of one timeline, on which a unit of time is ``inches`` wide and a rank ``row`` inches tall."""
    from matplotlib.collections import PolyCollection

    title, schedule, timeline = panel
    length = _scale(timeline) * float(timeline.length)
    half = _BOX_HEIGHT / 2
    axes.add_collection(
        PolyCollection(
            [_corners(0.0, length, rank, half) for rank in range(schedule.stages)],
            facecolors=_WAITING,
            label="waiting",
            zorder=1,
        )
    )
    widths = [(box.end - box.start) * inches for box in found]
    edge = min(0.8, 72 * 0.06 * statistics.median(widths)) if widths else 0.0  # points
    for kind in Kind:
        mine = [box for box in found if box.action.kind is kind]
        if mine:
            axes.add_collection(
                PolyCollection(
                    [_corners(box.start, box.end, box.rank, half) for box in mine],
                    facecolors=[_colour(kind, box.action.chunk, schedule.chunks) for box in mine],
                    edgecolors="white",
                    linewidths=edge,
                    label=kind.value,
                    zorder=2,
                )
            )
    _number(axes, schedule, found, widths, row)

    font = min(8.0, 72 * row * 0.75)
    step = math.ceil(0.1 / row)
    axes.set_xlim(0, limit)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(0, schedule.stages, step), [f"rank {r}" for r in range(0, schedule.stages, step)])
    axes.tick_params(axis="y", length=0, labelsize=max(font, 5.0), labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=8, color=_INK, labelcolor=_INK)
    axes.set_xlabel("time (ms)" if timeline.in_seconds else "time (unit of the costs)", fontsize=8, color=_INK)
    axes.set_facecolor("white")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, color=_INK, pad=7)

    right = axes.get_yaxis_transform()  # across in shares of the width, along in ranks
    axes.set_title("idle", loc="right", x=1.01, ha="left", fontsize=8, color=_INK, pad=7)
    for rank, share in list(enumerate(idle_share(timeline)))[::step]:
        axes.text(1.01, rank, f"{share:.1%}", transform=right, fontsize=max(font, 5.0), color=_INK, va="center")


def _corners(start: float, end: float, rank: int, half: float) -> list[tuple[float, float]]:
    return [(start, rank - half), (end, rank - half), (end, rank + half), (start, rank + half)]


def _number(axes: Any, schedule: Schedule, found: list[Box], widths: list[float], row: float) -> None:
    """Write the micro-batches' numbers into the boxes that have room for them."""
    font = min(8.0, 72 * row * 0.6)
    if font < 5.0:
        return
    for box, width in zip(found, widths):
        text = str(box.action.micro_batch)
        if 72 * width >= font * (0.65 * len(text) + 0.3):
            colour = _ink_on(_colour(box.action.kind, box.action.chunk, schedule.chunks))
            middle = (box.start + box.end) / 2
            axes.text(middle, box.rank, text, fontsize=font, color=colour, ha="center", va="center_baseline", zorder=3)


def _colour(kind: Kind | None, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The later the chunk, the paler; ``None`` is grey."""
    text = _COLOURS[kind] if kind else "#6C757D"
    white = _PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (int(text[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(white + (1 - white) * part for part in (red, green, blue))  # type: ignore[return-value]


def _ink_on(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else _INK


def _add_legend(figure: Figure, panels: Sequence[Panel], width: float) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for _, schedule, _ in panels for actions in schedule.actions for action in actions}
    chunks = max(schedule.chunks for _, schedule, _ in panels)
    patches = [Patch(color=_colour(kind, 0, 1), label=_NAMES[kind]) for kind in Kind if kind in kinds]
    patches.append(Patch(color=_WAITING, label="waiting"))
    if chunks > 1:
        shown = range(chunks) if chunks <= 4 else (0, chunks - 1)
        patches += [Patch(color=_colour(None, chunk, chunks), label=f"chunk {chunk}") for chunk in shown]
    figure.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(_LEFT / width, 0.0),
        borderpad=0.0,
        ncols=len(patches),
        fontsize=8,
        labelcolor=_INK,
        frameon=False,
        borderaxespad=0.6,
        handlelength=1.2,
        columnspacing=1.4,
    )

"""The ``bmtrain pipeline-plot`` command: the timeline of a pipeline schedule, as a table and as a picture."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from bmt_pipe import (
    SCHEDULES,
    UNIT_COSTS,
    Kind,
    Schedule,
    Timeline,
    idle_share,
    make_schedule,
    mean_costs,
    plot_timelines,
    read_timeline,
    simulate,
    timeline_of,
)

_MEASURED = "measured"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments``. It exits with status 2 and a message if they are wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        panels = _panels(options)
        if options.output is not None:
            plot_timelines(panels, options.output)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print("\n\n".join(table(*panel) for panel in panels))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bmtrain pipeline-plot",
        description="Print how long each rank of a pipeline waits and how many activations it holds, and draw when it "
        "does what: as planned, and as measured by bmt_pipe.Recorder and written by bmt_pipe.write_timeline. The "
        "plan is that of --schedule, or of the schedule that the first of the --measured files is of.",
        epilog="Kinds of actions: F forward, R recomputation, B backward, or its parts I, the inputs' gradient, and W, "
        "the weights' gradient.",
    )
    parser.add_argument("--schedule", metavar="NAME", help=f"what to plan: {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of a step")
    parser.add_argument(
        "--interleave", type=int, metavar="V", help="chunks of layers on each rank (default: 1; 2 for zero_bubble_v)"
    )
    parser.add_argument(
        "--costs",
        default="",
        metavar="F=1,B=2",
        help="what an action of a kind takes, over all chunks of a rank together, in any unit; those that are not "
        f"named take {', '.join(f'{kind.value}={cost}' for kind, cost in UNIT_COSTS.items())}; '{_MEASURED}': their "
        "mean times in the first of the --measured files",
    )
    parser.add_argument("--measured", nargs="+", default=[], metavar="FILE", help="timelines to compare with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the picture to write: .png, .svg or .pdf")
    return parser


def _panels(options: argparse.Namespace) -> list[tuple[str, Schedule, Timeline]]:
    """The title, schedule and timeline of each panel: first the plan, then the measured timelines."""
    measured = [(path, *read_timeline(path)) for path in options.measured]
    by_name = (options.schedule, options.stages, options.micro_batches)
    if None not in by_name:
        planned = make_schedule(*by_name, options.interleave)
        name = f"{options.schedule}: {_sizes(planned)}"
    elif measured and not any(value is not None for value in (*by_name, options.interleave)):
        planned = measured[0][1]
        name = _sizes(planned)
    else:
        raise ValueError("give --schedule, --stages and --micro-batches, or --measured without any of them")
    if options.costs != _MEASURED:
        plan = simulate(planned, _costs(options.costs))
    elif measured:
        plan = _in_seconds(planned, simulate(planned, mean_costs(*measured[0][1:])))
    else:
        raise ValueError(f"--costs {_MEASURED} needs --measured")
    panels = [(f"{name}, planned", planned, plan)]
    return panels + [(f"{Path(path).name}: {_sizes(s)}, measured", s, timeline) for path, s, timeline in measured]


def _costs(text: str) -> dict[Kind, Fraction]:
    costs = {kind: Fraction(cost) for kind, cost in UNIT_COSTS.items()}
    for entry in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([FRBIW])\s*=\s*([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})\s*", entry)
        if match is None or not Fraction(match[2]):
            raise ValueError(f"--costs: {entry!r} is not one of F, R, B, I, W with a positive number, such as F=1.5")
        costs[Kind(match[1])] = Fraction(match[2])
    return costs


def _in_seconds(schedule: Schedule, timeline: Timeline) -> Timeline:
    """The same timeline with floats in seconds, as in measured timelines."""
    starts, ends = ([[float(time) for time in row] for row in rows] for rows in (timeline.starts, timeline.ends))
    return timeline_of(schedule, starts, ends)


def _sizes(schedule: Schedule) -> str:
    parts = [(schedule.stages, "stage", "stages"), (schedule.micro_batches, "micro-batch", "micro-batches")]
    if schedule.chunks > 1:
        parts.append((schedule.chunks, "chunk", "chunks per rank"))
    return ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in parts)


def table(title: str, schedule: Schedule, timeline: Timeline) -> str:
    """The length of a timeline, and the totals of each rank, as text."""
    scale, unit = (1e3, "ms") if timeline.in_seconds else (1.0, "units")
    lines = [title, f"  length {scale * float(timeline.length):.6g} {unit}"]
    lines.append(f"  {'rank':>4} {f'waiting ({unit})':>15} {'idle share':>10} {'activations':>11} {'inputs':>6}")
    shares = idle_share(timeline)
    for rank in range(schedule.stages):
        waiting = f"{scale * float(timeline.waiting[rank]):.6g}"
        held = f"{timeline.activations[rank]:11d} {timeline.inputs[rank]:6d}"
        lines.append(f"  {rank:4d} {waiting:>15} {shares[rank]:10.1%} {held}")
    return "\n".join(lines)

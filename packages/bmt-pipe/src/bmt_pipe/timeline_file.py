"""Files of timelines, each with its schedule."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from .schedule import Action, Kind, Schedule
from .simulate import Time, Timeline, check_times, timeline_of

_FORMAT = "bmt-pipe timeline 2"
_ACTION = re.compile(r"([FRBIW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_FRACTION = re.compile(r"[0-9]{1,1000}(?:/0*[1-9][0-9]{0,999})?")
_SCHEDULE_KEYS = {"stages", "micro_batches", "chunks", "loss_outside", "v_shaped", "actions"}


def write_timeline(path: str | Path, schedule: Schedule, timeline: Timeline) -> None:
    """Write a planned or measured timeline, and its schedule, as JSON.

    Raises:
        ValueError: the timeline is not one of this schedule.
    """
    check_times(schedule, timeline.starts, timeline.ends)
    content = {
        "format": _FORMAT,
        "schedule": {
            "stages": schedule.stages,
            "micro_batches": schedule.micro_batches,
            "chunks": schedule.chunks,
            "loss_outside": schedule.loss_outside,
            "v_shaped": schedule.v_shaped,
            "actions": [[repr(action) for action in actions] for actions in schedule.actions],
        },
        "starts": [[_written(time) for time in times] for times in timeline.starts],
        "ends": [[_written(time) for time in times] for times in timeline.ends],
    }
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_timeline(path: str | Path) -> tuple[Schedule, Timeline]:
    """Read what ``write_timeline`` wrote. Nothing in the file is executed, and everything is checked.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is not such a file.
    """
    data = Path(path).read_bytes()
    try:
        content = _with_keys("the file", json.loads(data), {"format", "schedule", "starts", "ends"})
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r} and not {_FORMAT!r}")
        schedule = _read_schedule(content["schedule"])
        starts, ends = (_read_times(name, content[name]) for name in ("starts", "ends"))
        kinds = {isinstance(time, float) for times in (*starts, *ends) for time in times}
        if len(kinds) > 1:
            raise ValueError("some of its times are numbers of seconds, others fractions")
        return schedule, timeline_of(schedule, starts, ends)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a timeline: {error}") from error


def _written(time: Time) -> float | str:
    return time if isinstance(time, float) else str(Fraction(time))


def _read_schedule(value: Any) -> Schedule:
    content = _with_keys("schedule", value, _SCHEDULE_KEYS)
    sizes = {}
    for name in ("stages", "micro_batches", "chunks"):
        if type(content[name]) is not int or content[name] < 1:
            raise ValueError(f"{name} is {content[name]!r} and not a positive integer")
        sizes[name] = content[name]
    for name in ("loss_outside", "v_shaped"):
        if not isinstance(content[name], bool):
            raise ValueError(f"{name} is {content[name]!r} and neither true nor false")
    if content["v_shaped"] and sizes["chunks"] != 2:
        raise ValueError(f"it is V-shaped, and has {sizes['chunks']} chunks on each rank instead of 2")
    rows = _rows("actions", content["actions"])
    if len(rows) != sizes["stages"]:
        raise ValueError(f"it has the actions of {len(rows)} ranks for {sizes['stages']} stages")
    actions = tuple(tuple(_read_action(text, sizes) for text in row) for row in rows)
    return Schedule(**sizes, loss_outside=content["loss_outside"], actions=actions, v_shaped=content["v_shaped"])


def _read_action(text: Any, sizes: dict[str, int]) -> Action:
    match = _ACTION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not an action, such as 'F0' or 'B3.1'")
    action = Action(Kind(match[1]), int(match[2]), int(match[3] or 0))
    if action.micro_batch >= sizes["micro_batches"] or action.chunk >= sizes["chunks"]:
        raise ValueError(f"{text!r} is beyond {sizes['micro_batches']} micro-batches in {sizes['chunks']} chunks")
    return action


def _read_times(name: str, value: Any) -> list[list[Time]]:
    return [[_read_time(name, time) for time in row] for row in _rows(name, value)]


def _read_time(name: str, value: Any) -> Time:
    if type(value) is float:
        return value
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        return Fraction(value)
    raise ValueError(f"{value!r} in {name} is neither a number of seconds, such as 0.5, nor a fraction, such as '3/2'")


def _rows(name: str, value: Any) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise ValueError(f"{name} is not a list of a list for each rank")
    return value


def _with_keys(name: str, value: Any, keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != keys:
        raise ValueError(f"{name} is not an object of {', '.join(sorted(keys))}")
    return value

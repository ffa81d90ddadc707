"""Every action is drawn once, when and where it was done."""

import sys
import xml.etree.ElementTree
from collections import Counter

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from bmt_pipe import (
    Action,
    Kind,
    Schedule,
    make_schedule,
    plot_timeline,
    plot_timelines,
    simulate,
    timeline_figure,
    timeline_of,
)

F, R, B, I, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@st.composite
def timelines(draw):
    name = draw(st.sampled_from(["recompute", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"]))
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if name in ("recompute", "interleaved_1f1b") else None
    if name == "interleaved_1f1b":
        micro_batches *= stages
    schedule = make_schedule(name, stages, micro_batches, chunks)
    timeline = simulate(schedule, {kind: draw(st.integers(1, 9)) for kind in Kind})
    return schedule, in_seconds(schedule, timeline) if draw(st.booleans()) else timeline


def in_seconds(schedule, timeline):
    starts, ends = ([[float(time) / 1e3 for time in row] for row in rows] for rows in (timeline.starts, timeline.ends))
    return timeline_of(schedule, starts, ends)


def drawn(axes):
    """For each kind: row, begin, end, and colour of every box; and those of the boxes' tops and bottoms."""
    boxes_of = {}
    for collection in axes.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors().tolist() * 1000):
            (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            assert top - bottom < 1
            row = round((bottom + top) / 2)
            boxes_of.setdefault(collection.get_label(), []).append((row, left, right, tuple(colour[:3])))
    return boxes_of


@settings(deadline=None, max_examples=40)
@given(timelines())
def test_every_action_is_drawn_once_in_the_row_of_its_rank(case):
    schedule, timeline = case
    (axes,) = timeline_figure([("", schedule, timeline)]).axes
    scale = 1e3 if timeline.in_seconds else 1.0
    boxes_of = drawn(axes)
    waiting = boxes_of.pop("waiting")
    assert sorted(box[0] for box in waiting) == list(range(schedule.stages))
    for rank, actions in enumerate(schedule.actions):
        wanted = sorted(
            (action.kind.value, scale * float(start), scale * float(end))
            for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank])
        )
        boxes = sorted(
            (kind, left, right) for kind in boxes_of for row, left, right, _ in boxes_of[kind] if row == rank
        )
        assert [kind for kind, _, _ in boxes] == [kind for kind, _, _ in wanted]
        assert [times for _, *times in boxes] == [pytest.approx(times) for _, *times in wanted]
    # A kind and chunk has a colour of its own.
    colours = {(kind, colour) for kind, boxes in boxes_of.items() for *_, colour in boxes}
    kinds_and_chunks = {(action.kind.value, action.chunk) for actions in schedule.actions for action in actions}
    assert len({colour for _, colour in colours}) == len(colours) == len(kinds_and_chunks)


def test_boxes_have_numbers_and_ranks_have_idle_shares():
    schedule = make_schedule("1f1b", 4, 8)
    figure = timeline_figure([("the title", schedule, simulate(schedule))])
    (axes,) = figure.axes
    texts = Counter(text.get_text() for text in axes.texts)
    assert texts == {**{str(i): 4 * 2 for i in range(8)}, "27.3%": 4}
    for text in axes.texts:
        if text.get_text() != "27.3%":  # inside of a box of the micro-batch
            place, rank = text.get_position()
            timeline = simulate(schedule)
            (action,) = (
                action
                for action, start, end in zip(schedule.actions[rank], timeline.starts[rank], timeline.ends[rank])
                if start < place < end
            )
            assert text.get_text() == str(action.micro_batch)
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 on top
    assert axes.get_title(loc="left") == "the title"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "waiting"]


def test_numbers_that_do_not_fit_are_left_out():
    schedule = make_schedule("1f1b", 2, 200)
    (axes,) = timeline_figure([("", schedule, simulate(schedule))]).axes
    assert {text.get_text() for text in axes.texts} == {"0.5%"}


def test_plan_and_measurement_are_compared_on_one_scale_where_they_have_one_unit():
    schedule = make_schedule("zero_bubble_h1", 2, 4)
    plan, slower = simulate(schedule), simulate(schedule, {F: 3, I: 2, W: 2})
    panels = [("", schedule, plan), ("", schedule, slower), ("", schedule, in_seconds(schedule, plan))]
    axes = timeline_figure(panels).axes
    assert [one.get_xlim()[1] for one in axes] == pytest.approx([float(slower.length)] * 2 + [float(plan.length)])
    assert [one.get_xlabel() for one in axes] == ["time (unit of the costs)"] * 2 + ["time (ms)"]
    places = [one.get_position() for one in axes]
    assert places[0].y0 > places[1].y1 > places[1].y0 > places[2].y1  # one below the other


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_pictures_are_files_that_do_not_change(suffix, tmp_path):
    schedule = make_schedule("recompute", 2, 3, chunks=2)
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        plot_timeline(schedule, simulate(schedule), path, title="recompute")
    content = paths[0].read_bytes()
    assert content.startswith(SIGNATURES[suffix])
    assert content == paths[1].read_bytes()
    if suffix == ".svg":
        assert xml.etree.ElementTree.fromstring(content).tag.endswith("svg")


def test_pyplot_and_its_settings_are_left_alone(tmp_path):
    settings_before = dict(matplotlib.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    schedule = make_schedule("1f1b", 2, 2)
    plot_timelines([("a", schedule, simulate(schedule))] * 2, str(tmp_path / "picture.svg"))
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    assert dict(matplotlib.rcParams) == settings_before


def test_many_ranks_are_drawn():
    schedule = make_schedule("recompute", 64, 256)
    timeline = timeline_of(schedule, *[[[float(2 * i + end) for i in range(768)]] * 64 for end in (0, 1)])
    (axes,) = timeline_figure([("", schedule, timeline)]).axes
    assert sum(len(collection.get_paths()) for collection in axes.collections) == 64 * 256 * 3 + 64


def test_ranks_that_did_nothing_and_actions_that_took_no_time_are_drawn():
    idle = Schedule(2, 1, 1, False, ((Action(F, 0),), ()))
    for timeline in (timeline_of(idle, [[0.0], []], [[1.0], []]), timeline_of(idle, [[0.0], []], [[0.0], []])):
        (axes,) = timeline_figure([("", idle, timeline)]).axes
        assert len(drawn(axes)["F"]) == 1


def test_kinds_differ_in_brightness_or_hue_as_the_colour_blind_see_them():
    """By Viénot et al. 1999: what protanopes and deuteranopes see of linear RGB."""
    schedule = Schedule(1, 1, 1, False, (tuple(Action(kind, 0) for kind in Kind),))
    times = [[float(i) for i in range(5)]], [[float(i + 1) for i in range(5)]]
    (axes,) = timeline_figure([("", schedule, timeline_of(schedule, *times))]).axes
    colours = [to_rgb(boxes[0][3]) for boxes in drawn(axes).values()]
    blindness = {
        "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    }
    for name, matrix in blindness.items():
        seen = [[sum(w * part**2.2 for w, part in zip(row, colour)) for row in matrix] for colour in colours]
        seen = [[max(part, 0.0) ** (1 / 2.2) for part in colour] for colour in seen]
        for i, one in enumerate(seen):
            for other in seen[:i]:
                assert sum((a - b) ** 2 for a, b in zip(one, other)) ** 0.5 > 0.12, name


def test_wrong_calls_are_named(tmp_path, monkeypatch):
    schedule, other = make_schedule("1f1b", 2, 2), make_schedule("1f1b", 2, 3)
    timeline = simulate(schedule)
    with pytest.raises(ValueError, match=r"picture\.gif' must end in one of \.png, \.svg, \.pdf"):
        plot_timeline(schedule, timeline, tmp_path / "picture.gif")
    with pytest.raises(ValueError, match=r"starts has \[4, 4\] times on its ranks, and the schedule \[6, 6\] actions"):
        plot_timeline(other, timeline, tmp_path / "picture.png")
    with pytest.raises(ValueError, match="panels must have one timeline or more"):
        plot_timelines([], tmp_path / "picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_timeline(schedule, timeline, tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []

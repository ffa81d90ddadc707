"""A timeline is read back as it was written, and nothing else is read."""

import json
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmt_pipe import Kind, make_schedule, read_timeline, simulate, timeline_of, write_timeline

names = st.sampled_from(
    [("recompute", 3), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("zero_bubble_v", 2)]
)
costs = st.one_of(st.integers(1, 9), st.floats(1e-6, 1e6), st.fractions(Fraction(1, 100), 100))


@given(names, st.integers(1, 3), st.fixed_dictionaries(dict.fromkeys(Kind, costs)))
def test_a_plan_is_read_back_as_it_was(tmp_path_factory, name, stages, costs):
    path = tmp_path_factory.mktemp("timeline") / "plan.json"
    schedule = make_schedule(name[0], stages, 2 * stages, name[1])
    timeline = simulate(schedule, costs)
    write_timeline(path, schedule, timeline)
    assert read_timeline(path) == (schedule, timeline)
    assert not read_timeline(path)[1].in_seconds


@given(names, st.integers(1, 3), st.data())
def test_a_measurement_is_read_back_as_it_was(tmp_path_factory, name, stages, data):
    path = tmp_path_factory.mktemp("timeline") / "measured.json"
    schedule = make_schedule(name[0], stages, stages, name[1])
    instants = [
        sorted(data.draw(st.lists(st.floats(0, 1e9), min_size=2 * len(actions), max_size=2 * len(actions))))
        for actions in schedule.actions
    ]
    timeline = timeline_of(schedule, [times[::2] for times in instants], [times[1::2] for times in instants])
    write_timeline(path, schedule, timeline)
    assert read_timeline(path) == (schedule, timeline)
    assert read_timeline(path)[1].in_seconds


def written(tmp_path):
    schedule = make_schedule("1f1b", 1, 2)
    write_timeline(tmp_path / "timeline.json", schedule, simulate(schedule))
    return json.loads((tmp_path / "timeline.json").read_text())


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format"], "bmt-pipe timeline 3", "its format is 'bmt-pipe timeline 3' and not 'bmt-pipe timeline 2'"),
        (["starts"], None, "starts is not a list of a list for each rank"),
        (["starts", 0], {}, "starts is not a list of a list for each rank"),
        (["starts", 0], [], r"starts has \[0\] times on its ranks, and the schedule \[4\] actions"),
        (["ends"], [], r"ends has \[\] times on its ranks"),
        (["ends", 0, 0], "1/0", "'1/0' in ends is neither a number of seconds, such as 0.5, nor a fraction"),
        (["ends", 0, 0], "1e9", "'1e9' in ends is neither"),
        (["ends", 0, 0], True, "True in ends is neither"),
        (["ends", 0, 0], 1, "1 in ends is neither"),
        (["ends", 0, 0], 1.0, "some of its times are numbers of seconds, others fractions"),
        (["ends", 0, 0], "5/2", "rank 0 cannot do B0 from 1 to 3, with what it did before until 5/2"),
        (["ends", 0, 3], "1", "rank 0 cannot do B1 from 4 to 1"),
        (
            ["schedule"],
            [],
            "schedule is not an object of actions, chunks, loss_outside, micro_batches, stages",
        ),
        (["schedule", "stages"], 2, "it has the actions of 1 ranks for 2 stages"),
        (["schedule", "stages"], True, "stages is True and not a positive integer"),
        (["schedule", "chunks"], 0, "chunks is 0 and not a positive integer"),
        (["schedule", "micro_batches"], "2", "micro_batches is '2' and not a positive integer"),
        (["schedule", "micro_batches"], 1, "'F1' is beyond 1 micro-batches in 1 chunks"),
        (["schedule", "loss_outside"], 0, "loss_outside is 0 and neither true nor false"),
        (["schedule", "v_shaped"], None, "v_shaped is None and neither true nor false"),
        (["schedule", "v_shaped"], True, "it is V-shaped, and has 1 chunks on each rank instead of 2"),
        (["schedule", "actions", 0, 0], "F0.1", "'F0.1' is beyond 2 micro-batches in 1 chunks"),
        (["schedule", "actions", 0, 0], "F-1", "'F-1' is not an action, such as 'F0' or 'B3.1'"),
        (["schedule", "actions", 0, 0], 7, "7 is not an action"),
        (["more"], 1, "the file is not an object of ends, format, schedule, starts"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(keys, value, message, tmp_path):
    content = written(tmp_path)
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"wrong\.json is not a timeline: " + message):
        read_timeline(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1.0", "1e999"])
def test_times_are_finite_and_not_negative(number, tmp_path):
    schedule = make_schedule("1f1b", 1, 1)
    path = tmp_path / "timeline.json"
    write_timeline(path, schedule, timeline_of(schedule, [[0.0, 0.25]], [[0.25, 0.5]]))
    path.write_text(path.read_text().replace("0.25", number))
    with pytest.raises(ValueError, match="rank 0 cannot do"):
        read_timeline(path)


class Harmful:
    def __reduce__(self):
        return (pytest.fail, ("a file was unpickled",))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", pickle.dumps(Harmful()), b"null", b'{"format": 1}']
)
def test_files_that_are_something_else_are_refused(content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other is not a timeline: "):
        read_timeline(path)


def test_nothing_is_written_of_another_schedule(tmp_path):
    path = tmp_path / "timeline.json"
    with pytest.raises(ValueError, match="starts has"):
        write_timeline(path, make_schedule("1f1b", 1, 2), simulate(make_schedule("1f1b", 1, 3)))
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        read_timeline(path)

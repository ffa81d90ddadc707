"""What is printed, and by whom."""

import contextlib
import io

import pytest
import torch

import bmt_comm


def printed(function, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args, **kwargs)
    return out.getvalue(), result


@pytest.mark.ranks(2)
def test_print_rank_prints_on_one_rank(ctx):
    assert printed(bmt_comm.print_rank, "a", 1, sep="-", end="!")[0] == ("a-1!" if ctx.rank == 0 else "")
    assert printed(bmt_comm.print_rank, "b", rank=1)[0] == ("b\n" if ctx.rank == 1 else "")
    box = io.StringIO()
    bmt_comm.print_rank("c", file=box)
    assert box.getvalue() == ("c\n" if ctx.rank == 0 else "")


def test_blocks_and_dicts():
    text, _ = printed(bmt_comm.print_block, "Title", "one\ntwo")
    head, *body = text.splitlines()
    assert head.strip("=") == " Title "
    assert len(head) == 80
    assert body == ["one", "two"]
    assert printed(bmt_comm.print_block, "Title")[0] == head + "\n"
    box = io.StringIO()
    bmt_comm.print_dict("Title", {"a": 1, "b": [2]}, file=box)
    assert box.getvalue().splitlines() == [head, "a: 1", "b: [2]"]


@pytest.mark.ranks(2)
def test_see_memory_measures_on_every_rank_and_prints_on_one(ctx, device_type):
    name, peak = ("resident", "max_resident") if device_type == "cpu" else ("allocated", "max_allocated")
    text, before = printed(bmt_comm.see_memory, "before")
    assert set(before) == {name, peak}
    assert (f"{name}: {before[name]}" in text and " before " in text) if ctx.rank == 0 else text == ""
    held = torch.ones(75_000_000, device=device_type)  # 0.3 GB
    during = printed(bmt_comm.see_memory, "during", detail=False)[1]
    assert 0.27 < during[name] - before[name] < 0.33
    assert during[peak] >= during[name] - 0.01
    del held
    after = printed(bmt_comm.see_memory, "after")[1]
    assert after[name] < during[name] - 0.2
    assert after[peak] >= during[peak] - 0.01

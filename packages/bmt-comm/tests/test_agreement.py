"""Ranks that disagree are told the first difference."""

import pytest

from bmt_comm import check_agreement


@pytest.mark.ranks(1, 3)
def test_agreement_is_silent(ctx):
    check_agreement(ctx.world, "parameters", ["a (2, 3)", "b (4,)"])
    check_agreement(ctx.world, "nothing at all", [])


@pytest.mark.ranks(3)
def test_every_rank_is_told_the_first_difference(ctx):
    odd = ctx.rank == 2
    for mine, message in [
        (
            ["a", "b (4,)" if odd else "b (3,)", "c" if odd else "d"],
            r"item 1 is b \(3,\) on rank 0 and b \(4,\) on rank 2",
        ),
        (["a"] if odd else ["a", "b"], "item 1 is b on rank 0 and nothing on rank 2"),
        (["a", "nothing"] if odd else ["a"], "item 1 is nothing on rank 0 and nothing on rank 2"),
        (["a", "b"] if odd else ["a\0b"], "item 0 is a"),
    ]:
        with pytest.raises(RuntimeError, match="ranks disagree on parameters: " + message):
            check_agreement(ctx.world, "parameters", mine)
    check_agreement(ctx.world, "parameters", [])  # they are still in step


@pytest.mark.ranks(2)
def test_ranks_at_different_calls_are_told_so(ctx):
    with pytest.raises(RuntimeError, match="on what comes next: rank 0 is at saving, rank 1 at loading"):
        check_agreement(ctx.world, "loading" if ctx.rank else "saving", [])


@pytest.mark.ranks(4, tp_size=2)
def test_global_ranks_are_named(ctx):
    names = "rank {} and 1 on rank {}".format(*ctx.tp.ranks)
    with pytest.raises(RuntimeError, match=f"item 0 is 0 on {names}"):
        check_agreement(ctx.tp, "x", [str(ctx.tp_rank)])

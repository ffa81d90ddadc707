"""Ranks that disagree get an error that names the first difference."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from bmt_comm import (
    Communicator,
    DisagreementError,
    RankFailureError,
    agreement,
    check_agreement,
    current_context,
    init_distributed,
    watch,
)
from bmt_comm.agreement import begin_agreements


@pytest.mark.ranks(1, 3)
def test_agreement_is_silent(ctx):
    check_agreement(ctx.world, "parameters", ["a (2, 3)", "b (4,)"])
    check_agreement(ctx.world, "nothing at all", [])


@pytest.mark.ranks(3)
def test_every_rank_gets_the_first_difference(ctx):
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
def test_ranks_at_different_calls_get_both(ctx):
    with pytest.raises(RuntimeError, match="on what comes next: rank 0 is at saving, rank 1 at loading"):
        check_agreement(ctx.world, "loading" if ctx.rank else "saving", [])


@pytest.mark.ranks(4, tp_size=2)
def test_global_ranks_are_named(ctx):
    names = "rank {} and 1 on rank {}".format(*ctx.tp.ranks)
    with pytest.raises(RuntimeError, match=f"item 0 is 0 on {names}"):
        check_agreement(ctx.tp, "x", [str(ctx.tp_rank)])


def elsewhere(until):
    """Until there is this file. A rank that is elsewhere is ended soon after the time-out; here it has longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_WAKE", 2.5)
        while not until.exists():
            time.sleep(0.02)


@pytest.mark.ranks(3, init=False, timeout=40)
def test_a_rank_that_does_not_come_is_named_with_where_it_is(tmp_path):
    init_distributed(device="cpu", timeout=600.0, agreement_timeout=1.5)
    ctx = current_context()
    if ctx.rank == 1:
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RankFailureError) as raised:
        check_agreement(ctx.world, "the weather", [])
    (tmp_path / "over").touch()
    said = str(raised.value)
    assert "rank 1 did not come to the agreement on the weather in 1.5 seconds" in said
    assert re.search(r"  rank 1: is at \S+test_agreement\.py:\d+ in elsewhere, and waits for no operation", said)
    assert re.search(r"  ranks? .*[02].*: waits in operation \d+ of world .*, agreement on the weather", said)


@pytest.mark.ranks(3, init=False, timeout=40)
def test_ranks_of_a_process_group_of_their_own_are_named(tmp_path):
    """Without ``init_distributed``, and so without a watch."""
    dist.init_process_group("gloo")
    begin_agreements(None, 1.5)
    comm = Communicator(dist.group.WORLD)
    check_agreement(comm, "the weather", [])
    if comm.rank == 1:
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RuntimeError, match=r"ranks? (0, )?1(, 2)? did not come to the agreement on .* in 1\.5"):
        check_agreement(comm, "the weather", [])
    (tmp_path / "over").touch()


@pytest.mark.ranks(3)
def test_checks_leave_nothing_in_the_store(ctx):
    store = dist.distributed_c10d._get_default_store()
    comms = ctx.world, ctx.zero
    for turn in range(20):
        for comm in comms:
            check_agreement(comm, f"turn {turn}", ["a"])
        with pytest.raises(DisagreementError):
            check_agreement(ctx.world, "ranks", [str(ctx.rank)])
        check_agreement(ctx.world, "the end of the turn", [])
        ctx.world.barrier()
        if turn == 0:
            before = store.num_keys()
        ctx.world.barrier()
    assert store.num_keys() == before


class Own(threading.local):
    """Settings of each thread."""

    store: Any = None
    timeout, stopped = 50.0, ""


@dataclass(eq=False)
class Group:
    group_name: str


def simulated(kind, path, size):
    """A store for each of many ranks."""
    if kind == "file":
        return [dist.FileStore(path, size) for _ in range(size)]
    if kind == "hash":
        return [dist.HashStore()] * size
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(7)]
    return [dist.PrefixStore("job", [server, *connections][rank % 8]) for rank in range(size)]


@pytest.mark.parametrize(("kind", "size"), [("hash", 256), ("file", 8), ("tcp", 64)])
def test_many_ranks_over_every_store(kind, size, tmp_path, monkeypatch):
    stores = simulated(kind, str(tmp_path / "store"), size)
    own = Own()
    monkeypatch.setattr(agreement, "_settings", own)
    odd = range(size // 2, size, 2)

    def run(rank):
        own.store = stores[rank]
        comm: Any = SimpleNamespace(
            is_planned=False, group=Group("world"), rank=rank, size=size, ranks=tuple(range(size))
        )
        comm.wait_for = lambda work, name: work.wait()
        for turn in range(3):
            check_agreement(comm, f"turn {turn}", ["the same"])
        with pytest.raises(DisagreementError, match=f"item 0 is a on rank 0 and b{odd[0]} on rank {odd[0]}$"):
            check_agreement(comm, "letters", [f"b{rank}" if rank in odd else "a"])
        check_agreement(comm, "the end", [])

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))


def test_process_groups_of_one_name_and_other_ranks_do_not_meet(monkeypatch):
    store = dist.HashStore()
    own = Own()
    monkeypatch.setattr(agreement, "_settings", own)

    def run(ranks, rank):
        own.store, own.timeout = store, 20.0
        comm: Any = SimpleNamespace(is_planned=False, group=Group("pair"), rank=rank, size=2, ranks=ranks)
        comm.wait_for = lambda work, name: work.wait()
        check_agreement(comm, "letters", [str(ranks)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [(0, 1), (2, 3), (0, 1), (2, 3)], [0, 0, 1, 1]))


def test_a_process_group_that_is_made_again_on_the_same_store(monkeypatch):
    store = dist.HashStore()
    own = Own()
    monkeypatch.setattr(agreement, "_settings", own)

    def run(rank):
        own.store, own.timeout = store, 5.0
        for turn in range(3):
            group = Group("default")  # of the name that the destroyed one had
            comm: Any = SimpleNamespace(is_planned=False, group=group, rank=rank, size=2, ranks=(0, 1))
            comm.wait_for = lambda work, name: work.wait()
            for check in range(turn + 1):
                check_agreement(comm, f"turn {turn}, check {check}", [])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))

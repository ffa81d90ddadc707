"""Calls that fail on one rank or on all: all ranks raise, no rank waits, and nothing incomplete remains."""

from __future__ import annotations

import errno
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Position, plain, same, sharded
from torch import nn

import bmt_zero
from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints import job
from bmt_zero.checkpoints import pretrained as pretrained_module
from bmt_zero.checkpoints import writer as writer_module
from bmt_zero.checkpoints.loading import Loading
from bmt_zero.checkpoints.sources import OpenFile
from bmt_zero.checkpoints.store_communicator import StoreCommunicator


class Refused(Exception):
    pass


class Picky(Position):
    """Does not accept its state on one rank."""

    def __init__(self, value: Any, refuses: bool) -> None:
        super().__init__(value)
        self.refuses = refuses

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise Refused("not this one")
        super().load_state_dict(state)


@pytest.mark.ranks(2)
def test_a_state_that_one_rank_refuses_is_an_error_on_all(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=30)
    checkpointer.save(1, model=sharded(), data=Position(ctx.rank), per_replica=["data"])
    for load in (lambda **o: checkpointer.load(1, **o), checkpointer.load_latest):
        if ctx.rank == 1:  # the error of this rank keeps its type
            with pytest.raises(Refused, match="not this one"):
                load(model=sharded(2), data=Picky(7, True))
        else:
            with pytest.raises(RuntimeError, match="rank 1: Refused: not this one"):
                load(model=sharded(2), data=Picky(7, False))
    data = Picky(7, False)
    assert checkpointer.load_latest(model=sharded(2), data=data) == 1
    assert data.value == ctx.rank


class Absent(FileNotFoundError):
    pass


class Raising(Position):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.value is not None:
            raise self.value


@pytest.mark.ranks(2)
def test_a_file_that_a_state_misses_on_one_rank_is_an_error_on_all(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=5)
    checkpointer.save(1, model=sharded(), data=Position(None))
    for others, kind in ((None, FileNotFoundError), (ValueError("other"), ValueError), (OSError("other"), OSError)):
        error = Absent("no data") if ctx.rank else others
        with pytest.raises(kind, match="no data" if others is None else "other") as raised:
            checkpointer.load_latest(model=sharded(2), data=Raising(error))
        assert others is None or not isinstance(raised.value, FileNotFoundError)
    assert checkpointer.load_latest(model=sharded(2), data=Raising(None)) == 1


@pytest.mark.ranks(2)
def test_a_step_that_is_none_is_refused_on_every_rank(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=5)
    for bad in (None, "1", -1, 10**18):
        with pytest.raises(ValueError, match=f"step={bad!r} must be a whole number"):
            checkpointer.load(bad, model=sharded())
    with pytest.raises(ValueError, match=r"ranks load different steps, in the order of the ranks: 1, None"):
        checkpointer.load((1, None)[ctx.rank], model=sharded())
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 1"):
        checkpointer.load(1, model=sharded())


@pytest.mark.ranks(2)
def test_an_unexpected_error_on_rank_0_reaches_the_others(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=5)
    if ctx.rank == 0:
        checkpointer._candidates = lambda: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        checkpointer.load_latest(model=sharded())


@pytest.mark.ranks(2)
def test_a_directory_that_a_rank_does_not_see_is_named(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / f"of rank {ctx.rank}")
    checkpointer.save(1, model=sharded())
    with pytest.raises(SaveError, match=r"not written: rank 1: .*/of rank 1/.*; all ranks must share the directory"):
        checkpointer.wait()


@pytest.mark.ranks(2)
def test_a_rank_that_is_late_still_hears_every_answer(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=5)
    if ctx.rank == 1:
        while not (tmp_path / "rank 0 is through").exists():
            time.sleep(0.01)
    for _ in range(20):
        assert checkpointer.load_latest(model=plain()) == 0
    (tmp_path / "rank 0 is through").touch()
    if ctx.rank == 1:
        time.sleep(0.2)
    for _ in range(20):
        with pytest.raises(FileNotFoundError):
            checkpointer.load(7, model=plain())


@pytest.mark.ranks(3)
def test_the_number_of_keys_in_the_store_is_bounded(ctx: Any) -> None:
    comm = StoreCommunicator(5)
    keys = 0
    for number in range(40):
        comm.broadcast(bytes([number]) if ctx.rank == 0 else None)
        assert comm.all_gather(b"%d" % (ctx.rank % 2)) == [b"0", b"1", b"0"]
        assert comm.all_gather(b"%d, %d" % (number, ctx.rank)) == [b"%d, %d" % (number, rank) for rank in range(3)]
        ctx.world.barrier()
        if number == 5:
            keys = comm._store.num_keys()
        ctx.world.barrier()
    assert comm._store.num_keys() <= keys + 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["pack", "unpack", "write_all"])
def test_any_error_of_one_writer_is_raised_on_all(ctx: Any, tmp_path: Path, rank: int, name: str) -> None:
    """For pieces of which both ranks have parts, one rank packs its parts and the other one unpacks them."""
    checkpointer = Checkpointer(tmp_path / "c", timeout=10)
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    original, called = getattr(writer_module, name), []

    def failing(*arguments: Any) -> Any:
        called.append(name)
        raise MemoryError("no memory")

    if ctx.rank == rank:
        setattr(writer_module, name, failing)
    problem = ""
    try:
        checkpointer.save(2, model=sharded(width=700))
        try:
            checkpointer.wait()
        except SaveError as error:
            problem = str(error)
    finally:
        setattr(writer_module, name, original)
    fails = ctx.world.all_gather_object(bool(called))[rank]
    assert fails or name != "write_all"
    assert (f"rank {rank}: MemoryError: no memory" in problem) == fails
    checkpointer.save(3, model=sharded())
    checkpointer.wait()
    assert checkpointer.steps() == ([1, 3] if fails else [1, 2, 3])


@pytest.mark.ranks(2, timeout=40)
def test_any_error_of_rank_0_at_the_beginning_is_raised_on_all(ctx: Any) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be used for checkpoints: .*embedded null"):
        Checkpointer("a\0b")


@pytest.mark.ranks(2, timeout=40)
def test_any_error_of_one_reader_is_raised_on_all(ctx: Any, tmp_path: Path) -> None:
    """In ``bmt_zero.load`` of a directory, where each rank reads."""

    def linear(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return bmt_zero.BMTrainModelWrapper(nn.Sequential(nn.Linear(5, 5)))

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=linear(1))
    checkpointer.close()
    original = pretrained_module.fill

    def failing(*arguments: Any) -> None:
        raise MemoryError("no memory")

    if ctx.rank == 1:
        pretrained_module.fill = failing
    try:
        with pytest.raises(RuntimeError, match="MemoryError: no memory"):
            bmt_zero.load(linear(2), tmp_path / "c" / "step-00000001")
    finally:
        pretrained_module.fill = original
    model = linear(2)
    bmt_zero.load(model, tmp_path / "c" / "step-00000001")
    same(model.state_dict(), linear(1).state_dict())


# --- the memory that a failed load keeps ----------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def test_a_refused_load_leaves_no_state_in_optimizers_of_torch(tmp_path: Path) -> None:
    def stepped(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        optimizer = adam(model)
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    checkpointer = Checkpointer(tmp_path / "c")
    saved, state = stepped(5)
    checkpointer.save(1, model=saved, optimizer=state)
    checkpointer.wait()
    for other in (nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)), nn.Sequential(nn.Linear(3, 5))):
        optimizer = adam(other)
        with pytest.raises(ValueError, match=r"fit|parameter|neither a number"):
            checkpointer.load(1, model=other, optimizer=optimizer)
        assert not optimizer.state
    # One that is damaged in its last file that is read: nothing but what was there before.
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = adam(model)
    path = tmp_path / "c" / "step-00000001" / "optimizer-00001-of-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="has changed since it was written"):
        checkpointer.load(1, model=model, optimizer=optimizer)
    assert not optimizer.state
    path.write_bytes(content)
    checkpointer.load(1, model=model, optimizer=optimizer)
    for ours, theirs in zip(model.parameters(), saved.parameters()):
        assert optimizer.state[ours].keys() == state.state[theirs].keys()
        for key, value in state.state[theirs].items():
            assert torch.equal(optimizer.state[ours][key], value), key


def test_refused_loads_leave_no_open_files_or_threads(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=plain())
    checkpointer.wait()
    path = tmp_path / "c" / "step-00000001" / "trainer.json"
    content = path.read_bytes()

    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = usage()
    gc.collect()
    gc.disable()
    for number in range(50):
        if number % 2:
            path.write_bytes(content[:-1] + b" ")
        with pytest.raises(ValueError, match="does not fit" if number % 2 == 0 else "checksum"):
            checkpointer.load(1, model=plain(width=8))
        with pytest.raises(ValueError, match="no state of 'data'" if number % 2 == 0 else "checksum"):
            checkpointer.load(1, model=plain(), data=Position(1))
        path.write_bytes(content)
    left = sum(type(each) in (Loading, OpenFile) for each in gc.get_objects())
    gc.enable()
    assert left == 0  # without the garbage collector's help
    files, threads = usage()
    assert files <= before[0]
    assert threads <= before[1]


@pytest.mark.ranks(2, timeout=60)
def test_a_disk_that_fails_on_one_rank_is_named_on_all(
    ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "c", timeout=30)
    stat = Path.stat

    def lost(*_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    def stat_or_lost(path: Path, **options: Any) -> os.stat_result:
        if ".part" in str(path):
            lost()
        return stat(path, **options)

    if ctx.rank == 1:
        monkeypatch.setattr(job, "_write_files", lost)
        monkeypatch.setattr(Path, "stat", stat_or_lost)
    checkpointer.save(1, model=sharded())
    with pytest.raises(SaveError, match=r"rank 1: .*Stale file handle"):
        checkpointer.wait()

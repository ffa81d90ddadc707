"""Checkpoints of models: all ranks write them in place, they are complete or absent, and any layout loads them."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Position, files_of_model, plain, same, sharded
from torch import nn

import bmt_zero
from bmt_comm.testing import MemoryGrowth
from bmt_comm.testing.memory import held
from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints import job as job_module
from bmt_zero.checkpoints import writer as writer_module
from bmt_zero.checkpoints.reader import Target
from bmt_zero.checkpoints.tools import convert


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_any_layout_writes_the_bytes_of_the_plain_model(ctx: Any, tmp_path: Path, level: int) -> None:
    """Its tensors have several pieces, so that ranks have pieces of their own and pieces in common."""
    load = pytest.importorskip("safetensors.torch").load_file
    width = 700
    model = sharded(width=width, level=level)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, model=model)
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000005"
    wanted = {name: value.cpu() for name, value in plain(width=width).state_dict().items()}
    saved = load(folder / "model-00001-of-00001.safetensors")
    same({name: saved[name] for name in wanted}, wanted)
    assert saved.keys() == wanted.keys()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(index["weight_map"], "model-00001-of-00001.safetensors")
    assert index["weight_map"].keys() == wanted.keys()
    # The same bytes as from plain modules, whose ranks are replicas.
    other = Checkpointer(tmp_path / "plain")
    other.save(5, model=plain(width=width))
    other.wait()
    assert files_of_model(folder) == files_of_model(tmp_path / "plain" / "step-00000005")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("level", [0, 3])
def test_loading_puts_everything_back_in_place(ctx: Any, tmp_path: Path, level: int) -> None:
    saved = sharded(1, level=level)
    saved.steps.fill_(9)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, model=saved)
    model = sharded(2, level=3 - level)
    identities = [id(p) for p in model.parameters()]
    assert checkpointer.load_latest(model=model) == 5
    same(model.state_dict(), saved.state_dict())
    assert [id(p) for p in model.parameters()] == identities
    assert int(model.steps) == 9
    ids = torch.arange(5)
    assert torch.equal(model.embed(ids), saved.embed(ids))  # unsharded copies are not those from before


@pytest.mark.ranks(2)
def test_no_checkpoint_is_step_zero(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    assert checkpointer.load_latest(model=sharded()) == 0
    assert checkpointer.steps() == []
    with pytest.raises(FileNotFoundError, match="has no checkpoint of step 3"):
        checkpointer.load(3, model=sharded())


@pytest.mark.ranks(2)
def test_what_is_written_is_what_the_call_saw(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    checkpointer = Checkpointer(tmp_path / "c")
    hold = threading.Event()
    run = job_module.PieceWriter.run
    job_module.PieceWriter.run = lambda self: (hold.wait(), run(self))[1]  # type: ignore[method-assign]
    try:
        checkpointer.save(1, model=model)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        assert checkpointer.steps() == []
        hold.set()
        checkpointer.wait()
    finally:
        job_module.PieceWriter.run = run  # type: ignore[method-assign]
    assert checkpointer.steps() == [1]
    checkpointer.load(1, model=model)
    same(model.state_dict(), wanted)


@pytest.mark.ranks(2)
def test_a_second_save_waits_and_says_so(ctx: Any, tmp_path: Path) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bmt_zero.checkpoints").addHandler(handler)
    model = sharded()
    checkpointer = Checkpointer(tmp_path / "c")
    hold = threading.Event()
    run = job_module.PieceWriter.run
    job_module.PieceWriter.run = lambda self: (hold.wait(), run(self))[1]  # type: ignore[method-assign]
    try:
        checkpointer.save(1, model=model)
        threading.Timer(0.2, hold.set).start()
        checkpointer.save(2, model=model)
    finally:
        hold.set()
        job_module.PieceWriter.run = run  # type: ignore[method-assign]
        logging.getLogger("bmt_zero.checkpoints").removeHandler(handler)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert records[0] == "save(2) waits for the checkpoint of step 1, which is still being written"
    assert records[1].startswith("save(2) has waited for ")


@pytest.mark.ranks(2)
def test_older_checkpoints_go_and_the_newest_finite_one_stays(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in range(1, 5):
        checkpointer.save(step, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4]
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.scale.fill_(float("nan"))
    for step in range(5, 9):
        checkpointer.save(step, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [4, 7, 8]
    assert checkpointer.load_latest(model=model) == 4  # the weights of the others are not finite
    same(model.state_dict(), wanted)


@pytest.mark.ranks(2)
def test_a_step_may_be_saved_again(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    for seed in (1, 2):
        checkpointer.save(7, model=sharded(seed))
    model = sharded(3)
    assert checkpointer.load_latest(model=model) == 7
    same(model.state_dict(), sharded(2).state_dict())
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000007"]


@pytest.mark.ranks(2, timeout=300)
def test_many_saves_leave_nothing_behind(ctx: Any, tmp_path: Path) -> None:
    """The session ``checkpoint_faults`` of nox saves more often."""
    saves = int(os.environ.get("BMT_SAVES", "24"))
    model, checkpointer = sharded(width=300), Checkpointer(tmp_path / "c", keep=2)

    def usage() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), held()

    for step in range(saves):
        checkpointer.save(step, model=model, data=Position(step))
        if step == saves // 3:
            checkpointer.wait()
            before = usage()
    checkpointer.wait()
    after = usage()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2] * 1.01


@pytest.mark.ranks(2, timeout=120)
def test_little_memory_is_needed_beside_the_copy_and_the_shard(ctx: Any, tmp_path: Path) -> None:
    def make(device: str) -> nn.Module:
        with torch.device(device):
            layers = [nn.Linear(2048, 2048, bias=False) for _ in range(24)]
        return bmt_zero.BMTrainModelWrapper(nn.Sequential(*layers))

    extra, shard = 64 << 20, 24 * 2048 * 2048 * 4 // 2
    model, checkpointer = make("cpu"), Checkpointer(tmp_path / "c")
    gc.collect()
    with MemoryGrowth() as memory:
        checkpointer.save(1, model=model)
        checkpointer.wait()
    assert shard < memory.peak < shard + extra
    with MemoryGrowth() as memory:
        checkpointer.save(2, model=model)  # into the same memory
        checkpointer.wait()
    assert memory.peak < extra
    checkpointer.close()
    ctx.world.barrier()
    with MemoryGrowth() as memory:
        bmt_zero.load(make("meta"), tmp_path / "c" / "step-00000002")
    assert shard * 0.5 < memory.peak < shard + extra  # freed memory that the process still holds is used again


@pytest.mark.long
@pytest.mark.ranks(2, timeout=120)
def test_one_large_tensor_takes_little_memory_beside_the_shard(ctx: Any, tmp_path: Path) -> None:
    """A model on the meta device is loaded from a directory, and from files that rank 0 reads for a slower rank."""

    def make(device: str) -> nn.Module:
        with torch.device(device):
            return bmt_zero.BMTrainModelWrapper(nn.Linear(2048, 24 * 2048, bias=False))

    extra, shard = 64 << 20, 24 * 2048 * 2048 * 4 // 2
    model, checkpointer = make("cpu"), Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=model)
    checkpointer.close()
    wanted = model.weight.to_local().clone()
    source = tmp_path / "c" / "step-00000001"
    if ctx.rank == 0:
        for suffix in (".safetensors", ".pt"):
            convert(source, tmp_path / f"m{suffix}")
    count, preadv = 0, os.preadv

    def counted(handle: int, buffers: Any, at: int) -> int:
        nonlocal count
        count += (read := preadv(handle, buffers, at))
        return read

    def slow(target: Target, low: int, window: torch.Tensor, take: Any = Target.take) -> None:
        time.sleep(0.01)
        take(target, low, window)

    del model, checkpointer
    gc.collect()
    ctx.world.barrier()
    for path in (source, tmp_path / "m.safetensors", tmp_path / "m.pt"):
        model, count = None, 0
        gc.collect()  # garbage that is freed during the measurement would hide as much memory
        with pytest.MonkeyPatch.context() as patch, MemoryGrowth() as memory:
            model = make("meta")
            patch.setattr(os, "preadv", counted)
            if ctx.rank == 1:
                patch.setattr(Target, "take", slow)
            bmt_zero.load(model, path)
        assert memory.peak < shard + extra, path
        if path == source:  # each rank reads its own shards
            assert shard <= count < shard + (4 << 20)
        assert torch.equal(model.weight.to_local(), wanted)
        ctx.world.barrier()


@pytest.mark.ranks(2, tp_size=2, timeout=120)
def test_columns_that_ranks_exchange_take_little_memory_beside_the_copy(ctx: Any, tmp_path: Path) -> None:
    class Columns(bmt_zero.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            own = torch.ones(4096, 6144)
            self.weight = bmt_zero.DistributedParameter(own, tp_mode=True, tp_split_dim=1)

    extra, shard = 64 << 20, 4096 * 6144 * 4
    model, checkpointer = Columns(), Checkpointer(tmp_path / "c")
    gc.collect()
    with MemoryGrowth() as memory:
        checkpointer.save(1, model=model)
        checkpointer.wait()
    assert memory.peak < shard + extra
    with MemoryGrowth() as memory:
        checkpointer.save(2, model=model)
        checkpointer.wait()
        assert checkpointer.load_latest(model=model) == 2
    assert memory.peak < extra


# --- objects --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrong_calls_are_named_on_every_rank(ctx: Any, tmp_path: Path) -> None:
    for keep in (2.5, "3"):
        with pytest.raises(TypeError, match=f"keep={keep!r} must be a whole number"):
            Checkpointer(tmp_path / "c", keep=keep)  # type: ignore[arg-type]
    checkpointer = Checkpointer(tmp_path / "c")
    model = sharded()
    for error, message, call in [
        (TypeError, "model must be a torch.nn.Module, not int", lambda: checkpointer.save(1, model=3)),
        (ValueError, "step=-1 must be a whole number", lambda: checkpointer.save(-1, model=model)),
        (TypeError, "data is a int; a checkpoint takes objects", lambda: checkpointer.save(1, model=model, data=3)),
        (ValueError, "'rng' cannot be the name", lambda: checkpointer.save(1, model=model, rng=Position(1))),
        (ValueError, "per_replica names", lambda: checkpointer.save(1, model=model, per_replica=["x"])),
        (TypeError, "per_replica='x' must be a list", lambda: checkpointer.save(1, model=model, per_replica="x")),
        (
            TypeError,
            r"state of 'x'\['value'\] is a builtins.object",
            lambda: checkpointer.save(1, x=Position(object())),
        ),
        (ValueError, "pass model=, too", lambda: checkpointer.save(1, optimizer=torch.optim.SGD(model.parameters()))),
    ]:
        with pytest.raises(error, match=message):
            call()
        with pytest.raises(SaveError, match=f"rank 0: {error.__name__}"):
            checkpointer.wait()
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)
    assert checkpointer.steps() == []


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_nobody_waits(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    model = sharded()
    checkpointer.save(1, model=model)
    bad = Position(object() if ctx.rank == 1 else 1)
    if ctx.rank == 1:
        with pytest.raises(TypeError, match="object"):
            checkpointer.save(2, model=model, bad=bad)
    else:
        checkpointer.save(2, model=model, bad=bad)
    with pytest.raises(SaveError, match="rank 1: TypeError"):
        checkpointer.save(3, model=model)
    checkpointer.save(4, model=plain(width=7 + ctx.rank))
    with pytest.raises(SaveError, match="ranks disagree"):
        checkpointer.wait()
    checkpointer.save(5, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_disk_on_one_rank_is_raised_on_all(ctx: Any, tmp_path: Path, rank: int) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    original = writer_module.write_all

    def full(handle: int, content: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    if ctx.rank == rank:
        writer_module.write_all = full
    try:
        checkpointer.save(2, model=sharded(width=700))
        with pytest.raises(SaveError, match=f"rank {rank}: No space left on device. Earlier checkpoints are"):
            checkpointer.wait()
    finally:
        writer_module.write_all = original
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001"]
    checkpointer.save(3, model=sharded())
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


# --- damage ---------------------------------------------------------------------------------------


def test_a_checkpointer_needs_no_process_group(tmp_path: Path) -> None:
    """Plain modules, in a plain process."""
    model, other = plain(1), plain(2)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(3, model=model)
    assert checkpointer.load_latest(model=other) == 3
    same(other.state_dict(), model.state_dict())
    checkpointer.close()

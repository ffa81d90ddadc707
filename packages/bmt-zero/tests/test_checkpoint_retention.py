"""Which checkpoints are kept, and which one is the newest, by the order of the saves, not by their steps."""

from __future__ import annotations

import builtins
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import same, sharded

from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints import directory as directory_module
from bmt_zero.checkpoints import job as job_module


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.ranks(2)
def test_after_going_back_the_new_checkpoints_are_the_newest(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step, model=sharded(step))
    checkpointer.wait()
    assert checkpointer.steps() == [20, 30]
    model = sharded(1)
    checkpointer.load(20, model=model)
    checkpointer.save(25, model=sharded(25))
    checkpointer.wait()
    assert checkpointer.steps() == [30, 25]
    assert checkpointer.load_latest(model=model) == 25  # not 30, which is of the branch that was left
    same(model.state_dict(), sharded(25).state_dict())
    checkpointer.save(28, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [25, 28]


@pytest.mark.ranks(1)
def test_the_checkpoint_just_saved_stays_although_later_steps_fill_the_places(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=3)
    for step in (500, 1000, 1500, 2000):
        checkpointer.save(step, model=sharded())
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path / "c", keep=3)
    checkpointer.load(1000, model=sharded())
    checkpointer.save(600, model=sharded())
    checkpointer.wait()
    assert checkpointer.steps() == [1500, 2000, 600]
    checkpointer.save(1500, model=sharded())  # again: it is now the newest
    checkpointer.wait()
    assert checkpointer.steps() == [2000, 600, 1500]
    assert checkpointer.load_latest(model=sharded()) == 1500


@pytest.mark.ranks(2)
def test_a_damaged_checkpoint_does_not_count(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in (10, 20):
        checkpointer.save(step, model=sharded(step))
    checkpointer.close()
    if ctx.rank == 0:
        flip(tmp_path / "c" / "step-00000020" / "model-00001-of-00001.safetensors")
    ctx.world.barrier()
    for keep, kept in ((2, [10, 15]), (1, [16])):
        checkpointer = Checkpointer(tmp_path / "c", keep=keep)
        model = sharded(1)
        if keep == 2:
            assert checkpointer.load_latest(model=model) == 10
            same(model.state_dict(), sharded(10).state_dict())
        checkpointer.save(kept[-1], model=sharded(15))
        checkpointer.wait()
        assert [step for step in checkpointer.steps() if step != 20] == kept
        assert checkpointer.load_latest(model=model) == kept[-1]
        same(model.state_dict(), sharded(15).state_dict())
        checkpointer.close()


@pytest.mark.ranks(1)
def test_the_last_good_checkpoint_stays_when_the_newest_is_damaged(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in (10, 20):
        checkpointer.save(step, model=sharded(step))
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    flip(tmp_path / "c" / "step-00000020" / "model-00001-of-00001.safetensors")
    model = sharded(1)
    assert checkpointer.load_latest(model=model) == 10
    checkpointer.save(15, model=sharded(15))
    checkpointer.wait()
    assert 15 in checkpointer.steps()
    assert checkpointer.load_latest(model=model) == 15
    same(model.state_dict(), sharded(15).state_dict())


@pytest.mark.ranks(1)
def test_the_last_good_checkpoint_stays_when_a_newer_one_is_damaged_and_the_saved_one_is_not_finite(
    ctx: Any, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in (10, 20):
        checkpointer.save(step, model=sharded(step))
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    flip(tmp_path / "c" / "step-00000020" / "model-00001-of-00001.safetensors")
    model = sharded(1)
    assert checkpointer.load_latest(model=model) == 10
    with torch.no_grad():
        model.scale.fill_(float("nan"))
    checkpointer.save(15, model=model)
    checkpointer.wait()
    assert {10, 15} <= set(checkpointer.steps())
    assert checkpointer.load_latest(model=model) == 10


@pytest.mark.ranks(1)
def test_buffers_that_are_not_finite_are_no_reason_to_pass_over_a_checkpoint(ctx: Any, tmp_path: Path) -> None:
    """A causal mask has -inf."""
    checkpointer = Checkpointer(tmp_path / "c")
    older, newer = sharded(1), sharded(2)
    for model in (older, newer):
        model.register_buffer("causal", torch.full((3, 3), float("-inf")).triu(1))
    with torch.no_grad():
        newer.scale.fill_(float("nan"))
    checkpointer.save(1, model=older)
    checkpointer.save(2, model=newer)
    assert checkpointer.load_latest(model=sharded_with_mask()) == 1


def sharded_with_mask() -> torch.nn.Module:
    model = sharded(3)
    model.register_buffer("causal", torch.zeros(3, 3))
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_old_checkpoint_that_cannot_be_read_is_in_nobodys_way(ctx: Any, tmp_path: Path, code: int) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in (100, 200):
        checkpointer.save(step, model=sharded(step))
    checkpointer.wait()
    ctx.world.barrier()
    original, lost = builtins.open, ["step-00000100/manifest.json"]
    messages: list[str] = []

    def failing(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(tuple(lost)):
            raise OSError(code, os.strerror(code))
        return original(path, *arguments, **options)

    model = sharded(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", failing)
        patch.setattr(directory_module._log, "warning", lambda text, *values: messages.append(text % values))
        assert checkpointer.steps() == [200]
        assert "step-00000100 cannot be read for now" in messages[-1]
        assert checkpointer.load_latest(model=model) == 200
        same(model.state_dict(), sharded(200).state_dict())
        for step in (300, 150):
            checkpointer.save(step, model=sharded(step))
            checkpointer.wait()
        assert checkpointer.steps() == [300, 150]
        ctx.world.barrier()
        lost.append("step-00000150/manifest.json")
        with pytest.raises(OSError, match=r"step-00000150/manifest\.json"):  # and not 300
            checkpointer.load_latest(model=model)
        checkpointer.save(120, model=sharded(120))
        checkpointer.wait()
        assert checkpointer.load_latest(model=model) == 120
        ctx.world.barrier()
    assert checkpointer.steps() == [100, 300, 150, 120]
    assert checkpointer.load_latest(model=model) == 120


# --- failures to publish and to remove ------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_cannot_be_removed_is_a_warning_and_the_checkpoint_is_there(ctx: Any, tmp_path: Path) -> None:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bmt_zero.checkpoints").addHandler(handler)
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    original = job_module.retire

    def refused(*arguments: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    job_module.retire = refused
    try:
        for step in (1, 2):
            checkpointer.save(step, model=sharded())
            checkpointer.wait()
    finally:
        job_module.retire = original
        logging.getLogger("bmt_zero.checkpoints").removeHandler(handler)
    assert checkpointer.steps() == [1, 2]
    assert len(messages) == (2 if ctx.rank == 0 else 0)
    assert all("could not be removed: Permission denied" in message for message in messages)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("failing", ["rename", "sync"])
def test_a_checkpoint_that_cannot_be_replaced_stays(
    ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(7, model=sharded(1))
    checkpointer.wait()
    rename, sync = os.rename, directory_module.sync_to_disk

    def refused_rename(source: Any, target: Any) -> None:
        if failing == "rename" and str(source).endswith(".part"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    def refused_sync(path: Path) -> None:
        if failing == "sync":
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    monkeypatch.setattr(os, "rename", refused_rename)
    monkeypatch.setattr(directory_module, "sync_to_disk", refused_sync)
    checkpointer.save(7, model=sharded(2))
    with pytest.raises(SaveError, match="step 7 was not written: Input/output error"):
        checkpointer.wait()
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000007"]
    model = sharded(3)
    assert checkpointer.load_latest(model=model) == 7
    same(model.state_dict(), sharded(1).state_dict())

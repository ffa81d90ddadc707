"""Checkpoints that are damaged, of another model or of another run are recognised, named and left alone."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from saving_helpers import Position, same, sharded
from torch import nn

import bmt_zero
from bmt_zero import Checkpointer, DamagedError


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) * 2 // 3])
    elif how == "longer":
        path.write_bytes(content + b"\0")
    else:
        content[len(content) * 3 // 4] ^= 1
        path.write_bytes(content)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "flipped", "swapped"])
def test_a_damaged_checkpoint_is_passed_over(ctx: Any, tmp_path: Path, how: str) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    older = sharded(1, width=300)
    checkpointer.save(1, model=older, data=Position(1))
    checkpointer.save(2, model=sharded(2, width=300), data=Position(2))
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000002"
    damaged = []
    for name in sorted(os.listdir(folder)):
        other = tmp_path / "c" / "step-00000001" / name
        if how == "swapped" and other.read_bytes() == (folder / name).read_bytes():
            continue
        if how in ("flipped", "swapped") and (name.startswith("rng-00001") or name.endswith("index.json")):
            continue  # of the other rank; and what is not read
        backup = tmp_path / "backup"
        ctx.world.barrier()
        if ctx.rank == 0:
            shutil.copy(folder / name, backup)
            if how == "swapped":  # the file of another step, of the same size
                assert other.stat().st_size == (folder / name).stat().st_size
                shutil.copy(other, folder / name)
            else:
                damage(folder / name, how)
        damaged.append(name)
        ctx.world.barrier()
        model, data = sharded(3, width=300), Position(0)
        assert checkpointer.load_latest(model=model, data=data) == 1, name
        assert data.value == 1
        same(model.state_dict(), older.state_dict())
        ctx.world.barrier()
        if ctx.rank == 0:
            shutil.copy(backup, folder / name)
    ctx.world.barrier()
    assert checkpointer.load_latest(model=sharded(3, width=300)) == 2
    assert {"model-00001-of-00001.safetensors", "manifest.json", "trainer.json", "state-data.json"} <= set(damaged)


@pytest.mark.ranks(1, 2)
def test_a_flipped_byte_in_any_piece_is_noticed(ctx: Any, tmp_path: Path) -> None:
    """The tensors have several pieces, whose checksums are compared while more is read."""
    checkpointer = Checkpointer(tmp_path / "c")
    model = bmt_zero.BMTrainModelWrapper(nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(2)]))
    checkpointer.save(1, model=model)
    checkpointer.wait()
    path = tmp_path / "c" / "step-00000001" / "model-00001-of-00001.safetensors"
    for at in [*range(1 << 19, path.stat().st_size, 1 << 20), path.stat().st_size - 1]:
        for flipped in (True, False):
            ctx.world.barrier()
            if ctx.rank == 0:
                with open(path, "rb+") as file:
                    file.seek(at)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 4]))
            ctx.world.barrier()
            if flipped:
                with pytest.raises(DamagedError, match=f"checksum of bytes {at >> 20 << 20} to"):
                    checkpointer.load(1, model=model)
    checkpointer.load(1, model=model)


@pytest.mark.ranks(2)
def test_if_all_are_damaged_that_is_an_error(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    if ctx.rank == 0:
        damage(tmp_path / "c" / "step-00000001" / "model-00001-of-00001.safetensors", "flipped")
    ctx.world.barrier()
    with pytest.raises(RuntimeError, match=r"all checkpoints in .* are damaged"):
        checkpointer.load_latest(model=sharded())
    with pytest.raises(DamagedError, match=r"model-00001-of-00001.safetensors has changed .* bytes 0 to"):
        checkpointer.load(1, model=sharded())
    ctx.world.barrier()
    if ctx.rank == 0:
        (tmp_path / "c" / "step-00000001" / "manifest.json").unlink()
    ctx.world.barrier()
    with pytest.raises(RuntimeError, match=r"none of the checkpoints \[1\] is complete"):
        checkpointer.load_latest(model=sharded())


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    other = sharded(2, width=8)
    before = other.state_dict()
    with pytest.raises(
        ValueError, match=r"'embed.weight' has shape \(11, 7\) in the checkpoint's model, and \(11, 8\)"
    ):
        checkpointer.load_latest(model=other)
    same(other.state_dict(), before)
    less = bmt_zero.BMTrainModelWrapper(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"lacks '0.weight', '0.bias'; the checkpoint's model has"):
        checkpointer.load_latest(model=less)


@pytest.mark.ranks(1)
def test_other_names_in_the_directory_are_left_alone(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    for name in ("step-00000004.bak", "step-4", "notes", "step-00000009"):
        (tmp_path / "c" / name).mkdir()
    assert checkpointer.steps() == [1]
    assert checkpointer.load_latest(model=sharded()) == 1
    for step in (10, 11, 12):
        checkpointer.save(step, model=sharded())
    checkpointer.wait()
    assert {"step-00000004.bak", "step-4", "notes"} <= set(os.listdir(tmp_path / "c"))


# --- one run at a time ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_second_run_in_the_directory_is_refused(ctx: Any, tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "c")
    with pytest.raises(RuntimeError, match=r"another run writes checkpoints to .*/c"):
        Checkpointer(tmp_path / "c")
    first.save(1, model=sharded())
    first.wait()
    reader = Checkpointer(tmp_path / "c", readonly=True)
    assert reader.load_latest(model=sharded()) == 1
    with pytest.raises(RuntimeError, match="readonly"):
        reader.save(2, model=sharded())
    first.close()
    second = Checkpointer(tmp_path / "c")
    assert second.steps() == [1]


@pytest.mark.ranks(1)
def test_leftovers_of_dead_runs_are_removed(ctx: Any, tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "c")
    for step in (1, 2):
        first.save(step, model=sharded())
    first.close()
    (tmp_path / "c" / ".step-00000003.part").mkdir()
    (tmp_path / "c" / ".step-00000003.part" / "model-00001-of-00001.safetensors").write_bytes(b"x")
    os.rename(tmp_path / "c" / "step-00000002", tmp_path / "c" / ".step-00000002.old")  # died between two renames
    second = Checkpointer(tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001", "step-00000002"]
    assert second.steps() == [1, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["open", "preadv", "stat"])
def test_an_error_of_the_disk_is_no_damage(ctx: Any, tmp_path: Path, rank: int, name: str) -> None:
    """The checkpoint may be readable later, so no rank loads the previous one."""
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded(1))
    checkpointer.save(2, model=sharded(2))
    checkpointer.wait()
    ctx.world.barrier()
    original = getattr(os, name)

    def failing(where: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if "step-00000002/model-" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(where, *arguments, **options)

    model = sharded(3)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == rank:
            patch.setattr(os, name, failing)
            if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10, whose paths do not look into os
                patch.setattr(pathlib._NormalAccessor, name, staticmethod(failing), raising=False)
        for load in (lambda: checkpointer.load(2, model=model), lambda: checkpointer.load_latest(model=model)):
            with pytest.raises(OSError, match=r"Input/output error.*step-00000002/model-00001"):
                load()
    assert checkpointer.load_latest(model=model) == 2
    same(model.state_dict(), sharded(2).state_dict())

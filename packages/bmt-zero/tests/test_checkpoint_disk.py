"""What the disk does: order of flushes, limits, a full or read-only disk, a directory that goes away."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from saving_helpers import plain, same, sharded

from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints import manifest as manifest_module
from bmt_zero.checkpoints.tools import verify


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery from a power failure at any instant depends on it."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        events.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
        fsync(handle)

    def noted_rename(source: Any, target: Any) -> None:
        events.append(("rename", os.path.relpath(source, tmp_path)))
        rename(source, target)

    checkpointer = Checkpointer(tmp_path / "c")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpointer.save(1, model=plain(width=700))
    checkpointer.close()
    monkeypatch.undo()
    part = "c/.step-00000001.part"
    files = {f"{part}/{name}" for name in os.listdir(tmp_path / "c" / "step-00000001")}
    assert len(files) > 4
    at = events.index(("rename", part))
    assert {name for kind, name in events[:at] if kind == "fsync"} == {*files, part}
    assert events.index(("fsync", f"{part}/manifest.json")) > max(
        events.index(("fsync", name)) for name in files if not name.endswith("manifest.json")
    )
    assert events[at - 1] == ("fsync", part)
    assert events[at + 1] == ("fsync", "c")


def test_every_directory_that_is_made_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    Checkpointer(tmp_path / "a" / "b" / "c").close()
    assert {".", "a", "a/b"} <= synced


def test_no_free_descriptor_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that currently cannot be read is not skipped, and does not cause removals."""
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, model=plain())
    checkpointer.wait()
    (tmp_path / "c" / "step-00000001").rename(tmp_path / "c" / ".step-00000001.old")  # as a dead run leaves it
    checkpointer.close()
    original = os.open

    def refused(*arguments: Any, **options: Any) -> int:
        if "step-" in str(arguments[0]):
            raise OSError(errno.EMFILE, "Too many open files")
        return original(*arguments, **options)

    def refused_open(path: Any, *arguments: Any, **options: Any) -> Any:
        if "step-" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        patch.setattr(manifest_module, "open", refused_open, raising=False)
        with pytest.raises(RuntimeError, match="Too many open files"):
            Checkpointer(tmp_path / "c", keep=1)
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    assert checkpointer.steps() == [1]
    for name in ("os", "manifest"):
        with monkeypatch.context() as patch:
            if name == "os":
                patch.setattr(os, "open", refused)
            else:
                patch.setattr(manifest_module, "open", refused_open, raising=False)
            with pytest.raises((RuntimeError, OSError), match="Too many open files"):
                checkpointer.load_latest(model=plain())
    assert checkpointer.load_latest(model=plain()) == 1


LEAVING = """
import os, sys, time
from torch import nn
import torch.distributed as dist
from bmt_zero import Checkpointer
from bmt_zero.checkpoints import writer
original = writer.write_all
def slow(*arguments):
    time.sleep(0.3)
    original(*arguments)
writer.write_all = slow
if "RANK" in os.environ:
    dist.init_process_group("gloo")
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=nn.Linear(300, 300))
if sys.argv[2] == "exit":
    sys.exit(3)
if sys.argv[2] == "raise":
    raise ValueError("on purpose")
"""


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        *(("end", 2), ("exit", 1), ("raise", 2)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("end", 1), ("exit", 2), ("raise", 1))),
    ],
)
def test_a_process_that_leaves_without_waiting_has_its_checkpoint(tmp_path: Path, way: str, ranks: int) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(tmp_path / "leaving.py"), str(tmp_path / "c"), way]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (result.returncode == 0) == (way == "end"), result.stderr
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001"]
    verify(tmp_path / "c" / "step-00000001")


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        *(("end", 2), ("shutdown", 1)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("end", 1), ("shutdown", 2))),
    ],
)
def test_a_process_that_loses_its_last_checkpoint_says_so_and_ends_with_an_error(
    tmp_path: Path, way: str, ranks: int
) -> None:
    script = """
import atexit, sys
from torch import nn
import bmt_comm
from bmt_zero import Checkpointer
from bmt_zero.checkpoints import writer
def refused(*arguments):
    raise OSError(28, "No space left on device")
writer.write_all = refused
bmt_comm.init_distributed(device="cpu")
atexit.register(print, "what others do at exit", file=sys.stderr)
log = open(sys.argv[1] + ".log", "w")
log.write("a line")
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=nn.Linear(300, 300))
if sys.argv[2] == "shutdown":
    try:
        bmt_comm.shutdown()
    except RuntimeError as error:
        print("caught:", error, file=sys.stderr)
        bmt_comm.shutdown()
        sys.exit(7)
"""
    (tmp_path / "leaving.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(tmp_path / "leaving.py"), str(tmp_path / "c"), way]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "No space left on device" in result.stderr
    assert "what others do at exit" in result.stderr
    assert (tmp_path / "c.log").read_text() == "a line"
    if ranks == 1:
        assert result.returncode == (7 if way == "shutdown" else 120), result.stderr
    else:  # torchrun's own status
        assert result.returncode == 1
        assert f"exitcode  : {7 if way == 'shutdown' else 120}" in result.stderr
    assert ("caught: " in result.stderr) == (way == "shutdown")


LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from torch import nn
from bmt_zero import Checkpointer, SaveError
model = nn.Linear(300, 300)
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=model)
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpointer.save(2, model=model)
try:
    checkpointer.wait()
except SaveError as error:
    print(error)
print(sorted(os.listdir(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(3, model=model)
checkpointer.wait()
print(checkpointer.steps())
"""


def test_a_limit_of_the_file_size_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "c")], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    message, listing, steps = result.stdout.splitlines()
    assert message == (
        "the checkpoint of step 2 was not written: rank 0: File too large. Earlier checkpoints are as they were"
    )
    assert listing == "['.lock', 'step-00000001']"
    assert steps == "[1, 3]"


FULL_DISK = """
import os, sys
from pathlib import Path
from torch import nn
from bmt_zero import Checkpointer, SaveError
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=nn.Linear(300, 300))
checkpointer.wait()
filler = Path(sys.argv[2])
filler.write_bytes(b"x" * 1_200_000)
checkpointer.save(2, model=nn.Linear(700, 700))
try:
    checkpointer.wait()
except SaveError as error:
    print(error)
print(sorted(os.listdir(sys.argv[1])))
filler.unlink()
checkpointer.save(3, model=nn.Linear(300, 300))
checkpointer.wait()
print(checkpointer.steps())
"""


UNSHARED = ["unshare", "--map-root-user", "--mount"]
MOUNTS = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARED, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="this process may not mount file systems; limits of the file size are tested everywhere",
)


@MOUNTS
def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A file system of 3 MiB."""
    mount = [*UNSHARED, "sh", "-c", 'mount -t tmpfs -o size=3m none "$0" && exec "$@"']
    result = subprocess.run(
        [*mount, str(tmp_path), sys.executable, "-c", FULL_DISK, str(tmp_path / "c"), str(tmp_path / "filler")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    message, listing, steps = result.stdout.splitlines()
    assert message == (
        "the checkpoint of step 2 was not written: rank 0: No space left on device. Earlier checkpoints are as they "
        "were"
    )
    assert listing == "['.lock', 'step-00000001']"
    assert steps == "[1, 3]"


class Quota:
    """A file system of which this process may fill so many bytes. It reports errors late, as network ones do."""

    def __init__(self, patch: pytest.MonkeyPatch, limit: int, late: bool) -> None:
        self.left, self.late, self.full = limit, late, False
        self.pwrite, self.fsync = os.pwrite, os.fsync
        patch.setattr(os, "pwrite", self.write)
        patch.setattr(os, "fsync", self.flush)

    def write(self, handle: int, content: Any, offset: int) -> int:
        taken = min(len(content), self.left)
        self.full = self.full or taken < len(content)
        if not taken and not self.late:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self.left -= taken
        return self.pwrite(handle, content if self.late else content[:taken], offset)

    def flush(self, handle: int) -> None:
        if self.full:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self.fsync(handle)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_quota_is_named_and_leaves_the_old_checkpoint(ctx: Any, tmp_path: Path, rank: int, late: bool) -> None:
    """Writing fails in the middle of a piece, after one call has written a part of its bytes."""
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded(width=700))
    checkpointer.wait()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == rank:
            Quota(patch, 1_500_000, late)
        checkpointer.save(2, model=sharded(2, width=700))
        with pytest.raises(SaveError, match=f"rank {rank}: Disk quota exceeded. Earlier checkpoints are as they were"):
            checkpointer.wait()
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001"]
    model = sharded(3, width=700)
    assert checkpointer.load_latest(model=model) == 1
    same(model.state_dict(), sharded(width=700).state_dict())
    checkpointer.save(3, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


READ_ONLY = """
import subprocess, sys
from torch import nn
from bmt_zero import Checkpointer, SaveError
model, path = nn.Linear(30, 30), sys.argv[1]
running = Checkpointer(path)
running.save(1, model=model)
running.wait()
subprocess.run(["mount", "--bind", path, path], check=True)
subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
try:
    running.save(2, model=model)
    running.wait()
except SaveError as error:
    print(error)
running.close()
try:
    Checkpointer(path)
except RuntimeError as error:
    print(error)
print(Checkpointer(path, readonly=True).load_latest(model=model))
"""


@MOUNTS
def test_a_read_only_directory_is_named_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "c"
    result = subprocess.run(
        [*UNSHARED, sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    failed, refused, step = result.stdout.splitlines()
    assert failed == (
        f"the checkpoint of step 2 was not written: {path}/.step-00000002.part: Read-only file system. Earlier "
        "checkpoints are as they were"
    )
    assert refused.startswith(f"{path} cannot be used for checkpoints: ")
    assert "Read-only file system" in refused
    assert step == "1"


@pytest.mark.ranks(2)
def test_a_directory_that_is_removed_meanwhile_is_named(ctx: Any, tmp_path: Path) -> None:
    model = sharded(width=300)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=model)
    checkpointer.wait()
    ctx.world.barrier()
    if ctx.rank == 0:
        shutil.rmtree(tmp_path / "c")
    ctx.world.barrier()
    checkpointer.save(2, model=model)
    with pytest.raises(SaveError, match=r"not written: .*/c/.step-00000002.part: No such file or directory"):
        checkpointer.wait()

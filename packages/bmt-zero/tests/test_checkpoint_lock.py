"""One run at a time writes to a directory of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from saving_helpers import plain

from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints.directory import DirectoryLock

HOLDER = """
import sys
from bmt_zero import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "c")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RuntimeError, match=rf'another run writes .*"process": {holder.pid}') as error:
                DirectoryLock(tmp_path / "c", patience=0.0)
            assert str(tmp_path / "c") in str(error.value)
            with pytest.raises(RuntimeError, match=rf'another run writes .*"process": {holder.pid}'):
                Checkpointer(tmp_path / "c")
        finally:
            holder.kill()
    Checkpointer(tmp_path / "c").close()  # the end of the process has released the lock


def test_a_file_system_without_locks_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    with pytest.raises(RuntimeError, match=r"cannot be used for checkpoints: .*\[Errno 37\] No locks available"):
        Checkpointer(tmp_path / "c")


@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_whose_lock_was_removed_writes_and_removes_nothing(tmp_path: Path, replaced: bool) -> None:
    """The directory was removed, and another run has started there."""
    first = Checkpointer(tmp_path / "c", keep=1)
    first.save(1, model=plain())
    first.wait()
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c" / ".step-00000002.part").mkdir(parents=True)
    kept = tmp_path / "c" / ".step-00000002.part" / "of the other run"
    kept.touch()
    if replaced:
        (tmp_path / "c" / ".lock").touch()
    first.save(2, model=plain())
    with pytest.raises(SaveError, match="its lock was removed or replaced"):
        first.wait()
    assert kept.exists()


def test_a_copy_of_the_directory_does_not_let_another_run_in(tmp_path: Path) -> None:
    """This process loses its lock when it reads the file; the next save takes it again."""
    checkpointer = Checkpointer(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    checkpointer.save(1, model=plain())
    checkpointer.wait()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "c")], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as other:
        _, errors = other.communicate()
    assert "another run writes" in errors
    checkpointer.save(2, model=plain())
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "again")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "c")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        checkpointer.save(3, model=plain())
        with pytest.raises(SaveError, match="another run has taken its lock"):
            checkpointer.wait()
        other.kill()


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"\.lock"):
        DirectoryLock(tmp_path / "c")
    assert precious.read_text() == "kept"

"""A file takes its name when it is complete and on the disk, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bmt_comm.durable import complete_file


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        events.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    path = tmp_path / "file"
    path.write_text("old")
    with complete_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
        assert not events
    assert events == [("fsync", str(part)), ("replace", str(path)), ("fsync", str(tmp_path))]
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with complete_file(path) as part:
            part.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError), complete_file(path):
        pass  # nothing is written
    assert path.read_text() == "old"


WRITER = """
import os, signal, sys
from pathlib import Path
from bmt_comm.durable import complete_file

with complete_file(Path(sys.argv[1])) as part:
    part.write_text("ne")
    print(part.name, flush=True)
    signal.pause()
"""


def test_what_a_killed_process_has_left_goes_with_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "file[1]"
    other = tmp_path / ".file[1].other.1.part"  # of a file of another name
    other.write_text("other")
    writers = []
    try:
        for _ in range(2):
            command = [sys.executable, "-c", WRITER, str(path)]
            writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        killed, alive = (writer.stdout.readline().strip() for writer in writers)
        writers[0].kill()
        writers[0].wait()
        assert {killed, alive} <= set(os.listdir(tmp_path))
        with complete_file(path) as part:
            part.write_text("new")
        assert path.read_text() == "new"
        assert set(os.listdir(tmp_path)) == {path.name, alive, other.name}
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()


def test_two_writers_of_one_file_do_not_write_to_the_same_temporary_file(tmp_path: Path) -> None:
    """Jobs in containers may have the same process number."""
    path = tmp_path / "file"
    with complete_file(path) as part:
        part.write_text("first")
        with complete_file(path) as other:
            other.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_on_its_way_to_the_disk_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "file", os.fsync
    backup = tmp_path / ".file.backup.part"
    backup.write_text("the user's")

    def another_writes(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        with complete_file(path) as other:
            other.write_text("second")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", another_writes)
    with complete_file(path) as part:
        part.write_text("first")
    assert path.read_text() == "first"
    assert set(os.listdir(tmp_path)) == {path.name, backup.name}

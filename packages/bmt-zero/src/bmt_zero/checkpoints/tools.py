"""Listing, verifying and converting checkpoints in one process, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmt_comm.durable import sync_to_disk
from bmt_zero.state import is_extra_state, with_versions

from . import trainer_state
from .directory import listed_steps, step_name
from .headers import DTYPES, MAX_FILE_SIZE, DamagedError, Entry, index_of, lay_out, parse_json
from .job import EXTRA_STATE
from .manifest import NAME, Manifest, is_file_name, read_manifest, read_small_file
from .pretrained import open_source
from .sources import BUFFER, CHUNK, OpenFile
from .trees import encode
from .weight_files import Placeholder, SafetensorsFile, weight_file, write_weights
from .writer import write_small_file

_Report = Callable[[int, int], None]
_CARRIED = (".json", ".txt", ".model", ".jinja", ".md")
_NOT_CARRIED = (NAME, trainer_state.FILE, EXTRA_STATE)
_OF_TRAINING = ("state-", trainer_state.STAGE_FILES)


def find_checkpoints(path: Path) -> list[Path]:
    """``path``, if it is a checkpoint; else the checkpoints in it, by ascending steps.

    Raises:
        FileNotFoundError: there are none.
    """
    if (path / NAME).is_file():
        return [path]
    paths = [path / step_name(step) for step in listed_steps(path)]
    if not paths:
        raise FileNotFoundError(f"{path} is no checkpoint, and holds none")
    return paths


def problem_of(error: Exception) -> dict[str, Any]:
    """The entries ``problem`` and ``is_damaged`` of :func:`describe` for what reading a checkpoint has raised."""
    return {"problem": str(error), "is_damaged": not isinstance(error, OSError)}


def describe(checkpoint: Path) -> dict[str, Any]:
    """The step, bytes and layout of a checkpoint, and its position in the order of saves.

    ``problem`` says why it is incomplete, damaged or unreadable, or is ``None``. ``is_damaged`` is false if it may be
    intact, because a file cannot be read now.
    """
    try:
        manifest = read_manifest(checkpoint)
        path = checkpoint / trainer_state.FILE
        trainer = parse_json(path, read_small_file(path))
    except (DamagedError, OSError) as error:
        return {"path": str(checkpoint), **problem_of(error)}
    return {
        "path": str(checkpoint),
        "problem": None,
        "is_damaged": False,
        "step": manifest.step,
        "order": manifest.order,
        "bytes": sum(record.size for record in manifest.files.values()),
        "is_finite": manifest.is_finite,
        "layout": trainer.get("layout") if isinstance(trainer, dict) else None,
    }


def verify(checkpoint: Path, report: _Report = lambda done, total: None) -> Manifest:
    """Read all files of a checkpoint and compare their checksums.

    Args:
        report: called with the number of bytes read so far, and of all bytes.

    Raises:
        DamagedError: something is missing or has changed. The message names the file and the bytes.
    """
    manifest = read_manifest(checkpoint)
    total, done = sum(record.size for record in manifest.files.values()), 0
    buffer = torch.empty(BUFFER, dtype=torch.uint8, device="cpu")
    for name, record in manifest.files.items():
        file = OpenFile(checkpoint / name, record, buffer)
        try:
            for at in range(0, record.size, CHUNK):
                file.read(at, min(at + CHUNK, record.size))
                done += min(CHUNK, record.size - at)
                report(done, total)
        finally:
            file.close()
    return manifest


def convert(
    source: Path, target: Path, max_file_size: int = MAX_FILE_SIZE, report: _Report = lambda done, total: None
) -> None:
    """Write the weights at ``source`` in another format.

    Args:
        source: a checkpoint, a Hugging Face directory, a ``.safetensors`` file or one of ``torch.save``.
        target: ``x.safetensors`` for one file, ``x.pt`` for one that ``torch.load`` reads, or a Hugging Face directory,
            with the configuration and tokenizer files of a source directory. It must not exist. What modules returned
            from ``get_extra_state`` is kept in x.pt and in a directory.
        max_file_size: of the files in a directory, in bytes.
        report: called with the number of bytes written so far, and of all bytes.

    Raises:
        FileExistsError: ``target`` exists.
        FileNotFoundError: ``source`` or the folder of ``target`` does not exist.
        DamagedError: ``source`` is damaged.
        TypeError, ValueError: the other format cannot hold an entry of ``source``.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another target, or remove it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {target.parent}")
    opened = open_source(source)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        reading = _Reading(opened, report)
        if target.suffix in (".pt", ".pth", ".bin", ".safetensors"):
            entries = opened.entries.values()
            tensors = {each.name: Placeholder(each.name, each.shape, DTYPES[each.dtype]) for each in entries}
            state = with_versions({**tensors, **opened.others}, opened.versions)
            write_weights(weight_file(target, state), target, reading.tensors(entries))
            return
        for name in opened.others:
            if not is_extra_state(name):
                raise ValueError(
                    f"{source} has {name!r}, which is no tensor that safetensors can hold; convert it to x.pt"
                )
        extra = {name: encode(state, repr(name)) for name, state in opened.others.items()}
        part.mkdir()
        layouts = lay_out("model", opened.entries.values(), max_file_size)
        for layout in layouts:
            write_weights(SafetensorsFile(layout), part / layout.name, reading.tensors(layout.entries))
        write_small_file(part / "model.safetensors.index.json", index_of(layouts))
        if extra:
            write_small_file(part / EXTRA_STATE, json.dumps(extra).encode())
        for path in sorted(source.iterdir()) if source.is_dir() else []:
            if _is_carried(path):
                write_small_file(part / path.name, path.read_bytes())
        sync_to_disk(part)
        os.rename(part, target)
        sync_to_disk(target.parent)
    finally:
        opened.close()
        shutil.rmtree(part, ignore_errors=True)


class _Reading:
    """Reads the tensors of a source in parts, and reports the progress."""

    def __init__(self, source: Any, report: _Report) -> None:
        self._source, self._report = source, report
        self._done, self._total = 0, sum(entry.nbytes for entry in source.entries.values())

    def tensors(self, entries: Iterable[Entry]) -> Iterator[tuple[str, Iterator[Tensor]]]:
        for entry in entries:
            yield entry.name, self._parts(entry)

    def _parts(self, entry: Entry) -> Iterator[Tensor]:
        for at in range(0, max(entry.nbytes, 1), CHUNK):
            content = self._source.read(entry.name, at, min(at + CHUNK, entry.nbytes))
            yield content
            self._done += len(content)
            self._report(self._done, self._total)


def _is_carried(path: Path) -> bool:
    if not path.is_file() or not is_file_name(path.name) or path.name in _NOT_CARRIED:
        return False
    return path.suffix in _CARRIED and not path.name.startswith(_OF_TRAINING) and ".index." not in path.name


@contextmanager
def progress(what: str) -> Iterator[_Report]:
    """A ``report`` function that prints the progress on stderr, once a second."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1:
            last = now
            speed = done / max(now - start, 1e-9)
            print(
                f"{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {speed / 1e6:.0f} MB/s", file=sys.stderr, flush=True
            )

    yield report

"""Checkpoints without ranks: listing, verifying and converting them, in bounded memory."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .directory import listed_steps, step_name, sync_directory
from .headers import DTYPES, MAX_FILE_SIZE, DamagedError, FileLayout, index_of, lay_out, lay_out_file, parse_json
from .manifest import NAME, Manifest, is_file_name, read_manifest, read_small_file
from .memory import view_of
from .pretrained import open_source
from .sources import CHUNK, OpenFile
from .writer import write_all, write_small_file

_Report = Callable[[int, int], None]
_CARRIED = (".json", ".txt", ".model", ".jinja", ".md")
_NOT_CARRIED = ("manifest.json", "trainer.json", "optimizer.safetensors.index.json", "model.safetensors.index.json")


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint that ``path`` is, or those in it, oldest first.

    Raises:
        FileNotFoundError: there are none.
    """
    if (path / NAME).is_file():
        return [path]
    found = [path / step_name(step) for step in listed_steps(path)]
    if not found:
        raise FileNotFoundError(f"{path} is no checkpoint, and holds none")
    return found


def describe(checkpoint: Path) -> dict[str, Any]:
    """The step, the bytes and the layout of a checkpoint; ``problem`` says what is wrong with it, or is ``None``."""
    try:
        manifest = read_manifest(checkpoint)
        trainer = parse_json(checkpoint / "trainer.json", read_small_file(checkpoint / "trainer.json"))
    except DamagedError as error:
        return {"path": str(checkpoint), "problem": str(error)}
    return {
        "path": str(checkpoint),
        "problem": None,
        "step": manifest.step,
        "bytes": sum(record.size for record in manifest.files.values()),
        "is_finite": manifest.is_finite,
        "layout": trainer.get("layout") if isinstance(trainer, dict) else None,
    }


def verify(checkpoint: Path, report: _Report = lambda done, total: None) -> Manifest:
    """Read all files of a checkpoint and compare their checksums.

    Args:
        report: called with the bytes that have been read and that there are.

    Raises:
        DamagedError: something is missing or has changed; the message names the file and the place.
    """
    manifest = read_manifest(checkpoint)
    total, done = sum(record.size for record in manifest.files.values()), 0
    buffer = torch.empty(CHUNK + 2 * (1 << 20), dtype=torch.uint8)
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
    """Write the weights at ``source`` in another form.

    Args:
        source: a checkpoint, a Hugging Face directory, a ``.safetensors`` file or one of ``torch.save``.
        target: ``x.safetensors`` for one file, ``x.pt`` for one that ``torch.load`` reads, or a directory as Hugging
            Face has it, with the configuration and tokenizer files of a source directory. It must not exist.
        max_file_size: of the files in a directory, in bytes.
        report: called with the bytes that have been written and that there are.

    Raises:
        FileExistsError: ``target`` exists.
        FileNotFoundError: ``source`` does not, or the folder of ``target``.
        DamagedError: ``source`` is damaged.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another target, or remove it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {target.parent}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    opened = open_source(source)
    try:
        entries = opened.entries.values()
        if target.suffix in (".pt", ".pth", ".bin"):
            _write_pt(opened, part, report)
        elif target.suffix == ".safetensors":
            _write_safetensors(opened, [lay_out_file(part.name, entries)], part.parent, report)
        else:
            part.mkdir()
            layouts = lay_out("model", entries, max_file_size)
            _write_safetensors(opened, layouts, part, report)
            write_small_file(part / "model.safetensors.index.json", index_of(layouts))
            for path in sorted(source.iterdir()) if source.is_dir() else []:
                if _is_carried(path):
                    write_small_file(part / path.name, path.read_bytes())
            sync_directory(part)
        os.rename(part, target)
        sync_directory(target.parent)
    finally:
        opened.close()
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _is_carried(path: Path) -> bool:
    if not path.is_file() or not is_file_name(path.name) or path.name in _NOT_CARRIED:
        return False
    return path.suffix in _CARRIED and not path.name.startswith("state-") and ".index." not in path.name


def _write_safetensors(opened: Any, layouts: list[FileLayout], directory: Path, report: _Report) -> None:
    total, done = sum(layout.size for layout in layouts), 0
    for layout in layouts:
        handle = os.open(directory / layout.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(handle, memoryview(layout.head), 0)
            done += len(layout.head)
            for entry, offset in zip(layout.entries, layout.offsets):
                for at in range(0, entry.nbytes, CHUNK):
                    content = opened.read(entry.name, at, min(at + CHUNK, entry.nbytes))
                    write_all(handle, view_of(content.contiguous()), offset + at)
                    done += len(content)
                    report(done, total)
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_pt(opened: Any, part: Path, report: _Report) -> None:
    """From storages that are files mapped into memory, so that no more of a tensor than is at work is in memory."""
    folder = part.with_name(f"{part.name}.tensors")
    folder.mkdir()
    try:
        state = {}
        for number, entry in enumerate(opened.entries.values()):
            if not entry.nbytes:
                state[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                continue
            path = folder / str(number)
            with open(path, "wb") as file:
                for at in range(0, entry.nbytes, CHUNK):
                    file.write(view_of(opened.read(entry.name, at, min(at + CHUNK, entry.nbytes)).contiguous()))
            flat = torch.from_file(str(path), shared=False, size=entry.nbytes, dtype=torch.uint8)
            state[entry.name] = flat.view(DTYPES[entry.dtype]).view(entry.shape)
        torch.save(state, part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        total = part.stat().st_size
        report(total, total)
    finally:
        shutil.rmtree(folder)


@contextmanager
def progress(what: str) -> Iterator[_Report]:
    """A report that says on stderr how far it is, once a second."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1:
            last = now
            rate = done / max(now - start, 1e-9)
            print(
                f"{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s", file=sys.stderr, flush=True
            )

    yield report

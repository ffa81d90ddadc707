"""One save, from the copies of the ranks to the published directory. It runs on every rank, in a thread."""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bmt_comm import Slice
from bmt_comm.durable import sync_to_disk

from .directory import DirectoryLock, complete_checkpoints, publish, retire, step_name
from .headers import DTYPES, Entry, FileLayout, index_of, lay_out
from .manifest import NAME, FileRecord, Manifest
from .plan import PIECE, AddressSpace, Holding, WritePlan, replicate_groups
from .reader import is_finite
from .regions import Region, regions_of
from .store_communicator import StoreCommunicator
from .writer import PieceWriter, write_small_file

_log = logging.getLogger("bmt_zero.checkpoints")
SECTIONS = ("model", "optimizer")
EXTRA_STATE = "extra-state.json"
"""The file of what modules returned from ``get_extra_state``."""
Key = tuple[str, str]
"""The section and the name of a tensor."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


@dataclass
class HeldTensor:
    """This rank's part of a tensor.

    Attributes:
        section: one of :data:`SECTIONS`.
        entry: the logical tensor.
        where: this rank's part of it; ``None``: this rank has no current values.
        content: the bytes of the part: uint8, 1-D.
        is_single: whether only the lowest rank's values are saved.
    """

    section: str
    entry: Entry
    where: Slice | None
    content: Tensor
    is_single: bool


@dataclass
class Job:
    """One rank's part of a save.

    Attributes:
        step: the step.
        tensors: of the model and the optimizers.
        own_files: small files that this rank writes, by name.
        common_files: small files that rank 0 writes, by name.
        extra: the states of modules with ``get_extra_state``, as JSON, by name. Those of the lowest rank are saved.
        states: digests of the states that must be the same on all ranks, by name.
        replica_states: for states that must be the same on the ranks of a replica: its number and the digest, by name.
        problem: why this rank could not prepare the save. Every rank then raises it.
    """

    step: int
    tensors: list[HeldTensor] = field(default_factory=list)
    own_files: dict[str, bytes] = field(default_factory=dict)
    common_files: dict[str, bytes] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    replica_states: dict[str, list[Any]] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class SaveTarget:
    """Where checkpoints are written.

    Attributes:
        directory: of the run's checkpoints.
        lock: of the directory, on rank 0.
        keep: how many of the newest checkpoints to keep; ``None``: all.
        max_file_size: of a file, in bytes.
        damaged: steps of checkpoints that do not count among the kept ones.
    """

    directory: Path
    lock: DirectoryLock | None
    keep: int | None
    max_file_size: int
    damaged: Collection[int] = ()


def run_job(job: Job, target: SaveTarget, comm: StoreCommunicator) -> None:
    """Write a checkpoint. All ranks must call it, each with its own job of this step.

    Raises:
        SaveError: on every rank, naming the rank that failed.
        RendezvousError: a rank did not respond in time.
    """
    _agree(job, comm)
    holdings = _Holdings(comm.all_gather(_described_tensors(job)))
    try:
        files = [
            layout
            for section in SECTIONS
            for layout in lay_out(section, holdings.entries(section), target.max_file_size)
        ]
        space = AddressSpace(files)
        plan = holdings.plan(space, comm.rank)
    except ValueError as error:  # the same on every rank
        raise SaveError(f"the checkpoint of step {job.step} was not written: {error}") from None
    part = target.directory / f".{step_name(job.step)}.part"
    problem = _problem_of(lambda: _make_empty(part, target.lock)) if comm.rank == 0 else None
    _raise_problem_of_rank_0(job, comm, problem)

    own = {space.number[tensor.section, tensor.entry.name]: tensor.content for tensor in job.tensors}
    writer = PieceWriter(part, plan, own, comm)
    problem = _problem_of(writer.run)
    if problem is None and writer.problem is not None:
        problem = _text(writer.problem)
    records: dict[str, FileRecord] = {}
    finite: list[bool] = []
    if problem is None:
        # Parameters only: buffers such as causal masks may have infinite numbers.
        weights = [tensor for tensor in job.tensors if tensor.section == "model" and not tensor.is_single]
        problem = _problem_of(lambda: finite.extend(is_finite(t.content, DTYPES[t.entry.dtype]) for t in weights))
    if problem is None:
        problem = _problem_of(lambda: _write_files(part, job.own_files, records))
    if problem is not None and not os.path.isdir(part):  # rank 0 has made it; Path.is_dir may raise OSError
        problem += "; all ranks must share the directory of the checkpoints"
    reports = comm.gather(_report(problem, all(finite), writer.checksums, records, job.extra))
    problem = None
    if reports is not None:
        problem = _problem_of(lambda: _conclude(job, target, reports, space))
        if problem is not None:
            shutil.rmtree(part, ignore_errors=True)
        else:
            _retire(job, target)
    _raise_problem_of_rank_0(job, comm, problem)


def _agree(job: Job, comm: StoreCommunicator) -> None:
    """Raise SaveError on every rank unless all ranks have prepared the same save."""
    reports = comm.gather(json.dumps([job.step, job.problem, job.states, job.replica_states]).encode())
    everyone = [json.loads(each) for each in reports or ()]
    problem = None if reports is None else _disagreement(everyone)
    _warn_of_replica_differences(everyone)
    _raise_problem_of_rank_0(job, comm, problem)


def _disagreement(everyone: Sequence[tuple[int, str | None, dict[str, str], dict[str, list[Any]]]]) -> str | None:
    """Why ranks with these steps, problems, states and replica states cannot save together; ``None`` if they can."""
    for rank, (_, problem, _, _) in enumerate(everyone):
        if problem is not None:
            return f"rank {rank}: {problem}"
    steps = [step for step, _, _, _ in everyone]
    if len(set(steps)) > 1:
        return f"ranks save different steps, in the order of the ranks: {steps[:20]}"
    first = everyone[0][2]
    for rank, (_, _, states, _) in enumerate(everyone):
        for name in sorted(states.keys() | first.keys()):
            if states.get(name) != first.get(name):
                return (
                    f"the state of {name!r} is not the same on ranks 0 and {rank}; if every replica has its own, say "
                    f"per_replica=[{name!r}]"
                )
    return None


def _warn_of_replica_differences(everyone: Sequence[Any]) -> None:
    """Log a warning if tensor-parallel ranks of one replica have different states of an object."""
    digests: dict[tuple[str, int], tuple[int, str]] = {}
    for rank, (_, _, _, of_replica) in enumerate(everyone):
        for name, (replica, digest) in of_replica.items():
            other, known = digests.setdefault((name, replica), (rank, digest))
            if known != digest:
                _log.warning(
                    "the state of %r is not the same on ranks %d and %d, tensor-parallel ranks of one replica: that of "
                    "the first one is saved",
                    name,
                    other,
                    rank,
                )
                return


# --- which tensors the ranks have -----------------------------------------------------------------


def _described_tensors(job: Job) -> bytes:
    """The message that tells other ranks which parts of which tensors this rank has."""
    facts = [[t.section, t.entry.name, t.entry.dtype, t.entry.shape, t.is_single, _regions(t)] for t in job.tensors]
    return zlib.compress(json.dumps(facts).encode(), 1)


def _regions(tensor: HeldTensor) -> list[Region]:
    return [] if tensor.where is None else regions_of(tensor.where, tensor.entry.itemsize)


class _Holdings:
    """The parts of tensors that all ranks have.

    Args:
        messages: the results of :func:`_described_tensors` of all ranks.

    Raises:
        SaveError: two ranks have different tensors of the same name.
    """

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._known: dict[Key, tuple[Entry, int]] = {}
        self._single: set[Key] = set()
        self._held: list[list[tuple[Key, tuple[Region, ...]]]] = []
        parsed: dict[bytes, list[tuple[Key, tuple[Region, ...]]]] = {}
        for rank, message in enumerate(messages):
            if message not in parsed:
                parsed[message] = self._parse(rank, json.loads(zlib.decompress(message)))
            self._held.append(parsed[message])

    def _parse(self, rank: int, facts: Any) -> list[tuple[Key, tuple[Region, ...]]]:
        held = []
        for section, name, dtype, shape, is_single, regions in facts:
            key, entry = (section, name), Entry(name, dtype, tuple(shape))
            known, first = self._known.setdefault(key, (entry, rank))
            if known != entry:
                raise SaveError(f"ranks disagree: there is {known} on rank {first}, and {entry} on rank {rank}")
            if is_single:
                self._single.add(key)
            if regions:
                held.append((key, tuple(Region(*region) for region in regions)))
        return held

    def entries(self, section: str) -> list[Entry]:
        return [entry for (its, _), (entry, _) in self._known.items() if its == section]

    def plan(self, space: AddressSpace, rank: int) -> WritePlan:
        numbered = {
            id(held): tuple(Holding(space.number[key], regions) for key, regions in held) for held in self._held
        }
        holdings = {rank: numbered[id(held)] for rank, held in enumerate(self._held)}
        single = frozenset(space.number[key] for key in self._single)
        return WritePlan(space, replicate_groups(holdings), single, rank)


# --- the results of the ranks' writes -------------------------------------------------------------


def _make_empty(part: Path, lock: DirectoryLock | None) -> None:
    """Create an empty directory. The lock must still be held."""
    if lock is not None:
        lock.check()
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()


def _write_files(part: Path, files: Mapping[str, bytes], records: dict[str, FileRecord]) -> None:
    for name, content in files.items():
        records[name] = write_small_file(part / name, content)


def _report(
    problem: str | None,
    finite: bool,
    checksums: Mapping[int, int],
    records: Mapping[str, FileRecord],
    extra: Mapping[str, Any],
) -> bytes:
    pieces = array("Q", checksums.keys())
    values = array("Q", checksums.values())
    return json.dumps({
        "problem": problem,
        "finite": finite,
        "pieces": base64.b64encode(zlib.compress(pieces.tobytes(), 1)).decode(),
        "checksums": base64.b64encode(values.tobytes()).decode(),
        "extra": extra,
        "files": {name: [record.size, record.checksums] for name, record in records.items()},
    }).encode()  # fmt: skip


def _conclude(job: Job, target: SaveTarget, reports: Sequence[bytes], space: AddressSpace) -> None:
    """On rank 0: write the small files and the manifest, and publish the checkpoint."""
    directory = target.directory
    part = directory / f".{step_name(job.step)}.part"
    checksums: dict[int, int] = {}
    records: dict[str, FileRecord] = {}
    is_finite = True
    extra: dict[str, Any] = {}
    for rank, report in enumerate(json.loads(each) for each in reports):
        if report["problem"] is not None:
            raise SaveError(f"rank {rank}: {report['problem']}")
        is_finite = is_finite and report["finite"]
        extra = {**report["extra"], **extra}
        pieces, values = array("Q"), array("Q")
        pieces.frombytes(zlib.decompress(base64.b64decode(report["pieces"])))
        values.frombytes(base64.b64decode(report["checksums"]))
        checksums.update(zip(pieces, values))
        records.update({name: FileRecord(size, tuple(crcs)) for name, (size, crcs) in report["files"].items()})
    _write_files(part, {**job.common_files, **_indices(space.files)}, records)
    if extra:
        _write_files(part, {EXTRA_STATE: json.dumps(extra).encode()}, records)
    for base, file in zip(space.bases, space.files):
        first, count = base // PIECE, -(-file.size // PIECE)
        size = (part / file.name).stat().st_size
        if size != file.size:
            raise SaveError(f"{part / file.name} has {size} bytes, and {file.size} were written")
        records[file.name] = FileRecord(size, tuple(checksums[piece] for piece in range(first, first + count)))
    checkpoints, unread = complete_checkpoints(directory, log=False)
    order = 1 + max((manifest.order for _, manifest in checkpoints), default=0)
    if unread:  # their orders are unknown, and must be lower when they can be read again
        order = max(order, time.time_ns())
    write_small_file(part / NAME, Manifest(job.step, is_finite, records, order).to_json())
    sync_to_disk(part)
    if target.lock is not None:
        target.lock.check()
    publish(directory, part, job.step)


def _retire(job: Job, target: SaveTarget) -> None:
    """Remove older checkpoints. A failure is logged only, because the new checkpoint is complete."""
    if (keep := target.keep) is None:
        return
    problem = _problem_of(lambda: retire(target.directory, keep, job.step, target.damaged))
    if problem is not None:
        _log.warning(
            "older checkpoints than step %d in %s could not be removed: %s", job.step, target.directory, problem
        )


def _indices(files: Sequence[FileLayout]) -> dict[str, bytes]:
    by_section: dict[str, list[FileLayout]] = {}
    for file in files:
        by_section.setdefault(file.section, []).append(file)
    return {f"{section}.safetensors.index.json": index_of(layouts) for section, layouts in by_section.items()}


# --- errors ---------------------------------------------------------------------------------------


def _problem_of(call: Callable[[], object]) -> str | None:
    """Why a call has failed; ``None`` if it has not. It raises nothing, because other ranks wait for this rank."""
    try:
        call()
    except Exception as error:
        return _text(error)
    return None


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fspath(error.filename)}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) if type(error) in (SaveError, RuntimeError) else f"{type(error).__name__}: {error}"


def _raise_problem_of_rank_0(job: Job, comm: StoreCommunicator, problem: str | None) -> None:
    """If rank 0 has a problem, raise SaveError on every rank."""
    of_rank_0 = comm.broadcast((problem or "").encode()).decode()
    if of_rank_0:
        raise SaveError(
            f"the checkpoint of step {job.step} was not written: {of_rank_0}. Earlier checkpoints are as they were"
        )

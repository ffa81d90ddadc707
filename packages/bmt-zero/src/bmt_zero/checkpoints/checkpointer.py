"""The checkpoints of a training run: sharded, asynchronous, at any layout, and each complete or not there."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmt_comm import StateRecord, current_context, is_initialized
from bmt_zero.sharded_parameter import ShardedParameter
from bmt_zero.state import load_state_dict

from . import trainer_state
from .contents import (
    Content,
    adopt_records,
    contents_of_model,
    contents_of_optimizer,
    distinct_tensors,
    extra_states,
    has_own_code,
    make_state,
    parameter_names,
    records_of,
    set_extra_states,
)
from .directory import DirectoryLock, clean_up, complete_checkpoints, listed_steps, step_name, sync_directory
from .headers import MAX_FILE_SIZE, DamagedError, Entry, parse_json
from .job import EXTRA_STATE, HeldTensor, Job, SaveError, run_job
from .manifest import is_file_name, read_manifest, read_small_file
from .meeting import Meeting
from .memory import Snapshot
from .reader import check_fit, fill, read_whole
from .regions import regions_of
from .sources import checkpoint_source
from .trees import decode, encode

_log = logging.getLogger("bmt_zero.checkpoints")
_TRAINER = "trainer.json"
_RESERVED = {"model", "optimizer", "manager", "per_replica", "trainer", "rng", "manifest", "step", "config"}


class Checkpointer:
    """The checkpoints of a run, in one directory.

    ::

        checkpointer = Checkpointer("runs/x/checkpoints")
        step = checkpointer.load_latest(model=model, manager=manager, data=batches)
        while step < steps:
            ...
            if step % 1000 == 0:
                checkpointer.save(step, model=model, manager=manager, data=batches)
        checkpointer.wait()

    Each checkpoint is a directory ``step-00001000``. Its ``model-*.safetensors`` and their index hold the model's
    plain, unsharded state dict: ``transformers`` and ``safetensors`` read them as they are. ``optimizer-*.safetensors``
    holds every state tensor of the optimizers as ``<parameter>.<state>``, unsharded. The files do not depend on the
    layout of the ranks (ZeRO level, tensor parallelism, pipeline stages), and any layout reads them. Nothing is
    pickled.

    Every rank makes one, at the same time, and calls the same methods in the same order. Ranks meet over
    ``torch.distributed``'s store, so that nothing interferes with training.

    A directory belongs to one run at a time; this one locks it until :meth:`close` or the end of the process.

    Args:
        directory: it is made if need be. All ranks must see the same one.
        keep: so many of the newest checkpoints are kept; ``None``: all. The newest one whose weights are finite is
            always kept.
        timeout: seconds that a rank waits for others.
        readonly: only load; other runs may write to the directory.
        max_file_size: of a file, in bytes; a tensor is never divided.

    Raises:
        ValueError: ``keep``, ``timeout`` or ``max_file_size`` is out of range.
        RuntimeError: on every rank: the directory cannot be used, or another run has locked it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        timeout: float = 1800.0,
        readonly: bool = False,
        max_file_size: int = MAX_FILE_SIZE,
    ) -> None:
        for name, value in (("keep", keep), ("timeout", timeout), ("max_file_size", max_file_size)):
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self.readonly = readonly
        self.max_file_size = max_file_size
        self._meeting = Meeting(timeout)
        self._lock: DirectoryLock | None = None
        self._snapshot = Snapshot()
        # One thread, which waits between saves: to start one would take longer than to hand it a job.
        self._writer = ThreadPoolExecutor(1, "bmt-checkpoint")
        self._written: Future[None] | None = None
        self._writing = 0  # the step that the thread writes
        self._failure: Exception | None = None
        self._broken: Exception | None = None
        problem = ""
        if self._meeting.rank == 0 and not readonly:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_directory(self.directory.parent)
                self._lock = DirectoryLock(self.directory)
                clean_up(self.directory)
            except (OSError, RuntimeError) as error:
                problem = f"{self.directory} cannot be used for checkpoints: {error}"
        problem = self._meeting.announce(problem.encode()).decode()
        if problem:
            raise RuntimeError(problem)
        atexit.register(_wait_at_exit, weakref.ref(self))

    # --- saving -----------------------------------------------------------------------------------

    def save(self, step: int, *, per_replica: Sequence[str] = (), **objects: Any) -> None:
        """Write a checkpoint. Every rank must call it.

        It returns when everything is copied to host memory; a thread writes. What is written is what the call saw. If
        the checkpoint before is still being written, the call waits for it, and says so in the log.

        Args:
            step: the number of the checkpoint.
            per_replica: names of objects whose state differs between data-parallel replicas. All others must have the
                same state on every rank.
            objects: ``model=``, a module, sharded or not; ``manager=``, an ``OptimManager``, or ``optimizer=``; and
                under any other name anything with ``state_dict()`` and ``load_state_dict()``, or, like a tokenizer,
                with ``save_pretrained(directory)``, whose files lie in the checkpoint.

        Raises:
            TypeError, ValueError: an argument is wrong, or something cannot be saved. All ranks hear of it.
            SaveError: the checkpoint before could not be written (on every rank). This one is not begun.
            RuntimeError: the checkpointer is read-only or closed.
        """
        if self.readonly:
            raise RuntimeError("this checkpointer is readonly; make one without readonly=True to save")
        self._settle(f"save({step})")
        job = Job(step if isinstance(step, int) else -1)
        problem: Exception | None = None
        try:
            self._prepare(job, step, per_replica, objects)
        except Exception as error:  # the others must hear of it
            problem = error
            job = Job(job.step, problem=f"{type(error).__name__}: {error}")
        self._writing = job.step
        self._written = self._writer.submit(self._run, job)
        if problem is not None:
            raise problem

    def _prepare(self, job: Job, step: int, per_replica: Sequence[str], objects: Mapping[str, Any]) -> None:
        if not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step={step!r} must be a whole number, 0 or more")
        given = _Objects(objects)
        unknown = [name for name in per_replica if name not in given.others]
        if unknown:
            raise ValueError(f"per_replica names {unknown}, which the call does not save")
        rank, size = self._meeting.rank, self._meeting.size
        sections = {"model": given.model_contents(), "optimizer": given.optimizer_contents()}
        contents = [(section, content) for section, found in sections.items() for content in found]
        for _, content in contents:
            _check_has_values(content)
        distinct = distinct_tensors(content for _, content in contents)
        tensors: dict[int, Tensor] = {}
        for content, place in distinct:
            tensors.setdefault(place, content.tensor)
        copies = self._snapshot.take([tensors[place].contiguous() for place in range(len(tensors))])
        for (section, content), (_, place) in zip(contents, distinct):
            regions = regions_of(content.where, content.entry.itemsize) if content.is_current else []
            job.tensors.append(HeldTensor(section, content.entry, tuple(regions), copies[place], content.is_single))
        if given.model is not None:
            job.extra = {name: encode(state, repr(name)) for name, state in extra_states(given.model).items()}
        replica, replicas, leads = _replica(rank, size)
        trainer: dict[str, Any] = trainer_state.describe_run(step, size)
        trainer.update(trainer_state.state_of_optimizers(given.optimizers, given.manager))
        trainer["objects"] = {}
        for name, each in given.others.items():
            if not hasattr(each, "state_dict"):
                continue
            state = encode(each.state_dict(), f"the state of {name!r}")
            text = _to_json(state)
            if name not in per_replica:
                job.states[name] = hashlib.sha256(text).hexdigest()
                job.common_files[f"state-{name}.json"] = text
            elif leads:
                job.own_files[_replica_file(name, replica, replicas)] = text
            trainer["objects"][name] = {"replicas": replicas if name in per_replica else None}
        rng = _rng_file(rank, size)
        job.own_files[rng] = trainer_state.small_safetensors(rng, trainer_state.random_state())
        if rank == 0:
            job.common_files.update(given.pretrained_files())
        job.common_files[_TRAINER] = json.dumps(trainer, indent=1).encode()

    def _run(self, job: Job) -> None:
        try:
            run_job(job, self.directory, self._meeting, self.keep, self.max_file_size)
        except SaveError as error:
            self._failure = error
        except Exception as error:
            self._failure = self._broken = error

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            SaveError: the last checkpoint could not be written (on every rank).
            RuntimeError: ranks could not meet.
        """
        if self._written is not None:
            self._written.result()
            self._written = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _settle(self, call: str) -> None:
        """Wait for the writer, and raise what it has met with."""
        if self._broken is not None and self._failure is None:
            raise RuntimeError(f"this checkpointer cannot be used any more: {self._broken}") from self._broken
        if self._written is not None and not self._written.done():
            _log.warning("%s waits for the checkpoint of step %d, which is still being written", call, self._writing)
            start = time.monotonic()
            futures.wait([self._written])
            _log.warning("%s has waited for %.1f s", call, time.monotonic() - start)
        self.wait()

    def close(self) -> None:
        """Wait, and let other runs use the directory.

        Raises:
            What :meth:`wait` raises.
        """
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._writer.shutdown()
            self._meeting.leave()
            self._broken = RuntimeError("it is closed; make a new one")

    # --- loading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in ascending order."""
        return sorted(step for step, _ in complete_checkpoints(self.directory))

    def load_latest(self, **objects: Any) -> int:
        """Go back to the newest checkpoint that is complete and undamaged. Every rank must call it.

        A checkpoint that is damaged is passed over with a warning, and so is one with weights that are not finite if
        there is one with finite weights before it.

        Args:
            objects: as for :meth:`save`; those that are given are loaded, in place.

        Returns:
            the step; 0 where there is no checkpoint.

        Raises:
            What :meth:`load` raises; a RuntimeError if there are checkpoints and all of them are damaged.
        """
        self._settle("load_latest()")
        candidates: list[int] = self._from_rank_0(self._candidates)
        damaged = []
        for step in candidates:
            try:
                self._load(step, objects)
            except DamagedError as error:
                damaged.append(str(error))
                if self._meeting.rank == 0:
                    _log.warning("the checkpoint of step %d is damaged, and the one before is used: %s", step, error)
            else:
                return step
        if damaged:
            raise RuntimeError(
                f"all checkpoints in {self.directory} are damaged, and the model may be loaded in part: "
                + "; ".join(damaged)
            )
        return 0

    def load(self, step: int, **objects: Any) -> None:
        """Go back to the checkpoint of a step. Every rank must call it.

        Each rank reads what it holds. All is compared with its checksums. Names, shapes and dtypes are checked before
        anything is changed.

        Args:
            objects: as for :meth:`save`; those that are given are loaded, in place. What was saved by another number
                of ranks, or of stages, or by another ZeRO level, loads as well. Random generators go back to their
                states on the ranks that there were.

        Raises:
            FileNotFoundError: there is no checkpoint of this step.
            DamagedError: a file is missing or damaged (on every rank). If it is not known before it is read, the model
                may be loaded in part.
            ValueError: the checkpoint is of another model or other optimizers; nothing was changed.
        """
        self._settle(f"load({step})")
        if not self._from_rank_0(lambda: (self.directory / step_name(step)).is_dir()):
            raise FileNotFoundError(f"{self.directory} has no checkpoint of step {step}")
        self._load(step, objects)

    def _candidates(self) -> list[int]:
        """The steps to try, newest first."""
        complete = list(complete_checkpoints(self.directory))
        if not complete and (steps := listed_steps(self.directory)):
            raise DamagedError(f"none of the checkpoints {steps[-5:]} is complete; remove them to begin anew")
        newest_finite = max((step for step, manifest in complete if manifest.is_finite), default=-1)
        found = []
        for step, manifest in complete:
            if not manifest.is_finite and 0 <= newest_finite < step:
                _log.warning("the checkpoint of step %d is passed over: its weights are not finite", step)
            else:
                found.append(step)
        return found

    def _from_rank_0(self, call: Callable[[], Any]) -> Any:
        """What a call gives on rank 0, or a RuntimeError with what it raises there, on every rank."""
        answer: Any = None
        if self._meeting.rank == 0:
            try:
                answer = {"value": call()}
            except (OSError, DamagedError) as error:
                answer = {"problem": str(error)}
        answer = json.loads(self._meeting.announce(json.dumps(answer).encode()))
        if "problem" in answer:
            raise RuntimeError(f"{self.directory}: {answer['problem']}")
        return answer["value"]

    def _load(self, step: int, objects: Mapping[str, Any]) -> None:
        path = self.directory / step_name(step)
        loading = _Loading(path, step, self._meeting.rank, self._meeting.size)
        self._together(lambda: loading.prepare(_Objects(objects, loading=True)))
        everyone = self._meeting.exchange(_to_json(loading.names()))
        self._together(lambda: loading.check([json.loads(each) for each in everyone]))
        try:
            self._together(loading.read)
            loading.commit()
        finally:
            loading.close()

    def _together(self, call: Callable[[], None]) -> None:
        """Call on every rank, and raise on all of them what one has raised."""
        problem: Exception | None = None
        try:
            call()
        except Exception as error:
            problem = error
        mine = None if problem is None else [type(problem).__name__, str(problem)]
        everyone = [json.loads(each) for each in self._meeting.exchange(json.dumps(mine).encode())]
        kinds = {kind.__name__: kind for kind in (DamagedError, TypeError, FileNotFoundError)}
        found = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
        # A checkpoint that does not fit is an error of the call; one that is damaged leads to the one before.
        found.sort(key=lambda item: item[1][0] == "DamagedError")
        for rank, (kind, text) in found:
            where = "" if self._meeting.size == 1 or rank == self._meeting.rank else f"rank {rank}: "
            if kind not in kinds and kind != "ValueError":
                raise RuntimeError(f"{where}{kind}: {text}") from problem
            raise kinds.get(kind, ValueError)(f"{where}{text}") from problem


class _Objects:
    """The objects of a call.

    Args:
        objects: by keyword.
        loading: objects that cannot be loaded are then an error.

    Raises:
        TypeError: one is of a kind that cannot be saved.
        ValueError: a name cannot be used.
    """

    def __init__(self, objects: Mapping[str, Any], loading: bool = False) -> None:
        self.others = dict(objects)
        self.records: list[tuple[Any, list[StateRecord]]] = []
        self.model: nn.Module | None = self.others.pop("model", None)
        self.manager: Any = self.others.pop("manager", None)
        optimizer: Any = self.others.pop("optimizer", None)
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(self.model).__name__}")
        if self.manager is not None and optimizer is not None:
            raise ValueError("manager and optimizer are both given; a manager has its optimizers with it")
        if self.manager is not None and not hasattr(self.manager, "trainer_state"):
            raise TypeError(f"manager must be an OptimManager, not {type(self.manager).__name__}")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.optimizers: list[Any] = [] if optimizer is None else [optimizer]
        if self.manager is not None:
            self.optimizers = list(self.manager.optimizers)
        if self.optimizers and self.model is None:
            raise ValueError("an optimizer's state is saved by the names of the model's parameters; pass model=, too")
        for name, each in self.others.items():
            if name in _RESERVED or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
                raise ValueError(f"{name!r} cannot be the name of an object in a checkpoint; choose another one")
            needed = ("load_state_dict",) if loading else ("state_dict",)
            if not all(hasattr(each, method) for method in needed) and (loading or not _is_pretrained(each)):
                raise TypeError(
                    f"{name} is a {type(each).__name__}; a checkpoint takes objects with state_dict() and "
                    "load_state_dict()"
                )

    def model_contents(self) -> list[Content]:
        return [] if self.model is None else contents_of_model(self.model)

    def optimizer_contents(self, saved: Mapping[str, Entry] | None = None) -> list[Content]:
        """The state of all optimizers; where it is not there yet, room for what was ``saved``.

        Raises:
            ValueError: two optimizers have state of the same name.
        """
        found: dict[str, Content] = {}
        names = {} if self.model is None else parameter_names(self.model)
        for number, optimizer in enumerate(self.optimizers):
            if saved is not None and not hasattr(optimizer, "state_records"):
                make_state(optimizer, names, saved)
            records = records_of(optimizer)
            self.records.append((optimizer, records))
            for content in contents_of_optimizer(records, names, f"optimizer {number} ({type(optimizer).__name__})"):
                if content.entry.name in found:
                    raise ValueError(f"two optimizers have the state {content.entry.name!r}; a parameter is for one")
                found[content.entry.name] = content
        return list(found.values())

    def adopt_records(self) -> None:
        """Let the optimizers go on from what was written into their state."""
        for optimizer, records in self.records:
            adopt_records(optimizer, records)

    def pretrained_files(self) -> dict[str, bytes]:
        """Configuration and tokenizer files, where the model carries them or such objects are given."""
        found: dict[str, bytes] = {}
        carried = [getattr(self.model, name, None) for name in ("config", "generation_config")]
        for each in [*carried, *self.others.values()]:
            if not _is_pretrained(each):
                continue
            with tempfile.TemporaryDirectory() as folder:
                each.save_pretrained(folder)
                for path in sorted(Path(folder).iterdir()):
                    if path.is_file() and is_file_name(path.name):
                        found[path.name] = path.read_bytes()
        return found


def _is_pretrained(each: Any) -> bool:
    return callable(getattr(each, "save_pretrained", None)) and not isinstance(each, nn.Module)


class _Loading:
    """The loading of one checkpoint on one rank, in phases that all ranks go through together."""

    def __init__(self, path: Path, step: int, rank: int, size: int) -> None:
        self._path, self._step, self._rank, self._size = path, step, rank, size
        self._sources: dict[str, Any] = {}

    def prepare(self, given: _Objects) -> None:
        """Open the files, and find what this rank needs of them."""
        self._given = given
        if not self._path.is_dir():
            raise FileNotFoundError(
                f"rank {self._rank} does not see {self._path}; all ranks must share the directory of the checkpoints"
            )
        self._manifest = read_manifest(self._path)
        if self._manifest.step != self._step:
            raise DamagedError(f"the manifest of {self._path} is that of step {self._manifest.step}")
        self._trainer = self._read_trainer()
        self._contents: dict[str, list[Content]] = {}
        if given.model is not None:
            self._sources["model"] = checkpoint_source(self._path, self._manifest, "model")
            self._contents["model"] = given.model_contents()
        if given.optimizers:
            source = self._sources["optimizer"] = checkpoint_source(self._path, self._manifest, "optimizer")
            self._contents["optimizer"] = given.optimizer_contents(source.entries)

    def names(self) -> dict[str, Any]:
        """What this rank needs, for the others to know what is needed at all."""
        needs: dict[str, Any] = {s: [content.entry.name for content in found] for s, found in self._contents.items()}
        return {**needs, "has_code": self._given.model is not None and has_own_code(self._given.model)}

    def check(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless the checkpoint fits; nothing is changed yet."""
        self._has_code = any(names["has_code"] for names in everyone)
        problems: list[str] = []
        for section, source in self._sources.items():
            elsewhere = {name for names in everyone for name in names.get(section, ())}
            mine = [content.entry for content in self._contents[section]]
            own = {entry.name for entry in mine}
            theirs = [entry for name, entry in source.entries.items() if name in own or name not in elsewhere]
            problems += check_fit(theirs, mine, f"the checkpoint's {section}", exact=section == "optimizer")
        if problems:
            raise ValueError(f"{self._path} does not fit; nothing was loaded: " + "; ".join(problems))
        what = str(self._path / _TRAINER)
        given = self._given
        self._settings: trainer_state.OptimizerSettings | None = None
        if given.optimizers or given.manager is not None:
            self._settings = trainer_state.OptimizerSettings(self._trainer, given.optimizers, given.manager, what)
        self._states = {name: self._read_state(name) for name in self._given.others}
        self._random = self._read_random()
        self._extra = self._read_extra()

    def read(self) -> None:
        """Read all tensors into their places."""
        self._whole: dict[str, Tensor] = {}
        for section, contents in self._contents.items():
            if section == "model" and self._has_code:
                self._whole = read_whole(self._sources[section])
                continue
            fill(contents, self._sources[section])

    def commit(self) -> None:
        """Set what is no tensor, and what the model's own code loads."""
        if self._whole:
            assert self._given.model is not None
            load_state_dict(self._given.model, {**self._whole, **self._extra})
            self._whole = {}
        elif self._extra:
            assert self._given.model is not None
            set_extra_states(self._given.model, self._extra)
        for content in self._contents.get("model", ()):
            if isinstance(content.owner, ShardedParameter):
                content.owner.awaits_values = False
                content.owner.handle.original = None
        self._given.adopt_records()
        if self._settings is not None:
            self._settings.apply()
        for name, state in self._states.items():
            self._given.others[name].load_state_dict(state)
        if self._random is not None:
            trainer_state.set_random_state(self._random)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _small(self, name: str) -> bytes:
        record = self._manifest.files.get(name)
        if record is None:
            raise DamagedError(f"{self._path} has no {name}")
        return read_small_file(self._path / name, record)

    def _read_trainer(self) -> dict[str, Any]:
        found = parse_json(self._path / _TRAINER, self._small(_TRAINER))
        if not isinstance(found, dict) or found.get("format") != trainer_state.FORMAT:
            raise DamagedError(f"{self._path / _TRAINER} has an unknown format")
        return found

    def _read_state(self, name: str) -> Any:
        saved = self._trainer.get("objects")
        saved = saved.get(name) if isinstance(saved, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"{self._path} has no state of {name!r}")
        file, replicas = f"state-{name}.json", saved.get("replicas")
        if replicas is not None:
            replica, count, _ = _replica(self._rank, self._size)
            if replicas != count:
                raise ValueError(
                    f"{self._path} has the states of {name!r} of {replicas} replicas, and there are {count} now; leave "
                    f"{name} out, or use as many"
                )
            file = _replica_file(name, replica, count)
        return decode(parse_json(self._path / file, self._small(file)), f"{self._path / file}")

    def _read_extra(self) -> dict[str, Any]:
        """What this rank's modules need (all of it, if the model's own code loads it)."""
        if self._given.model is None:
            return {}
        mine, path = extra_states(self._given.model), self._path / EXTRA_STATE
        found = parse_json(path, self._small(EXTRA_STATE)) if EXTRA_STATE in self._manifest.files else {}
        missing = [name for name in mine if name not in found]
        if missing:
            raise ValueError(f"{self._path} lacks {missing[:5]}, which the model has; nothing was loaded")
        return {name: decode(found[name], repr(name)) for name in (found if self._has_code else mine)}

    def _read_random(self) -> dict[str, Tensor] | None:
        name = _rng_file(self._rank, self._size)
        if name not in self._manifest.files:  # another number of ranks
            return None
        found = trainer_state.parse_small_safetensors(self._path / name, self._small(name))
        trainer_state.check_random_state(found, str(self._path / name))
        return found


def _replica(rank: int, size: int) -> tuple[int, int, bool]:
    """The number of this rank's replica, how many there are, and whether this rank is the first of its own."""
    tp = current_context().tp_size if is_initialized() else 1
    return rank // tp, size // tp, rank % tp == 0


def _replica_file(name: str, replica: int, replicas: int) -> str:
    return f"state-{name}-{replica:05}-of-{replicas:05}.json"


def _rng_file(rank: int, size: int) -> str:
    return f"rng-{rank:05}-of-{size:05}.safetensors"


def _to_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _check_has_values(content: Content) -> None:
    if content.tensor.is_meta or getattr(content.owner, "awaits_values", False):
        raise ValueError(f"{content.entry.name!r} has no values yet; load or initialise the model before saving it")


def _wait_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    checkpointer = reference()
    if checkpointer is not None:
        try:
            checkpointer.wait()
        except Exception as error:
            _log.error("%s", error)

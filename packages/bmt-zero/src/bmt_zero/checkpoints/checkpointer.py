"""The checkpoints of a training run: sharded, asynchronous, atomic, and loadable at any layout."""

from __future__ import annotations

import json
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bmt_comm import before_shutdown, note_place
from bmt_comm.durable import sync_to_disk

from .contents import check_filled
from .directory import DirectoryLock, age_key, clean_up, complete_checkpoints, listed_steps, step_name
from .headers import MAX_FILE_SIZE, DamagedError
from .job import Job, SaveError, SaveTarget, run_job
from .loading import Loading
from .memory import Snapshot
from .objects import Objects
from .saving import prepare_job
from .store_communicator import StoreCommunicator

_log = logging.getLogger("bmt_zero.checkpoints")


class Checkpointer:
    """Saves and loads the checkpoints of a run, in one directory.

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
    layout of the ranks (ZeRO level, tensor parallelism, pipeline stages). Any layout can load them. Nothing is
    pickled.

    All ranks must construct it at the same time and call the same methods in the same order. Ranks communicate over
    ``torch.distributed``'s store and a process group of their own, which does not interfere with training.

    A directory belongs to one run at a time. It is locked until :meth:`close` or the end of the process.

    Args:
        directory: created if it does not exist. All ranks must see the same directory.
        keep: how many of the newest checkpoints to keep; ``None``: all. The newest is the one that was saved last,
            whatever its step. The newest is always kept, and so is the newest one whose parameters are finite.
            Checkpoints that turned out to be damaged when they were loaded do not count.
        timeout: seconds that a rank waits for others.
        readonly: only load; other runs may write to the directory.
        max_file_size: the largest size of a file, in bytes. A tensor is never divided, so a larger tensor makes a
            larger file.

    Raises:
        TypeError: ``keep`` is not an integer.
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
        try:
            keep = None if keep is None else operator.index(keep)
        except TypeError:
            raise TypeError(f"keep={keep!r} must be a whole number, or None to keep all checkpoints") from None
        for name, value in (("keep", keep), ("timeout", timeout), ("max_file_size", max_file_size)):
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self.readonly = readonly
        self.max_file_size = max_file_size
        self._comm = StoreCommunicator(timeout)
        self._lock: DirectoryLock | None = None
        self._snapshot = Snapshot()
        # One thread for all saves: starting a thread takes longer than submitting a job.
        self._writer = ThreadPoolExecutor(1, "bmt-checkpoint")
        self._written: Future[None] | None = None
        self._writing = 0  # the step that the thread writes
        self._failure: Exception | None = None  # of the last save; raised once
        self._unusable: Exception | None = None  # why no further call is possible
        self._damaged: set[int] = set()  # steps that could not be loaded
        problem = ""
        if self._comm.rank == 0 and not readonly:
            try:
                missing = [path for path in self.directory.parents if not path.exists()]
                self.directory.mkdir(parents=True, exist_ok=True)
                for path in (self.directory, *missing):
                    sync_to_disk(path.parent)
                self._lock = DirectoryLock(self.directory)
                clean_up(self.directory)
            except Exception as error:  # the other ranks wait for the outcome
                problem = f"{self.directory} cannot be used for checkpoints: {error}"
        problem = self._comm.broadcast(problem.encode()).decode()
        if problem:
            raise RuntimeError(problem)
        before_shutdown(partial(_wait_before_shutdown, weakref.ref(self)))

    # --- saving -----------------------------------------------------------------------------------

    def save(self, step: int, *, per_replica: Sequence[str] = (), **objects: Any) -> None:
        """Write a checkpoint. Every rank must call it.

        It returns when everything is copied to host memory. A thread writes the copies to disk. If the previous
        checkpoint is still being written, the call waits for it and logs this.

        Args:
            step: the number of the checkpoint.
            per_replica: names of objects whose state differs between data-parallel replicas. All others must have the
                same state on every rank.
            objects: ``model=``, a module, sharded or not; ``manager=``, an ``OptimManager``, or ``optimizer=``. Other
                names take any object with ``state_dict()`` and ``load_state_dict()``, or, such as a tokenizer, with
                ``save_pretrained(directory)``, whose files go into the checkpoint.

        Raises:
            TypeError, ValueError: an argument is wrong, or something cannot be saved. The next call of the checkpointer
                then raises a SaveError on every rank, so every rank must make that call.
            SaveError: on every rank: the previous checkpoint could not be written. This one is not started.
            RuntimeError: the checkpointer is read-only or closed.
        """
        if self.readonly:
            raise RuntimeError("this checkpointer is readonly; make one without readonly=True to save")
        note_place("the saving of a checkpoint")
        self._settle(f"save({step})")
        job = Job(-1)
        problem: Exception | None = None
        try:
            check_filled(objects.get("model"))  # a collective: first, because what follows may fail on one rank
            job.step = checked_step(step)
            prepare_job(job, Objects(objects), per_replica, self._comm.rank, self._comm.size, self._snapshot)
        except Exception as error:  # run_job raises it on the other ranks
            problem = error
            job = Job(job.step, problem=f"{type(error).__name__}: {error}")
        self._writing = job.step
        damaged = self._damaged - {job.step}
        target = SaveTarget(self.directory, self._lock, self.keep, self.max_file_size, damaged)
        self._written = self._writer.submit(self._run, job, target)
        if problem is not None:
            raise problem

    def _run(self, job: Job, target: SaveTarget) -> None:
        try:
            run_job(job, target, self._comm)
            self._damaged.discard(job.step)
        except SaveError as error:
            self._failure = error
        except Exception as error:
            self._failure = self._unusable = error
            if self._comm.size > 1 and not dist.is_initialized():
                self._failure = SaveError(
                    f"the checkpoint of step {job.step} was not written: the process group was destroyed meanwhile; "
                    "call wait() or close() before that"
                )

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            SaveError: on every rank: the last checkpoint could not be written.
            RuntimeError: a rank did not respond, or the store is lost.
        """
        if self._written is not None:
            self._written.result()
            self._written = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _settle(self, call: str) -> None:
        """Wait for the writer, and raise its error."""
        if self._unusable is not None and self._failure is None:
            raise RuntimeError(f"this checkpointer cannot be used any more: {self._unusable}") from self._unusable
        if self._written is not None and not self._written.done():
            _log.warning("%s waits for the checkpoint of step %d, which is still being written", call, self._writing)
            start = time.monotonic()
            futures.wait([self._written])
            _log.warning("%s has waited for %.1f s", call, time.monotonic() - start)
        self.wait()

    def close(self) -> None:
        """Wait for the last save, and unlock the directory.

        Raises:
            What :meth:`wait` raises.
        """
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._writer.shutdown()
            self._comm.close()
            self._unusable = RuntimeError("it is closed; make a new one")

    # --- loading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints in the order in which they were saved, the newest last.

        Checkpoints that currently cannot be read are left out with a warning.
        """
        return [step for step, _ in reversed(complete_checkpoints(self.directory).checkpoints)]

    def load_latest(self, **objects: Any) -> int:
        """Load the newest checkpoint that is complete and undamaged. Every rank must call it.

        The newest is the one that was saved last. After ``load(500)`` and ``save(600)`` that is 600, even if an earlier
        save has step 2000.

        A damaged checkpoint is skipped with a warning. A checkpoint with parameters that are not finite is skipped with
        a warning if an older one has finite parameters. A checkpoint that currently cannot be read is skipped with a
        warning if there is a newer one to load.

        Args:
            objects: as for :meth:`save`. The given objects are loaded in place.

        Returns:
            the step; 0 if there is no checkpoint.

        Raises:
            What :meth:`load` raises; RuntimeError: there are checkpoints, and all of them are damaged.
        """
        self._settle("load_latest()")
        damaged: list[str] = []
        tried: set[int] = set()
        # List again after each failure: another run may have replaced the checkpoints.
        while candidates := [step for step in self._from_rank_0(self._candidates) if step not in tried]:
            step = candidates[0]
            tried.add(step)
            try:
                self._load(step, objects)
            except FileNotFoundError:
                if self._from_rank_0((self.directory / step_name(step)).is_dir):
                    raise
            except DamagedError as error:
                damaged.append(str(error))
                if self._comm.rank == 0:
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
        """Load the checkpoint of a step. Every rank must call it.

        Each rank reads its own shards and compares them with their checksums. Names, shapes and dtypes are checked
        before anything is changed.

        Args:
            objects: as for :meth:`save`. The given objects are loaded in place. The number of ranks, the number of
                stages and the ZeRO level may differ from those of the save. The states of the random generators are
                restored. At another number of ranks, they get the state that all ranks had. If ranks had different
                states, each replica gets a seed that depends on the saved state and the replica's number.

        Raises:
            FileNotFoundError: there is no checkpoint of this step.
            DamagedError: on every rank: a file is missing or damaged. If the damage shows only while tensors are
                read, the model may be partly loaded.
            OSError: on every rank: files currently cannot be read, because of an input/output error or too many open
                files, for example. The model may be partly loaded.
            ValueError: ranks pass different steps; the checkpoint is of another model or other optimizers, or has the
                states of an object for another number of replicas; or a number is too large for the model's dtype.
                Nothing was changed.
            Exception: on the rank where it is raised: what ``load_state_dict`` of an object or the model's own code
                raises. Other ranks raise a RuntimeError, or the same type if it is a TypeError, a ValueError or an
                OSError.
        """
        self._settle(f"load({step})")
        steps = [each.decode() for each in self._comm.all_gather(repr(step).encode())]
        if len(set(steps)) > 1:
            raise ValueError(f"ranks load different steps, in the order of the ranks: {', '.join(steps[:20])}")
        step = checked_step(step)
        if not self._from_rank_0(lambda: (self.directory / step_name(step)).is_dir()):
            raise FileNotFoundError(f"{self.directory} has no checkpoint of step {step}")
        self._load(step, objects)

    def _candidates(self) -> list[int]:
        """The steps to try, newest first."""
        while True:
            steps = listed_steps(self.directory)
            complete, unread = complete_checkpoints(self.directory)
            if complete or unread or not steps:
                break
            if steps == listed_steps(self.directory):  # else another run has replaced them since
                raise DamagedError(f"none of the checkpoints {steps[-5:]} is complete; remove them to begin anew")
        finite = [step for step, manifest in complete if manifest.is_finite]
        for step, manifest in complete:
            if manifest.is_finite or not finite:
                break
            _log.warning("the checkpoint of step %d is passed over: its parameters are not finite", step)
        candidates = finite or [step for step, _ in complete]
        # An unreadable checkpoint keeps its place among the candidates, so that loading it raises instead of silently
        # falling back to an older one.
        for step in sorted(unread):
            key = age_key(self.directory, step)
            older = (n for n, other in enumerate(candidates) if age_key(self.directory, other) < key)
            candidates.insert(next(older, len(candidates)), step)
        return candidates

    def _from_rank_0(self, call: Callable[[], Any]) -> Any:
        """Rank 0's result of a call, on every rank. If it raises, every rank raises an OSError or a RuntimeError."""
        answer: Any = None
        if self._comm.rank == 0:
            try:
                answer = {"value": call()}
            except Exception as error:  # the other ranks wait for the answer
                is_plain = isinstance(error, (OSError, DamagedError))
                text = str(error) if is_plain else f"{type(error).__name__}: {error}"
                answer = {"problem": text, "of_system": isinstance(error, OSError)}
        answer = json.loads(self._comm.broadcast(json.dumps(answer).encode()))
        if "problem" in answer:
            raise (OSError if answer["of_system"] else RuntimeError)(f"{self.directory}: {answer['problem']}")
        return answer["value"]

    def _load(self, step: int, objects: Mapping[str, Any]) -> None:
        path = self.directory / step_name(step)
        loading = Loading(path, step, self._comm.rank, self._comm.size)
        try:
            self._together(lambda: loading.prepare(Objects(objects, loading=True)))
            self._together(loading.prepare_optimizers)
            everyone = self._comm.all_gather_json(loading.names())
            self._together(lambda: loading.check(everyone))
            self._together(loading.read)
            self._together(loading.commit)
        except DamagedError:
            self._damaged.add(step)
            raise
        finally:
            loading.close()
        self._damaged.discard(step)

    def _together(self, call: Callable[[], None]) -> None:
        """Call on every rank. If the call raises on any rank, raise on every rank.

        A rank raises its own error, except for a DamagedError or a FileNotFoundError: every rank raises it if all
        errors are of this kind, and otherwise no rank does. load_latest then continues on all ranks or on none.
        """
        problem: Exception | None = None
        try:
            call()
        except Exception as error:
            problem = error
        everyone = self._comm.all_gather_json(None if problem is None else [_kind(problem), str(problem)])
        kinds = {kind.__name__: kind for kind in (DamagedError, TypeError, FileNotFoundError, OSError)}
        problems = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
        # Other errors first: after these, load_latest may try the previous checkpoint.
        of_files = ("FileNotFoundError", "DamagedError")
        problems.sort(key=lambda item: (item[1][0] in of_files, item[1][0] == "DamagedError"))
        if not problems:
            return
        rank, (kind, text) = problems[0]
        where = "" if self._comm.size == 1 or rank == self._comm.rank else f"rank {rank}: "
        try:
            if problem is not None and (kind == _kind(problem) or _kind(problem) not in of_files):
                raise problem
            if kind not in kinds and kind != "ValueError":
                raise RuntimeError(f"{where}{kind}: {text}") from problem
            raise kinds.get(kind, ValueError)(f"{where}{text}") from problem
        finally:
            problem = None  # its traceback refers to this frame, which keeps everything that is loaded alive


def _kind(error: Exception) -> str:
    """The name of an error's class. It is ``FileNotFoundError`` or ``OSError`` for their subclasses."""
    for kind in (FileNotFoundError, OSError):
        if isinstance(error, kind):
            return kind.__name__
    return type(error).__name__


def checked_step(step: Any) -> int:
    """A step as an int. Integers of numpy and torch are accepted.

    Raises:
        ValueError: it is not an integer, or is out of range.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ValueError(f"step={step!r} must be a whole number, 0 or more")
    return number


def _wait_before_shutdown(reference: weakref.ref[Checkpointer]) -> None:
    checkpointer = reference()
    if checkpointer is not None:
        checkpointer.wait()

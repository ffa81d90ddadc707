"""The checkpoints of a training run: sharded, asynchronous, at any layout, and each complete or not there."""

from __future__ import annotations

import atexit
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

from .directory import DirectoryLock, age_key, clean_up, complete_checkpoints, listed_steps, step_name
from .headers import MAX_FILE_SIZE, DamagedError
from .job import Job, SaveError, Target, run_job
from .loading import Loading
from .meeting import Meeting
from .memory import Snapshot
from .objects import Objects
from .saving import prepare_job
from .trainer_state import to_json

_log = logging.getLogger("bmt_zero.checkpoints")


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
        keep: so many of the newest checkpoints are kept; ``None``: all. The newest is the one that was saved last,
            whatever its step. It is always kept, and so is the newest one whose parameters are finite. Those that
            were found damaged while they were loaded do not count.
        timeout: seconds that a rank waits for others.
        readonly: only load; other runs may write to the directory.
        max_file_size: of a file, in bytes; a tensor is never divided.

    Raises:
        TypeError: ``keep`` is no whole number.
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
        keep = None if keep is None else operator.index(keep)
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
        self._damaged: set[int] = set()  # steps that could not be loaded
        problem = ""
        if self._meeting.rank == 0 and not readonly:
            try:
                missing = [path for path in self.directory.parents if not path.exists()]
                self.directory.mkdir(parents=True, exist_ok=True)
                for path in (self.directory, *missing):
                    sync_to_disk(path.parent)
                self._lock = DirectoryLock(self.directory)
                clean_up(self.directory)
            except (OSError, RuntimeError) as error:
                problem = f"{self.directory} cannot be used for checkpoints: {error}"
        problem = self._meeting.announce(problem.encode()).decode()
        if problem:
            raise RuntimeError(problem)
        for register in (atexit.register, before_shutdown):
            register(partial(_wait_at_exit, weakref.ref(self)))

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
            TypeError, ValueError: an argument is wrong, or something cannot be saved. The next call of the checkpointer
                raises a SaveError on every rank; so no rank may leave it out.
            SaveError: the checkpoint before could not be written (on every rank). This one is not begun.
            RuntimeError: the checkpointer is read-only or closed.
        """
        if self.readonly:
            raise RuntimeError("this checkpointer is readonly; make one without readonly=True to save")
        note_place("the saving of a checkpoint")
        self._settle(f"save({step})")
        job = Job(-1)
        problem: Exception | None = None
        try:
            job.step = checked_step(step)
            meeting = self._meeting
            prepare_job(job, Objects(objects), per_replica, meeting.rank, meeting.size, self._snapshot)
        except Exception as error:  # the others must hear of it
            problem = error
            job = Job(job.step, problem=f"{type(error).__name__}: {error}")
        self._writing = job.step
        damaged = self._damaged - {job.step}
        target = Target(self.directory, self._lock, self.keep, self.max_file_size, damaged)
        self._written = self._writer.submit(self._run, job, target)
        if problem is not None:
            raise problem

    def _run(self, job: Job, target: Target) -> None:
        try:
            run_job(job, target, self._meeting)
            self._damaged.discard(job.step)
        except SaveError as error:
            self._failure = error
        except Exception as error:
            self._failure = self._broken = error
            if self._meeting.size > 1 and not dist.is_initialized():
                self._failure = SaveError(
                    f"the checkpoint of step {job.step} was not written: the process group was destroyed meanwhile; "
                    "call wait() or close() before that"
                )

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
        """The steps of the complete checkpoints in the order in which they were saved, the newest last.

        Those that the machine cannot read for now are left out with a warning.
        """
        return [step for step, _ in reversed(complete_checkpoints(self.directory).checkpoints)]

    def load_latest(self, **objects: Any) -> int:
        """Go back to the newest checkpoint that is complete and undamaged. Every rank must call it.

        The newest is the one that was saved last. After ``load(500)`` and ``save(600)`` that is 600, although there may
        be one of step 2000 that was saved before.

        A checkpoint that is damaged is passed over with a warning, and so is one with parameters that are not finite
        if there is one with finite parameters before it. One that the machine cannot read for now is passed over with a
        warning if there is a newer one to load.

        Args:
            objects: as for :meth:`save`; those that are given are loaded, in place.

        Returns:
            the step; 0 where there is no checkpoint.

        Raises:
            What :meth:`load` raises; a RuntimeError if there are checkpoints and all of them are damaged.
        """
        self._settle("load_latest()")
        damaged: list[str] = []
        tried: set[int] = set()
        # Listed again after each that fails: a run may write there that keeps few.
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
                states. At another number of ranks they get the state that all ranks had; if ranks had different ones,
                each replica gets a seed that depends on the saved state and its number.

        Raises:
            FileNotFoundError: there is no checkpoint of this step.
            DamagedError: a file is missing or damaged (on every rank). If it is not known before it is read, the model
                may be loaded in part.
            OSError: the machine cannot read for now (on every rank): an input/output error, say, or too many open
                files. The model may be loaded in part.
            ValueError: ranks give different steps; the checkpoint is of another model or other optimizers, or has the
                states of an object of another number of replicas; or a number is too large for the model's dtype.
                Nothing was changed.
            Exception: what ``load_state_dict`` of an object or the model's own code raises, where it raises. On the
                other ranks it is a RuntimeError, or has its type if it is a TypeError, a ValueError or an OSError.
        """
        self._settle(f"load({step})")
        steps = [each.decode() for each in self._meeting.exchange(repr(step).encode())]
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
            if steps == listed_steps(self.directory):  # else a run that keeps few has changed them meanwhile
                raise DamagedError(f"none of the checkpoints {steps[-5:]} is complete; remove them to begin anew")
        finite = [step for step, manifest in complete if manifest.is_finite]
        for step, manifest in complete:
            if manifest.is_finite or not finite:
                break
            _log.warning("the checkpoint of step %d is passed over: its parameters are not finite", step)
        candidates = finite or [step for step, _ in complete]
        # An older one must not take the place of one that cannot be read for now: to load that one raises.
        for step in sorted(unread):
            key = age_key(self.directory, step)
            older = (n for n, other in enumerate(candidates) if age_key(self.directory, other) < key)
            candidates.insert(next(older, len(candidates)), step)
        return candidates

    def _from_rank_0(self, call: Callable[[], Any]) -> Any:
        """What a call gives on rank 0, or an OSError or RuntimeError with what it raises there, on every rank."""
        answer: Any = None
        if self._meeting.rank == 0:
            try:
                answer = {"value": call()}
            except Exception as error:  # the others wait to hear of it
                expected = isinstance(error, (OSError, DamagedError))
                text = str(error) if expected else f"{type(error).__name__}: {error}"
                answer = {"problem": text, "of_system": isinstance(error, OSError)}
        answer = json.loads(self._meeting.announce(json.dumps(answer).encode()))
        if "problem" in answer:
            raise (OSError if answer["of_system"] else RuntimeError)(f"{self.directory}: {answer['problem']}")
        return answer["value"]

    def _load(self, step: int, objects: Mapping[str, Any]) -> None:
        path = self.directory / step_name(step)
        loading = Loading(path, step, self._meeting.rank, self._meeting.size)
        try:
            self._together(lambda: loading.prepare(Objects(objects, loading=True)))
            self._together(loading.prepare_optimizers)
            everyone = self._meeting.exchange(to_json(loading.names()))
            self._together(lambda: loading.check([json.loads(each) for each in everyone]))
            self._together(loading.read)
            self._together(loading.commit)
        except DamagedError:
            self._damaged.add(step)
            raise
        finally:
            loading.close()
        self._damaged.discard(step)

    def _together(self, call: Callable[[], None]) -> None:
        """Call on every rank, and raise on all of them what one has raised.

        A rank raises its own error. If all ranks find the checkpoint damaged, or some do and nothing else is wrong, all
        raise DamagedError, so that all go on to the checkpoint before.
        """
        problem: Exception | None = None
        try:
            call()
        except Exception as error:
            problem = error
        mine = None if problem is None else [_kind(problem), str(problem)]
        everyone = [json.loads(each) for each in self._meeting.exchange(json.dumps(mine).encode())]
        kinds = {kind.__name__: kind for kind in (DamagedError, TypeError, FileNotFoundError, OSError)}
        problems = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
        # A checkpoint that does not fit is an error of the call; one that is damaged leads to the one before.
        problems.sort(key=lambda item: item[1][0] == "DamagedError")
        if not problems:
            return
        rank, (kind, text) = problems[0]
        where = "" if self._meeting.size == 1 or rank == self._meeting.rank else f"rank {rank}: "
        try:
            if problem is not None and not isinstance(problem, DamagedError):
                raise problem
            if kind not in kinds and kind != "ValueError":
                raise RuntimeError(f"{where}{kind}: {text}") from problem
            raise kinds.get(kind, ValueError)(f"{where}{text}") from problem
        finally:
            problem = None  # its traceback refers to this frame, and so to all that is being loaded


def _kind(error: Exception) -> str:
    """The name of an error's class; of one of the system, ``OSError``, but for a missing file."""
    is_of_system = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return "OSError" if is_of_system else type(error).__name__


def checked_step(step: Any) -> int:
    """The number of a step, also one of numpy or torch."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ValueError(f"step={step!r} must be a whole number, 0 or more")
    return number


def _wait_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    checkpointer = reference()
    if checkpointer is not None:
        try:
            checkpointer.wait()
        except Exception as error:
            _log.error("%s", error)

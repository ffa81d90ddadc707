"""A pool of processes, one per rank, that outlives the calls it serves."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Any, BinaryIO

from torch.distributed import TCPStore

from bmt_comm.testing.fork_server import ForkServer
from bmt_comm.testing.modules import ModuleSource
from bmt_comm.testing.protocol import Call, CleanUp, Done, Failed, receive, send
from bmt_comm.testing.report import Outcome, RankError, RankReport

DEFAULT_TIMEOUT = 60.0  # seconds one call may take
START_TIMEOUT = 300.0  # seconds a process may take to import torch
CLEAN_UP_TIMEOUT = 30.0  # seconds a process may take to tear down its process groups
GRACE = 3.0  # seconds the others may go on after the first rank has failed


class RankPool:
    """Processes that serve as ranks; the first ``n`` of them run a call on ``n`` ranks.

    Processes start when first needed: two servers import torch, and fork the ranks of even and of odd numbers. (Ranks
    of one server have the same hash seed, so that a dependence on the order of a set could go unnoticed.) The ranks of
    a call find the environment of ``torchrun`` (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT) with a store of its own, so ``torch.distributed.init_process_group`` works in every call. After a
    call, process groups are destroyed and the process-wide settings of torch are put back; after a failed call, the
    ranks that took part are killed, and the next call gets new ones.

    Args:
        max_ranks: the largest ``n`` that :meth:`run` accepts; None for no limit.
        threads: CPU threads per rank.
        preload: names of packages that the servers import, where they are installed. They must start no threads.
        share_gpu: let NCCL take each rank for one on a host of its own. It refuses two ranks of a host on one GPU. Each
            call gets new ranks, since a second one ended them by SIGSEGV (seen with torch 2.11; why is not known).

    Use it as a context manager, or call :meth:`close`. POSIX only.
    """

    def __init__(
        self,
        max_ranks: int | None = None,
        *,
        threads: int = 1,
        preload: Sequence[str] = (),
        share_gpu: bool = False,
    ) -> None:
        if max_ranks is not None and max_ranks < 1:
            raise ValueError(f"max_ranks={max_ranks}: at least 1 is needed")
        self.max_ranks = max_ranks
        self.threads = threads
        self.preload = preload
        self.share_gpu = share_gpu
        self._servers: list[ForkServer] = []
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(self, fn: Callable[..., Any], n: int, *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """Call ``fn(*args)`` on ``n`` ranks and return the results by rank.

        Args:
            fn: a function that can be pickled by reference (module level; the main script is fine).
            n: number of ranks.
            args: handed over by pickle, the same for every rank.
            timeout: seconds; then the stacks of all ranks are collected and the ranks are killed.

        Raises:
            RankError: ``fn`` raised on a rank, a rank died, or the time was up.
            ValueError: ``n`` is not between 1 and ``max_ranks``.
        """
        reports = self.execute(fn, n, args, timeout=timeout)
        if any(report.failed for report in reports):
            raise RankError(reports)
        return [report.value for report in reports]

    def execute(
        self, fn: Callable[..., Any], n: int, args: Sequence[Any] = (), *, timeout: float = DEFAULT_TIMEOUT
    ) -> list[RankReport]:
        """As :meth:`run`, but returns how the call ended on each rank instead of raising."""
        if n < 1 or (self.max_ranks is not None and n > self.max_ranks):
            raise ValueError(f"n={n}: a number of ranks from 1 to {self.max_ranks} is needed")
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        source = None if module is None else ModuleSource.of(module)
        payload = pickle.dumps((fn, tuple(args)), protocol=pickle.HIGHEST_PROTOCOL)
        workers = self._first(n)
        succeeded = False
        try:
            self._calls += 1
            for rank, worker in enumerate(workers):
                environ = {**os.environ, **_torchrun_environ(rank, n, self._store.port, self.threads)}
                if self.share_gpu:
                    environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
                    environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # so, a rank takes the only GPU it sees
                worker.send(Call(self._calls, payload, source, environ, os.getcwd(), sys.path))
            reports = _collect(workers, timeout)
            if not any(report.failed for report in reports):
                for worker in workers:
                    worker.send(CleanUp())
                for report, clean in zip(reports, _collect(workers, CLEAN_UP_TIMEOUT), strict=True):
                    if clean.failed:
                        report.outcome, report.value, report.after = clean.outcome, None, clean.after
                        report.detail = f"while cleaning up after the call\n{clean.detail}"
            for report, worker in zip(reports, workers, strict=True):
                report.stdout, report.stderr = worker.stdout.take(), worker.stderr.take()
            succeeded = not any(report.failed for report in reports)
        finally:  # also when interrupted
            if not succeeded or self.share_gpu:
                for worker in workers:
                    worker.kill()
        return reports

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.kill(patience=1.0)
        self._workers.clear()
        for server in self._servers:
            server.close()
        self._servers.clear()

    @functools.cached_property
    def _store(self) -> TCPStore:
        """Where ranks find each other; every call takes keys of its own."""
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @property
    def pids(self) -> list[int]:
        """Ids of the live processes, by rank."""
        return [worker.process.pid for worker in self._workers if worker.alive]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, n: int) -> list[_Worker]:
        """The first ``n`` processes, started where missing or dead."""
        new = []
        environ = {**os.environ, **_torchrun_environ(0, 1, 0, self.threads)}
        while len(self._servers) < min(n, 2):
            self._servers.append(ForkServer(self.preload, self.threads, environ, START_TIMEOUT))
        for rank in range(n):
            if rank == len(self._workers):
                self._workers.append(_Worker(self._servers[rank % 2]))
            elif not self._workers[rank].alive:
                self._workers[rank].kill()
                self._workers[rank] = _Worker(self._servers[rank % 2])
            if not self._workers[rank].ready:
                new.append(self._workers[rank])
        if new:
            started = False
            try:
                reports = _collect(new, START_TIMEOUT)
                for report, worker in zip(reports, new, strict=True):
                    if report.failed:
                        report.detail = f"while starting\n{report.detail}\n{worker.stderr.take()}"
                    worker.ready = not report.failed
                if any(report.failed for report in reports):
                    raise RankError(reports)
                started = True
            finally:
                if not started:
                    for worker in new:
                        worker.kill()
        return self._workers[:n]


def _torchrun_environ(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store lives in the pool's process
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    for name in loopback:
        environ["GLOO_SOCKET_IFNAME"] = name
    return environ


def _collect(workers: Sequence[_Worker], timeout: float) -> list[RankReport]:
    """One message from each worker, or an account of why there is none."""
    start = time.monotonic()
    limit, others = start + timeout, Outcome.TIMED_OUT
    reports: dict[int, RankReport] = {}

    def add(rank: int, outcome: Outcome, **details: Any) -> None:
        nonlocal limit, others
        reports[rank] = RankReport(rank, outcome, after=time.monotonic() - start, **details)
        if reports[rank].failed and others is not Outcome.STOPPED:
            limit, others = min(limit, time.monotonic() + GRACE), Outcome.STOPPED

    while len(reports) < len(workers) and time.monotonic() < limit:
        pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in reports}
        # Short slices: a child of a dead rank may hold its end of the connection open.
        ready = wait(list(pending), timeout=max(0.0, min(0.2, limit - time.monotonic())))
        for connection, rank in pending.items():
            worker = workers[rank]
            if connection not in ready:
                if worker.alive or connection.poll():
                    continue
                add(rank, Outcome.DIED, detail=worker.exit_status())
                continue
            try:
                message = receive(connection)
            except (EOFError, OSError):
                add(rank, Outcome.DIED, detail=worker.exit_status())
                continue
            except Exception as error:
                add(rank, Outcome.RAISED, detail=f"its message cannot be read: {error!r}")
                continue
            if isinstance(message, Failed):
                add(rank, Outcome.RAISED, detail=message.traceback, error_type=message.error_type)
            elif isinstance(message, Done):
                try:
                    value = pickle.loads(message.value)
                except Exception as error:
                    add(rank, Outcome.RAISED, detail=f"its result cannot be unpickled: {error!r}")
                else:
                    add(rank, Outcome.RETURNED, value=value)
            else:
                add(rank, Outcome.RETURNED)
    outcome = others
    unfinished = [rank for rank in range(len(workers)) if rank not in reports]
    for rank, stacks in zip(unfinished, _stacks([workers[rank] for rank in unfinished]), strict=True):
        add(rank, outcome, detail=stacks)
    return [reports[rank] for rank in range(len(workers))]


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """The Python stacks of all threads of each worker."""
    for worker in workers:
        worker.signal(signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    sizes: list[int] = []
    while workers and time.monotonic() < deadline:
        time.sleep(0.05)
        before, sizes = sizes, [worker.stacks.size() for worker in workers]
        if before == sizes and all(sizes):
            break
    return [_without_reader(worker.stacks.take()) or "(it does not answer)" for worker in workers]


def _without_reader(stacks: str) -> str:
    """Leave out the thread that waits for the pool's messages."""
    blocks = re.split(r"\n\n(?=Thread |Current thread )", stacks)
    return "\n\n".join(block for block in blocks if "in _read_messages" not in block)


class _Log:
    """An unnamed file that a worker appends to and the pool reads and empties."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - closed by close()

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def take(self) -> str:
        text = os.pread(self.file.fileno(), self.size(), 0)
        self.file.truncate(0)
        return text.decode(errors="replace")

    def close(self) -> None:
        self.file.close()


class _Worker:
    """One rank process, seen from the pool."""

    def __init__(self, server: ForkServer) -> None:
        self.ready = False
        self.stdout, self.stderr, self.stacks = _Log(), _Log(), _Log()
        self.connection, theirs = Pipe()
        logs = (log.file.fileno() for log in (self.stdout, self.stderr, self.stacks))
        try:
            self.process = server.fork(theirs.fileno(), *logs)
        except BaseException:
            self.close()
            self._close_logs()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it died: found out when its answer is awaited
            send(self.connection, message)

    def signal(self, number: int) -> None:
        if self.alive:
            os.kill(self.process.pid, number)

    def exit_status(self) -> str:
        try:
            code = self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection without ending"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def close(self) -> None:
        """Tell it to end (it does so when the connection closes)."""
        self.connection.close()

    def kill(self, patience: float = 0.0) -> None:
        """Make sure that it, and whatever it started, is gone."""
        self.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.signal(signal.SIGKILL)  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close_logs()

    def _close_logs(self) -> None:
        for log in (self.stdout, self.stderr, self.stacks):
            log.close()

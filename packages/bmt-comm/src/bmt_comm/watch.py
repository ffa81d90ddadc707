"""A thread that detects why a job hangs, and reports it on all ranks.

[Note: the end of a job that has failed]
    Each rank has a watching thread. It raises the alarm when this rank has waited for an operation longer than the
    time-out, when another rank waits for another operation in its place, when an operation has failed because another
    rank cannot be reached, when an exception ends this rank, or when another process of this host has ended without
    :func:`bmt_comm.shutdown`. The alarm is a key in the rendezvous store, which all watching threads check a few times
    a second. Then every rank writes its status into the store. The rank that was first to raise the alarm, the
    reporter, reads the statuses of all ranks and writes the message, which all others read. If the reporter fails, too,
    another rank takes its place. Waits for operations raise an error with this message. A rank that does not wait, or
    cannot be woken, is ended, because its results are not needed.

    All this uses no communicator, and operations do not use the store. Only the reporter reads as many keys as there
    are ranks, and it reads many at a time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from .flight_recorder import write_record
from .journal import Wait, all_journals, place, waits
from .report import Status, Waiting, describe
from .startup import Peer
from .tally import missing, read_many

_PERIOD = 0.25  # seconds between two looks
_ANSWER = 1.0  # seconds that the ranks have to write their statuses
_MESSAGE = 0.4  # seconds after that in which the message must come
_PAUSE = 0.02  # seconds between two looks at what others have written
_SUSPICIOUS = 2.0  # seconds of a wait after which ranks compare their operations
_WAKE = 0.7  # seconds that the main thread has to raise the error
_OURS = ("bmt_comm", "bmt_zero", "bmt_tp", "bmt_pipe", "bmt_optim", "bmt_kernels", "bmtrain", "torch", "contextlib")
_ALARM, _SECOND_ALARM = "alarm", "alarm, the first reporter having failed"
_log = logging.getLogger("bmt_comm")
T = TypeVar("T")


class RankFailureError(RuntimeError):
    """A rank has failed, or is not where the others wait for it. The message names the rank and says where it is."""


class Watch:
    """Watches this rank, and the alarms of the others.

    Args:
        store: a store that nothing else uses; used by this object's thread.
        rank: of this process.
        size: the number of ranks.
        peers: the processes on this host, this one among them, by rank.
        timeout: seconds after which a wait fails.
        wake: called with a message that all waits of this process are to raise.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        peers: Mapping[int, Peer],
        timeout: float,
        wake: Callable[[str], None],
    ) -> None:
        self.rank, self.size, self.peers, self.timeout = rank, size, dict(peers), timeout
        self._store, self._wake = store, wake
        self._reason = ""  # why this rank raises the alarm
        self._raised = ""  # the traceback of the exception that ends this rank
        self._error = ""  # the first line of that exception
        self._main = threading.main_thread().ident
        self._news, self._concluded, self._delivered = threading.Event(), threading.Event(), threading.Event()
        self._stopping = False
        self._message = ""
        self._compared: dict[str, bool] = {}  # keys of waits that were compared, and whether this rank wrote them
        self._hook = sys.excepthook
        self._printing = threading.Lock()  # held while an exception that ends this rank is printed
        sys.excepthook = self._uncaught
        self._thread = threading.Thread(target=self._run, name="bmt-watch", daemon=True)
        self._thread.start()

    def stop(self, leaves: bool) -> None:
        """End the thread. ``leaves``: this rank ends without a failure, and the others may go on."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        self._stopping = True
        self._news.set()
        self._thread.join(2 * _ANSWER)
        if leaves and not self._thread.is_alive():
            self._write(f"left/{self.rank}", json.dumps({each.key: each.count for each in all_journals()}))

    def explain(self, error: Exception) -> Exception:
        """The exception to raise in place of ``error``, with which the wait of this thread has failed."""
        if self._stopping or os.getpid() != self.peers[self.rank].process:
            return error
        wait = waits.get(threading.get_ident())
        where = "" if wait is None else f" (in {wait.journal.name}, {wait.operation.name.decode()})"
        self._alarm(f"rank {self.rank}: {error}{where}")
        self._concluded.wait(_ANSWER + 1.0)
        message = self._message or describe(self._reason, {self.rank: self._status()}, self._processes(), self.size)
        self._delivered.set()
        return RankFailureError(message)

    def explain_by_another(self, error: Exception) -> Exception:
        """An exception that says that another rank has failed, if that is known within a second; else ``error``."""
        if self._stopping or os.getpid() != self.peers[self.rank].process or not self._concluded.wait(_ANSWER):
            return error
        self._delivered.set()
        return RankFailureError(self._message)

    # --- in any thread ----------------------------------------------------------------------------

    def _alarm(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._news.set()

    def _uncaught(self, kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        is_own = issubclass(kind, Exception) and not isinstance(error, RankFailureError) and not self._stopping
        with self._printing:
            self._hook(kind, error, stack)
            if is_own:
                self._delivered.set()
        if is_own:
            # Before it there may be lines of source, which are indented, and after it there may be notes.
            lines = traceback.format_exception_only(kind, error)
            self._error = next(line for line in lines if not line.startswith(" ")).splitlines()[0].strip()
            self._raised = "".join(traceback.format_exception(kind, error, stack))
            self._alarm(f"rank {self.rank} raised {self._error}")
            self._concluded.wait(_ANSWER + 1.0)

    def _status(self) -> Status:
        now = time.monotonic()
        frame = sys._current_frames().get(self._main or 0)
        waiting = [self._waiting(wait, now) for wait in list(waits.values())]
        groups = {}
        last: tuple[float, str] = (0.0, "")
        for journal in all_journals():
            entries = list(journal.last)
            names = {str(operation.number): operation.name.decode() for _, operation, _ in entries if operation.number}
            groups[journal.key] = (journal.count, names)
            if entries and entries[-1][0] > last[0]:
                begun, operation, where = entries[-1]
                number = f"operation {operation.number} of " if operation.number else ""
                text = f"{number}{journal.name}, {operation.name.decode()}"
                text += f", in {where}" if where else ""
                last = begun, f"its last operation was {text}, {now - begun:.1f} s ago"
        return Status(
            waiting=waiting,
            groups=groups,
            last=last[1],
            place=place(),
            line=_line_of_user(frame),
            stack="".join(traceback.format_stack(frame)) if frame is not None else "",
            raised=self._raised,
            error=self._error,
        )

    @staticmethod
    def _waiting(wait: Wait, now: float) -> Waiting:
        return Waiting(
            key=wait.journal.key,
            group=wait.journal.name,
            number=wait.operation.number,
            name=wait.operation.name.decode(),
            peers=list(wait.peers),
            seconds=now - wait.begun,
            place=wait.place,
        )

    def _processes(self) -> dict[int, str]:
        """The states of the processes on this host, by rank."""
        return {rank: peer.state() for rank, peer in self.peers.items()}

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._news.wait(_PERIOD)
            if self._stopping and not self._reason:
                return
            self._look()
            if self._reason:
                self._conclude()
                return

    def _look(self) -> None:
        """Look for a reason to raise the alarm, or for the alarm of another rank."""
        alarm = self._read(_ALARM)
        if alarm is not None:
            self._reason = json.loads(alarm)[1]
            return
        now = time.monotonic()
        late = next((w for w in list(waits.values()) if now - w.begun > (w.limit or self.timeout)), None)
        if self._reason:
            return
        self._compare(now)
        if self._reason:
            return
        if late is not None:
            self._reason = (
                f"rank {self.rank} has waited for {now - late.begun:.1f} seconds for {late.operation.name.decode()} "
                f"in {late.journal.name}"
            )
            return
        for rank, peer in self.peers.items():
            if rank == self.rank or peer.state() != "ended":
                continue
            left = self._read(f"left/{rank}")
            if self._store is not None and (left is None or self._needs(rank, json.loads(left))):
                self._reason = f"rank {rank} has ended"
                return

    @staticmethod
    def _needs(rank: int, counts: Mapping[str, int]) -> bool:
        """Whether this process waits for a collective that ``rank``, which has left, had not begun.

        ``counts``: how many it had begun, by the process group's name.
        """
        numbers = ((w.operation.number, counts.get(w.journal.key)) for w in list(waits.values()) if rank in w.peers)
        return any(count is not None and number > count for number, count in numbers)

    def _compare(self, now: float) -> None:
        """Raise the alarm if another rank waits for another operation in the place of the one that this rank waits for.

        The first rank that has waited for long writes the name of its operation. The others compare it with theirs.
        """
        long = [w for w in list(waits.values()) if w.operation.number and now - w.begun > _SUSPICIOUS]
        keys = {f"waits/{wait.journal.key}/{wait.operation.number}": wait for wait in long}
        for key in self._compared.keys() - keys.keys():
            if self._compared.pop(key):  # this rank has written it
                self._request(partial(_delete, key))
        for key in keys.keys() - self._compared.keys():
            journal, (number, name, _) = keys[key].journal, keys[key].operation
            mine = json.dumps([self.rank, name.decode()])
            first = self._request(partial(_write_first, key, mine))
            if first is None:
                return
            self._compared[key] = first == mine
            rank, theirs = json.loads(first)
            if theirs != name.decode():
                self._reason = (
                    f"ranks call different operations: rank {self.rank} is at operation {number} of {journal.name}, "
                    f"{name.decode()}, rank {rank} at {theirs}"
                )
                return

    def _conclude(self) -> None:
        """Write the status of this rank, get the message, and end the waits of this rank."""
        status = self._status()
        message = ""
        is_written = False
        for key, patience in ((_ALARM, _ANSWER), (_SECOND_ALARM, _MESSAGE)):
            mine = json.dumps([self.rank, self._reason])
            first = self._request(partial(_write_first, key, mine))
            if not is_written:
                is_written = True
                ended = {rank: state for rank, state in self._processes().items() if state in ("ended", "stopped")}
                self._write(f"status/{self.rank}", json.dumps([status, ended]))
                self._request(lambda store: store.add("statuses", 1))
            if first is None:
                break
            reporter, self._reason = json.loads(first)
            message = self._report(patience) if reporter == self.rank else self._read_message(patience + _MESSAGE)
            if message:
                break
        message = message or describe(self._reason, {self.rank: status}, self._processes(), self.size)
        folder = Path(os.environ.get("BMT_FAULT_DIR", tempfile.gettempdir()))
        path = folder / f"bmt-fault-rank{self.rank}-{os.getpid()}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{message}\n{write_record(folder, self.rank)}\n")
            message += f"\n(rank {self.rank} has written this to {path})"
        except Exception as error:  # of the recorder, too: the others wait for this rank to end
            _log.warning("the report of rank %d could not be written: %s", self.rank, error)
        self._message = message
        if self.rank == 0:
            self._wait_for_readers()
        self._concluded.set()
        if self._delivered.wait(0.1) or self._stopping:
            return
        try:
            self._wake(message)
        except Exception:
            _log.exception("the waits of rank %d could not be ended", self.rank)
        if self._delivered.wait(_WAKE) or self._stopping:
            return
        # torch's hook of exceptions lets another file be sys.stderr while it formats them.
        if self._printing.acquire(timeout=_ANSWER) and self._delivered.is_set():
            self._printing.release()
            return
        try:
            sys.stderr.write(f"{message}\nrank {self.rank} is ended\n")
            sys.stderr.flush()
        finally:  # stderr may be a pipe that nobody reads any more
            os._exit(1)

    def _report(self, patience: float) -> str:
        """Read the statuses of all ranks and write the message; "" if the store is lost."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._store is not None:
            written = self._request(lambda store: store.add("statuses", 0)) or 0
            ended = [rank for rank, state in self._processes().items() if state == "ended"]
            silent = self._missing(f"status/{rank}" for rank in ended) or []
            if written + len(silent) >= self.size:
                break
            time.sleep(_PAUSE)
        statuses, processes = self._read_statuses()
        if self._store is None:
            return ""
        message = describe(self._reason, statuses, processes, self.size)
        self._write("message", message)
        return message

    def _read_statuses(self) -> tuple[dict[int, Status], dict[int, str]]:
        """The statuses of the ranks, and the states of their processes, as far as they are known."""
        keys = [f"status/{rank}" for rank in range(self.size)]
        absent = self._missing(keys) or []
        present = sorted(set(range(self.size)) - set(absent))
        read = self._request(lambda store: read_many(store, [keys[rank] for rank in present])) or []
        statuses: dict[int, Status] = {}
        processes: dict[int, str] = {}
        for rank, (status, ended) in zip(present, map(json.loads, read)):
            statuses[rank] = status
            processes.update({int(other): state for other, state in ended.items()})
        processes.update(self._processes())
        alive = self._missing(f"left/{rank}" for rank in absent)
        if alive is not None:
            processes.update({rank: "ended" for index, rank in enumerate(absent) if index not in alive})
        return statuses, processes

    def _read_message(self, patience: float) -> str:
        """The message of the reporter; "" if it does not come within ``patience`` seconds."""
        pause = max(_PAUSE, self.size * 1e-4)  # the store serves all ranks
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._store is not None:
            message = self._read("message")
            if message is not None:
                self._request(lambda store: store.add("readers", 1))
                return message
            time.sleep(pause)
        return ""

    def _wait_for_readers(self) -> None:
        """Wait until the other ranks have read the message: this process may keep the store."""
        deadline = time.monotonic() + _MESSAGE
        while time.monotonic() < deadline and self._store is not None:
            written = self._request(lambda store: store.add("statuses", 0)) or 0
            if (self._request(lambda store: store.add("readers", 0)) or 0) >= written - 1:
                return
            time.sleep(_PAUSE)

    def _request(self, request: Callable[[Any], T]) -> T | None:
        """The answer of the store; None if the store is lost."""
        if self._store is None:
            return None
        try:
            return request(self._store)
        except RuntimeError:  # its process has ended
            self._store = None
            return None

    def _missing(self, keys: Iterable[str]) -> list[int] | None:
        listed = list(keys)
        return self._request(lambda store: missing(store, listed))

    def _read(self, key: str) -> str | None:
        """A value from the store; None if there is none."""
        return self._request(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _write(self, key: str, value: str) -> None:
        self._request(lambda store: store.set(key, value))


def _write_first(key: str, mine: str, store: Any) -> str:
    """Write ``mine`` unless another rank has written before; returns the value of the first rank."""
    return str(store.compare_set(key, "", mine).decode())


def _delete(key: str, store: Any) -> None:
    store.delete_key(key)


_current: Watch | None = None


def start(
    store: Any, rank: int, size: int, peers: Mapping[int, Peer], timeout: float, wake: Callable[[str], None]
) -> None:
    """Watch this rank from now on."""
    global _current
    _current = Watch(_own_connection(store, rank), rank, size, peers, timeout, wake)


def stop(leaves: bool) -> None:
    """Stop watching this rank. ``leaves``: it ends without a failure."""
    global _current
    watch, _current = _current, None
    if watch is not None and os.getpid() == watch.peers[watch.rank].process:
        watch.stop(leaves)


def explained(error: Exception) -> Exception:
    """The exception that a wait is to raise in place of the error with which it has failed."""
    watch = _current
    if watch is None or isinstance(error, RankFailureError):
        return error
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        return watch.explain(error)
    # Errors of other classes say what is wrong, but not whether an exception on another rank is the cause.
    return watch.explain_by_another(error)


_connection: tuple[object, Any] | None = None  # the last one: its target, and the store


def _own_connection(store: Any, rank: int) -> Any:
    """The store over a separate connection, which does not wait for requests of other threads.

    A process that uses the same store again keeps its connection. A new one would make the store look up the name of
    this host, which takes seconds if the name service is slow.
    """
    global _connection
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore) or not hasattr(base, "clone"):
        return store
    if rank == 0:
        store.set("name", uuid.uuid4().hex)
    name = store.get("name").decode()
    target = (base.host, base.port, os.getpid())
    if _connection is None or _connection[0] != target or not _answers(_connection[1]):
        _connection = target, base.clone()
    return dist.PrefixStore(name, _connection[1])


def _answers(store: Any) -> bool:
    try:
        store.check(["name"])
    except RuntimeError:
        return False
    return True


_LIBRARY = sysconfig.get_paths()["stdlib"]


def _line_of_user(frame: FrameType | None) -> str:
    """The innermost line of code that is not in a library."""
    innermost = frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in _OURS and not frame.f_code.co_filename.startswith((_LIBRARY, "<frozen ")):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no line of Python"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

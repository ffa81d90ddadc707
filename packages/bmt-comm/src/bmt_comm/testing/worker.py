"""The rank side of a pool: a process that runs one call after the other and tidies up in between."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

import bmt_comm
from bmt_comm.testing.protocol import (
    Call,
    Clean,
    CleanUp,
    Done,
    Failed,
    FormattedError,
    Ready,
    receive,
    send,
)


def main(connection_fd: int, threads: int) -> None:
    """Serve calls until the pool closes the connection."""
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(threads)
    rendezvous = _rendezvous_handlers["env"] = _Rendezvous()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, messages), daemon=True).start()
    collect_garbage = _GarbageCollection()
    collect_garbage()
    send(connection, Ready())
    while True:
        state = _State()
        call: Call = messages.get()
        rendezvous.begin(call.number, call.environ)
        _idle.clear()
        succeeded = _answer(connection, call)
        if succeeded and isinstance(messages.get(), CleanUp):
            _clean_up(connection, state, collect_garbage)
        _idle.set()


_idle = threading.Event()
_idle.set()


def _read_messages(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Pass messages on; when the pool's end closes, for whatever reason, end this process at once."""
    while True:
        try:
            messages.put(receive(connection))
        except (EOFError, OSError):
            if not _idle.is_set() and os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)  # busy: with all it may have started
            os._exit(0)


class _Rendezvous:
    """``env://`` rendezvous over one lasting connection to the pool's store, under new keys each time.

    Without new keys, the next ``init_process_group``, in the same call or another, would read the addresses that
    this one left in the store. Without the lasting connection, each would make the store look up the name of the
    connecting host, which stalls for seconds where name service is bad.
    """

    def __init__(self) -> None:
        self.ordinary = _rendezvous_handlers["env"]
        self.address: tuple[str | None, str | None] = (None, None)
        self.store: dist.Store | None = None
        self.call = 0
        self.times = 0  # in this call

    def begin(self, call: int, environ: dict[str, str]) -> None:
        self.call, self.times = call, 0
        if self.store is None:
            self.address = (environ["MASTER_ADDR"], environ["MASTER_PORT"])
            self.store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)

    def __call__(self, url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any) -> Iterator[Any]:
        if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != self.address:
            yield from self.ordinary(url, timeout=timeout, **kwargs)  # the call wants a store of its own
            return
        assert self.store is not None
        self.times += 1
        query = dict(parse_qsl(urlparse(url).query))
        rank, world_size = (int(query.get(k.lower(), os.environ.get(k, -1))) for k in ("RANK", "WORLD_SIZE"))
        store = dist.PrefixStore(f"call_{self.call}/rendezvous_{self.times}", self.store)
        store.set_timeout(timeout)
        yield store, rank, world_size


def _answer(connection: Connection, call: Call) -> bool:
    message: Done | Failed
    try:
        value = _run(call)
        try:
            message = Done(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            raise TypeError(f"the result, a {type(value).__name__}, cannot be pickled: {error}") from error
    except FormattedError as error:
        message = Failed(error.traceback, error.error_type)
    except BaseException as error:
        message = _failure(error)
    _flush()
    send(connection, message)
    return isinstance(message, Done)


def _run(call: Call) -> Any:
    os.environ.clear()
    os.environ.update(call.environ)
    os.chdir(call.directory)
    sys.path[:] = call.path
    if call.module is not None:
        call.module.import_or_load()
    function, args = pickle.loads(call.payload)
    return function(*args)


def _failure(error: BaseException) -> Failed:
    this_file = __file__
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code.co_filename == this_file and stack.tb_next is not None:
        stack = stack.tb_next
    text = "".join(traceback.format_exception(type(error), error, stack))
    return Failed(text, f"{type(error).__module__}.{type(error).__qualname__}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed by the call
            stream.flush()


class _State:
    """What a call may change about its process, as it was before; also gives the call fixed seeds."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self.default_dtype = torch.get_default_dtype()
        self.default_device = _default_device()
        self.threads = torch.get_num_threads()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self._seed()

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        torch.set_default_dtype(self.default_dtype)
        if _default_device() != self.default_device:
            torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)

    def _seed(self) -> None:
        random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds where there is no GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # of torch 2.6 and 2.7 after set_default_device(None)
        return torch.device("cpu")


class _GarbageCollection:
    """Collects garbage, and leaves out what imports have made.

    Modules are never garbage. A call may import large ones (torch._dynamo has a hundred thousand objects), and looking
    at them again after every call would take longer than most calls.
    """

    def __init__(self) -> None:
        self.modules = 0

    def __call__(self) -> None:
        gc.collect()
        if len(sys.modules) != self.modules:
            gc.freeze()
            self.modules = len(sys.modules)


def _clean_up(connection: Connection, state: _State, collect_garbage: _GarbageCollection) -> None:
    message: Clean | Failed = Clean()
    try:
        bmt_comm.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        state.restore()
        collect_garbage()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except BaseException as error:
        message = _failure(error)
    _flush()
    send(connection, message)

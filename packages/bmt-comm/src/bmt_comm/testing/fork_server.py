"""A process that has imported torch and forks ranks, because each import of torch takes seconds of processor time.

The server is a fresh interpreter without further threads, so a fork of it is like a new process that has imported the
same modules. Requests go over a socket: each request is one message, and so is each answer.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import BinaryIO

# The stack dump is set up before torch is imported, so that it also works for a server that hangs in the import.
_BOOTSTRAP = """
import faulthandler, json, sys
path, control, modules, threads = json.loads(sys.argv[1])
faulthandler.enable()
sys.path[:] = path
from bmt_comm.testing.fork_server import serve
serve(control, modules, threads)
"""
_NOT_ENDED = -(1 << 30)  # an answer that is no exit status


class ForkServer:
    """The pool's side of a server. Starts its process.

    Args:
        modules: imported before the first fork, where they are installed.
        threads: CPU threads per rank.
        environ: environment of the server, and of its forks at first.
        timeout: seconds that the server may take for its imports.
    """

    def __init__(self, modules: Sequence[str], threads: int, environ: Mapping[str, str], timeout: float) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout)
        self._asked = 0
        self._stderr: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps([sys.path, theirs.fileno(), list(modules), threads])],
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=[theirs.fileno()],
            env=dict(environ),
            start_new_session=True,  # an interrupt from the keyboard is the pool's to handle
        )
        theirs.close()

    def fork(self, connection: int, stdout: int, stderr: int, stacks: int) -> Fork:
        """Fork a rank that serves ``connection``. All arguments are file descriptors.

        Raises:
            RuntimeError: the server has ended, or does not answer.
        """
        return Fork(self, self._ask({"fork": True}, [connection, stdout, stderr, stacks]))

    def exit_status(self, pid: int) -> int | None:
        """The exit status of a fork, as ``subprocess.Popen.returncode`` has it; None while it runs."""
        status = self._ask({"status": pid})
        return None if status == _NOT_ENDED else status

    def close(self) -> None:
        """End the server. Its forks go on until their own connections close."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._stderr.close()

    def _ask(self, question: dict[str, int], descriptors: Sequence[int] = ()) -> int:
        self._asked += 1
        number, answer = 0, 0
        try:
            socket.send_fds(self._control, [json.dumps({**question, "number": self._asked}).encode()], descriptors)
            while number < self._asked:  # an interrupt may have left an earlier answer
                message = self._control.recv(64)
                if not message:
                    raise BrokenPipeError
                number, answer = map(int, message.split())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(
                f"the process that forks ranks has ended with exit code {self._process.wait()}\n{self._said()}"
            ) from error
        except OSError as error:
            raise RuntimeError(f"the process that forks ranks does not answer: {error}\n{self._said()}") from error
        return answer

    def _said(self) -> str:
        """What the server has written to its standard error: a traceback, where an import has failed."""
        return os.pread(self._stderr.fileno(), os.fstat(self._stderr.fileno()).st_size, 0).decode(errors="replace")


class Fork:
    """A forked process, seen from the pool, with as much of ``subprocess.Popen`` as the pool needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._server.exit_status(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        start, pause = time.monotonic(), 0.001
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - start > timeout:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return status


def serve(control_fd: int, modules: Sequence[str], threads: int) -> None:
    """Fork ranks until the pool closes its end."""
    from bmt_comm.testing import worker

    os.set_inheritable(control_fd, False)
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the objects that exist now are not garbage in any fork
    control = socket.socket(fileno=control_fd)
    ended: dict[int, int] = {}  # exit statuses: an answer may be lost, and the system tells each only once
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1024, 4)
        if not message:
            os._exit(0)
        question = json.loads(message)
        if "status" in question:
            answer = ended.get(question["status"], _NOT_ENDED)
            if answer == _NOT_ENDED:
                pid, status = os.waitpid(question["status"], os.WNOHANG)
                if pid:
                    answer = ended[pid] = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                _become_rank(worker, descriptors, threads)
            ended.pop(answer, None)
            for descriptor in descriptors:
                os.close(descriptor)
        control.send(f"{question['number']} {answer}".encode())


def _become_rank(worker: object, descriptors: Sequence[int], threads: int) -> None:
    """Run a fork, to its end."""
    try:
        os.setsid()
        connection, stdout, stderr, stacks = descriptors
        for descriptor, number in ((stdout, 1), (stderr, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        worker.main(connection, threads)  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

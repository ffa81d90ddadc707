"""The server side of :mod:`bmt_comm.testing.rules`: gets the operations of all ranks, and sends the results."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from multiprocessing.connection import Connection, Listener, wait
from types import TracebackType
from typing import Any

from bmt_comm.testing.protocol import receive, send
from bmt_comm.testing.rules import Operation, Rules


class Referee:
    """A thread that serves the ranks of one job; a context manager.

    Args:
        size: the number of ranks.

    Attributes:
        address: where ranks connect.
        rules: the operations of all ranks. Read it after the ranks have ended.
    """

    def __init__(self, size: int) -> None:
        self.rules = Rules(size)
        self._folder = tempfile.mkdtemp(prefix="bmt-referee-")
        self.address = os.path.join(self._folder, "socket")
        self._listener = Listener(self.address, "AF_UNIX", backlog=size)
        self._connections: dict[Connection, int] = {}
        self._sent_failure = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="bmt-referee", daemon=True)

    def __enter__(self) -> Referee:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        listening: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        while not self._stop.is_set():
            for ready in wait([listening, *self._connections], timeout=0.1):
                if ready is listening:
                    connection = self._listener.accept()
                    self._connections[connection] = receive(connection)
                    if self._sent_failure:  # before this rank connected
                        self._send(connection, ("failed", self.rules.failure))
                else:
                    self._handle_message(ready)  # type: ignore[arg-type]

    def _handle_message(self, connection: Connection) -> None:
        rank = self._connections[connection]
        try:
            kind, *details = receive(connection)
        except (EOFError, OSError):
            del self._connections[connection]
            connection.close()
            self.rules.leave(rank)
        else:
            if kind == "post":
                self._send_results(self.rules.post(details[0]))
            else:
                self.rules.wait(rank, *details)
        if self.rules.failure and not self._sent_failure:
            self._sent_failure = True
            for each in self._connections:
                self._send(each, ("failed", self.rules.failure))

    def _send_results(self, ended: list[Operation]) -> None:
        by_rank = {rank: connection for connection, rank in self._connections.items()}
        for each in ended:
            if each.rank in by_rank:
                received = [m.payload for m in each.messages if not m.sends]
                self._send(by_rank[each.rank], ("ended", each.number, received or each.results))

    def _send(self, connection: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # the rank is gone; the end of its connection is handled elsewhere
            send(connection, message)

"""What has failed on one rank of a group over several hosts, made known to the ranks that wait for it.

A rank whose call or wait raises sends no messages, and in shared memory it can say so, but not over gloo. It writes the
number of the collective, or that a collective has failed, into the store of the group instead. A thread of each other
rank looks there if a wait takes long.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

import torch.distributed as dist

from .operation import Operation

_SECONDS = 1.0  # between two looks
_FAILED = "failed"


class WaitingCollectives(Protocol):
    """Collectives, as far as this module uses them.

    Attributes:
        waits_for: the number of the collective that a thread waits for; 0: none.
    """

    waits_for: int

    def stop(self, why: str) -> None: ...


class Refusals:
    """What the ranks of one process group were refused.

    Args:
        store: of the process group.
        rank: of this process in the group.
        collectives: are stopped if they wait for a rank that was refused.
    """

    def __init__(self, store: dist.Store, rank: int, collectives: WaitingCollectives) -> None:
        self._store, self._rank, self._left = store, rank, threading.Event()
        arguments = weakref.ref(collectives), store, self._left
        self._thread = threading.Thread(target=_look, args=arguments, name="bmt_refusals", daemon=True)
        self._thread.start()
        self._telling: threading.Thread | None = None

    def tell(self, operation: Operation) -> None:
        """This rank does not take part in ``operation``, for the reason that its name says."""
        text = f"rank {self._rank} is at operation {operation.number}, {operation.name.decode()}"
        self._store.set(_key(operation.number), text)

    def tell_failure(self, error: BaseException) -> None:
        """A collective has failed on this rank, so no later one of the group can succeed. The first failure counts.

        The caller does not wait for the store, which may be gone.
        """
        text = f"a collective has failed on rank {self._rank}: {type(error).__name__}: {error}".split("\n")[0]
        store = self._store

        def write() -> None:
            with contextlib.suppress(RuntimeError):
                store.compare_set(_FAILED, "", text)

        self._telling = threading.Thread(target=write, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads
            self._telling.start()

    def told(self, number: int) -> str:
        """What a rank has told of collective ``number``; "" if none has, or the store does not answer in a second.

        Another rank of this host may have looked earlier, and have ended the wait of this rank by leaving.
        """
        texts: list[str | None] = []
        thread = threading.Thread(target=lambda: texts.append(_told(self._store, _key(number))), daemon=True)
        thread.start()
        thread.join(_SECONDS)
        return (texts[0] if texts else None) or ""

    def leave(self) -> None:
        """End the thread."""
        self._left.set()
        for thread in (self._thread, self._telling):
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(_SECONDS)


def _key(number: int) -> str:
    return f"refused/{number}"


def _look(reference: weakref.ref[WaitingCollectives], store: dist.Store, left: threading.Event) -> None:
    before = 0
    while not left.wait(_SECONDS):
        collectives = reference()
        if collectives is None:
            return
        number = collectives.waits_for
        if number and number == before:
            text = _told(store, _key(number), _FAILED)
            if text is None:
                return
            if text:
                collectives.stop(text)
                return
        before = number
        del collectives


def _told(store: dist.Store, *keys: str) -> str | None:
    """What the store has under the first key that it has; "": nothing; None: the store has gone with its host."""
    try:
        return next((store.get(key).decode() for key in keys if store.check([key])), "")
    except RuntimeError:
        return None

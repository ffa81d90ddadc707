"""A thread that receives and sends messages between two processes while this process does something else.

[Note: progress without a wait]
    Messages make progress while their process waits for one, or for a collective through shared memory. A process that
    waits for something else, such as a collective of gloo, or computes, would keep the others waiting. So a thread
    looks every few milliseconds for exchanges that have messages under way and that were not called since it last
    looked. It receives and sends in these, without a pause as long as the other process does, too. It sleeps while no
    message is under way.

    If an exchange raises there, the thread tries it again the next time, and goes on with the others. The first such
    exception is logged.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

from bmt_kernels.shared_memory import exchanges_between_two, members

_PERIOD = 5e-3  # seconds between two looks
_MOST = 0.1  # seconds that one exchange may take


class _ProgressThread:
    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._rests = self._stopped = self._has_failed = False

    def need(self) -> None:
        """A message is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        if self._rests:
            self._rests = False
            self._news.set()

    def _start(self) -> None:
        with self._starting:
            if (self._thread is None or not self._thread.is_alive()) and not self._stopped:
                thread = threading.Thread(target=self._run, name="bmt_messages", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        with self._starting:
            self._stopped = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(_PERIOD)
            self._news.clear()
            self._rests = True  # before it looks, so that what is sent meanwhile is noticed
            if self._progress_all():
                self._rests = False
            elif not self._stopped:
                self._news.wait()

    def _progress_all(self) -> bool:
        """Whether messages are under way after that."""
        under_way = False
        for exchange in members(exchanges_between_two):
            try:
                under_way |= exchange.progress_alone(_PERIOD, _MOST)
            except Exception:
                under_way = True
                if not self._has_failed:
                    logging.exception("bmt_kernels: the thread that receives and sends messages meets an error")
                self._has_failed = True
        return under_way


_thread = _ProgressThread()


def need_progress() -> None:
    """A message is under way: start or wake the thread."""
    _thread.need()


def _stop() -> None:
    """End the thread, which must not return from a call while the interpreter ends."""
    _thread.stop()


def _forget() -> None:
    """A forked process has no thread, and what it has of the exchanges is its parent's."""
    global _thread
    _thread = _ProgressThread()
    exchanges_between_two.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

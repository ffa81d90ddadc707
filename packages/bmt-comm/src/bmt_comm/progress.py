"""Collectives of one process group in flight, as ``torch.distributed`` has them: work objects and futures.

[Note: who runs a collective]
    Collectives of a group run one after the other, in the order of the calls. A call begins its collective at once, as
    far as that needs no waiting, so this rank's messages are on their way. The thread that waits runs the rest: that
    costs no switch between threads. A thread of the group runs collectives that no thread waits for: at once if a
    future or ``is_completed`` asks for them, and otherwise a few milliseconds later, so that other ranks need not wait
    for a rank that does something else.

    A thread that completes a future runs its callbacks, and they may wait for other collectives of the group. During
    the callbacks the thread is therefore not the thread of the group: another one is started if there is, or will be,
    anything to run. Afterwards it becomes the thread of the group again if there is no other.

[Note: exceptions out of signal handlers]
    They may be raised after any call of a function, also between acquiring the lock of the running collective and the
    next line. So the lock is acquired inside of the ``try`` that releases it, and only the thread that has it can
    release it. The group fails then, because the interrupted collective may have begun or not.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .work import Work

_GRACE = 5e-3  # seconds that the thread leaves to those that wait by themselves
_LAST_WAIT = 1.0  # seconds for callbacks that have not ended when the thread is ended
_NO_LIMIT = datetime.timedelta(0)
_FOR_EVER = threading.TIMEOUT_MAX


class HostWork(dist.Work):
    """Work on the host: streams have nothing to wait for."""

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize


class CollectiveWork(HostWork):
    """A collective in flight.

    Args:
        progress: of the process group.
        begin: called once; sends what can be sent, and returns the work to wait for.
        outputs: the result.
        finish: called once, after the wait.
        in_inference: whether tensors are inference tensors, which can be written only in ``torch.inference_mode``.
    """

    def __init__(
        self,
        progress: Progress,
        begin: Callable[[], Work],
        outputs: list[Any],
        finish: Callable[[], None] | None = None,
        in_inference: bool = False,
    ) -> None:
        super().__init__()
        self._progress, self._outputs = progress, outputs
        self._begin: Callable[[], Work] | None = begin
        self._finish = finish
        self._in_inference = in_inference
        self._begun: Work | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._error: Exception | None = None
        self._concluded = False
        self.done = False
        self.limit = 0.0  # seconds that a wait may take; 0: the time-out of the group
        self.number = 0  # in the order of the calls
        self.posted = 0.0

    # --- what torch calls -------------------------------------------------------------------------

    def wait(self, timeout: datetime.timedelta = _NO_LIMIT) -> bool:
        """Run all collectives up to this one, and raise the error of this one."""
        if not self.done:
            self._progress.run_until(self, timeout.total_seconds() if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        with self._progress.posting:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._concluded:
                    self.settle(self._future)
        self._progress.want(self)
        if not self.done and self._progress.stopped:  # there is no thread
            self._progress.run_until(self)
        return self._future

    def is_completed(self) -> bool:
        if not self.done:
            self._progress.want(self)
        return self.done

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        return self._outputs

    # --- called by Progress -----------------------------------------------------------------------

    def begin(self) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            try:
                self._begun = begin()
            except BaseException as error:
                self._fail(error)

    def run(self) -> None:
        """Wait for the collective. It is done afterwards, even if the wait is interrupted."""
        try:
            self.begin()
            if self._error is None and self._in_inference:
                with torch.inference_mode():
                    self._complete()
            elif self._error is None:
                self._complete()
        except BaseException as error:
            self._fail(error)
        finally:
            self._begun = self._finish = None  # and what they hold
            self.done = True

    def _fail(self, error: BaseException) -> None:
        interrupted = RuntimeError(f"a collective was interrupted in its middle ({type(error).__name__})")
        self._error = error if isinstance(error, Exception) else interrupted
        self._progress.owner.fail(error)
        if self._error is interrupted:
            raise error

    def _complete(self) -> None:
        assert self._begun is not None
        self._begun.wait()
        if self._finish is not None:
            self._finish()

    def conclude(self) -> torch.futures.Future[Any] | None:
        """The collective is done: a later future is settled at once. Returns an earlier one, to :meth:`settle`."""
        with self._progress.posting:
            self._concluded = True
            return self._future

    def settle(self, future: torch.futures.Future[Any]) -> None:
        if future.done():  # settled before an exception out of a signal handler
            return
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


class Owner(Protocol):
    """A process group, as its :class:`Progress` sees it."""

    def fail(self, error: BaseException) -> None:
        """A collective has failed, so no later one may succeed."""
        ...

    def stop_waits(self, why: str) -> None:
        """Make the wait in progress, in another thread, fail soon."""
        ...


class Progress:
    """Runs the collectives of one process group.

    Attributes:
        deadline: of the wait in progress, in seconds of :func:`time.monotonic`; None: the time-out of the group.
        owner: the process group.
        posting: a lock that is held only briefly.
        stopped: whether the thread was ended.
    """

    def __init__(self, owner: Owner) -> None:
        self.deadline: float | None = None
        self.owner = owner
        self.posting = threading.Lock()
        self._running: Any = threading.RLock()  # no thread acquires it twice
        self._queue: deque[CollectiveWork] = deque()
        self._to_begin: deque[CollectiveWork] = deque()
        self._number = self._wanted = 0
        self._thread: threading.Thread | None = None
        self._callback_threads: set[threading.Thread] = set()  # former ``_thread``s, which run callbacks of futures
        # Not an Event: an exception out of a signal handler may leave the lock of one locked.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False  # the thread has nothing to do
        self.stopped = False
        weakref.finalize(self, self._news.put, None)

    def post(self, work: CollectiveWork) -> CollectiveWork:
        """Add a collective to the queue, and begin it if no other one is being run."""
        with self.posting:
            self._number += 1
            work.number = self._number
            # In this order, so that even after an exception in between no collective is queued without being begun.
            self._to_begin.append(work)
            self._queue.append(work)
        self._begin_all()
        return work

    def run(self, begin: Callable[[], Work], finish: Callable[[], None], limit: float) -> None:
        """Run a collective that the caller waits for, after all collectives that were posted."""
        while True:
            while self._queue:
                self._run_first(self._number)
            self._be_outside()
            with self._running:
                if self._queue:
                    continue
                self.deadline = time.monotonic() + limit if limit else None
                try:
                    begin().wait()
                    finish()
                except BaseException as error:
                    self.owner.fail(error)
                    raise
                return

    def leave(self, work: CollectiveWork) -> CollectiveWork:
        """The caller does not wait for ``work`` now."""
        work.posted = time.monotonic()
        self._need_thread()
        if self._rests:
            self._news.put(None)
        return work

    def want(self, work: CollectiveWork) -> None:
        """Make the thread run all collectives up to ``work``."""
        if work.done:
            return
        is_news = work.number > self._wanted  # otherwise the thread knows already
        self._wanted = max(self._wanted, work.number)
        self._need_thread()
        if is_news:
            self._news.put(None)

    def run_until(self, work: CollectiveWork, limit: float = 0.0) -> None:
        """Run all collectives up to ``work``, or wait for another thread that does."""
        deadline = time.monotonic() + limit
        why = ""
        while not work.done:
            seconds = max(0.0, deadline - time.monotonic()) if limit else _FOR_EVER
            if not self._run_first(work.number, limit, seconds):
                why = f"a wait for a collective has reached its limit of {limit:g} seconds"
                self.owner.stop_waits(why)
                limit = 0.0  # the other thread needs a moment to end its wait
        if why and not work.is_success():
            raise RuntimeError(why) from work.exception()

    def stop(self) -> None:
        """End the thread. The caller has ended what it waits for."""
        with self.posting:
            self.stopped = True
            thread, self._thread = self._thread, None
        self._news.put(None)
        me = threading.current_thread()
        while thread is not None and thread not in (me, *self._callback_threads) and thread.is_alive():
            thread.join(_LAST_WAIT)
        for each in list(self._callback_threads):  # their callbacks may wait for collectives that will not run
            if each is not me:
                each.join(_LAST_WAIT)

    def settle_rest(self) -> None:
        """Settle the futures of collectives that no thread has run, after :meth:`stop`.

        Those on one host have their results if all messages have arrived. All others have an error: the waits have
        been ended.
        """
        while not self._running._is_owned() and any(work._future is not None for work in list(self._queue)):
            if not self._run_first(self._number, seconds=_LAST_WAIT):
                return  # another thread is running them

    def _begin_all(self) -> None:
        # Checked again after the lock is released: another thread may have added one in the meantime.
        while self._to_begin and not self._running._is_owned():
            try:
                if not self._running.acquire(blocking=False):
                    return
                self._begin_in_order()
            except BaseException as error:
                self.owner.fail(error)
                raise
            finally:
                try:  # noqa: SIM105 - no other call may come before the release
                    self._running.release()
                except RuntimeError:  # it was not acquired
                    pass

    def _begin_in_order(self) -> None:
        while self._to_begin:
            self._to_begin.popleft().begin()

    def _run_first(self, last: int, limit: float = 0.0, seconds: float = _FOR_EVER) -> bool:
        """Run the first collective in the queue, unless its number is above ``last``.

        Returns:
            False if another thread has been running one for ``seconds``.
        """
        self._be_outside()
        work = None
        try:
            if not self._running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
                return False
            self._begin_in_order()
            if not self._queue or self._queue[0].number > last:
                return True
            work = self._queue[0]
            try:
                if not work.done:  # an exception out of a signal handler may have left one that is done
                    limit = limit or work.limit
                    self.deadline = time.monotonic() + limit if limit else None
                    work.run()
            finally:
                if work.done:
                    self._queue.popleft()
        except BaseException as error:
            self.owner.fail(error)
            raise
        finally:
            try:
                self._running.release()
            except RuntimeError:
                pass
            finally:
                if work is not None and work.done:
                    self._conclude(work)
        if self._to_begin:
            self._begin_all()
        return True

    def _be_outside(self) -> None:
        if self._running._is_owned():
            raise RuntimeError("this thread waits for a collective in the middle of another one of the same group")

    def _conclude(self, work: CollectiveWork) -> None:
        """Settle the future of ``work``, if it has one."""
        future = work.conclude()
        if future is None:
            return
        thread = threading.current_thread()
        if thread is not self._thread:
            work.settle(future)
            return
        self._callback_threads.add(thread)
        try:
            self._thread = None
            if self._queue:
                self._need_thread()
            work.settle(future)
        finally:
            self._callback_threads.discard(thread)

    def _goes_on(self) -> bool:
        """Whether the calling thread is the thread of the group; it becomes that again after callbacks if none is."""
        thread = threading.current_thread()
        if self._thread is None:
            with self.posting:
                if self._thread is None and not self.stopped:
                    self._thread = thread
        return self._thread is thread and not self.stopped

    def _need_thread(self) -> None:
        if self._thread is not None:
            return
        with self.posting:
            if self._thread is None and not self.stopped:
                self._thread = threading.Thread(target=_run_in_thread, args=(weakref.ref(self),), daemon=True)
                self._thread.name = "bmt_progress"
                try:
                    self._thread.start()
                except BaseException:  # it may have started; then it finds that it is needed
                    self._thread = None
                    raise

    def _next(self) -> float | None:
        """Run the first collective if it is due: 0.0. Otherwise the seconds until it is due; None: none is queued."""
        try:
            first = self._queue[0]
        except IndexError:
            return None
        if first.number > self._wanted:
            delay = first.posted + _GRACE - time.monotonic() if first.posted else _GRACE
            if delay > 0:
                return delay
        self._run_first(first.number)
        return 0.0


def _run_in_thread(reference: weakref.ref[Progress]) -> None:
    while (progress := reference()) is not None and progress._goes_on():
        delay = progress._next()
        if delay == 0.0:
            continue
        if delay is None:
            progress._rests = True
            if progress._queue:  # posted before ``_rests`` was set
                progress._rests = False
                continue
        news = progress._news
        del progress
        with contextlib.suppress(queue.Empty):
            news.get(timeout=delay)
            while True:  # one look at the queue serves all of them
                news.get_nowait()
        if (progress := reference()) is not None:
            progress._rests = False

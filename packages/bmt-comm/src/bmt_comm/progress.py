"""Collectives of one process group in flight, as ``torch.distributed`` has them: work objects and futures.

[Note: who runs a collective]
    Collectives of a group run one after the other, in the order of the calls. A call begins its collective at once, as
    far as that needs no waiting, so what this rank has to send is on its way. The rest is run by whoever waits, in its
    own thread: that costs no switch between threads. What nobody waits for is run by a thread of the group: at once
    where a future or ``is_completed`` asks for it, and else a few milliseconds later, so that no other rank waits for
    one that has gone on to something else.

    A thread that tells of a future runs its callbacks, and they may wait for other collectives of the group. So the
    thread of the group is not that while it does so: another one takes its place if there is anything to run, or comes
    to be. Afterwards it is that again if no other one is.

[Note: exceptions out of signal handlers]
    They may come after any call of a function, also between taking the lock of what is run and the next line. So it is
    taken inside of the ``try`` that releases it, and it is a lock that only the thread which has it can release. The
    group is given up then: what was interrupted may have begun or not.
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


class CollectiveWork(dist.Work):
    """A collective in flight.

    Args:
        progress: of the process group.
        begin: called once; sends what can be sent, and returns what is to be waited for.
        outputs: the result.
        finish: called once, after that.
        in_inference: whether tensors are those of ``torch.inference_mode``, which can be written in it alone.
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
        self.limit = 0.0  # seconds that a wait may take; 0: as long as the group says
        self.number = 0  # in the order of the calls
        self.posted = 0.0

    # --- what torch calls -------------------------------------------------------------------------

    def wait(self, timeout: datetime.timedelta = _NO_LIMIT) -> bool:
        """Run everything up to this one, and raise what has gone wrong in it."""
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

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    # --- what the progress calls ------------------------------------------------------------------

    def begin(self) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            try:
                self._begun = begin()
            except BaseException as error:
                self._fail(error)

    def run(self) -> None:
        """Wait for it. It is done after that, also if the wait is interrupted."""
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
        self._progress.owner.give_up(error)
        if isinstance(error, Exception):
            self._error = error
            return
        self._error = RuntimeError(f"a collective was interrupted in its middle ({type(error).__name__})")
        raise error

    def _complete(self) -> None:
        assert self._begun is not None
        self._begun.wait()
        if self._finish is not None:
            self._finish()

    def conclude(self) -> torch.futures.Future[Any] | None:
        """It is done, as later futures know at once. Returns the one that :meth:`settle` has to tell, if any."""
        with self._progress.posting:
            self._concluded = True
            return self._future

    def settle(self, future: torch.futures.Future[Any]) -> None:
        if future.done():  # told before an exception out of a signal handler
            return
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


class Owner(Protocol):
    """A process group, to its progress."""

    def give_up(self, error: BaseException) -> None:
        """A collective has failed, so no later one may succeed."""
        ...

    def stop_waits(self, why: str) -> None:
        """Let the wait in progress, in another thread, fail soon."""
        ...


class Progress:
    """Runs the collectives of one process group.

    Attributes:
        deadline: of the wait in progress, as :func:`time.monotonic` says it; None: as long as the group says.
        owner: the process group.
        posting: a lock for a moment.
    """

    def __init__(self, owner: Owner) -> None:
        self.deadline: float | None = None
        self.owner = owner
        self.posting = threading.Lock()
        self._running: Any = threading.RLock()  # nobody takes it twice
        self._queue: deque[CollectiveWork] = deque()
        self._to_begin: deque[CollectiveWork] = deque()
        self._number = self._wanted = 0
        self._thread: threading.Thread | None = None
        self._tellers: set[threading.Thread] = set()  # that were it, and run callbacks of futures
        # Not an event, whose lock an exception out of a signal handler may leave locked.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False  # the thread has nothing to do
        self._stopped = False
        weakref.finalize(self, self._news.put, None)

    def post(self, work: CollectiveWork) -> CollectiveWork:
        """Add a collective to the queue and begin it, if no other one is being run."""
        with self.posting:
            self._number += 1
            work.number = self._number
            # In this order: what is waited for has its turn among what begins, also after an exception.
            self._to_begin.append(work)
            self._queue.append(work)
        self._begin_all()
        return work

    def run(self, begin: Callable[[], Work], finish: Callable[[], None], limit: float) -> None:
        """Run a collective that the caller waits for, after all that were posted."""
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
                    self.owner.give_up(error)
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
        """Let the thread run everything up to ``work``."""
        if work.done:
            return
        is_news = work.number > self._wanted  # else the thread has been told
        self._wanted = max(self._wanted, work.number)
        self._need_thread()
        if is_news:
            self._news.put(None)

    def run_until(self, work: CollectiveWork, limit: float = 0.0) -> None:
        """Run everything up to ``work``, or wait for another thread that does."""
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
        """End the thread, when what it waits for has been made to end."""
        with self.posting:
            self._stopped = True
            thread, self._thread = self._thread, None
        self._news.put(None)
        me = threading.current_thread()
        while thread is not None and thread not in (me, *self._tellers) and thread.is_alive():
            thread.join(_LAST_WAIT)
        for teller in list(self._tellers):  # whose callbacks may wait for what nobody will run
            if teller is not me:
                teller.join(_LAST_WAIT)

    def _begin_all(self) -> None:
        # Looked at again after the lock is free: another thread may have added one meanwhile.
        while self._to_begin and not self._running._is_owned():
            try:
                if not self._running.acquire(blocking=False):
                    return
                self._begin_in_order()
            except BaseException as error:
                self.owner.give_up(error)
                raise
            finally:
                try:  # noqa: SIM105 - nothing else is called before it
                    self._running.release()
                except RuntimeError:  # it was not taken
                    pass

    def _begin_in_order(self) -> None:
        while self._to_begin:
            self._to_begin.popleft().begin()

    def _run_first(self, last: int, limit: float = 0.0, seconds: float = _FOR_EVER) -> bool:
        """Run the first collective in the queue, if it is not later than number ``last``.

        Returns:
            Whether no other thread has been running one for ``seconds``.
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
                if not work.done:  # as one is that an exception out of a signal handler has left here
                    limit = limit or work.limit
                    self.deadline = time.monotonic() + limit if limit else None
                    work.run()
            finally:
                if work.done:
                    self._queue.popleft()
        except BaseException as error:
            self.owner.give_up(error)
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
        """Tell those that have asked for a future of ``work``."""
        future = work.conclude()
        if future is None:
            return
        thread = threading.current_thread()
        if thread is not self._thread:
            work.settle(future)
            return
        self._tellers.add(thread)
        try:
            self._thread = None
            if self._queue:
                self._need_thread()
            work.settle(future)
        finally:
            self._tellers.discard(thread)

    def _goes_on(self) -> bool:
        """Whether the thread that asks is that of the group, or is so again after callbacks."""
        thread = threading.current_thread()
        if self._thread is None:
            with self.posting:
                if self._thread is None and not self._stopped:
                    self._thread = thread
        return self._thread is thread and not self._stopped

    def _need_thread(self) -> None:
        if self._thread is not None:
            return
        with self.posting:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=_run_in_thread, args=(weakref.ref(self),), daemon=True)
                self._thread.name = "bmt_progress"
                try:
                    self._thread.start()
                except BaseException:  # it may have started; then it finds that it is needed
                    self._thread = None
                    raise

    def _next(self) -> float | None:
        """Run what is to be run in the thread; returns seconds until it may have to do something; None: for ever."""
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
            if progress._queue:  # posted before it was known that this rests
                progress._rests = False
                continue
        news = progress._news
        del progress
        with contextlib.suppress(queue.Empty):
            news.get(timeout=delay)
            while True:  # what follows looks at everything
                news.get_nowait()
        if (progress := reference()) is not None:
            progress._rests = False

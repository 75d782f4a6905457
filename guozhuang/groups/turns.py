"""Run a group's collectives one at a time in call order: on the caller's thread if no other waits, else on the group's own.

[Note: who runs what, and why in order]
Ranks synchronize in counted barriers, so every rank must run its collectives one at a time and in the order of the calls.
`Turns` ensures that. A collective is a job: a function that blocks until this rank's part is done.

- A synchronous call runs its job on the caller's own thread if no other job is waiting or running; that saves two
  thread switches, which cost several times as much as a small collective. "Running" means that the lock `_running` is held,
  as by every job from begin to end; "waiting" is `_num_waiting`, the submitted jobs that have not ended. Both are checked
  under `_order`, and an inline call acquires `_running` before it releases `_order`: so no job submitted later can run
  before it, and no job submitted earlier can still be waiting.
- All other calls put their job into a queue. One thread runs the queued jobs in order and holds `_running` during each. A
  synchronous call that had to queue waits for its work. `_num_waiting` is decreased only after a job has ended, so a later
  synchronous call that runs inline sees all effects of earlier jobs.
- Calls from several threads at the same time have no order that all ranks could share; each still gets a turn, and if
  the orders differ between ranks they raise, since every collective begins by comparing the ranks' requests.

A job that fails ends its own work with the exception; the jobs themselves decide what this means for later jobs.
The thread starts with the first submitted job. It is a daemon, because an ending interpreter must not wait for a peer
that never joins; it takes the GIL only between jobs and never holds torch's locks while it waits for a job.
A call made on this thread while it runs a job (by a finalizer, for example) would wait for itself: it raises.

[Note: who completes futures] Callbacks chained to a future run on the thread that completes it, and may themselves wait for
a collective (PyTorch's PowerSGD hook does). So the thread that runs jobs completes none: it passes them to a finisher, a
further thread that starts with the first future. One finisher completes, in order, all futures requested by other threads.
A future requested inside a callback may be one that a busy finisher waits for, so it goes to an idle or a new finisher.
A callback may therefore wait for any work, and for any future that it has requested itself.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from guozhuang.errors import UsageError, WorldError, explain

Job = Callable[[], object]


class DoneWork(dist._Work):
    """The work of a call whose job ended before the call returned."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True: a failed call raises instead of returning a work."""
        return True

    def exception(self) -> None:
        """Return None: a failed call raises instead of returning a work."""

    def synchronize(self) -> None:
        """Return at once."""

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """Return a completed future whose value is the tensors of the result."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


class QueuedWork(dist._Work):
    """The work of a call that was submitted to the group's thread.

    Args:
        job: the function that the thread calls.
        tensors: the tensors that hold the result; kept alive, with the job, until the work has ended.
        what: the call in words for errors, e.g. ``"all_reduce of 1024 float32"``.
        turns: the object whose thread runs the job.
    """

    def __init__(self, job: Job, tensors: Sequence[Tensor], what: str, turns: Turns) -> None:
        super().__init__()
        self._job: Job | None = job
        self._tensors, self._what, self._turns = tensors, what, turns
        self._error: BaseException | None = None
        self._ended = threading.Lock()  # held until the job has ended; a lock is the cheapest thing to wait for
        self._ended.acquire()
        self._completed = False
        self._futures = threading.Lock()  # guards the next attribute and the setting of _completed
        self._sources: list[tuple[Future[None], bool]] = []  # and whether a callback requested it

    def run(self) -> None:
        """Run the job; the group's thread calls this once."""
        assert self._job is not None
        failed = None
        try:
            self._job()
        except BaseException as error:
            failed = error
        self.end(failed)
        del failed  # its traceback refers to this frame, which would keep the job's tensors alive

    def end(self, error: BaseException | None = None) -> None:
        """Mark the job as ended; ``error`` is its exception, or the reason why it never began."""
        if error is not None:
            self._error = error
        self._job = None  # frees its tensors, which may be large
        with self._futures:
            self._completed = True
            sources, self._sources = self._sources, []
        self._ended.release()
        for source, is_nested in sources:
            self._turns.finishers.complete(source, is_nested)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait until the result is available.

        Args:
            timeout: the longest wait; 0: only the group's own time-out limits this job and those before it.

        Raises:
            PeerLost: a rank is gone or did not join.
            MismatchError: ranks called different collectives.
            WorldError: the job did not end within ``timeout``; it continues.
            UsageError: this thread is running the job, or one before it, so that it would wait for itself.
        """
        if not self._completed:
            self._turns.refuse_within(self._what)
            limit_s = timeout.total_seconds()
            if not self._ended.acquire(timeout=limit_s if limit_s > 0 else -1):
                text = explain(
                    f"{self._what} did not end within the {limit_s:g} s that this wait was given",
                    rank=self._turns.rank,
                    fix="wait longer, or look for the rank that has not called it",
                )
                raise WorldError(text)
            self._ended.release()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback refers to this frame
        return True

    def is_completed(self) -> bool:
        """Return whether the job has ended, with or without an error."""
        return self._completed

    def is_success(self) -> bool:
        """Return whether the job has ended without an error."""
        return self._completed and self._error is None

    def exception(self) -> BaseException | None:
        """Return the exception of the job, or None."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Wait, and return the tensors that hold the result."""
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the result tensors; it raises the job's error. See [Note: who completes futures]."""
        source: Future[None] = Future()
        # Setting an exception on a future ends the process inside DDP; a callback that raises does not.
        outcome = source.then(self._outcome)
        with self._futures:
            is_over = self._completed
            if not is_over:
                self._sources.append((source, isinstance(threading.current_thread(), _Finisher)))
        if is_over:
            source.set_result(None)
        return outcome

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return list(self._tensors)


class _Finisher(threading.Thread):
    """A thread that completes futures in the order in which it receives them; ``lock`` guards ``num_pending``."""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        super().__init__(name=name, daemon=True)
        self.sources: SimpleQueue[Future[None] | None] = SimpleQueue()
        self.num_pending, self._pending = 0, lock

    def run(self) -> None:
        """Complete futures from the queue, until None."""
        while (source := self.sources.get()) is not None:
            source.set_result(None)
            del source  # frees its callbacks, whose tensors may be large
            with self._pending:
                self.num_pending -= 1


class Finishers:
    """The threads that complete the futures of a group. See [Note: who completes futures]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[_Finisher] = []

    def complete(self, source: Future[None], is_nested: bool) -> None:
        """Have a thread complete a future. ``is_nested``: a callback requested it, so a busy finisher may be waiting for it."""
        with self._lock:
            thread = next((each for each in self._threads if not (is_nested and each.num_pending)), None)
            if thread is None:
                thread = _Finisher(f"{self._name}-futures-{len(self._threads)}", self._lock)
                thread.start()
                self._threads.append(thread)
            thread.num_pending += 1
        thread.sources.put(source)

    def close(self, patience_s: float) -> None:
        """End the threads after the last queued future; wait for each at most so many seconds."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.sources.put(None)
            if thread is not threading.current_thread():
                thread.join(patience_s)


class Turns:
    """Runs the collectives of a group one at a time in call order. See [Note: who runs what, and why in order].

    Args:
        name: the thread's name.
        rank: this process in the group, for errors.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.rank = rank
        self.finishers = Finishers(name)
        self._name, self._process = name, os.getpid()
        self._order = threading.RLock()  # a finalizer may close the group wherever this thread allocates
        self._running = threading.Lock()
        self._runner = 0  # the id of the thread that holds `_running`
        self._num_waiting = 0
        self._jobs: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed: BaseException | None = None
        self._last: Callable[[], None] | None = None

    def now(self, job: Job, tensors: Sequence[Tensor], what: str) -> dist.Work:
        """Run a job before returning, after all earlier jobs; raise its error."""
        if os.getpid() != self._process:
            refuse_fork(what, self._process, self.rank)
        inline = False
        try:
            with self._order:
                inline = self._num_waiting == 0 and self._closed is None and self._running.acquire(blocking=False)
            if inline:
                self._runner = threading.get_ident()
                job()
                return DoneWork(tensors)
        finally:
            if inline:
                self._runner = 0
                self._running.release()
        self.refuse_within(what)
        work = self.later(job, tensors, what)
        work.wait()
        return work

    def later(self, job: Job, tensors: Sequence[Tensor], what: str) -> QueuedWork:
        """Submit a job to the group's thread."""
        refuse_fork(what, self._process, self.rank)
        work = QueuedWork(job, tensors, what, self)
        with self._order:
            if self._closed is not None:
                raise self._closed
            if self._thread is None:
                self._thread = threading.Thread(target=self._work_off, name=self._name, daemon=True)
                self._thread.start()
            self._num_waiting += 1
            self._jobs.put(work)
        return work

    def refuse_within(self, what: str) -> None:
        """Raise UsageError if this thread is running a job: a wait for a later job would wait for itself."""
        if self._runner == threading.get_ident():
            fix = "start it with async_op=True, and wait for it elsewhere"
            raise UsageError(explain(f"{what} was waited for inside another collective", rank=self.rank, fix=fix))

    def close_later(self, error: BaseException, last: Callable[[], None]) -> bool:
        """On the group's thread: refuse further jobs, call ``last`` after the queued ones, return True. Elsewhere: False."""
        if threading.current_thread() is not self._thread:
            return False
        with self._order:
            self._last = last
            self._take_no_more(error)
        return True

    def close(self, error: BaseException, patience_s: float) -> bool:
        """Refuse further jobs (later calls raise ``error``), and end the threads after the queued jobs.

        Returns:
            True if no job runs any more, after a wait of at most ``patience_s`` seconds for each thread.
        """
        with self._order:
            self._take_no_more(error)
            thread = self._thread
        patience_s = max(patience_s, 0.0)
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience_s)
            if thread.is_alive():
                return False
        if not self._running.acquire(timeout=patience_s):  # a job is running inline on another thread of the user
            return False
        self._running.release()
        self.finishers.close(patience_s)
        return True

    def _take_no_more(self, error: BaseException) -> None:
        if self._closed is None:
            self._closed = error
            self._jobs.put(None)

    def _work_off(self) -> None:
        # A thread has its own gradient mode; the CPU jobs here need none of autograd.
        torch.set_grad_enabled(False)
        while (work := self._jobs.get()) is not None:
            with self._running:
                self._runner = threading.get_ident()
                work.run()
                self._runner = 0
            with self._order:
                self._num_waiting -= 1
            del work  # frees the work's tensors before the wait for the next job
        if self._last is not None:
            self._last()


def refuse_fork(what: str, process: int, rank: int) -> None:
    """Raise UsageError for a call of a group in a process that was forked from ``process``, the rank's own."""
    if os.getpid() != process:
        text = f"{what} was called in a process that was forked off; the group belongs to the rank alone"
        raise UsageError(explain(text, rank=rank, fix="call it in the rank's own process"))


def take_timeout(options: Any) -> float | None:
    """Return the time-out of one call in seconds, or None if the options leave it to the group."""
    limit: datetime.timedelta = options.timeout
    return limit.total_seconds() if limit.days >= 0 else None

"""Run a group's collectives one at a time in call order: on the caller's thread if no other waits, else on the group's own.

[Note: who runs what, and why in order]
Ranks synchronize in counted barriers, so every rank must run its collectives one at a time and in the order of the calls.
`Turns` ensures that. A collective is a job: a function that blocks until this rank's part is done.

- A synchronous call runs its job on the caller's own thread if no other job is waiting or running; that saves two
  thread switches, which cost several times as much as a small collective. "Running" means that the lock `_running` is held,
  as by every job from begin to end; "waiting" is `_num_waiting`, the submitted jobs that have not ended. An inline call sees
  that none waits, then acquires `_running`. A job that was submitted before the call is counted by then; one that is
  submitted meanwhile, by another thread, has no order with the call, and waits for `_running`.
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
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.watch.waits import waits

from .serial import NO_LIMIT, CallWork, Job, SerialThread, SerialWork

_pid = os.getpid()  # a global is read in a tenth of the time of a system call


def _remember_pid() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_remember_pid)


class QueuedWork(SerialWork):
    """The work of a call that was submitted to the group's thread.

    Args:
        job: the function that the thread calls.
        tensors: the tensors that hold the result; kept alive, with the job, until the work has ended.
        what: the call in words for errors, e.g. ``"all_reduce of 1024 float32"``.
        turns: the object whose thread runs the job.
    """

    def __init__(self, job: Job, tensors: Sequence[Tensor], what: str, turns: Turns) -> None:
        super().__init__(job, tensors)
        self._what, self._turns = what, turns

    @override
    def run(self) -> None:
        turns = self._turns
        with turns._running:
            turns._runner = threading.get_ident()
            super().run()
            turns._runner = 0
        with turns._order:
            turns._num_waiting -= 1

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        """Wait until the call has ended, as ``PendingWork.wait`` does.

        Raises:
            UsageError: this thread is running the job, or one before it, so that it would wait for itself.
        """
        if not self._completed:
            self._turns.refuse_within(self._what)
        return super().wait(timeout)

    @override
    def _at_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        finishers = self._turns.finishers
        return functools.partial(finishers.complete, callback, finishers.is_current)

    @override
    def _late(self, limit_s: float) -> WorldError:
        text = f"timed out: {self._what} did not end within the {limit_s:g} s that this wait was given"
        fix = "wait longer, or look for the rank that has not called it"
        return WorldError(explain(text, rank=self._turns.rank, fix=fix))


class Finishers:
    """The threads that complete the futures of a group. See [Note: who completes futures]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[SerialThread] = []
        self._num_pending: list[int] = []  # per thread: how many futures it has not completed yet

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on one of the finishers' threads, that is, inside a callback of a future."""
        return any(thread.is_current for thread in self._threads)

    def complete(self, callback: Callable[[], None], is_nested: bool) -> None:
        """Have a thread complete a future; not a busy thread if ``is_nested``: its callback may wait for this future."""
        with self._lock:
            idle = (i for i, num_pending in enumerate(self._num_pending) if not (is_nested and num_pending))
            at = next(idle, len(self._threads))
            if at == len(self._threads):
                self._threads.append(SerialThread(f"{self._name}-futures-{at}"))
                self._num_pending.append(0)
            self._num_pending[at] += 1
            self._threads[at].run(functools.partial(self._complete, callback, at))

    def _complete(self, callback: Callable[[], None], at: int) -> None:
        callback()
        with self._lock:
            self._num_pending[at] -= 1

    def close(self, patience_s: float) -> None:
        """End the threads after the last future that was requested; wait at most ``patience_s`` seconds for each thread."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.close()
            if not thread.is_current:
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
        self._process = _pid
        self._order = threading.RLock()  # reentrant: a finalizer may close the group while this thread holds it
        self._running = threading.Lock()
        self._runner = 0  # the id of the thread that runs a job now, and so holds `_running`; 0: none
        self._num_waiting = 0
        self._thread = SerialThread(name)
        self._closed: BaseException | None = None

    def now(self, job: Job, tensors: Sequence[Tensor], what: str) -> dist.Work:
        """Run a job after all earlier jobs, and return its work when the job has ended; raise the job's error."""
        if self.at_once(job):
            return CallWork(tensors)
        self.refuse_within(what)
        work = self.later(job, tensors, what)
        work.wait()
        return work

    def at_once(self, job: Job) -> bool:
        """Run a job on this thread if no other waits or runs; raise the job's error.

        Returns:
            False: another job waits or runs, or this one returned False, which says that it did nothing.
        """
        if self._num_waiting or _pid != self._process or not self._running.acquire(False):
            return False
        began_ns = 0
        try:
            if self._closed is not None:  # asked last: who closes waits for `_running` after that
                return False
            began_ns = waits.begin()
            self._runner = threading.get_ident()
            return job() is not False
        finally:
            self._runner = 0
            self._running.release()
            if began_ns:
                waits.end(began_ns)

    def later(self, job: Job, tensors: Sequence[Tensor], what: str) -> QueuedWork:
        """Submit a job to the group's thread, and return its work at once."""
        refuse_fork(what, self._process, self.rank)
        work = QueuedWork(job, tensors, what, self)
        with self._order:
            if self._closed is not None:
                raise self._closed
            self._num_waiting += 1
            self._thread.submit(work)
        return work

    def refuse_within(self, what: str) -> None:
        """Raise UsageError if this thread is running a job: a wait for a later job would wait for itself."""
        if self._runner == threading.get_ident():
            fix = "start it with async_op=True, and wait for it elsewhere"
            raise UsageError(explain(f"{what} was waited for inside another collective", rank=self.rank, fix=fix))

    def close_later(self, error: BaseException, last: Callable[[], None]) -> bool:
        """If called on the group's thread, refuse further jobs, run ``last`` after the queued ones, return True; else False."""
        if not self._thread.is_current:
            return False
        with self._order:
            if self._closed is None:
                self._thread.run(last)
            self._take_no_more(error)
        return True

    def close(self, error: BaseException, patience_s: float) -> bool:
        """Refuse further jobs (later calls raise ``error``), and end the threads after the queued jobs.

        Returns:
            True if no job runs any more, after a wait of at most ``patience_s`` seconds for each thread.
        """
        with self._order:
            self._take_no_more(error)
        patience_s = max(patience_s, 0.0)
        if not self._thread.is_current and not self._thread.join(patience_s):
            return False
        if not self._running.acquire(timeout=patience_s):  # a job is still running on one of the user's threads
            return False
        self._running.release()
        self.finishers.close(patience_s)
        return True

    def _take_no_more(self, error: BaseException) -> None:
        if self._closed is None:
            self._closed = error
            self._thread.close()


def refuse_fork(what: str, process: int, rank: int) -> None:
    """Raise UsageError if this process is not the rank's own, whose pid is ``process``, but was forked from it."""
    if _pid != process:
        text = f"{what} was called in a process that was forked off; the group belongs to the rank alone"
        raise UsageError(explain(text, rank=rank, fix="call it in the rank's own process"))


def take_timeout(options: Any) -> float | None:
    """Return the time-out of one call in seconds, or None if the options leave it to the group."""
    limit: datetime.timedelta = options.timeout
    return limit.total_seconds() if limit.days >= 0 else None

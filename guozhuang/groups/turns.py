"""The order of a group's collectives: one at a time, on the caller's thread where nothing waits, else on the group's own.

[Note: who runs what, and why in order]
Ranks meet in barriers that are counted, so every rank must run its collectives one at a time and in the order of the calls.
`Turns` sees to that. A collective is a job: a function that blocks until its part is done.

- A synchronous call runs its job on the caller's own thread if no other job is waiting or under way; that saves two
  changes of thread, several times the cost of a small collective. "Under way" is the lock `_running`, which a job holds from
  begin to end; "waiting" is `_num_waiting`, the jobs that were handed over and have not ended. Both are looked at under
  `_order`, and an inline call takes `_running` before it gives `_order` back: so nothing that is handed over later can run
  before it, and nothing that was handed over earlier can still be waiting.
- All other calls put their job into a queue. One thread takes jobs out in order; it holds `_running` during each. A
  synchronous call that had to queue waits for its work. `_num_waiting` falls only after a job has ended, so a later
  synchronous call that runs inline sees everything that earlier jobs did.
- Calls from several threads at the same time have no order that all ranks could share; here each gets its turn, and
  ranks that differ in them raise, since every collective begins by comparing what the ranks ask for.

A job that fails ends its own work with the exception; what that means for later jobs is the business of the jobs.
The thread starts with the first job that is handed over. It is a daemon, because an interpreter that ends must not wait
for a peer that never comes; it takes the GIL only between jobs and never holds torch's locks while it waits for a job.
A call that is made while this very thread runs a job (by a finalizer, say) could only wait for itself: it raises.

[Note: who completes futures] What is chained to a future runs where the future is completed, and may itself wait for a
collective (PyTorch's PowerSGD hook does). So the thread that runs jobs completes none: it hands them to a finisher, a further
thread that starts with the first of them. One finisher completes, in order, all futures that other threads asked for. A future
that was asked for by a callback may be what a busy finisher waits for; so it goes to one that has nothing to do, or to a
new one. A callback may therefore wait for any work, and for any future that it asked for itself.
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
    """The work of a call that ended before it returned."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always: a failed call raises."""
        return True

    def exception(self) -> None:
        """None: a failed call raises."""

    def synchronize(self) -> None:
        """Return at once."""

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """A future that has its value, the tensors of the result."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


class QueuedWork(dist._Work):
    """The work of a call that was handed to the group's thread.

    Args:
        job: what the thread does.
        tensors: what holds the result; kept alive, with the job, until the work has ended.
        what: for errors, e.g. ``"all_reduce of 1024 float32"``.
        turns: whose thread it is.
    """

    def __init__(self, job: Job, tensors: Sequence[Tensor], what: str, turns: Turns) -> None:
        super().__init__()
        self._job: Job | None = job
        self._tensors, self._what, self._turns = tensors, what, turns
        self._error: BaseException | None = None
        self._ended = threading.Lock()  # held until the job has ended: the cheapest thing to wait for
        self._ended.acquire()
        self._completed = False
        self._futures = threading.Lock()  # over the next attribute and the moment of completion
        self._sources: list[tuple[Future[None], bool]] = []  # and whether a callback asked for it

    def run(self) -> None:
        """Do the job; the group's thread calls it, once."""
        assert self._job is not None
        failed = None
        try:
            self._job()
        except BaseException as error:
            failed = error
        self.end(failed)
        del failed  # its traceback refers to this frame, and would keep what the job used

    def end(self, error: BaseException | None = None) -> None:
        """Say that the job has ended, with ``error`` if it was never begun."""
        if error is not None:
            self._error = error
        self._job = None  # what it holds may be large
        with self._futures:
            self._completed = True
            sources, self._sources = self._sources, []
        self._ended.release()
        for source, is_nested in sources:
            self._turns.finishers.complete(source, is_nested)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait until the result is there.

        Args:
            timeout: how long at most; 0 for as long as the group's own time-out lets this job, and those before it, last.

        Raises:
            PeerLost: a rank is gone or did not come.
            MismatchError: ranks asked for different collectives.
            WorldError: the job did not end within ``timeout``; it goes on.
            UsageError: the job, or one before it, is what runs on this thread.
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
        """Whether the job has ended, well or not."""
        return self._completed

    def is_success(self) -> bool:
        """Whether the job has ended well."""
        return self._completed and self._error is None

    def exception(self) -> BaseException | None:
        """What the job raised."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result; waits for it."""
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensors of the result; it raises what the job raised. See [Note: who completes futures]."""
        source: Future[None] = Future()
        # A future that is given an exception ends the process inside DDP; one whose callback raises does not.
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
    """A thread that completes futures in the order in which it is given them; ``lock`` is over ``num_pending``."""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        super().__init__(name=name, daemon=True)
        self.sources: SimpleQueue[Future[None] | None] = SimpleQueue()
        self.num_pending, self._pending = 0, lock

    def run(self) -> None:
        """Complete what comes, until None."""
        while (source := self.sources.get()) is not None:
            source.set_result(None)
            del source  # what hangs on it may be large
            with self._pending:
                self.num_pending -= 1


class Finishers:
    """The threads that complete the futures of a group. See [Note: who completes futures]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[_Finisher] = []

    def complete(self, source: Future[None], is_nested: bool) -> None:
        """Have a future completed; ``is_nested``: a finisher may be waiting for it."""
        with self._lock:
            thread = next((each for each in self._threads if not (is_nested and each.num_pending)), None)
            if thread is None:
                thread = _Finisher(f"{self._name}-futures-{len(self._threads)}", self._lock)
                thread.start()
                self._threads.append(thread)
            thread.num_pending += 1
        thread.sources.put(source)

    def close(self, patience_s: float) -> None:
        """End the threads once nothing is left to complete; wait for each at most so many seconds."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.sources.put(None)
            if thread is not threading.current_thread():
                thread.join(patience_s)


class Turns:
    """Gives each collective of a group its turn. See [Note: who runs what, and why in order].

    Args:
        name: of the thread.
        rank: for errors.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.rank = rank
        self.finishers = Finishers(name)
        self._name, self._process = name, os.getpid()
        self._order = threading.RLock()  # a finalizer may close the group wherever this thread allocates
        self._running = threading.Lock()
        self._runner = 0  # the thread that has `_running`
        self._num_waiting = 0
        self._jobs: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed: BaseException | None = None
        self._last: Callable[[], None] | None = None

    def now(self, job: Job, tensors: Sequence[Tensor], what: str) -> dist.Work:
        """Run a job before returning, when its turn has come; raises what the job raises."""
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
        """Hand a job to the group's thread."""
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
        """Raise UsageError where a wait for a job would wait for itself: on the thread that runs one."""
        if self._runner == threading.get_ident():
            fix = "start it with async_op=True, and wait for it elsewhere"
            raise UsageError(explain(f"{what} was waited for inside another collective", rank=self.rank, fix=fix))

    def close_later(self, error: BaseException, last: Callable[[], None]) -> bool:
        """On the thread that runs jobs: take no more, call ``last`` at its end and return True. Elsewhere: False."""
        if threading.current_thread() is not self._thread:
            return False
        with self._order:
            self._last = last
            self._take_no_more(error)
        return True

    def close(self, error: BaseException, patience_s: float) -> bool:
        """Take no more jobs (later calls raise ``error``), and end the threads after those that wait.

        Returns:
            Whether no job runs any more, after at most ``patience_s`` seconds for each thread.
        """
        with self._order:
            self._take_no_more(error)
            thread = self._thread
        patience_s = max(patience_s, 0.0)
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience_s)
            if thread.is_alive():
                return False
        if not self._running.acquire(timeout=patience_s):  # a job inline, on another thread of the user
            return False
        self._running.release()
        self.finishers.close(patience_s)
        return True

    def _take_no_more(self, error: BaseException) -> None:
        if self._closed is None:
            self._closed = error
            self._jobs.put(None)

    def _work_off(self) -> None:
        # The device of a CPU job does not matter, but inference and gradient modes are per thread.
        torch.set_grad_enabled(False)
        while (work := self._jobs.get()) is not None:
            with self._running:
                self._runner = threading.get_ident()
                work.run()
                self._runner = 0
            with self._order:
                self._num_waiting -= 1
            del work  # and with it the tensors
        if self._last is not None:
            self._last()


def refuse_fork(what: str, process: int, rank: int) -> None:
    """Raise UsageError in a process that was forked off ``process``, the rank's own, for a call of a group."""
    if os.getpid() != process:
        text = f"{what} was called in a process that was forked off; the group belongs to the rank alone"
        raise UsageError(explain(text, rank=rank, fix="call it in the rank's own process"))


def take_timeout(options: Any) -> float | None:
    """The time-out of one call in seconds, or None where the options leave it to the group."""
    limit: datetime.timedelta = options.timeout
    return limit.total_seconds() if limit.days >= 0 else None

"""Works (which callers wait for), a thread that runs jobs in order, and ``Lane``: such a thread with its own process group.

[Note: one order on all ranks] A method of several rounds issues later collectives when earlier ones have ended, which
happens at different moments on different ranks. Issued right at that moment, they would be paired with the wrong
collectives of other ranks. So each bucket is one job, a job runs all of its rounds before the next job begins, and jobs run
in the order in which the reducer starts buckets, which is the same on all ranks. Nothing else uses the lane's group:
collectives that the main thread issues meanwhile (buffers, batch norm, the user's own) need no order relative to it. With
two lanes and buckets alternating between them, one lane computes while the other sends.

[Note: streams of a serial thread] On an accelerator, the kernels of a job must run after those that the trainer launched
before it submitted the job, but not in the trainer's stream, or the trainer would wait for them. So ``run`` records an event;
the job runs in a stream of the thread that waits for this event, and records another event at its end; ``wait`` makes the
caller's stream wait for that one. The trainer touches a job's tensors only after ``wait``, and memory that the job
allocates belongs to the thread's stream.

[Note: threads at exit] A thread that still runs when the interpreter is finalized is ended by Python 3.13 and earlier where it
next takes the global lock. Inside torch, which gives the lock up also to free a store, that is an abort of the process:
"terminate called without an active exception". All serial threads are told to end at exit, and that is when they free what
they held. So the exit waits for them, but not long for one that is stuck in a job.
"""

from __future__ import annotations

import contextlib
import datetime
import heapq
import itertools
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future
from typing_extensions import override

from ..errors import WorldError, explain
from ..watch.waits import waits
from .profiling import recorded
from .subgroups import twin

Job: TypeAlias = Callable[[], object]
NO_LIMIT: Final = datetime.timedelta(0)


class CallWork(dist._Work):
    """A ``torch.distributed`` work of a call that ended before it returned; base class of works that end later.

    Args:
        tensors: the tensors that hold the result.
    """

    _error: BaseException | None = None

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        """Wait until the call has ended; raise its error.

        Args:
            timeout: the longest wait; 0: only the limit of the call itself. The call continues if this wait times out.
        """
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return True

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the call's error; None while it runs or after success."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Wait, and return the tensors that hold the result."""
        self.wait()
        return list(self._tensors)

    def before_end(self, last: Callable[[], None]) -> None:
        """Call ``last``, which must not wait, before the waiting threads wake: on the thread that ends the call, or now."""
        last()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors of the result; it raises the call's error."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


class PendingWork(CallWork):
    """The work of a call that ends later, on another thread."""

    _completed = False
    _ended: threading.Lock | None = (
        None  # held until the call has ended, if a thread waits; the cheapest thing to wait for
    )
    _callbacks: Sequence[Callable[[], None]] = ()
    _last: Callable[[], None] | None = None

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        self._guard = threading.Lock()  # guards ``_callbacks``, ``_ended``, and the change of ``_completed``

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        """Wait until the call has ended; raise its error. The argument is that of ``CallWork.wait``.

        Raises:
            PeerLost: a rank is gone or did not join.
            MismatchError: ranks made different calls.
            WorldError: the call did not end within ``timeout``, or failed for another reason.
        """
        if not self._completed:
            with self._guard:
                if not self._completed and self._ended is None:
                    self._ended = threading.Lock()
                    self._ended.acquire()
            limit_s = timeout.total_seconds()
            if self._ended is not None:
                began_ns = waits.begin()
                try:
                    if not self._ended.acquire(timeout=limit_s if limit_s > 0 else -1):
                        raise self._late(limit_s)
                finally:
                    waits.end(began_ns)
                self._ended.release()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback keeps this frame, and so would keep the work
        return True

    @override
    def is_completed(self) -> bool:
        return self._completed

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended, with or without an error: on the thread that ends it, or now if it has."""
        with self._guard:
            if not self._completed:
                self._callbacks = [*self._callbacks, self._at_end(callback)]
                return
        callback()

    @override
    def before_end(self, last: Callable[[], None]) -> None:
        with self._guard:
            if not self._completed:
                self._last = last
                return
        last()

    def _at_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return the function to call for ``callback`` on the thread that ends the call; a subclass may use another thread."""
        return callback

    def end(self, error: BaseException | None = None) -> None:
        """Mark the call as ended and wake the waiting threads, which raise ``error`` if it is given. Later calls do nothing."""
        with self._guard:
            if self._completed:
                return
            if self._last is not None:
                self._last()
            self._error, self._completed = error, True
            callbacks, self._callbacks = self._callbacks, ()
            if self._ended is not None:
                self._ended.release()
        for callback in callbacks:
            callback()

    @override
    def get_future(self) -> Future[list[Tensor]]:
        source: Future[None] = Future()
        # Setting an exception on a future ends the process inside DDP; a callback that raises does not.
        outcome = source.then(lambda _: self.result())
        self.when_done(lambda: source.set_result(None))
        return outcome

    def _late(self, limit_s: float) -> WorldError:
        """Return the error of a wait that timed out."""
        return WorldError(explain(f"timed out: a call did not end within the {limit_s:g} s that this wait was given"))


class SerialWork(PendingWork):
    """The work of a job that a ``SerialThread`` runs.

    Args:
        job: the function that the thread calls; None if the work is ended without one.
        tensors: the tensors that hold the result; kept alive until the work is gone.
    """

    def __init__(self, job: Job | None = None, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        self._job = job
        # Recorded at the job's end, one event per accelerator. See [Note: streams of a serial thread].
        self._launched: list[tuple[torch.device, torch.Event]] = []

    @override
    def is_completed(self) -> bool:
        return self._completed and all(event.query() for _, event in self._launched)

    @override
    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        super().wait(timeout)
        for device, event in self._launched:
            torch.accelerator.current_stream(device).wait_event(event)
        return True

    def run(self) -> None:
        """Run the job; the thread calls this once."""
        assert self._job is not None
        failed = None
        try:
            self._job()
        except BaseException as error:
            failed = error
            _free_locals(error)
        self.end(failed)
        del failed  # the error's traceback refers to this frame, which would keep the job's tensors alive

    @override
    def end(self, error: BaseException | None = None) -> None:
        self._job = None  # frees the job's tensors, which may be large
        super().end(error)


_Entry: TypeAlias = tuple[float, int, SerialWork | None]

_EXIT_S = 2.0  # what all threads together have to end at exit
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _wait_at_exit() -> None:
    """Wait for the threads that were told to end: [Note: threads at exit]."""
    deadline_s = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(deadline_s - time.monotonic(), 0.0))


# Finalizers run in the reverse of their order at exit: this one after those of all threads, and of what their jobs wait for.
weakref.finalize(_wait_at_exit, _wait_at_exit)


class SerialThread:
    """Runs jobs one after the other in a daemon thread of its own, which starts with the first job.

    Args:
        name: the thread's name.
        what: a word for a job of this thread. After a job has raised, every later job raises an error with this word: the order
            of collectives may now differ between ranks. "": later jobs run all the same.
    """

    def __init__(self, name: str, what: str = "") -> None:
        self._name, self._what = name, what
        self._jobs: queue.SimpleQueue[_Entry] = queue.SimpleQueue()  # its ``put`` is safe in a finalizer
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, job: Job, devices: Iterable[torch.device] = (), urgency: float = 0) -> SerialWork:
        """Submit a job and return its work at once.

        Args:
            job: called in the thread, without autograd.
            devices: devices of the job's tensors; see [Note: streams of a serial thread]. CPUs are ignored.
            urgency: the waiting job with the lowest number runs first; among equals the one submitted first.
        """
        work = SerialWork(job)
        accelerators = [device for device in devices if device.type != "cpu"]
        if accelerators:
            work._job = self._in_streams(job, work, accelerators)
        self.submit(work, urgency)
        return work

    def submit(self, work: SerialWork, urgency: float = 0) -> None:
        """Submit the job of a work that the caller has made, as ``run`` does with its own; return at once."""
        if not self.is_alive:  # not started yet, or lost by a fork
            arguments = self._jobs, self._what
            thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            thread.start()
            _threads.add(thread)
            self._thread = thread  # only now, because another thread may call join() meanwhile
            # The thread keeps only the queue alive: when this object is collected, the None in the queue ends the thread.
            weakref.finalize(self, self._jobs.put, (float("inf"), next(self._numbers), None))
        self._jobs.put((urgency, next(self._numbers), work))

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running; False before the first job, and in a forked child until it submits a job."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, that is, inside one of its jobs."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Make the thread end after all submitted jobs, the least urgent ones included. Does not wait."""
        self._jobs.put((float("inf"), next(self._numbers), None))

    def join(self, timeout_s: float | None) -> bool:
        """Wait at most ``timeout_s`` seconds (None: without limit) until the thread has ended; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_alive

    def _in_streams(self, job: Job, work: SerialWork, devices: Iterable[torch.device]) -> Job:
        """Return a job that runs ``job`` in streams; it keeps no reference to self. See [Note: streams of a serial thread]."""
        behind = []
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            behind.append((device, self._streams[device], torch.accelerator.current_stream(device).record_event()))

        def run() -> None:
            with contextlib.ExitStack() as stack:
                for _, stream, ready in behind:
                    stack.enter_context(stream)
                    stream.wait_event(ready)
                job()
                work._launched = [(device, stream.record_event()) for device, stream, _ in behind]

        return run


class Lane(SerialThread):
    """A serial thread with a process group of its own. Every rank must construct it, and submit equal jobs in equal order.

    Args:
        group: the ranks; the lane makes a second group of them.

    Attributes:
        group: that second group, for the collectives of the jobs only.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__("guozhuang exchange", "exchange")
        self.group = twin(group)

    @override
    def run(self, job: Job, devices: Iterable[torch.device] = (), urgency: float = 0) -> SerialWork:
        if recorder := getattr(self.group, "recorder", None):  # a group of a fake world
            done: SerialWork = recorder.run(self, job)
            return done
        if not profiler._is_profiler_enabled:
            return super().run(job, devices, urgency)
        # The collectives inside the job run on a thread that no profiler records; so the job is an event.
        return recorded("guozhuang:exchange", [], partial(super().run, job, devices, urgency))


def _work(jobs: queue.SimpleQueue[_Entry], what: str) -> None:
    torch.set_grad_enabled(False)  # the mode is per thread, and on in a new thread
    failed: BaseException | None = None
    waiting: list[_Entry] = []
    while True:
        while not waiting or not jobs.empty():
            heapq.heappush(waiting, jobs.get())
        work = heapq.heappop(waiting)[2]
        if work is None:
            return
        if failed is None:
            work.run()
            failed = work.exception() if what else None
        else:
            text = f"an earlier {what} failed: {failed}"
            error = WorldError(explain(text, fix="let that error end the process"))
            error.__cause__ = failed
            work.end(error)
        del work  # frees the work's tensors before the wait for the next job


def _free_locals(failed: BaseException) -> None:
    """Free the variables of the ended calls in an error's traceback: these may refer to the owner of the thread."""
    error: BaseException | None = failed
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

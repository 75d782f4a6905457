"""A thread that runs jobs one after the other, and a lane: such a thread with a process group of its own.

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
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..errors import WorldError, explain
from .subgroups import twin

Job: TypeAlias = Callable[[], None]


class SerialWork:
    """A job that was submitted to a serial thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._launched: list[tuple[torch.device, torch.Event]] = []  # see [Note: streams of a serial thread]

    def is_completed(self) -> bool:
        """Return, without waiting, whether the job has ended."""
        return self._ended.is_set() and all(event.query() for _, event in self._launched)

    def wait(self) -> None:
        """Wait until the job has ended; raise its error. No limit: its collectives have that of their group."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        for device, event in self._launched:
            torch.accelerator.current_stream(device).wait_event(event)

    def end(self, error: BaseException | None = None) -> None:
        """Wake the waiting threads, which raise ``error`` if there is one. Calls after the first do nothing."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


_Entry: TypeAlias = tuple[float, int, Job | None, SerialWork]


class SerialThread:
    """Runs jobs one after the other in a daemon thread of its own, which starts with the first job.

    After a job has raised, every later job raises too: the order of collectives may now differ between ranks.

    Args:
        name: of the thread.
        what: a word for a job of this thread, for the text of that error.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._jobs: queue.SimpleQueue[_Entry] = queue.SimpleQueue()  # a finalizer may put to it
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, job: Job, devices: Iterable[torch.device] = (), urgency: float = 0) -> SerialWork:
        """Submit a job and return at once.

        Args:
            job: called in the thread, without autograd.
            devices: devices of the job's tensors; see [Note: streams of a serial thread]. CPUs are ignored.
            urgency: the waiting job with the lowest number runs first; among equals the one submitted first.
        """
        if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
            arguments = self._jobs, self._what
            self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            # The thread refers to the queue, not to this object, so the thread ends when this object is collected.
            weakref.finalize(self, self._jobs.put, (float("inf"), next(self._numbers), None, SerialWork()))
        work = SerialWork()
        accelerators = [device for device in devices if device.type != "cpu"]
        if accelerators:
            job = self._in_streams(job, work, accelerators)
        self._jobs.put((urgency, next(self._numbers), job, work))
        return work

    def close(self) -> None:
        """Make the thread end after all submitted jobs, the least urgent ones included. Does not wait."""
        self._jobs.put((float("inf"), next(self._numbers), None, SerialWork()))

    def join(self, timeout_s: float | None) -> bool:
        """Wait at most so many seconds (None: without limit) until the thread has ended; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _in_streams(self, job: Job, work: SerialWork, devices: Iterable[torch.device]) -> Job:
        """See [Note: streams of a serial thread]. The returned job must not refer to this object: it could not be collected."""
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
        group: the ranks; the lane makes a twin of it.

    Attributes:
        group: the twin, for the collectives of the jobs only.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__("guozhuang exchange", "exchange")
        self.group = twin(group)


def _work(jobs: queue.SimpleQueue[_Entry], what: str) -> None:
    failed: BaseException | None = None
    waiting: list[_Entry] = []
    while True:
        if not waiting:
            heapq.heappush(waiting, jobs.get())
        with contextlib.suppress(queue.Empty):
            while True:
                heapq.heappush(waiting, jobs.get_nowait())
        _, _, job, work = heapq.heappop(waiting)
        if job is None:
            return
        error: BaseException | None = None
        try:
            if failed is not None:
                text = f"an earlier {what} failed: {failed}"
                raise WorldError(explain(text, fix="let that error end the process")) from failed
            with torch.no_grad():
                job()
        except BaseException as raised:
            error = raised
            failed = failed or raised
        job = None  # frees the job's tensors before the wait for the next job
        work.end(error)

"""A thread that runs jobs one after the other, and the group of a method that sends from such a thread.

[Note: one order on all ranks] A method of several rounds issues its later collectives when earlier ones have ended, which is
not at the same moment on all ranks. Issued from wherever they happen to end, they would meet the wrong collectives of other
ranks. So a bucket is one job, a job runs all of its rounds before the next one begins, and jobs run in the order in which the
reducer starts buckets, which is the same everywhere. Nothing else uses the lane's group: collectives that the main thread
issues in the meantime (buffers, batch norm, the user's own) have no order towards it and need none. Two lanes, with buckets in
turn, let one compute while the other sends.

[Note: streams of a serial thread] On an accelerator, the kernels of a job must follow those that the trainer had launched when
it handed the job over, and must not stand in the trainer's stream, or the trainer would wait for them. So ``run`` records an
event, the job runs in a stream of the thread behind that event, and records another one at its end; ``wait`` puts that event
before what the caller launches next. The trainer touches a job's tensors only after ``wait``, and memory that the job allocates
belongs to the thread's stream.
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
    """A job that was handed to a serial thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._launched: list[tuple[torch.device, torch.Event]] = []  # see [Note: streams of a serial thread]

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the job has ended."""
        return self._ended.is_set() and all(event.query() for _, event in self._launched)

    def wait(self) -> None:
        """Return when the job has ended; raise what it raised. The collectives inside have the limit of their group."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        for device, event in self._launched:
            torch.accelerator.current_stream(device).wait_event(event)

    def end(self, error: BaseException | None = None) -> None:
        """Let the waiting threads go on, or raise ``error`` there. The first call counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


_Entry: TypeAlias = tuple[float, int, Job | None, SerialWork]


class SerialThread:
    """Runs jobs one after the other in a daemon thread of its own, which starts with the first job.

    After a job that raised, every later job raises too: ranks no longer agree on what comes next.

    Args:
        name: of the thread.
        what: a job of this thread, for the text of that error.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._jobs: queue.SimpleQueue[_Entry] = queue.SimpleQueue()  # may be put to within a garbage collection
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, job: Job, devices: Iterable[torch.device] = (), urgency: float = 0) -> SerialWork:
        """Hand over a job; return at once.

        Args:
            job: called in the thread, without autograd.
            devices: of the job's tensors, whose streams are taken care of; CPUs have none.
            urgency: of the jobs that wait the one with the least goes first; among equals the one that came first.
        """
        if self._thread is None or not self._thread.is_alive():  # also in a forked child, which has no thread of ours
            arguments = self._jobs, self._what
            self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            # The thread holds the queue, not this object: with the last reference to this object it ends.
            weakref.finalize(self, self._jobs.put, (float("inf"), next(self._numbers), None, SerialWork()))
        work = SerialWork()
        accelerators = [device for device in devices if device.type != "cpu"]
        if accelerators:
            job = self._in_streams(job, work, accelerators)
        self._jobs.put((urgency, next(self._numbers), job, work))
        return work

    def close(self) -> None:
        """End the thread after all jobs that were handed over, the least urgent ones too. Does not wait."""
        self._jobs.put((float("inf"), next(self._numbers), None, SerialWork()))

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the thread has ended, for so many seconds at most (None: without a limit); tell whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _in_streams(self, job: Job, work: SerialWork, devices: Iterable[torch.device]) -> Job:
        """See [Note: streams of a serial thread]. The result must not hold this object, as the thread must not."""
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
    """A serial thread with a group of its own. Every rank must construct it, and hand it equal jobs.

    Args:
        group: the ranks; a twin of it is made for the lane.

    Attributes:
        group: for the jobs, and nothing else.
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
        job = None  # its tensors must not stay until the next one comes
        work.end(error)

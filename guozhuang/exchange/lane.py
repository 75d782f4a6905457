"""A thread with a group of its own, in which exchanges of several rounds overlap backward and keep one order.

[Note: one order on all ranks] A method of several rounds issues its later collectives when earlier ones have ended, which is
not at the same moment on all ranks. Issued from wherever they happen to end, they would meet the wrong collectives of other
ranks. So a bucket is one job, a job runs all of its rounds before the next one begins, and jobs run in the order in which the
reducer starts buckets, which is the same everywhere. Nothing else uses the lane's group: what the main thread issues in the
meantime (buffers, batch norm, the user's own) has no order towards it and needs none. Two lanes, with buckets in turn, let
one compute while the other sends.

[Note: streams of a lane] On an accelerator, what a job launches must stand behind what the trainer had launched when it handed
the job over, and must not stand in the trainer's stream. So ``run`` records an event, the job runs in a stream of the lane
behind that event, and records another at its end; ``wait`` puts that one before what the caller launches next. The trainer
touches a job's tensors only after ``wait``, and memory that the job allocates belongs to the lane's stream.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import WorldError, explain
from ..groups.subgroups import twin

_Job = Callable[[], None]


class LaneWork:
    """A job that was handed to a lane."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._launched: tuple[torch.device, torch.Event] | None = None  # see [Note: streams of a lane]

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the job has ended."""
        return self._ended.is_set() and (self._launched is None or self._launched[1].query())

    def wait(self) -> None:
        """Return when the job has ended; raise what it raised. The collectives inside have the limit of their group."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._launched is not None:
            device, event = self._launched
            torch.accelerator.current_stream(device).wait_event(event)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


class Lane:
    """Runs jobs one after the other, in a thread of its own. Every rank of the group must construct it, and hand it equal jobs.

    After a job that raised, the ranks no longer agree on what comes next: every later job raises too.

    Args:
        group: the ranks; a group of the same ranks is made for the lane.

    Attributes:
        group: what jobs send in, and nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = twin(group)
        self._jobs: queue.SimpleQueue[tuple[_Job, LaneWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, job: _Job, device: torch.device | None = None) -> LaneWork:
        """Hand over a job; return at once.

        Args:
            job: the rounds of one bucket.
            device: where its tensors are; None for a job that takes care of its streams itself.
        """
        if self._thread is None or not self._thread.is_alive():  # also in a forked child, which has no thread of ours
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="guozhuang exchange", daemon=True)
            self._thread.start()
            # The thread holds the queue, not the lane: with the last reference to the lane it ends.
            weakref.finalize(self, self._jobs.put, None)
        work = LaneWork()
        if device is not None and device.type != "cpu":
            job = self._in_stream(job, work, device)
        self._jobs.put((job, work))
        return work

    def _in_stream(self, job: _Job, work: LaneWork, device: torch.device) -> _Job:
        """See [Note: streams of a lane]. What is returned must not hold the lane, as the thread must not."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream, ready = self._streams[device], torch.accelerator.current_stream(device).record_event()

        def run() -> None:
            with stream:
                stream.wait_event(ready)
                job()
                work._launched = device, stream.record_event()

        return run


def _work(jobs: queue.SimpleQueue[tuple[_Job, LaneWork] | None]) -> None:
    failed: BaseException | None = None
    while (found := jobs.get()) is not None:
        job, work = found
        error: BaseException | None = None
        try:
            if failed is not None:
                what = f"an earlier exchange failed: {failed}"
                raise WorldError(explain(what, fix="let that error end the process")) from failed
            with torch.no_grad():
                job()
        except BaseException as raised:
            error = raised
            failed = failed or raised
        found = job = None  # type: ignore[assignment]  # its tensors must not stay until the next one comes
        work._end(error)

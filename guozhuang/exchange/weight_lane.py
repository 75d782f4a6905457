"""Flat copies of the weights that a lane averages while the trainer goes on; on an accelerator, in a stream of their own.

[Note: streams of a weight lane] What a job launches on an accelerator must not stand in the trainer's stream, or the trainer
would wait for it after all. So the job begins behind an event that the trainer recorded when it handed the job over, runs in a
stream of the lane, and records an event at its end. ``wait`` puts that event before what the trainer launches next;
``has_ended`` asks it. The copies are made once and are touched by one side at a time: by the trainer while nothing is in
flight, by the job otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WorldError, explain
from ..groups.subgroups import end_together
from ..weights.flat import FlatWeights, Named
from .lane import Lane, LaneWork
from .numbers import is_finite

_log = logging.getLogger("guozhuang")


def as_real(parameters: Named) -> list[tuple[str, Tensor]]:
    """Return the same memory as real numbers: a complex parameter gets a last dimension of 2."""
    return [(name, torch.view_as_real(p.detach()) if p.is_complex() else p.detach()) for name, p in parameters]


class NotFinite:
    """Says in the log which weights hold NaN or infinity, once until they are finite again."""

    def __init__(self) -> None:
        self._said = False

    def look(self, flat: FlatWeights, values: Sequence[Tensor], rank: int, step: int) -> bool:
        """Return whether all values are finite.

        Args:
            flat: how parameters lie in ``values``.
            values: flat tensors that were read from it.
            rank: this one, within the group.
            step: the last one; less than 0 where it is not known.
        """
        if all(is_finite(each) for each in values):
            self._said = False
            return True
        if not self._said:
            self._said = True
            views = zip(flat.names, flat.views(values), strict=True)
            found = [
                name for some, few in views for name, v in zip(some, few, strict=True) if not bool(v.isfinite().all())
            ]
            more = f" and {len(found) - 1} more parameters" if len(found) > 1 else ""
            when = f"after step {step} " if step >= 0 else ""
            what = f"{when}the weights of {found[0]!r}{more} hold NaN or infinity; averaging hands them to others"
            _log.warning("%s", explain(what, rank=rank, fix="look at the learning rate and at this rank's data"))
        return False


def mean(flats: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average flat tensors over the group, in place: their sum, divided. Equal bits on all ranks. Every rank must call.

    Narrow ones (float16, bfloat16) travel in float32: their sum could overflow, and would round at each addition.

    Raises:
        WorldError: a rank is gone, or did not come within the group's time-out.
    """
    wide = [each.float() if each.is_floating_point() and each.itemsize < 4 else each for each in flats]
    try:
        for each in wide:
            dist.all_reduce(each, group=group)
    except WorldError:
        raise
    except RuntimeError as error:
        others = ", ".join(str(other) for other in range(group.size()) if other != group.rank())
        what = f"averaging weights with the other ranks ({others}) failed: {error}"
        fix = "look for the rank that ended first, or that does not make its steps"
        raise WorldError(explain(what, rank=group.rank(), fix=fix)) from error
    for flat, each in zip(flats, wide, strict=True):
        each /= group.size()
        if each is not flat:
            flat.copy_(each)


class WeightLane:
    """A lane with flat copies of the weights. Every rank must construct it.

    Args:
        parameters: whose weights are copied.
        group: the ranks; the lane makes a twin of it.
        num_copies: how many sets of flat tensors.

    Attributes:
        flat: how parameters lie in the flat tensors.
        copies: the sets.
        not_finite: for jobs that look.
        group: what jobs send in.
    """

    def __init__(self, parameters: Named, group: dist.ProcessGroup, num_copies: int = 1) -> None:
        self.flat = FlatWeights(as_real(parameters))
        self.copies = [self.flat.empty() for _ in range(num_copies)]
        self.not_finite = NotFinite()
        self._lane = Lane(group)
        self.group = self._lane.group
        devices = {each.device for each in self.copies[0] if each.device.type != "cpu"}
        self._streams = {device: torch.Stream(device) for device in devices}
        by_name = dict(as_real(parameters))
        self._weights = [[by_name[name] for name in names] for names in self.flat.names]
        self._done: list[torch.Event] = []
        self._work: LaneWork | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a job was started and not waited for."""
        return self._work is not None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the lane, behind what the trainer has launched. Nothing may be in flight."""
        assert self._work is None
        ready = {device: torch.accelerator.current_stream(device).record_event() for device in self._streams}

        def run() -> None:
            with contextlib.ExitStack() as stack:
                for device, stream in self._streams.items():
                    stack.enter_context(stream)
                    stream.wait_event(ready[device])
                job()
                self._done = [stream.record_event() for stream in self._streams.values()]

        self._work = self._lane.run(run)

    def has_ended(self) -> bool:
        """Tell, without waiting, whether :meth:`wait` would return, or raise, at once."""
        return self._work is not None and self._work.is_completed() and all(event.query() for event in self._done)

    def wait(self) -> None:
        """Let the trainer go on behind the job; raise what it raised. The collectives inside have the group's time-out."""
        assert self._work is not None
        work, self._work = self._work, None
        work.wait()
        for device, event in zip(self._streams, self._done, strict=True):
            torch.accelerator.current_stream(device).wait_event(event)

    def drop(self) -> None:
        """Wait for what is in flight, if anything, for the sake of the order alone."""
        if self._work is not None:
            self.wait()

    def end(self, group: dist.ProcessGroup) -> None:
        """Wait for what is in flight, and end the lane's group. Every rank must call; the lane is not used again.

        Args:
            group: what the lane was made from.
        """
        self.drop()
        end_together([self.group], group)

    @torch.no_grad()
    def add(self, values: Sequence[Tensor]) -> None:
        """Add flat tensors to the weights, in place."""
        for weights, parts in zip(self._weights, self.flat.views(values), strict=True):
            torch._foreach_add_(weights, parts)

    def agree(self) -> None:
        """Put the mean over all ranks in place of the weights, after what is in flight. Every rank must call."""
        self.drop()
        copy = self.copies[0]
        self.flat.read(copy)

        def average() -> None:
            self.not_finite.look(self.flat, copy, self.group.rank(), -1)
            mean(copy, self.group)

        self.start(average)
        self.wait()
        self.flat.write(copy)

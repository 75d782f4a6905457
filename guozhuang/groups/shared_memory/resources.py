"""What a group holds of the operating system and of other processes: made together, given back together."""

from __future__ import annotations

import functools
import json
import os
import threading
from typing import Final

import torch.distributed as dist

from guozhuang.errors import WorldError, explain

from .arena import Arena
from .control import MAIN_BYTES
from .engine import make_engine, native_built
from .link import Link
from .meeting import Peers, meet
from .operations import Operations
from .point_to_point import PointToPoint
from .segments import Segment
from .works import Turns

_MOMENT_S: Final = 1.0


class Resources:
    """Segments, sockets, the engine and the thread of one rank's end of a group. Every rank must construct it.

    Args:
        store: a key-value store of this group alone.
        rank: this process in the group.
        size: number of ranks.
        timeout_s: of meeting the other ranks.
        num_neighbours: how many ranks the job has on this node.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, num_neighbours: int) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._process = os.getpid()
        mine = {
            "engine": "native" if native_built() else "python",
            "cores": sorted(os.sched_getaffinity(0)),
            "neighbours": max(num_neighbours, size),
        }
        store.set(f"engine/{rank}", json.dumps(mine))
        main = Segment.create(MAIN_BYTES, f"guozhuang-{rank}")
        self._peers: Peers = meet(store, rank, size, timeout_s, main)
        try:
            # Every rank has set its words before it came to the meeting.
            told = [json.loads(each) for each in store.multi_get([f"engine/{peer}" for peer in range(size)])]
            # Ranks may be bound to different cores, but what programs look like must not differ: all count the same.
            cores = {core for each in told for core in each["cores"]}
            self.crowded = max(each["neighbours"] for each in told) > len(cores)
            # All use the same engine, so that all get the same bits.
            native = all(each["engine"] == "native" for each in told)
            controls = [segment.address for segment in self._peers.segments]
            engine = make_engine(rank, size, controls, self._peers.pidfds, native=native)
            self.arena = Arena(self._peers)
            self.link = Link(engine, self._peers, self.arena, rank, size)
            self.operations = Operations(self.link, self.crowded)
        except BaseException:
            self._peers.close()
            raise
        self.turns = Turns(f"guozhuang-shm-{rank}", rank)
        self._point_to_point: PointToPoint | None = None
        self._making = threading.Lock()
        self._closed = False

    def point_to_point(self) -> PointToPoint:
        """What sends and receives, made when it is first needed."""
        with self._making:
            if self._closed:
                raise _gone(self._rank)
            if self._point_to_point is None:
                self._point_to_point = PointToPoint(
                    self._peers,
                    self._peers.segments,
                    self._rank,
                    self._size,
                    self._timeout_s,
                    failure=lambda: self.link.failure,
                )
            return self._point_to_point

    def close(self, patience_s: float) -> None:
        """Leave the group and give everything back. What still runs after ``patience_s`` seconds keeps its memory.

        Later calls do nothing, as do calls in a process that was forked off: the group is not its own.
        """
        if os.getpid() != self._process:
            return
        with self._making:
            if self._closed:
                return
            self._closed = True
        give_back = functools.partial(self._give_back, patience_s)
        if not self.turns.close_later(_gone(self._rank), give_back):  # unless the last reference went with a job
            give_back()

    def _give_back(self, patience_s: float) -> None:
        # Once the group is broken, jobs that wait fail as soon as they begin.
        quiet = self.turns.close(_gone(self._rank), _MOMENT_S if self.link.failure is not None else patience_s)
        self.link.leave()
        if not quiet:  # a call whose peers never came: it ends now, within a slice of its wait
            quiet = self.turns.close(_gone(self._rank), _MOMENT_S)
        if self._point_to_point is not None:
            quiet = self._point_to_point.close() and quiet
        if quiet:
            self.arena.close()
            self._peers.close()


def _gone(rank: int) -> WorldError:
    return WorldError(
        explain(
            "this group was destroyed; it takes no more calls", rank=rank, fix="make a new group, or destroy it later"
        )
    )

"""The process group "shm": its creation and end, its properties, sends and receives, and tensors in shared memory."""

from __future__ import annotations

import datetime
import functools
import json
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import override

from guozhuang.errors import PeerLost, WorldError, explain
from guozhuang.groups import roll_call
from guozhuang.groups.base import OwnBackend
from guozhuang.groups.gloo import OtherDevices
from guozhuang.groups.profiling import recorded
from guozhuang.groups.turns import Turns, refuse_fork
from guozhuang.groups.verbs import check_written
from guozhuang.watch.processes import Process

from . import arguments
from .arena import Arena
from .calls import CollectiveCalls
from .endpoint import Endpoint
from .engine import MAIN_BYTES, make_engine
from .operations import Operations
from .peers import can_read, own_mark
from .point_to_point import PointToPoint
from .rendezvous import Card, Listener, Peers, connect, meet
from .segments import Segment, SharedSegments

_MOMENT_S: Final = 1.0
_AT_EXIT_PATIENCE_S = 1.0  # how long to wait at the interpreter's exit for collectives that nobody waited for
_SHUTDOWN_PATIENCE_S = 10.0  # how long to wait for running collectives when the group is destroyed


class SharedMemoryGroup(CollectiveCalls, OwnBackend):
    """A process group of ranks on one node that communicate through shared memory. Every rank must construct it.

    Its collectives raise ``PeerLost`` (a rank is gone, left or broke the group, or did not join in time; the group is unusable
    from then on), ``MismatchError`` (on every rank: ranks made different calls) and ``UsageError`` (invalid arguments).

    Args:
        store: a key-value store of this group alone.
        rank: this process in the group.
        size: number of ranks.
        timeout: limit of each collective, from its beginning on this rank, and of the creation of the group.
        num_neighbours: the number of the job's ranks on this node, if larger than this group: if ranks outnumber the cores,
            waiting ranks offer the core to the others before each look.
        processes: the process of each rank, if known, so that a rank that ended is named at once.
        invited: this rank's listener and the cards of all ranks, where they were exchanged before.

    Raises:
        WorldError: ranks did not join within the time-out; the text names them.
    """

    works_tell_their_end = True

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        num_neighbours: int | None = None,
        processes: Sequence[Process] = (),
        invited: tuple[Listener, Sequence[Card]] | None = None,
    ) -> None:
        self._store, self._timeout = store, timeout
        self._process = os.getpid()
        try:
            self._resources = GroupResources(
                store, rank, size, timeout.total_seconds(), num_neighbours or size, processes, invited
            )
        except BaseException as error:
            roll_call.tell_failed(store, "card", rank, error)
            raise
        held = self._resources
        others = OtherDevices(dist.PrefixStore("others/", store), rank, size, timeout)
        super().__init__(rank, size, held.turns, held.operations, others, timeout.total_seconds(), held.crowded)
        # Ends the thread and notifies the peers if the group or the interpreter ends without destroy_process_group.
        self._end = weakref.finalize(self, held.close, _AT_EXIT_PATIENCE_S)

    def empty(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a 1-d tensor in memory that the group reduces in place, without copies. Not collective.

        Contiguous views of it count too. A reduction is in place if its tensor is such a tensor on all ranks.
        """
        refuse_fork("empty", self._process, self._rank)
        return self._resources.arena.empty(num_elements, dtype)

    def segments(self) -> SharedSegments:
        """Return what makes further segments that all ranks map. Every rank must call it."""
        return SharedSegments(self)

    # The methods below send and receive between two ranks.

    def send(self, tensors: list[Tensor] | Tensor, dst: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to one rank, which must receive it with the same tag."""
        tensor = arguments.one(tensors, "send", self._rank)
        memory = self._repeats.memory_of(tensor)
        if memory is None:
            if not tensor.is_cpu:
                return self._others.group_on(tensor.device).send([tensor], dst, tag)
            arguments.check([tensor], "send", self._rank)
        transfers = self._transfers("send")
        if profiler._is_profiler_enabled:
            return recorded("shm:send", [tensor], lambda: transfers.send(tensor, dst, tag, self._timeout_s))
        return transfers.send(tensor, dst, tag, self._timeout_s, memory)

    def recv(self, tensors: list[Tensor] | Tensor, src: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from one rank."""
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor] | Tensor, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from the first rank that sends with this tag; the work reports the rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor] | Tensor, src: int | None, tag: int) -> dist.Work:
        tensor = arguments.one(tensors, "recv", self._rank)
        memory = self._repeats.memory_of(tensor)
        if memory is None:
            if not tensor.is_cpu:
                other = self._others.group_on(tensor.device)
                return other.recv_anysource([tensor], tag) if src is None else other.recv([tensor], src, tag)
            arguments.check([tensor], "recv", self._rank)
            check_written(tensor, "recv", self._rank)
        transfers = self._transfers("recv")
        if profiler._is_profiler_enabled:
            title = "shm:recv" if src is not None else "shm:recvAnySource"
            return recorded(title, [tensor], lambda: transfers.recv(tensor, src, tag, self._timeout_s))
        return transfers.recv(tensor, src, tag, self._timeout_s, memory)

    def _transfers(self, what: str) -> PointToPoint:
        """Return the object for sends and receives; raise the error that broke the group, if there is one."""
        refuse_fork(what, self._process, self._rank)
        if self._resources.link.failure is not None:
            self._resources.link.raise_failure()
        return self._resources.point_to_point()

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names the ranks that did not join in time.

        Its text begins as that of PyTorch's own ``monitored_barrier``: on rank 0 the first missing rank, or all of them if
        ``wait_all_ranks``; on other ranks that rank 0 knows more. Then every missing rank is named in any case.
        """
        opts = dist.BarrierOptions()
        opts.timeout, opts.asyncOp = self._timeout if timeout is None else timeout, False
        limit_ms = opts.timeout.total_seconds() * 1e3
        if limit_ms <= 0:
            text = f"Rank {self._rank} timed out in monitoredBarrier after {limit_ms:g} ms"
            raise WorldError(explain(text, rank=self._rank, fix="give a time-out above zero"))
        try:
            self.barrier(opts)
        except PeerLost as error:
            late = self._resources.link.late or (error.rank,)
            names = f"Ranks {', '.join(map(str, late))}" if wait_all_ranks and len(late) > 1 else f"Rank {late[0]}"
            first = f"{names} failed to pass monitoredBarrier in {limit_ms:g} ms"
            if self._rank:
                first = (
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                )
                first += "send/recv from rank 0. Please check rank 0 logs for faulty rank."
            text = f"{first}\n{error}"
            raise PeerLost(text, rank=error.rank, pid=error.pid, waiting_in=error.waiting_in) from None

    # Properties that torch.distributed reads.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self._others.devices()]

    @override
    def _group_on(self, device: torch.device) -> dist.ProcessGroup:
        return self._others.group_on(device)

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()
        self._link.sync_terms = self._timeout_s, self._sync_spin_us

    # The methods below end the group.

    def shutdown(self) -> None:
        """Leave the group: running collectives get some seconds to end; peers that wait for this rank afterwards raise.

        In a forked process it does nothing, and neither does ``abort``: the group belongs to the parent process.
        """
        if os.getpid() == self._process and self._end.detach() is not None:
            self._resources.close(_SHUTDOWN_PATIENCE_S)
            self._others.end(at_once=False)

    def abort(self) -> None:
        """Leave the group at once: peers that wait for this rank raise, and so do running collectives that wait for peers."""
        if os.getpid() == self._process and self._end.detach() is not None:
            self._resources.link.leave()
            self._resources.close(_AT_EXIT_PATIENCE_S)
            self._others.end(at_once=True)


class GroupResources:
    """Segments, sockets, engine and thread of one rank's end of a group. Every rank must construct it.

    Args:
        store: a key-value store of this group alone.
        rank: this process in the group.
        size: number of ranks.
        timeout_s: limit of the rendezvous with the other ranks.
        num_neighbours: the number of the job's ranks on this node.
        processes: the process of each rank, if known.
        invited: see ``SharedMemoryGroup``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        num_neighbours: int,
        processes: Sequence[Process],
        invited: tuple[Listener, Sequence[Card]] | None,
    ) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._process = os.getpid()
        main = Segment.create(MAIN_BYTES, f"guozhuang-{rank}")
        try:
            invited = invited or meet(store, rank, size, timeout_s, own_note(num_neighbours), processes)
        except BaseException:
            main.close()
            raise
        listener, cards = invited
        self._peers: Peers = connect(rank, cards, listener, timeout_s, main)
        try:
            told = [json.loads(card.note) for card in cards]
            # Ranks may be bound to different cores, but must build the same programs: so each counts the cores of all ranks.
            cores = {core for each in told for core in each["cores"]}
            self.crowded = max(size, *(each["neighbours"] for each in told)) > len(cores)
            controls = [segment.address for segment in self._peers.segments]
            engine = make_engine(rank, size, controls, self._peers.pidfds, self._peers.pids, self.crowded)
            self.arena = Arena(self._peers)
            reads = can_read(self._peers.pids, [each["mark"] for each in told])
            self.link = Endpoint(engine, self._peers, self.arena, rank, size, reads)
            self.operations = Operations(self.link, self.crowded)
        except BaseException:
            self._peers.close()
            raise
        self.turns = Turns(f"guozhuang-shm-{rank}", rank)
        self._point_to_point: PointToPoint | None = None
        self._making = threading.Lock()
        self._closed = False

    def point_to_point(self) -> PointToPoint:
        """Return the object for sends and receives, made on first use."""
        if self._point_to_point is not None and not self._closed:
            return self._point_to_point
        with self._making:
            if self._closed:
                raise _gone(self._rank)
            if self._point_to_point is None:
                self._point_to_point = PointToPoint(
                    self._peers, self._timeout_s, lambda: self.link.failure, self.crowded, self.link.reads
                )
            return self._point_to_point

    def close(self, patience_s: float) -> None:
        """Leave the group and release everything. Calls still running after ``patience_s`` seconds keep their memory.

        Later calls do nothing, nor do calls in a forked process: the group belongs to its parent.
        """
        if os.getpid() != self._process:
            return
        with self._making:
            if self._closed:
                return
            self._closed = True
        give_back = functools.partial(self._give_back, patience_s)
        if not self.turns.close_later(_gone(self._rank), give_back):  # True inside a job of this group: closed later
            give_back()

    def _give_back(self, patience_s: float) -> None:
        # A broken group needs only a short wait: its queued jobs fail as soon as they begin.
        quiet = self.turns.close(_gone(self._rank), _MOMENT_S if self.link.failure is not None else patience_s)
        self.link.leave()
        if not quiet:  # a call still waited for peers; ``leave`` makes that wait end soon
            quiet = self.turns.close(_gone(self._rank), _MOMENT_S)
        if self._point_to_point is not None:
            quiet = self._point_to_point.close() and quiet
        if quiet:
            self.arena.close()
            self._peers.close()


def own_note(num_neighbours: int = 0) -> str:
    """Return what a rank tells the others: its cores, its mark, and the number of the job's ranks on its node."""
    cores = sorted(os.sched_getaffinity(0))
    return json.dumps({"cores": cores, "neighbours": num_neighbours, "mark": own_mark()})


def _gone(rank: int) -> WorldError:
    return WorldError(
        explain(
            "this group was destroyed; it takes no more calls", rank=rank, fix="make a new group, or destroy it later"
        )
    )

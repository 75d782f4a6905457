"""Run each call on a group over several nodes: in its turn, within its time-out, and checking that other ranks still live."""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.groups import roll_call
from guozhuang.groups.gloo import Crossing, choose_address
from guozhuang.groups.hierarchical.collectives import Collectives
from guozhuang.groups.hierarchical.failure import Comparison, GroupFailure
from guozhuang.groups.hierarchical.nodes import Nodes
from guozhuang.groups.shared_memory.endpoint import cut
from guozhuang.groups.shared_memory.process_group import SharedMemoryGroup
from guozhuang.groups.shared_memory.segments import SharedSegments
from guozhuang.groups.turns import Turns, take_timeout
from guozhuang.groups.verbs import PreparedCall, VerbGroup, check_memory
from guozhuang.watch.processes import Process

_SLICE = datetime.timedelta(seconds=0.2)  # longest single wait for gloo; then this node's processes are checked
_SHUTDOWN_S = 5.0
_REDUCIBLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
# Operations that both the node's group and gloo support; calls with others (PREMUL_SUM) go to gloo, which refuses them.
_KNOWN = (
    *(dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX),
    *(dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR),
)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


class _Refused(Exception):
    """The arguments of a call were refused; ``__cause__`` is the reason. The group stays usable."""


class Calls(VerbGroup):
    """A process group over several nodes: checks calls, runs each in its turn, raises its errors. See ``HierarchicalGroup``."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        processes: Sequence[Process],
    ) -> None:
        if len(processes) != size:
            fix = f"give one for each of the {size} ranks"
            text = "a hierarchical group needs the process and the node of every rank"
            raise UsageError(explain(text, value=len(processes), fix=fix))
        super().__init__(rank, size, "hierarchical")
        self._store, self._timeout_s = store, timeout.total_seconds()
        self._limit_s, self._deadline = self._timeout_s, 0.0
        self.nodes = nodes = Nodes.of([each.node for each in processes], rank)
        others = [r for r in range(size) if r not in nodes.here]
        address = choose_address(dist.PrefixStore("route", store), rank, others)
        self._whole = Crossing(dist.PrefixStore("whole", store), rank, size, self._timeout_s, address)
        self._inside: SharedMemoryGroup | None = None
        empty: Callable[[int, torch.dtype], Tensor] = _unshared
        self._lane: Crossing | None = None
        if not nodes.is_flat and len(nodes.here) > 1:
            of_node = dist.PrefixStore(f"node/{nodes.node}", store)
            self._inside = SharedMemoryGroup(of_node, nodes.local_rank, len(nodes.here), timeout)
            self.empty = empty = self._inside.empty
        if not nodes.is_flat and nodes.lane is not None:
            of_lane = dist.PrefixStore(f"lane/{nodes.lane}", store)
            self._lane = Crossing(of_lane, nodes.node, len(nodes.members), self._timeout_s, address)
        link, num_linked = (self._whole, size) if nodes.is_flat else (self._lane, len(nodes.members))
        segments = None if self._inside is None else SharedSegments(self._inside)
        self._comparison = Comparison(rank, segments, link, num_linked, self._wait)
        of_failure = dist.PrefixStore("failure", store)
        self._failure = GroupFailure(of_failure, nodes, processes, self._comparison, self._give_up)
        self._collectives = Collectives(nodes, self._inside, self._lane, self._wait, self._comparison.settle, empty)
        self._turns = Turns(f"guozhuang hierarchical {rank}", rank)
        # Wait until all ranks are connected: a rank that fails cuts its connections, which must not hit a peer's setup.
        roll_call.call(store, "connected", rank, size, "", self._timeout_s)
        # Ends the group's thread if the group is dropped without a shutdown.
        weakref.finalize(self, self._turns.close, WorldError("the group is gone"), 0.0)

    def _moves(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether two steps (in the node, between nodes) can move tensors: dense CPU tensors of one dtype, not empty."""
        for tensor in tensors:
            if tensor.is_cpu and tensor.layout == torch.strided:
                check_memory(tensor, "a collective", self._rank)
        return not self.nodes.is_flat and all(
            t.is_cpu and t.layout == torch.strided and t.numel() > 0 and t.dtype == tensors[0].dtype for t in tensors
        )

    def _reduces(self, tensors: Sequence[Tensor], op: Any) -> bool:
        """Return whether tensors can be combined by ``op`` in two steps: inside the node, then between nodes."""
        if not self._moves(tensors) or not any(op == known for known in _KNOWN):
            return False
        dtype = tensors[0].dtype
        if dtype.is_complex:
            return bool(op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG)
        if dtype.is_floating_point and any(op == bitwise for bitwise in _BITWISE):
            # Refused here, because gloo would raise only after the other ranks have joined.
            fix = "reduce integers, or choose another operation"
            raise UsageError(explain("bits of floating-point numbers cannot be combined", value=str(dtype), fix=fix))
        return dtype in _REDUCIBLE and (dtype.is_floating_point or op != dist.ReduceOp.AVG)

    def _gathers(self, larger: Sequence[Tensor], smaller: Sequence[Tensor]) -> bool:
        """Return whether two steps can gather: nodes of equal size, and larger tensors that hold a smaller one of each rank."""
        return (
            self.nodes.is_even
            and self._moves([*larger, *smaller])
            and all(big.numel() == self.size() * small.numel() for big, small in zip(larger, smaller, strict=True))
        )

    # ---- These methods run a call: in its turn, within its time-out, checking that the other ranks still live.

    def _begin(self, call: PreparedCall, method: str, args: Sequence[Any]) -> dist.Work:
        """Start a prepared call: its job works in two steps, inside the node and between nodes; without a job, gloo runs it."""
        job, tensors, what, _ = call
        if job is None:
            job, what = partial(self._by_gloo, method, *args), f"{what}, through gloo"
        return self._start(job, tensors, what, args[-1])

    def _report_refusal(self, verb: str, why: str, options: Any) -> None:
        with contextlib.suppress(Exception):  # the caller raises an error already
            self._start(self._comparison.settle, [], f"{verb}: refused on this rank: {why}", options)

    def _by_gloo(self, method: str, *arguments: Any) -> None:
        """Call a method of the gloo group of all ranks; its options are the last argument."""
        self._comparison.settle()
        try:
            self._wait(getattr(self._whole.group, method)(*arguments), method)
        except (RuntimeError, TypeError, ValueError) as error:
            # Gloo's errors about connections name its source file; any other error means that all ranks refuse the arguments.
            if isinstance(error, WorldError) or "gloo/" in str(error):
                raise
            raise _Refused from error

    def _start(
        self, job: Callable[[], object], tensors: Sequence[Tensor], what: str, opts: Any, node_first: bool = False
    ) -> dist.Work:
        """Submit a job that runs in its turn, after a comparison of ``what`` among all ranks; return its work."""
        limit_s, what = take_timeout(opts), cut(what.encode()).decode(errors="replace")

        def run() -> None:
            self._failure.check()
            self._limit_s = limit_s if limit_s is not None else self._timeout_s
            self._deadline = time.monotonic() + self._limit_s
            try:
                self._comparison.begin(what, node_first)
                job()
                self._comparison.settle()  # ends the comparison if the job sent nothing to other nodes
            except _Refused as error:
                assert error.__cause__ is not None
                raise error.__cause__  # noqa: B904
            except BaseException as error:
                ended = self._failure.end_with(error, what)
                raise ended from (error if ended is not error else None)

        return self._turns.later(run, tensors, what) if opts.asyncOp else self._turns.now(run, tensors, what)

    def _wait(self, work: dist.Work, what: str) -> None:
        """Wait for a gloo work; meanwhile check the deadline and the ranks of this node."""
        while True:
            has_ended = work.is_completed()
            left_s = self._deadline - time.monotonic()
            try:
                work.wait(min(_SLICE, datetime.timedelta(seconds=max(left_s, 0.001))))
                return
            except RuntimeError:
                # Either this short wait timed out, or the work failed; a failed work has ended, so the next wait raises again.
                if has_ended:
                    raise
            self._failure.look_around()
            if left_s <= 0 and not work.is_completed():
                lane = self.nodes.lane
                peers = (
                    self.nodes.peers_of_lane(lane)
                    if lane is not None and self._lane is not None
                    else range(self.size())
                )
                raise self._failure.late(what, [r for r in peers if r != self.rank()], self._limit_s)

    # ---- This method aborts the group.

    def _give_up(self) -> None:
        """Abort the group inside the node, and cut all gloo connections. See [Note: how a failure spreads] in failure.py."""
        if self._inside is not None:
            with contextlib.suppress(Exception):
                self._inside.abort()
        for crossing in (self._lane, self._whole):
            if crossing is not None:
                crossing.cut()

    # ---- These are methods that torch.distributed calls on every group.

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._whole.group._device_types)

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the backend of the gloo group of all ranks; raise RuntimeError for an unsupported device."""
        return self._whole.group._get_backend(torch.device(device))

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was made with."""
        return self._store

    def abort(self) -> None:
        """Abort the group on this rank; other ranks that wait for this one raise soon."""
        text = explain("this group was aborted", rank=self.rank(), fix="make a new group")
        self._failure.end_with(WorldError(text), "abort")

    def shutdown(self) -> None:
        """End the group's thread after its queued jobs, then shut down the group inside the node and the gloo groups."""
        text = explain("this group was shut down", rank=self.rank(), fix="make a new group")
        self._turns.close(WorldError(text), _SHUTDOWN_S)
        if self._inside is not None:
            self._inside.shutdown()
        for crossing in (self._lane, self._whole):
            if crossing is not None:
                crossing.close()
        self._failure.close()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time-out of each collective that begins from now on."""
        self._timeout_s = timeout.total_seconds()
        for part in (self._inside, self._lane, self._whole):
            if part is not None:
                part.set_timeout(timeout)


def _unshared(num_elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(num_elements, dtype=dtype)

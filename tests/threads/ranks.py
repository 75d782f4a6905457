"""Ranks as threads: run a function on several ranks of one process, over a group in memory.

    def sums(rank, world_size):
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor)
        return tensor

    run_threads(sums, 8)[0]

Everything of ``torch.distributed`` that the functions call finds the group of its own rank: what torch keeps for a process is
kept here for a rank, that is for its thread and all threads that this one starts. A rank costs no process and a collective no
message, so that cases with 1 to 8 ranks take milliseconds. Not for what only processes show: deaths, time-outs, bytes on
sockets; nor for what ranks do not have for themselves here, such as the random numbers of ``torch.manual_seed``.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import gc
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from guozhuang.groups.base import PythonGroup
from guozhuang.net.ended import tell_ended
from guozhuang.parallel import clipping
from guozhuang.sharding.carrier import Carrier
from tests.waiting import LIMIT_S

NAME = "threads"
_here = threading.local()


def this_rank() -> object:
    """Something that only the threads of one rank have; None where ranks are processes."""
    return getattr(_here, "world", None)


class _Ended(dist.Work):
    """A work that has ended when it is returned, or a message that is taken when it is waited for."""

    def __init__(self, results: list[Tensor], wait: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._results, self._wait = results, wait

    def wait(self, timeout: object = None) -> bool:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[Tensor]:
        return self._results


class _Meeting:
    """Where the ranks of a group hand each other what they have: for each call, what each rank gave."""

    def __init__(self, size: int, run: _Run) -> None:
        self.size, self.run, self.changed = size, run, threading.Condition()
        self.calls: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self.mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor | None]] = collections.defaultdict(
            queue.SimpleQueue
        )

    def queue(self, source: int, target: int, tag: int) -> queue.SimpleQueue[Tensor | None]:
        with self.changed:
            found = self.mail[source, target, tag]
            if self.run.has_failed:
                found.put(None)
            return found

    def wake(self) -> None:
        """Let those go on that wait for a rank which will not come."""
        with self.changed:
            self.changed.notify_all()
            for each in self.mail.values():
                each.put(None)

    def of_all(self, number: int, rank: int, given: Any) -> list[Any]:
        with self.changed:
            here = self.calls[number]
            here[rank] = given
            if len(here) == self.size:  # nobody is woken before that
                self.changed.notify_all()
            there = self.changed.wait_for(lambda: len(here) == self.size or self.run.has_failed, LIMIT_S)
            assert there and len(here) == self.size, f"ranks {sorted(set(range(self.size)) - here.keys())} did not come"
            self.calls.pop(number - 1, None)  # all have left it: they came to this one
        return [here[rank] for rank in range(self.size)]


class ThreadGroup(PythonGroup):
    """A group of ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size, NAME)
        self._meeting, self._number, self._lock = meeting, 0, threading.Lock()
        # Limits what waits in the store, where a failed rank wakes nobody.
        self.options = SimpleNamespace(_timeout=datetime.timedelta(seconds=LIMIT_S))

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        return self

    @staticmethod
    def sent_by_this_rank() -> int:
        """The bytes that the algorithms of all collectives so far send from this rank: a ring's for all-reduces."""
        return int(_here.sent[0])

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _of_all(self, name: str, given: Any, num_bytes: float = 0) -> list[Any]:
        with self._lock:
            _here.sent[0] += num_bytes
            self._number += 1
            number = self._number
        found = self._meeting.of_all(number, self.rank(), (name, given))
        assert len({name for name, _ in found}) == 1, f"ranks call {[name for name, _ in found]}"
        return [given for _, given in found]

    @staticmethod
    def _sent(tensor: Tensor) -> Tensor:
        """Return a copy of what a rank gives. Groups of processes send memory, in whatever order elements lie there."""
        assert tensor.is_contiguous(), f"{tuple(tensor.shape)} has strides {tensor.stride()}: another rank's may differ"
        return tensor.detach().clone()

    def _reduced(self, name: str, tensor: Tensor, op: Any) -> Tensor:
        num_bytes = (1 if name.startswith("reduce") else 2) * (self.size() - 1) * tensor.nbytes / self.size()
        everyones = self._of_all(f"{name} {tuple(tensor.shape)} {tensor.dtype}", self._sent(tensor), num_bytes)
        return _combined(everyones, op)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            tensor.detach().copy_(self._reduced("allreduce", tensor, opts.reduceOp if opts else dist.ReduceOp.SUM))
        return _Ended(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        result = self._reduced("reduce", tensors[0], opts.reduceOp)
        if self.rank() == opts.rootRank:
            tensors[0].detach().copy_(result)
        return _Ended(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        found = self._of_all("broadcast", self._sent(tensors[0]))
        tensors[0].detach().copy_(found[opts.rootRank])
        return _Ended(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        found = self._of_all("allgather", self._sent(inputs[0]))
        for output, value in zip(outputs[0], found, strict=True):
            output.detach().copy_(value)
        return _Ended(outputs[0])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        found = self._of_all("all_gather_single", self._sent(given), (self.size() - 1) * given.nbytes)
        output.detach().view(-1).copy_(torch.cat([value.reshape(-1) for value in found]))
        return _Ended([output])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> dist.Work:
        whole = self._reduced("reduce_scatter_single", given, opts.reduceOp).reshape(self.size(), -1)
        output.detach().view(-1).copy_(whole[self.rank()])
        return _Ended([output])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> dist.Work:
        rows = self._sent(given).split(list(in_splits) or [given.shape[0] // self.size()] * self.size())
        found = self._of_all("all_to_all_single", rows, given.nbytes * (self.size() - 1) / self.size())
        output.detach().copy_(torch.cat([parts[self.rank()] for parts in found]).view_as(output))
        return _Ended([output])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        found = self._of_all("gather", self._sent(inputs[0]))
        for output, value in zip(outputs[0] if outputs else [], found, strict=bool(outputs)):
            output.detach().copy_(value)
        return _Ended(outputs[0] if outputs else [])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        found = self._of_all("scatter", [self._sent(part) for part in inputs[0]] if inputs else None)
        outputs[0].detach().copy_(found[opts.rootRank][self.rank()])
        return _Ended(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._of_all("barrier", None)
        return _Ended([])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self._meeting.queue(self.rank(), peer, tag).put(self._sent(tensors[0]))
        return _Ended(tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        mail = self._meeting.queue(peer, self.rank(), tag)

        def take() -> None:
            found = mail.get(timeout=LIMIT_S)
            assert found is not None, f"ranks [{peer}] did not come"
            tensors[0].detach().copy_(found)

        return _Ended(tensors, take)


def _combined(everyones: list[Tensor], op: Any) -> Tensor:
    kinds: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.BOR: torch.bitwise_or,
    }
    combine = next((function for kind, function in kinds.items() if op == kind), torch.add)
    total = everyones[0]
    for tensor in everyones[1:]:  # in the order of ranks: the same bits for all
        total = combine(total, tensor)
    return total / len(everyones) if op == dist.ReduceOp.AVG else total


class _Run:
    """The ranks of one call of ``run_threads``."""

    def __init__(self) -> None:
        self.has_failed, self._lock = False, threading.Lock()
        self._meetings: dict[Any, _Meeting] = {}

    def meeting(self, name: str, members: Any, size: int) -> _Meeting:
        """Where the ranks meet that make a group of this name for the same time."""
        with self._lock:
            made = _here.made
            made[name, members] += 1
            key = (name, members, made[name, members])
            return self._meetings.setdefault(key, _Meeting(size, self))

    def fail(self) -> None:
        self.has_failed = True
        for meeting in list(self._meetings.values()):
            meeting.wake()


class _Worlds:
    """In the place of what ``torch.distributed`` keeps for a process: the same for each rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_here.world, name, value)


def _empty_world() -> SimpleNamespace:
    maps = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
    maps += ("pg_flight_recorder_hooks",)  # from PyTorch 2.15 on
    return SimpleNamespace(default_pg=None, group_count=0, comms=[], **{name: {} for name in maps})


def _create(told: Any, _: Any) -> ThreadGroup:
    members = tuple(told.global_ranks_in_group or ())
    meeting = _here.run.meeting(told.group_id, members, told.group_size)
    return ThreadGroup(told.group_rank, told.group_size, meeting)


# Held by whoever draws from torch's generator, of which ranks that are threads have one for all.
GENERATOR = threading.RLock()
_DRAW = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.modules.conv._ConvNd)


@contextlib.contextmanager
def _modules_draw_in_turn() -> Iterator[None]:
    """A module that a rank makes draws nothing while another rank makes one from a seed."""

    def in_turn(draw: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def reset_parameters(module: nn.Module) -> None:
            with GENERATOR:
                draw(module)

        return reset_parameters

    with contextlib.ExitStack() as stack:
        for kind in _DRAW:
            stack.enter_context(mock.patch.object(kind, "reset_parameters", in_turn(kind.reset_parameters)))
        yield


class _OfRank:
    """A container of the package, of which each rank has its own, as each process has.

    Args:
        number: its place in what a rank has.
        outside: what there is outside of ranks.
    """

    def __init__(self, number: int, outside: Any) -> None:
        self._number, self._outside = number, outside

    def _own(self) -> Any:
        return _here.own[self._number] if hasattr(_here, "own") else self._outside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value


# Who looks through these reads gradients, also those of other ranks, which PyTorch does not expect of threads.
_OWN: tuple[tuple[Any, str, type[Any]], ...] = (
    (clipping, "_divided_models", weakref.WeakKeyDictionary),
    (Carrier, "_alive", weakref.WeakSet),
)


@contextlib.contextmanager
def _ranks_are_threads() -> Iterator[None]:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    start, hook = threading.Thread.start, sys.excepthook

    def start_in_rank(thread: threading.Thread) -> None:
        mine, run = dict(vars(_here)), thread.run

        def in_rank() -> None:
            vars(_here).update(mine)
            run()

        thread.run = in_rank  # type: ignore[method-assign]
        start(thread)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    # torch.get_rng_state() allocates while it holds the generator's mutex. A collection there that frees a tensor gives up the
    # interpreter's lock, and another thread that asks for the state takes it and waits for the mutex: neither goes on.
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(c10d, "_world", _Worlds()))
            stack.enter_context(mock.patch.object(threading.Thread, "start", start_in_rank))
            for number, (owner, name, _) in enumerate(_OWN):
                stack.enter_context(mock.patch.object(owner, name, _OfRank(number, getattr(owner, name))))
            yield
    finally:
        gc.collect(0)  # what the ranks left is young; the threads of exchanges end with it
        if collects:
            gc.enable()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook


def _stay_on_one_core() -> None:
    """Keep this thread, and those that it starts, on one core, another one for each worker of the test run.

    Only one of them holds the interpreter's lock anyway. On several cores they take it from each other at each operation of
    torch, which costs twice the processor time.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


def run_threads(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``num_ranks`` threads; return the results in rank order.

    Raises:
        AssertionError: a rank failed; the text holds the traceback of every rank.
    """
    store, run = dist.HashStore(), _Run()
    results: list[Any] = [None] * num_ranks
    failures: dict[int, str] = {}

    def rank_of(rank: int) -> None:
        _stay_on_one_core()
        torch.set_num_threads(1)  # libraries ask their own setting, which each thread has for itself
        _here.world, _here.run, _here.made, _here.sent = _empty_world(), run, collections.Counter(), [0.0]
        _here.own = [kind() for _, _, kind in _OWN]
        try:
            dist.init_process_group(NAME, store=store, rank=rank, world_size=num_ranks)
            try:
                results[rank] = fn(rank, num_ranks, *args)
            finally:
                dist.destroy_process_group()
        except BaseException:
            failures[rank] = traceback.format_exc()
            run.fail()
            tell_ended(store, rank)  # as its launcher would tell those that wait for it in the store

    with _ranks_are_threads(), _modules_draw_in_turn():
        threads = [threading.Thread(target=rank_of, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, "\n".join(f"---- rank {r} of {num_ranks}:\n{text}" for r, text in sorted(failures.items()))
    return results

"""Ranks of an "shm" group come and go, by torch.distributed's own interface where it has one (from PyTorch 2.14 on)."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError
from guozhuang.groups import backend
from guozhuang.groups.allocation import zeros_for
from guozhuang.groups.reconfigurable import ReconfigurableGroup, ReconfigureError, ReconfigureHandle
from guozhuang.groups.shared_memory import rendezvous
from tests.launching import python
from tests.processes.shm_ranks import held
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

THERE = hasattr(dist, "_reconfigure")
LIMIT = datetime.timedelta(seconds=NEVER_S)  # nobody waits for it


def made(told: Any, _: Any) -> ReconfigurableGroup:
    return ReconfigurableGroup(told.store, told.group_rank, told.group_size, told.timeout)


class Rank:
    """One process: its group, and the store by which the processes tell each other their handles."""

    def __init__(self, number: int, count: int, name: str = "shm") -> None:
        self.number, self.count = number, count
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), count, number == 0)
        more: dict[str, Any] = {"enable_reconfigure": True}
        if not THERE:
            backend.register()
            dist.Backend.register_backend("changing", made, True, ["cpu"])
            name, more = "changing", {}
        dist.init_process_group(name, rank=number, world_size=count, store=self.store, timeout=LIMIT, **more)
        self.group: Any = dist.group.WORLD

    def handle(self) -> str:
        return str(dist._get_reconfigure_handle() if THERE else self.group.get_reconfigure_handle())

    def handles(self, topic: str, count: int | None = None) -> list[str]:
        """The handles of all processes, by their first rank."""
        self.store.set(f"{topic}/{self.number}", self.handle())
        return [self.store.get(f"{topic}/{rank}").decode() for rank in range(count or self.count)]

    def change(self, uuid: int, handles: Sequence[str] | set[str], timeout: datetime.timedelta | None = None) -> None:
        if THERE:
            work = dist._reconfigure(uuid, handles, timeout=timeout)
        else:
            work = self.group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout))
        assert work.wait()
        wanted = handles if isinstance(handles, list) else sorted(handles)
        assert dist.get_world_size() == self.group.size() == len(wanted)
        assert dist.get_rank() == self.group.rank()
        assert dist.get_process_group_ranks(self.group) == list(range(len(wanted)))

    def meet(self, topic: str, count: int | None = None) -> None:
        self.store.set(f"met/{topic}/{self.number}", "")
        self.store.wait([f"met/{topic}/{rank}" for rank in range(count or self.count)])

    def leave(self) -> None:
        """Rank 0 keeps the store until the others need it no more."""
        self.store.set(f"left/{self.number}", "")
        if self.number == 0:
            self.store.wait([f"left/{rank}" for rank in range(self.count)])

    def works(self) -> None:
        """Collectives and sends give what they should among the present ranks."""
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((5,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.tolist() == [size * (size + 1) / 2] * 5
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, f"rank {rank}")
        assert gathered == [f"rank {each}" for each in range(size)]
        given, taken = torch.tensor([rank]), torch.tensor([-1])
        if size > 1:
            sent = self.group.send([given], (rank + 1) % size, 0)
            self.group.recv([taken], (rank - 1) % size, 0).wait()
            sent.wait()
            assert taken.item() == (rank - 1) % size
        large = zeros_for(self.group)(100_000, torch.float32, torch.device("cpu")).fill_(rank)
        dist.broadcast(large, size - 1)
        assert (large == size - 1).all()
        dist.barrier()


def comes_and_goes(number: int, count: int) -> None:
    before = held()
    me = Rank(number, count)
    assert not THERE or (dist._supports_reconfigure() and dist.get_backend() == "shm")
    assert dist.get_backend_impl(me.group, torch.device("cpu")).supports_reconfigure if THERE else True
    with pytest.raises(WorldError, match="no ranks yet"):
        dist.barrier()
    old = me.handles("first")
    me.change(1, old)
    assert dist.get_rank() == number
    me.works()

    allocate = zeros_for(me.group)  # as the buckets of a wrapper, which outlive changes
    for uuid in (0, 100):
        kept = allocate(1000, torch.float32, torch.device("cpu"))
        me.change(uuid, me.handles(f"memory {uuid}"))
        assert kept.add_(1.0).sum() == 1000
    del kept

    handles = me.handles("last goes")
    with pytest.raises(ReconfigureError, match="not among the handles"):
        me.change(2, old)  # handles are new after every change
    with pytest.raises(ReconfigureError, match="no handle"):
        me.change(2, ["gloo:0:-1:0:", handles[0]])
    me.meet("refused")
    if number < count - 1:
        me.change(2, handles[:-1])
        assert dist.get_rank() == number
        me.works()
    me.meet("last is back")  # a rank that is not told stays as it was
    me.change(3, me.handles("last is back"))
    me.works()

    handles = me.handles("middle goes")
    if number != 1:
        me.change(4, handles[:1] + handles[2:])
        assert dist.get_rank() == (number if number < 1 else number - 1)
        me.works()
    me.change(5 + number, [me.handle()])  # each alone
    me.works()
    with pytest.raises(ReconfigureError, match="already used"):
        me.change(5 + number, [me.handle()])
    me.change(20, me.handles("alone to all"))
    me.works()

    handles = me.handles("split")
    me.change(21, handles[:1]) if number == 0 else me.change(22, handles[1:])
    me.works()
    together = me.handles("together")
    me.change(23, set(together))  # a set: all ranks sort alike
    assert dist.get_rank() == sorted(together).index(together[number])
    me.works()

    late: list[Any] = []
    if dist.get_rank() == 0:
        late.append(dist.all_reduce(torch.ones(3), async_op=True))  # the others never call it
    me.change(24, me.handles("unfinished"))
    for work in late:
        with pytest.raises(WorldError):
            work.wait()
    me.works()

    me.group.abort()
    assert me.group.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    with pytest.raises(WorldError, match="left its ranks"):
        dist.barrier()
    me.change(25, me.handles("after abort"))
    me.works()
    limit = datetime.timedelta(seconds=LIMIT_S + 17)
    me.group.set_timeout(limit)
    assert me.group.options._timeout == limit
    me.change(26, me.handles("the limit stays"))
    assert me.group.options._timeout == limit
    me.meet("end")
    dist.destroy_process_group()
    me.leave()
    left = remaining(lambda: [each for each in held() - before if "socket" not in each])
    assert not left, left


def test_ranks_come_and_go() -> None:
    run_ranks(comes_and_goes, 3, init=False)


def loses_ranks(number: int, count: int) -> None:
    me = Rank(number, count)
    me.change(1, me.handles("first"))
    me.works()
    for gone in (count - 1, count - 2):
        handles = me.handles(f"{gone}", gone + 1)
        if number == gone:
            os._exit(0)
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(10))
        assert caught.value.rank == gone
        # It is not known to be gone: the change finds out, and the group stays as it was.
        with pytest.raises(PeerLost, match=f"rank {gone}"):
            me.change(10 + gone, handles)
        handles = me.handles(f"without {gone}", gone)
        me.change(20 + gone, handles)
        me.works()
    with pytest.raises(WorldError, match=rf"ranks \[1\] did not come within {EXPIRES_S:g} s"):
        handle = ReconfigureHandle.read(me.handle())
        other = str(handle._replace(card=handle.card._replace(name="of nobody")))
        me.change(30, [me.handle(), other], timeout=datetime.timedelta(seconds=EXPIRES_S))
    me.works()


def test_ranks_are_lost() -> None:
    first, *others = run_ranks(loses_ranks, 3, init=False, collect_errors=True)
    assert not isinstance(first, RankError), first.text
    assert all(isinstance(each, RankError) and each.exit_code == 0 for each in others), others


def over_two_nodes(number: int, count: int) -> None:
    real = rendezvous.identity
    rendezvous.identity = lambda: f"{real()} {number // 2}"  # ranks 0 and 1 on one node, 2 and 3 on another
    me = Rank(number, count)
    me.change(1, me.handles("first"))
    me.works()
    before = held()
    for uuid in range(2, 5):
        handles = me.handles(f"{uuid} goes")
        if number < count - 1:
            me.change(10 * uuid, handles[:-1])
            me.works()
        if uuid == 4:
            has_a_short_limit_until_it_is_made(me)
        me.change(10 * uuid + 1, me.handles(f"{uuid} is back"), datetime.timedelta(seconds=LIMIT_S))
        me.works()
    until(lambda: len(held()) <= len(before), told=lambda: held() ^ before)
    me.store.set(f"waits/{number}", "")
    if number == 0:  # longer than the limit that the last change had in the end, but not than a collective
        me.store.wait([f"waits/{rank}" for rank in range(1, count)], datetime.timedelta(seconds=LIMIT_S))
        with contextlib.suppress(RuntimeError):
            me.store.wait(["nobody sets it"], datetime.timedelta(seconds=3 * EXPIRES_S))
    me.works()
    handles = me.handles("end")
    if number == count - 1:
        os._exit(0)
    with pytest.raises(WorldError, match="rank 3"):
        me.change(90, handles)
    me.change(91, me.handles("left", count - 1))
    me.works()


def has_a_short_limit_until_it_is_made(me: Rank) -> None:
    """What the next change makes gets a short limit, which the group replaces by its own."""
    make = me.group._make

    def making(*args: Any) -> Any:
        made = make(*args)
        made.set_timeout(datetime.timedelta(seconds=EXPIRES_S))
        return made

    me.group._make = making


@pytest.mark.slow
def test_ranks_come_and_go_over_two_nodes() -> None:
    *others, gone = run_ranks(over_two_nodes, 4, init=False, collect_errors=True)
    failed = [each.text for each in others if isinstance(each, RankError)]
    assert not failed and isinstance(gone, RankError) and gone.exit_code == 0, "\n".join(failed)


NEVER_IMPORTS_US = """
import sys
import torch
import torch.distributed as dist

for name in ("cpu:shm,cuda:nccl", "shm"):
    assert "guozhuang.groups.shared_memory" not in sys.modules or name == "shm"
    dist.init_process_group(name, rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(1))
    found = dist.get_backend_impl(None, torch.device("cpu")) if hasattr(dist, "get_backend_impl") else dist.group.WORLD
    print(type(dist.group.WORLD).__name__, found is dist.group.WORLD)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.versions
def test_a_script_that_never_imports_us() -> None:
    done = python("-c", NEVER_IMPORTS_US)
    assert done.stdout.splitlines() == ["SharedMemoryGroup True"] * 2, done.stderr

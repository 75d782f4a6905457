"""Ranks that die, leave, stall or err: every other rank is told in time, by name, and nothing hangs."""

import contextlib
import datetime
import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, UsageError
from guozhuang.gradients.named import NamedChannel, NamedEngine, NegotiationError, Settings, Tuner, control, stalls
from guozhuang.gradients.named import channel as channels
from guozhuang.gradients.named import engine as engines
from guozhuang.gradients.named.control import ChannelGroups
from guozhuang.gradients.named.execution import Executor
from guozhuang.groups.agreement import store_of
from guozhuang.groups.gloo import Crossing
from guozhuang.groups.shared_memory import SharedMemoryGroup
from tests.processes.negotiating import an_engine, full, reduced, reducing, run_engines, together
from tests.processes.shm_ranks import held, run_shm_ranks
from tests.ranks import RankError
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

BACKENDS = pytest.mark.parametrize("name", ["shm", "gloo"])
# For what takes seconds on each.
SLOW_ON_GLOO = pytest.mark.parametrize("name", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])


def wait_for(store: dist.Store, *keys: str) -> None:
    store.wait(list(keys), datetime.timedelta(seconds=LIMIT_S))


def waits_for_what_comes() -> None:
    """The cause of a failure, an answer of the store and the end of a thread come at last, however slow the machine is."""
    for module, name in ((engines, "_PATIENCE_S"), (engines, "_END_S"), (stalls, "_STORE_S")):
        setattr(module, name, LIMIT_S)


class Clock:
    """A clock for the watch and the channels of this process, which the test sets forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        told = SimpleNamespace(monotonic=self.monotonic, sleep=time.sleep)
        stalls.time = channels.time = told  # type: ignore[attr-defined, assignment]
        stalls.StallWatch.__init__.__defaults__ = (0.1,)  # type: ignore[attr-defined]

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def fails(engine: NamedEngine, pattern: str, *handles: object) -> None:
    """Every handle fails with that text, and so does what comes later."""
    for handle in handles:
        with pytest.raises(NegotiationError, match=pattern):
            handle.wait()  # type: ignore[attr-defined]
    with pytest.raises(NegotiationError, match=pattern):
        reduced(engine.world, "later", full(1.0))
    assert engine.failure is not None


def killed(rank: int, n: int, where: str) -> bool:
    assert dist.group.WORLD is not None
    waits_for_what_comes()
    engine = NamedEngine(dist.group.WORLD, Settings())
    part = engine.add(range(n - 1))
    for i in range(3):
        reduced(engine.world, f"{i}", full(1.0))
    together(engine.world)
    if rank == n - 1:
        if where == "busy":
            num_reduced = 0

            def die() -> None:
                until(lambda: num_reduced >= 3)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=die).start()
            while True:
                reduced(engine.world, "x", full(1.0, 1_000_000))
                num_reduced += 1
        wait_for(engine._store, *(f"waits/{each}" for each in range(n - 1)))
        os.kill(os.getpid(), signal.SIGKILL)
    tells_when_it_waits(engine)
    of_part = reducing(part, "of the part", full(1.0)) if rank == 0 and n > 2 else None  # the others never ask for it
    if where == "adding":
        with pytest.raises(NegotiationError, match=f"rank {n - 1} "):
            engine.add([0])
        fails(engine, f"rank {n - 1} ")
    elif where == "idle":
        pending = [reducing(engine.world, "x", full(1.0)), reducing(engine.world, "y", full(1.0))]
        fails(engine, f"rank {n - 1} ", *pending)
    else:
        with pytest.raises(NegotiationError, match=f"rank {n - 1} "):
            while True:
                reduced(engine.world, "x", full(1.0, 1_000_000))
        fails(engine, f"rank {n - 1} ")
    if of_part is not None:
        fails(engine, f"rank {n - 1} ", of_part)
    engine.close()
    return True


def tells_when_it_waits(engine: NamedEngine) -> None:
    """A key tells that this rank waits for another one: in a round of the world's channel, or to agree on a new channel."""
    groups = engine.world._groups
    assert groups is not None
    key = f"waits/{engine.world.rank}"
    exchange, look = groups.exchange, engine._look

    def exchanging(message: bytes) -> list[bytes]:
        engine.world._rounds._exchange = exchange
        engine._store.set(key, "")
        return exchange(message)

    def looking() -> None:
        engine._store.set(key, "")
        look()

    engine.world._rounds._exchange = exchanging
    engine._look = looking  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("num_ranks", "where", "name"),
    [(2, "adding", "gloo"), (4, "idle", "shm"), (4, "idle", "gloo"), (3, "busy", "shm"), (3, "busy", "gloo")],
)
def test_a_rank_that_was_killed_is_named_at_once(num_ranks: int, where: str, name: str) -> None:
    # Nobody waits for the time-out of the group.
    *others, lost = run_shm_ranks(killed, num_ranks, where, name=name, collect_errors=True, group_timeout_s=NEVER_S)
    assert isinstance(lost, RankError) and lost.exit_code == -signal.SIGKILL
    for each in others:
        assert each is True, each.text


def leaves_early(rank: int, n: int) -> None:
    with an_engine() as engine:
        reduced(engine.world, "x", full(1.0))
        if rank == 0:
            handle = reducing(engine.world, "y", full(1.0))
            with pytest.raises(NegotiationError, match=r"shut down by rank 1.*allreduce\.y"):
                handle.wait()
            with pytest.raises(NegotiationError, match="shut down by rank 1"):
                reducing(engine.world, "z", full(1.0))
            assert "shut down by rank 1" in str(engine.failure)
            engine.failure = None


@BACKENDS
def test_what_is_under_way_fails_when_a_rank_leaves(name: str) -> None:
    run_shm_ranks(leaves_early, 2, name=name)


def left_alone(rank: int, n: int) -> None:
    waits_for_what_comes()
    engines._LEAVE_S = EXPIRES_S  # type: ignore[misc]
    with an_engine() as engine:
        reduced(engine.world, "x", full(1.0))
        if rank == 1:
            reducing(engine.world, "y", full(1.0))  # it waits in a round for the other one
            stop = NamedChannel.stop

            def slow_stop(*args: Any) -> None:
                stop(*args)
                engine._store.set("stopped", "")
                wait_for(engine._store, "refused")

            NamedChannel.stop = slow_stop  # type: ignore[assignment, method-assign]
            engine.close()
            engine.close()
            with pytest.raises(NegotiationError, match="shut down"):
                reducing(engine.world, "y", full(1.0))
            return
        wait_for(engine._store, "stopped")  # idle: nobody tells it
        with pytest.raises(NegotiationError, match="rank 1"):  # and no zeros in place of what failed there
            reduced(engine.world, "y", full(1.0))
        engine._store.set("refused", "")
        engine.failure = None


@SLOW_ON_GLOO
def test_a_rank_leaves_though_the_others_are_idle(name: str) -> None:
    run_shm_ranks(left_alone, 2, name=name, group_timeout_s=NEVER_S)


def again_and_again(rank: int, n: int) -> None:
    before = held()
    for turn in range(2):
        with an_engine() as engine:
            part = engine.add([0, 1])
            if part.rank is not None:
                assert reduced(part, "x", full(1.0))[0].eq(2).all()
            assert reduced(engine.world, f"{turn}", full(1.0))[0].eq(n).all()
            if turn == 0:
                engine.remove(part)
        threads = [thread.name for thread in threading.enumerate() if "negotiated" in thread.name]
        assert not threads
    added_while_it_fails()
    gc.collect()  # of what was raised, some refers to itself, and to a group
    left = remaining(lambda: held() - before)  # gloo closes its connections when it pleases
    assert not left, left


def added_while_it_fails() -> None:
    assert dist.group.WORLD is not None
    engine = NamedEngine(dist.group.WORLD, Settings())
    groups = engines.ChannelGroups

    def meanwhile(*args: Any) -> ChannelGroups:
        engine.fail("something came in between")
        return groups(*args)

    engines.ChannelGroups = meanwhile  # type: ignore[assignment, misc]
    with pytest.raises(NegotiationError, match="came in between"):
        engine.add(range(engine.world.size))
    engines.ChannelGroups = groups  # type: ignore[misc]
    engine.close()
    assert not [thread.name for thread in threading.enumerate() if "negotiated" in thread.name]


@SLOW_ON_GLOO
def test_engines_come_and_go_and_leave_nothing(name: str) -> None:
    run_shm_ranks(again_and_again, 3, name=name)


def errs(rank: int, n: int) -> None:
    assert dist.group.WORLD is not None
    waits_for_what_comes()
    engine = NamedEngine(dist.group.WORLD, Settings())
    reduced(engine.world, "x", full(1.0))
    if rank == 1:

        def no_memory(*_: object) -> None:
            raise RuntimeError("not here")

        Executor._all_reduce = no_memory  # type: ignore[assignment, method-assign]
    pattern = "ended after RuntimeError: not here"  # not: a peer is lost
    if rank == 2:

        def fail(*_: object) -> None:
            until(lambda: 1 in engine._notices.reports())  # rank 0 gets the text of rank 1, not this one's alone
            raise OSError("nothing can be found out")

        engine._notices.ends = fail  # type: ignore[assignment, method-assign]
        pattern = "cannot go on"
    fails(engine, pattern, reducing(engine.world, "x", full(1.0)), reducing(engine.world, "y", full(1.0)))
    engine.close()


@BACKENDS
def test_an_error_in_the_thread_fails_all_ranks_with_its_text(name: str) -> None:
    run_shm_ranks(errs, 3, name=name)


def stalls_for_a_while(rank: int, n: int, folder: str) -> None:
    clock, log = Clock(), Path(folder) / f"{rank}"
    logging.getLogger("guozhuang").addHandler(logging.FileHandler(log))
    with an_engine(Settings(stall_warning_s=1000.0)) as engine:
        store = engine._store
        reduced(engine.world, "x", full(1.0))
        if rank != 1:
            handle = reducing(engine.world, "stalled", full(1.0))
            other = f"pending/{2 - rank}"
            until(lambda: store.check([other]) and "allreduce.stalled" in json.loads(store.get(other)).get("0", ()))
            clock.ahead_s += 1001.0
            until(lambda: rank == 2 or "missing" in log.read_text())
            looks_again(engine)
            store.set(f"looked/{rank}", "")
        else:
            wait_for(store, "looked/0", "looked/2")
            handle = reducing(engine.world, "stalled", full(1.0))
        assert handle.wait()[0].eq(n).all()
        if rank == 2:
            handle = reducing(engine.world, "of rank 2", full(1.0))
            clock.ahead_s += 1001.0
            until(lambda: "missing" in log.read_text())
            store.set("told", "")
        else:
            wait_for(store, "told")
            handle = reducing(engine.world, "of rank 2", full(1.0))
        assert handle.wait()[0].eq(n).all()


def looks_again(engine: NamedEngine) -> None:
    """Return when the watch has looked once more, from the beginning to the end."""
    before = engine._watch.num_looks
    until(lambda: engine._watch.num_looks >= before + 2)


@SLOW_ON_GLOO
def test_a_stall_is_reported_once_with_the_ranks_that_are_missing(name: str, tmp_path: Path) -> None:
    run_shm_ranks(stalls_for_a_while, 3, str(tmp_path), name=name, group_timeout_s=NEVER_S)
    logs = [(tmp_path / f"{rank}").read_text() for rank in range(3)]
    assert "missing: rank 1 for allreduce.stalled" in logs[0], logs
    assert "rank 2 for" not in logs[0] and "x" not in logs[0].partition("missing")[2].split()
    assert logs[1] == "" and "stalled" not in logs[2].replace("stalled: ranks", "")
    assert "missing: rank 0 for allreduce.of rank 2" in logs[2] and "missing: rank 1 for allreduce.of rank 2" in logs[2]
    assert logs[0].count("missing: rank 1 for allreduce.stalled") == 1, "not at every look"


def joins_for_long(rank: int, n: int, folder: str) -> None:
    clock = Clock()
    logging.getLogger("guozhuang").addHandler(logging.FileHandler(f"{folder}/{rank}"))
    with an_engine(Settings(stall_warning_s=1000.0, stall_stop_s=1500.0)) as engine:
        channel, store = engine.world, engine._store
        reduced(channel, "x", full(1.0))
        if rank == 0:
            for step in range(8):
                wait_for(store, f"looked/{step}")
                reduced(channel, "x", full(1.0))
            wait_for(store, "looked/8")
            channel.join().wait()
            return
        handle = channel.join()
        for step in range(9):
            until(lambda: clock.monotonic() - channel.pending_since()["join"] < 500.0)  # the end of that round
            clock.ahead_s += 500.0  # all together longer than both limits
            looks_again(engine)
            store.set(f"looked/{step}", "")
        handle.wait()


def test_a_join_is_no_stall_as_long_as_others_go_on(tmp_path: Path) -> None:
    run_shm_ranks(joins_for_long, 2, str(tmp_path))
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["", ""]


def stalls_for_ever(rank: int, n: int) -> None:
    waits_for_what_comes()
    clock = Clock()
    assert dist.group.WORLD is not None
    engine = NamedEngine(dist.group.WORLD, Settings(stall_check=False, stall_stop_s=1000.0))
    reduced(engine.world, "x", full(1.0))
    store = store_of(dist.group.WORLD)
    if rank == 1:
        wait_for(store, "failed/0", "failed/2")
        with pytest.raises(NegotiationError, match=r"rank \d"):
            reduced(engine.world, "y", full(1.0))
    else:
        handle = reducing(engine.world, "y", full(1.0))
        clock.ahead_s += 1001.0
        fails(engine, "missing: rank 1 for allreduce.y", handle)
        store.set(f"failed/{rank}", "")
    engine.close()
    assert not [thread.name for thread in threading.enumerate() if "negotiated" in thread.name]


@SLOW_ON_GLOO
def test_a_stall_ends_at_its_limit(name: str) -> None:
    run_shm_ranks(stalls_for_ever, 3, name=name, group_timeout_s=NEVER_S)


def expires_soon_once_connected() -> None:
    """Groups for rounds are made with a long time-out, and get a short one just before the engine sets its own."""
    crossing, twin = control.Crossing, ChannelGroups._twin
    soon = datetime.timedelta(seconds=EXPIRES_S)

    def connected(*args: Any) -> Crossing:
        made = crossing(*args)
        made.group._get_backend(torch.device("cpu"))._set_default_timeout(soon)
        return made

    def another(self: ChannelGroups, *args: Any) -> Any:
        made = twin(self, *args)
        if isinstance(made, SharedMemoryGroup):
            made.set_timeout(soon)
        return made

    control.Crossing = connected  # type: ignore[assignment, misc]
    ChannelGroups._twin = another  # type: ignore[method-assign]


def wait_longer_than_that(engine: NamedEngine, late: int, waiting: int) -> None:
    """A rank comes back from here after another one has waited in a round for longer than such a time-out."""
    tells_when_it_waits(engine)
    if engine.world.rank == late:
        wait_for(engine._store, f"waits/{waiting}")
        with contextlib.suppress(RuntimeError):
            engine._store.wait(["nobody sets it"], datetime.timedelta(seconds=3 * EXPIRES_S))


def waits_longer_than_the_time_out(rank: int, n: int) -> None:
    expires_soon_once_connected()
    with an_engine() as engine:
        together(engine.world)
        wait_longer_than_that(engine, late=1, waiting=0)
        assert reduced(engine.world, "x", full(1.0))[0].eq(2).all()


@SLOW_ON_GLOO
def test_an_idle_peer_is_no_error(name: str) -> None:
    run_shm_ranks(waits_longer_than_the_time_out, 2, name=name)


def one_cannot_begin(rank: int) -> None:
    def cannot(settings: Settings) -> Tuner:
        raise UsageError("no log can be written")

    assert dist.group.WORLD is not None
    with pytest.raises(UsageError if rank == 0 else MismatchError, match="no log can be written"):
        NamedEngine(dist.group.WORLD, Settings(autotune=cannot))


def ends_after_its_group(rank: int, n: int) -> None:
    assert dist.group.WORLD is not None
    for limit in ("_LEAVE_S", "_END_S"):
        setattr(engines, limit, NEVER_S)  # the end does not wait for them either
    limits: list[float] = []
    crossing = control.Crossing

    def limited(store: object, rank: int, size: int, timeout_s: float, address: str) -> Crossing:
        limits.append(timeout_s)
        return crossing(store, rank, size, timeout_s, address)  # type: ignore[arg-type]

    control.Crossing = limited  # type: ignore[assignment, misc]
    with pytest.raises(MismatchError, match="cache_capacity = 1"):
        NamedEngine(dist.group.WORLD, Settings(cache_capacity=1 + rank))
    one_cannot_begin(rank)
    with an_engine() as engine:
        reduced(engine.world, "x", full(1.0))
        dist.barrier()
        dist.destroy_process_group()
    assert set(limits) <= {NEVER_S}, "a rank that dies while all connect ends it at the time-out of the group"


@BACKENDS
def test_an_engine_may_end_after_its_group(name: str) -> None:
    run_shm_ranks(ends_after_its_group, 2, name=name, group_timeout_s=NEVER_S)


def forks(engine: NamedEngine) -> None:
    assert reduced(engine.world, "x", torch.ones(2))[0].eq(2).all()
    pending = reducing(engine.world, "later", torch.ones(2)) if engine.world.rank == 0 else None
    pid = os.fork()
    if pid == 0:
        calls: list[Callable[[], object]] = [
            lambda: reducing(engine.world, "x", torch.ones(2)),
            lambda: engine.world.allocate(5, torch.float32, torch.device("cpu")),
            lambda: engine.add([0]),
        ]
        calls += [] if pending is None else [pending.wait, pending.done]
        for call in calls:
            with pytest.raises(UsageError, match="forked"):
                call()
        engine.close()  # not its own
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    pending = pending or reducing(engine.world, "later", torch.ones(2))
    assert pending.wait()[0].eq(2).all()
    assert reduced(engine.world, "x", torch.ones(2))[0].eq(2).all()


def test_a_forked_child_leaves_the_engine_alone() -> None:
    run_engines(forks, 2)

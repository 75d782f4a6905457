"""Engines of several ranks as threads over one piece of memory: barriers, descriptors, failures."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from guozhuang.errors import UsageError
from guozhuang.groups.shared_memory.engine import (
    ARRIVED_OFFSET,
    CONTROL_BYTES,
    DESCRIPTOR_BYTES,
    DOING_BYTES,
    PRIVATE_BYTES,
    Engine,
    RankState,
    make_engine,
)
from guozhuang.groups.shared_memory.program import (
    ChunkPlace,
    ChunkStream,
    DType,
    Op,
    Outcome,
    Program,
    Status,
    StreamKind,
)
from guozhuang.groups.turns import Turns
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

T = TypeVar("T")

MEET = Program(trailing_barrier=True)
OK = (0, ())


class Ranks:
    """Engines over one anonymous mapping, and a thread for each."""

    def __init__(self, size: int, threads: ThreadPoolExecutor, pidfds: list[list[int]] | None) -> None:
        self.memory = (ctypes.c_char * (size * CONTROL_BYTES)).from_buffer(mmap.mmap(-1, size * CONTROL_BYTES))
        self.controls = [ctypes.addressof(self.memory) + r * CONTROL_BYTES for r in range(size)]
        pidfds = pidfds or [[-1] * size] * size
        self.engines = [make_engine(r, size, self.controls, pidfds[r], [os.getpid()] * size) for r in range(size)]
        self.threads = threads

    def each(self, act: Callable[[int, Engine], T], among: list[int] | None = None) -> list[T]:
        chosen = range(len(self.engines)) if among is None else among
        futures = [self.threads.submit(act, r, self.engines[r]) for r in chosen]
        return [f.result(timeout=LIMIT_S * 2) for f in futures]


@contextmanager
def ranks(size: int, pidfds: list[list[int]] | None = None) -> Iterator[Ranks]:
    with ThreadPoolExecutor(size) as threads:
        yield Ranks(size, threads, pidfds)


def meet(engine: Engine, deadline_s: float = LIMIT_S, spin_us: int = 0) -> Outcome:
    return engine.run(MEET, None, b"", deadline_s, spin_us)


@pytest.mark.parametrize("spin_us", [0, 30])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_nobody_passes_a_barrier_before_all_arrived(spin_us: int, size: int) -> None:
    progress = [0] * size
    num_barriers = 200

    def walk(rank: int, engine: Engine) -> None:
        for step in range(1, num_barriers + 1):
            progress[rank] = step
            assert meet(engine, spin_us=spin_us) == OK
            assert min(progress) >= step and max(progress) <= step + 1

    with ranks(size) as world:
        world.each(walk)
        assert [world.engines[0].arrived_of(r) for r in range(size)] == [num_barriers] * size


def test_the_number_of_barriers_wraps_around() -> None:
    with ranks(3) as world:
        for control in world.controls:
            ctypes.c_uint32.from_address(control + ARRIVED_OFFSET).value = 2**32 - 3
        outcomes = world.each(lambda _, engine: [meet(engine) for _ in range(6)])
        assert outcomes == [[OK] * 6] * 3
        assert world.engines[0].arrived_of(2) == 3


def test_one_barrier_operations_see_each_others_descriptors() -> None:
    """Each rank reads the others' private parts at its own pace, while quick ranks begin the next operation."""
    num_operations = 150

    def operate(rank: int, engine: Engine) -> None:
        for number in range(num_operations):
            private = b"%d of %d" % (rank, number)
            assert engine.run(MEET, b"operation %d" % number, private, LIMIT_S, 20) == OK
            if number % 13 == rank and number < num_operations - 1:  # it is the slow one this time
                until(lambda number=number: all(engine.arrived_of(r) == number + 2 for r in {0, 1, 2} - {rank}))
            found = [p.rstrip(b"\0") for p in engine.privates()]
            assert found == [b"%d of %d" % (r, number) for r in range(3)]

    with ranks(3) as world:
        world.each(operate)


def test_descriptors_that_differ() -> None:
    with ranks(3) as world:
        target = torch.zeros(4)
        copy = ChunkStream(
            StreamKind.COPY, 1, 16, 16, (ChunkPlace(target.data_ptr()),), (ChunkPlace(torch.ones(4).data_ptr()),)
        )

        def operate(rank: int, engine: Engine) -> Outcome:
            assert engine.run(MEET, b"same", b"", LIMIT_S, 0) == OK
            text = b"x" * (DESCRIPTOR_BYTES - 1) + (b"b" if rank == 1 else b"a")
            return engine.run(Program((copy,)), text, bytes([rank]) * PRIVATE_BYTES, LIMIT_S, 0)

        assert world.each(operate) == [(Status.DIFFER, (1,)), (Status.DIFFER, (0, 2)), (Status.DIFFER, (1,))]
        assert [d[-1:] for d in world.engines[0].descriptors()] == [b"a", b"b", b"a"]
        assert world.engines[2].privates() == [bytes([r]) * PRIVATE_BYTES for r in range(3)]
        assert not target.any(), "a rank worked on after the descriptors differed"


def test_what_was_made_for_the_private_bytes_of_all_ranks_runs_at_once() -> None:
    """A rank that must look at them first runs its program by itself: the others notice nothing."""
    told = tuple(bytes([r]) * PRIVATE_BYTES for r in range(3))
    other = (*told[:2], bytes([9]) * PRIVATE_BYTES)
    targets = [torch.zeros(4) for _ in told]
    ones = torch.ones(4)
    with ranks(3) as world:

        def operate(rank: int, engine: Engine) -> Outcome:
            place = ChunkPlace(targets[rank].data_ptr())
            copy = ChunkStream(StreamKind.COPY, 0, 16, 16, (place,), (ChunkPlace(ones.data_ptr()),))
            then = Program((copy,), 1, trailing_barrier=True)
            expected = other if rank == 1 else told
            outcome = engine.run(MEET, b"placed", told[rank], LIMIT_S, 0, expected, then)
            if rank == 1:
                assert not targets[rank].any()
                assert engine.run(then, None, b"", LIMIT_S, 0) == OK
            return outcome

        assert world.each(operate) == [OK, (Status.UNEXPECTED, ()), OK]
        assert torch.stack(targets).tolist() == [[1.0] * 4] * 3
        assert world.engines[0].arrived_of(1) == 2


def test_a_run_without_descriptor_continues_the_operation() -> None:
    with ranks(2) as world:

        def operate(rank: int, engine: Engine) -> list[bytes]:
            assert engine.run(MEET, b"long", b"%d" % rank, LIMIT_S, 0) == OK
            assert engine.run(Program(num_rounds=4), None, b"ignored", LIMIT_S, 0) == OK
            return [p.rstrip(b"\0") for p in engine.privates()]

        assert world.each(operate) == [[b"0", b"1"]] * 2
        assert world.engines[0].arrived_of(1) == 4


def test_staged_all_reduce() -> None:
    """A real collective: each rank copies its tensor into its ring, sums its part of all rings, copies the sums out."""
    size, num_elements, chunk = 3, 40_000, 1_000
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(num_elements, generator=generator) for _ in range(size)]
    expected = (tensors[0] + tensors[1] + tensors[2]) * 0.25
    rings = [torch.zeros(3 * chunk) for _ in range(size)]
    results = [torch.zeros(3 * chunk) for _ in range(size)]
    share = chunk // size

    def reduce_all(rank: int, engine: Engine) -> Outcome:
        ring = [ChunkPlace(r.data_ptr(), chunk * 4) for r in rings]
        first = rank * share
        mine = share if rank < size - 1 else chunk - first
        # Own part of every chunk: the rings' slots are chunk_bytes apart, the part begins at `first`.
        parts = tuple(ChunkPlace(r.data_ptr() + first * 4, chunk * 4) for r in rings)
        sums = tuple(ChunkPlace(r.data_ptr() + first * 4, chunk * 4) for r in results)
        num_chunks = num_elements // chunk
        program = Program(
            (
                ChunkStream(
                    StreamKind.COPY,
                    0,
                    num_elements * 4,
                    chunk * 4,
                    (ring[rank],),
                    (ChunkPlace(tensors[rank].data_ptr()),),
                ),
                ChunkStream(
                    StreamKind.REDUCE, 1, num_chunks * mine * 4, mine * 4, sums, parts, DType.F32, Op.SUM, 0.25
                ),
                ChunkStream(
                    StreamKind.COPY,
                    2,
                    num_elements * 4,
                    chunk * 4,
                    (ChunkPlace(tensors[rank].data_ptr()),),
                    (ChunkPlace(results[rank].data_ptr(), chunk * 4),),
                ),
            ),
        )
        return engine.run(program, b"all_reduce", b"", LIMIT_S, 20)

    with ranks(size) as world:
        assert world.each(reduce_all) == [OK] * size
    for tensor in tensors:
        assert torch.equal(tensor, expected)


def test_a_late_rank_is_named_when_the_time_runs_out() -> None:
    with ranks(4) as world:
        first, second, third, fourth = world.engines
        assert meet(first, deadline_s=EXPIRES_S) == (Status.LATE, (1, 2, 3))
        assert meet(third, deadline_s=EXPIRES_S) == (Status.LATE, (1, 3)), "the first one has arrived"
        assert meet(second, deadline_s=EXPIRES_S) == (Status.LATE, (3,))
        # The deadline holds in the middle of a program too: at its second barrier.
        assert fourth.run(Program(num_rounds=5), None, b"", EXPIRES_S, 100) == (Status.LATE, (0, 1, 2))
        assert fourth.arrived_of(3) == 2


def test_a_wait_ends_when_another_thread_of_the_rank_leaves() -> None:
    with ranks(2) as world:

        def act(rank: int, engine: Engine) -> Outcome:
            if rank == 1:  # it never comes
                return OK

            def leave() -> None:
                until(lambda: engine.arrived_of(0))
                engine.set_state(RankState.LEFT)

            leaving = threading.Thread(target=leave)
            leaving.start()
            try:
                return meet(engine, deadline_s=NEVER_S)
            finally:
                leaving.join()

        assert world.each(act)[0] == (Status.LEFT, (0,))


@pytest.mark.parametrize(("state", "status"), [(RankState.LEFT, Status.LEFT), (RankState.BROKEN, Status.BROKEN)])
def test_a_peer_that_left_or_broke_is_noticed_at_once(state: RankState, status: Status) -> None:
    with ranks(3) as world:

        def act(rank: int, engine: Engine) -> Outcome:
            assert meet(engine) == OK
            if rank == 1:
                until(lambda: engine.arrived_of(0) == engine.arrived_of(2) == 2)  # they wait
                engine.set_state(state)
                return OK
            return meet(engine, deadline_s=NEVER_S)

        outcomes = world.each(act)
        assert (outcomes[0], outcomes[2]) == ((status, (1,)), (status, (1,)))
        assert [world.engines[0].state_of(r) for r in range(3)] == [RankState.ALIVE, state, RankState.ALIVE]


@contextmanager
def dying_child() -> Iterator[tuple[int, int]]:
    """A child process that does nothing: its pid and a pidfd."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "3600"], {})
    pidfd = os.pidfd_open(child)
    try:
        yield child, pidfd
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pidfd)


def test_a_dead_peer_is_lost_only_if_it_did_not_arrive() -> None:
    with dying_child() as (child, pidfd), ranks(3, [[-1, pidfd, -1]] * 3) as world:

        def act(rank: int, engine: Engine) -> list[Outcome]:
            if rank == 1:  # arrives once, then its process dies
                return [meet(engine)]
            if rank == 2:  # comes to the first barrier after that
                until(lambda: engine.arrived_of(0) == engine.arrived_of(1) == 1)
                os.kill(child, signal.SIGKILL)
                until(lambda: select.select([pidfd], [], [], 0)[0])
            return [meet(engine), meet(engine, deadline_s=NEVER_S)]

        futures = world.each(act)
        assert futures == [[OK, (Status.LOST, (1,))], [OK], [OK, (Status.LOST, (1,))]]


def test_a_lost_rank_is_named_before_one_that_broke_because_of_it() -> None:
    with dying_child() as (child, pidfd), ranks(3, [[-1, -1, pidfd]] * 3) as world:
        os.kill(child, signal.SIGKILL)
        world.engines[1].set_state(RankState.BROKEN)
        assert meet(world.engines[0]) == (Status.LOST, (2,))


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_socket_tells_of_the_end_too(kind: socket.SocketKind) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with mine, theirs, ranks(2, [[-1, mine.fileno()], [-1, -1]]) as world:
        theirs.send(b"a message that waits")
        assert meet(world.engines[0], deadline_s=EXPIRES_S) == (Status.LATE, (1,))
        theirs.close()
        assert meet(world.engines[0]) == (Status.LOST, (1,))


def test_an_interrupt_in_the_main_thread_breaks_the_rank() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ranks(2) as world:

        def interrupt() -> None:
            while not world.engines[1].arrived_of(0):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            meet(world.engines[0])
        thread.join()
        assert world.engines[0].state_of(0) == RankState.BROKEN
        assert meet(world.engines[1]) == OK, "the rank had arrived at this barrier"
        assert meet(world.engines[1]) == (Status.BROKEN, (0,))


def test_waiting_does_not_hold_the_interpreter() -> None:
    with ranks(2) as world:
        waiting = world.threads.submit(meet, world.engines[0])
        # This thread goes on while the other rank waits; else it would look only when the time of that one is over.
        until(lambda: world.engines[1].arrived_of(0))
        with pytest.raises(RuntimeError, match="under way"):
            meet(world.engines[0])
        assert meet(world.engines[1]) == OK and waiting.result() == OK


def test_what_ranks_say_they_do() -> None:
    with ranks(2) as world:
        world.engines[1].set_doing(b"all_reduce of 1024 float32")
        assert world.engines[0].doing(1) == "all_reduce of 1024 float32"
        world.engines[1].set_doing(b"\xff" + b"y" * 500)
        assert world.engines[0].doing(1) == "\ufffd" + "y" * (DOING_BYTES - 1)
        world.engines[1].set_doing(b"")
        assert [world.engines[0].doing(r) for r in (0, 1)] == ["", ""]
        with pytest.raises(ValueError, match="rank"):
            world.engines[0].doing(2)


def test_arguments_that_make_no_sense() -> None:
    with ranks(1) as world:
        engine = world.engines[0]
        for arguments in (
            (MEET, b"x" * (DESCRIPTOR_BYTES + 1), b"", 1.0, 0),
            (MEET, b"", b"x" * (PRIVATE_BYTES + 1), 1.0, 0),
            (Program(), b"no barrier to compare after", b"", 1.0, 0),
            (MEET, None, b"", float("nan"), 0),
            (MEET, None, b"", 1.0, -1),
            (Program(num_rounds=0), None, b"", 1.0, 0),
            (MEET, b"", b"", 1.0, 0, (b"short",), MEET),
            (MEET, b"", b"", 1.0, 0, (), MEET),
            (MEET, b"", b"", 1.0, 0, (bytes(PRIVATE_BYTES),), None),
        ):
            with pytest.raises(ValueError):
                engine.run(*arguments)
        assert engine.arrived_of(0) == 0
        assert engine.run(MEET, b"x" * DESCRIPTOR_BYTES, b"", 1.0, 0) == OK
        with pytest.raises(ValueError):
            make_engine(1, 1, world.controls, [-1], [0])
        with pytest.raises(ValueError):
            make_engine(0, 2, world.controls, [-1], [0])


def test_more_ranks_than_cores_wake_each_other() -> None:
    """Short spins that end in sleep: an arrival may or may not find a sleeper.

    Each forgotten wake-up costs 100 ms, so that ranks that forget them do not come through in time.
    """
    num_barriers = 1500
    with ranks(8) as world:
        outcomes = world.each(lambda _, e: [e.run(Program(num_rounds=num_barriers), None, b"", num_barriers * 0.1, 1)])
        assert outcomes == [[OK]] * 8


@pytest.mark.parametrize("inline", [False, True])
def test_a_job_that_waits_for_itself_raises(inline: bool) -> None:
    turns = Turns("guozhuang-test", 0)

    def job() -> None:
        with pytest.raises(UsageError, match="inside another"):
            turns.later(lambda: None, [], "all_reduce").wait()
        with pytest.raises(UsageError, match="inside another"):
            turns.now(lambda: None, [], "barrier")

    if inline:
        turns.now(job, [], "outer")
    else:
        turns.later(job, [], "outer").wait(datetime.timedelta(seconds=NEVER_S))
    assert turns.close(RuntimeError("closed"), LIMIT_S)

"""Sends and receives of the shared-memory group; and what becomes of them when a rank does not come, dies, or gives up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError
from guozhuang.groups.shared_memory.engine import MAIL_BYTES, MAIL_OFFSET, STATE_OFFSET, RankState
from guozhuang.groups.shared_memory.point_to_point import PointToPoint
from guozhuang.groups.shared_memory.point_to_point.messages import STREAM
from guozhuang.groups.shared_memory.point_to_point.transfers import Ended, Transfer
from guozhuang.groups.shared_memory.rendezvous import Peers
from tests.processes.shm_peers import (
    a_store,
    barrier,
    group,
    run,
    state_of,
    word,
)
from tests.processes.shm_ranks import run_shm_ranks
from tests.ranks import RankError
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until


def value_of(source: int, tag: int, turn: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * source + 100 * tag + turn


SIZES = (0, 1, 17, 4096, 4097, 70_000, 65536 * 5 + 3)


def many(rank: int, size: int) -> None:
    """Everybody sends to everybody, all at once, in an order of its own; per source and tag it arrives in order."""
    tags, turns = 3, 12
    sizes = torch.randint(len(SIZES), (tags, turns), generator=torch.Generator().manual_seed(1)).tolist()
    others = [peer for peer in range(size) if peer != rank]
    shuffled = torch.randperm(tags * len(others), generator=torch.Generator().manual_seed(rank)).tolist()
    with group(rank, size) as (_, _, p2p):
        sends: list[Transfer | Ended] = []
        receives: list[tuple[Transfer | Ended, torch.Tensor, int, int]] = []
        for turn in range(turns):
            for at in shuffled:
                peer, tag = others[at // tags], at % tags
                length = SIZES[sizes[tag][turn]]
                sends.append(p2p.send(value_of(rank, tag, turn, length), peer, tag))
            for at in reversed(shuffled):
                peer, tag = others[at // tags], at % tags
                length = SIZES[sizes[tag][turn]]
                into = torch.full((length,), -1.0)
                receives.append((p2p.recv(into, peer, tag), into, tag, turn))
        for transfer, into, tag, turn in receives:
            transfer.wait()
            source = transfer.sender
            assert source in others
            assert into.equal(value_of(source, tag, turn, len(into))), (source, tag, turn)
        for send in sends:
            send.wait()


def order(rank: int, size: int, crowded: bool) -> None:
    """A transfer that could begin or end at once does not overtake one from before, wherever that waits."""
    sizes = [3, 3000] * 150
    with group(rank, size, crowded=crowded) as (_, _, p2p):
        attendant = p2p._attendant
        with keeping_away(p2p):
            barrier(size)
            if rank == 0:
                with attendant.lock:  # so that the first one waits until the lock is free
                    works = [p2p.send(torch.full((3,), 0.0), 1, 5)]
                works += [
                    p2p.send(torch.full((n,), float(i)), 1, 5) for i, n in enumerate(sizes, 1)
                ]  # the ring is full soon
            barrier(size)
            if rank == 1:
                into = [torch.zeros(n) for n in (3, *sizes)]
                with attendant.lock:
                    works = [p2p.recv(into[0], 0, 5)]
                works += [p2p.recv(each, 0, 5) for each in into[1:]]
        for work in works:
            work.wait()
        if rank == 1:
            assert [each.unique().tolist() for each in into] == [[float(i)] for i in range(len(into))]
        barrier(size)
        got = {i: torch.zeros(3) for i in range(6)}
        with keeping_away(p2p):
            if rank == 1:
                posted = p2p.recv(got[0], 0, 6)
                assert not posted.is_completed()  # which begins it
            barrier(size)
            if rank == 0:
                works = [p2p.send(torch.full((3,), float(i)), 1, tag) for i, tag in enumerate((6, 7, 8, 7, 6))]
            barrier(size)
            if rank == 1:
                p2p.recv(got[4], 0, 6).wait()  # after the one that is posted
                p2p.recv(got[2], 0, 8).wait()  # those of tag 7 were offered meanwhile
            barrier(size)
            if rank == 0:
                works.append(p2p.send(torch.full((3,), 5.0), 1, 7))
            barrier(size)
            for i in (1, 3, 5) if rank == 1 else ():
                p2p.recv(got[i], 0, 7).wait()
        if rank == 1:
            assert posted.is_completed() and all((values == i).all() for i, values in got.items()), got
        for work in works:
            work.wait()
        barrier(size)


@contextlib.contextmanager
def keeping_away(p2p: PointToPoint) -> Iterator[None]:
    """Meanwhile the own thread does not process what arrives."""
    attendant, own = p2p._attendant, p2p._thread
    process = attendant._process
    attendant._process = lambda ready: 0.01 if threading.current_thread() is own else process(ready)
    try:
        yield
    finally:
        attendant._process = process
        attendant.wake()


@pytest.mark.parametrize("crowded", [True, False])
def test_nothing_overtakes_what_came_before(crowded: bool) -> None:
    run(order, 2, crowded)


def interrupted(rank: int, size: int) -> str:
    """A send that raises when its offer has been sent: the receiver does not take what lies there later for the values."""
    with group(rank, size) as (_, _, p2p):
        tensor = torch.full((30_000,), 1.0)  # read by the receiver
        if rank == 0:
            barrier(size)

            def make(*_: Any) -> Any:
                raise KeyboardInterrupt

            p2p._one_message._make = make
            with pytest.raises(KeyboardInterrupt):
                p2p.send(tensor, 1, 1)
            tensor.fill_(-1)
            barrier(size)
            with pytest.raises(WorldError, match="ended after KeyboardInterrupt"):
                p2p.send(tensor, 1, 1)
            return ""
        with keeping_away(p2p):
            barrier(size)
            barrier(size)
        with pytest.raises(PeerLost) as caught:
            p2p.recv(tensor, 0, 1).wait()
        return str(caught.value)


def test_a_send_that_was_interrupted_gives_no_later_values() -> None:
    assert "closed its end" in run(interrupted, 2, way="reads")[1]


@pytest.mark.slow  # it finds a race by chance
def test_receives_may_be_posted_while_another_thread_sends() -> None:
    run(posts_and_sends, 2)


def posts_and_sends(rank: int, size: int) -> None:
    with group(rank, size, crowded=False) as (_, _, p2p):
        before = sys.getswitchinterval()
        sys.setswitchinterval(2e-6)
        into = [torch.zeros(1) for _ in range(2000)]
        receives: list[Any] = []
        thread = threading.Thread(target=lambda: receives.extend(p2p.recv(each, 1 - rank, 1) for each in into))
        thread.start()
        sends = [p2p.send(torch.full((1,), float(i)), 1 - rank, 1) for i in range(len(into))]
        thread.join()
        sys.setswitchinterval(before)
        for work in (*sends, *receives):
            work.wait()
        assert torch.cat(into).equal(torch.arange(2000.0))


def test_two_receive_what_many_threads_send() -> None:
    run(threads_send, 2)


def threads_send(rank: int, size: int) -> None:
    with group(rank, size) as (_, _, p2p):
        done: list[int] = []

        def work(tag: int) -> None:
            for turn in range(30):
                expected = value_of(0, tag, turn, 30_000)
                tensor = expected if rank == 0 else torch.empty(30_000)
                (p2p.send(tensor, 1, tag) if rank == 0 else p2p.recv(tensor, 0, tag)).wait()
                assert tensor.equal(expected)
            done.append(tag)

        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [0, 1, 2, 3]


def any_source(rank: int, size: int) -> None:
    with group(rank, size) as (_, _, p2p):
        if rank:
            for turn in range(10):
                p2p.send(value_of(rank, 5, turn, 5000), 0, 5).wait()
        else:
            turns = dict.fromkeys(range(1, size), 0)
            for _ in range(10 * (size - 1)):
                into = torch.empty(5000)
                transfer = p2p.recv(into, None, 5)
                transfer.wait()
                source = transfer.sender
                assert source is not None
                assert into.equal(value_of(source, 5, turns[source], 5000))
                turns[source] += 1
            assert set(turns.values()) == {10}
        barrier(size)


def differ(rank: int, size: int) -> None:
    with group(rank, size) as (_, _, p2p):
        for length, dtype in ((10, torch.float32), (100_000, torch.float64)):
            mine = torch.zeros(length, dtype=dtype) if rank == 0 else torch.zeros(11, dtype=torch.float64)
            transfer = p2p.send(mine, 1, 3) if rank == 0 else p2p.recv(mine, 0, 3)
            called: list[bool] = []
            transfer.when_done(lambda called=called: called.append(True))
            with pytest.raises(MismatchError) as caught:
                transfer.wait()
            name = str(dtype).removeprefix("torch.")
            table = " ".join(str(caught.value).split())
            assert f"0 sends {length} {name}" in table and "1 receives 11 float64" in table and "tag 3" in table
            assert transfer.is_completed() and isinstance(transfer.exception(), MismatchError)
            transfer.when_done(lambda called=called: called.append(True))
            assert len(called) == 2 and not mine.any()
        # The connection is as good as before.
        tensor = torch.full((9,), float(rank))
        (p2p.send(tensor, 1, 3) if rank == 0 else p2p.recv(tensor, 0, 3)).wait()
        assert not tensor.any()
        for wrong in (rank, size, -1):
            with pytest.raises(UsageError):
                p2p.send(tensor, wrong, 0)
        barrier(size)


TOO_LATE = f"rank 1 did not come within {EXPIRES_S:g} s "


def too_late(rank: int, size: int) -> None:
    with group(rank, size, timeout_s=EXPIRES_S) as (_, _, p2p):
        small, large = torch.zeros(3), torch.zeros(1_000_000)
        if rank == 0:
            waiting = [p2p.send(small, 1, 1), p2p.send(large, 1, 2), p2p.recv(small.clone(), 1, 3)]
            anybody, patient = p2p.recv(small.clone(), None, 4), p2p.recv(small, 1, 5, NEVER_S)
            with pytest.raises(PeerLost):
                patient.wait(timedelta(seconds=EXPIRES_S))  # this wait alone
            assert not patient.is_completed()
            for transfer in waiting:
                with pytest.raises(PeerLost, match=TOO_LATE + "to the (send|recv) of") as caught:
                    transfer.wait()
                assert caught.value.rank == 1 and "tag" in caught.value.waiting_in
            with pytest.raises(WorldError, match=f"no rank sent anything within {EXPIRES_S:g} s"):
                anybody.wait()
        barrier(size)
        # What was given up is not matched with what comes later.
        for tag in (1, 2, 3, 4):
            tensor = torch.full((7,), 5.0 if rank == 0 else -1.0)
            (p2p.send(tensor, 1, tag, NEVER_S) if rank == 0 else p2p.recv(tensor, 0, tag, NEVER_S)).wait()
            assert (tensor == 5).all()
        if rank == 0:
            patient.wait()
        else:
            p2p.send(torch.ones(3), 0, 5, NEVER_S).wait()
        barrier(size)


def given_up_unheard(rank: int, size: int) -> None:
    """A send that was given up while the other rank processed nothing is not received afterwards."""
    with group(rank, size) as (_, _, p2p):
        if rank == 0:
            given_up = p2p.send(torch.zeros(3), 1, 1)
            barrier(size)
            with p2p._attendant.lock:
                p2p._withdraw(given_up, given_up.too_late(None))
            barrier(size)
            p2p.send(torch.full((7,), 5.0), 1, 1).wait()
        else:
            until(lambda: bool(p2p._under_way._offers))
            tensor = torch.zeros(7)
            with p2p._attendant.lock:
                barrier(size)
                barrier(size)
                receive = p2p.recv(tensor, 0, 1)
                p2p._process(None)
            receive.wait()
            assert (tensor == 5).all()
        barrier(size)


def before_a_payload(p2p: PointToPoint, callback: Callable[[], None]) -> None:
    """Call a function once where this process has begun to receive a large payload."""
    hear = p2p._hear

    def hear_and_call(peer: int, kind: int, *more: Any) -> None:
        hear(peer, kind, *more)
        if kind == STREAM:
            p2p._hear = hear  # type: ignore[method-assign]
            callback()

    p2p._hear = hear_and_call  # type: ignore[method-assign]


def stop_at_the_payload(p2p: PointToPoint) -> None:
    before_a_payload(p2p, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def wait_until_stopped(pid: int) -> None:
    until(lambda: state_of(pid) == "T", told=lambda: "it was not stopped")


def shorten(p2p: PointToPoint, transfer: Transfer | Ended) -> None:
    """Have a transfer that is under way time out soon."""
    assert isinstance(transfer, Transfer)
    with p2p._attendant.lock:
        transfer.limit_s = EXPIRES_S
        transfer.deadline = p2p._earliest_deadline = time.monotonic() + EXPIRES_S
    p2p._attendant.wake()


def stopped(rank: int, size: int) -> None:
    """Rank 1 is stopped in the middle of a large payload; later sends to others get through, and it can go on."""
    with group(rank, size) as (peers, _, p2p):
        large = torch.zeros(20_000_000)
        if rank == 1:
            stop_at_the_payload(p2p)
            with pytest.raises(PeerLost):
                p2p.recv(large, 0, 0).wait()
        if rank == 0:
            transfer = p2p.send(large, 1, 0)
            wait_until_stopped(peers.pids[1])
            shorten(p2p, transfer)
            try:
                with pytest.raises(PeerLost, match=TOO_LATE):
                    transfer.wait()
            finally:
                os.kill(peers.pids[1], signal.SIGCONT)
        barrier(size)
        tensor = torch.full((1_000_000,), float(rank))
        if rank < 2:
            (p2p.send(tensor, 1, 0) if rank == 0 else p2p.recv(tensor, 0, 0)).wait()
            assert not tensor.any()
        barrier(size)


def dies(rank: int, size: int) -> bool:
    """Rank 1 sends something small, is stopped in the middle of something large, and is killed there."""
    with group(rank, size) as (peers, _, p2p):
        large = torch.zeros(50_000_000)
        if rank == 1:
            p2p.send(torch.full((5,), 3.0), 0, 9)
            p2p.send(large, 0, 1)
            signal.pause()
        into = torch.zeros_like(large)
        if rank == 0:
            has_begun = threading.Event()

            def stop() -> None:
                os.kill(peers.pids[1], signal.SIGSTOP)
                wait_until_stopped(peers.pids[1])
                has_begun.set()

            before_a_payload(p2p, stop)
            waiting = [p2p.recv(into, 1, 1), p2p.recv(into, 1, 2), p2p.send(large, 1, 3), p2p.recv(into, None, 4)]
            assert has_begun.wait(LIMIT_S)
            os.kill(peers.pids[1], signal.SIGKILL)
        else:
            waiting = [p2p.recv(into, 1, 1), p2p.send(large, 1, 3), p2p.recv(into, None, 4)]
        poller = select.poll()
        poller.register(peers.pidfds[1])
        poller.poll()
        for transfer in waiting:
            with pytest.raises(PeerLost) as caught:
                transfer.wait()
            assert (caught.value.rank, caught.value.pid) == (1, peers.pids[1])
            assert "(tag" in caught.value.waiting_in and "while this rank waited in the" in str(caught.value)
        for later in (p2p.send(large, 1, 0), p2p.recv(into, 1, 0), p2p.recv(into, None, 7)):
            with pytest.raises(PeerLost):
                later.wait()
        if rank == 0:  # what came before the end counts
            small = torch.zeros(5)
            p2p.recv(small, 1, 9).wait()
            assert (small == 3).all()
        # The others go on.
        tensor = torch.full((100_000,), float(rank))
        (p2p.send(tensor, 2, 0) if rank == 0 else p2p.recv(tensor, 0, 0)).wait()
        assert not tensor.any()
        if rank == 2:
            p2p.send(tensor[:1], 0, 1).wait()
        else:
            p2p.recv(tensor[:1], 2, 1).wait()
        return True


def test_a_killed_rank_fails_what_waits_for_it_and_nothing_else() -> None:
    results = run(dies, 3, collect_errors=True)
    assert isinstance(results[1], RankError) and results[1].exit_code == -signal.SIGKILL
    assert results[0] is True and results[2] is True, results


def is_between(peers: Peers, p2p: PointToPoint, tensor: torch.Tensor) -> bool:
    """Whether all of a tensor lies in the memory that its sender and its receiver share."""
    with p2p._attendant.lock:  # else the thread of the group may be about to say that the last piece is there
        mails = [ctypes.string_at(segment.address + MAIL_OFFSET, MAIL_BYTES) for segment in peers.segments]
    return any(tensor.numpy().tobytes() in mail for mail in mails)


def dies_having_sent_all(rank: int, size: int) -> None:
    """Rank 1 dies with all of its payload on the way; rank 0 receives it, and goes on with rank 2."""
    with group(rank, size) as (peers, _, p2p):
        tensor = torch.full((60_000,), float(rank))
        if rank == 1:
            sending = p2p.send(tensor, 0, 0)
            barrier(size)
            until(lambda: is_between(peers, p2p, tensor))
            assert not sending.is_completed()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            poller = select.poll()
            poller.register(peers.pidfds[1])
            before_a_payload(p2p, poller.poll)
        barrier(size)
        if rank == 0:
            p2p.recv(tensor, 1, 0).wait()
            assert (tensor == 1).all()
            with pytest.raises(PeerLost):
                p2p.recv(torch.zeros(1), 1, 1).wait()
        value = torch.full((100_000,), float(rank))
        (p2p.send(value, 2, 5) if rank == 0 else p2p.recv(value, 0, 5)).wait()
        assert not value.any()


def test_a_death_at_the_end_of_a_payload_harms_nobody_else() -> None:
    results = run(dies_having_sent_all, 3, collect_errors=True)
    assert [results[0], results[2]] == [None, None]


def leaves(rank: int, size: int) -> None:
    """Workers leave one after the other; the receiver from any rank fails only when nobody is left."""
    with group(rank, size) as (peers, _, p2p):
        if rank:
            barrier(size)
            if rank > 1:
                a_store().wait([f"left/{rank - 1}"], timedelta(seconds=NEVER_S))
            p2p.send(torch.full((4,), float(rank)), 0, 0).wait()
            word(peers.segments[rank].address + STATE_OFFSET).value = RankState.LEFT
            a_store().set(f"left/{rank}", "")
        else:
            directed = p2p.recv(torch.empty(4), 1, 8)
            barrier(size)
            for expected in range(1, size):
                into = torch.zeros(4)
                transfer = p2p.recv(into, None, 0)
                transfer.wait()
                assert transfer.sender == expected and (into == expected).all()
            with pytest.raises(PeerLost, match="left the group"):
                directed.wait()
            with pytest.raises(PeerLost, match="left the group"):
                p2p.recv(torch.zeros(4), None, 0).wait()


def closes(rank: int, size: int) -> None:
    with group(rank, size) as (_, _, p2p):
        waiting = [p2p.recv(torch.empty(3), 1 - rank, 0), p2p.recv(torch.empty(3), None, 1)]
        waiting += [p2p.send(torch.empty(10_000_000), 1 - rank, 2)]
        barrier(size)
        p2p.close()
        for transfer in waiting:
            with pytest.raises(WorldError):
                transfer.wait()
        with pytest.raises(WorldError, match="destroyed"):
            p2p.send(torch.empty(3), 1 - rank, 0)
        p2p.close()
        barrier(size)


def one_gives_up(rank: int, size: int) -> None:
    """Rank 1's group breaks while the others wait for it in transfers; they go on among themselves."""
    with group(rank, size) as (peers, _, p2p):
        other, large = (0, 2)[rank == 0], torch.zeros(1_000_000)
        waiting = [p2p.send(large, other if rank == 1 else 1, 1), p2p.recv(large.clone(), other if rank == 1 else 1, 2)]
        waiting.append(p2p.recv(large.clone(), None, 3))
        barrier(size)
        if rank == 1:
            word(peers.segments[1].address + STATE_OFFSET).value = RankState.BROKEN
            for transfer in waiting:
                with pytest.raises(WorldError, match="this group is broken"):
                    transfer.wait()
            with pytest.raises(WorldError, match="this group is broken"):
                p2p.send(large, 0, 0)
        else:
            for transfer in (*waiting[:2], p2p.send(large, 1, 5), p2p.recv(large.clone(), 1, 5)):
                with pytest.raises(PeerLost, match=r"rank 1 .* gave up on the group") as caught:
                    transfer.wait()
                assert caught.value.rank == 1
            tensor = torch.full((1_000_000,), float(rank))
            (p2p.send(tensor, other, 4) if rank == 0 else p2p.recv(tensor, other, 4)).wait()
            assert not tensor.any() and not waiting[2].is_completed()
        barrier(size)
        if rank == 2:
            word(peers.segments[2].address + STATE_OFFSET).value = RankState.BROKEN
        if rank == 0:
            with pytest.raises(PeerLost, match="gave up on the group"):  # nobody is left that could send
                waiting[2].wait()
        barrier(size)


def test_transfers_learn_that_a_rank_gave_up() -> None:
    run(one_gives_up, 3)


def falls_over(rank: int, size: int) -> None:
    """The thread of rank 1 meets what nobody thought of."""
    with group(rank, size) as (_, _, p2p):
        with pytest.raises(UsageError, match="a tag is a 64-bit number"):
            p2p.send(torch.zeros(3), 1 - rank, 1 << 63)
        waiting = [p2p.recv(torch.zeros(3), 1 - rank, 0), p2p.recv(torch.zeros(3), None, 1)]
        waiting.append(p2p.send(torch.zeros(1_000_000), 1 - rank, 2))
        barrier(size)
        if rank == 1:

            def fail(*_: object) -> None:
                raise KeyError("made up")

            p2p._match = fail  # type: ignore[method-assign]
            waiting.append(p2p.recv(torch.zeros(1_000_000), 0, 2))
            for transfer in waiting:
                with pytest.raises(WorldError, match="KeyError: 'made up'") as caught:
                    transfer.wait()
            assert isinstance(caught.value.__cause__, KeyError)
            with pytest.raises(WorldError, match="KeyError"):
                p2p.recv(torch.zeros(3), 0, 0)
            del caught
        else:
            for transfer in waiting:
                with pytest.raises(PeerLost) as caught:
                    transfer.wait()
            del caught
        barrier(size)
        del waiting, transfer


def one_is_stopped(rank: int, size: int) -> None:
    """Rank 1 is stopped in the middle of a payload of rank 0; rank 0 sends to rank 2 all the same."""
    with group(rank, size) as (peers, _, p2p):
        large = torch.zeros(20_000_000)
        if rank == 1:
            stop_at_the_payload(p2p)
            with pytest.raises(PeerLost):
                p2p.recv(large, 0, 0).wait()
        elif rank == 0:
            transfer = p2p.send(large, 1, 0)
            wait_until_stopped(peers.pids[1])
            try:
                p2p.send(large[:2_000_000], 2, 0).wait()
                assert not transfer.is_completed()
                shorten(p2p, transfer)
                with pytest.raises(PeerLost, match=TOO_LATE):
                    transfer.wait()
                p2p.send(large[:2_000_000], 2, 0).wait()
            finally:
                os.kill(peers.pids[1], signal.SIGCONT)
        else:
            for _ in range(2):
                into = torch.ones(2_000_000)
                p2p.recv(into, 0, 0).wait()
                assert not into.any()
        barrier(size)


def sends_on_a_broken_group(rank: int, size: int) -> None:
    tensor = torch.zeros(3)
    waiting = dist.irecv(torch.zeros(3), 1 - rank, tag=5)
    with pytest.raises(MismatchError) as first:
        dist.all_reduce(torch.ones(3 + rank))
    for call in (lambda: dist.send(tensor, 1 - rank), lambda: dist.recv(tensor, 1 - rank)):
        with pytest.raises(MismatchError) as caught:
            call()
        assert str(caught.value) == str(first.value)
    assert waiting is not None
    with pytest.raises((MismatchError, WorldError)):  # the latter if the peer has left by then
        waiting.wait()
    del first, caught


def takes_its_timeout(rank: int, size: int) -> None:
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
    if rank == 0:
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=EXPIRES_S))
        with pytest.raises(PeerLost, match=f"did not come within {EXPIRES_S:g} s"):
            dist.recv(torch.ones(3), 1)
        group.set_timeout(timedelta(seconds=NEVER_S))
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)


def receives_apart(rank: int, size: int) -> None:
    """Whoever waits for a receive into a tensor that is not contiguous finds all of it, from whichever thread."""
    for turn in range(5):
        whole = torch.full((1500, 1500), -1.0)
        if rank == 0:
            dist.send(torch.full((1500, 1500), float(turn)), 1)
            continue
        work = dist.irecv(whole.T, 0)
        assert work is not None
        found: list[bool] = []
        start = threading.Barrier(4)

        def wait(work: Any, whole: torch.Tensor, turn: int, start: threading.Barrier, found: list[bool]) -> None:
            start.wait()
            work.wait()
            found.append(bool((whole == turn).all()))

        threads = [threading.Thread(target=wait, args=(work, whole, turn, start, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4

    with pytest.raises(UsageError, match="share memory"):
        dist.irecv(torch.zeros(1).expand(5), 1 - rank)


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        pytest.param(many, 3, id="everything_arrives_in_order"),
        pytest.param(any_source, 4, id="any_source"),
        pytest.param(differ, 2, id="a_difference_is_raised_on_both_ranks"),
        pytest.param(too_late, 2, id="a_transfer_without_its_other_side_ends_in_time"),
        pytest.param(given_up_unheard, 2, id="what_was_given_up_unheard_is_not_received"),
        pytest.param(stopped, 2, id="a_stopped_rank_is_given_up_in_time_and_can_go_on"),
        pytest.param(leaves, 4, id="ranks_may_leave_while_others_receive"),
        pytest.param(closes, 2, id="closing_ends_what_is_under_way"),
        pytest.param(falls_over, 2, id="a_thread_that_falls_over_fails_everything_and_hangs_nobody"),
        pytest.param(one_is_stopped, 3, id="a_stopped_rank_does_not_hold_up_the_others"),
    ],
)
def test_ranks_that_have_met(case: Callable[..., Any], num_ranks: int) -> None:
    run(case, num_ranks)


@pytest.mark.parametrize("way", ["reads", pytest.param("cannot", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [(many, 3), (any_source, 4), (differ, 2), (too_late, 2), (given_up_unheard, 2), (leaves, 4), (closes, 2)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_payloads_that_the_receiver_reads(case: Callable[..., Any], num_ranks: int, way: str) -> None:
    run(case, num_ranks, way=way)


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        pytest.param(sends_on_a_broken_group, 2, id="a_broken_group_sends_nothing"),
        pytest.param(takes_its_timeout, 2, id="a_changed_timeout_holds_for_sends_and_receives"),
        pytest.param(receives_apart, 2, id="a_receive_that_has_ended_is_complete_for_every_thread"),
    ],
)
def test_groups_of_torch_distributed(case: Callable[..., Any], num_ranks: int) -> None:
    run_shm_ranks(case, num_ranks)

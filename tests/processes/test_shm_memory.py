"""Ranks meet, share memory, send and receive; and what is left when one of them does not come, dies, or breaks off."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError
from guozhuang.groups.shared_memory import rendezvous as meeting
from guozhuang.groups.shared_memory.arena import Arena
from guozhuang.groups.shared_memory.engine import MAIN_BYTES, STATE_OFFSET, RankState
from guozhuang.groups.shared_memory.point_to_point import PointToPoint
from guozhuang.groups.shared_memory.rendezvous import Peers, identity, meet
from guozhuang.groups.shared_memory.segments import Segment
from guozhuang.groups.shared_memory.transfers import Transfer
from tests.processes.shm_ranks import run_shm_ranks
from tests.ranks import RankError, run_ranks

SOON_S = 1.0  # within which a death is noticed
TIMEOUT_S = 20.0


def run(fn: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """Run ranks that have a store in a file, and no process group with sockets and threads of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(fn, num_ranks, *args, init=False, env={"MEETING_PLACE": f"{folder}/store"}, **options)


def held() -> tuple[int, int, int]:
    """Descriptors, mappings of anonymous files, and threads of this process."""
    gc.collect(1)  # young objects alone: all those of the imported modules take a second
    maps = sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


@functools.cache
def a_store() -> dist.Store:
    return dist.PrefixStore("test/", dist.FileStore(os.environ["MEETING_PLACE"]))


def barrier(size: int) -> None:
    """All ranks arrive before any goes on."""
    store = a_store()
    goal = -(-store.add("arrivals", 1) // size) * size
    deadline = time.monotonic() + 40
    while store.add("arrivals", 0) < goal:
        assert time.monotonic() < deadline, "a rank of the test did not come"
        time.sleep(0.002)


def met(rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Peers:
    return meet(a_store(), rank, size, timeout_s, Segment.create(MAIN_BYTES, "guozhuang-main"))


@contextlib.contextmanager
def group(rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[Peers, Arena, PointToPoint]]:
    """All that this rank has of a group; afterwards nothing is left of it."""
    before = held()
    peers = met(rank, size)
    arena, p2p = Arena(peers), PointToPoint(peers, timeout_s)
    try:
        yield peers, arena, p2p
    finally:
        p2p.close()
        arena.close()
        peers.close()
        peers.close()
    del peers, arena, p2p
    after = held()
    assert after == before, f"(descriptors, mappings, threads): {before} before, {after} afterwards"


def word(address: int) -> Any:
    return ctypes.c_uint32.from_address(address)


# Meeting.


def shares(rank: int, size: int) -> None:
    with group(rank, size) as (peers, arena, _):
        assert peers.pids[rank] == os.getpid() and len(set(peers.pids)) == size
        assert [fd >= 0 for fd in peers.pidfds] == [peer != rank for peer in range(size)]
        for fd in (*peers.pidfds, *(c.fileno() for c in peers.channels if c is not None)):
            assert fd < 0 or not os.get_inheritable(fd)
        assert all(segment.fd == -1 for segment in peers.segments)
        word(peers.segments[rank].address + 4096).value = 100 + rank
        tensor = arena.empty(50_000, torch.float32).fill_(rank)
        place = arena.locate(tensor[7:])
        assert place is not None
        arena.announce(place[0])
        barrier(size)
        assert [word(segment.address + 4096).value for segment in peers.segments] == [100 + r for r in range(size)]
        for peer in range(size):
            address = arena.address_at(peer, *place)
            assert ctypes.c_float.from_address(address).value == peer
            assert arena.address_at(peer, *place) == address
        barrier(size)
        del tensor


@pytest.mark.parametrize("size", [1, 2, 8])
def test_ranks_see_each_others_memory_and_leave_nothing(size: int) -> None:
    run(shares, size)


def meets_late(rank: int, size: int) -> str:
    before = held()
    if rank == size - 1:
        return ""
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        met(rank, size, timeout_s=1.0)
    assert 0.9 < time.monotonic() - start < 3.0
    text = str(caught.value)
    del caught
    assert held() == before
    return text


def test_who_does_not_come_is_named() -> None:
    texts = run(meets_late, 4)
    assert all("ranks [3] did not come within 1 s" in text for text in texts[:3])


def breaks_off(rank: int, size: int, where: str, how: str) -> str:
    """Rank 1 fails in a step of the meeting; the others learn of it long before the time is up."""
    before = held()
    if rank == 1:

        def fail(*_: object) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("made up")

        setattr(meeting._MeshSetup, where, fail)
    start = time.monotonic()
    try:
        met(rank, size, timeout_s=15.0).close()
        text = "met"
    except KeyError:
        text = "KeyError"
    except PeerLost as error:
        assert error.rank in range(size) and error.waiting_in == "making the group"
        text = f"lost {error.rank}"
    assert time.monotonic() - start < 5.0
    assert held() == before
    return text


@pytest.mark.parametrize("where", ["_open_pidfd", "_connect", "_accept", "_share", "_take_main"])
@pytest.mark.parametrize("how", ["killed", "exception"])
def test_a_rank_that_breaks_off_in_the_middle(where: str, how: str) -> None:
    """Ranks that lost it may in turn be what others lose; nobody waits for the time-out, and nothing is left anywhere."""
    results = run(breaks_off, 4, where, how, collect_errors=True)
    if how == "killed":
        assert isinstance(results[1], RankError) and results[1].exit_code == -signal.SIGKILL
    else:
        assert results[1] == "KeyError"
    others = [results[0], *results[2:]]
    if where == "_take_main":  # it had given all that the others need
        assert set(others) <= {"met", "lost 1", "lost 0", "lost 2", "lost 3"}
    else:
        assert all(str(result).startswith("lost") for result in others), others
        assert "lost 1" in others


def is_broken_after_failing(rank: int, size: int) -> None:
    """A rank that failed late tells those that have met already."""
    if rank == 1:
        real = meeting._MeshSetup._take_main

        def fail(self: Any, peer: int) -> Segment:
            taken = real(self, peer)
            taken.close()
            barrier(size)
            raise KeyError("made up")

        meeting._MeshSetup._take_main = fail  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            met(rank, size)
        barrier(size)
    else:
        peers = met(rank, size)
        barrier(size)
        barrier(size)
        assert word(peers.segments[1].address + STATE_OFFSET).value == RankState.BROKEN
        peers.close()


def test_a_rank_that_failed_late_is_broken_for_the_others() -> None:
    run(is_broken_after_failing, 2)


def strangers(rank: int, size: int) -> str:
    """Ranks 0 and 1 meet, while rank 2 and rank 1 itself crowd rank 0's door."""
    store, open_sockets = a_store(), []

    def crowd(card: list[Any], hello: bytes, number: int) -> None:
        for _ in range(number):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.settimeout(0.2)
            open_sockets.append(stranger)
            try:
                stranger.connect(f"\0{card[1]}")
                if hello:
                    socket.send_fds(stranger, [hello], [0])
            except OSError:  # the queue is full, or the door is closed by now
                return

    # So that rank 2 knows the secrets of both; the sockets' names stay random.
    meeting.secrets = SimpleNamespace(token_bytes=lambda num: b"k" * num, token_hex=meeting.secrets.token_hex)
    before = held()
    if rank > 0:
        card = json.loads(store.get("card/0"))
        right = meeting._HELLO.pack(b"gz01", 1, 0, b"k" * 16, b"k" * 16)
        if rank == 1:  # the right process, but not the secrets; or no words, or too many
            for secrets in ((b"k" * 16, bytes(16)), (bytes(16), b"k" * 16)):
                crowd(card, meeting._HELLO.pack(b"gz01", 1, 0, *secrets), 3)
            crowd(card, b"", 2)
            crowd(card, right + b"x", 2)
            store.set("go", "")
        else:
            store.wait(["go"])
            crowd(card, right, 4)  # the secrets, but not the right process
            crowd(card, b"", 30)  # the queue is full now
            store.set("full", "")
    if rank == 1:
        store.wait(["full"])
    if rank < 2:
        start = time.monotonic()
        peers = met(rank, 2)
        assert time.monotonic() - start < 10
        (peers.channels[1 - rank] or socket.socket()).send(b"hello")
        barrier(size)
        assert (peers.channels[1 - rank] or socket.socket()).recv(100) == b"hello"
        peers.close()
    else:
        barrier(size)
    for each in open_sockets:
        each.close()
    assert held() == before
    return "met"


def test_strangers_are_dropped_and_hold_nobody_up() -> None:
    assert run(strangers, 3) == ["met"] * 3


def wrong_listener(rank: int, size: int) -> None:
    """Rank 0's card names a socket on which another process listens."""
    store = a_store()
    if rank == 2:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0guozhuang-test-impostor")
        listener.listen(8)
        store.set("card/0", json.dumps([os.getppid(), "guozhuang-test-impostor", "00" * 16, identity()]))
        barrier(size)
        listener.close()
    elif rank == 1:
        with pytest.raises(PeerLost, match="is not the process that listens in its place"):
            met(1, 2)
        barrier(size)
    else:
        barrier(size)


def test_a_listener_of_another_process_is_not_trusted() -> None:
    run(wrong_listener, 3)


def other_node(rank: int, size: int) -> None:
    meeting.identity = lambda: f"node {rank}"
    with pytest.raises(WorldError, match="cannot share memory"):
        met(rank, size)


def test_ranks_of_different_nodes_do_not_meet() -> None:
    run(other_node, 2)


def without_pidfds(rank: int, size: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "not implemented")

    os.pidfd_open = refuse
    with group(rank, size) as (peers, _, p2p):
        assert all(fd >= 0 for peer, fd in enumerate(peers.pidfds) if peer != rank)
        tensor = torch.full((100_000,), float(rank))
        transfer = p2p.send(tensor, 1, 0) if rank == 0 else p2p.recv(tensor, 0, 0)
        transfer.wait()
        assert not tensor.any()
        barrier(size)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLost):
            p2p.recv(tensor, 1, 0).wait()
        with pytest.raises(PeerLost):
            peers.receive_segment(1, 7, TIMEOUT_S)
        assert time.monotonic() - start < SOON_S + 1


def test_where_there_are_no_pidfds_sockets_tell_of_death() -> None:
    results = run(without_pidfds, 2, collect_errors=True)
    assert results[0] is None, results[0]


# The arena, over real sockets.


def peer_maps(rank: int) -> int:
    return sum(f"guozhuang-arena-{rank} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def frees(rank: int, size: int) -> None:
    """Rank 0 shares and frees; rank 1 unmaps when it begins an operation after it looked, though it shares nothing itself."""
    store = a_store()
    with group(rank, size) as (peers, arena, _):
        if rank == 0:
            for _ in range(500):  # more than a socket holds, and nobody looks at first
                tensor = arena.empty(50_000, torch.float32)
                place = arena.locate(tensor)
                assert place is not None
                arena.announce(place[0])
                del tensor
            assert peer_maps(0) == 0
            store.set("done", "")
            barrier(size)
        else:
            time.sleep(0.5)
            while not store.check(["done"]):
                arena.locate(torch.empty(1))
            for _ in range(64):
                arena.locate(torch.empty(1))
            assert peers.has_freed
            before = peer_maps(0)
            peers.release_freed()
            mapped = peer_maps(0)
            assert before > mapped and not peers.has_freed
            barrier(size)
            assert mapped < 250  # the notes that did not get through at once are told later
        for _ in range(64):
            arena.locate(torch.empty(1))
        barrier(size)
        for _ in range(64):
            arena.locate(torch.empty(1))
        peers.release_freed()
        assert peer_maps(0) == 0
        barrier(size)


def test_freed_memory_is_unmapped_by_the_peers() -> None:
    run(frees, 2)


def workers_hold_sockets(rank: int, size: int) -> float:
    """Rank 1 forks a process that outlives it, as a DataLoader does. Its death is noticed all the same."""
    store = a_store()
    with group(rank, size) as (peers, arena, p2p):
        tensor = arena.empty(50_000, torch.float32).fill_(1)
        place = arena.locate(tensor)
        assert place is not None
        arena.announce(place[0])
        barrier(size)
        if rank == 1:
            worker = os.fork()
            if worker == 0:
                del tensor  # says nothing to the peers
                time.sleep(30)
                os._exit(0)
            store.set("worker", str(worker))
            barrier(size)
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(size)
        worker = int(store.get("worker"))
        try:
            start = time.monotonic()
            for wait in (lambda: peers.receive_segment(1, 99, TIMEOUT_S), p2p.recv(torch.empty(3), 1, 0).wait):
                with pytest.raises(PeerLost) as caught:
                    wait()
                assert (caught.value.rank, caught.value.pid) == (1, peers.pids[1])
            took_s = time.monotonic() - start
            os.kill(worker, 0)  # it lives
            assert ctypes.c_float.from_address(arena.address_at(1, *place)).value == 1  # what came before stays
        finally:
            os.kill(worker, signal.SIGKILL)
        del tensor
        return took_s


def test_a_death_is_noticed_though_workers_hold_the_sockets() -> None:
    results = run(workers_hold_sockets, 2, collect_errors=True)
    assert isinstance(results[0], float), results[0]
    assert results[0] < SOON_S


# Sends and receives.


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
        sends: list[Transfer] = []
        receives: list[tuple[Transfer, torch.Tensor, int, int]] = []
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


def test_everything_arrives_in_order() -> None:
    run(many, 3)


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


def test_any_source() -> None:
    run(any_source, 4)


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


def test_a_difference_is_raised_on_both_ranks() -> None:
    run(differ, 2)


def too_late(rank: int, size: int) -> None:
    with group(rank, size, timeout_s=1.0) as (_, _, p2p):
        small, large = torch.zeros(3), torch.zeros(1_000_000)
        start = time.monotonic()
        if rank == 0:
            waiting = [p2p.send(small, 1, 1), p2p.send(large, 1, 2), p2p.recv(small.clone(), 1, 3)]
            anybody = p2p.recv(small.clone(), None, 4)
            with pytest.raises(PeerLost):
                waiting[0].wait(timedelta(seconds=0.2))  # this wait alone
            assert not waiting[0].is_completed()
            for transfer in waiting:
                with pytest.raises(PeerLost, match=r"rank 1 did not come within 1 s to the (send|recv) of") as caught:
                    transfer.wait()
                assert caught.value.rank == 1 and "tag" in caught.value.waiting_in
            with pytest.raises(WorldError, match="no rank sent anything within 1 s"):
                anybody.wait()
            assert 0.9 < time.monotonic() - start < 3
        barrier(size)
        # What was given up is not matched with what comes later.
        for tag in (1, 2, 3, 4):
            tensor = torch.full((7,), 5.0 if rank == 0 else -1.0)
            (p2p.send(tensor, 1, tag) if rank == 0 else p2p.recv(tensor, 0, tag)).wait()
            assert (tensor == 5).all()
        barrier(size)


def test_a_transfer_without_its_other_side_ends_in_time() -> None:
    run(too_late, 2)


def stopped(rank: int, size: int) -> None:
    """Rank 1 is stopped in the middle of a large payload; later sends to others get through, and it can go on."""
    with group(rank, size, timeout_s=2.0) as (peers, _, p2p):
        large = torch.zeros(100_000_000)  # takes some 50 ms at the least
        if rank == 1:
            with pytest.raises(PeerLost):
                p2p.recv(large, 0, 0).wait()
        if rank == 0:
            transfer = p2p.send(large, 1, 0)
            time.sleep(0.005)
            os.kill(peers.pids[1], signal.SIGSTOP)
            try:
                with pytest.raises(PeerLost, match="rank 1 did not come"):
                    transfer.wait()
            finally:
                os.kill(peers.pids[1], signal.SIGCONT)
        barrier(size)
        tensor = torch.full((1_000_000,), float(rank))
        if rank < 2:
            (p2p.send(tensor, 1, 0) if rank == 0 else p2p.recv(tensor, 0, 0)).wait()
            assert not tensor.any()
        barrier(size)


def test_a_stopped_rank_is_given_up_in_time_and_can_go_on() -> None:
    run(stopped, 2)


def state_of(pid: int) -> str:
    """The state of a process in one letter, as /proc gives it (proc(5)): "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def dies(rank: int, size: int) -> float:
    """Rank 1 sends something small, stands still in the middle of something large, and is killed there."""
    with group(rank, size) as (peers, _, p2p):
        large = torch.zeros(50_000_000)
        if rank == 1:
            p2p.send(torch.full((5,), 3.0), 0, 9)
            p2p.send(large, 0, 1)
            time.sleep(0.2)  # it fills what it has room for
            os.kill(os.getpid(), signal.SIGSTOP)
        into = torch.zeros_like(large)
        if rank == 0:
            while state_of(peers.pids[1]) != "T":
                time.sleep(0.005)
            waiting = [p2p.recv(into, 1, 1), p2p.recv(into, 1, 2), p2p.send(large, 1, 3), p2p.recv(into, None, 4)]
            time.sleep(0.1)  # the beginning arrives
            os.kill(peers.pids[1], signal.SIGKILL)
        else:
            waiting = [p2p.recv(into, 1, 1), p2p.send(large, 1, 3), p2p.recv(into, None, 4)]
        poller = select.poll()
        poller.register(peers.pidfds[1])
        poller.poll()
        start = time.monotonic()
        for transfer in waiting:
            with pytest.raises(PeerLost) as caught:
                transfer.wait()
            assert (caught.value.rank, caught.value.pid) == (1, peers.pids[1])
            assert "(tag" in caught.value.waiting_in and "while this rank waited in the" in str(caught.value)
        took_s = time.monotonic() - start
        for later in (p2p.send(large, 1, 0), p2p.recv(into, 1, 0), p2p.recv(into, None, 7)):
            with pytest.raises(PeerLost):
                later.wait(timedelta(seconds=1))
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
        return took_s


def test_a_killed_rank_fails_what_waits_for_it_and_nothing_else() -> None:
    results = run(dies, 3, collect_errors=True)
    assert isinstance(results[1], RankError) and results[1].exit_code == -signal.SIGKILL
    assert all(isinstance(result, float) and result < SOON_S for result in (results[0], results[2])), results


def dies_having_sent_all(rank: int, size: int) -> None:
    """Rank 1 dies with all of its payload on the way; rank 0 receives it, and goes on with rank 2."""
    with group(rank, size) as (peers, _, p2p):
        tensor = torch.full((60_000,), float(rank))
        if rank == 1:
            p2p.send(tensor, 0, 0)
            barrier(size)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            read = p2p._read

            def read_late(peer: int, *more: Any) -> None:
                if peer == 1 and p2p._under_way.receives:  # it was asked for the payload
                    poller = select.poll()
                    poller.register(peers.pidfds[1])
                    poller.poll()
                read(peer, *more)

            p2p._read = read_late
            transfer = p2p.recv(tensor, 1, 0)
        barrier(size)
        if rank == 0:
            transfer.wait()
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
            time.sleep(0.3 * rank)
            p2p.send(torch.full((4,), float(rank)), 0, 0).wait()
            word(peers.segments[rank].address + STATE_OFFSET).value = RankState.LEFT
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


def test_ranks_may_leave_while_others_receive() -> None:
    run(leaves, 4)


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


def test_closing_ends_what_is_under_way() -> None:
    run(closes, 2)


# What must not happen, though it is rare.


def freed_while_read(rank: int, size: int) -> None:
    """Rank 0 frees what rank 1 is still reading, and rank 1's other thread looks at the notes."""
    with group(rank, size) as (peers, arena, _):
        tensor = arena.empty(50_000, torch.float32).fill_(7)
        place = arena.locate(tensor)
        assert place is not None
        arena.announce(place[0])
        address = arena.address_at(1 - rank, *place)
        barrier(size)
        del tensor
        barrier(size)
        peers.drain()
        assert peers.has_freed and ctypes.c_float.from_address(address).value == 7
        peers.release_freed()
        assert peer_maps(1 - rank) == 0
        barrier(size)


def test_freed_memory_stays_mapped_until_the_next_operation() -> None:
    run(freed_while_read, 2)


def refused_by_the_system(rank: int, size: int) -> None:
    with group(rank, size) as (_, arena, _):
        tensor = arena.empty(50_000, torch.float32)
        place = arena.locate(tensor)
        assert place is not None
        real = socket.send_fds

        def refuse(*_: object) -> int:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

        socket.send_fds = refuse
        with pytest.raises(WorldError, match=f"rank {1 - rank} .*Too many references") as caught:
            arena.announce(place[0])
        assert not isinstance(caught.value, PeerLost)
        socket.send_fds = real
        arena.announce(place[0])
        assert arena.address_at(1 - rank, *place)
        barrier(size)
        del tensor, caught


def test_a_refusal_of_the_system_is_not_taken_for_a_lost_peer() -> None:
    run(refused_by_the_system, 2)


def one_gives_up(rank: int, size: int) -> float:
    """Rank 1's group breaks while the others wait for it in transfers; they go on among themselves."""
    with group(rank, size) as (peers, _, p2p):
        other, large = (0, 2)[rank == 0], torch.zeros(1_000_000)
        waiting = [p2p.send(large, other if rank == 1 else 1, 1), p2p.recv(large.clone(), other if rank == 1 else 1, 2)]
        waiting.append(p2p.recv(large.clone(), None, 3))
        barrier(size)
        start = time.monotonic()
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
        took_s = time.monotonic() - start
        barrier(size)
        if rank == 2:
            word(peers.segments[2].address + STATE_OFFSET).value = RankState.BROKEN
        if rank == 0:
            with pytest.raises(PeerLost, match="gave up on the group"):  # nobody is left that could send
                waiting[2].wait()
        barrier(size)
        return took_s


def test_transfers_learn_that_a_rank_gave_up() -> None:
    assert max(run(one_gives_up, 3)) < SOON_S + 1


def falls_over(rank: int, size: int) -> None:
    """The thread of rank 1 meets what nobody thought of."""
    with group(rank, size) as (_, _, p2p):
        with pytest.raises(UsageError, match="a tag is a 64-bit number"):
            p2p.send(torch.zeros(3), 1 - rank, 1 << 63)
        waiting = [p2p.recv(torch.zeros(3), 1 - rank, 0), p2p.recv(torch.zeros(3), None, 1)]
        waiting.append(p2p.send(torch.zeros(1_000_000), 1 - rank, 2))
        barrier(size)
        start = time.monotonic()
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
        assert time.monotonic() - start < SOON_S + 1
        barrier(size)
        del waiting, transfer


def test_a_thread_that_falls_over_fails_everything_and_hangs_nobody() -> None:
    run(falls_over, 2)


def one_is_stopped(rank: int, size: int) -> None:
    """Rank 1 is stopped in the middle of a payload of rank 0; rank 0 sends to rank 2 all the same."""
    with group(rank, size, timeout_s=2.0) as (peers, _, p2p):
        large = torch.zeros(100_000_000)  # takes some 50 ms at the least
        if rank == 1:
            with pytest.raises(PeerLost):
                p2p.recv(large, 0, 0).wait()
        elif rank == 0:
            transfer = p2p.send(large, 1, 0)
            time.sleep(0.005)
            os.kill(peers.pids[1], signal.SIGSTOP)
            try:
                p2p.send(large[:2_000_000], 2, 0).wait()
                assert not transfer.is_completed()
                with pytest.raises(PeerLost, match="rank 1 did not come within 2 s"):
                    transfer.wait()
                p2p.send(large[:2_000_000], 2, 0).wait()
            finally:
                os.kill(peers.pids[1], signal.SIGCONT)
        else:
            for _ in range(2):
                into = torch.ones(2_000_000)
                p2p.recv(into, 0, 0, timeout_s=20.0).wait()
                assert not into.any()
        barrier(size)


def test_a_stopped_rank_does_not_hold_up_the_others() -> None:
    run(one_is_stopped, 3)


# The same through torch.distributed: making a group, and what became of one.


def member_is_missing(rank: int, size: int, how: str) -> tuple[str, int | None]:
    """Rank 2 ends, or fails, before a group of all was made; the limit is far away."""
    if rank == 2 and how == "ended":
        os._exit(3)
    if rank == 2:

        def fail(*_: object, **__: object) -> Segment:
            raise MemoryError("made up")

        Segment.create = fail  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(Exception, match=r"rank 2|made up") as caught:
        dist.new_group(list(range(size)), backend="shm")
    assert time.monotonic() - start < SOON_S + 1
    return str(caught.value), getattr(caught.value, "rank", None)


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_a_group_with_a_member_that_cannot_come_fails_at_once(how: str) -> None:
    results = run_shm_ranks(member_is_missing, 3, how, collect_errors=True)
    for text, lost in results[:2]:
        if how == "ended":
            assert lost == 2 and "ended before the group was made" in text
        else:
            assert "rank 2 failed before the group was made: MemoryError: made up" in text


def segment_is_refused(rank: int, size: int, where: str) -> None:
    """Rank 1 cannot make, or map, a segment; all learn of it, nothing stays open, and the group goes on."""
    from guozhuang.groups.shared_memory.segments import SharedSegments

    dist.barrier()
    segments = SharedSegments(dist.group.WORLD)  # type: ignore[arg-type]
    before, real = held(), getattr(Segment, where)
    if rank == 1:

        def fail(first: int, *_: object, **__: object) -> Segment:
            if where == "adopt":
                os.close(first)
            raise WorldError("made up")

        setattr(Segment, where, fail)
    start = time.monotonic()
    with pytest.raises(WorldError, match="made up") as caught:
        segments.make(5000, "test")
    assert (rank == 1) == (str(caught.value) == "made up")
    assert time.monotonic() - start < SOON_S + 1
    del caught
    setattr(Segment, where, real)
    assert held() == before
    for segment in segments.make(5000, "test"):
        assert segment is not None
        segment.close()


@pytest.mark.parametrize("where", ["create", "adopt"])
def test_a_segment_that_one_rank_is_refused_is_refused_on_all(where: str) -> None:
    run_shm_ranks(segment_is_refused, 3, where)


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
    start = time.monotonic()
    with pytest.raises((MismatchError, WorldError)):  # the latter if the peer has left by then
        waiting.wait()
    assert time.monotonic() - start < SOON_S + 1
    del first, caught


def test_a_broken_group_sends_nothing() -> None:
    run_shm_ranks(sends_on_a_broken_group, 2)


def takes_its_timeout(rank: int, size: int) -> None:
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
    if rank == 0:
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=0.5))
        start = time.monotonic()
        with pytest.raises(PeerLost, match=r"did not come within 0\.5 s"):
            dist.recv(torch.ones(3), 1)
        assert time.monotonic() - start < 3
        group.set_timeout(timedelta(seconds=20))
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)


def test_a_changed_timeout_holds_for_sends_and_receives() -> None:
    run_shm_ranks(takes_its_timeout, 2)


def is_ended_in_a_fork(rank: int, size: int) -> None:
    """What a forked process does to its copy of the group is not seen by anybody."""
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    child = os.fork()
    if child == 0:
        group.abort()
        group.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == size).all()


def test_a_forked_process_does_not_end_the_group() -> None:
    run_shm_ranks(is_ended_in_a_fork, 2)


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


def test_a_receive_that_has_ended_is_complete_for_every_thread() -> None:
    run_shm_ranks(receives_apart, 2)


def makes_a_group_with_an_old_interpreter(rank: int, n: int) -> float:
    """Built with headers of an old C library, as conda's is."""
    for module, names in ((os, ("memfd_create", "pidfd_open", "MFD_CLOEXEC", "MFD_ALLOW_SEALING")), (fcntl, SEALS)):
        for name in names:
            delattr(module, name)
    group = dist.new_group(backend="shm")
    tensor = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    return float(tensor.sum())


SEALS = [name for name in dir(fcntl) if name.startswith("F_SEAL_") or name in ("F_ADD_SEALS", "F_GET_SEALS")]


def test_a_group_needs_nothing_of_the_interpreter_that_an_old_one_lacks() -> None:
    assert run_shm_ranks(makes_a_group_with_an_old_interpreter, 2) == [300_000.0] * 2

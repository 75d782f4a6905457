"""Ranks meet and share memory; and what is left when one of them does not come, dies, or breaks off."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError
from guozhuang.groups.shared_memory import rendezvous as meeting
from guozhuang.groups.shared_memory.engine import STATE_OFFSET, RankState
from guozhuang.groups.shared_memory.rendezvous import Card, identity
from guozhuang.groups.shared_memory.segments import Segment
from guozhuang.watch.processes import Process
from tests.processes.shm_peers import (
    a_store,
    barrier,
    group,
    held,
    met,
    peer_maps,
    run,
    where,
    word,
)
from tests.processes.shm_ranks import run_shm_ranks
from tests.ranks import RankError
from tests.waiting import EXPIRES_S, NEVER_S


def shares(rank: int, size: int) -> None:
    with group(rank, size) as (peers, arena, _):
        assert peers.pids[rank] == os.getpid() and len(set(peers.pids)) == size
        assert [fd >= 0 for fd in peers.pidfds] == [peer != rank for peer in range(size)]
        for fd in (*peers.pidfds, *(c.fileno() for c in peers.channels if c is not None)):
            assert fd < 0 or not os.get_inheritable(fd)
        assert all(segment.fd == -1 for segment in peers.segments)
        word(peers.segments[rank].address + 4096).value = 100 + rank
        tensor = arena.empty(50_000, torch.float32).fill_(rank)
        place = where(arena, tensor[7:])
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
    a_store().set(f"card/{rank}", "will be another one")  # so that the last rank alone is missing, whoever is how late
    barrier(size - 1)
    with pytest.raises(WorldError) as caught:
        met(rank, size, timeout_s=EXPIRES_S)
    text = str(caught.value)
    del caught
    assert held() == before
    return text


def test_who_does_not_come_is_named() -> None:
    texts = run(meets_late, 4)
    assert all(f"ranks [3] did not come within {EXPIRES_S:g} s" in text for text in texts[:3])


def breaks_off(rank: int, size: int, where: str, how: str) -> str:
    """Rank 1 fails in a step of the meeting; the others learn of it without waiting for the time-out."""
    before = held()
    if rank == 1:

        def fail(*_: object) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("made up")

        setattr(meeting._MeshSetup, where, fail)
    try:
        met(rank, size).close()
        text = "met"
    except KeyError:
        text = "KeyError"
    except PeerLost as error:
        assert error.rank in range(size) and error.waiting_in == "making the group"
        text = f"lost {error.rank}"
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


def strangers(rank: int, size: int) -> str:
    """Ranks 0 and 1 meet, while rank 2 and rank 1 itself crowd rank 0's door."""
    store, open_sockets = a_store(), []

    def crowd(card: Card, hello: bytes, number: int) -> None:
        for _ in range(number):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.setblocking(False)
            open_sockets.append(stranger)
            try:
                stranger.connect(f"\0{card.name}")
                if hello:
                    socket.send_fds(stranger, [hello], [0])
            except OSError:  # the queue is full, or the door is closed by now
                return

    # So that rank 2 knows the secrets of both; the sockets' names stay random.
    meeting.secrets = SimpleNamespace(token_bytes=lambda num: b"k" * num, token_hex=meeting.secrets.token_hex)
    before = held()
    if rank > 0:
        card = Card.read(store.get("card/0").decode())
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
        peers = met(rank, 2)
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
        store.set("card/0", str(Card(Process(os.getppid(), 0, identity()), "guozhuang-test-impostor", "00" * 16, "")))
        barrier(size)
        listener.close()
    elif rank == 1:
        with pytest.raises(PeerLost, match="is not the process that listens in its place"):
            met(1, 2)
        barrier(size)
    else:
        barrier(size)


def other_node(rank: int, size: int) -> None:
    meeting.identity = lambda: f"node {rank}"
    with pytest.raises(WorldError, match="cannot share memory"):
        met(rank, size)


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
        with pytest.raises(PeerLost):
            p2p.recv(tensor, 1, 0).wait()
        with pytest.raises(PeerLost):
            peers.receive_segment(1, 7, NEVER_S)


def test_where_there_are_no_pidfds_sockets_tell_of_death() -> None:
    results = run(without_pidfds, 2, collect_errors=True)
    assert results[0] is None, results[0]


def frees(rank: int, size: int) -> None:
    """Rank 0 shares and frees; rank 1 unmaps when it begins an operation after it looked, though it shares nothing itself."""
    store = a_store()
    with group(rank, size) as (peers, arena, _):
        if rank == 0:
            wait = peers._await

            def tells(*args: Any) -> None:
                store.set("full", "")
                wait(*args)

            peers._await = tells  # type: ignore[method-assign]
            for _ in range(500):  # more than a socket holds, and nobody looks at first
                tensor = arena.empty(50_000, torch.float32)
                place = where(arena, tensor)
                assert place is not None
                arena.announce(place[0])
                del tensor
            assert peer_maps(0) == 0
            store.set("done", "")
            barrier(size)
        else:
            store.wait(["full"])
            while not store.check(["done"]):
                arena.locate(torch.empty(1).data_ptr(), 4)
            for _ in range(64):
                arena.locate(torch.empty(1).data_ptr(), 4)
            assert peers.has_freed
            before = peer_maps(0)
            peers.release_freed()
            mapped = peer_maps(0)
            assert before > mapped and not peers.has_freed
            barrier(size)
            assert mapped < 250  # the notes that did not get through at once are told later
        for _ in range(64):
            arena.locate(torch.empty(1).data_ptr(), 4)
        barrier(size)
        for _ in range(64):
            arena.locate(torch.empty(1).data_ptr(), 4)
        peers.release_freed()
        assert peer_maps(0) == 0
        barrier(size)


def workers_hold_sockets(rank: int, size: int) -> bool:
    """Rank 1 forks a process that outlives it, as a DataLoader does. Its death is noticed all the same."""
    store = a_store()
    with group(rank, size) as (peers, arena, p2p):
        tensor = arena.empty(50_000, torch.float32).fill_(1)
        place = where(arena, tensor)
        assert place is not None
        arena.announce(place[0])
        barrier(size)
        if rank == 1:
            worker = os.fork()
            if worker == 0:
                del tensor  # says nothing to the peers
                time.sleep(600)
                os._exit(0)
            store.set("worker", str(worker))
            barrier(size)
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(size)
        worker = int(store.get("worker"))
        try:
            for wait in (lambda: peers.receive_segment(1, 99, NEVER_S), p2p.recv(torch.empty(3), 1, 0).wait):
                with pytest.raises(PeerLost) as caught:
                    wait()
                assert (caught.value.rank, caught.value.pid) == (1, peers.pids[1])
            os.kill(worker, 0)  # it lives
            assert ctypes.c_float.from_address(arena.address_at(1, *place)).value == 1  # what came before stays
        finally:
            os.kill(worker, signal.SIGKILL)
        del tensor
        return True


def test_a_death_is_noticed_though_workers_hold_the_sockets() -> None:
    results = run(workers_hold_sockets, 2, collect_errors=True)
    assert results[0] is True, results[0]


def freed_while_read(rank: int, size: int) -> None:
    """Rank 0 frees what rank 1 is still reading, and rank 1's other thread looks at the notes."""
    with group(rank, size) as (peers, arena, _):
        tensor = arena.empty(50_000, torch.float32).fill_(7)
        place = where(arena, tensor)
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


def refused_by_the_system(rank: int, size: int) -> None:
    with group(rank, size) as (_, arena, _):
        tensor = arena.empty(50_000, torch.float32)
        place = where(arena, tensor)
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


def member_is_missing(rank: int, size: int, how: str) -> tuple[str, int | None]:
    """Rank 2 ends, or fails, before a group of all was made; the limit is far away."""
    if rank == 2 and how == "ended":
        os._exit(3)
    if rank == 2:

        def fail(*_: object, **__: object) -> Segment:
            raise MemoryError("made up")

        Segment.create = fail  # type: ignore[method-assign]
    with pytest.raises(Exception, match=r"rank 2|made up") as caught:
        dist.new_group(list(range(size)), backend="shm")
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
    with pytest.raises(WorldError, match="made up") as caught:
        segments.make(5000, "test")
    assert (rank == 1) == (str(caught.value) == "made up")
    del caught
    setattr(Segment, where, real)
    assert held() == before
    for segment in segments.make(5000, "test"):
        assert segment is not None
        segment.close()


@pytest.mark.parametrize("where", ["create", "adopt"])
def test_a_segment_that_one_rank_is_refused_is_refused_on_all(where: str) -> None:
    run_shm_ranks(segment_is_refused, 3, where)


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


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        pytest.param(is_broken_after_failing, 2, id="a_rank_that_failed_late_is_broken_for_the_others"),
        pytest.param(wrong_listener, 3, id="a_listener_of_another_process_is_not_trusted"),
        pytest.param(other_node, 2, id="ranks_of_different_nodes_do_not_meet"),
        pytest.param(frees, 2, id="freed_memory_is_unmapped_by_the_peers"),
        pytest.param(freed_while_read, 2, id="freed_memory_stays_mapped_until_the_next_operation"),
        pytest.param(refused_by_the_system, 2, id="a_refusal_of_the_system_is_not_taken_for_a_lost_peer"),
    ],
)
def test_ranks_that_have_met(case: Callable[..., Any], num_ranks: int) -> None:
    run(case, num_ranks)

"""Entering and leaving a world, with real processes."""

from __future__ import annotations

import atexit
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from guozhuang import world
from guozhuang.errors import UsageError, WorldError
from guozhuang.net import client, meet
from guozhuang.world import session
from guozhuang.world.discovery import discover
from tests import ranks
from tests.ranks import RankError, free_port, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]
TOLD_BY_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC",
    "SLURM",
    "OMPI",
    "PMI",
    "GLOO",
)


def script(code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """A process of its own, whose end is that of a script: ranks of `run_ranks` end without the interpreter's."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(TOLD_BY_LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str], timeout_s: float = LIMIT_S) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def listening() -> list[str]:
    """The addresses, as the kernel writes them, on which this process listens for TCP connections."""
    owned = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        owned.add(target)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                found.append(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


# ---- alone


def enters_alone(rank: int, world_size: int) -> tuple[world.World, list[str], float, str | None]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("guozhuang").addHandler(handler)
    session.newer_than_tried = lambda: "this PyTorch is newer than any that was tried"
    me = world.init()
    assert world.init() is me
    assert world.current() is me
    tensor = torch.ones(3)
    dist.barrier()
    dist.all_reduce(tensor)
    addresses = listening()
    world.shutdown()
    assert world.current() is None
    assert not dist.is_initialized()
    world.shutdown()  # a second time does nothing

    def refuse(*arguments: object, **options: object) -> None:
        raise socket.gaierror("no name")

    socket.getaddrinfo = refuse  # type: ignore[assignment]
    again = world.init()  # looks up no name
    assert again == me
    dist.barrier()
    world.shutdown()
    assert said == [session.newer_than_tried()]
    return me, addresses, float(tensor.sum()), os.environ.get("GLOO_SOCKET_IFNAME")


NO_LOCAL_RANK = dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
NO_RANK = NO_LOCAL_RANK | dict.fromkeys(("RANK", "WORLD_SIZE"))
NOTHING_TOLD = NO_RANK | dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"))


def test_alone_there_is_a_group_of_one_no_open_port_and_no_look_up_of_a_name() -> None:
    [(me, addresses, total, interface)] = run_ranks(enters_alone, 1, init=False, env=NOTHING_TOLD)
    assert me == world.World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "alone")
    assert set(addresses) <= LOOPBACK
    assert total == 3
    assert interface is None, "the environment is as it was"


# ---- several ranks


def enters_twice(rank: int, world_size: int, folder: str) -> tuple[world.World, list[str], list[float]]:
    sums = []
    for turn in range(3):
        come = [Path(folder, f"{each} comes for turn {turn}") for each in range(world_size)]
        if rank == 1:  # one is early, one is late: they must not meet in an old world
            until(lambda come=come: all(path.exists() for path in come if path != come[1]))
        come[rank].touch()
        me = world.init(timeout_s=LIMIT_S)
        tensor = torch.tensor(float(rank + 1))
        dist.all_reduce(tensor)
        sums.append(float(tensor))
        addresses = listening()
        world.shutdown()
    return me, addresses, sums


@pytest.mark.parametrize("backend", ["gloo", None])
@pytest.mark.parametrize("told", ["everything", "rank and size only"])
def test_ranks_meet_and_meet_again(told: str, backend: str | None, tmp_path: Path) -> None:
    hidden = {"GLOO_SOCKET_IFNAME": None, "GUOZHUANG_BACKEND": backend}
    if told != "everything":
        hidden |= NO_LOCAL_RANK
    for rank, (me, addresses, sums) in enumerate(run_ranks(enters_twice, 3, str(tmp_path), init=False, env=hidden)):
        assert me == world.World(rank, 3, rank, 3, 0, 1, torch.device("cpu"), "environment")
        assert sums == [6, 6, 6]
        assert set(addresses) <= LOOPBACK, "ranks of one node listen on loopback only"
        # Without gloo nobody listens but rank 0, which keeps the store.
        assert bool(addresses) == (backend == "gloo" or rank == 0 or sys.platform != "linux")


def forks(rank: int, world_size: int) -> tuple[int, list[str], float]:
    world.init()
    left: list[str] = []
    world.before_leaving(lambda: left.append("left"))
    child = os.fork()
    if child == 0:  # and ends as a script does
        atexit._run_exitfuncs()
        os._exit(len(left))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = torch.ones(1)
    dist.all_reduce(total)
    world.shutdown()
    return code, left, total.item()


def test_a_forked_child_that_ends_does_not_leave_the_world() -> None:
    assert run_ranks(forks, 2, init=False) == [(0, ["left"], 2.0)] * 2


def asks_again(rank: int, world_size: int) -> list[str]:
    me = world.init("gloo", "cpu", timeout_s=LIMIT_S)
    assert world.init() is me
    assert world.init(backend="GLOO", device=torch.device("cpu"), timeout_s=LIMIT_S) is me
    texts = []
    for arguments in ({"backend": "fake"}, {"timeout_s": LIMIT_S + 1}, {"timeout_s": -1.0}, {"device": "cuda:0"}):
        try:
            world.init(**arguments)
        except UsageError as error:
            texts.append(str(error))
    world.shutdown()
    return texts


def test_a_second_init_must_agree_with_the_first() -> None:
    [texts] = run_ranks(asks_again, 1, init=False)
    assert len(texts) == 4
    assert "with backend 'gloo'" in texts[0]
    assert f"with timeout_s={LIMIT_S:g}" in texts[1]


def adopts(rank: int, world_size: int) -> tuple[world.World, bool, str]:
    found = dist.group.WORLD
    dist.barrier()  # a rank that fails early leaves while the other still connects
    me = world.init()
    assert dist.group.WORLD is found
    assert world.init() is me
    try:
        world.init(backend="fake")
    except UsageError as error:
        text = str(error)
    world.shutdown()
    return me, dist.is_initialized(), text


@pytest.mark.parametrize("env", [{}, NO_LOCAL_RANK, NO_RANK], ids=["told", "half told", "not told"])
def test_a_group_that_was_there_is_taken_and_left_alone(env: dict[str, None]) -> None:
    for rank, (me, still_there, text) in enumerate(run_ranks(adopts, 2, env=env)):
        assert (me.rank, me.size, me.local_rank, me.local_size, me.num_nodes) == (rank, 2, rank, 2, 1)
        assert still_there
        assert "'gloo'" in text


def uses_what_was_requested(rank: int, world_size: int, *, by_the_script: str | None = None) -> tuple[str, str]:
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("guozhuang").addHandler(handler)
    logging.getLogger("guozhuang").setLevel(logging.INFO)
    world.init(by_the_script, "cpu", timeout_s=LIMIT_S)
    logging.getLogger("guozhuang").removeHandler(handler)
    backend = str(dist.get_backend())
    dist.barrier()
    world.shutdown()
    return backend, logged.getvalue()


def uses_its_own(rank: int, world_size: int) -> tuple[str, str]:
    return uses_what_was_requested(rank, world_size, by_the_script="gloo")


def test_the_backend_comes_from_the_script_then_the_command_line_then_the_default() -> None:
    requested = {"GUOZHUANG_BACKEND": "cpu:gloo,cuda:gloo"}
    for rank, (backend, said) in enumerate(run_ranks(uses_what_was_requested, 2, init=False, env=requested)):
        assert (backend, f"rank {rank} of 2" in said, "(as asked)" in said) == (
            requested["GUOZHUANG_BACKEND"],
            True,
            True,
        )
    assert run_ranks(uses_its_own, 2, init=False, env={"GUOZHUANG_BACKEND": "fake"})[1][0] == "gloo"
    default = run_ranks(uses_what_was_requested, 2, init=False)
    expected = "shm" if sys.platform == "linux" and "shm" in dist.Backend.backend_list else "gloo"
    assert [backend for backend, _ in default] == [expected, expected]
    assert ["the default here" in said for _, said in default] == [True, False]  # said once
    assert f"backend {expected}, the default here" in default[0][1]


def test_a_request_that_comes_too_late_is_refused() -> None:
    errors = run_ranks(adopts, 2, env={"GUOZHUANG_BACKEND": "fake"}, collect_errors=True)
    assert all(isinstance(e, RankError) and e.type_name == "UsageError" and "--backend" in e.message for e in errors), (
        errors
    )


def adopts_again(rank: int, world_size: int) -> list[int]:
    found = []
    for _ in range(3):
        me = world.init()
        found.append(me.local_rank)
        world.shutdown()
    return found


def test_a_group_can_be_taken_again() -> None:
    assert run_ranks(adopts_again, 2, env=NO_LOCAL_RANK) == [[0] * 3, [1] * 3]


def adopts_alone(rank: int, world_size: int) -> str:
    dist.barrier()  # the other rank is connected before this one leaves
    if rank == 1:
        return ""
    expires_when(lambda: True)
    with pytest.raises(RuntimeError) as caught:
        world.init(timeout_s=NEVER_S)
    return str(caught.value)


def expires_when(is_time: Callable[[], bool]) -> None:
    """The limit of a roll call passes on this rank as soon as that is true: the clock by which it waits is set forward."""
    look, ahead_s = meet._RollCall._look, [0.0]

    def looking(call: Any) -> None:
        if is_time():
            ahead_s[0] = 2 * NEVER_S
        look(call)

    meet._RollCall._look = looking  # type: ignore[method-assign]
    told = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0], sleep=time.sleep)
    client.time = told  # type: ignore[assignment, attr-defined]


def test_the_time_out_holds_for_a_group_that_was_there() -> None:
    text, _ = run_ranks(adopts_alone, 2, env=NO_LOCAL_RANK)
    assert f"did not come within {NEVER_S:g} s: 1" in text


def user_destroys_the_group(rank: int, world_size: int) -> bool:
    world.init()
    dist.destroy_process_group()
    gone = world.current() is None
    world.init()
    dist.barrier()
    world.shutdown()
    return gone and "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_group_destroyed_by_the_user_is_no_world() -> None:
    assert run_ranks(user_destroys_the_group, 2, init=False, env={"GLOO_SOCKET_IFNAME": None}) == [True, True]


# ---- somebody is missing


def comes_or_not(rank: int, world_size: int, missing: list[int], folder: str) -> None:
    if rank in missing:
        return
    here = [each for each in range(world_size) if each not in missing]

    def have(done: str) -> bool:
        Path(folder, f"{rank} {done}").touch()
        return all(Path(folder, f"{each} {done}").exists() for each in here)

    expires_when(lambda: have("waits"))
    with pytest.raises(WorldError) as caught:
        world.init(timeout_s=NEVER_S)
    until(lambda: have("raised"))  # one of them keeps the store
    who = ", ".join(map(str, missing))
    assert f"{len(missing)} of {world_size} ranks did not come within {NEVER_S:g} s: {who}" in str(caught.value)


def test_who_did_not_come_is_named_on_every_rank(tmp_path: Path) -> None:
    run_ranks(comes_or_not, 4, [1, 3], str(tmp_path), init=False)


def refused(rank: int, world_size: int, timeout_s: float, claims: str = "", folder: str = "") -> str:
    """The error of ``init`` on this rank. ``claims``: the rank that all but rank 0 say they are."""
    if claims and rank:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = claims
    with pytest.raises((UsageError, WorldError)) as caught:
        world.init(timeout_s=timeout_s)
    if claims:
        Path(folder, str(rank)).touch()
    if claims and rank == 0:  # this rank keeps the store
        until(lambda: len(os.listdir(folder)) == world_size, LIMIT_S, told=lambda: os.listdir(folder))
    return str(caught.value)


def alone_as(rank: int, port: int, timeout_s: float) -> str:
    """The error of one process that is told to be this rank of two."""
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": str(port),
    }
    [text] = run_ranks(refused, 1, timeout_s, init=False, env=env)
    return text


def test_a_store_that_is_not_there_is_named() -> None:
    port = free_port()
    text = alone_as(1, port, EXPIRES_S)
    assert f"127.0.0.1:{port}" in text
    assert "[rank 1]" in text


def test_a_stranger_at_the_port_does_not_hold_us_and_is_named_by_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        assert "is no store of PyTorch" in alone_as(1, port, EXPIRES_S)
        assert f"port {port} is taken by another process of this machine (127.0.0.1:{port})" in alone_as(
            0, port, NEVER_S
        )


def test_two_processes_with_one_rank_are_told(tmp_path: Path) -> None:
    # Of four, all but rank 0 were given RANK=1, as from a variable that was copied by hand.
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    ends = run_ranks(refused, 4, NEVER_S, "1", str(tmp_path), init=False, env=sizes)
    assert all("two processes say that they are rank 1 of 4" in text for text in ends)


# ---- leaving

LEAVES = """
import os, signal, sys, time
import torch, torch.distributed as dist
from guozhuang import world
me = world.init(timeout_s=3600)
dist.barrier()
how = sys.argv[1]
if me.rank == 1:
    if how == "stays":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)
works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(4)]
if how == "stays":
    raise KeyError("a mistake of the user")
try:
    for work in works:
        work.wait()
except RuntimeError as error:
    if how == "raises":
        raise
    sys.exit(7 + me.rank)
"""


def ranks_that_leave(how: str, num_ranks: int) -> list[subprocess.Popen[str]]:
    meeting = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [script(LEAVES, how, RANK=str(rank), **meeting) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("how", "codes"), [("exits", [7, -9, 9]), pytest.param("raises", [1, -9, 1], marks=pytest.mark.slow)]
)
def test_ranks_that_lost_a_peer_leave_with_their_own_code(how: str, codes: list[int]) -> None:
    ends = [end_of(process) for process in ranks_that_leave(how, 3)]
    assert [code for code, _, _ in ends] == codes, ends
    assert "terminate called" not in "".join(err for _, _, err in ends)


@pytest.mark.slow
def test_an_exception_does_not_wait_for_a_peer_that_stays() -> None:
    """See [Note: leaving]: the collective that rank 1 never joins would hold rank 0 for an hour."""
    failed, stays = ranks_that_leave("stays", 2)
    try:
        code, _, err = end_of(failed)
    finally:
        stays.kill()
        end_of(stays)
    assert code == 1
    assert "a mistake of the user" in err


# ---- the harness itself: a test tool that cannot fail proves nothing


def doubles(rank: int, world_size: int, tensor: torch.Tensor) -> torch.Tensor:
    tensor *= 2
    dist.all_reduce(tensor)
    return tensor


def test_each_rank_gets_its_own_copy_of_the_arguments() -> None:
    mine = torch.ones(2)
    results = run_ranks(doubles, 2, mine)
    assert all(torch.equal(result, torch.full((2,), 4.0)) for result in results)
    assert torch.equal(mine, torch.ones(2))


def one_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        print("what rank 1 printed")
        raise LookupError("what rank 1 raised")
    dist.barrier()


def test_the_error_holds_every_rank() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_fails, 2)
    for words in ("LookupError: what rank 1 raised", "what rank 1 printed", "rank 0 of 2 failed"):
        assert words in str(caught.value)


def one_is_killed(rank: int, world_size: int) -> str:
    dist.barrier()  # all are connected
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()
    return "noticed"


def test_errors_can_be_collected() -> None:
    noticed, killed = run_ranks(one_is_killed, 2, collect_errors=True)
    assert noticed == "noticed"
    assert isinstance(killed, RankError)
    assert killed.exit_code == -signal.SIGKILL


def one_sleeps(rank: int, world_size: int, folder: str) -> None:
    main, function = threading.get_ident(), "one_sleeps" if rank == 1 else "barrier"

    def tell() -> None:
        until(lambda: function in [each.name for each in traceback.extract_stack(sys._current_frames()[main])])
        Path(folder, str(rank)).touch()

    threading.Thread(target=tell).start()
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def test_a_hung_rank_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0

    def time_passes(receivers: list[Any], timeout: float) -> list[Any]:
        nonlocal ahead_s
        until(lambda: len(os.listdir(tmp_path)) == 2)
        ahead_s = NEVER_S
        return []

    told = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    monkeypatch.setattr(ranks, "time", told)
    monkeypatch.setattr(ranks, "multiprocessing", SimpleNamespace(connection=SimpleNamespace(wait=time_passes)))
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_sleeps, 2, str(tmp_path))
    assert "in one_sleeps" in str(caught.value)
    assert "in barrier" in str(caught.value)


def heartbeats(rank: int, world_size: int, methods: list[str]) -> list[bool]:
    """Whether one runs in a world of ours, after it, and in worlds around a group with each kind of store."""

    def runs() -> bool:
        names = [thread.name for thread in threading.enumerate()]
        return any("heartbeat" in name and "afterwards" not in name for name in names)

    world.init("gloo", timeout_s=LIMIT_S)
    seen = [runs()]
    dist.barrier()
    world.shutdown()
    seen.append(runs())
    for method in methods:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
        world.init(timeout_s=LIMIT_S)
        seen.append(runs())
        left = remaining(lambda: [each.name for each in threading.enumerate() if "afterwards" in each.name])
        assert not left, "in a world, the main thread alone is not judged"
        dist.barrier()
        dist.destroy_process_group()
        world.shutdown()
        seen.append(runs())
    return seen


@pytest.mark.parametrize("limit_s", ["60", None])
def test_a_heartbeat_runs_in_every_world_whose_store_can_carry_it(tmp_path: Path, limit_s: str | None) -> None:
    env = {"GUOZHUANG_HANG_TIMEOUT": limit_s}
    methods = [f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/store"]
    for seen in run_ranks(heartbeats, 2, methods, init=False, env=env):
        assert seen == [True, False, True, False, False, False]


# ---- meeting, where something is odd


def test_an_address_of_ipv6_may_stand_in_brackets(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 on loopback")
    env = {"MASTER_ADDR": "[::1]", "GUOZHUANG_BACKEND": "gloo"}
    ends = run_ranks(enters_twice, 2, str(tmp_path), init=False, env=env)
    assert [sums for _, _, sums in ends] == [[3, 3, 3]] * 2


def store_stops_answering(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 keeps the store, and is stopped once rank 1 has come to it, until rank 1 has raised."""
    keeper = Path(folder, "pid")
    if rank == 0:
        keeper.write_text(str(os.getpid()))
        store, _ = session.meet(discover(), LIMIT_S)
        while not store.check(["claim/1"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    clients: list[client.Client] = []
    make = meet._RollCall.__init__

    def making(call: Any, *arguments: Any) -> None:
        make(call, *arguments)
        clients.append(call._client)

    def expire() -> None:
        until(lambda: keeper.exists() and psutil.Process(int(keeper.read_text())).status() == psutil.STATUS_STOPPED)
        while not has_raised:  # each look makes it long again
            clients[0].limit_s = EXPIRES_S
            time.sleep(0.01)

    meet._RollCall.__init__ = making  # type: ignore[method-assign]
    has_raised, expiring = False, threading.Thread(target=expire)
    expiring.start()
    with pytest.raises(WorldError) as caught:
        world.init(timeout_s=NEVER_S)
    has_raised = True
    expiring.join()
    os.kill(int(keeper.read_text()), signal.SIGCONT)
    return str(caught.value)


def test_a_store_that_stops_answering_does_not_hold_the_others(tmp_path: Path) -> None:
    _, text = run_ranks(store_stops_answering, 2, str(tmp_path), init=False)
    assert "[rank 1] the store that the ranks meet at has not answered for" in text

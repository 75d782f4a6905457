"""When a rank dies, stops, errs or asks for something else, every other rank raises in time and says why."""

import contextlib
import datetime
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError
from guozhuang.groups import roll_call
from guozhuang.groups.agreement import store_of
from tests.processes.shm_ranks import is_ahead, run_shm_ranks
from tests.ranks import RankError, free_port
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

LARGE = 3_000_000
LONG = datetime.timedelta(seconds=NEVER_S)
SOON = datetime.timedelta(seconds=EXPIRES_S)


def reduces_until_it_fails(num: int, asynchronous: bool) -> PeerLost:
    """All-reduce until it raises; return the error."""
    tensor = torch.ones(num)
    with pytest.raises(PeerLost) as caught:
        for _ in range(100_000):
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
    return caught.value


def loses_rank_1(rank: int, n: int, num: int, asynchronous: bool, how: str) -> object:
    dist.barrier()
    if rank == 1 and how in ("kill", "exit"):
        for _ in range(random.randrange(3, 60)):  # somewhere in the middle of something
            dist.all_reduce(torch.ones(num))
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise KeyError("the user's own error")
    error = reduces_until_it_fails(num, asynchronous)
    with pytest.raises(PeerLost) as second:
        dist.barrier()
    assert str(second.value) == str(error), "later calls raise the same at once"
    assert error.pid is not None
    return error.rank, error.waiting_in, str(error), error.pid


@pytest.mark.parametrize("how", ["kill", "exit", "error"])
@pytest.mark.parametrize(
    ("num", "asynchronous"), [(10, False), pytest.param(LARGE, False, marks=pytest.mark.slow), (LARGE, True)]
)
def test_a_dead_rank(how: str, num: int, asynchronous: bool) -> None:
    results = run_shm_ranks(loses_rank_1, 3, num, asynchronous, how, collect_errors=True)
    died = results[1]
    assert isinstance(died, RankError)
    assert died.exit_code == {"kill": -signal.SIGKILL, "exit": 3, "error": 1}[how]
    for survivor in (results[0], results[2]):
        assert not isinstance(survivor, RankError), survivor.text
        lost, waiting_in, text, _ = survivor
        assert lost == 1
        assert "rank 1" in text and waiting_in == f"all_reduce of {num} float32, sum", text


def stops(rank: int, n: int, num: int) -> object:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 wakes it again
        reduces_until_it_fails(num, False)  # the others have given up
        return None
    dist.group.WORLD.set_timeout(SOON)
    error, store = reduces_until_it_fails(num, False), store_of(dist.group.WORLD)
    store.set(f"raised/{rank}", "")
    if rank == 0:
        store.wait(["raised/2"], LONG)
        assert error.pid is not None
        os.kill(error.pid, signal.SIGCONT)
    return error.rank, str(error)


@pytest.mark.parametrize("num", [pytest.param(10, marks=pytest.mark.slow), LARGE])
def test_a_stopped_rank_is_named_after_the_timeout(num: int) -> None:
    results = run_shm_ranks(stops, 3, num)
    for lost, text in (results[0], results[2]):
        assert lost == 1 and "rank 1 (pid" in text
    assert any(f"did not come within {EXPIRES_S:g} s" in text for _, text in (results[0], results[2]))


def leaves(rank: int, n: int) -> object:
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return None
    with pytest.raises(PeerLost, match=r"rank 1 .* left the group"):
        dist.all_reduce(torch.ones(10))
    return None


def aborts(rank: int, n: int) -> object:
    group, store = dist.group.WORLD, store_of(dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(torch.ones(LARGE), async_op=True)  # nobody else does
        until(lambda: is_ahead(group, 1, 0))
        dist.distributed_c10d._abort_process_group()  # which waits for nobody
        store.set("aborted", "")
        return work.is_completed()
    store.wait(["aborted"], LONG)
    with pytest.raises((PeerLost, MismatchError)):
        dist.all_reduce(torch.ones(LARGE))
        dist.barrier()
    return None


def order(rank: int, n: int) -> None:
    calls: list[Callable[[], object]] = [lambda: dist.all_reduce(torch.ones(10)), dist.barrier]
    for call in calls if rank == 1 else calls[::-1]:
        call()


def some_more_than(n: int, rank: int) -> list[int]:
    return [2 if rank == 1 else 1, *[1] * (n - 1)]


# What rank 1 calls differs from what the others call; the words stand in the table of the error.
DIFFERENT: dict[str, tuple[Callable[[int, int], object], list[str]]] = {
    "sizes": (
        lambda rank, n: dist.all_reduce(torch.ones(10 + (rank == 1))),
        ["all_reduce of 10 float32, sum", "all_reduce of 11 float32, sum"],
    ),
    "large_sizes": (
        lambda rank, n: dist.all_reduce(torch.ones(LARGE if rank else 10)),
        ["all_reduce of 10 float32", f"all_reduce of {LARGE} float32"],
    ),
    "dtypes": (
        lambda rank, n: dist.all_reduce(torch.ones(10, dtype=torch.float64 if rank == 1 else torch.float32)),
        ["10 float32", "10 float64"],
    ),
    "ops": (
        lambda rank, n: dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM),
        ["sum", "max"],
    ),
    "order": (order, ["barrier", "all_reduce of 10"]),
    "kinds": (
        lambda rank, n: dist.broadcast(torch.ones(100_000), 0) if rank == 1 else dist.all_reduce(torch.ones(100_000)),
        ["broadcast from rank 0 of 100000", "all_reduce of 100000"],
    ),
    "roots": (lambda rank, n: dist.broadcast(torch.ones(10), rank % 2), ["from rank 0", "from rank 1"]),
    "one_rank_sparse": (
        lambda rank, n: dist.all_reduce(torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)),
        ["sparse", "all_reduce of 3 float32"],
    ),
    "outputs": (
        lambda rank, n: dist.all_gather([torch.zeros(4) for _ in range(n)], torch.zeros(4 + (rank == 1))),
        ["all_gather of 3 x 4 float32", "but this rank gives 5"],
    ),
    "list": (
        lambda rank, n: dist.scatter(torch.zeros(4), [torch.zeros(5)] * n if rank == 1 else None, 1),
        ["scatter from rank 1", "but the root gives [5, 5, 5]"],
    ),
    "splits": (
        lambda rank, n: dist.all_to_all_single(
            torch.zeros(n + (rank == 1)), torch.zeros(n), some_more_than(n, rank), [1] * n
        ),
        ["gives", "takes"],
    ),
    "coalesced_sizes": (
        lambda rank, n: dist.all_reduce_coalesced([torch.ones(k) for k in ([5, 3] if rank == 1 else [3, 5])]),
        ["[3, 5]", "[5, 3]"],
    ),
}
SLOW = ("large_sizes", "ops", "kinds", "list", "coalesced_sizes")


def asks_for_something_else(rank: int, n: int, case: str) -> str:
    dist.barrier()
    with pytest.raises(MismatchError) as caught:
        DIFFERENT[case][0](rank, n)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    with pytest.raises(MismatchError):
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in DIFFERENT]
)
def test_mismatches_raise_on_every_rank_with_a_table(case: str) -> None:
    for text in run_shm_ranks(asks_for_something_else, 3, case):
        assert all(word in text for word in DIFFERENT[case][1]), text


def same_mistake_everywhere(rank: int, n: int) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="sizes do not fit"):
            dist.all_gather([torch.zeros(4) for _ in range(n)], torch.zeros(5))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # all ranks were told alike: the group goes on
    assert tensor.tolist() == [n, n]


def coalesced(tensors: list[torch.Tensor | None]) -> None:
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = False
    dist.group.WORLD.allreduce_coalesced(tensors, options)


def short_list(n: int, is_wrong: bool, asynchronous: bool = False) -> None:
    if asynchronous:
        dist.all_reduce(torch.ones(LARGE), async_op=True)
    work = dist.all_gather([torch.zeros(3) for _ in range(n - is_wrong)], torch.zeros(3), async_op=asynchronous)
    if work is not None:
        work.wait()


# Rank, number of ranks, and whether this rank's arguments are wrong.
REFUSED: dict[str, Callable[[int, int, bool], object]] = {
    "unknown_dtype": lambda rank, n, is_wrong: dist.all_reduce(
        torch.ones(10, dtype=torch.uint16 if is_wrong else torch.float32)
    ),
    "short_list": lambda rank, n, is_wrong: short_list(n, is_wrong),
    "short_list_started": lambda rank, n, is_wrong: short_list(n, is_wrong, asynchronous=True),
    "uneven_rows": lambda rank, n, is_wrong: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * n + is_wrong)),
    # Also after tensors of the same call that are well.
    "expanded": lambda rank, n, is_wrong: coalesced(
        [torch.ones(LARGE), torch.ones(1).expand(6) if is_wrong else torch.ones(6)]
    ),
    # The root of a broadcast may have one: it is read only.
    "expanded_output": lambda rank, n, is_wrong: dist.broadcast(
        torch.ones(2, 1).expand(2, 6) if is_wrong or not rank else torch.ones(2, 6), 0
    ),
    # The check itself fails: what goes wrong is no UsageError.
    "no_tensor": lambda rank, n, is_wrong: coalesced([torch.ones(3), None if is_wrong else torch.ones(3)]),
    "nothing_at_all": lambda rank, n, is_wrong: coalesced([] if is_wrong else [torch.ones(3)]),
}


def refuses_on_one_rank(rank: int, n: int, name: str) -> tuple[str, str]:
    case = REFUSED[name]
    kind = AttributeError if name == "no_tensor" else UsageError
    if name != "expanded_output":
        with pytest.raises(kind):
            case(rank, n, True)  # on all ranks alike: the group goes on
    dist.barrier()
    with pytest.raises(kind if rank == 1 else MismatchError) as caught:
        case(rank, n, rank == 1)
    with pytest.raises(MismatchError) as later:
        dist.barrier()
    return str(caught.value), str(later.value)


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_refused_on_one_rank_raise_on_every_rank(case: str) -> None:
    results = run_shm_ranks(refuses_on_one_rank, 3, case)
    for rank, (text, later) in enumerate(results):
        assert rank == 1 or "refused on this rank" in text, text
        assert "refused on this rank" in later


def interrupted(group: dist.ProcessGroup) -> None:
    """Ctrl-C after the ranks have met, before anything moves."""
    operations = group._resources.operations

    def interrupt(*args: object) -> None:
        del operations._large
        raise KeyboardInterrupt

    operations._large = interrupt


def no_descriptors(group: dist.ProcessGroup) -> None:
    """No descriptor is left for a peer's segment."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those below are taken


def fails_within(rank: int, n: int, prepare: Callable[[dist.ProcessGroup], None]) -> tuple[list[type], str]:
    group = dist.group.WORLD
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        tensor = group.empty(1_000_000).fill_(1.0)
        prepare(group)
    dist.barrier()
    if rank == 0:  # only now: else the slower rank may have taken the descriptor before
        tensor = group.empty(1_000_000).fill_(1.0)
    kinds, last = [], ""
    for _ in range(2):
        try:
            dist.all_reduce(tensor)
        except BaseException as error:
            kinds.append(type(error))
            last = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return kinds, last


@pytest.mark.parametrize("prepare", [interrupted, no_descriptors], ids=lambda p: p.__name__)
def test_a_rank_that_fails_within_an_operation_breaks_the_group_for_all(prepare) -> None:
    results = run_shm_ranks(fails_within, 2, prepare)
    assert results[0][0] == [PeerLost, PeerLost] and "rank 1" in results[0][1]
    assert results[1][0] == [KeyboardInterrupt if prepare is interrupted else WorldError, WorldError]


def destroys_under_way(rank: int, n: int) -> None:
    """This rank's own end is no other rank's loss."""
    group, store = dist.group.WORLD, store_of(dist.group.WORLD)
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        until(lambda: is_ahead(group, 0, 1))
        dist.distributed_c10d._abort_process_group()
        with pytest.raises(WorldError, match="destroyed") as caught:
            work.wait()
        assert type(caught.value) is WorldError
        store.set("aborted", "")
    else:
        store.wait(["aborted"], LONG)


def waits(rank: int, n: int) -> None:
    store = store_of(dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        store.wait(["looked"], LONG)
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(WorldError, match=rf"did not end within the {EXPIRES_S:g} s") as caught:
            work.wait(SOON)
        assert not isinstance(caught.value, PeerLost), "nobody is lost"
        assert not work.is_completed()
        store.set("looked", "")
    work.wait()  # nothing is broken by looking too early
    assert tensor.tolist() == [n] * 10
    # A call's own time-out, shorter than the group's.
    if rank == 1:
        store.wait(["gave up"], LONG)
        dist.barrier()  # rank 0 had come to this one, and has given up since
        with pytest.raises(PeerLost, match="gave up"):
            dist.barrier()
    else:
        with pytest.raises(PeerLost, match="rank 1"):
            dist.barrier(timeout=SOON)
        store.set("gave up", "")


def errors_reach_works(rank: int, n: int) -> None:
    dist.barrier()
    num = 10 + rank
    works = [dist.all_reduce(torch.ones(num), async_op=True) for _ in range(3)]
    for work in works:
        with pytest.raises(MismatchError):
            work.wait()
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)
        with pytest.raises(RuntimeError, match="asked for different"):
            work.get_future().wait()


def does_not_come(rank: int, n: int) -> None:
    store = store_of(dist.group.WORLD)
    look_s = roll_call.look_s

    def tells(waited_s: float, size: int) -> float:
        store.set("waits/2", "")
        return look_s(waited_s, size)

    if rank == 2:
        with (
            pytest.raises(RuntimeError, match=r"ranks \[1\] did not come"),
            mock.patch.object(roll_call, "look_s", tells),
        ):
            dist.new_group(backend="shm")  # where it hears that rank 0 gave up
    if rank == 0:
        store.wait(["waits/2"], LONG)  # so that rank 1 alone is missing
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come"):
            dist.new_group(backend="shm", timeout=SOON)
    if rank != 1:
        store.set(f"gave up/{rank}", "")
    else:
        store.wait(["gave up/0", "gave up/2"], LONG)  # it lives, and does not come


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        (aborts, 3),
        (leaves, 3),
        (same_mistake_everywhere, 2),
        (destroys_under_way, 2),
        (waits, 2),
        (errors_reach_works, 2),
        (does_not_come, 3),
    ],
)
def test_ranks_that_end_refuse_or_wait(case: Callable[..., object], num_ranks: int) -> None:
    run_shm_ranks(case, num_ranks)


SCRIPT = """
import datetime, os, sys, threading
import torch, torch.distributed as dist
from guozhuang.groups import backend
backend.register()
dist.init_process_group("shm", timeout=datetime.timedelta(seconds=150))
rank, ending = dist.get_rank(), sys.argv[1]
dist.all_reduce(torch.ones(100_000), async_op=True).wait()
kept = dist.group.WORLD.empty(1000)
if ending == "waiting" and rank == 0:
    work = dist.all_reduce(torch.ones(10), async_op=True)   # rank 1 never does
if ending == "raises":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(
    "ending", ["plain", *(pytest.param(how, marks=pytest.mark.slow) for how in ("waiting", "raises"))]
)
def test_an_interpreter_that_ends_without_destroying_the_group(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    common |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), ending],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == (7 if ending == "raises" else 0), said
            # torch itself may remind of destroy_process_group; the group says nothing.
            assert "Traceback" not in said and "guozhuang" not in said, said
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()

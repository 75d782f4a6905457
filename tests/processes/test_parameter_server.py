"""Parameter servers among real processes: the workers themselves, and servers of their own."""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import PeerLost, UsageError
from guozhuang.exchange.parameter_server import AsyncParameterServer, ParameterServer, protocol
from guozhuang.exchange.parameter_server import service as services
from guozhuang.exchange.parameter_server.protocol import ServerGroup, connect
from guozhuang.exchange.parameter_server.server import serve
from guozhuang.exchange.parameter_server.service import Service
from guozhuang.gradients.buckets import Bucket
from guozhuang.groups.agreement import store_of
from guozhuang.world.requests import requested_servers
from tests.forking import fork_server
from tests.processes.cases import (
    as_tests,
    assert_equal_everywhere,
    batch,
    flat,
    mlp,
    names_of_cases,
    run_cases,
    said,
    seeded,
    sent_in,
)
from tests.ranks import RankError, free_port, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

# ---- servers of their own


def _server(port: int, place: int, count: int, stay: bool, prepare: Callable[[], None]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT_S)
    prepare()
    store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)

    def end_when_told() -> None:
        own = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        while not own.check([f"end/{place}"]):
            if own.check(["it is later"]) and not own.check(["the servers know it"]):
                set_clock_forward()
                own.set("the servers know it", "")
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_when_told, daemon=True).start()
    os._exit(serve(store, place, count, stay, linger_s=0.3))


def set_clock_forward() -> None:
    """The services of this process take it that NEVER_S has passed."""
    services.time = SimpleNamespace(monotonic=lambda: time.monotonic() + NEVER_S)  # type: ignore[attr-defined, assignment]


def nothing() -> None:
    pass


@contextlib.contextmanager
def servers(
    count: int, stay: bool = False, prepare: Callable[[], None] = nothing
) -> Iterator[tuple[dict[str, str | None], list[Any]]]:
    """Start server processes; yield the variables of their workers, and the processes."""
    if count == 0:
        yield {"GUOZHUANG_SERVERS": None}, []
        return
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    context = fork_server()
    processes = [context.Process(target=_server, args=(port, i, count, stay, prepare)) for i in range(count)]
    for process in processes:
        process.start()
    try:
        yield {"GUOZHUANG_SERVERS": f"{count}@127.0.0.1:{port}"}, processes
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def served(fn: Callable[..., Any], num_workers: int, count: int, *args: Any, **options: Any) -> list[Any]:
    with servers(count) as (env, processes):
        results = run_ranks(fn, num_workers, *args, env=env, **options)
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 0, "a server did not end with its workers"
    return results


# ---- synchronous


def close(ddp: DistributedDataParallel) -> None:
    assert ddp.reducer is not None
    ddp.reducer._state.close()
    left = remaining(lambda: [t.name for t in threading.enumerate() if t.name.startswith("guozhuang")])
    assert not left, f"threads are left: {left}"


def ten_steps(rank: int, size: int) -> tuple[Tensor, Tensor]:
    bare = mlp()
    ours, twin = DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=0.0003), copy.deepcopy(bare)
    ours.use_exchange(ParameterServer(part_bytes=100))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, twin)]
    for step in range(10):
        whole = torch.cat([batch(r, step) for r in range(size)])
        for model, optimizer, rows in zip((ours, twin), optimizers, (batch(rank, step), whole), strict=True):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    found = flat(ours)
    assert_equal_everywhere(found)
    close(ours)
    return found, flat(twin)


@pytest.mark.parametrize(
    ("workers", "count"),
    [
        *((2, 0), (3, 2)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, 0), (3, 0), (4, 0), (1, 2), (2, 1), (2, 3), (4, 2))
        ),
    ],
)
def test_it_trains_as_one_process_does(workers: int, count: int) -> None:
    for ours, twin in served(ten_steps, workers, count):
        torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-6)


def filled(sizes: list[int], rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[Bucket]:
    buckets = []
    for i, size in enumerate(sizes):
        bucket = Bucket(i, i == len(sizes) - 1, [f"p{i}"], [torch.zeros(size, dtype=dtype)])
        random = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
        bucket.flat.copy_(torch.randn(size, generator=random))
        buckets.append(bucket)
    return buckets


def case_sums_are_made_in_the_order_of_ranks(rank: int, size: int) -> None:
    sizes = [1, 7, 5000, 60_000, 3]  # from one number to several parts at each server
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        exchange = ParameterServer(part_bytes=40_000)
        buckets = filled(sizes, rank, dtype=dtype)
        state = exchange.prepare(buckets, dist.group.WORLD)
        for step in range(2):
            now = filled(sizes, rank, step, dtype)
            for bucket, new in zip(buckets, now, strict=True):
                bucket.flat.copy_(new.flat)
            works = [exchange.start(bucket, state, step) for bucket in buckets]
            for work in reversed(works):
                work.wait()
            assert all(work.is_completed() for work in works)
            for i, bucket in enumerate(buckets):
                parts = [filled(sizes, r, step, dtype)[i].flat for r in range(size)]
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                assert torch.equal(bucket.flat, total), (dtype, i)
        state.close()


def case_what_is_needed_next_goes_first(rank: int, size: int) -> None:
    exchange, buckets = ParameterServer(part_bytes=40_000), filled([100_000] * 4, rank)
    state = exchange.prepare(buckets, dist.group.WORLD)
    hold, sent = threading.Event(), [list[int]() for _ in state.client.connections]
    for connection, order in zip(state.client.connections, sent, strict=True):
        connection._sender.run(hold.wait, urgency=-1)
        send = connection._send

        def note(request: Any, send: Any = send, order: list[int] = order) -> None:
            order.append(request.message.part)
            send(request)

        connection._send = note
    works = [exchange.start(bucket, state, 0) for bucket in buckets]
    hold.set()
    for work in works:
        work.wait()
    urgency = {part.index: part.urgency for parts in state.parts.values() for part in parts}
    assert len(urgency) >= 40
    for connection, parts in zip(state.client.connections, sent, strict=True):
        order = [urgency[part] for part in parts]
        assert order == sorted(order) and len(order) > 40 // size - 2
        del connection._send
    state.close()


def case_nan_passes_and_is_said(rank: int, size: int) -> None:
    exchange, buckets = ParameterServer(part_bytes=1000), filled([2000, 5], rank)
    state = exchange.prepare(buckets, dist.group.WORLD)
    if rank == size - 1:
        buckets[0].flat[7], buckets[0].flat[1999] = float("nan"), float("inf")
    with said() as seen:
        for work in [exchange.start(bucket, state, 3) for bucket in buckets]:
            work.wait()
    assert bool(buckets[0].flat[7].isnan()) and bool(buckets[0].flat[1999].isinf())
    assert int(buckets[0].flat.isfinite().sum()) == 1998
    if rank == size - 1:
        assert len(seen) == 1 and "step 3" in seen[0] and "'p0'" in seen[0] and f"rank {rank}" in seen[0], seen
    else:
        assert not seen
    state.close()


def case_two_models_at_once(rank: int, size: int) -> None:
    models = [DistributedDataParallel(mlp(seed=i)) for i in range(2)]
    for ddp in models:
        ddp.use_exchange(ParameterServer())
    for step in range(3):
        sum(ddp(batch(rank, step)).square().mean() for ddp in models).backward()
    for ddp in models:
        assert_equal_everywhere(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    for ddp in models:
        ddp.reducer._state.close()


# ---- asynchronous


def weights(rank: int = 0) -> list[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    shapes = {"w": (50, 7), "b": (3,), "one": (), "big": (1000,)}
    named = [(name, torch.randn(shape, generator=random)) for name, shape in shapes.items()]
    return [*named, ("wide", torch.randn(4, generator=random, dtype=torch.float64))]


def move(named: list[tuple[str, Tensor]], rank: int, step: int) -> None:
    for i, (_, p) in enumerate(named):
        p += torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank), dtype=p.dtype)


def all_equal(named: list[tuple[str, Tensor]]) -> None:
    assert_equal_everywhere(torch.cat([p.flatten().double() for _, p in named]))


def case_without_staleness_it_is_the_sum_of_deltas(rank: int, size: int) -> None:
    store = store_of(dist.group.WORLD)
    for average in (False, True):
        exchange, ours, model = AsyncParameterServer(0, average, part_bytes=512), weights(), weights()
        state = exchange.prepare(ours, dist.group.WORLD)
        for step in range(5):
            # Ranks begin one after the other, each step another one first.
            if turn := (rank + step) % size:
                store.wait([f"begun/{average}/{step}/{turn - 1}"])
            store.set(f"begun/{average}/{step}/{turn}", "")
            exchange.before_step(state, step)
            move(ours, rank, step)
            exchange.after_step(state, step)
            begin = [(name, p.clone()) for name, p in model]
            for other in range(size):
                new = [(name, p.clone()) for name, p in begin]
                move(new, other, step)
                for (_, p), (_, q), (_, b) in zip(model, new, begin, strict=True):
                    p += (q - b) / (size if average else 1)
            for (name, p), (_, q) in zip(ours, model, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
            all_equal(ours)
        exchange.close(state)


def case_a_straggler_holds_nobody_within_the_bound(rank: int, size: int) -> None:
    bound = 3
    exchange, ours = AsyncParameterServer(bound, part_bytes=512), weights()
    state = exchange.prepare(ours, dist.group.WORLD)
    store, others = store_of(dist.group.WORLD), range(1, size)
    for r in range(size):
        store.set(f"straggler/{r}", "0") if r == rank else store.wait([f"straggler/{r}"])

    def steps_of_others() -> list[int]:
        return [int(store.get(f"straggler/{r}")) for r in others]

    for step in range(6):
        if rank == 0:
            # The others come to b + this rank's number of steps without it, and no further while it waits.
            expected = [min(step + bound, 6)] * len(others)
            until(lambda wanted=expected: steps_of_others() == wanted, told=steps_of_others)
            store.set("straggler/0", str(step + 1))
        move(ours, rank, step)
        exchange.after_step(state, step)
        if rank:
            assert step + 1 <= int(store.get("straggler/0")) + bound, "it did not wait for rank 0"
            store.set(f"straggler/{rank}", str(step + 1))
    exchange.agree(state)
    all_equal(ours)
    exchange.close(state)


def case_who_has_ended_holds_nobody(rank: int, size: int) -> None:
    exchange, ours = AsyncParameterServer(1, part_bytes=512), weights()
    state = exchange.prepare(ours, dist.group.WORLD)
    for step in range(2 if rank == 0 else 9):
        move(ours, rank, step)
        exchange.after_step(state, step)
    exchange.agree(state)  # rank 0 waits here, and is not waited for before
    all_equal(ours)
    for step in range(2):  # all begin again from there
        move(ours, rank, step)
        exchange.after_step(state, step)
    move(ours, rank, 2)  # and what was changed past the optimizer is agreed upon too
    exchange.agree(state)
    all_equal(ours)
    if rank == 0:
        exchange.close(state)
    else:
        for step in range(4):
            move(ours, rank, step)
            exchange.after_step(state, step)
        exchange.agree(state)
        exchange.close(state)


def case_who_rests_holds_nobody_and_may_begin_again(rank: int, size: int) -> None:
    exchange, ours = AsyncParameterServer(0, part_bytes=512), weights()
    state = exchange.prepare(ours, dist.group.WORLD)
    if rank == 0:
        for _ in range(3):
            exchange.rest(state)
    for step in range(0 if rank == 0 else 3):
        move(ours, rank, step)
        exchange.after_step(state, step)
    dist.barrier()  # rank 0 has not agreed, and the others are here
    for step in range(2):
        move(ours, rank, step)
        exchange.after_step(state, step)
    exchange.agree(state)
    all_equal(ours)
    exchange.close(state)


def case_loaded_weights_seed_the_servers(rank: int, size: int) -> None:
    exchange, ours = AsyncParameterServer(2, part_bytes=512), weights()
    state = exchange.prepare(ours, dist.group.WORLD)
    for step in range(3):
        move(ours, rank, step)
        exchange.after_step(state, step)
    exchange.agree(state)
    saved = exchange.state_dict(state)
    for _, p in ours:
        p.fill_(float(rank + 1))
    exchange.load_state_dict(state, saved)
    assert all(bool((p == 1).all()) for _, p in ours)
    ours[0][1].add_(1)
    exchange.after_step(state, 3)
    exchange.agree(state)
    torch.testing.assert_close(ours[0][1], torch.full((50, 7), 1.0 + size))
    with pytest.raises(UsageError, match="other parameters"):
        exchange.load_state_dict(state, {"held": ["x"]})
    exchange.close(state)


def case_ddp_trains_and_loads_with_it(rank: int, size: int) -> None:
    with seeded(0):
        bare = nn.Linear(10, 1)
    ddp = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    ddp.use_weight_exchange(AsyncParameterServer(2, average=True), optimizer)

    def train(steps: int) -> float:
        for step in range(steps):
            x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank))
            optimizer.zero_grad()
            loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    first, last = train(1), train(60)
    assert last < 0.2 * first
    ddp.eval()
    agreed = flat(ddp)
    assert_equal_everywhere(agreed)
    saved, exchange = copy.deepcopy(ddp.state_dict()), ddp.exchange_state_dict()
    ddp.train()
    with ddp.join():
        train(2 + 3 * rank)
    assert_equal_everywhere(flat(ddp))
    ddp.load_state_dict(saved)
    ddp.load_exchange_state_dict(exchange)
    assert torch.equal(flat(ddp), agreed)
    train(1)
    ddp.eval()
    assert_equal_everywhere(flat(ddp))


NAMES = names_of_cases(globals())


test_workers_that_serve = as_tests(globals(), (2, 3), on="threads")


@pytest.mark.parametrize(
    ("workers", "count"),
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (3, 1), (4, 3)))],
)
def test_servers_of_their_own(workers: int, count: int) -> None:
    with servers(count, stay=True) as (env, _):
        everywhere = run_ranks(run_cases, workers, __name__, NAMES, env=env)
    for rank, failures in enumerate(everywhere):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures.values())


# ---- the wire


def counted(rank: int, size: int) -> tuple[float, float]:
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.8)
    ddp.use_exchange(ParameterServer(part_bytes=100_000))
    rows = torch.randn(2, 300)
    for _ in range(2):
        ddp(rows).sum().backward()
    sent = sent_in(lambda _: ddp(rows).sum().backward(), num_steps=4)
    assert ddp.reducer is not None
    num_elements = sum(p.numel() for p in model.parameters())
    close(ddp)
    return sent, ddp.reducer.exchange.traffic(num_elements, 4, size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize(("workers", "count"), [(3, 2), (3, 0)])
def test_what_a_worker_sends_is_what_it_says(workers: int, count: int) -> None:
    num_bytes = 6 * 300 * 301 * 4
    for sent, expected in served(counted, workers, count):
        assert expected == (num_bytes if count else 2 * (workers - 1) * num_bytes // workers)
        # Shares differ by a part at most where the workers serve; headers of messages, and the barrier.
        assert 0.95 * expected <= sent <= expected * 1.05 + 8192, (sent, expected)


# ---- when somebody is lost


def answers_come() -> None:
    """The store answers at last, however slow the machine is."""
    protocol._ANSWER_S = LIMIT_S  # type: ignore[misc]


def lost_ones_are_seen() -> None:
    """A failed answer means nothing by itself: the threads that see who is lost come to it at last."""
    answers_come()
    services._WATCH_S = LIMIT_S


def sees_that_rank_1_is_late() -> None:
    """The clock of a service is set forward as soon as rank 1 is the only one that it waits for in step 2."""
    answers_come()
    watch = Service._watch

    def watching(service: Service) -> None:
        def is_late() -> bool:
            found = service.parts.oldest_wait()
            return found is not None and "step 2" in found[2] and found[1] == [1]

        until(lambda: is_late() or service._over.is_set())
        set_clock_forward()
        watch(service)

    Service._watch = watching  # type: ignore[method-assign]


class _Stuck:
    """What gloo leaves behind of a message of which a part was on its way when the connection broke: it never ends."""

    def wait(self, limit: object) -> None:
        threading.Event().wait()


def gloo_forgets(rank: int, since: threading.Event) -> None:
    """No message from or to this rank ends, once the event is set. Only what waits for a first byte fails."""
    send, receive = ServerGroup.send, ServerGroup.receive

    def sent(group: ServerGroup, tensor: Tensor, to: int, tag: int) -> Any:
        return _Stuck() if to != rank and since.is_set() else send(group, tensor, to, tag)

    def received(group: ServerGroup, tensor: Tensor, source: int, tag: int) -> Any:
        is_stuck = source != rank and tag >= protocol.REPLY and since.is_set()
        return _Stuck() if is_stuck else receive(group, tensor, source, tag)

    ServerGroup.send, ServerGroup.receive = sent, received  # type: ignore[method-assign]


def loses_within_a_message(rank: int, size: int, count: int) -> tuple[int, str]:
    lost_ones_are_seen()
    who, is_broken = (4 if count else 1), threading.Event()
    gloo_forgets(rank, is_broken)
    exchange, buckets = ParameterServer(part_bytes=400), filled([1000, 10], rank)
    state, store = exchange.prepare(buckets, dist.group.WORLD), store_of(dist.group.WORLD)

    def meet(where: str) -> None:
        store.set(f"{where}/{rank}", "")
        store.wait([f"{where}/{r}" for r in range(size)], datetime.timedelta(seconds=LIMIT_S))

    for step in range(2):
        if step == 1:
            meet("has all answers")
            is_broken.set()
        works = [exchange.start(bucket, state, step) for bucket in buckets] if step == 0 or rank != who else []
        if step == 1:
            meet("waits for more")
            if rank == who:
                os.kill(os.getpid(), signal.SIGKILL)
            if count and rank == 0:
                there = requested_servers()
                assert there is not None
                connect(there[1], LIMIT_S).set("end/1", "")
        try:
            for work in works:
                work.wait()
        except PeerLost as error:
            return error.rank, str(error)
    return -1, ""


@pytest.mark.parametrize("count", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_who_is_lost_within_a_message_is_named(count: int) -> None:
    with servers(count, prepare=lost_ones_are_seen) as (env, processes):
        results = run_ranks(loses_within_a_message, 3, count, env=env, collect_errors=True, group_timeout_s=NEVER_S)
        for place, process in enumerate(processes):
            process.join(LIMIT_S)
            assert process.exitcode == (-9 if place == 1 else 1), "servers end with an error"
    for rank in (0, 1, 2) if count else (0, 2):
        assert not isinstance(results[rank], RankError), results[rank].text
        who, text = results[rank]
        assert who == (4 if count else 1) and "was waiting for the sum of step 1 of part" in text, results[rank]


def loses(rank: int, size: int, what: str) -> tuple[str, int, str]:
    if what != "late":
        lost_ones_are_seen()
    elif rank != 1:
        sees_that_rank_1_is_late()
    exchange, buckets = ParameterServer(part_bytes=400), filled([1000, 10], rank)
    state, store = exchange.prepare(buckets, dist.group.WORLD), store_of(dist.group.WORLD)
    for step in itertools.count() if what == "server" else range(3):  # until the server is gone
        if step == 2 and what == "server" and rank == 0:
            there = requested_servers()
            assert there is not None
            connect(there[1], LIMIT_S).set("end/1", "")
        if step == 2 and what == "worker" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and what == "late" and rank == 1:
            store.wait(["gave up/0", "gave up/2"], datetime.timedelta(seconds=LIMIT_S))
        try:
            for work in [exchange.start(bucket, state, step) for bucket in buckets]:
                work.wait()
        except PeerLost as error:
            store.set(f"gave up/{rank}", "")
            return "lost", error.rank, str(error)
    return "", -1, ""


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("what", ["server", "worker", "late"])
def test_who_is_lost_is_named(what: str, count: int) -> None:
    if what == "server" and not count:
        pytest.skip("there is none of its own")
    # Nobody waits for the time-out of the group. It passes by the clock of the test where a rank is late.
    with servers(count, prepare=sees_that_rank_1_is_late if what == "late" else lost_ones_are_seen) as (env, processes):
        results = run_ranks(loses, 3, what, env=env, collect_errors=True, group_timeout_s=NEVER_S)
        for place, process in enumerate(processes):
            process.join(LIMIT_S)
            assert process.exitcode == (-9 if (what, place) == ("server", 1) else 1), "servers end with an error"
    for rank in (0, 2):
        assert not isinstance(results[rank], RankError), results[rank].text
        lost, who, text = results[rank]
        assert lost, results[rank]
        assert who == (4 if what == "server" else 1), text
        name = {"server": "parameter server 1 (", "worker": "rank 1 (process", "late": "rank 1 (process"}[what]
        assert name in text and "was waiting for the" in text and ("did not bring" in text) == (what == "late"), text


def mixes_steps(rank: int, size: int) -> str:
    exchange, buckets = ParameterServer(), filled([10 + rank], rank)
    state = exchange.prepare(buckets, dist.group.WORLD)
    try:
        exchange.start(buckets[0], state, 0).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("count", [0, 1])
def test_ranks_that_send_different_parts_are_told(count: int) -> None:
    with servers(count) as (env, _):
        results = run_ranks(mixes_steps, 2, env=env)
    assert all("do not send the same part" in text for text in results), results


def asks_for(rank: int, size: int) -> str:
    with pytest.raises(UsageError) as found:
        ParameterServer(servers=2).prepare(filled([3], rank), dist.group.WORLD)
    return str(found.value)


def test_servers_that_are_not_there_are_said() -> None:
    assert all("asks for 2 parameter servers, and this run has 0" in text for text in run_ranks(asks_for, 2))


def limits_waits_for_headers() -> None:
    """Where a server waits for the next header, the limit of the group is short."""

    def limit(group: ServerGroup) -> datetime.timedelta:
        is_for_header = sys._getframe(1).f_code is Service._listen.__code__
        return datetime.timedelta(seconds=EXPIRES_S if is_for_header else group.limit_s)

    ServerGroup.limit = property(limit)  # type: ignore[assignment, misc]


def pauses(rank: int, size: int) -> bool:
    exchange, buckets = ParameterServer(), filled([10], rank)
    state = exchange.prepare(buckets, dist.group.WORLD)
    exchange.start(buckets[0], state, 0).wait()
    there = requested_servers()
    assert there is not None
    store = connect(there[1], LIMIT_S)
    store.set("it is later", "")
    store.wait(["the servers know it"], datetime.timedelta(seconds=LIMIT_S))
    with contextlib.suppress(RuntimeError):
        store.wait(["nobody sets it"], datetime.timedelta(seconds=3 * EXPIRES_S))
    exchange.start(buckets[0], state, 1).wait()
    return True


def test_nobody_is_lost_because_all_pause_for_longer_than_the_limit() -> None:
    with servers(1, prepare=limits_waits_for_headers) as (env, _):
        assert run_ranks(pauses, 2, env=env, group_timeout_s=NEVER_S) == [True, True]

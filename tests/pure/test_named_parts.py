"""The parts of negotiated collectives that need no other rank."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.gradients.named import Handle, Kind, NegotiationError, Reduction, Settings, Submission, execution, stalls
from guozhuang.gradients.named.channel import AGE_S, BYTES, NamedChannel, Pace
from guozhuang.gradients.named.execution import Executor, Scratch, batches
from guozhuang.gradients.named.reductions import combine, scale
from guozhuang.gradients.named.requests import Message, NamedRequest, Response, difference, request_of
from guozhuang.gradients.named.stalls import EngineStore, StallWatch
from tests.pure.test_serial import Stream
from tests.waiting import LIMIT_S


def response(name: str, num: int, kind: Kind = Kind.ALLREDUCE, num_tensors: int = 1, **more: object) -> Response:
    request = NamedRequest(kind, ((num,),) * num_tensors, (torch.float32,) * num_tensors)
    return Response(name, {0: request._replace(**more)})  # type: ignore[arg-type]


def fused(responses: list[Response], threshold: int, fuse_groups: bool = True) -> list[str]:
    return [" ".join(each.name for each in batch) for batch in batches(responses, threshold, fuse_groups)]


def test_batches_take_what_fits_and_look_past_what_does_not() -> None:
    a, b, c = response("a", 1), response("b", 1), response("c", 1)
    other = response("int", 1, dtypes=(torch.int32,))
    assert fused([a, b, c], 100) == ["a b c"]
    assert fused([a, b, c], 8) == ["a b", "c"]
    assert fused([a, b, c], 4) == ["a", "b", "c"] == fused([a, b, c], 0)
    assert fused([a, other, b, other._replace(name="int2"), c], 100) == ["a b c", "int int2"]
    # 4 bytes taken and 200 passed over are more than 100: no further look.
    far = response("far", 50, dtypes=(torch.int32,))
    assert fused([a, far, b], 100) == ["a", "far", "b"]
    assert fused([a, response("large", 1000), b], 100) == ["a", "large", "b"]
    assert fused([a, response("large", 1 << 19), b], 1 << 30) == ["a b", "large"], "it is not worth a copy"


@pytest.mark.parametrize(
    "more",
    [
        {"reduction": Reduction.MAX},
        {"prescale": 2.0},
        {"postscale": 2.0},
        {"device": "cuda"},
        {"kind": Kind.ALLGATHER},
    ],
)
def test_what_differs_does_not_travel_together(more: dict[str, object]) -> None:
    odd = response("odd", 1, **more)  # type: ignore[arg-type]
    assert fused([response("a", 1), odd, response("b", 1)], 100) == ["a b", "odd"]


def test_each_response_is_looked_at_once_where_nothing_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    key = execution._key

    def counting(response: Response, fuse_groups: bool) -> object:
        looked.append(response.name)
        return key(response, fuse_groups)

    monkeypatch.setattr(execution, "_key", counting)
    many = [response(f"{i}", 1, prescale=float(i)) for i in range(500)]
    assert fused(many, 1 << 20) == [each.name for each in many] == looked


def test_groups_and_broadcasts() -> None:
    group = response("group", 2, num_tensors=2)
    assert fused([response("a", 1), group], 100) == ["a group"]
    assert fused([response("a", 1), group, response("b", 1)], 100, fuse_groups=False) == ["a b", "group"]
    mixed = response("mixed", 2, num_tensors=2, dtypes=(torch.float32, torch.int32))
    assert fused([response("a", 1), mixed], 100) == ["a", "mixed"]
    spread = [response(f"{i}", 1, Kind.BROADCAST, root=i // 2, dtypes=(dtype,)) for i, dtype in enumerate((torch.int8, torch.float32, torch.int8))]  # fmt: skip # noqa: E501
    assert fused(spread, 100) == ["0 1", "2"], "of any dtype, by root"
    gathers = [response(f"{i}", 1, Kind.ALLGATHER) for i in range(2)]
    assert fused(gathers, 100) == ["0", "1"]


def test_memory_for_packing_grows_at_once_and_shrinks_when_little_was_needed_for_long() -> None:
    made: list[int] = []

    def allocate(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(num)
        return torch.zeros(num, dtype=dtype, device=device)

    scratch, cpu = Scratch(allocate), torch.device("cpu")
    for num in (10, 8, 1000, *[30, 40] * 300, 500):
        assert len(scratch.take(num, torch.float32, cpu)) == num
    assert made == [10, 1000, 40, 500]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float32])
def test_scales(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 7, 9]).to(dtype)
    scale(tensor, 1.5, 2)
    exact = [0.75, 5.25, 6.75]
    assert tensor.tolist() == (exact if dtype.is_floating_point else [0, 5, 6])


def test_what_a_group_averages_is_not_divided_again() -> None:
    asked: list[object] = []

    def collective(tensor: Tensor, op: object) -> Tensor:
        asked.append(op)
        return tensor

    mean = response("x", 1, reduction=Reduction.AVERAGE, postscale=3.0).request
    results = [combine(torch.full((2,), 4.0), mean, 4, averages, collective)[0].item() for averages in (True, False)]
    assert results == [12.0, 3.0] and asked == [torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM]
    assert combine(torch.tensor([5, -5]), mean, 4, True, collective).tolist() == [3, -3]
    assert asked[-1] == torch.distributed.ReduceOp.SUM, "integers"


def test_the_pace_of_a_burst() -> None:
    pace = Pace(None)
    assert pace.due(0.0) is None
    assert pace.submitted(10, 1.0), "the thread sleeps without end"
    assert pace.due(1.0) == 1.0 + AGE_S
    assert not pace.submitted(10, 1.001)
    pace.begins(1.0 + AGE_S)
    pace.ends(1.003, True)
    assert pace.due(1.003) == 1.003 + AGE_S, "what was not ready asks again, without haste"
    pace.submitted(10, 1.004)
    assert pace.due(1.004) == 1.004 + AGE_S
    assert pace.submitted(BYTES, 1.005) and pace.due(1.005) == 1.005, "a bucketful"
    pace.begins(1.005)
    pace.ends(1.006, True)
    pace.wanted()
    assert pace.due(1.006) == 1.006, "somebody waits"
    pauses = []
    for _ in range(7):
        pace.begins(2.0)
        pace.ends(2.0, False)
        pauses.append(round((pace.due(2.0) or 0.0) - 2.0, 6))
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
    assert pace.submitted(1, 2.0) and pace.due(2.0) == 2.0, "news do not pause"
    pace.begins(2.0)
    pace.ends(2.0, True)
    for _ in range(5):
        pace.settled(was_wanted=False)
    assert pace.due(3.0) is None
    pace.is_urgent = True
    assert pace.due(3.0) == 3.0


def test_the_pace_of_a_cycle() -> None:
    pace = Pace(10.0)
    assert pace.submitted(1, 5.0) and pace.due(5.0) == 5.0
    pace.begins(5.0)
    pace.ends(5.001, True)
    pace.submitted(1, 5.002)
    assert not pace.submitted(1 << 30, 5.002)
    pace.wanted()
    assert pace.due(5.002) == pytest.approx(5.01), "neither bytes nor haste"
    assert pace.due(5.02) == 5.02
    for _ in range(6):
        pace.begins(6.0)
        pace.ends(6.0, False)
    assert pace.due(6.0) == pytest.approx(6.02), "others are not ready"
    assert pace.submitted(1, 6.001), "whoever sleeps until then must wake"
    assert pace.due(6.001) == pytest.approx(6.01)


def handle_of(hurry: object, *tensors: Tensor) -> Handle:
    return Handle(Submission(Kind.ALLREDUCE, "x", tensors), response("x", 1).request, hurry)  # type: ignore[arg-type]


def test_who_comes_to_wait_while_it_ends_is_not_counted() -> None:
    engine: Any = SimpleNamespace(settings=Settings())
    channel = NamedChannel(0, [0], None, None, engine)
    handle = channel._pending["x"] = handle_of(channel._hurry, torch.zeros(1))
    channel._pace.submitted(4, 0.0)
    end = handle.end

    def late(*args: object) -> None:
        assert not handle.done(), "between the end and the word of it"
        channel._hurry(handle)
        end(*args)  # type: ignore[arg-type]

    handle.end = late  # type: ignore[assignment, method-assign]
    channel._settle(["x"])
    assert handle.done() and channel._pace._num_wanted == channel._pace._num_pending == 0


def test_a_handle_waits_and_hurries_once() -> None:
    hurried: list[Handle] = []

    def hurry(handle: Handle) -> None:
        hurried.append(handle)
        handle.is_wanted = True

    handle = handle_of(hurry)
    assert not handle.done() and not handle.done() and hurried == [handle]
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    handle.outputs = outputs = [torch.zeros(1)]
    handle.end()
    waiter.join(LIMIT_S)
    assert not waiter.is_alive() and handle.done() and handle.wait() == outputs == handle.wait()
    handle.end(NegotiationError("too late"))
    assert handle.wait() == outputs
    failed = handle_of(hurry)
    failed.end(NegotiationError("why", is_of_kinds=True))
    for _ in range(2):
        with pytest.raises(NegotiationError, match=r"^why$") as raised:
            failed.wait()
        assert raised.value.is_of_kinds
    assert failed.done()


def test_requests_of_barriers_joins_and_even_splits() -> None:
    even = request_of(Submission(Kind.ALLTOALL, "x", (torch.zeros(4, 1),)), 2)
    assert even.splits == (2, 2) and even.shapes == ((4, 1),)
    with pytest.raises(ValueError, match="barrier takes no tensors"):
        request_of(Submission(Kind.BARRIER, "x", (torch.zeros(2, 3),)), 2)
    for kind, name in ((Kind.BARRIER, "join"), (Kind.JOIN, "x")):
        with pytest.raises(ValueError, match="is called 'join'"):
            request_of(Submission(kind, name, ()), 2)


def test_numbers_of_numpy_travel_as_those_of_python() -> None:
    scales = {"prescale": np.float32(0.5), "postscale": torch.tensor(2.0)}
    tensor = torch.zeros(4, 1)
    for submission in (
        Submission(Kind.ALLREDUCE, "x", (tensor,), **scales),  # type: ignore[arg-type]
        Submission(Kind.BROADCAST, "x", (tensor,), root=np.int64(1)),  # type: ignore[arg-type]
        Submission(Kind.ALLTOALL, "x", (tensor,), splits=tuple(np.array([1, 3]))),
    ):
        request = request_of(submission, 2)
        [(_, other)] = Message.decoded(Message([("x", request)]).encoded()).requests
        assert other == request


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="cache_capacity"):
        Settings(cache_capacity=-1)
    with pytest.raises(ValueError, match="cycle_time_ms"):
        Settings(cycle_time_ms=-1.0)


# Streams: with streams that only write down what is asked of them.


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def test_a_batch_stands_between_what_was_launched_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    trainer = Stream("trainer", said)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream("channel", said))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: trainer)
    group: Any = Alone()

    def allocate(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        said.append("packs")
        return torch.zeros(num, dtype=dtype, device=device)

    executor = Executor(group, group, 0, allocate, frozenset())
    handles, batch = {}, []
    for name in ("a", "b"):
        submission = Submission(Kind.ALLREDUCE, name, (torch.ones(2),))
        request = NamedRequest(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cuda", prescale=2.0)
        ready: Any = trainer.record_event()
        handles[name] = Handle(submission, request, lambda handle: None, 0.0, ready)
        batch.append(Response(name, {0: request}))
    executor.carry_out(batch, handles)
    handle = handles["b"]
    handle.end()
    assert torch.equal(handle.wait()[0], torch.full((2,), 2.0))
    assert said == [
        "trainer records event 0",
        "trainer records event 1",
        "enter channel",
        "channel waits for event 0",
        "channel waits for event 1",
        "packs",
        "channel records event 6",
        "leave channel",
        "trainer waits for event 6",
    ]


def test_zeros_of_a_rank_that_joined_and_never_had_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(f"{device}", []))

    def allocate(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.ones(num, dtype=dtype)

    group: Any = Alone()
    executor = Executor(group, group, 0, allocate, frozenset())
    executor.joined_on = 3
    executor.carry_out([Response("x", {1: NamedRequest(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cuda")})], {})
    assert made == [torch.device("cuda", 3)] == list(executor._streams)


def test_a_tensor_on_an_accelerator_on_one_rank_only() -> None:
    here = NamedRequest(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cpu", prescale=2.0)
    found = difference("x", {0: here, 1: here._replace(device="cuda")}, [0, 1])
    assert found == "Mismatched devices (CPU/GPU): rank 0 has a tensor on cpu, rank 1 has a tensor on cuda (for 'x')"


# Stalls, and words, also where the store is gone.


class SilentStore(dist.Store):
    """A store whose keeper is gone. It counts its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone, self.num_answers = False, 0
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._answer()
        self.held[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._answer()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.held for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._answer()
        self.held[key] = str(int(self.held.get(key, b"0")) + amount).encode()
        return int(self.held[key])

    def _answer(self) -> None:
        self.num_answers += 1
        if self.is_gone:
            raise RuntimeError("connection reset")


def test_words_need_no_new_thread_and_no_store_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SilentStore()
    stores = [EngineStore(store, rank, 2) for rank in range(2)]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    stores[0].read_processes()
    stores[1].report("rank 1 has shut down")
    assert stores[0].reports() == {1: "rank 1 has shut down"} == stores[0].ends(0.0)[1]
    store.is_gone = True
    stores[0].report("nobody hears it")
    assert stores[0].reports() == {} and stores[0].ends(0.0) == ({}, {})
    with pytest.raises(RuntimeError):
        stores[0].pending()
    for words in stores:
        words.close()


def test_the_reports_of_many_ranks_are_read_from_a_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of one answer: however slow the store is, many answers together may take longer."""
    monkeypatch.setattr(stalls, "_STORE_S", LIMIT_S)
    size, store = 40, SilentStore()
    stores = [EngineStore(store, rank, size) for rank in range(size)]
    for rank in range(1, size):
        stores[rank].report(f"rank {rank} has shut down")
    call, num_answers = stores[0]._client.call, list[int]()

    def counted(*arguments: Any, **more: Any) -> Any:
        before = store.num_answers
        found = call(*arguments, **more)
        num_answers.append(store.num_answers - before)
        return found

    stores[0]._notices._call = counted
    assert stores[0].reports() == {rank: f"rank {rank} has shut down" for rank in range(1, size)}
    assert set(num_answers) == {1} and len(num_answers) > size
    for words in stores:
        words.close()


class Pending:
    """A channel that waits for somebody."""

    def __init__(self, *names: str) -> None:
        self.number, self.ranks, self.since = 0, (0, 1, 2), time.monotonic()
        self.names = names

    def pending_since(self) -> dict[str, float]:
        return dict.fromkeys(self.names, self.since)


def test_a_stall_ends_at_its_limit_without_a_store_too() -> None:
    store: Any = SilentStore()
    words, ended = EngineStore(store, 0, 3), threading.Event()
    store.is_gone = True
    failures: list[NegotiationError] = []

    def stop(error: NegotiationError) -> None:
        failures.append(error)
        ended.set()

    channel = Pending("x")
    watch = StallWatch(words, 0, Settings(), 0.1, lambda: [channel], stop, tick_s=0.02)
    watch.touch()
    assert ended.wait(LIMIT_S)
    watch.close()
    words.close()
    assert "stalled" in str(failures[0]) and "the store is gone" in str(failures[0])


def test_who_has_joined_is_not_missing() -> None:
    store: Any = SilentStore()
    stores = [EngineStore(store, rank, 3) for rank in range(3)]
    channel = Pending("x", "join")
    failures: list[NegotiationError] = []
    watch = StallWatch(stores[0], 0, Settings(), 0.3, lambda: [channel], failures.append, tick_s=0.02)
    stores[1].publish({0: ["join"]})
    watch._end({0: channel.pending_since()}, channel.since + 1.0)
    watch.close()
    for words in stores:
        words.close()
    text = str(failures[0])
    assert "missing: rank 2 for x, join" in text and "rank 1" not in text

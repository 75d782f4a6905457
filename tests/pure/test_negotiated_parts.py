"""The parts of negotiated collectives that need no other rank."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.gradients.named import Handle, Kind, NegotiationError, Reduction, Settings, Submission, fusion
from guozhuang.gradients.named.arithmetic import combine, scale
from guozhuang.gradients.named.channel import Channel, Surroundings
from guozhuang.gradients.named.execution import Entry, Result
from guozhuang.gradients.named.fusion import batches, runs
from guozhuang.gradients.named.intake import request_of
from guozhuang.gradients.named.memory import FlatMemories, Scratch
from guozhuang.gradients.named.pace import AGE_S, BYTES, FIRST_BYTES, Pace
from guozhuang.gradients.named.table import Message, Request, Response
from guozhuang.gradients.named.tracing import Tracing


def response(name: str, num: int, kind: Kind = Kind.ALLREDUCE, num_tensors: int = 1, **more: object) -> Response:
    request = Request(
        kind, ((num,),) * num_tensors, (torch.float32,) * num_tensors, "cpu", Reduction.SUM, 1.0, 1.0, None, None, None
    )
    request = request._replace(**more)  # type: ignore[arg-type]
    return Response(name, {0: request}, None, request.places)


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


@pytest.mark.parametrize(
    "more",
    [
        {"reduction": Reduction.MAX},
        {"prescale": 2.0},
        {"postscale": 2.0},
        {"device": "cuda"},
        {"kind": Kind.ALLGATHER},
        {"places": ((0, 5),)},
    ],
)
def test_what_differs_does_not_travel_together(more: dict[str, object]) -> None:
    odd = response("odd", 1, **more)  # type: ignore[arg-type]
    assert fused([response("a", 1), odd, response("b", 1)], 100) == ["a b", "odd"]


def test_each_response_is_looked_at_once_where_nothing_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    key = fusion._key

    def counting(response: Response, fuse_groups: bool) -> object:
        looked.append(response.name)
        return key(response, fuse_groups)

    monkeypatch.setattr(fusion, "_key", counting)
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


def test_runs_are_neighbours_in_any_order() -> None:
    placed = [
        response("b", 10, places=((0, 5),)),
        response("a", 5, places=((0, 0),)),
        response("far", 3, places=((0, 20),)),
        response("group", 2, num_tensors=2, places=((0, 15), (0, 23))),
    ]
    found = runs(placed)
    assert found is not None
    assert [(run.order, run.num_elements) for run in found] == [((1, 0, 3), 17), ((2, 4), 5)]
    assert runs([*placed, response("x", 1)]) is None
    assert [run.num_elements for run in runs([placed[0], placed[0]]) or []] == [10, 10], "one memory under two names"


def test_memory_for_packing_grows_at_once_and_shrinks_when_little_was_needed_for_long() -> None:
    made: list[int] = []

    def allocate(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(num)
        return torch.zeros(num, dtype=dtype, device=device)

    scratch, cpu = Scratch(allocate), torch.device("cpu")
    for num in (10, 8, 1000, *[30, 40] * 300, 500):
        assert len(scratch.take(num, torch.float32, cpu)) == num
    assert made == [10, 1000, 40, 500]


def test_flat_memories_know_where_tensors_lie() -> None:
    memories = FlatMemories(lambda num, dtype, device: torch.zeros(num, dtype=dtype, device=device))
    assert memories.places_of((torch.zeros(3),)) is None
    cpu = torch.device("cpu")
    first, second = memories.allocate(100, torch.float32, cpu), memories.allocate(50, torch.float64, cpu)
    assert memories.places_of((first[10:20],)) == ((0, 10),)
    assert memories.places_of((second, second[7:8])) == ((1, 0), (1, 7))
    assert memories.places_of((first[:1], second[:1])) is None, "two memories"
    assert memories.places_of((first[:0],)) is None and memories.places_of((torch.zeros(100),)) is None
    assert memories.places_of((first[:2].view(torch.float64),)) is None, "another dtype"
    storage = torch.zeros(30)
    pieces = iter((storage[10:20], storage[5:15], storage[25:]))
    again = FlatMemories(lambda *_: next(pieces))
    for _ in range(3):
        again.allocate(10 if _ < 2 else 5, torch.float32, cpu)
    assert again.places_of((storage[16:18],)) is None, "what lies over an older one takes its place"
    assert again.places_of((storage[6:7],)) == ((1, 1),) and again.places_of((storage[25:27],)) == ((2, 0),)


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
    assert pace.submitted(FIRST_BYTES, 1.002) and pace.due(1.002) == 1.002, "the first bytes go early"
    pace.begins(1.002)
    pace.ends(1.003, True)
    assert pace.due(1.003) == 1.003 + AGE_S, "what was not ready asks again, without haste"
    pace.submitted(FIRST_BYTES, 1.004)
    assert pace.due(1.004) == 1.004 + AGE_S
    assert pace.submitted(BYTES, 1.005) and pace.due(1.005) == 1.005, "then a bucketful"
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
    for _ in range(6):
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


def test_who_comes_to_wait_while_it_ends_is_not_counted() -> None:
    around = Surroundings(Settings(), Tracing(writes=False), *[lambda *_: None] * 3)  # type: ignore[arg-type]
    channel = Channel(0, [0], None, None, around)
    handle = Handle(channel._hurry)
    one = Submission(Kind.ALLREDUCE, "x", (torch.zeros(1),))
    channel._under_way["x"] = Entry(response("x", 1).request, one, handle, 0.0, None)
    channel._pace.submitted(4, 0.0)
    complete = handle.complete

    def late(*args: object) -> None:
        assert not handle.done(), "between the end and the word of it"
        channel._hurry(handle)
        complete(*args)  # type: ignore[arg-type]

    handle.complete = late  # type: ignore[assignment, method-assign]
    channel._settle({"x": Result(one.tensors)})
    assert handle.done() and channel._pace._num_wanted == channel._pace._num_pending == 0


def test_a_handle_waits_and_hurries_once() -> None:
    hurried: list[Handle] = []

    def hurry(handle: Handle) -> None:
        hurried.append(handle)
        handle.is_wanted = True

    handle = Handle(hurry)
    assert not handle.done() and not handle.done() and hurried == [handle]
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    outputs = [torch.zeros(1)]
    handle.complete(outputs)
    waiter.join(5)
    assert not waiter.is_alive() and handle.done() and handle.wait() == outputs == handle.wait()
    handle.fail(NegotiationError("too late"))
    assert handle.wait() == outputs
    failed = Handle(hurry)
    failed.fail(NegotiationError("why"))
    for _ in range(2):
        with pytest.raises(NegotiationError, match=r"^why$"):
            failed.wait()
    assert failed.done()


def test_requests_say_where_tensors_lie_only_if_they_are_reduced_in_place() -> None:
    def places_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
        return ((3, 4),) * len(tensors)

    tensor = torch.zeros(2, 3)
    for outputs, kind, places in (
        ((tensor,), Kind.ALLREDUCE, ((3, 4),)),
        (None, Kind.ALLREDUCE, None),
        ((tensor.clone(),), Kind.ALLREDUCE, None),
        ((tensor,), Kind.BROADCAST, None),
    ):
        submission = Submission(kind, "x", (tensor,), outputs=outputs, root=0)
        assert request_of(submission, 2, places_of).places == places
    even = request_of(Submission(Kind.ALLTOALL, "x", (torch.zeros(4, 1),)), 2, places_of)
    assert even.splits == (2, 2) and even.shapes == ((4, 1),)
    with pytest.raises(ValueError, match="barrier takes no tensors"):
        request_of(Submission(Kind.BARRIER, "x", (tensor,)), 2, places_of)
    for kind, name in ((Kind.BARRIER, "join"), (Kind.JOIN, "x")):
        with pytest.raises(ValueError, match="is called 'join'"):
            request_of(Submission(kind, name, ()), 2, places_of)


def test_numbers_of_numpy_travel_as_those_of_python() -> None:
    def places_of(tensors: tuple[Tensor, ...]) -> None:
        return None

    scales = {"prescale": np.float32(0.5), "postscale": torch.tensor(2.0)}
    tensor = torch.zeros(4, 1)
    for submission in (
        Submission(Kind.ALLREDUCE, "x", (tensor,), **scales),  # type: ignore[arg-type]
        Submission(Kind.BROADCAST, "x", (tensor,), root=np.int64(1)),  # type: ignore[arg-type]
        Submission(Kind.ALLTOALL, "x", (tensor,), splits=tuple(np.array([1, 3]))),
    ):
        request = request_of(submission, 2, places_of)
        [(_, other)] = Message.decoded(Message([("x", request)]).encoded()).requests
        assert other == request


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="cache_capacity"):
        Settings(cache_capacity=-1)
    with pytest.raises(ValueError, match="cycle_time_ms"):
        Settings(cycle_time_ms=-1.0)


def test_a_trace_is_complete_after_every_event(tmp_path: Path) -> None:
    path, tracing = tmp_path / "trace.json", Tracing(writes=True)
    path.write_text("what was there before " * 1000)
    tracing.carried_out(Kind.ALLREDUCE, ["not recorded"], 1.0, 2.0)
    tracing.start(str(path), mark_cycles=True)
    assert len(json.loads(path.read_text())) == 1
    for i in range(20):
        tracing.round_began(float(i))
        tracing.negotiated(Kind.ALLREDUCE, [("allreduce.ä", 0.0)], 1.0)
        tracing.carried_out(Kind.ALLREDUCE, ["allreduce.ä", "allreduce.b"], 1.0, 1.5)
        assert len(json.loads(path.read_text())) == 1 + 3 + 4 * (i + 1)
    with pytest.raises(UsageError, match=r"trace\.json"):
        tracing.start(str(tmp_path / "other"), mark_cycles=False)
    tracing.stop()
    tracing.carried_out(Kind.ALLREDUCE, ["not recorded"], 1.0, 2.0)
    assert "not recorded" not in path.read_text()
    silent = Tracing(writes=False)
    silent.start(str(tmp_path / "silent"), mark_cycles=True)
    silent.round_began(1.0)
    assert not silent.is_on and not (tmp_path / "silent").exists()
    with pytest.raises(UsageError, match="silent"):
        silent.start("x", mark_cycles=False)
    silent.stop()
    with pytest.raises(OSError, match="no folder"):
        tracing.start(str(tmp_path / "no folder" / "x"), mark_cycles=False)
    with pytest.raises(OSError, match="No space"):
        tracing.start("/dev/full", mark_cycles=False)
    tracing.start(str(tmp_path / "third"), mark_cycles=False)
    tracing.stop()


def test_a_trace_ends_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, tracing = tmp_path / "trace.json", Tracing(writes=True)
    tracing.start(str(path), mark_cycles=True)
    tracing.round_began(1.0)
    before = path.read_text()
    pwrite, num_calls = os.pwrite, 0

    def half(file: int, data: bytes, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        return pwrite(file, data[: len(data) // 2] if num_calls == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", half)
    for i in range(3):
        tracing.carried_out(Kind.ALLREDUCE, ["x"], 1.0, 2.0 + i)
    assert path.read_text() == before and not tracing.is_on
    [said] = [each.getMessage() for each in caplog.records]
    assert said.startswith(f"the timeline {path} ends here: ") and "No space left" in said
    tracing.stop()
    tracing.start(str(path), mark_cycles=False)
    tracing.stop()

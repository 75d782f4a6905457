"""In which order a channel lets work on an accelerator stand, with streams that only write down what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guozhuang.gradients.named import Handle, Kind, Reduction, Submission
from guozhuang.gradients.named.execution import Entry, Executor
from guozhuang.gradients.named.mismatches import difference
from guozhuang.gradients.named.plans import Known
from guozhuang.gradients.named.table import Request, Response
from tests.pure.test_serial import Stream


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
    entries, batch = {}, []
    for name in ("a", "b"):
        submission = Submission(Kind.ALLREDUCE, name, (torch.ones(2),))
        request = Request(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cuda", Reduction.SUM, 2.0, 1.0, None, None, None)
        object.__setattr__(submission, "known", Known(None, request, 8, []))
        ready: Any = trainer.record_event()
        entries[name] = Entry(request, submission, Handle(lambda handle: None), 0.0, ready)
        batch.append(Response(name, {0: request}, None, None))
    results = executor.carry_out(batch, entries)
    result = results["b"]
    handle = entries["b"].handle
    handle.complete(result.outputs, result.launched)
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
    request = Request(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cuda", Reduction.SUM, 1.0, 1.0, None, None, None)
    assert executor.carry_out([Response("x", {1: request}, None, None)], {}) == {}
    assert made == [torch.device("cuda", 3)] == list(executor._streams)


def test_a_tensor_on_an_accelerator_on_one_rank_only() -> None:
    here = Request(Kind.ALLREDUCE, ((2,),), (torch.float32,), "cpu", Reduction.SUM, 2.0, 1.0, None, None, None)
    found = difference("x", {0: here, 1: here._replace(device="cuda")}, [0, 1])
    assert found == "Mismatched devices (CPU/GPU): rank 0 has a tensor on cpu, rank 1 has a tensor on cuda (for 'x')"

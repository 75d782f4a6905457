"""Traces are data: they go to JSON and back, and what cannot be replayed is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from guozhuang.cost.trace import Compute, Start, Trace, Wait
from guozhuang.errors import UsageError
from guozhuang.records import build


def test_json_and_back_is_the_same_trace() -> None:
    events = (Compute("backward", 0.5, 1), Start(3, "all_reduce", 4096, (0, 1), True), Wait(3, 1), Compute("data", 1.0))
    trace = Trace(1, 2, events, num_steps=4, num_threads=2)
    document = json.loads(json.dumps(asdict(trace)))
    assert build(Trace, document) == trace
    for event in document["events"]:  # written before there were such fields
        event.pop("element_bytes", None)
    assert build(Trace, document) == trace


@pytest.mark.parametrize(
    ("events", "more", "says"),
    [
        ((Compute("backwards", 1.0),), {}, "forward"),
        ((Compute("forward", float("inf")),), {}, "finite"),
        ((Wait(1),), {}, "nobody begins"),
        ((Start(1, "allreduce", 4, (0, 1)),), {}, "all_reduce"),
        ((Start(1, "barrier", 0, (0, 1)), Start(1, "barrier", 0, (0, 1))), {}, "the same number"),
        ((Start(1, "barrier", 0, (1, 2)),), {}, "rank 0 is one"),
        ((Start(1, "barrier", 0, (0, 4)),), {}, "among different ranks of the 4"),
        ((Start(1, "send", 4, (1, 0)),), {}, "from its first rank"),
        ((Compute("data", 1.0),), {"num_steps": 0}, "at least one step"),
    ],
)
def test_refuses(events: tuple[Any, ...], more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Trace(0, 4, events, **more)

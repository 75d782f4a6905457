"""In which order a lane lets work on an accelerator stand, with streams that only write down what is asked of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from typing import Any

import pytest
import torch

from guozhuang.errors import WorldError
from guozhuang.groups import serial
from guozhuang.groups.serial import Lane, SerialThread
from tests.waiting import LIMIT_S

DEVICE = torch.device("cuda:0")


class Stream:
    """Writes down; its events are numbers."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def __enter__(self) -> Stream:
        self.said.append(f"enter {self.name}")
        return self

    def __exit__(self, *args: object) -> None:
        self.said.append(f"leave {self.name}")

    def record_event(self) -> str:
        event = f"event {len(self.said)}"
        self.said.append(f"{self.name} records {event}")
        return event

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")


def end(lane: SerialThread) -> None:
    lane.close()
    assert lane.join(LIMIT_S)


def test_a_job_stands_between_what_was_launched_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    trainer, group = Stream("trainer", said), object()
    monkeypatch.setattr(serial, "twin", lambda group: group)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream("lane", said))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: trainer)
    lane = Lane(group)  # type: ignore[arg-type]

    def job() -> None:
        said.append("job")

    work = lane.run(job, [DEVICE])
    work.wait()
    assert said == [
        "trainer records event 0",
        "enter lane",
        "lane waits for event 0",
        "job",
        "lane records event 4",
        "leave lane",
        "trainer waits for event 4",
    ]

    def fails() -> None:
        raise ValueError("no")

    bad: Any = lane.run(fails, [DEVICE])
    with pytest.raises(ValueError, match="no"):
        bad.wait()
    assert bad.is_completed()
    end(lane)


def test_on_the_cpu_there_are_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial, "twin", lambda group: group)
    lane = Lane(object())  # type: ignore[arg-type]
    work = lane.run(lambda: None, [torch.device("cpu")])
    work.wait()
    assert work.is_completed() and not lane._streams
    end(lane)


def test_urgent_jobs_go_first_and_a_failed_one_poisons_the_rest() -> None:
    thread, began, go_on, said = SerialThread("test", "exchange"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        go_on.wait(LIMIT_S)

    def fails() -> None:
        raise ValueError("no luck")

    works = [thread.run(first)]
    began.wait(LIMIT_S)
    for name, urgency in (("third", 2.0), ("first", -1.0), ("fourth", 2.0), ("second", 0.0)):
        works.append(thread.run(functools.partial(said.append, name), urgency=urgency))
    last = thread.run(fails, urgency=3.0), thread.run(lambda: said.append("never"), urgency=4.0)
    go_on.set()
    for work in works:
        work.wait()
    assert said == ["first", "second", "third", "fourth"]
    with pytest.raises(ValueError, match="no luck"):
        last[0].wait()
    with pytest.raises(WorldError, match="an earlier exchange failed: no luck"):
        last[1].wait()
    assert "never" not in said
    end(thread)


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_with_the_last_reference(fails: bool) -> None:
    thread = SerialThread("test", "exchange")

    def job(owner: SerialThread) -> None:
        try:
            assert owner.is_current
            if fails:
                raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    work = thread.run(functools.partial(job, thread))
    with pytest.raises(ValueError) if fails else contextlib.nullcontext():
        work.wait()
    del work
    runner = thread._thread
    assert runner is not None
    del thread
    gc.collect()
    runner.join(LIMIT_S)
    assert not runner.is_alive()


def test_a_thread_can_be_joined_while_another_one_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, start, joined = SerialThread("lazy"), threading.Thread.start, list[bool]()

    def start_late(made: threading.Thread) -> None:
        joined.append(thread.join(0))
        start(made)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    thread.run(lambda: None).wait()
    assert len(joined) == 1
    end(thread)

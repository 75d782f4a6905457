"""What the timeline writes is the Chrome trace format, appears whole or not at all, and joins."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from guozhuang.errors import UsageError
from guozhuang.timeline import Instant, Span, Timeline, TraceStream, merge


def filled(rank: int) -> Timeline:
    timeline = Timeline(rank)
    with timeline.span("backward", "step", step=3):
        timeline.mark("bucket 0 started", "buckets", num_bytes=40)
    timeline.add("exchange 0", "exchange 0", 1_000, 4_500, num_bytes=40)
    return timeline


def test_a_trace_names_ranks_and_tracks_and_counts_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "trace.json"
    filled(2).write(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == {2}
    names = [e for e in events if e["ph"] == "M"]
    assert [e["args"]["name"] for e in names if e["name"] == "process_name"] == ["rank 2"]
    tracks = {e["tid"]: e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["buckets", "exchange 0", "step"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (spans["exchange 0"]["ts"], spans["exchange 0"]["dur"]) == (1.0, 3.5)
    assert spans["exchange 0"]["args"] == {"num_bytes": 40}
    assert tracks[spans["backward"]["tid"]] == "step"
    (instant,) = [e for e in events if e["ph"] == "i"]
    assert instant["s"] == "t" and tracks[instant["tid"]] == "buckets"
    assert spans["backward"]["ts"] <= instant["ts"] <= spans["backward"]["ts"] + spans["backward"]["dur"]
    body = [e["ts"] for e in events if e["ph"] != "M"]
    assert body == sorted(body)


def test_a_span_is_recorded_when_its_body_raises() -> None:
    timeline = Timeline(0)
    with pytest.raises(KeyError), timeline.span("forward", "step"):
        raise KeyError
    (span,) = timeline.spans("forward")
    assert span.start_ns <= span.end_ns


def test_spans_come_by_name_and_instants_are_none() -> None:
    timeline = filled(0)
    timeline.mark("backward", "step")
    assert [s.track for s in timeline.spans("backward")] == ["step"]
    assert timeline.spans("bucket 0 started") == []
    assert [e.name for e in timeline.events if isinstance(e, Instant)] == ["bucket 0 started", "backward"]


def test_an_empty_timeline_is_a_trace_too(tmp_path: Path) -> None:
    Timeline(0).write(tmp_path / "t.json")
    assert [e["ph"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]] == ["M"]


def test_merging_keeps_every_event_of_every_rank(tmp_path: Path) -> None:
    paths = []
    for rank in range(3):
        paths.append(tmp_path / f"{rank}.json")
        filled(rank).write(paths[-1])
    merge(paths, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    apart = [e for path in paths for e in json.loads(path.read_text())["traceEvents"]]
    assert sorted(map(json.dumps, merged)) == sorted(map(json.dumps, apart))
    assert {e["pid"] for e in merged} == {0, 1, 2}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"other": []}'])
def test_merging_what_is_no_trace_names_the_file_and_writes_nothing(tmp_path: Path, text: str | None) -> None:
    filled(0).write(tmp_path / "0.json")
    if text is not None:
        (tmp_path / "1.json").write_text(text)
    with pytest.raises(UsageError, match=r"1\.json"):
        merge([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    timeline = Timeline(0)
    timeline.mark("x", "step", value=object())  # json cannot write it
    with pytest.raises(TypeError):
        timeline.write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline = Timeline(0)
    for i in range(2000):
        timeline.mark(f"event {i}", "step")
    timeline.write(path)
    stop = threading.Event()
    broken: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                assert len(json.loads(path.read_text())["traceEvents"]) == 2002
            except Exception as error:
                broken.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            timeline.write(path)
    finally:
        stop.set()
        reader.join()
    assert not broken


def test_threads_lose_no_event() -> None:
    timeline = Timeline(0)

    def work() -> None:
        for _ in range(500):
            timeline.mark("m", "step")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.events) == 2000


def test_the_clock_is_the_one_all_processes_of_a_node_share() -> None:
    import time

    before = time.monotonic_ns()
    assert before <= Timeline.now() <= time.monotonic_ns()


def test_a_streamed_trace_is_complete_after_every_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before " * 1000)
    stream = TraceStream(str(path))
    [clock] = json.loads(path.read_text())
    assert "start_time_since_epoch_in_micros" in clock["args"]
    for i in range(20):
        stream.record(Instant("CYCLE_START", "cycles", i, {}))
        for track in ("allreduce.ä", "allreduce.b"):
            stream.record(Span("ALLREDUCE", track, 1000, 2500, {}))
        events = json.loads(path.read_text())
        assert len(events) == 1 + 3 + 3 * (i + 1)
    tracks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert [(e["ts"], e["dur"]) for e in events if e["pid"] == tracks["allreduce.ä"] and e["ph"] == "X"] == [
        (1.0, 1.5)
    ] * 20
    stream.close()
    stream.record(Instant("not recorded", "cycles", 0, {}))
    assert "not recorded" not in path.read_text()
    stream.close()
    for path, said in ((tmp_path / "no folder" / "x", "no folder"), (Path("/dev/full"), "No space")):
        with pytest.raises(OSError, match=said):
            TraceStream(str(path))


def test_a_streamed_trace_ends_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, stream = tmp_path / "trace.json", TraceStream(str(tmp_path / "trace.json"))
    stream.record(Instant("CYCLE_START", "cycles", 0, {}))
    before = path.read_text()
    pwrite, num_calls = os.pwrite, 0

    def half(file: int, data: bytes, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        return pwrite(file, data[: len(data) // 2] if num_calls == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", half)
    for i in range(3):
        stream.record(Span("ALLREDUCE", "x", 1, 2 + i, {}))
    assert path.read_text() == before and not stream.is_on
    [said] = [each.getMessage() for each in caplog.records]
    assert said.startswith(f"the timeline {path} ends here: ") and "No space left" in said
    stream.close()

"""The rules of the heartbeat on made-up beats with a made-up clock, and the texts that follow."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError
from guozhuang.units import merged, ranks_text
from guozhuang.watch import afterwards, heartbeat, report
from guozhuang.watch.heartbeat import Heartbeat
from guozhuang.watch.judge import GONE, STOPPED, AwakeClock, Beat, Judge, Limits
from guozhuang.watch.pace import OwnTime
from guozhuang.watch.report import dead_threads, hang, held_up_by, last_line, losses, sentence, table, trouble
from guozhuang.watch.stacks import MAX_STACK_BYTES, MainThread, is_of_a_collective, stacks_text
from guozhuang.watch.uncaught import UncaughtErrors
from guozhuang.watch.watcher import Watcher, WatcherStatus, look_at_neighbours
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

LIMITS = Limits.of(1.0)
NEVER_CALLED: Any = None


def beat(count: int, **more: Any) -> Beat:
    known = {"pid": 100, "start": 0, "node": "a", "collectives": 5, "idle_s": 0.0, "still_s": 0.0, "place": "train"}
    return Beat(count=count, **(known | more))


class Made:
    """A world of made-up ranks: each gives a beat per second, unless it is told not to."""

    def __init__(self, size: int, hang_timeout_s: float | None = None) -> None:
        self.judge = Judge(size, LIMITS, hang_timeout_s, 0.0)
        self.size, self.now_s, self.count = size, 0.0, 0

    def run(self, seconds: int, mute: tuple[int, ...] = (), **more: Any) -> Made:
        """``more`` of each beat: a value, or a function of (rank, seconds from the start of this call)."""
        for second in range(1, seconds + 1):
            self.now_s, self.count = self.now_s + 1, self.count + 1
            for rank in set(range(self.size)) - set(mute):
                fields = {name: value(rank, second) if callable(value) else value for name, value in more.items()}
                self.judge.take(rank, beat(self.count, **fields), self.now_s)
        return self

    @property
    def lost(self) -> dict[int, str]:
        return self.judge.lost(self.now_s)

    @property
    def hangs(self) -> bool:
        return self.judge.hangs(self.now_s)


WAITS: dict[str, Any] = {"idle_s": lambda _, s: s, "still_s": lambda _, s: s, "waits_in": "all_reduce"}


# ---- lost


def test_nobody_is_lost_while_all_beat_and_a_silent_rank_is_asked_about_first() -> None:
    made = Made(4).run(100)
    assert not made.lost and not made.judge.silent(made.now_s)
    made.run(3, mute=(1,))
    assert made.judge.silent(made.now_s) == [1]
    assert not made.lost


@pytest.mark.parametrize(("state", "words"), [(GONE, "is gone"), (STOPPED, "is stopped")])
def test_what_a_neighbour_saw_is_said_at_once(state: str, words: str) -> None:
    saw = {"process_states": lambda rank, _: {1: state} if rank == 2 else {}}
    made = Made(3).run(5).run(3, mute=(1,)).run(1, mute=(1,), **saw)
    assert list(made.lost) == [1]
    assert words in made.lost[1]
    assert not made.run(1).lost, "it is back with its next beat"


def test_a_silent_process_that_is_there_gets_patience() -> None:
    alive: dict[str, Any] = {"mute": (1,), "process_states": {1: "running"}}
    made = Made(3, 600.0).run(5).run(29, **alive)
    assert not made.lost
    assert "no sign of life for 30 s, though its process 100 is there (running)" in made.run(1, **alive).lost[1]
    without = Made(3).run(5).run(29, **alive)
    assert not without.judge.mute(without.now_s)
    assert not without.run(30, **alive).lost, "where hangs are not looked for"
    assert "no sign of life for 59 s, though its process 100 is there" in without.judge.mute(without.now_s)[1]
    without.run(1, mute=(1,), process_states={1: GONE})
    assert list(without.lost) == [1]
    assert not without.judge.mute(without.now_s)


def test_where_nobody_can_look_the_limit_is_between() -> None:
    node: dict[str, Any] = {"node": lambda rank, _: "ab"[rank // 2]}
    made = Made(4).run(5, **node).run(9, mute=(2, 3), **node)
    assert not made.lost
    made.run(1, mute=(2, 3), **node)
    assert list(made.lost) == [2, 3]
    assert "nor from any other rank of its node: the node is down, or cut off" in made.lost[2]


def test_who_left_is_not_lost_and_who_failed_is_told() -> None:
    made = Made(3).run(5).run(1, left=lambda rank, _: ["", "ValueError: no", None][rank]).run(50, mute=(0, 1))
    assert not made.lost
    assert made.judge.failed() == {1: "ValueError: no"}


def test_who_never_came_is_lost_in_the_end() -> None:
    made = Made(3, 600.0).run(29, mute=(2,))
    assert not made.lost
    assert "since the world began, 30 s ago" in made.run(1, mute=(2,)).lost[2]
    without = Made(3).run(30, mute=(2,))
    assert (list(without.lost), list(without.judge.mute(30.0))) == ([], [2])


def test_a_successor_knows_how_long_the_watching_rank_was_silent() -> None:
    made = Made(2)
    made.judge.silent_since(0, -4.0)
    made.judge.take(0, beat(7), 1.0)
    made.judge.take(1, beat(7), 1.0)
    assert made.judge.silent(1.0) == [0]
    made.judge.take(0, beat(8), 2.0)
    assert made.judge.silent(2.0) == []


# ---- hangs


@pytest.mark.parametrize(
    ("seconds", "changes", "is_hang"),
    [
        pytest.param(59, {}, False, id="before the time-out"),
        pytest.param(60, {}, True, id="nobody starts anything, somebody stands still"),
        pytest.param(300, {"idle_s": lambda rank, s: 0 if rank == 2 else s}, False, id="one rank starts collectives"),
        pytest.param(300, {"still_s": 3}, False, id="nobody stands still"),
        pytest.param(61, {"still_s": lambda rank, s: 0 if rank == 2 else s}, True, id="one polls, the others wait"),
    ],
)
def test_a_hang_is_that_nobody_starts_anything_and_somebody_stands_still(
    seconds: int, changes: dict[str, Any], is_hang: bool
) -> None:
    assert Made(3, 60.0).run(seconds, **WAITS | changes).hangs is is_hang


def test_without_a_time_out_nothing_is_a_hang() -> None:
    assert not Made(3).run(10_000, **WAITS).hangs


def test_those_who_wait_for_a_rank_without_beats_hang_once_all_have_come() -> None:
    assert Made(3, 60.0).run(1).run(60, mute=(1,), **WAITS, process_states={1: GONE}).hangs
    assert Made(3, 60.0).run(1, left=lambda r, _: "" if r == 1 else None).run(60, mute=(1,), **WAITS).hangs
    late_to_be_lost = Made(2, 60.0).run(1).run(60, mute=(1,), process_states={1: "running"}, **WAITS)
    assert late_to_be_lost.hangs, "silence counts as standing"
    assert not Made(3, 5.0).run(20, mute=(2,), **WAITS).hangs, "rank 2 has not come yet"


# ---- words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"collectives": lambda rank, _: 7 if rank == 2 else 8},
            "held up by rank 2: 7 collectives of the default group started, others 8",
        ),
        (
            {"waits_in": lambda rank, _: "" if rank == 2 else "all_reduce"},
            "held up by rank 2: in no collective, while the others wait in one",
        ),
        ({"waits_in": lambda rank, _: "barrier" if rank == 2 else "all_reduce"}, "different collectives (all_reduce, barrier)"),
        ({}, "all ranks stand at the same place"),
    ],
    ids=["behind", "waits for nothing", "another collective", "all at one place"],
)  # fmt: skip
def test_a_report_says_who_holds_the_others_up(changes: dict[str, Any], words: str) -> None:
    made = Made(4, 60.0).run(60, **WAITS | changes)
    line = held_up_by(made.judge, made.lost, made.now_s)
    assert words in line
    assert hang(made.judge, made.lost, made.now_s, line).splitlines()[1] == line


def test_the_table_has_a_line_per_place_and_marks_what_a_lost_rank_reported_last() -> None:
    place = {"place": lambda rank, _: "load" if rank == 5 else "all_reduce"}
    text = table(Made(1000).run(1, **place).judge, {}, 1.0)
    assert len(text.splitlines()) == 3
    assert "0-4, 6-999" in text
    made = Made(2).run(5).run(4, mute=(1,), process_states={1: GONE})
    assert re.search(r"1 +lost +\d+ or more .*last reported: train", table(made.judge, made.lost, made.now_s))


def test_echoes_of_one_loss_share_a_line() -> None:
    errors = {"trouble": lambda rank, _: f"closed by peer [10.0.0.{rank}]:77{rank}"}
    made = Made(3).run(5).run(1, mute=(2,), process_states={2: GONE}, **errors)
    text = trouble(made.judge.troubled(), "")
    assert text == "a collective failed on ranks 0-1: closed by peer [10.0.0.0]:770"


def test_what_happens_next_is_said() -> None:
    assert "ends itself with exit code 75" in last_line(True, 60)
    assert "after 60 s (--hang-timeout)" in last_line(False, 60)
    assert "time-out of the collective" in last_line(False, None)


def test_equal_losses_share_a_line_and_their_number_is_limited() -> None:
    assert losses(dict.fromkeys(range(8, 16), "gone"), 32).splitlines()[1] == "  ranks 8-15 of 32: gone"
    assert len(losses({rank: f"gone {rank}" for rank in range(1000)}, 1000).splitlines()) < 20


def test_ranks_are_written_in_runs() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [5, 0, 1, 2])] == ["rank 3", "ranks 0-2, 5"]
    assert merged({2: "b", 0: "a", 1: "b"}) == [([0], "a"), ([1, 2], "b")]


# ---- the pieces


def test_beats_and_words_travel() -> None:
    one = beat(3, process_states={12: GONE}, left="")
    assert Beat.from_bytes(one.to_bytes()) == one
    status = WatcherStatus(2, 1, 5, 7, 6, closing=True)
    assert WatcherStatus.from_bytes(status.to_bytes()) == WatcherStatus(2, 1, 5, 7, 6, [], lost=[], closing=True)


def test_the_clock_stands_while_the_process_does() -> None:
    system = [0.0]
    clock = AwakeClock(2.0, lambda: system[0])
    for system[0] in (1.0, 2.0, 3.0):
        assert clock.tick() == system[0]
    system[0] = 1000.0
    assert clock() == 5.0
    assert clock.tick() == 5.0
    system[0] = 1001.0
    assert clock() == clock.tick() == 6.0


def test_only_who_shares_the_node_looks_at_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    status = WatcherStatus(1, 0, suspects=[(3, "a", child.pid, 1), (4, "b", child.pid, 1), (1, "a", child.pid, 1)])
    assert look_at_neighbours(status, "a", 1) == {3: GONE}


def test_the_main_thread_stands_until_it_moves() -> None:
    looked, go_on, moved = MainThread(0.0), threading.Event(), threading.Event()
    found: list[Any] = []

    def look() -> None:
        for now_s in range(5):
            looked.look(now_s)
        found.append((looked.still_s(5.0), looked.place.text))
        go_on.set()
        moved.wait(LIMIT_S)
        looked.look(6.0)
        found.append(looked.still_s(6.0))

    thread = threading.Thread(target=look)
    thread.start()
    while not go_on.wait(LIMIT_S):
        pass
    moved.set()
    thread.join(LIMIT_S)
    (still_s, place), after_s = found
    assert 0 < still_s <= 5
    assert "test_the_main_thread_stands" in place
    assert after_s == 0


def test_stacks_begin_with_the_main_thread_and_are_cut() -> None:
    def deep(depth: int) -> str:
        return deep(depth - 1) if depth else stacks_text()

    text = deep(200)
    assert text.startswith("MainThread:\n")
    assert "calls left out" in text and text.count(".deep") < 60
    assert "guozhuang heartbeat" not in text
    assert len(stacks_text(500)) < 600
    assert len(text) < MAX_STACK_BYTES


def test_which_exceptions_are_an_echo() -> None:
    def raised(raiser: Any) -> BaseException:
        try:
            raiser()
        except Exception as error:
            return error
        raise AssertionError

    assert not is_of_a_collective(raised(lambda: int("x")))
    assert is_of_a_collective(raised(lambda: dist.all_reduce(torch.ones(1))))  # there is no group
    assert is_of_a_collective(RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection reset by peer"))


# ---- one watching rank over a store in memory, the others made up


def test_a_watch_asks_gathers_and_reports_once() -> None:
    store = dist.HashStore()
    judge = Judge(3, LIMITS, 60.0, 0.0)
    watch = Watcher(store, 3, WatcherStatus(1, 0), judge)
    reports = []
    gave = [0, 0, 0]
    keys = 0
    for second in range(40):
        for rank in (0, 1, 2):
            if rank == 2 and second >= 5:
                continue
            saw = look_at_neighbours(watch.status, "a", rank) and {2: GONE}
            if watch.status.stacks_request > gave[rank]:
                store.set(f"stacks/{rank}", f"stack of {rank}")
                gave[rank] = watch.status.stacks_request
            store.set(f"beat/{rank}", beat(second, process_states=saw, stacks_answered=gave[rank]).to_bytes().decode())
        report, _ = watch.round(float(second))
        if report is not None:
            reports.append((second, report))
        if second == 20:
            keys = store.num_keys()
    [(second, report)] = reports
    assert second <= 5 + 3 + 3
    assert not report.ends
    assert "rank 2 of 3: its process 100 is gone" in report.short
    assert "stack of 1" in report.stacks and "---- rank 2: gave no stack" in report.stacks
    assert store.num_keys() == keys, "keys are overwritten"


def test_a_mute_rank_is_a_line_in_the_log_and_no_report() -> None:
    store = dist.HashStore()
    watch = Watcher(store, 2, WatcherStatus(1, 0), Judge(2, LIMITS, None, 0.0))
    said = []
    for second in range(60):
        saw = look_at_neighbours(watch.status, "a", 0) and {1: "running"}
        store.set("beat/0", beat(second, process_states=saw).to_bytes().decode())
        if second < 5 or second > 50:
            store.set("beat/1", beat(second).to_bytes().decode())
        report, lines = watch.round(float(second))
        assert report is None
        said += lines
    assert len(said) == 2, said
    assert "rank 1 of 2: no sign of life for 30 s, though its process 100 is there" in said[0]
    assert said[1] == "rank 1 sent a heartbeat again"


def test_a_watch_waits_for_ranks_that_have_not_begun() -> None:
    store = dist.HashStore()
    watch = Watcher(store, 2, WatcherStatus(1, 0), Judge(2, LIMITS, 1.0, 0.0))
    store.set("beat/0", beat(1).to_bytes().decode())
    assert watch.round(0.0) == (None, [])
    assert not watch.is_urgent


# ---- start and stop


def test_the_interval_grows_with_the_world_and_sooner_behind_a_door() -> None:
    worlds = ((2, True), (50, True), (200, True), (200, False), (1000, False))
    assert [Limits.usual(*each).interval_s for each in worlds] == [1, 1, 4, 1, 2]


def made_heart(store: dist.Store, rank: int = 0, interval_s: float = 0.05, keeps_store: bool = False) -> Heartbeat:
    return Heartbeat(store, rank, 2, None, Limits.of(interval_s), keeps_store)


def failure_of_a_collective() -> BaseException:
    return RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection reset by peer")


def test_an_error_of_our_own_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("status", "no word at all")
    one = made_heart(store)
    one.start()
    one._line.join(LIMIT_S)
    now_s = one._clock()  # which only the guard moves on by more than two intervals
    until(lambda: one._clock() > now_s + 2 * one._limits.lost_s)  # long enough to miss the answers of the store
    one.stop(None)
    [record] = caplog.records
    assert "ended by an error of its own" in record.getMessage() and record.exc_info
    assert "gone" not in caplog.text


def test_an_uncaught_error_of_gloo_is_a_sentence_that_names_who_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo tells a place in C++, and a port in place of a rank."""
    shown: list[str] = []
    stopped: list[BaseException] = []
    uncaught = failure_of_a_collective()
    for lost, rest in (
        ((), "Fix: look for the first error"),
        ((1,), "; rank 1 is lost. Fix: look whether that node is up"),
    ):
        one = made_heart(dist.HashStore())
        one._status = WatcherStatus(1, 0, lost=lost)
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, _: shown.append(f"{kind.__name__}: {error}"))
        shows = UncaughtErrors(one, stopped.append)
        for error in (uncaught, ValueError("boom")):
            sys.excepthook(type(error), error, None)
        shows.leave_alone()
        told, other = shown[-2:]
        assert told.startswith("WorldError: [rank 0] a collective failed: Connection reset by peer") and rest in told
        assert other == "ValueError: boom"
    ours = WorldError(
        "[rank 0] the exchange of bucket 0 failed: [/a/gloo/transport/tcp/pair.cc:5] Read error. Fix: look"
    )
    assert sentence(ours, 0, [1, 2]) == (
        "[rank 0] the exchange of bucket 0 failed: Read error. Fix: look (ranks 1-2 are lost)"
    )
    assert stopped == [uncaught, uncaught], "it waits for the report first"
    uncaught.__context__ = ValueError("the loss is wrong")
    uncaught.add_note("in epoch 3")
    monkeypatch.setattr(
        sys, "excepthook", lambda _, error, __: shown.append("".join(traceback.format_exception(error)))
    )
    shows = UncaughtErrors(one, stopped.append)
    shows.show(type(uncaught), uncaught, None)
    shows.leave_alone()
    assert "ValueError: the loss is wrong" in shown[-1] and shown[-1].endswith("in epoch 3\n")


def test_a_thread_that_an_exception_ended_is_named_in_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda ended: shown.append(str(ended.exc_value)))
    before, one = threading.excepthook, made_heart(dist.HashStore())
    shows = UncaughtErrors(one, NEVER_CALLED)
    for error in (ValueError("no more rows"), SystemExit(3)):

        def work(error: BaseException = error) -> None:
            raise error

        thread = threading.Thread(target=work, name="feeder")
        thread.start()
        thread.join(LIMIT_S)
    shows.leave_alone()
    assert threading.excepthook is before and shown == ["no more rows", "3"]
    assert one._dead_thread == "thread 'feeder' ended with ValueError: no more rows"
    made = Made(3).run(1, dead_thread=lambda rank, _: one._dead_thread if rank == 1 else "")
    assert dead_threads(made.judge) == "rank 1: thread 'feeder' ended with ValueError: no more rows"
    assert dead_threads(Made(3).run(1).judge) == ""
    shows.show_of_thread(threading.ExceptHookArgs((ValueError, ValueError("later"), None, thread)))
    assert shown[-1] == "later" and "later" not in one._dead_thread  # where the script goes on calling it


def test_a_main_thread_that_stands_after_the_end_of_the_world_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    is_told = threading.Event()

    def end(*given: Any) -> None:
        told.append(given)
        afterwards.stop()
        is_told.set()

    monkeypatch.setattr(afterwards, "end", end)
    monkeypatch.setattr(afterwards, "_MORE_S", 0.0)
    afterwards.start(3, EXPIRES_S, "errors.json")
    assert is_told.wait(LIMIT_S)  # and so stands here
    [(text, wait_s, hang, error_file)] = told
    assert "rank 3 has left the world, and does not end: it stands at wait, called in" in hang and hang in text
    assert f"(--hang-timeout {EXPIRES_S:g})" in text and "MainThread:" in text
    assert (wait_s, error_file) == (0.0, "errors.json")
    afterwards.start(3, NEVER_S, "")
    afterwards.stop()  # it enters a world again
    assert not remaining(lambda: [each.name for each in threading.enumerate() if "afterwards" in each.name])

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    afterwards.start(3, NEVER_S, "")  # the rest of what leaves the world goes on
    said: list[str] = []
    assert report._within(LIMIT_S, lambda: said.append("last words")) and said == ["last words"]


def test_nobody_waits_for_a_report_that_came_before() -> None:
    one = made_heart(dist.HashStore(), rank=1, interval_s=NEVER_S)
    one._status, one._last_report = WatcherStatus(1, 0, report=7, lost=[0]), 7
    one._wait_for_report()  # three intervals would be the limit


def test_the_wait_for_a_report_ends_with_the_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gathers: three intervals. Somebody does: until then, and for as long as stacks are waited for."""
    store = dist.HashStore()
    for wants, gather_s, limit_s in ((0, 20.0, 0.3), (9, 0.6, 0.3 + 0.6)):
        one = made_heart(store, rank=1, interval_s=0.1)
        one._limits = replace(one._limits, gather_s=gather_s)
        one._status = WatcherStatus(1, 0, stacks_request=wants)
        monkeypatch.setattr(one, "_line", threading.main_thread())  # alive
        times_s = itertools.count(0.0, 1 / 16)  # what the clock shows, one after the other
        with monkeypatch.context() as patched:
            patched.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda times_s=times_s: next(times_s)))
            one._wait_for_report()
        waited_s = next(times_s) - 1 / 16
        assert limit_s < waited_s <= limit_s + 1 / 16


def test_a_watching_rank_that_is_gone_is_replaced_at_once() -> None:
    one = made_heart(dist.HashStore(), rank=1, interval_s=1.0)
    gone = (one._me.node, os.getpid(), 1)  # another process took the number over
    elsewhere = ("another node", os.getpid(), 0.0)
    here = (one._me.node, one._me.pid, one._me.start)
    assert one._patience_s(WatcherStatus(1, 0, process=gone), 1.6) == 0
    assert (
        one._patience_s(WatcherStatus(1, 0, process=gone), 1.0)
        == one._patience_s(WatcherStatus(1, 0, process=here), 4.0)
        == 5
    )
    one._error = failure_of_a_collective()
    assert one._patience_s(WatcherStatus(1, 0, process=gone), 0.0) == 0
    assert (
        one._patience_s(WatcherStatus(1, 0, process=elsewhere), 0.0) == one._patience_s(WatcherStatus(1, 0), 0.0) == 2.5
    )


@pytest.mark.parametrize("is_lost", [False, True], ids=["the other let go", "the other is lost"])
def test_who_keeps_the_store_leaves_when_nobody_needs_it(is_lost: bool) -> None:
    """And not when the longest time is over that others may need to hear of it."""
    store = dist.HashStore()
    keeper = made_heart(store, 0, interval_s=NEVER_S, keeps_store=True)
    keeper.start()
    other = made_heart(store, 1)
    other.start()
    until(lambda: store.check(["status"]) and store.check(["beat/1"]))
    if is_lost:
        other.stop(None)
        store.set("beat/1", beat(1).to_bytes().decode())
        keeper._status = WatcherStatus(1, 0, lost=[1])
        keeper._watch = None
    keeper.stop(None)
    assert not keeper._line.is_alive()
    other.stop(None)


def test_nothing_runs_alone_or_over_a_store_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    assert not heartbeat.start(dist.HashStore(), 0, 1, 5.0)
    assert not heartbeat.start(dist.HashStore(), 0, 2, 5.0)
    assert threading.active_count() == threads
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"], "a time-out was asked for"


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="hang_timeout_s must be a number of seconds above 0"):
        heartbeat.start(dist.HashStore(), 0, 2, value)


def test_the_watching_rank_names_a_slow_one(caplog: pytest.LogCaptureFixture) -> None:
    store, said = dist.HashStore(), []
    watch = Watcher(store, 3, WatcherStatus(1, 0), Judge(3, LIMITS, None, 0.0))
    watch.log_own_times(0, is_wanted=True)
    assert not caplog.records
    for count in range(1, 5):
        for rank in range(3):
            own_ms = {"data": 1.0, "forward": 10.0, "backward": 20.0, "optimizer": 2.0 + 5.0 * (rank == 2)}
            told = OwnTime(count, own_ms, 40.0, 50)
            store.set(f"beat/{rank}", beat(count, host=f"h{rank}", own_time=told).to_bytes().decode())
        said += watch.round(float(count))[1]
    (line,) = said
    assert "rank 2 on h2 is slow: its optimizer takes 5 ms longer" in line and "wait 5 ms of each step of 40 ms" in line
    watch.log_own_times(0, is_wanted=False)
    assert caplog.records[-1].levelname == "WARNING" and "slow: optimizer" in caplog.text

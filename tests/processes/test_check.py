"""``guozhuang check`` with real ranks: under a launcher, started by itself, and with ranks that fail."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from guozhuang.check import measure, steps, worker
from guozhuang.check.results import CheckResults, from_json, to_json
from guozhuang.check.verdict import judge
from guozhuang.errors import UsageError, WorldError
from guozhuang.world import session
from guozhuang.world.discovery import discover
from guozhuang.world.identity import Identity
from tests.launching import Launched, guozhuang, python, write
from tests.processes.shm_peers import state_of
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

COMMAND = "import sys; from guozhuang.check import main; sys.exit(main(sys.argv[1:]))"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def be_patient() -> None:
    """Have nothing time out in the check of this process."""
    steps._ANSWER_S = steps._CONNECT_S = steps._CONNECT_ONE_S = steps._CLOCKS_S = LIMIT_S  # type: ignore[misc]
    steps.ENDED_S = measure.PAIR_LIMIT_S = worker._LATE_S = worker._LEAVE_S = LIMIT_S  # type: ignore[misc]


def expect(trouble: str, struck: Path) -> None:
    """Have time out, on rank 0, what waits for a rank that is missing or in trouble."""
    what, _, when = trouble.partition(" while ")
    read, lead, reductions = worker.read, measure.lead, measure.reductions
    collect, collect_links = steps.Steps._collect, steps.Steps._collect_links
    if what == "stuck":
        steps.ENDED_S = EXPIRES_S  # type: ignore[misc]

    def read_facts(store: Any, key: str, limit_s: float = 0.0) -> Any:
        return read(store, key, EXPIRES_S if key == "facts/2" else limit_s)

    def lead_first(pair: Any) -> Any:
        measure.lead = lead  # the first pair is that with rank 1
        until(struck.exists)
        pair.limit(EXPIRES_S if what == "stuck" else LIMIT_S)
        return lead(pair)

    if when == "ranks meet":
        worker.read = read_facts  # type: ignore[assignment]
    if when == "links":
        measure.lead = lead_first
    if what == "stuck" and when == "links":
        steps.Steps._collect_links = lambda self, pairs, deadline: collect_links(  # type: ignore[method-assign]
            self, pairs, time.monotonic() + EXPIRES_S if (0, 1) in pairs else deadline
        )
    if when == "all_reduce":
        measure.reductions = lambda limit_s, sizes: reductions(EXPIRES_S, sizes)
        steps.Steps._collect = lambda self, key_of, groups, deadline: collect(  # type: ignore[method-assign]
            self, key_of, groups, time.monotonic() + EXPIRES_S if "reduced/1" in key_of.values() else deadline
        )


def part(number: int, size: int, trouble: str, over: str) -> str:
    """One rank's part; rank 0 returns the result as JSON, and makes the file ``over``. ``trouble`` happens on rank 1."""
    what, _, when = trouble.partition(" while ")
    be_patient()
    if number == 0:
        expect(trouble, Path(f"{over}.struck"))

    def strike(*_: Any) -> Any:
        Path(f"{over}.struck").touch()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        until(Path(over).exists)
        os._exit(7)

    if number == 1 and when == "links":
        measure.lead = measure.follow = strike
    if number == 1 and when == "all_reduce":
        measure.reductions = strike
    found: list[str] = []

    def keep(results: CheckResults) -> int:
        found.append(to_json(results, judge(results)))
        return json.loads(found[0])["exit_code"]

    code = worker.take_part(LIMIT_S, keep)
    if number == 0:
        Path(over).touch()
    assert code == (json.loads(found[0])["exit_code"] if found else 0)
    return found[0] if found else ""


def checked(num_ranks: int, trouble: str = "", **env: str) -> tuple[CheckResults, set[str]]:
    """(the result of rank 0, the kinds of what was found)."""
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(
            part, num_ranks, trouble, f"{folder}/over", init=False, env=env, collect_errors=bool(trouble)
        )
    assert not isinstance(answers[0], RankError), answers[0].text
    results = from_json(answers[0])
    return results, {each.kind for each in judge(results) if each.level == "fail"}


def test_ranks_of_a_launcher_measure_everything() -> None:
    results, kinds = checked(3)
    assert kinds == set()
    assert [each.rank for each in results.facts] == [0, 1, 2]
    assert not results.absences
    assert [(each.a, each.b, each.failure) for each in results.links] == [(0, 1, ""), (0, 2, ""), (1, 2, "")]
    for link in results.links:
        assert link.latency_s is not None and 1e-6 < link.latency_s < LIMIT_S
        assert link.latency_repeats >= 5
        for speed, repeats in (
            (link.forward_bytes_per_s, link.forward_repeats),
            (link.backward_bytes_per_s, link.backward_repeats),
        ):
            assert speed is not None and 16e6 / LIMIT_S < speed < 1e11
            assert repeats >= 1
    told = [(each.backend, each.is_default) for each in results.reductions]
    assert told == [("shm", True), ("shm", True), ("gloo", False), ("gloo", False)]
    assert all(each.median_s and each.num_repeats >= 3 for each in results.reductions)
    first = results.facts[0]
    assert first.network.in_use in ("lo", "lo0")
    assert first.versions["torch"] and first.resources.cores


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_the_others_are_measured() -> None:
    results, kinds = checked(2, "missing while ranks meet", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    assert kinds == {"missing-rank"}
    assert [(each.rank, each.what) for each in results.absences] == [(2, "did not come")]
    assert [(each.a, each.b, each.failure) for each in results.links] == [(0, 1, "")]
    assert any("missing 2" in note for note in results.notes)


def test_a_rank_that_is_killed_in_the_middle_is_named_and_the_others_are_measured() -> None:
    results, kinds = checked(3, "killed while links")
    assert kinds == {"lost-rank"}
    assert [(each.rank, each.what, each.when) for each in results.absences] == [(1, "stopped", "links were measured")]
    good = [(each.a, each.b) for each in results.links if not each.failure]
    assert good == [(0, 2)]


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_named() -> None:
    results, kinds = checked(3, "stuck while links")
    assert kinds == {"lost-rank"}
    assert [(each.rank, each.what) for each in results.absences] == [(1, "does not answer")]
    assert [(each.a, each.b) for each in results.links if not each.failure] == [(0, 2)]


@pytest.mark.parametrize("what", ["killed", "stuck"])
def test_a_rank_that_stops_in_all_reduce_is_named(what: str) -> None:
    results, kinds = checked(2, f"{what} while all_reduce")
    assert kinds == {"lost-rank"}
    assert [each.rank for each in results.absences] == [1]
    assert results.absences[0].when == "all_reduce was measured"
    assert [each.failure for each in results.links] == [""]
    assert results.reductions[-1].failure


def twice(number: int, size: int) -> str:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(min(number, 1))
    try:
        be_patient()
        worker.take_part(LIMIT_S, lambda results: 0)
    except UsageError as error:
        return str(error)
    return ""


def test_two_processes_with_one_rank_are_told() -> None:
    answers = run_ranks(twice, 3, init=False, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert answers[0] == ""
    assert sorted(answers[1:])[0] == ""
    assert "two processes say that they are rank 1 of 2" in sorted(answers[1:])[1]


def apart(number: int, size: int) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = worker.take_part(EXPIRES_S, lambda results: 0)
    return code, said.getvalue()


@pytest.mark.slow
def test_a_rank_that_reaches_nobody_says_so_itself() -> None:
    ((code, said),) = run_ranks(
        apart, 1, init=False, env={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert code == 1
    assert said.startswith("guozhuang check: [rank 1] could not reach rank 0's store at 127.0.0.1:")


def test_by_itself_it_starts_ranks_and_prints_tables(tmp_path: Path) -> None:
    done = guozhuang("check", "-np", 2, "--timeout", LIMIT_S, folder=tmp_path)
    assert done.returncode == 0, done
    for words in (
        "2 ranks on 1 node",
        "0 \N{EN DASH} 1",
        "shm (default here)",
        "Same everywhere: Python",
        "all_reduce of all",
    ):
        assert words in done.stdout
    assert "Nothing found" in done.stdout or "Training will run" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_under_torchrun_json_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    done = python(*TORCHRUN, "--nproc-per-node=2", write(tmp_path, COMMAND), "--json", "--timeout", LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["num_ranks"] == 2
    assert document["exit_code"] == 0
    assert len(document["links"]) == 1


@pytest.mark.slow
def test_a_rank_killed_under_torchrun_is_told_before_the_launcher_ends_the_others(tmp_path: Path) -> None:
    strike = (
        "import os, time\nfrom guozhuang.check import measure\n"
        "if os.environ['RANK'] == '1':\n    measure.follow = lambda *_: os.kill(os.getpid(), 9)\n"
    )
    done = python(*TORCHRUN, "--nproc-per-node=3", write(tmp_path, strike + COMMAND), "--json", "--timeout", LIMIT_S)
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["absences"][0]["rank"] == 1
    assert document["absences"][0]["what"] == "stopped"
    assert [each["kind"] for each in document["findings"] if each["level"] == "fail"] == ["lost-rank"]


def stopped_store(number: int, size: int) -> str:
    """Rank 0 keeps the store and is stopped; rank 1 asks."""
    be_patient()
    store, meeting = session.meet(discover(), LIMIT_S)
    mine = steps.store_of(meeting, store, discover())
    if number == 0:
        steps.write(mine, "pid", os.getpid())
        steps.read(mine, "over", LIMIT_S)
        return ""
    keeper = steps.read(mine, "pid", LIMIT_S)
    os.kill(keeper, signal.SIGSTOP)
    until(lambda: state_of(keeper) == "T")
    steps._ANSWER_S = EXPIRES_S  # type: ignore[misc]
    hurried = steps.store_of(meeting, store, discover())
    try:
        steps.read(hurried, "never", NEVER_S)
    except WorldError as error:
        return f"{bool(hurried.lost)} {error}"
    finally:
        os.kill(keeper, signal.SIGCONT)
        mine.inner.set("over", "true")
    return "nothing was wrong"


def test_a_store_whose_process_is_stopped_holds_nobody_up() -> None:
    answers = run_ranks(stopped_store, 2, init=False)
    assert answers[1].startswith("True [rank 1] the store of the world (at 127.0.0.1) has not answered for 0")


def end_twice() -> list[str]:
    known = []
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    first = worker.CheckRank(Identity("environment", 0, 2), 1.0)
    try:
        with first._signals():
            try:
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                    known.append("went on")
                finally:
                    for kind in before:
                        os.kill(os.getpid(), kind)
                    known.append("let go")
            except worker.CheckEnded as error:
                known.append(str(error))
        for kind in before:
            os.kill(os.getpid(), kind)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return known


def test_a_second_signal_changes_nothing() -> None:
    assert end_twice() == ["let go", "rank 0 got SIGTERM"]


def ended(number: int, size: int, when: str, over: str) -> str:
    """Rank 0 gets a signal from inside of what it is doing."""
    if number == 0:
        owner, name = {"facts": (worker, "collect"), "store": (worker, "write")}[when]
        before = getattr(owner, name)

        def strike(*given: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return before(*given)

        setattr(owner, name, strike)
    return part(number, size, "", over)


@pytest.mark.parametrize("when", ["facts", "store"])
def test_a_signal_while_the_ranks_meet_leaves_a_result(when: str, tmp_path: Path) -> None:
    answers = run_ranks(
        ended, 1, when, str(tmp_path / "over"), init=False, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    results = from_json(answers[0])
    assert [(each.what, each.when, each.reason) for each in results.absences] == [
        ("was ended", "the ranks met", "rank 0 got SIGTERM")
    ]
    assert len(results.facts) == (1 if when == "store" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda kind: kind.name)
def test_ending_the_check_ends_its_ranks(how: signal.Signals, tmp_path: Path) -> None:
    with Launched("check", "-np", 2, folder=tmp_path) as launched:
        launched.until(lambda: len(launched.processes()) > 1)
        launched.send(how)
        assert launched.wait(LIMIT_S).returncode != 0
        assert not launched.left(LIMIT_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0"], "-np must be at least 1"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--ssh-port", "22"], "none is named"),
        (["-H", "a:1", "--start-timeout", "-5"], "--start-timeout is a number of seconds above 0"),
        (["-H", "a:0"], "at least one slot"),
        (["-H", "a:1", "-np", "2"], "more ranks than there are slots"),
        (["--interface", "eth0"], "--interface serves several hosts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_and_starts_nothing(arguments: list[str], words: str) -> None:
    from guozhuang.check import main

    with pytest.raises(UsageError) as caught:
        main(arguments)
    assert words in str(caught.value)


def test_ranks_are_not_started_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from guozhuang.check import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        main(["-np", "2"])
    assert "leave -np out" in str(caught.value)

"""Which rank failed first, told from what ranks printed and when; and how that is reported."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from guozhuang.launch import tracebacks
from guozhuang.launch.failures import Failure, describe, exit_code, first
from guozhuang.launch.rank_files import hang_in
from tests.waiting import LIMIT_S

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:52617. This is typically caused by a crash."


def raised(error: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    step()", error]


def failed(rank: int, code: int, ended: float, lines: list[str] | None = None, began: float | None = None) -> Failure:
    lines = lines or []
    return Failure(rank, code, 4711, ended, lines, [ended if began is None else began] * len(lines))


def test_who_ended_first_failed_first() -> None:
    failures = {0: failed(0, 1, 10.02), 1: failed(1, 3, 10.01), 2: failed(2, -signal.SIGTERM, 10.0)}
    assert first(failures) == 1


def test_who_began_to_fail_first_failed_first_though_it_took_long_to_end() -> None:
    slow = failed(0, 1, 12.0, raised("ValueError: boom"), began=10.0)
    assert first({0: slow, 1: failed(1, 1, 11.0, raised("KeyError: 'x'"))}) == 0


def test_who_lost_a_peer_is_no_cause() -> None:
    abort = failed(0, -signal.SIGABRT, 10.0, raised(LOST))
    assert first({0: abort, 1: failed(1, 1, 10.5, raised("ValueError: boom"))}) == 1
    assert first({0: abort}) == 0
    killed = failed(0, -signal.SIGKILL, 10.0, [LOST])
    assert first({0: killed, 1: failed(1, 1, 10.1, raised(LOST))}) == 0


@pytest.mark.parametrize(
    "error",
    [
        "NegotiationError: [rank 0] the collectives of ranks [0, 1] were shut down by rank 1 while allreduce.x was under way.",
        "HorovodInternalError: [rank 0] negotiated collectives cannot go on: rank 1 has shut down.",
        "HorovodInternalError: [rank 2] rank 1 (pid 77) is gone; negotiated collectives cannot go on.",
        "HorovodInternalError: [rank 2] rank 1 is lost; negotiated collectives cannot go on: a read failed.",
        "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
    ],
)
def test_whom_another_rank_left_alone_is_no_cause(error: str) -> None:
    assert first({0: failed(0, 1, 10.0, raised(error)), 1: failed(1, 3, 10.5)}) == 1


def test_who_raised_and_was_ended_while_leaving_is_the_cause() -> None:
    leaving = failed(1, -signal.SIGTERM, 11.0, raised("ValueError: boom"), began=10.0)
    failures = {0: failed(0, 1, 10.2, raised(LOST)), 1: leaving, 2: failed(2, -signal.SIGTERM, 11.0, ["step"])}
    assert first(failures) == 1 and leaving.code == 1
    assert describe(failures, "h").startswith("rank 1 failed first: an exception (process 4711 on host h)\n  Traceback")
    handled = failed(1, -signal.SIGTERM, 11.0, [*raised("OSError: tried again"), *["step"] * 5], began=9.0)
    assert first({0: failed(0, 1, 10.2, raised("ValueError: boom")), 1: handled}) == 0


@pytest.mark.parametrize(
    "last",
    [
        pytest.param([], id="before the exception"),
        pytest.param(["           "], id="in the middle of a line"),
        pytest.param(["RuntimeError"], id="before its text"),
        pytest.param(["RuntimeError: "], id="between colon and text"),
        pytest.param(
            ["OSError: no", "", tracebacks.CHAINED[0], "", *raised("")[:3]], id="in the second one of a chain"
        ),
    ],
)
def test_who_was_ended_while_printing_its_traceback_is_no_cause_of_a_kill(last: list[str]) -> None:
    """SIGTERM came because a faster rank had lost the killed one; the slower rank would have said so too."""
    printing = failed(1, -signal.SIGTERM, 10.2, ["step 7", *raised("")[:3], *last], began=9.99)
    killed, lost = failed(0, -signal.SIGKILL, 10.0), failed(2, 1, 10.1, raised(LOST), began=10.0)
    assert first({0: killed, 1: printing}) == first({0: killed, 1: printing, 2: lost}) == 0
    assert printing.is_reaction and printing.code == 1
    assert first({1: printing, 2: lost}) == 1, "of two that may have lost a peer the earlier one"
    assert first({1: printing, 2: failed(2, -signal.SIGTERM, 10.3)}) == 1


@pytest.mark.parametrize("error", ["ValueError: boom", "AssertionError"])
def test_who_raised_and_was_ended_after_the_traceback_is_the_cause_of_what_peers_lost(error: str) -> None:
    leaving = failed(1, -signal.SIGTERM, 11.0, raised(error), began=10.0)
    assert first({0: failed(0, 1, 10.2, raised(LOST)), 1: leaving}) == 1
    assert leaving.stated == error


def test_a_lost_peer_is_found_in_a_traceback_into_which_another_thread_printed() -> None:
    """As threads of torch RPC do."""
    text = raised("RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)")
    mixed = [
        *text[:2],
        "[W1127 20:33:28 tensorpipe_agent.cpp:917] RPC agent for trainer1 encountered an error",
        *text[2:],
    ]
    lost = failed(1, 1, 9.9, mixed)
    assert first({0: failed(0, -signal.SIGKILL, 10.0), 1: lost}) == 0 and lost.stated == ""
    assert not failed(1, 1, 9.9, [*mixed[:-1], "ValueError: boom"]).is_reaction


def test_in_the_same_moment_a_signal_comes_first() -> None:
    assert first({0: failed(0, 1, 10.0), 1: failed(1, -signal.SIGSEGV, 10.0)}) == 1


def test_exit_codes() -> None:
    assert (exit_code(3), exit_code(-11)) == (3, 139)


def test_the_report() -> None:
    lines = ["epoch 1", "epoch 2", *raised("ValueError: boom")]
    failures = {
        1: failed(1, 1, 10.0, lines),
        0: failed(0, 1, 10.1, raised(LOST)),
        2: failed(2, -signal.SIGTERM, 10.2),
    }
    assert describe(failures, "node7").splitlines() == [
        "rank 1 failed first: exit code 1 (process 4711 on host node7)",
        "  Traceback (most recent call last):",
        '    File "train.py", line 3, in <module>',
        "      step()",
        "  ValueError: boom",
        "the last lines of rank 1 before that:",
        "  epoch 1",
        "  epoch 2",
        "ended because of it:",
        f"  rank 0: exit code 1: {LOST}"[:200],
        "  rank 2: signal 15 (SIGTERM), sent by guozhuang run",
    ]


def test_the_report_of_a_killed_rank() -> None:
    text = describe({0: failed(0, -9, 10.0, ["step 7"])}, "node7")
    assert "signal 9 (SIGKILL)" in text and "ran out of memory" in text
    assert text.endswith("the last lines of rank 0:\n  step 7")


def test_what_came_after_the_traceback_is_shown() -> None:
    lines = ["step 7", *raised("ValueError: boom"), "", "[W1121 socket.cpp:1] left in a hurry", ""]
    text = describe({0: failed(0, 1, 10.0, lines)}, "h").splitlines()
    assert text[4:] == [
        "  ValueError: boom",
        "the last lines of rank 0 before that:",
        "  step 7",
        "the last lines of rank 0:",
        "",
        "  [W1121 socket.cpp:1] left in a hurry",
    ]


def test_a_text_of_several_lines_is_told_whole_and_once() -> None:
    """As torch words its errors; with an empty line at the end of the file."""
    message = [
        "RuntimeError: Expected to have finished reduction in the prior iteration.",
        "",
        "Parameter indices: 3 4",
    ]
    lines = ["step 7", *raised(message[0]), *message[1:], ""]
    text = describe({0: failed(0, 1, 10.0, lines), 1: failed(1, 1, 10.1, lines)}, "h").splitlines()
    assert text[4:] == [
        "  RuntimeError: Expected to have finished reduction in the prior iteration.",
        "",
        "  Parameter indices: 3 4",
        "the last lines of rank 0 before that:",
        "  step 7",
        "ended because of it:",
        f"  rank 1: exit code 1: {message[0]}",
    ]
    nccl = [*raised("torch.distributed.DistBackendError: NCCL error in: a.cpp:3"), "ncclRemoteError: A call failed"]
    assert first({0: failed(0, 1, 10.0, nccl), 1: failed(1, 1, 10.1, raised("ValueError: boom"))}) == 1


def test_what_goes_on_for_long_behind_a_traceback_is_no_part_of_it() -> None:
    lines = [*raised("ValueError: tried again"), *[f"step {i}" for i in range(60)]]
    text = describe({0: failed(0, 3, 10.0, lines)}, "h").splitlines()
    assert text[4:6] == ["  ValueError: tried again", "the last lines of rank 0:"] and text[-1] == "  step 59"


def test_several_nodes_point_at_each_other() -> None:
    assert "see that node's output" in describe({3: failed(3, 1, 10.0, raised(LOST))}, "h", num_nodes=2)
    assert "see that node's output" not in describe({3: failed(3, 1, 10.0, raised("ValueError: x"))}, "h", num_nodes=2)


def test_the_traceback_that_ended_the_process() -> None:
    lines = ["x", *raised("OSError: no"), "went on", *raised("ValueError: boom"), "[W] a warning"]
    found = tracebacks.last(lines)
    assert found is not None and lines[found[0] : found[1]] == raised("ValueError: boom")
    assert tracebacks.last(["nothing", "here"]) is None


def test_tracebacks_that_end_nothing() -> None:
    lines = [*raised("ValueError: boom"), "Exception ignored in: <function f>", *raised("OSError: no")]
    found = tracebacks.last(lines)
    assert found is not None and lines[found[1] - 1] == "ValueError: boom"


def test_real_tracebacks() -> None:
    """Chained, with a text of several lines, with marks under the place: as this very Python prints them."""
    code = "try:\n  1 / 0\nexcept Exception as e:\n  raise KeyError('two') from e"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    ).stderr.splitlines()
    assert tracebacks.last(["before", *out, "after"]) == (1, 1 + len(out))
    assert out[0].startswith("Traceback") and any("ZeroDivisionError" in line for line in out)
    group = "raise ExceptionGroup('both', [ValueError('one'), OSError('two')])"
    out = subprocess.run(
        [sys.executable, "-c", group], capture_output=True, text=True, timeout=LIMIT_S
    ).stderr.splitlines()
    found = tracebacks.last(["before", *out])
    assert found == (1, 1 + len(out))


def test_the_mark_of_torch_is_taken_away() -> None:
    assert tracebacks.plain('[rank1]:   File "x"') == '  File "x"'
    assert tracebacks.plain("[rank12]: Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert tracebacks.plain("rank 1: hello") == "rank 1: hello"


def test_a_hang_is_told_by_who_held_the_ranks_up(tmp_path: Path) -> None:
    held_up_by = "held up by rank 1: 5 collectives of the default group started, others 6"
    (tmp_path / "error.json").write_text(json.dumps({"message": "...", "timestamp": 1, "hang": held_up_by}))
    hung = dataclasses.replace(failed(2, 75, 8.0), hang=hang_in(str(tmp_path / "error.json")))
    failures = {0: failed(0, -signal.SIGTERM, 9.0), 2: hung}
    text = describe(failures, "h").splitlines()
    assert text[0] == "the ranks hung, held up by rank 1: 5 collectives of the default group started, others 6"
    assert text[1] == "  rank 2 ended itself first: exit code 75 (process 4711 on host h)"
    assert describe({2: failed(2, 75, 8.0, ["no space left"])}, "h").startswith("rank 2 failed first: exit code 75 (")
    (tmp_path / "other.json").write_text('["of another program"]')
    assert [hang_in(str(tmp_path / name)) for name in ("other.json", "none.json")] == ["", ""]

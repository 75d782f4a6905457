"""What is decided about the ranks of a node, event by event; the clock is an argument."""

from __future__ import annotations

import signal

import pytest

from guozhuang.launch.job import Decision, Job, Outcome, Over, Policy, Replace, Send

TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT


def begun(num_ranks: int = 3, **more: object) -> Job:
    job = Job(**{"max_restarts": 0, "shutdown_s": 30.0} | more)  # type: ignore[arg-type]
    job.begin(range(num_ranks))
    assert job.turn(0.0) == []
    return job


def end(job: Job, ranks: dict[int, int], now: float) -> list[Decision]:
    for rank, code in ranks.items():
        job.ended(rank, code)
    return job.turn(now)


def test_ranks_that_end_well_are_waited_for_one_by_one() -> None:
    job = begun()
    assert end(job, {1: 0}, 1.0) == [] and end(job, {0: 0}, 2.0) == []
    assert end(job, {2: 0}, 900.0) == [Over(Outcome.SUCCEEDED)]


def test_a_failed_rank_ends_the_others_and_is_named_with_them() -> None:
    job = begun()
    assert end(job, {1: 7}, 1.0) == [Send((0, 2), TERM)]
    assert job.turn(2.0) == [], "once is enough"
    assert end(job, {0: -TERM, 2: 0}, 3.0) == [Over(Outcome.FAILED)]
    assert job.failed == {0: -TERM, 1: 7}


def test_ranks_that_do_not_listen_are_killed_and_those_that_the_kernel_holds_left_behind() -> None:
    job = begun(shutdown_s=1.0)
    assert end(job, {0: 1}, 10.0) == [Send((1, 2), TERM)]
    assert job.turn(10.9) == [] and job.turn(11.0) == [Send((1, 2), KILL)]
    assert end(job, {1: -KILL}, 11.1) == [] and job.turn(15.9) == []
    assert job.turn(16.0) == [Over(Outcome.FAILED)] and job.living == {2}


def test_restarts_are_counted_and_what_failed_after_them_ends_the_run() -> None:
    job = begun(2, max_restarts=2)
    for left in (1, 0):
        assert end(job, {0: 1, 1: 1}, 1.0) == [Over(Outcome.RETRY)] and job.restarts_left == left
        job.begin(range(2))
    assert end(job, {0: 1, 1: 1}, 1.0) == [Over(Outcome.FAILED)]


def test_a_restart_of_another_node_costs_none_of_ours() -> None:
    job = begun(2, max_restarts=1)
    job.stop(1.0, restart=True)
    assert job.turn(1.0) == [Send((0, 1), TERM)]
    assert end(job, {0: -TERM, 1: -TERM}, 2.0) == [Over(Outcome.RESTART)] and job.restarts_left == 1


@pytest.mark.parametrize("failed", [{1: 7}, {0: -KILL, 1: 7}])
def test_survivors_are_kept_while_single_ranks_are_replaced(failed: dict[int, int]) -> None:
    job = begun(policy=Policy.KEEP_SURVIVORS, max_restarts=3)
    assert end(job, failed, 1.0) == [Replace(rank, code) for rank, code in failed.items()]
    assert job.living == {0, 1, 2} - failed.keys() and job.restarts_left == 3 - len(failed) and not job.failed
    job.living |= failed.keys()  # as the agent does, once it has started them
    assert end(job, {0: 0, 1: 0, 2: 0}, 2.0) == [Over(Outcome.SUCCEEDED)]


def test_a_rank_whose_replacement_was_not_started_is_not_waited_for() -> None:
    job = begun(2, policy=Policy.KEEP_SURVIVORS, max_restarts=2)
    assert end(job, {0: 7, 1: 7}, 1.0) == [Replace(0, 7), Replace(1, 7)]
    job.stop(1.0)
    assert job.turn(1.0) == [Over(Outcome.STOPPED)]


def test_ranks_that_save_and_end_by_themselves_get_no_signal_but_the_last() -> None:
    for second, killed in ((None, 31.0), (7.0, 7.0)):
        job = begun(2)
        job.interrupt(TERM, 1.0, ranks_know=True)
        assert job.turn(1.0) == [] and end(job, {1: 143}, 6.9) == []
        if second is not None:
            job.interrupt(TERM, second)
        assert job.turn(killed - 0.1) == [] and job.turn(killed) == [Send((0,), KILL)]
        assert end(job, {0: -KILL}, killed) == [Over(Outcome.STOPPED)]


@pytest.mark.parametrize("asked_by", ["interrupt", "stop"])
@pytest.mark.parametrize("why", ["a rank failed", "the others look no more"])
def test_ranks_that_cannot_save_get_sigterm_after_all(asked_by: str, why: str) -> None:
    job = begun(max_restarts=1, policy=Policy.KEEP_SURVIVORS)
    if asked_by == "interrupt":
        job.interrupt(TERM, 1.0, ranks_know=True)
    else:
        job.stop(1.0, ranks_know=True)
    assert end(job, {2: 143}, 2.0) == [] and job.ranks_know
    if why == "a rank failed":
        assert end(job, {1: -KILL}, 3.0) == [Send((0,), TERM)]
    else:
        job.signal_after_all()
        assert job.turn(3.0) == [Send((0, 1), TERM)]
    job.signal_after_all()
    assert not job.ranks_know and end(job, {1: -KILL}, 4.0) == [], "once is enough"
    assert end(job, {0: -TERM}, 5.0) == [Over(Outcome.STOPPED)]


def test_survivors_are_ended_when_no_restart_is_left() -> None:
    job = begun(policy=Policy.KEEP_SURVIVORS, max_restarts=1)
    assert end(job, {1: 7}, 1.0) == [Replace(1, 7)]
    assert end(job, {1: 7}, 2.0) == [Send((0, 2), TERM)]
    assert end(job, {0: -TERM, 2: -TERM}, 3.0) == [Over(Outcome.FAILED)]


def test_a_signal_is_handed_on_and_ctrl_c_is_followed_by_sigterm() -> None:
    job = begun(2)
    job.interrupt(INT, 1.0)
    assert job.turn(1.0) == [Send((0, 1), INT)] and job.turn(5.9) == []
    assert job.turn(6.0) == [Send((0, 1), TERM)] and job.turn(30.9) == []
    assert job.turn(31.0) == [Send((0, 1), KILL)]
    job = begun(2)
    job.interrupt(TERM, 1.0)
    assert job.turn(1.0) == [Send((0, 1), TERM)] and job.turn(6.0) == []
    job.interrupt(INT, 7.0)
    assert job.turn(7.0) == [Send((0, 1), KILL)], "a second signal does not wait"
    assert end(job, {0: -KILL, 1: -KILL}, 8.0) == [Over(Outcome.STOPPED)]


def test_a_signal_while_ranks_are_ended_is_no_restart() -> None:
    job = begun(2, max_restarts=1)
    assert end(job, {0: 1}, 1.0) == [Send((1,), TERM)]
    job.interrupt(INT, 2.0)
    assert job.turn(2.0) == [Send((1,), INT)]
    assert end(job, {1: 1}, 3.0) == [Over(Outcome.STOPPED)]


def test_another_node_that_gives_up_ends_the_ranks_unless_they_are_being_ended() -> None:
    job = begun(2)
    job.stop(1.0)
    job.stop(2.0)
    assert job.turn(2.0) == [Send((0, 1), TERM)]
    assert end(job, {0: -TERM, 1: -TERM}, 3.0) == [Over(Outcome.STOPPED)]


def test_a_rank_that_the_kernel_holds_for_too_long_is_named() -> None:
    job = begun(3, held_s=10.0)
    assert job.is_watching_kernel and not begun().is_watching_kernel
    for ranks, now in (([0, 1], 1.0), ([1], 5.0), ([0, 1], 10.0)):
        job.kernel_holds(ranks, now)
        assert job.turn(now) == []
    job.kernel_holds([0, 1], 11.0)
    assert job.held == [1] and job.turn(11.0) == [Send((0, 1, 2), TERM)]
    assert end(job, {0: -TERM, 2: -TERM}, 11.5) == [] and job.turn(41.0) == [Send((1,), KILL)]
    assert job.turn(46.0) == [Over(Outcome.HELD)] and job.held == [1]

"""Every schedule of a pipeline ends, holds as little as it says and is idle as long as its formula says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guozhuang.errors import UsageError
from guozhuang.parallel.pipeline.schedule import (
    Action,
    PipelineSchedule,
    chain,
    idle_share,
    make_schedule,
    most_in_flight,
    simulate,
)

KINDS = (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4))


@pytest.mark.parametrize(("name", "v"), KINDS)
def test_all_end_within_bounds_and_idle_as_their_formula_says(name: str, v: int) -> None:
    for p in range(1, 9):
        for m in range(1, 33):
            found = simulate(make_schedule(name, p, m, v))
            for rank in range(p):
                assert found.in_flight[rank] <= most_in_flight(name, p, m, rank, v), (p, m, rank)
            if m % p == 0 if name == "interleaved" else m >= p:
                assert found.idle_share == pytest.approx(idle_share(name, p, m, v)), (p, m)


def test_skip_connections_end_too() -> None:
    edges = chain(6) | {(0, 5), (1, 4)}
    for name, v in (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)):
        for m in (1, 3, 12):
            assert simulate(make_schedule(name, 6 // v, m, v), edges).end > 0


def test_times_of_stages_lengthen_the_step_by_the_slowest() -> None:
    times = {"F": [1.0, 3.0, 1.0], "B": [2.0, 6.0, 2.0]}
    assert simulate(make_schedule("1f1b", 3, 20), times=times).end == pytest.approx(1 + 20 * 9 + 2)


def _swapped(schedule: PipelineSchedule, rank: int, first: Action, second: Action) -> PipelineSchedule:
    actions = list(schedule.ranks[rank])
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = actions[j], actions[i]
    return replace(schedule, ranks=tuple(tuple(actions) if r == rank else a for r, a in enumerate(schedule.ranks)))


def test_a_schedule_that_waits_for_ever_is_refused_with_its_table() -> None:
    # Rank 0 wants the backward of microbatch 0 before it sends microbatch 1, and rank 1 does microbatch 1 first.
    stuck = _swapped(make_schedule("1f1b", 2, 2), 1, Action("F", 1, 0), Action("F", 1, 1))
    stuck = _swapped(_swapped(stuck, 1, Action("B", 1, 0), Action("B", 1, 1)), 0, Action("F", 0, 1), Action("B", 0, 0))
    with pytest.raises(UsageError, match="would wait for ever") as caught:
        simulate(stuck)
    rows = str(caught.value).splitlines()
    assert any(row.split()[:2] == ["0", "B0.0"] and "of rank 1" in row for row in rows), rows
    assert any(row.split()[:2] == ["1", "F1.1"] and "F0.1 of rank 0" in row for row in rows), rows


@pytest.mark.parametrize(
    ("spoil", "text"),
    (
        (lambda actions: actions[:-1], "microbatch 1 has F in stage 0, in place of FB or FIW"),
        (lambda actions: (*actions, actions[-1]), "microbatch 1 has FBB"),
        (lambda actions: (*actions, Action("F", 1, 0)), "F1.0 stands on rank 0"),
        (lambda actions: (*actions, Action("F", 0, 7)), "there is no microbatch 7"),
    ),
)
def test_an_incomplete_schedule_is_refused(spoil, text) -> None:
    schedule = make_schedule("gpipe", 2, 2)
    with pytest.raises(UsageError, match=text):
        simulate(replace(schedule, ranks=(spoil(schedule.ranks[0]), schedule.ranks[1])))


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        (("1f1", 2, 4), "did you mean '1f1b'"),
        (("dapple", 2, 4), "choose one of gpipe, 1f1b"),
        (("1f1b", 2, 0), "at least 1 of its microbatches"),
        (("1f1b", 2, 4, 2), "use the schedule interleaved"),
    ),
)
def test_impossible_schedules_are_refused(arguments, text) -> None:
    with pytest.raises(UsageError, match=text):
        make_schedule(*arguments)

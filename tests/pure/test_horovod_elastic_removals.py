"""The decisions of an elastic run about hosts that leave, workers that are late, and rounds that nobody is in."""

from __future__ import annotations

from tests.pure.test_horovod_elastic_job import Run


def test_a_removal_gives_those_that_train_all_the_time_they_want() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3)
    a, b, c = run.begin()
    run.job.found({"a": 1, "c": 1})
    assert run.turn().changed == {"removed"}
    for _ in range(2):
        orders = run.turn(5000.0)
        assert not orders.end and orders.over is None and run.job.first_failure is None
    run.come(a, b, c, may_skip_sync=True)
    assert run.turn().announce == [a, c]


def test_who_does_not_come_after_the_others_have_is_still_ended() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3, elastic_timeout_s=60.0)
    a, b, c = run.begin()
    run.job.found({"a": 1, "c": 1})
    run.turn(500.0)
    run.come(a)
    assert not run.turn().end
    assert run.turn(61.0).end == [c]
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3, elastic_timeout_s=60.0)
    a, b, c = run.begin()
    run.job.found({"a": 1, "c": 1})
    run.turn()
    run.end(b, 1)  # it left by itself, and so broke the collectives of the others
    run.come(a)
    run.turn()
    assert run.turn(61.0).end == [c]


def test_a_second_removal_of_a_host_is_told_too() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3)
    a, b, c = run.begin()
    run.job.found({"a": 1, "c": 1})
    assert run.turn().changed == {"removed"}
    run.come(a, b, c, may_skip_sync=True)
    run.job.found({"a": 1, "b": 1, "c": 1})
    assert set(run.turn().announce) == {a, b, c}, "it came back before anybody had left"
    run.job.found({"a": 1, "c": 1})
    assert run.turn().changed == {"removed"}
    assert not run.turn().changed


def test_a_worker_that_was_removed_does_not_end_the_job_with_its_success() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3)
    a, b, c = run.begin()
    run.job.found({"a": 1, "c": 1})
    run.turn()
    run.end(b, 0)
    orders = run.turn()
    assert not orders.dismiss and orders.over is None and "its slot is gone" in orders.say[0]
    run.end(a, 1)
    run.end(c, 1)
    assert run.turn().over == 1
    alone = Run({"a": 1, "b": 1})
    first = alone.begin()
    alone.job.found({})
    alone.turn()
    for worker in first:
        alone.end(worker, 0)
    assert alone.turn().over == 0, "nobody with a slot is left who could end better"


def test_after_a_success_a_worker_that_hangs_is_not_waited_for() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, num_proc=3, elastic_timeout_s=60.0)
    a, b, c = run.begin()
    run.end(a, 0)
    assert run.turn().over is None
    run.turn(50.0)
    run.job.heard(c.number, run.now)
    orders = run.turn(20.0)
    assert orders.end == [b] and "ending rank 1 (host b)" in orders.say[0] and "60 s" in orders.say[0]
    run.end(b, -15)
    assert run.turn(20.0).over is None, "rank 2 printed something"
    assert run.turn(40.0).end == [c]
    run.end(c, -15)
    assert run.turn().over == 0


def test_rounds_that_nobody_is_in_come_to_an_end() -> None:
    def rounds(run: Run, has_entered: list[bool]) -> int:
        workers, num = run.begin(), 0
        for entered in has_entered:
            for worker in workers:
                run.job.came(worker.number, worker.round, False, False, has_entered=entered)
            orders = run.turn()
            num += bool(orders.announce)
            if orders.over is not None:
                assert orders.over == 1 and "10 rounds in a row" in orders.say[-1] and not orders.announce
                break
        return num

    assert rounds(Run({"a": 1, "b": 1}), [False] * 50) == 9
    assert rounds(Run({"a": 1, "b": 1}), ([False] * 9 + [True]) * 5) == 50

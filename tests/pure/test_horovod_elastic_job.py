"""The decisions of an elastic run: ranks, hosts that failed or leave, rounds, workers that are late, and the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.compat.horovod.runner.elastic.assignment import Blacklist, choose
from guozhuang.compat.horovod.runner.elastic.discovery import DiscoveryError, merged, parse
from guozhuang.compat.horovod.runner.elastic.job import ElasticJob, Orders, Worker
from guozhuang.compat.horovod.runner.elastic.settings import ElasticSettings
from tests.drawing import examples

HOSTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4), max_size=5)


@examples(300)
@given(before=HOSTS, after=HOSTS, most=st.one_of(st.none(), st.integers(1, 12)), data=st.data())
def test_survivors_come_first_and_keep_their_order(
    before: dict[str, int], after: dict[str, int], most: int | None, data: st.DataObject
) -> None:
    ranks = choose(before, [], most)
    assert len(ranks) == min(sum(before.values()), 10**6 if most is None else most)
    living = (
        data.draw(st.lists(st.sampled_from(ranks), unique=True).map(lambda s: sorted(s, key=ranks.index)))
        if ranks
        else []
    )
    found = choose(after, living, most)
    assert len(set(found)) == len(found) == min(sum(after.values()), 10**6 if most is None else most)
    assert all(slot.index < after[slot.host] for slot in found)
    kept = [slot for slot in living if slot.index < after.get(slot.host, 0)]
    if most is not None:
        kept = kept[:most]
    assert set(kept) <= set(found)
    for host in after:
        of_host = [slot for slot in found if slot.host == host]
        old = [slot for slot in kept if slot.host == host]
        assert of_host[: len(old)] == old, "survivors before new ones, in their order"
        at = [number for number, slot in enumerate(found) if slot.host == host]
        assert at == list(range(at[0], at[0] + len(at))) if at else True, "ranks of a host follow each other"
    if kept:
        assert found[0] == kept[0], "rank 0 is a survivor"


def test_a_host_is_left_alone_for_ever_or_for_a_while_that_doubles() -> None:
    for_ever = Blacklist()
    assert for_ever.add("a", 5.0) == math.inf
    assert for_ever.holds("a", 1e12) and for_ever.is_for_ever("a") and not for_ever.holds("b", 0.0)
    cooled = Blacklist((10, 35))
    assert cooled.add("a", 100.0) == 10.0
    assert cooled.add("a", 101.0) == 9.0, "another worker of the host: the same failure"
    assert cooled.holds("a", 109.9) and not cooled.holds("a", 110.0) and not cooled.is_for_ever("a")
    assert [cooled.add("a", 1000.0 * k) for k in (1, 2, 3)] == [20.0, 35.0, 35.0]


def test_the_output_of_a_discovery_script() -> None:
    assert parse("b:2\n\n  a \nb:1\n", 4) == {"b": 3, "a": 4}
    assert list(parse("b:2\na", 1)) == ["b", "a"]
    assert parse("", 1) == {} and merged([("x", 1), ("x", 2)]) == {"x": 3}
    for wrong in ("a:x", "a b", "a:0", "-o:1", "a:1,b:2"):
        with pytest.raises(DiscoveryError):
            parse(wrong, 1)


class Run:
    """A job with a clock of its own; workers do what the test says."""

    def __init__(self, hosts: Mapping[str, int], cooldown: tuple[int, int] | None = None, **limits: object) -> None:
        wanted: dict[str, Any] = {"num_proc": 2, "min_np": 2} | limits
        self.job, self.now = ElasticJob(ElasticSettings([], cooldown_range=cooldown, **wanted)), 0.0
        self.job.found(hosts)

    def turn(self, after_s: float = 0.1) -> Orders:
        self.now += after_s
        return self.job.turn(self.now)

    def come(self, *workers: Worker, may_skip_sync: bool = False, has_state: bool | None = None) -> None:
        """``has_state`` None: those have it that are in a round."""
        for worker in workers:
            has_it = worker.round > 0 if has_state is None else has_state
            self.job.came(worker.number, worker.round, may_skip_sync, has_it)

    def end(self, worker: Worker, code: int) -> None:
        self.job.ended(worker.number, code, self.now)

    def begin(self) -> list[Worker]:
        """The first round."""
        started = self.turn().start
        self.come(*started)
        announced = self.turn().announce
        assert announced == started
        return announced

    def lose(self, lost: Worker, *survivors: Worker) -> None:
        """A worker fails; the survivors come, and are the next round."""
        self.end(lost, 1)
        self.turn()
        self.come(*survivors)
        assert self.turn().announce == [*survivors]


WITHOUT_B = {"a": 1, "c": 1}


def three(**limits: Any) -> tuple[Run, Worker, Worker, Worker]:
    """A job in its first round, and its workers on the hosts a, b and c."""
    run = Run({"a": 1, "b": 1, "c": 1}, **{"num_proc": 3} | limits)
    return run, *run.begin()


def names(workers: list[Worker]) -> list[str]:
    return [worker.slot.host for worker in workers]


def test_a_job_that_ends_well() -> None:
    run = Run({"a": 1, "b": 1})
    first = run.begin()
    assert [worker.rank for worker in first] == [0, 1] and run.turn() == Orders()
    run.end(first[0], 0)
    orders = run.turn()
    assert "ended well" in orders.dismiss and orders.over is None, "the rest may finish"
    run.end(first[1], 1)  # its last collective found nobody
    orders = run.turn()
    assert orders.over == 0 and "after rank 0" in orders.say[0]


def test_survivors_go_on_without_the_host_of_the_lost_worker() -> None:
    run = Run({"a": 1, "b": 2, "c": 1}, num_proc=4)
    a, b0, b1, c = run.begin()
    run.end(b0, -9)
    orders = run.turn()
    assert orders.end == [b1] and any("signal 9" in text for text in orders.say)
    run.end(b1, -15)
    run.come(a)
    assert not run.turn().announce, "rank 3 has not come yet"
    run.come(c)
    orders = run.turn()
    assert orders.announce == [a, c] and not orders.may_skip_sync and (a.rank, c.rank) == (0, 1)
    assert not run.turn(3600.0).start, "the host stays out"


def test_rank_0_is_a_survivor() -> None:
    run, a, b, c = three()
    run.end(a, 1)
    run.turn()
    run.come(b, c, may_skip_sync=True)
    orders = run.turn()
    assert orders.announce == [b, c] and orders.may_skip_sync


def test_new_workers_come_first_then_the_others_are_told() -> None:
    run = Run({"a": 1, "b": 1})
    first = run.begin()
    run.job.found({"a": 1, "b": 1, "c": 1})
    orders = run.turn()
    [new] = orders.start
    assert not orders.changed
    run.turn(5.0)
    run.come(new)
    assert run.turn().changed == {"added"}
    assert not run.turn(5000.0).changed, "told once; and who trains may take its time"
    run.come(*first, may_skip_sync=True)
    orders = run.turn()
    assert orders.announce == [*first, new] and not orders.may_skip_sync, "the new one needs the state"


def test_a_new_worker_that_was_not_synced_does_not_stand_for_the_state() -> None:
    run = Run({"a": 1, "b": 1}, num_proc=2, min_np=1, cooldown=(1, 1))
    a, b = run.begin()
    run.lose(a, b)
    [new] = run.turn(2.0).start
    run.come(new)
    run.turn()
    run.come(b)
    assert run.turn().announce == [b, new]
    run.come(new, has_state=False)  # its first sync failed
    run.come(b)
    assert run.turn().announce == [b, new]
    run.end(b, 1)
    run.come(new, has_state=False)
    orders = run.turn()
    assert orders.over == 1 and not orders.announce and "had the state" in orders.say[-1]


def test_rank_0_has_the_state() -> None:
    run, a, b, c = three()
    run.come(a, b, has_state=False)
    run.come(c, has_state=True)
    assert run.turn().announce == [c, a, b]
    fresh = Run({"a": 1, "b": 1, "c": 1}, num_proc=3)
    workers = fresh.begin()
    fresh.come(*workers, has_state=False)
    assert fresh.turn().announce == workers, "nothing is lost where nothing was"


def test_a_new_worker_that_is_slow_holds_nobody_up() -> None:
    run, a, b, c = three(start_timeout_s=70.0)
    run.end(c, 1)
    run.job.found({"a": 1, "b": 1, "c": 1, "d": 1})
    [d] = run.turn().start
    run.come(a, b)
    assert not run.turn(40.0).announce
    assert run.turn(40.0).announce == [a, b]
    run.come(d)
    assert run.turn().changed == {"added"}
    run.come(a, b)
    assert run.turn().announce == [a, b, d]


def test_a_removed_host_leaves_by_itself_and_is_no_failure() -> None:
    run, a, b, c = three()
    run.job.found(WITHOUT_B)
    assert run.turn().changed == {"removed"}
    run.come(a, b, c, may_skip_sync=True)
    orders = run.turn()
    assert orders.announce == [a, c] and orders.may_skip_sync and not orders.end
    run.end(b, 1)
    assert run.turn().over is None and run.job.first_failure is None
    run.job.found({"a": 1, "c": 1, "b": 1})
    assert names(run.turn().start) == ["b"], "it may come back"


def test_a_removed_worker_that_stays_is_ended() -> None:
    run, a, b, c = three()
    run.job.found(WITHOUT_B)
    run.turn()
    run.come(a, c)
    run.turn()
    assert not run.turn(20.0).end
    assert run.turn(20.0).end == [b] and not run.turn().end


def test_hosts_that_vanish_for_a_moment_change_nothing() -> None:
    run = Run({"a": 1, "b": 1})
    run.begin()
    run.job.found({})
    orders = run.turn()
    assert "waiting for hosts" in orders.say[1] and not (orders.end or orders.changed)
    run.job.found({"b": 1, "a": 1})
    orders = run.turn(100.0)
    assert orders.over is None and not (orders.end or orders.start or orders.changed or orders.announce)


def test_too_few_slots_for_too_long_end_the_job() -> None:
    run, a, b, c = three(elastic_timeout_s=60.0)
    run.end(b, 3)
    run.end(c, 1)
    orders = run.turn()
    assert any("1 slot can be used (found: a:1, b:1, c:1; a worker failed on b, c)" in text for text in orders.say)
    run.come(a)
    assert run.turn(59.0).over is None
    orders = run.turn(2.0)
    assert orders.over == 1 and "after 60 s (--elastic-timeout) 1 slot can be used" in orders.say[0]
    assert "the newest round has lost rank 1 (host b), rank 2 (host c)" in orders.say[0]
    assert run.job.first_failure is b


def test_too_few_slots_at_the_begin() -> None:
    run = Run({"a": 1}, elastic_timeout_s=60.0)
    assert not run.turn().start and not run.turn(30.0).start
    run.job.found({"a": 1, "b": 1})
    assert names(run.turn(0.5).start) == ["a", "b"]
    late = Run({"a": 1}, elastic_timeout_s=60.0)
    late.turn()
    assert late.turn(61.0).over == 1


def test_failures_on_every_host_end_the_job() -> None:
    run = Run({"a": 1, "b": 1})
    first = run.begin()
    run.end(first[1], 1)
    run.end(first[0], 2)
    orders = run.turn()
    assert orders.over == 1 and run.job.first_failure is first[1]
    before = Run({"a": 1, "b": 1})
    for worker in before.turn().start:
        before.end(worker, 1)
    orders = before.turn()
    assert orders.over == 1 and "every host" in orders.say[-1]


def test_a_script_that_fails_everywhere_is_not_tried_for_ever() -> None:
    run = Run({"a": 1, "b": 1}, cooldown=(1, 2))
    a, _ = run.turn().start
    run.end(a, 1)
    assert run.turn().over is None
    [again] = run.turn(1.5).start
    assert again.slot == a.slot, "it may have been the host"
    run.end(run.job.workers[1], 1)
    orders = run.turn()
    assert orders.over == 1 and "before any had called hvd.init()" in orders.say[-1]


def test_a_host_comes_back_after_its_cooldown() -> None:
    run, a, b, c = three(cooldown=(10, 100))
    run.lose(c, a, b)
    assert not run.turn(9.0).start
    [again] = run.turn(2.0).start
    assert again.slot == c.slot and again.number == 3


def test_the_limit_of_resets() -> None:
    run, a, b, c = three(min_np=1, reset_limit=1)
    run.lose(c, a, b)
    run.end(b, 1)
    run.turn()
    run.come(a)
    orders = run.turn()
    assert orders.over == 1 and not orders.announce
    assert orders.say[-1] == ("Horovod was shutdown because number of resets during elastic job exceeded limit: 1")


def test_a_worker_that_hangs_counts_as_failed() -> None:
    run, a, b, c = three(elastic_timeout_s=60.0)
    run.end(c, 1)
    run.come(a)
    run.turn()
    orders = run.turn(61.0)
    assert orders.end == [b] and any("did not come to the new round" in text for text in orders.say)
    silent = Run({"a": 1, "b": 1}, elastic_timeout_s=60.0, min_np=1)
    x, y = silent.turn().start
    silent.come(x)
    orders = silent.turn(61.0)
    assert orders.end == [y] and any("hvd.init()" in text for text in orders.say)
    silent.end(y, -15)
    assert silent.turn().announce == [x], "enough are left"


def test_no_more_than_asked_for() -> None:
    run = Run({"a": 2, "b": 2}, max_np=3)
    assert names(run.turn().start) == ["a", "a", "b"]


def test_a_worker_that_asks_for_a_new_round_gets_it() -> None:
    run = Run({"a": 1, "b": 1})
    first = run.begin()
    run.come(first[0])
    assert not run.turn().announce
    run.come(first[1])
    assert run.turn().announce == first and first[0].round == 2


def test_a_removal_gives_those_that_train_all_the_time_they_want() -> None:
    run, a, b, c = three()
    run.job.found(WITHOUT_B)
    assert run.turn().changed == {"removed"}
    for _ in range(2):
        orders = run.turn(5000.0)
        assert not orders.end and orders.over is None and run.job.first_failure is None
    run.come(a, b, c, may_skip_sync=True)
    assert run.turn().announce == [a, c]


def test_who_does_not_come_after_the_others_have_is_still_ended() -> None:
    run, a, b, c = three(elastic_timeout_s=60.0)
    run.job.found(WITHOUT_B)
    run.turn(500.0)
    run.come(a)
    assert not run.turn().end
    assert run.turn(61.0).end == [c]
    run, a, b, c = three(elastic_timeout_s=60.0)
    run.job.found(WITHOUT_B)
    run.turn()
    run.end(b, 1)  # it left by itself, and so broke the collectives of the others
    run.come(a)
    run.turn()
    assert run.turn(61.0).end == [c]


def test_a_second_removal_of_a_host_is_told_too() -> None:
    run, a, b, c = three()
    run.job.found(WITHOUT_B)
    assert run.turn().changed == {"removed"}
    run.come(a, b, c, may_skip_sync=True)
    run.job.found({"a": 1, "b": 1, "c": 1})
    assert set(run.turn().announce) == {a, b, c}, "it came back before anybody had left"
    run.job.found(WITHOUT_B)
    assert run.turn().changed == {"removed"}
    assert not run.turn().changed


def test_a_worker_that_was_removed_does_not_end_the_job_with_its_success() -> None:
    run, a, b, c = three()
    run.job.found(WITHOUT_B)
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
    run, a, b, c = three(elastic_timeout_s=60.0)
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

"""``hvd.elastic`` without a driver, on real ranks: what is committed comes back, and rank 0's state becomes everybody's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.processes.cases import said
from tests.ranks import run_ranks


def _model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()


def _everything(state: Any) -> list[Any]:
    parts = (state.model, state.optimizer)
    return [*(copy.deepcopy(each.state_dict()) for each in parts), state.epoch, list(state.notes)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _on_each_rank(rank: int, world_size: int) -> dict[str, Any]:
    import guozhuang.compat.horovod.torch as hvd
    from guozhuang.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    hvd.init()
    found: dict[str, Any] = {}
    model = _model(rank)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, epoch=rank, notes=[rank], sampler=sampler)
    if rank == 0:  # only there is something to take over
        with torch.no_grad():
            before = copy.deepcopy(model.state_dict())
        inner.zero_grad()
        sampler.record_batch(0, 3)
    state.sync()
    found["synced"] = _everything(state)
    found["rank 0 is unchanged"] = rank != 0 or _same(before, model.state_dict())
    found["left"] = list(sampler)

    _step(model, optimizer)
    state.epoch, state.notes = 7, ["committed"]
    state.commit()
    committed = _everything(state)
    _step(model, optimizer)
    state.epoch = 8
    state.notes.append("in place")
    sampler.record_batch(1, 2)
    found["has moved on"] = not _same(_everything(state), committed)
    for _ in range(2):  # a second time as well: what is restored is a copy
        state.restore()
        found.setdefault("is back", []).append(
            [_same(*each) for each in zip(_everything(state), committed, strict=True)]
        )
        state.notes.append("again")
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    found["sampler is back"] = sampler.processed_num

    # A new model under the old name is looked after from then on.
    state.restore()
    state.model = _model(100 + rank)
    state.sync()
    found["new model"] = next(state.model.parameters()).sum().item()

    # What rank 0 hears counts for all; a message to another rank alone changes nothing.
    if rank == 1:
        state.on_hosts_updated(5.0, 1)
    state.check_host_updates()
    interrupts = []
    for timestamp, result in ((1.0, 1), (2.0, 2), (2.0, 1), (3.0, 3)):
        if rank == 0:
            state.on_hosts_updated(timestamp, result)
        try:
            state.commit()
            interrupts.append("none")
        except HostsUpdatedInterrupt as interrupt:
            interrupts.append(str(interrupt.skip_sync))
    found["interrupts"] = interrupts
    found["stamp"] = state._last_updated_timestamp

    called = []
    state.register_reset_callbacks([lambda: called.append("first"), lambda: called.append("second")])
    state.on_reset()
    found["callbacks"], found["emptied"] = called, state._host_messages.empty()

    # Without a driver the exception leaves: a launcher starts the ranks again.
    calls = []

    @hvd.elastic.run
    def train(state: Any, factor: int, *, plus: int) -> int:
        calls.append(state.epoch)
        if factor == 0:
            raise HorovodInternalError("a peer is gone")
        return int(state.epoch * factor + plus)

    found["returned"] = train(state, 10, plus=1)
    with pytest.raises(HorovodInternalError, match="a peer is gone"):
        train(state, 0, plus=0)
    found["calls"], found["name"] = calls, train.__name__
    hvd.shutdown()
    return found


def test_commit_restore_and_sync() -> None:
    first, second = run_ranks(_on_each_rank, 2, init=False)
    assert first["rank 0 is unchanged"]
    assert _same(first["synced"], second["synced"])
    assert first["synced"][2:] == [0, [0]] and second["synced"][1]["param_groups"][0]["lr"] == 0.1
    assert first["left"] == [6, 8, 10, 12, 14, 16, 18] and second["left"] == [7, 9, 11, 13, 15, 17, 19]
    assert first["new model"] == second["new model"]
    for found in (first, second):
        assert found["has moved on"] and found["is back"] == [[True] * 4] * 2
        assert found["sampler is back"] == 6
        assert found["interrupts"] == ["True", "False", "none", "False"] and found["stamp"] == 3.0
        assert found["callbacks"] == ["first", "second"] and found["emptied"]
        assert found["returned"] == 71 and found["calls"] == [7, 7] and found["name"] == "train"


def _registry(rank: int, world_size: int) -> list[Any]:
    import guozhuang.compat.horovod.torch as hvd
    from guozhuang.compat.horovod.torch.elastic import state as module

    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

    class CounterHandler(module.StateHandler):
        def __init__(self, value: Counter) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.kept = self.value.value

        def restore(self) -> None:
            self.value.value = self.kept

        def sync(self) -> None:
            self.value.value = hvd.broadcast_object(self.value.value, 0)
            self.save()

    hvd.init()
    module.set_handler_registry([(Counter, CounterHandler), *module.get_handler_registry()])
    counter = Counter(rank + 5)
    state = hvd.elastic.TorchState(counter=counter)
    state.sync()
    counter.value += 1
    state.restore()
    with said() as texts:
        hvd.elastic.run(lambda state: None)(state)
        hvd.shutdown()
    return [counter.value, state.counter is counter, [text for text in texts if "elastic driver" in text]]


def test_own_types_and_the_word_that_there_is_no_driver() -> None:
    first, second = run_ranks(_registry, 2, init=False)
    assert first[:2] == [5, True] and second[:2] == [5, True]
    assert len(first[2]) == 1 and not second[2]

"""The registry of what a script trains: weak references, and the pause between two steps."""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn

from guozhuang.data import loader
from guozhuang.registry import Registry, registry


def test_pauses_come_between_steps_and_before_the_next_batch(monkeypatch) -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mine = Registry()
    monkeypatch.setattr(sys.modules["guozhuang.data.loader"], "registry", mine)
    mine.add_trained(module, module, optimizer, "single")
    batches = loader(torch.randn(8, 2), 2, rank=0, num_replicas=1)
    seen: list[int] = []
    mine.on_pause = lambda: seen.append(batches.state_dict()["consumed"])
    for number, batch in enumerate(batches):
        module(batch).sum().backward()
        if number % 2:  # every other batch is a micro-step only
            optimizer.step()
    assert seen == [4, 8]
    assert [each.strategy for each in mine.trained] == ["single"] and mine.loaders == [batches]


def test_ranks_that_get_uneven_numbers_of_batches_do_not_pause_for_one(monkeypatch) -> None:
    mine = Registry()
    monkeypatch.setattr(sys.modules["guozhuang.data.loader"], "registry", mine)
    mine.on_pause = lambda: seen.append(1)
    seen: list[int] = []
    for _ in loader(torch.randn(8, 2), 2, rank=0, num_replicas=1, ends="uneven"):
        mine.has_stepped = True
    assert not seen
    mine.pause()
    assert seen == [1]


def test_nothing_is_kept_alive() -> None:
    before = len(registry.loaders), len(registry.trained)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    registry.add_trained(module, module, optimizer, "single")
    batches = loader(torch.randn(8, 2), 2, rank=0, num_replicas=1)
    assert (len(registry.loaders), len(registry.trained)) == (before[0] + 1, before[1] + 1)
    del module, optimizer, batches
    gc.collect()
    assert (len(registry.loaders), len(registry.trained)) == before


def test_what_was_prepared_is_found_by_each_of_its_models() -> None:
    class Compiled(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inside

    mine, inside = Registry(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
    for module in (inside, Compiled(inside)):
        wrapper = nn.Sequential(module)
        mine.add_trained(module, wrapper, optimizer, "ddp")
        for given in (module, wrapper, Compiled(wrapper)):
            found = mine.trained_with(given)
            assert found is not None and found.model is wrapper
        mine.forget(wrapper)
        assert mine.trained_with(module) is None


def test_a_tracker_records_nothing_where_nobody_waits_for_gradients() -> None:
    from guozhuang.script.tracking import Tracker

    class Exchanging(nn.Linear):
        timeline, reducer = None, None

    module = Exchanging(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    registry.add_trained(module, module, optimizer, "local-sgd")
    Tracker(lambda metrics, step: None, module)
    assert not module._forward_hooks  # events that nobody reads would fill the memory

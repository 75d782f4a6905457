"""The cut of a model into stages is the best one for its costs, fits into memory, and costs are measured."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.pipeline.blocks import find_units
from guozhuang.parallel.pipeline.cut import (
    CallCost,
    MeasuredCalls,
    balance,
    choose_microbatches,
    cut_for,
    measure,
    table,
)
from guozhuang.parallel.pipeline.forwards.stage import Microbatch


def _slowest(costs: list[CallCost], starts: list[int]) -> float:
    return max(sum(c.seconds for c in costs[a:b]) for a, b in itertools.pairwise([0, *starts, len(costs)]))


def _costs(*seconds: float) -> list[CallCost]:
    return [CallCost(str(i), each) for i, each in enumerate(seconds)]


# In units of a layer: GPT-2's head of 50257 words is as much as 5.4 layers.
MODELS = {
    "GPT-2 on 2": (_costs(0.1, *[1.0] * 12, 5.4), 2, 9.1),
    "GPT-2 on 4": (_costs(0.1, *[1.0] * 12, 5.4), 4, 5.4),
    "30 layers and a head on 4": (_costs(0.2, *[1.0] * 30, 2.0), 4, 8.2),
    "BERT-base on 4": (_costs(0.15, *[1.0] * 12, 0.05), 4, 3.15),
}


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_cut_best(name: str) -> None:
    costs, num_stages, best = MODELS[name]
    assert _slowest(costs, balance(costs, num_stages)) == pytest.approx(best, rel=0.03)


def test_the_slowest_stage_is_about_as_fast_as_of_any_cut() -> None:
    draw = random.Random(7)
    for _ in range(60):
        costs = _costs(*(draw.choice([0.0, 1.0, draw.random(), 9 * draw.random()]) for _ in range(draw.randint(2, 9))))
        num_stages = draw.randint(1, min(4, len(costs)))
        starts = balance(costs, num_stages)
        assert len({0, *starts}) == num_stages and starts == sorted(starts)
        every = itertools.combinations(range(1, len(costs)), num_stages - 1)
        assert _slowest(costs, starts) <= 1.03 * min(_slowest(costs, list(each)) for each in every)


def test_times_that_differ_a_little_make_no_other_choice() -> None:
    draw, found = random.Random(11), set()
    for _ in range(50):
        layer, head = (draw.uniform(0.993, 1.007) for _ in range(2))
        # The second stage is as slow with the last layer and the head as the first one is with it.
        parts = [CallCost("embedding", 0.2, 800), *[CallCost(f"layer {i}", layer, 100, 10) for i in range(6)]]
        costs = (*parts, CallCost("head", 1.2 * head, 100))
        twice = tuple(replace(each, seconds=1.7 * draw.uniform(0.993, 1.007) * each.seconds) for each in costs)
        measured = MeasuredCalls((2, 4), (costs, twice))
        tried = [cut_for(measured, 16, m, ("1f1b", 2, 1)) for m in (1, 2, 4, 6, 8)]
        best = choose_microbatches(tried, usual=4)
        found.add((best.num_microbatches, *best.starts))
    assert len(found) == 1


def test_stages_fit_into_memory() -> None:
    costs = [CallCost(str(i), 1.0, 100 if i else 900, 10) for i in range(8)]
    assert balance(costs, 2) == [4]
    # 4 bytes for each of the parameters, and what is saved of 2 microbatches, then of 1.
    assert balance(costs, 2, [2, 1], 4 * 900 + 4 * 100 + 2 * 20) == [2]
    with pytest.raises(UsageError, match=r"no cut into 2 stages fits into 0\.00 GB a rank") as caught:
        balance(costs, 2, [2, 1], 1000)
    assert table(costs, [4], [2, 1]) in str(caught.value)


class Uneven(nn.Module):
    """The last of its layers is 64 times as much work as each other; one has running statistics, one draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm, self.drop, self.head = nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 4096)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows).relu_()
        return self.head(self.drop(self.norm(rows)))


def test_costs_are_measured_and_nothing_changes() -> None:
    torch.manual_seed(0)
    model, rows = Uneven(), torch.randn(256, 64)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    batches = [Microbatch(0, (rows[:n],), {}, slice(0, n), 256) for n in (64, 256)]
    for _ in range(5):  # other work of the machine may fall into the times of a measurement
        smaller, larger = measure(model, find_units(model, 2), batches, {f"layers.{i}": 64 for i in range(4)})
        found = {cost.name: cost for cost in larger}
        if found["head"].seconds > found["layers.1"].seconds:
            break
    assert [4 * cost.saved_bytes for cost in smaller] == pytest.approx([cost.saved_bytes for cost in larger], abs=4000)
    assert len({found[f"layers.{i}"].seconds for i in range(4)}) == 1
    assert list(found) == [*(f"layers.{i}" for i in range(4)), "norm", "drop", "head"]
    assert found["head"].seconds > found["layers.1"].seconds > 0
    assert found["layers.0"].parameter_bytes == 4 * (64 * 64 + 64)
    assert found["layers.0"].saved_bytes == found["layers.0"].output_bytes == rows.nbytes
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_parts_with_checkpoints_of_the_old_style_are_measured_too() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=True)

    model = nn.Sequential(*(Checkpointed() for _ in range(3)))
    batch = Microbatch(0, (torch.randn(2, 8, requires_grad=True),), {}, slice(0, 2), 2)
    (found,) = measure(model, find_units(model, 2), [batch])
    assert [cost.name for cost in found] == ["0", "1", "2"] and all(cost.seconds > 0 for cost in found)
    assert all(p.grad is None for p in model.parameters())


def _measured(fixed_s: float, row_s: float, **others: float) -> MeasuredCalls:
    sizes = {
        rows: tuple(CallCost(str(i), fixed_s + rows * row_s, 0, rows, 1000 * rows) for i in range(8)) for rows in (2, 8)
    }
    return MeasuredCalls(tuple(sizes), tuple(sizes.values()), **others)


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        (_measured(0.0, 1.0), 12),  # nothing costs more with more microbatches, which leave ranks idle for less time
        (_measured(1.0, 1.0), 4),
        (_measured(3.0, 0.1), 1),
        (_measured(0.0, 1.0, message_s=6.0), 4),
        (_measured(0.0, 1.0, byte_s=8e-3), 8),  # the link carries the parts of a batch one behind the other
    ],
)
def test_the_number_of_microbatches_is_that_of_about_the_shortest_step(measured: MeasuredCalls, best: int) -> None:
    tried = [cut_for(measured, 16, m, ("1f1b", 2, 1)) for m in (1, 2, 3, 4, 6, 8, 12, 16)]
    chosen = choose_microbatches(tried, usual=4)
    assert (chosen.num_microbatches, chosen.starts) == (best, [4])
    assert chosen.step_s <= 1.05 * min(each.step_s for each in tried)
    if measured.message_s == measured.byte_s == 0:  # every stage takes the same time
        one = 4 * measured.at(16 / best)[0].seconds
        assert chosen.step_s == pytest.approx((best + 1) * one)


def test_costs_of_other_sizes_lie_on_the_line_through_two() -> None:
    measured = _measured(3.0, 0.5)
    assert [measured.at(rows)[0].seconds for rows in (1, 4, 16)] == pytest.approx([3.5, 5.0, 11.0])
    assert measured.at(4)[5].saved_bytes == 4
    single = MeasuredCalls((4,), (tuple(measured.at(4)),))
    assert [single.at(rows)[0].seconds for rows in (2, 4, 8)] == pytest.approx([2.5, 5.0, 10.0])


def test_microbatches_for_which_there_is_no_memory_are_not_chosen() -> None:
    measured = _measured(1.0, 1.0)
    assert cut_for(measured, 16, 4, ("1f1b", 2, 1), 4 * 2 * 4.0).step_s > 0
    with pytest.raises(UsageError, match=r"no cut into 2 stages fits"):
        cut_for(measured, 16, 2, ("1f1b", 2, 1), 4 * 2 * 4.0)
    with pytest.raises(UsageError, match=r"with 2 microbatches, and there are"):
        cut_for(measured, 16, 2, ("1f1b", 2, 1), 4 * 2 * 4.0, [4])

"""One exchange inside nodes and another between them, against a few lines in one process. Letters stand for nodes."""

from __future__ import annotations

import copy
import traceback
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.base import GradientExchange
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.node_groups import NodeGroups, make_groups, num_groups, on_leaders
from guozhuang.exchange.powersgd import PowerSGD
from guozhuang.exchange.warmup import Warmup
from guozhuang.gradients.buckets import Bucket
from guozhuang.groups.hierarchical.nodes import Nodes
from guozhuang.launch.tracebacks import speaks_of_lost_peer
from tests.processes.cases import as_tests, assert_equal_everywhere
from tests.processes.gradient_methods import buckets_of, exchange_all, fill, gradient
from tests.processes.test_compressed import bytegrad
from tests.processes.test_powersgd import Paper
from tests.threads.twins import members

# By number of ranks; the first one is enough for what does not depend on who is where.
LAYOUTS = {3: ("abb", "aaa", "abc"), 4: ("aabb", "abba", "aaab"), 5: ("aabbb",)}
SHAPES = [[(1,)], [(3, 5), (2,)], [(100, 100), (7,), (33, 3)]]
FEEDBACK = Compressed(Dithering(block=8), error_feedback=True)


def ours(layout: str, outer: GradientExchange[Any], inner: GradientExchange[Any] | None = None) -> Hierarchical:
    return Hierarchical(inner or AllReduce(), outer, tuple(layout))


def is_even(layout: str) -> bool:
    return len({len(ranks) for ranks in members(layout)}) == 1


def flat_of(shapes: list[list[tuple[int, ...]]], index: int, rank: int, step: int) -> Tensor:
    bucket = buckets_of(shapes)[index]
    fill([bucket], rank, step)
    return bucket.flat


def case_every_rank_weighs_the_same(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        for inner in (AllReduce(), Cast(torch.float16, AllReduce())):
            for outer in (AllReduce(), Warmup(1, AllReduce(), Cast(torch.bfloat16, AllReduce()))):
                buckets, exchange = buckets_of(SHAPES), ours(layout, outer, inner)
                state = exchange.prepare(buckets, dist.group.WORLD)
                for step in range(2):
                    fill(buckets, rank, step)
                    for bucket in buckets:
                        bucket.flat.mul_(exchange.input_scale(size))  # as the reducer does
                    exchange_all(exchange, buckets, state, step)
                    tolerance = 1e-5 if isinstance(inner, AllReduce) else 2e-2
                    tolerance = 0.1 if step and isinstance(outer, Warmup) else tolerance
                    for bucket in buckets:
                        mean = sum(flat_of(SHAPES, bucket.index, each, step) for each in range(size)) / size
                        torch.testing.assert_close(bucket.flat, mean, rtol=tolerance, atol=tolerance, msg=layout)
                        assert_equal_everywhere(bucket.flat)


def coded_between_nodes(layout: str, parts: list[Tensor]) -> Tensor:
    """What all ranks hold with ByteGrad between nodes, from what each had."""
    nodes = members(layout)
    sums = [sum(parts[rank] for rank in ranks) * (len(nodes) / len(layout)) for ranks in nodes]
    if not is_even(layout):
        return bytegrad(sums)
    length = -(-parts[0].numel() // len(nodes[0]))
    lanes = zip(*(each.split(length) for each in sums), strict=True)
    return torch.cat([bytegrad(list(lane)) for lane in lanes])


def case_only_what_leaves_a_node_is_coded(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        if layout in ("aaa", "abc"):
            continue
        exchange, buckets = ours(layout, Compressed(MinMax8())), buckets_of(SHAPES)
        state = exchange.prepare(buckets, dist.group.WORLD)
        for step in range(2):
            fill(buckets, rank, step)
            exchange_all(exchange, buckets, state, step)
            for bucket in buckets:
                parts = [flat_of(SHAPES, bucket.index, each, step) for each in range(size)]
                wanted = coded_between_nodes(layout, parts)
                if max(map(len, members(layout))) < 3:
                    assert torch.equal(bucket.flat, wanted), (layout, bucket.index, step)
                else:  # a sum of three has an order, and an 8-bit number changes by one with its last bit
                    span = float(wanted.max() - wanted.min()) / 255
                    torch.testing.assert_close(bucket.flat, wanted, rtol=0, atol=2.1 * span + 1e-6, msg=layout)


def case_one_node_is_inner_and_single_ranks_are_outer(rank: int, size: int) -> None:
    inner, outer = Cast(torch.bfloat16, AllReduce()), FEEDBACK
    for layout, alone in (("a" * size, inner), ("abcde"[:size], outer)):
        results = []
        for exchange in (ours(layout, outer, inner), alone):
            buckets = buckets_of(SHAPES)
            state = exchange.prepare(buckets, dist.group.WORLD)
            for step in range(3):
                fill(buckets, rank, step)
                for bucket in buckets:
                    bucket.flat.mul_(exchange.input_scale(size))
                exchange_all(exchange, buckets, state, step)
            saved = exchange.state_dict(state)
            exchange.load_state_dict(state, copy.deepcopy(saved))
            results.append([bucket.flat.clone() for bucket in buckets])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), layout


def case_feedback_loses_nothing(rank: int, size: int) -> None:
    """The sum of all results, and what is still held back, is the sum of all means."""
    for layout in (each for each in LAYOUTS[size] if 1 < len(set(each)) < size):
        buckets, exchange = buckets_of(SHAPES), ours(layout, FEEDBACK)
        state = exchange.prepare(buckets, dist.group.WORLD)
        got = [torch.zeros_like(bucket.flat) for bucket in buckets]
        for step in range(6):
            fill(buckets, rank, step)
            exchange_all(exchange, buckets, state, step)
            for total, bucket in zip(got, buckets, strict=True):
                total += bucket.flat
        saved = exchange.state_dict(state)
        assert saved["nodes"] == members(layout)
        for bucket, total in zip(buckets, got, strict=True):
            held = torch.zeros_like(total)
            first = [ranks[0] for ranks in members(layout)]
            if rank in first:
                held += torch.cat([saved["outer"]["sent"][name] for name in bucket.names])
            if rank == 0:
                held += torch.cat([saved["outer"]["means"][name] for name in bucket.names]) * len(first)
            dist.all_reduce(held)
            wanted = sum(flat_of(SHAPES, bucket.index, r, s) for r in range(size) for s in range(6)) / size
            torch.testing.assert_close(total + held / len(first), wanted, rtol=1e-4, atol=1e-4, msg=layout)


def case_whole_parameters_go_through_the_first_rank_of_a_node(rank: int, size: int) -> None:
    layout, power = LAYOUTS[size][0], PowerSGD(rank=2)
    exchange, buckets = ours(layout, power), buckets_of([[(40, 30), (7,)]])
    state = exchange.prepare(buckets, dist.group.WORLD)
    nodes, saved = members(layout), exchange.state_dict(state)["outer"]
    told = [saved["basis"]["p0.0"] if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    paper = Paper((40, 30), told[0], len(nodes))
    for step in range(4):
        fill(buckets, rank, step)
        exchange_all(exchange, buckets, state, step)
        of_nodes = [
            sum(gradient("p0.0", (40, 30), each, step) for each in ranks) * (len(nodes) / size) for ranks in nodes
        ]
        wanted = paper.step(of_nodes).view(40, 30).float()
        torch.testing.assert_close(buckets[0].views[0], wanted, rtol=1e-3, atol=1e-3)
        assert_equal_everywhere(buckets[0].flat)
    again = exchange.prepare(buckets, dist.group.WORLD)
    exchange.load_state_dict(again, copy.deepcopy(exchange.state_dict(state)))
    results = []
    for each in (state, again):
        fill(buckets, rank, 4)
        exchange_all(exchange, buckets, each, 4)
        results.append(buckets[0].flat.clone())
    assert torch.equal(*results)


def case_pytorch_warns_of_nothing_that_is_called(rank: int, size: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")  # also in the lanes' threads
        for layout in LAYOUTS[size]:
            exchange, buckets = ours(layout, AllReduce()), buckets_of(SHAPES)
            exchange_all(exchange, buckets, exchange.prepare(buckets, dist.group.WORLD), 0)
    assert not [str(each.message) for each in seen if issubclass(each.category, FutureWarning | DeprecationWarning)]


def case_no_rank_is_in_more_groups_than_another(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        exchange, buckets = ours(layout, FEEDBACK), buckets_of(SHAPES)
        exchange.prepare(buckets, dist.group.WORLD)
        assert_equal_everywhere(torch.tensor([num_groups()]))
    ranks = [0, size - 1]  # what would wait for ever otherwise
    group = dist.new_group(ranks if rank in ranks else [rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)


def case_wrong_uses_are_refused(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    with pytest.raises(UsageError, match=f"each of the {size} ranks"):
        ours("ab" * size, AllReduce()).prepare(buckets, dist.group.WORLD)
    exchange = ours(LAYOUTS[size][0], FEEDBACK)
    state = exchange.prepare(buckets, dist.group.WORLD)
    with pytest.raises(UsageError, match="no state of Hierarchical"):
        exchange.load_state_dict(state, {"sent": {}})
    saved = exchange.state_dict(state)
    with pytest.raises(UsageError, match="on other nodes"):
        exchange.load_state_dict(state, {**saved, "nodes": [[0], list(range(1, size)), []]})


def case_gradients_that_outer_refuses_are_refused_on_every_rank(rank: int, size: int) -> None:
    """Also on ranks that do not exchange between nodes, and on which ``outer`` therefore sees no gradients."""
    for layout in LAYOUTS[size]:
        bucket = Bucket(0, True, ["steps"], [torch.zeros(6, dtype=torch.int64)])
        if layout != "a" * size:
            with pytest.raises(UsageError, match="floating-point gradients, not torch"):
                ours(layout, FEEDBACK).prepare([bucket], dist.group.WORLD)
            assert_equal_everywhere(torch.tensor([num_groups()]))


def fails_on_leaders(groups: NodeGroups) -> tuple[list[str], weakref.ref[Tensor]]:
    """The traceback that this rank prints if the first rank of its node cannot do its part, and what was held for it."""
    held = torch.ones(1)

    def act() -> None:
        raise OSError(f"no space left for {held.numel()}")

    try:
        on_leaders(groups, act, torch.device("cpu"), [])
    except Exception as error:
        return traceback.format_exception(error), weakref.ref(held)
    raise AssertionError("nothing was raised")


def case_an_error_of_a_first_rank_is_the_cause_and_frees_what_it_held(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        if layout == "a" * size:
            continue
        groups = make_groups(dist.group.WORLD, Nodes.of(layout, rank))
        lines, held = fails_on_leaders(groups)
        text = "".join(lines)
        assert "OSError: no space left for 1" in text
        assert speaks_of_lost_peer(lines) == (not groups.leads), "the launcher shows the traceback of the first rank"
        assert groups.leads or f"Fix: look at the error of rank {groups.nodes.here[0]}" in text
        assert held() is None, "no cycle waits for the collector, which is off here"


def case_nodes_are_found_by_the_ranks(rank: int, size: int) -> None:
    exchange, buckets = Hierarchical(AllReduce(), FEEDBACK), buckets_of(SHAPES)
    state = exchange.prepare(buckets, dist.group.WORLD)
    assert state.members == [list(range(size))], "all ranks of a test share one machine"


def case_part_of_the_world(rank: int, size: int) -> None:
    """The last case: rank 0 is in fewer groups then, see [Note: equally many groups]."""
    ranks = list(range(1, size))
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    layout = "".join("ab"[i % 2] for i in range(size - 1))
    exchange, buckets = ours(layout, Compressed(MinMax8())), buckets_of(SHAPES)
    state = exchange.prepare(buckets, group)
    fill(buckets, rank, 0)
    exchange_all(exchange, buckets, state, 0)
    for bucket in buckets:
        mean = sum(flat_of(SHAPES, bucket.index, each, 0) for each in ranks) / len(ranks)
        torch.testing.assert_close(bucket.flat, mean, rtol=0, atol=0.05 * size)


test_cases = as_tests(
    globals(),
    (4,),
    slow=sorted(LAYOUTS.keys() - {4}),
    on="threads",
    in_processes=[case_pytorch_warns_of_nothing_that_is_called],
)


@pytest.mark.parametrize("layout", [layout for each in LAYOUTS.values() for layout in each])
def test_the_model_of_these_tests_sees_the_nodes_as_the_package_does(layout: str) -> None:
    found: Sequence[Sequence[int]] = Nodes.of(layout, 0).members
    assert [list(ranks) for ranks in found] == members(layout)

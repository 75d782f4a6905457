"""Weights, parts of them and the state of their exchange are loaded, in any order; nothing of what was before stays behind."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import MismatchError, WorldError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.decentralized import Decentralized
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.parameter_server import AsyncParameterServer
from guozhuang.exchange.warmup import WeightWarmup
from tests.processes.cases import (
    as_tests,
    assert_equal_everywhere,
    everybodys,
    flat,
)
from tests.processes.mean_of_two import (
    MeanOfTwo,
    made,
    train,
    wrapped,
)
from tests.waiting import LIMIT_S


def case_a_shallow_copy_holds_the_same_weights(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    copy.copy(ddp.module).load_state_dict(
        {name: torch.full_like(p, 3.0 + rank) for name, p in made().named_parameters()}
    )
    ddp.eval()
    assert bool((flat(ddp) == 3).all())


def loaded_in_order(order: str, rank: int, size: int) -> None:
    """The outer weights and momenta of DiLoCo: they show in the next outer step."""
    exchange = DiLoCo(3, outer_momentum=0.5)
    ddp = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp.use_weight_exchange(exchange, optimizer)
    train(ddp, optimizer, rank, range(4))
    saved = copy.deepcopy({"e": ddp.exchange_state_dict(), "m": ddp.state_dict(), "o": optimizer.state_dict()})
    train(ddp, optimizer, rank, range(4, 8))
    again = DistributedDataParallel(made())
    its = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    again.use_weight_exchange(exchange, its)
    load = {"e": again.load_exchange_state_dict, "m": again.load_state_dict, "o": its.load_state_dict}
    for what in order:
        load[what](saved[what])
    if order == "eom":
        again.eval()  # weights that were loaded meet here, and the state is still that of the checkpoint
        again.train()
    assert again.around is not None
    train(again, its, rank, range(4, 8))
    assert again.around.step == 8
    assert torch.equal(flat(again), flat(ddp))


def case_state_of_the_exchange_before_the_weights(rank: int, size: int) -> None:
    for order in ("meo", "emo", "eom", "oem"):
        loaded_in_order(order, rank, size)


def case_weights_loaded_after_a_step_begin_without_the_loaded_state(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    exchange, weights = copy.deepcopy((ddp.exchange_state_dict(), ddp.state_dict()))
    ddp.load_exchange_state_dict(exchange)
    ddp.load_state_dict(weights)
    train(ddp, optimizer, rank, range(3, 4))
    assert ddp.around is not None and ddp.around._state.num_steps == 4
    ddp.load_state_dict(weights)
    train(ddp, optimizer, rank, range(4, 5))
    assert ddp.around._state.num_steps == 1


def case_a_part_of_the_module_is_loaded(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(norm=True)
    train(ddp, optimizer, rank, range(3))
    assert ddp.around is not None
    before = ddp.around._state
    mean = torch.stack(everybodys(ddp.module[3].weight.detach())).mean(0)
    running = torch.stack(everybodys(ddp.module[1].running_mean)).mean(0)
    ddp.module[0].load_state_dict({"weight": torch.full((6, 4), 5.0 + rank), "bias": torch.full((6,), 5.0 + rank)})
    ddp.eval()
    assert ddp.around._state is not before and before.closed
    assert bool((ddp.module[0].weight == 5).all()) and bool((ddp.module[0].bias == 5).all())
    assert_equal_everywhere(flat(ddp))
    assert torch.allclose(ddp.module[3].weight, mean, atol=1e-6)
    assert torch.allclose(ddp.module[1].running_mean, running, atol=1e-6)


def case_a_part_is_loaded_and_another_parameter_is_moved(rank: int, size: int) -> None:
    for exchange in (MeanOfTwo(), AsyncParameterServer(max_staleness_steps=1)):
        ddp = DistributedDataParallel(made())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(exchange, optimizer)
        train(ddp, optimizer, rank, range(2))
        ddp.module[0].load_state_dict({"weight": torch.full((6, 4), 5.0 + rank), "bias": torch.full((6,), 5.0 + rank)})
        moved = ddp.module[2].weight
        moved.data = torch.full_like(moved, 1.0 + rank)
        ddp.eval()
        assert bool((ddp.module[0].weight == 5).all()) and bool((ddp.module[0].bias == 5).all())
        assert bool((moved == 1 + (size - 1) / 2).all()), "the mean, as of parameters that were moved alone"
        assert_equal_everywhere(flat(ddp))


def case_different_parts_are_loaded(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    part = ddp.module[0 if rank == 0 else 2]
    part.load_state_dict(part.state_dict())
    with pytest.raises(MismatchError, match=r"weights were loaded: [02]"):
        ddp.eval()


def load(ddp: DistributedDataParallel, rank: int, value: float) -> None:
    """Other values on each rank; those of rank 0 are to be taken."""
    ddp.module.load_state_dict({name: torch.full_like(p, value + rank) for name, p in ddp.module.named_parameters()})


def case_who_left_out_a_step_loads(rank: int, size: int) -> None:
    for exchange in (Decentralized(), DiLoCo(every=2, overlap_steps=1)):
        ddp = DistributedDataParallel(made())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(exchange, optimizer)
        train(ddp, optimizer, rank, range(4 - (rank == 1)))
        load(ddp, rank, 3.0)
        with pytest.raises((MismatchError, WorldError), match="optimizer step"):
            ddp.agree()


def case_who_is_far_behind_loads_and_holds_nobody(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.use_weight_exchange(AsyncParameterServer(max_staleness_steps=1), optimizer)
    train(ddp, optimizer, rank, range(1 if rank == 0 else 6))
    load(ddp, rank, 3.0)
    ddp.agree()
    assert bool((flat(ddp) == 3).all())
    train(ddp, optimizer, rank, range(6, 8))
    ddp.agree()
    assert_equal_everywhere(flat(ddp))


class Tied(nn.Module):
    """Two names for one weight, and a part that can be taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.last, self.spare = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x) + self.head(x))


def case_a_tied_weight_is_loaded_by_its_second_name(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(Tied())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    train(ddp, optimizer, rank, range(1))
    mean = torch.stack(everybodys(ddp.module.last.weight.detach())).mean(0)
    ddp.module.head.load_state_dict({"weight": torch.full((6, 4), 5.0 + rank)})
    ddp.eval()
    assert bool((ddp.module.embed.weight == 5).all())
    assert torch.allclose(ddp.module.last.weight, mean, atol=1e-6)
    assert_equal_everywhere(flat(ddp))


def case_a_part_that_was_loaded_is_taken_out(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(Tied())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    train(ddp, optimizer, rank, range(1))
    ddp.module.spare.load_state_dict(ddp.module.spare.state_dict())
    del ddp.module.spare
    mean = torch.stack(everybodys(flat(ddp))).mean(0)
    ddp.eval()
    assert_equal_everywhere(flat(ddp))
    assert torch.allclose(flat(ddp), mean, atol=1e-6)


def case_loads_leave_no_groups_and_threads_behind(rank: int, size: int) -> None:
    often = AsyncModelAverage(interval_ms=0.0)
    warmup = WeightWarmup(1, AllReduce(), Decentralized())
    overlapped = DiLoCo(every=2, num_fragments=2, overlap_steps=1)
    coded = DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, overlap_steps=1, codec=MinMax8())
    for exchange in (
        Decentralized("shift_one"), LowPrecisionDecentralized(), Every(2, often), warmup, overlapped, coded,
    ):  # fmt: skip
        ddp = DistributedDataParallel(made())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(exchange, optimizer)
        train(ddp, optimizer, rank, range(2))
        ddp.agree()
        before = settled()
        for k in range(3):
            ddp.module.load_state_dict({name: torch.full_like(p, k + rank) for name, p in made().named_parameters()})
            ddp.agree()
            assert bool((flat(ddp) == k).all())
            train(ddp, optimizer, rank, range(2 + rank % 2 * (not exchange.in_step)))  # and leaves something under way
        ddp.agree()
        deadline_s = time.monotonic() + LIMIT_S
        while more := [a - b for a, b in zip(counted(), before, strict=True) if a > b]:
            assert time.monotonic() < deadline_s, (exchange, more)
        assert_equal_everywhere(flat(ddp))


def settled() -> tuple[int, int, int]:
    """What ``counted`` finds twice in a row."""
    last, now = None, counted()
    while now != last:
        time.sleep(0.1)
        last, now = now, counted()
    return now


def counted() -> tuple[int, int, int]:
    """Process groups, threads of exchanges and sockets of this process."""
    gc.collect()
    threads = sum(each.name.startswith("guozhuang") for each in threading.enumerate())
    sockets = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            sockets += os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    return len(dist.distributed_c10d._world.pg_map), threads, sockets


test_cases = as_tests(
    globals(),
    (2, 3),
    on="threads",
    in_processes=[  # they count a process's threads and sockets, and wait for the time-out of a group
        case_loads_leave_no_groups_and_threads_behind,
        case_who_left_out_a_step_loads,
    ],
)

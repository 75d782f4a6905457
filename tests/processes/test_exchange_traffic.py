"""What an exchange of gradients says that it sends, against the collectives that it issues.

Every collective of every thread is noted with the bytes that its algorithm sends from this rank: a ring's 2 (n-1)/n for an
all-reduce, what goes to others for the rest. That gloo sends these bytes and little more is asked of the kernel
(see also test_traffic.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from guozhuang.exchange.base import GradientExchange
from guozhuang.lab.measure import tcp_sent_bytes
from guozhuang.world import versions
from tests.processes.cases import as_tests
from tests.processes.gradient_methods import METHODS, buckets_of, exchange_all, fill, forget_groups

SHAPES: list[list[tuple[int, ...]]] = [[(64, 48), (7,)]]
NUM_ELEMENTS = 64 * 48 + 7
STEPS = 3
OVERHEAD_BYTES = 600  # of headers, for each collective and peer


def _all_reduce(tensor: Tensor, n: int) -> int:
    return 2 * (n - 1) * tensor.numel() * tensor.element_size() // n


def _to_others(given: Tensor, n: int) -> int:
    return (n - 1) * given.numel() * given.element_size()


#: By name: which argument is what this rank gives, and the bytes that it sends of it.
COLLECTIVES: dict[str, tuple[int, Callable[[Tensor, int], int]]] = {
    "all_reduce": (0, _all_reduce),
    "all_to_all_single": (1, lambda given, n: _to_others(given, n) // n),
    "all_gather_single": (1, _to_others),
    "reduce_scatter_single": (1, lambda given, n: _to_others(given, n) // n),
}
OTHERS = (
    *("broadcast", "reduce", "send", "isend", "all_gather", "all_to_all"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)


class Counted:
    """What was counted; ``calls`` are (name, ranks of the group)."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.more_by_gloo = 0  # its reduce-scatter sends as much as an all-reduce
        self.calls: list[tuple[str, int]] = []


@contextmanager
def counting() -> Iterator[Counted]:
    """Note the collectives of all threads: exchanges call them by ``dist.<name>``, or ``versions.<name>`` if newly named."""
    counted, lock = Counted(), threading.Lock()
    where: dict[str, Any] = {name: versions if hasattr(versions, name) else dist for name in COLLECTIVES}
    before = {name: getattr(where[name], name) for name in COLLECTIVES}
    others = {name: getattr(dist, name) for name in OTHERS}

    def watched(name: str) -> Callable[..., Any]:
        position, num_bytes = COLLECTIVES[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            n = kwargs["group"].size()
            with lock:
                counted.num_bytes += num_bytes(args[position], n)
                counted.more_by_gloo += num_bytes(args[position], n) if name == "reduce_scatter_single" else 0
                counted.calls.append((name, n))
            return before[name](*args, **kwargs)

        return call

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"dist.{name}: tell COLLECTIVES how many bytes it sends")

        return call

    try:
        for name in before:
            setattr(where[name], name, watched(name))
        for name in others:
            setattr(dist, name, refused(name))
        yield counted
    finally:
        for name, function in (before | others).items():
            setattr(where.get(name, dist), name, function)


def told(exchange: GradientExchange[Any], size: int, of_shapes: Callable[[int], int] | None) -> int | None:
    return exchange.traffic(NUM_ELEMENTS, 4, size) if of_shapes is None else of_shapes(size)


def check(name: str, rank: int, size: int) -> None:
    method = METHODS[name]
    exchange, buckets = method.make(size), buckets_of(SHAPES)
    said = told(exchange, size, method.of_shapes)
    try:
        state = exchange.prepare(buckets, dist.group.WORLD)
        fill(buckets, rank, 0)
        exchange_all(exchange, buckets, state, 0)  # a warm-up's first step
        dist.barrier()
        if said is None:
            assert name.startswith("hierarchical"), "traffic() may say None, but then of_shapes tells what to expect"
            return
        sent = tcp_sent_bytes()
        with counting() as counted:
            for step in range(1, STEPS + 1):
                fill(buckets, rank, step)
                exchange_all(exchange, buckets, state, step)
        assert counted.num_bytes // STEPS == pytest.approx(said, abs=2 * len(counted.calls)), counted.calls
        dist.barrier()
        now = tcp_sent_bytes()
        if sys.platform == "linux" and size > 1:
            assert sent is not None and now is not None
            overhead = OVERHEAD_BYTES * (sum(n for _, n in counted.calls) + size)
            assert STEPS * said <= now - sent + 64 * STEPS, "less than it says goes over the wire"
            assert now - sent <= STEPS * said * 1.02 + counted.more_by_gloo + overhead, (
                now - sent,
                STEPS * said,
                counted.calls,
            )
        else:
            assert said == 0
    finally:
        dist.barrier()
        forget_groups()


for _name in [name for name, method in METHODS.items() if not method.has_own_messages]:
    globals()[f"case_{_name}"] = lambda rank, size, name=_name: check(name, rank, size)
test_what_it_says_is_what_it_sends = as_tests(globals(), (3,), slow=(1, 2, 4))

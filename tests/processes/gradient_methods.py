"""All exchanges of gradients, for the tables that ask the same of each: add a new one to METHODS, once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang.exchange import AllReduce
from guozhuang.exchange.adasum import Adasum
from guozhuang.exchange.base import GradientExchange
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.onebit import OneBit
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.codecs.topk import RandomK, TopK
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.parameter_server import ParameterServer
from guozhuang.exchange.powersgd import PowerSGD
from guozhuang.exchange.warmup import Warmup
from guozhuang.gradients.buckets import Bucket

_NODES = {1: "a", 2: "ab", 3: "abb", 4: "aabb", 8: "aaabbbbc"}


@dataclass(frozen=True)
class Method:
    """An exchange in the tables.

    Attributes:
        make: a new one, for so many ranks.
        says: whether NaN in a gradient is said in the log; an exact exchange hands it on, and the loss shows it.
        refuses: dtypes of parameters that are refused with a UsageError.
        takes_integers: whether it exchanges whole numbers too.
        has_own_messages: whether it sends messages of its own instead of calling collectives, whose bytes are counted.
        loss: the greatest loss after 60 steps of a task, as a multiple of that of plain averaging; None if not compared.
        of_shapes: the bytes that a rank sends for a bucket of a matrix of 64 x 48 and a vector of 7, where ``traffic`` does
            not see the shapes that they depend on.
    """

    make: Callable[[int], GradientExchange[Any]]
    says: bool = True
    refuses: Sequence[torch.dtype] = ()
    takes_integers: bool = False
    has_own_messages: bool = False
    loss: float | None = 1.3
    of_shapes: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Restless(MinMax8):
    """Takes another time on every rank and for every bucket: it computes up to some hundred sums for nothing."""

    def encode(self, rows: Tensor, codes: Tensor, random_bits: torch.Generator) -> None:
        for _ in range(random.SystemRandom().randrange(200)):
            rows.sum()
        super().encode(rows, codes, random_bits)


def nodes_of(size: int) -> tuple[str, ...]:
    return tuple(_NODES[size])


def coded(*arguments: Any, loss: float | None = 1.3, **options: Any) -> Method:
    return Method(lambda size: Compressed(*arguments, **options), loss=loss)


def power_bytes(size: int) -> int:
    """PowerSGD of rank 2, of matrices of 64 x 48 and a vector of 7: two all-reduces of float32."""
    first, second = 64 * 2 + 7, 48 * 2
    return AllReduce().traffic(first, 4, size) + AllReduce().traffic(second, 4, size)


def adasum_bytes(size: int) -> int:
    """Adasum tells the bytes of a bucket of one parameter; a second one has a Gram matrix of its own."""
    return Adasum().traffic(64 * 48 + 7, 4, size) + Adasum().gram_bytes(1, size)


METHODS: dict[str, Method] = {
    "allreduce": Method(lambda size: AllReduce(), says=False),
    "fp16": Method(lambda size: Cast(torch.float16, AllReduce()), says=False),
    "bf16": Method(lambda size: Cast(torch.bfloat16, AllReduce()), says=False),
    "minmax8": coded(MinMax8()),
    "minmax8-feedback": coded(MinMax8(), error_feedback=True),
    "restless": coded(Restless()),
    "linear4": coded(Dithering(bits=4), error_feedback=True),
    "natural4": coded(Dithering(bits=4, partition="natural"), loss=None),
    "onebit": coded(OneBit(), error_feedback=True, loss=None),
    "topk": coded(TopK(0.1), error_feedback=True, loss=None),
    "topk-momentum": coded(TopK(0.1), error_feedback=True, momentum=0.9, loss=None),
    "randomk": coded(RandomK(0.1), error_feedback=True, loss=None),
    "powersgd": Method(lambda size: PowerSGD(rank=2), of_shapes=power_bytes),
    "warmup": Method(lambda size: Warmup(1, AllReduce(), Compressed(MinMax8(), error_feedback=True))),
    "adasum": Method(lambda size: Adasum(), loss=None, of_shapes=adasum_bytes),
    "servers": Method(lambda size: ParameterServer(part_bytes=2000), takes_integers=True, has_own_messages=True),
    "hierarchical": Method(
        lambda size: Hierarchical(AllReduce(), Compressed(MinMax8(), error_feedback=True), nodes_of(size))
    ),
    "hierarchical-powersgd": Method(lambda size: Hierarchical(AllReduce(), PowerSGD(rank=2), nodes_of(size))),
    "hierarchical-restless": Method(
        lambda size: Hierarchical(AllReduce(), Warmup(1, AllReduce(), Compressed(Restless())), nodes_of(size))
    ),
}


def forget_groups() -> None:
    """End the groups of all ranks but the first one, so that hundreds of exchanges in one process do not add up.

    Every rank must call. Groups of some ranks stay: PyTorch would use the name of one that has ended again, and its members
    would find the addresses of the old one in the store.
    """
    world = dist.group.WORLD
    assert world is not None
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world and group.size() == world.size():
            dist.destroy_process_group(group)


def gradient(name: str, shape: Sequence[int], rank: int, step: int) -> Tensor:
    seed = sum(map(ord, name)) * 1000 + rank * 100 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + rank)


def buckets_of(shapes: list[list[tuple[int, ...]]]) -> list[Bucket]:
    made = []
    for index, members in enumerate(shapes):
        names = [f"p{index}.{i}" for i in range(len(members))]
        made.append(Bucket(index, index == len(shapes) - 1, names, [nn.Parameter(torch.zeros(s)) for s in members]))
    return made


def fill(buckets: Sequence[Bucket], rank: int, step: int) -> None:
    for bucket in buckets:
        for name, view in zip(bucket.names, bucket.views, strict=True):
            view.copy_(gradient(name, view.shape, rank, step))


def exchange_all(exchange: GradientExchange[Any], buckets: Sequence[Bucket], state: Any, step: int) -> None:
    for work in [exchange.start(bucket, state, step) for bucket in buckets]:
        work.wait()

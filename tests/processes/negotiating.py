"""An engine on every rank, for tests of negotiated collectives."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.gradients.named import Handle, Kind, NamedChannel, NamedEngine, Reduction, Settings, Submission, control
from guozhuang.groups.shared_memory import SharedMemoryGroup
from tests.processes.shm_ranks import run_shm_ranks
from tests.threads.ranks import ThreadGroup, run_threads


def run_engines(fn: Callable[..., Any], num_ranks: int, *args: Any, name: str = "shm", **options: Any) -> list[Any]:
    """Call ``fn(engine, *args)`` on every rank, in a group of this backend; engine, threads and groups must end.

    With the name "threads" ranks are threads, and their group carries rounds and data as one of shared memory does.
    """
    settings = options.pop("settings", Settings())
    if name == "threads":
        with mock.patch.object(control, "SharedMemoryGroup", (SharedMemoryGroup, ThreadGroup)):
            return run_threads(_with_engine, num_ranks, fn, args, settings)
    return run_shm_ranks(_with_engine, num_ranks, fn, args, settings, name=name, **options)


def _with_engine(rank: int, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings) -> Any:
    with an_engine(settings) as engine:
        return fn(engine, *args)


@contextlib.contextmanager
def an_engine(settings: Settings | None = None) -> Iterator[NamedEngine]:
    assert dist.group.WORLD is not None
    engine = NamedEngine(dist.group.WORLD, settings or Settings())
    try:
        yield engine
        assert engine.failure is None, engine.failure
    finally:
        engine.close()
        del engine
        gc.collect()


def reduced(
    channel: NamedChannel, name: str, *tensors: Tensor, reduction: Reduction = Reduction.SUM, **more: Any
) -> list[Tensor]:
    return reducing(channel, name, *tensors, reduction=reduction, **more).wait()


def reducing(
    channel: NamedChannel, name: str, *tensors: Tensor, reduction: Reduction = Reduction.SUM, **more: Any
) -> Handle:
    return channel.submit(Submission(Kind.ALLREDUCE, f"allreduce.{name}", tensors, reduction=reduction, **more))


def in_place(channel: NamedChannel, name: str, *tensors: Tensor, reduction: Reduction = Reduction.SUM) -> Handle:
    return reducing(channel, name, *tensors, reduction=reduction, outputs=tensors)


def asked(channel: NamedChannel, kind: Kind, name: str, *tensors: Tensor, **more: Any) -> Handle:
    return channel.submit(Submission(kind, f"{kind.value}.{name}", tensors, **more))


def together(channel: NamedChannel, name: str = "x") -> None:
    """Return when all ranks of the channel came."""
    asked(channel, Kind.BARRIER, name).wait()


def full(value: float, num: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((num,), value, dtype=dtype)

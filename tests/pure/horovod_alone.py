"""A Horovod world of two ranks in one process: the other rank always submits the same, so a mean is what came in, and a sum
twice that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from guozhuang.compat.horovod.common.process_sets import enter_global, leave_all
from guozhuang.compat.horovod.common.state import HorovodState, RankPlace, set_state
from guozhuang.compat.horovod.common.variables import HorovodVariables
from guozhuang.compat.horovod.torch.optimizer import DistributedOptimizer
from guozhuang.gradients.buckets import in_process_memory
from guozhuang.gradients.named import Kind, NamedEngine, NegotiationError, Reduction, Settings, Submission
from guozhuang.world import World


class MirrorHandle:
    """Ends when somebody waits."""

    def __init__(self, channel: MirrorChannel, submission: Submission) -> None:
        self._channel, self._submission = channel, submission

    def done(self) -> bool:
        self._channel.hurried.append(self._submission.name)
        return False

    def wait(self) -> list[Tensor]:
        return self._channel.end(self._submission)


class MirrorChannel:
    """Remembers what was submitted.

    Attributes:
        names: of all that was submitted, in order.
        hurried: of what somebody asked for before it was waited for.
        last: what was submitted last under each name.
        watches: for each watch of gradients the steps in which it looked.
        broken: names that fail.
        agrees: the other rank has the same parameters in the same order.
    """

    agrees = False

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.ranks = size, 0, tuple(range(size))
        self.settings = Settings()
        self.names: list[str] = []
        self.hurried: list[str] = []
        self.last: dict[str, Submission] = {}
        self.watches: list[list[int]] = []
        self.under_way: set[str] = set()
        self.broken: set[str] = set()

    def nan_watch(self) -> Any:
        steps: list[int] = []
        self.watches.append(steps)
        return SimpleNamespace(look_at=lambda names, parameters, step: steps.append(step))

    def submit(self, submission: Submission) -> MirrorHandle:
        assert submission.name not in self.under_way, f"{submission.name} is under way"
        if "guozhuang.layout" in submission.name:
            return MirrorHandle(self, submission)
        self.names.append(submission.name)
        self.last[submission.name] = submission
        self.under_way.add(submission.name)
        return MirrorHandle(self, submission)

    def end(self, submission: Submission) -> list[Tensor]:
        self.under_way.discard(submission.name)
        if submission.name in self.broken:
            raise NegotiationError(f"Mismatched data types: {submission.name}")
        if submission.kind == Kind.BARRIER:
            return []
        if "guozhuang.layout" in submission.name:
            submission.tensors[0].sub_(0 if self.agrees else 1)
            return []
        factor = submission.prescale * submission.postscale
        if submission.reduction == Reduction.SUM:
            factor *= self.size
        assert submission.outputs is not None
        for source, target in zip(submission.tensors, submission.outputs, strict=True):
            assert source.is_contiguous() and target.is_contiguous()
            target.copy_(source * factor)
        return list(submission.outputs)

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return in_process_memory(num_elements, dtype, device)


@contextmanager
def mirror_world(size: int = 2, *, elastic: bool = False) -> Iterator[MirrorChannel]:
    channel = MirrorChannel(size)
    world = World(0, size, 0, size, 0, 1, torch.device("cpu"), "alone")
    engine = cast(NamedEngine, SimpleNamespace(world=channel))
    here = HorovodState(
        engine=engine,
        world=world,
        variables=replace(HorovodVariables(), elastic=elastic),
        rank=0,
        size=size,
        place=RankPlace(0, size, 0, 1, is_homogeneous=True),
        world_ranks=tuple(range(size)),
        made_world=False,
        dynamic=True,
        sets=cast(Any, {}),
    )
    set_state(here)
    enter_global(here)
    try:
        yield channel
    finally:
        set_state(None)
        leave_all(here)


class Net(nn.Module):
    """``second`` is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, use_second: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.second(x) if use_second else x)


NAMES = ["first.weight", "first.bias", "second.weight", "second.bias", "last.weight", "last.bias"]


def net_of_three() -> Net:
    torch.manual_seed(1)
    return Net()


def loss_of(net: nn.Module, step: int = 0, *args: Any) -> Tensor:
    torch.manual_seed(100 + step)
    return net(torch.randn(5, 4), *args).square().mean()


def sgd(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def distributed(net: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    return DistributedOptimizer(optimizer or sgd(net), net.named_parameters(), **options)


def sent(channel: MirrorChannel) -> list[str]:
    found = [name.removeprefix("allreduce.") for name in channel.names]
    channel.names.clear()
    return found


def train(net: nn.Module, optimizer: Any, steps: int = 4, *args: Any) -> list[Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, *args).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def beside(
    channel: MirrorChannel,
    program: Callable[[Any, Any, int], object],
    steps: int = 3,
    make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> None:
    """Run ``program(net, optimizer, step)`` with a DistributedOptimizer and with the optimizer itself: they train alike.

    Once each gradient travels by itself, and once, from the second step on, in a bucket.
    """
    for channel.agrees in (False, True):
        ours, theirs = net_of_three(), net_of_three()
        made, plain = distributed(ours, (make or sgd)(ours), **options), (make or sgd)(theirs)
        for step in range(steps):
            program(ours, made, step)
            program(theirs, plain, step)
        assert_equal(list(ours.parameters()), list(theirs.parameters()))
        assert not channel.under_way


def is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "synchronize")


def assert_equal(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)

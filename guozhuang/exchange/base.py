"""The interface between the reducer and a method of exchanging gradients.

A method is a frozen dataclass whose fields are its hyper-parameters. Everything that changes during training is in a separate
state object, which ``prepare`` returns and the caller keeps. One method object therefore serves any number of models, and a
checkpoint saves the state alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..watch.waits import waits

State = TypeVar("State")


class Work(Protocol):
    """A started exchange that has not been waited for yet; ``torch.distributed.Work`` satisfies this protocol."""

    def wait(self) -> object:
        """Wait until the result is in ``bucket.flat``; raise the error if the exchange failed."""
        ...

    def is_completed(self) -> bool:
        """Return, without waiting, whether all collectives of the bucket have ended; the timeline records it."""
        ...


class Done:
    """A ``Work`` that is complete from the start, for an exchange that had nothing to send."""

    def wait(self) -> None:
        """Return at once, because nothing was started."""

    def is_completed(self) -> bool:
        """Return True, because there is nothing to wait for."""
        return True


@dataclass(eq=False)
class Then:
    """A started exchange whose result still has to be computed from what it received; ``wait`` does so.

    Attributes:
        work: the exchange.
        then: called once, after ``work`` has ended without an error, however often it is waited for.
    """

    work: Work
    then: Callable[[], object]
    _has_run: bool = field(default=False, init=False, repr=False)

    def wait(self) -> None:
        """Wait for the exchange, then call ``then``, unless an earlier call did."""
        waits.for_work(self.work)
        if not self._has_run:
            self.then()
            self._has_run = True

    def is_completed(self) -> bool:
        """Return whether the exchange has ended; ``then`` may still have to be called."""
        return self.work.is_completed()


@dataclass(frozen=True)
class Several:
    """Started works that are waited for together.

    Attributes:
        works: the works, in the order in which they were started.
    """

    works: Sequence[Work]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            waits.for_work(work)

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self.works)


class Exchange(ABC, Generic[State]):
    """Base class of exchanges of gradients and of weights: the methods that save and restore their state in checkpoints."""

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return the values that a resumed run needs to continue exactly, besides the weights; often empty.

        Every rank must call; with an exchange of weights after ``agree``.
        """
        return {}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore the values that :meth:`state_dict` returned on this rank, after weights were loaded. Every rank must call.

        Raises:
            UsageError: the values were saved by another method, for other parameters, or with another number of ranks.
        """
        if saved:
            what = f"{type(self).__name__} keeps no state, and the checkpoint holds some for {sorted(saved)}"
            raise UsageError(explain(what, fix="choose the exchange that the checkpoint was saved with"))


class GradientExchange(Exchange[State]):
    """A method of exchanging full buckets of gradients while backward is still running.

    Every rank makes the same calls in the same order: the reducer starts bucket 0, 1, 2, ... on all ranks.
    """

    @property
    def one_round(self) -> bool:
        """Whether all collectives of a bucket are issued inside :meth:`start`.

        If not, the reducer (on CPU) waits for each bucket before backward continues: otherwise the bucket's later collectives
        could be issued in a different order relative to other collectives on different ranks.
        """
        return True

    @property
    def repeatable(self) -> bool:
        """Whether a bucket may be exchanged twice in one step, so that the first result is discarded.

        This is False for methods that keep errors or momentum from one call to the next. Under ``sharded`` gradients are sent
        while backward runs if the method is repeatable, and those that change before the step are sent again.
        """
        return False

    @property
    def sends_marks(self) -> bool:
        """Whether :meth:`start` sums ``bucket.sent``, in which ranks tell each other numbers, in place of ``bucket.flat``."""
        return False

    @property
    def averages(self) -> bool:
        """Whether the result is a mean; if not, ``join(divide_by_initial_world_size=False)`` does not rescale it."""
        return True

    @property
    def sums(self) -> bool:
        """Whether the result is the sum over ranks; sparse gradients, which no exchange gets, are summed then too."""
        return False

    def input_scale(self, world_size: int) -> float:
        """Return the factor by which gradients must be multiplied before :meth:`start`; the reducer applies it."""
        return 1.0

    @abstractmethod
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: State | None = None) -> State:
        """Make the state for these buckets. Every rank must call.

        Args:
            buckets: all buckets that will be passed to :meth:`start`.
            group: the ranks that exchange.
            before: the state of the previous bucket layout, if the layout changed; values kept per parameter are taken from it.
        """

    @abstractmethod
    def start(self, bucket: Bucket, state: State, step: int) -> Work:
        """Start the exchange of ``bucket.flat``; its result replaces the gradients there once the returned work was waited for.

        Args:
            bucket: dense (``bucket.sparse`` is False), its gradients multiplied by :meth:`input_scale`.
            state: the return value of :meth:`prepare`.
            step: number of synchronized backward passes before this one; the number of optimizer steps instead, if a
                ``WeightExchange`` returned this exchange from its ``gradients()``.
        """

    def scale_and_start(self, bucket: Bucket, state: State, step: int, world_size: int) -> Work:
        """Multiply the gradients by :meth:`input_scale`, which the reducer has not done, and :meth:`start` their exchange."""
        scale = self.input_scale(world_size)
        if scale != 1.0:
            bucket.flat.mul_(scale)
        return self.start(bucket, state, step)

    @abstractmethod
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return the bytes that one rank sends per step for ``num_elements`` gradients; None if they can only be measured."""


def check_saved(saved: Mapping[str, Any], keys: Set[str], of: str) -> None:
    """Compare the keys of a saved state with those that an exchange saves.

    Args:
        saved: the state in the checkpoint.
        keys: all keys of a state of this exchange.
        of: the name of the exchange, for the error text.

    Raises:
        UsageError: the keys differ, so another exchange saved the state.
    """
    if saved.keys() != keys:
        what = f"the checkpoint holds no state of {of}"
        raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))

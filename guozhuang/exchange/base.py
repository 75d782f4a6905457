"""The interface between the reducer and a method of exchanging gradients.

Hyper-parameters are fields of a frozen dataclass; what changes while training is the state that ``prepare`` returns and the
caller keeps. One method object therefore serves any number of models, and a checkpoint of a method is its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket

State = TypeVar("State")


class Work(Protocol):
    """An exchange under way. ``torch.distributed.Work`` is one."""

    def wait(self) -> object:
        """Return when the result stands in ``bucket.flat``; raise what went wrong."""
        ...

    def is_completed(self) -> bool:
        """Tell, without waiting, whether all collectives of the bucket have ended; for the timeline."""
        ...


class Done:
    """The work of an exchange that had nothing to send."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class GradientExchange(ABC, Generic[State]):
    """What is done with a full bucket while backward is still running.

    Every rank calls every method in the same order: the reducer starts bucket 0, 1, 2, ... on all ranks.
    """

    @property
    def one_round(self) -> bool:
        """Whether all collectives of a bucket are issued inside :meth:`start`.

        Where they are not, the reducer (on CPU) lets a bucket end before backward goes on, so that its later rounds cannot
        change places with other collectives, which would differ between ranks.
        """
        return True

    @property
    def averages(self) -> bool:
        """Whether the result is a mean. With ``join(divide_by_initial_world_size=False)`` only a mean is divided anew."""
        return True

    def input_scale(self, world_size: int) -> float:
        """Return the factor that :meth:`start` expects on the gradients; the reducer applies it as it copies them in."""
        return 1.0

    @abstractmethod
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: State | None = None) -> State:
        """Make the state for these buckets. Every rank must call.

        Args:
            buckets: those that :meth:`start` will be given.
            group: the ranks.
            before: where the layout changed, the state that went with the last one: what belongs to parameters is taken over.
        """

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return what a checkpoint needs to go on exactly, by parameter; empty for most. Every rank must call."""
        return {}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank. Every rank must call.

        Raises:
            UsageError: it belongs to another method, or to another number of ranks.
        """
        if saved:
            what = f"{type(self).__name__} keeps no state, and the checkpoint holds some for {sorted(saved)}"
            raise UsageError(explain(what, fix="choose the exchange that the checkpoint was saved with"))

    @abstractmethod
    def start(self, bucket: Bucket, state: State, step: int) -> Work:
        """Begin to exchange ``bucket.flat``; the result lands there by the time that the returned work is waited for.

        Args:
            bucket: dense (``bucket.sparse`` is False), its gradients multiplied by :meth:`input_scale`.
            state: what :meth:`prepare` returned.
            step: number of synchronized backward passes before this one; of optimizer steps where an exchange of weights
                brought this one.
        """

    @abstractmethod
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return the bytes that one rank sends per step for that many gradient elements; None if only counting can tell."""


def check_saved(saved: Mapping[str, Any], keys: Set[str], of: str) -> None:
    """Compare the keys of a saved state with those that an exchange saves.

    Args:
        saved: the state in the checkpoint.
        keys: all keys of a state of this exchange.
        of: the exchange, for the text of the error.

    Raises:
        UsageError: they differ, so that another exchange saved it.
    """
    if saved.keys() != keys:
        what = f"the checkpoint holds no state of {of}"
        raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))

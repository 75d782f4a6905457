"""One exchange for the first steps, another one after them.

Formula and error: those of the one in use. Methods that lose something do best once the first, large changes are over; 1-bit
Adam and PowerSGD need it.
Source: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam's warm-up); PyTorch's ``start_powerSGD_iter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..buckets import Bucket
from ..errors import UsageError, explain
from .base import GradientExchange, Work


@dataclass(frozen=True)
class Warmup(GradientExchange[tuple[Any, Any, int]]):
    """``first`` for so many steps, then ``then``. Its state: those of both, and the number of ranks.

    Args:
        steps: how many synchronized backward passes ``first`` serves.
        first: usually ``AllReduce()``.
        then: what follows.

    Raises:
        UsageError: a negative number of steps.
    """

    steps: int
    first: GradientExchange[Any]
    then: GradientExchange[Any]

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UsageError(explain("steps is a count, at least 0", value=self.steps))

    @property
    def one_round(self) -> bool:
        """True if both are."""
        return self.first.one_round and self.then.one_round

    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: tuple[Any, Any, int] | None = None
    ) -> tuple[Any, Any, int]:
        """Prepare both."""
        was_first, was_then, _ = before if before is not None else (None, None, 0)
        states = self.first.prepare(buckets, group, was_first), self.then.prepare(buckets, group, was_then)
        return (*states, group.size())

    def start(self, bucket: Bucket, state: tuple[Any, Any, int], step: int) -> Work:
        """Start the one whose turn it is."""
        chosen, its_state = (self.first, state[0]) if step < self.steps else (self.then, state[1])
        scale = chosen.input_scale(state[2])
        if scale != 1.0:
            bucket.flat.mul_(scale)
        return chosen.start(bucket, its_state, step)

    def state_dict(self, state: tuple[Any, Any, int]) -> dict[str, Any]:
        """Return those of both."""
        return {"first": self.first.state_dict(state[0]), "then": self.then.state_dict(state[1])}

    def load_state_dict(self, state: tuple[Any, Any, int], saved: Mapping[str, Any]) -> None:
        """Hand it to both."""
        if saved.keys() != {"first", "then"}:
            what = "the checkpoint was saved without this warm-up"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        self.first.load_state_dict(state[0], saved["first"])
        self.then.load_state_dict(state[1], saved["then"])

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return what a step after the warm-up sends."""
        return self.then.traffic(num_elements, element_bytes, world_size)

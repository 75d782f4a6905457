"""Compares what ranks do with a model whose weights are divided among them, before a collective mixes different things.

[Note: units in step] The weights of a unit (a block, or the rest of the model) are gathered when the model calls it, and its
gradients are summed when backward has passed it. Ranks that call different units, as experts that are chosen by the samples,
would meet in one collective with parts of different units, and units of one shape would get each other's numbers without a
word. So on the CPU a small collective comes before each of these: ranks compare which unit it is for. Before a sum they also
tell which parameters have a gradient; where only other ranks have one, this rank gives zeros. On an accelerator, where
reading a result makes the program wait, what was done in a step is compared at its end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ...errors import MismatchError, explain, rank_table
from ...gradients.output_hooks import OutputHook
from ...world.versions import all_gather_single

if TYPE_CHECKING:
    from ...gradients.alike import Alike

_CALLS = ("a training forward", "a forward without gradients", "state_dict()", "a step without gradients")
_BITS = 62  # flags that one number of 64 bits carries


class Together(OutputHook):
    """Compares what the ranks do with divided weights, so that a call on a part of them raises at once.

    A forward gathers weights, and ``state_dict()`` gives each rank's part: both need every rank. One small collective comes
    first; where the ranks differ, all that take part in it raise. It is also a hook of forwards.

    Args:
        group: the ranks.
        units: names of the units of which weights are gathered and gradients summed.
        num_flags: the most parameters that a unit has.

    Attributes:
        alike: compares the steps that ranks have made, and their rates; None: that is not compared.
    """

    alike: Alike | None = None

    def __init__(self, group: dist.ProcessGroup, units: Sequence[str], num_flags: int) -> None:
        self._group, self._units, self._num_forwards = group, units, 0
        self._mine = torch.zeros(1 + -(-num_flags // _BITS), dtype=torch.int64)
        self._everyones = torch.zeros(group.size(), len(self._mine), dtype=torch.int64)

    @_disable_dynamo
    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """Compare ranks before a forward. Every rank must call."""
        if not torch.is_grad_enabled() or self.alike is None:
            self._compare(0 if torch.is_grad_enabled() else 1)
            return
        everyones = self._compare(0, [self.alike.digest(self._num_forwards)])
        if len({row[1] for row in everyones}) > 1:
            self.alike.compare(self._num_forwards)
        self._num_forwards += 1

    def before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Compare ranks before ``state_dict()``. Every rank must call."""
        self._compare(2)

    def before_empty_step(self) -> None:
        """Compare ranks before a step in which no parameter has a gradient. Every rank must call."""
        self._compare(3)

    def before_gather(self, unit: int) -> None:
        """Compare ranks before the weights of a unit are gathered. Every rank must call."""
        self._compare(len(_CALLS) + 2 * unit)

    def before_sum(self, unit: int, flags: Sequence[bool]) -> list[bool]:
        """Compare ranks before the gradients of a unit are summed. Every rank must call.

        Args:
            unit: the number of the unit.
            flags: for each of its parameters whether this rank has a gradient.

        Returns:
            For each parameter whether any rank has a gradient.
        """
        words = [
            sum(1 << i for i, flag in enumerate(flags[start : start + _BITS]) if flag)
            for start in range(0, len(flags), _BITS)
        ]
        everyones = self._compare(len(_CALLS) + 2 * unit + 1, words)
        if all(row == everyones[0] for row in everyones):
            return list(flags)
        return [any(row[1 + i // _BITS] >> i % _BITS & 1 for row in everyones) for i in range(len(flags))]

    def _compare(self, code: int, words: Sequence[int] = ()) -> list[list[int]]:
        mine = [code, *words]
        self._mine[: len(mine)] = torch.tensor(mine)
        all_gather_single(self._everyones.view(-1), self._mine, group=self._group)
        everyones: list[list[int]] = self._everyones.tolist()
        if any(row[0] != code for row in everyones):
            raise self._mismatch([row[0] for row in everyones])
        return everyones

    def _mismatch(self, codes: Sequence[int]) -> MismatchError:
        what = "ranks do different things with a model whose weights are divided among them"
        if min(codes) < len(_CALLS):
            fix = (
                "call forward, generate() and state_dict() on every rank, not on rank 0 alone, and let every rank's loss come "
                "from the model; skip a batch on all ranks or none; gz.save(folder), on every rank, saves whole weights"
            )
        else:
            fix = (
                "call each part on every rank and in the same order, a part without samples with an empty batch (x[:0]), and "
                "let all of them reach the loss; or train with the strategy sharded, where ranks may use different parts"
            )
        table = rank_table(("rank", "is in"), [(rank, self._words(code)) for rank, code in enumerate(codes)])
        return MismatchError(f"{explain(what, rank=self._group.rank(), fix=fix)}\n{table}")

    def _words(self, code: int) -> str:
        if code < len(_CALLS):
            return _CALLS[code]
        unit, is_sum = divmod(code - len(_CALLS), 2)
        return ("the sum of the gradients of " if is_sum else "the gathering of the weights of ") + self._units[unit]


class History:
    """Compares at the end of a step which units the ranks have used, where reading results at once would cost too much.

    Args:
        group: the ranks.
        device: where small tensors are compared.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sum = 0
        self._told: Tensor | None = None

    def before_gather(self, unit: int) -> None:
        """Keep that the weights of a unit are gathered. Not collective."""
        self._sum = zlib.crc32(f"gather {unit}".encode(), self._sum)

    def before_sum(self, unit: int, flags: Sequence[bool]) -> list[bool]:
        """Keep that the gradients of a unit are summed, and of which parameters. Not collective."""
        self._sum = zlib.crc32(f"sum {unit} {flags}".encode(), self._sum)
        return list(flags)

    def end_step(self) -> None:
        """Compare the step that ends now; the result is read at the end of the next one. Every rank must call.

        Raises:
            MismatchError: in the step before, ranks have used different units.
        """
        told, self._told = self._told, torch.zeros(self._group.size(), dtype=torch.int64, device=self._device)
        all_gather_single(self._told, self._told.new_tensor([self._sum]), group=self._group)
        self._sum = 0
        if told is not None and len(set(found := told.tolist())) > 1:
            what = "in the last step ranks have used different parts of a model whose weights are divided among them"
            fix = (
                "call each part on every rank and in the same order, a part without samples with an empty batch (x[:0]); or "
                "train with the strategy sharded, and start from the last checkpoint"
            )
            table = rank_table(("rank", "checksum of the parts"), [(r, f"{each:08x}") for r, each in enumerate(found)])
            raise MismatchError(f"{explain(what, rank=self._group.rank(), fix=fix)}\n{table}")

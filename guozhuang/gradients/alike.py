"""Finds replicas that go apart: ranks that leave out steps, step at other rates, or hold other weights.

[Note: what is told, and what is compared then] Each rank makes a number of what must be equal on all: batches that were left
out, optimizer steps, hyper-parameters, how often weights were changed in place, and now and then checksums of some weights.
The numbers travel with what the ranks exchange anyway. A rank never judges by its own number but by what all ranks have
received alike, so that all of them begin to compare at the same point, or none does. Only the comparison raises: it looks at
the things themselves. Weights may have been changed and put back on one rank (an average of weights for an evaluation), or
differ by rounding (unlike processors), and neither is an error.
Numbers of steps count from the first time that gradients are averaged: what ranks did before is not compared.

[Note: which weights are looked at] All of them at the passes in :data:`_EARLY`, then a quarter at each ``_EVERY``-th pass, so
that 64 passes see all parameters. Of a large parameter ``_WINDOW`` elements are read, other ones each time. Changes in place
need no checksum: PyTorch counts them.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import MismatchError, explain, rank_table
from ..groups import agree
from ..groups.subgroups import timeout_s
from ..watch.waits import waits
from ..world.versions import never_compiled
from .buckets import dense_stride

_EARLY, _EVERY, _PARTS = frozenset((1, 2, 4, 8)), 16, 4
_WINDOW = 1 << 16  # elements of a parameter that one checksum reads
# Optimizers whose hyper-parameters are looked at in each pass; those of more optimizers are where weights are.
_NUM_RATES = 8
_ROUNDINGS = 1000  # times the dtype's relative precision: weights that differ by less differ by rounding
_MOST_ROUNDING = 0.02
# How a step is computed, and not what: ranks may choose differently.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))
# Comparisons of changed weights that found nothing, after which changes in place are not counted any more.
_PATIENCE = 3
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_log = logging.getLogger("guozhuang")

_SKIP = (
    "make every step on every rank: let all ranks skip a batch if one does, as by "
    "`if gz.reduce(float(loss.isnan()), 'max'): continue`; what one rank computes alone goes under torch.no_grad(); an "
    "optimizer that decides by the loss of its closure, as LBFGS, needs gz.prepare, which gives it the mean of all ranks"
)
_RATES = "give schedulers the same numbers on every rank, as by scheduler.step(gz.reduce(loss))"
_WEIGHTS = (
    "change weights on every rank alike: load checkpoints everywhere, and step only with gradients that are averaged, not with "
    "those of no_sync; after a join() in which ranks made unlike numbers of steps, which makes weights equal but not "
    "optimizers' states, broadcast optimizer.state_dict() from a rank that made all steps, and load it on every rank"
)


class Alike:
    """Compares the replicas of one model. Every rank must construct it, and call its methods at the same points.

    Args:
        group: the ranks.
        parameters: all parameters of the model; an optimizer that holds any of them is watched.
        count_left_out: returns two numbers of batches that this rank has left out: as far as is certain, and at most.
        warns: whether different rates and weights are told by a warning, once, instead of an error.

    Attributes:
        compares_weights: whether weights are compared. Not where the exchange of gradients leaves them different on purpose.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Iterable[Tensor],
        count_left_out: Callable[[], tuple[int, int]],
        warns: bool = False,
    ) -> None:
        self._count_left_out = count_left_out
        self.group, self._warns = group, warns
        self.compares_weights = True
        self._held = frozenset(map(id, parameters))
        self._names: Sequence[str] = ()
        self._parameters: Sequence[Tensor] = ()
        self._num_steps = 0
        self._now, self._base = (0, 0, 0), (0, 0, 0)  # steps, batches left out for certain, and at most
        self._changes = self._base_changes = 0
        self._is_new = True
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._last_rates: tuple[list[Any], int] = ([], 0)
        self._compares_rates = self._counts_changes = True
        self._num_vain, self._rests_until = 0, 0
        _watch(self)

    def follow(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Compare these parameters from now on; they are the same on all ranks, also in their order."""
        if parameters is not self._parameters:
            self._names, self._parameters = names, parameters
            self._base_changes = self._count_changes()

    def forget(self) -> None:
        """Count anew, after steps in which ranks need not have done the same, so that optimizers may have unlike states."""
        self._is_new = self._warns = True

    def _count_changes(self) -> int:
        counts = self.compares_weights and self._counts_changes
        return sum(map(_version, self._parameters)) if counts else 0

    # ---- methods that make this rank's number ----------------------------------------------------------------------------

    def digest(self, number: int) -> int:
        """Return 32 bits that are the same on all ranks if they have done the same. Not collective.

        Args:
            number: of the pass, or of the step; the same on all ranks.
        """
        self._now, self._changes = (self._num_steps, *self._count_left_out()), self._count_changes()
        if self._is_new:
            self._is_new, self._base, self._base_changes = False, self._now, self._changes
        steps, left_out, _ = map(operator.sub, self._now, self._base)
        told = [number, steps, left_out, self._changes - self._base_changes]
        is_due = self.is_due(number)
        if self._compares_rates and (is_due or len(self._optimizers) <= _NUM_RATES):
            told.append(self._checksum_of_rates())
        if is_due and self.compares_weights and number >= self._rests_until:
            told += self._checksums(number)
        return zlib.crc32(repr(told).encode())

    @staticmethod
    def is_due(number: int) -> bool:
        """Return whether the digest of this pass contains checksums of weights."""
        return number in _EARLY or (number > 0 and number % _EVERY == 0)

    def _checksum_of_rates(self) -> int:
        rates = [list(_values(optimizer)) for optimizer in list(self._optimizers)]
        if rates != self._last_rates[0]:
            # A sum, because optimizers may step for the first time in another order on each rank.
            self._last_rates = rates, sum(zlib.crc32(repr(each).encode()) for each in rates)
        return self._last_rates[1]

    def _checksums(self, number: int) -> list[int]:
        visit, part = divmod(number // _EVERY, _PARTS)
        chosen = self._parameters if number in _EARLY else self._parameters[part::_PARTS]
        return _numbers([_checksum(p, visit) for p in chosen])

    # ---- methods that compare what is told -------------------------------------------------------------------------------

    def compare(self, number: int) -> None:
        """Find out what differs between the ranks, after their digests did. Every rank must call it.

        Raises:
            MismatchError: it names the ranks, and the steps, rates or parameters that differ.
        """
        self._compare_steps(number)
        if self._compares_rates:
            lines = [line for each in list(self._optimizers) for line in _described(each)]
            try:
                what = "the hyper-parameters of their optimizers"
                agree(self.group, what, lines, timeout_s(self.group), _RATES)
            except MismatchError as error:
                self._compares_rates = False
                self._tell(error)
        if self.compares_weights:
            self._compare_weights(number)
        self._base_changes = self._changes

    def _compare_steps(self, number: int) -> None:
        """Compare how many steps the ranks have made; see [Note: forwards without a backward] in awaited.py."""
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        counts = [now - then for now, then in zip(self._now, self._base, strict=True)]
        mine = torch.tensor([*counts, len(self._optimizers)], device=device)
        everyones = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(everyones, mine, group=self.group)
        rows = [tuple(each.tolist()) for each in everyones]
        steps, left_out, unfinished, optimizers = (len(set(column)) > 1 for column in zip(*rows, strict=True))
        if steps or optimizers or (left_out and unfinished):
            what = f"ranks differ in their steps, found in step {number} (counted from 0)"
            heading = ("rank", "optimizer steps made", "batches left out", "optimizers that have stepped")
            table = rank_table(heading, [(rank, *row[:2], row[3]) for rank, row in enumerate(rows)])
            raise MismatchError(f"{explain(what, rank=self.group.rank(), fix=_SKIP)}\n{table}")

    def compare_numbers(self, mine: int, number: int, device: torch.device) -> None:
        """Compare digests by an all-reduce of their own, where they do not travel with gradients. Every rank must call it."""
        both = torch.tensor([mine, ~mine], device=device)
        with waits.inside():
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = both.tolist()
        if highest != ~lowest:
            self.compare(number)

    def _compare_weights(self, number: int) -> None:
        """Compare all weights. Every rank must call it.

        Raises:
            MismatchError: weights differ by more than rounding.
        """
        named = [pair for pair in zip(self._names, self._parameters, strict=True) if pair[1].numel()]
        if not named:
            return
        sums = torch.tensor(_numbers([_checksum(p, None) for _, p in named]), device=named[0][1].device)
        both = torch.stack([sums, ~sums])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        apart = [pair for pair, differs in zip(named, (both[0] != ~both[1]).tolist(), strict=True) if differs]
        if not apart:
            self._num_vain += 1
            self._counts_changes = self._num_vain < _PATIENCE
            return
        for name, parameter in apart:
            offs, norms = self._against_first(parameter)
            if max(offs) > 1:
                rows = [
                    (rank, f"{norm:.9g}", off > 1) for rank, (off, norm) in enumerate(zip(offs, norms, strict=True))
                ]
                table = rank_table(("rank", f"norm of {name}", "differs from rank 0"), rows)
                what = f"the weights of the ranks have gone apart: {len(apart)} parameters differ, the first is {name}"
                self.compares_weights = False
                rank = self.group.rank()
                self._tell(MismatchError(f"{explain(what, rank=rank, fix=_WEIGHTS)}\n{table}"))
                return
        if not self._rests_until:
            _log.info("weights differ between ranks by rounding, as they do on unlike processors")
        self._rests_until = 2 * number + _EVERY * _PARTS
        self._counts_changes = False

    def _against_first(self, parameter: Tensor) -> tuple[list[float], list[float]]:
        """Return by rank how far a parameter is from rank 0's, in units of what rounding explains, and its norm."""
        mine = _plain(parameter)
        first = mine.clone()
        dist.broadcast(first, group=self.group, group_src=0)
        allowed = min(_ROUNDINGS * torch.finfo(mine.dtype).eps, _MOST_ROUNDING) if mine.is_floating_point() else 0.0
        wide, wide_first = mine.double(), first.double()
        equal = (wide == wide_first) | (wide.isnan() & wide_first.isnan())
        off = torch.where(equal, 0.0, (wide - wide_first).abs()).nan_to_num(nan=torch.inf).max()
        scale = wide_first.abs().nan_to_num(nan=0.0, posinf=0.0).max() * allowed
        found = torch.stack([torch.where(off == 0, 0.0, off / scale), wide.norm()]).nan_to_num(posinf=1e300)
        everyones = [torch.empty_like(found) for _ in range(self.group.size())]
        dist.all_gather(everyones, found, group=self.group)
        return [float(each[0]) for each in everyones], [float(each[1]) for each in everyones]

    def _tell(self, error: Exception) -> None:
        if not self._warns:
            raise error
        if self.group.rank() == 0:
            _log.warning("%s\n(said once)", str(error))  # the error itself holds frames, and so the model

    # ---- methods that the hook of optimizers calls -----------------------------------------------------------------------

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of this model."""
        known = self._optimizers.get(optimizer)
        if known is None:
            first = (p for group in optimizer.param_groups for p in group["params"][:1])
            if not any(id(p) in self._held for p in first):
                return False
            known = self._optimizers[optimizer] = True
        return known

    def stepped(self) -> None:
        """Count a step."""
        self._num_steps += 1


_alive: tuple[weakref.ref[Alike], ...] = ()
_lock = threading.Lock()


def _watch(alike: Alike) -> None:
    """Let steps of all optimizers be seen, also of those that nobody has prepared."""
    global _alive
    with _lock:
        # This makes a new tuple, because other threads go through the old one.
        _alive = (*(each for each in _alive if each() is not None), weakref.ref(alike))


@never_compiled
def _after_step(optimizer: Optimizer, *_: object) -> None:
    for each in _alive:
        if (alike := each()) is not None and alike.holds(optimizer):
            alike.stepped()


register_optimizer_step_post_hook(_after_step)


def _values(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the hyper-parameters of an optimizer's groups that can be compared: numbers, words, and tuples of them."""
    for group in optimizer.param_groups:
        for key in optimizer.defaults:
            value = None if key in _HOW else group.get(key)
            if isinstance(value, Tensor):
                value = value.item() if value.numel() == 1 and value.device.type == "cpu" else None
            if isinstance(value, bool | int | float | str | tuple | list):
                yield value


def _described(optimizer: Optimizer) -> Iterable[str]:
    kind = type(getattr(optimizer, "inner", optimizer)).__name__
    for number, group in enumerate(optimizer.param_groups):
        shown = {key: group[key] for key in optimizer.defaults if key in group and key not in _HOW}
        yield f"{kind}, group {number}: " + ", ".join(
            f"{key} {value.item() if isinstance(value, Tensor) and value.numel() == 1 else value}"
            for key, value in shown.items()
            if isinstance(value, bool | int | float | str | tuple | list | Tensor) and value is not False
        )


def _plain(tensor: Tensor) -> Tensor:
    """Return the values as one dimension of real numbers, in the memory of the tensor where it has no gaps."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    has_gaps = tuple(values.stride()) != dense_stride(values)
    return values.reshape(-1) if has_gaps else values.as_strided((values.numel(),), (1,))


def _checksum(parameter: Tensor, visit: int | None) -> Tensor:
    """Return the sum of a parameter's bits as words: of all, or of the window that this visit looks at."""
    values = _plain(parameter)
    if visit is not None and values.numel() > _WINDOW:
        start = visit * _WINDOW % values.numel()
        values = values[start : start + _WINDOW]
    return values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """Return numbers of any devices; each device is waited for once."""
    found: list[int] = [0] * len(sums)
    order = sorted(range(len(sums)), key=lambda i: str(sums[i].device))
    for _, some in itertools.groupby(order, key=lambda i: sums[i].device):
        indices = list(some)
        for i, value in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            found[i] = value
    return found

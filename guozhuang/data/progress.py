"""The position of a training in its epoch. Only this module decides which epoch comes next, and what a saved state holds.

[Note: consumed is a prefix]
In each epoch the samples have one order, which is equal on all ranks. With n ranks, rank r takes the places
``start + r``, ``start + r + n``, ... of this order. When every rank has taken t samples, the ranks together have taken
exactly the first ``n * t`` places after ``start``: the consumed samples are always a prefix of the order. One number is
therefore the whole position, however many ranks took part and however often their number changed within the epoch; after
a resume the ranks share the places after that prefix. This holds for ranks in step, as ranks that exchange gradients are.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

from guozhuang.errors import UsageError, explain


class EpochPass:
    """One run through (the rest of) an epoch. It counts samples only while it is the newest of its ``Progress``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def newest(self) -> bool:
        """Whether no later pass, ``set_epoch`` or ``load_state_dict`` has replaced this pass."""
        return self._progress.newest is self

    def took(self, num_samples: int) -> None:
        """Count ``num_samples`` samples that this rank handed out."""
        if self.newest:
            self._progress.taken += num_samples

    def ran_out(self) -> None:
        """Record that this rank's share is used up and that its iterator ends."""
        if self.newest:
            self._progress.ended = True
            self._progress.resumed = False


class Progress:
    """The current epoch, the start of its pass, and how many samples this rank has handed out since.

    The rules for the epoch of a pass, with or without calls of ``set_epoch``:

    - The first pass is epoch 0. A new pass takes the next epoch if the last one was *full*, that is: it ran out, or it
      handed out as many samples as the smallest share of any rank (so that ranks which stop at the same step agree).
    - A pass that was left earlier is repeated (same epoch, same order, same start), with one warning. Therefore
      ``next(iter(loader))`` on one rank alone does not make that rank's epoch differ from the others'.
    - ``set_epoch(e)``: the next pass is epoch e, from its beginning.
    - A loaded state: the next pass is the rest of its epoch, or the whole next epoch if the state was saved after the
      pass had run out. ``set_epoch`` with the state's own epoch still means that rest (which may be empty), so a
      script may call ``set_epoch`` in its loop without knowing that it resumes; any other epoch is run whole.
      Once the rest has run out, ``set_epoch`` means whole epochs only.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.epoch = 0
        self.start = 0  # samples of the epoch consumed, by all ranks, before this pass
        self.taken = 0  # samples that this rank handed out in this pass
        self.ended = False  # whether the pass ran out of samples
        self.resumed = False  # whether `start` comes from a loaded state, and that epoch's rest has not run out
        self.newest: EpochPass | None = None
        self._warned = False

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass through the current or the next epoch, by the rules of ``Progress``; return its counter.

        Args:
            full_at: samples on one rank with which the last pass counts as full; None: only if it ran out.
        """
        if self.is_full(full_at):
            self.epoch += 1
            self.start = 0
            self.resumed = False
        elif self.taken and not self._warned:
            self._warned = True
            warnings.warn(
                f"Epoch {self.epoch} was left after {self.taken} samples of this rank, and set_epoch was not called: "
                "the same samples come again in the same order. Call set_epoch(epoch) before each epoch to choose.",
                stacklevel=4,
            )
        self._restart()
        self.newest = EpochPass(self)
        return self.newest

    def is_full(self, full_at: int | None) -> bool:
        """Tell whether the pass was full, so that the next one takes the next epoch; ``full_at`` is as for :meth:`begin`."""
        return self.ended or (full_at is not None and self.taken > 0 and self.taken >= full_at)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; see the rules in ``Progress``."""
        epoch = whole_number("epoch", epoch)
        if not (self.resumed and epoch == self.epoch):
            self.start = 0
            self.resumed = False
        self.epoch = epoch
        self._restart()

    def consumed(self) -> int:
        """Return how many samples of the epoch all ranks together have used; after the last step it may exceed the length."""
        return self.start + self.num_replicas * self.taken

    def load(self, epoch: int, consumed: int, finished: bool) -> None:
        """Set the epoch and the position to those of a saved state, from which the next pass continues."""
        self.epoch = epoch
        self.start = consumed
        self._restart()
        self.ended = finished
        self.resumed = True

    def _restart(self) -> None:
        self.taken = 0
        self.ended = False
        self.newest = None


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Return ``value`` as an int; raise ``UsageError``, which names it, if it is no whole number or below ``least``."""
    bound = "" if least is None else f" of at least {least}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            explain(f"`{name}` is not a whole number", value=value, fix=f"pass a whole number{bound}")
        ) from None
    if least is not None and number < least:
        raise UsageError(explain(f"`{name}` is too small", value=value, fix=f"pass a whole number{bound}"))
    return number


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any], rank: int) -> tuple[int, int, bool]:
    """Check that a saved state fits the sampler or stream that loads it, and return the position that it holds.

    Args:
        state: a return value of ``state_dict``.
        mine: the entries of this object that the state must have too, such as ``seed`` and ``length``.
        rank: this rank, for errors.

    Returns:
        The epoch, the number of samples consumed by all ranks together, and whether the pass had run out.

    Raises:
        UsageError: the state is not from ``state_dict``, or belongs to other data or another order.
    """
    if not isinstance(state, Mapping):
        raise UsageError(explain("The state is not a mapping", value=type(state).__name__, rank=rank, fix=_ONE_OF_OURS))
    wanted = {"epoch", "consumed", "finished", *mine}
    if missing := sorted(wanted - state.keys()):
        raise UsageError(explain(f"The state lacks {missing}", value=dict(state), rank=rank, fix=_ONE_OF_OURS))
    if unknown := sorted(map(str, state.keys() - wanted)):
        raise UsageError(explain(f"The state has unknown entries {unknown}", rank=rank, fix=_ONE_OF_OURS))
    for name, value in mine.items():
        if state[name] != value:
            what = f"The state was saved with {name}={state[name]!r}, but here it is {value!r}"
            fix = "resume with the dataset, seed and shuffle of the saved run, or start the epoch anew with set_epoch"
            raise UsageError(explain(what, rank=rank, fix=fix))
    epoch = whole_number("epoch", state["epoch"])
    consumed = whole_number("consumed", state["consumed"], least=0)
    length = mine.get("length")
    if length is not None and consumed > length:
        what = f"The state counts more samples than the dataset has ({length})"
        raise UsageError(explain(what, value=consumed, rank=rank, fix=_ONE_OF_OURS))
    return epoch, consumed, bool(state["finished"])


_ONE_OF_OURS = "load what state_dict() of the same kind of object returned"

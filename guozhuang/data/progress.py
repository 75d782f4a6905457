"""Keeps the position in an epoch. The one place that decides which epoch comes next and what a saved state says.

[Note: consumed is a prefix]
In each epoch the samples stand in one order that every rank knows. With n ranks, rank r takes the places
``start + r``, ``start + r + n``, ... of it. When every rank has taken t samples, the ranks together have taken exactly
the first ``n * t`` places after ``start``: what is consumed is always a prefix of the order. One number therefore says
where an epoch stands, however many ranks took part and however often their number changed within the epoch; the next
ranks share what follows that prefix. It holds for ranks that are in step, as ranks that exchange gradients are.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

from guozhuang.errors import UsageError, explain


class EpochPass:
    """One run through (the rest of) an epoch. It counts only while it is the newest of its ``Progress``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def newest(self) -> bool:
        """Whether no later pass, ``set_epoch`` or ``load_state_dict`` has taken this one's place."""
        return self._progress.newest is self

    def took(self, num_samples: int) -> None:
        """Count samples that this rank handed out."""
        if self.newest:
            self._progress.taken += num_samples

    def ran_out(self) -> None:
        """Note that this rank's share is used up and was asked for more."""
        if self.newest:
            self._progress.ended = True
            self._progress.resumed = False


class Progress:
    """The running epoch, where its pass started, and how many samples this rank has handed out since.

    The rules, for whoever forgets ``set_epoch`` and whoever does not:

    - The first pass is epoch 0. A new pass takes the next epoch if the last one was *full*, that is: it ran out, or it
      handed out as many samples as the smallest share of any rank (so that ranks which stop at the same step agree).
    - A pass that was left earlier is begun again, same epoch, same order, from where it had started; this is warned of
      once. A look at ``next(iter(loader))`` on one rank alone therefore does not set that rank's epoch apart.
    - ``set_epoch(e)``: the next pass is epoch e, from its beginning.
    - A loaded state: the next pass is the rest of its epoch, or the whole next epoch if the state was taken after the
      pass had run out. ``set_epoch`` with the state's own epoch still means that rest (which may be empty), so a
      script may call ``set_epoch`` in its loop without knowing that it resumes; any other epoch is run whole.
      Once the rest has run out, ``set_epoch`` means whole epochs only.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.epoch = 0
        self.start = 0  # samples of the epoch consumed, by all ranks, before this pass
        self.taken = 0  # samples that this rank handed out in this pass
        self.ended = False  # the pass ran out
        self.resumed = False  # `start` comes from a loaded state whose rest has not run out yet
        self.newest: EpochPass | None = None
        self._warned = False

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass.

        Args:
            full_at: samples on one rank with which the last pass counts as full; None: only if it ran out.
        """
        if self.ended or (full_at is not None and self.taken > 0 and self.taken >= full_at):
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

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; see the rules of the class."""
        epoch = whole_number("epoch", epoch)
        if not (self.resumed and epoch == self.epoch):
            self.start = 0
            self.resumed = False
        self.epoch = epoch
        self._restart()

    def consumed(self) -> int:
        """Places of the epoch's order that all ranks together have used; may lie beyond the end in the last step."""
        return self.start + self.num_replicas * self.taken

    def load(self, epoch: int, consumed: int, finished: bool) -> None:
        """Take up a saved position."""
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
    """Return ``value`` as an int, or raise ``UsageError`` naming it."""
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
    """Compare a saved state with the object it is loaded into.

    Args:
        state: what ``state_dict`` returned.
        mine: what must be equal in both, such as ``seed`` and ``length``.
        rank: named in errors.

    Returns:
        epoch, samples consumed by all ranks together, whether the pass had run out.

    Raises:
        UsageError: the state is none of ours, or belongs to other data or another order.
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

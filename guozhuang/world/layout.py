"""How the ranks of a world are laid out: how many share the batch, and how many divide the model, along which axes."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass

from guozhuang.errors import UsageError, explain

#: The axes, outermost first: the ranks of the last one are neighbours, so that they lie on one machine.
AXES = ("pp", "dp", "space", "sequence", "tp")
#: The axes whose ranks each have a gradient of their own for the same weights: gradients are averaged over them.
DATA_AXES = ("dp", "space", "sequence")
#: The axes whose ranks hold one copy of the model together, and work on the same batch.
MODEL_AXES = ("pp", "space", "sequence", "tp")

#: The axis that a strategy fills with all ranks that its layout leaves; every other strategy fills "dp".
OWN_AXIS = {
    "pipeline": "pp",
    "torch-pipeline": "pp",
    "tensor": "tp",
    "torch-tensor": "tp",
    "space": "space",
    "sequence": "sequence",
}
HYBRID = "hybrid"

_FORM = "write sizes as in pp=2,tp=2,dp=auto"


@dataclass(frozen=True)
class Layout:
    """The size of each axis; their product is the number of ranks.

    Attributes:
        pp: how many ranks hold consecutive stages of the model (pipeline).
        dp: how many copies of the model there are; each gets a share of the batch.
        space: how many ranks hold parts of each image.
        sequence: how many ranks hold parts of each sequence.
        tp: how many ranks hold parts of each matrix.
    """

    pp: int = 1
    dp: int = 1
    space: int = 1
    sequence: int = 1
    tp: int = 1

    @staticmethod
    def parse(text: str | None, strategy: str, num_ranks: int) -> Layout:
        """Return the layout that a strategy and the text of ``--layout`` ask for.

        The strategies ``pipeline``, ``tensor``, ``space`` and ``sequence`` put all ranks that the text leaves on their own
        axis, ``hybrid`` needs the size of every axis that is used, and all other strategies put them on ``dp``.

        Args:
            text: sizes by axis, as in ``pp=2,tp=2,dp=auto``; one of them may be ``auto``. None or empty: no axis is named.
            strategy: the name of the strategy.
            num_ranks: the number of ranks in the world.

        Raises:
            UsageError: the text is of another form, or its sizes do not fit the strategy or the number of ranks.
        """
        sizes = sizes_of(text or "")
        own = None if strategy == HYBRID else OWN_AXIS.get(strategy, "dp")
        if own is None and not sizes:
            fix = f"give --layout, or layout= in gz.prepare, sizes of its axes ({', '.join(AXES)}), as in pp=2,dp=auto"
            raise UsageError(explain("strategy hybrid needs a layout", fix=fix))
        others = [axis for axis in sizes if axis not in (own, "dp")]
        if strategy in OWN_AXIS and others:
            fix = f"write --strategy hybrid, or leave {others[0]} out"
            raise UsageError(explain(f"strategy {strategy} divides the model along {own} only", value=text, fix=fix))
        if own is not None and None not in sizes.values():
            sizes.setdefault(own, None)
        known = math.prod(size for size in sizes.values() if size is not None)
        open_axes = [axis for axis, size in sizes.items() if size is None]
        if num_ranks % known or (not open_axes and known != num_ranks):
            raise UsageError(_does_not_fit(sizes, strategy, num_ranks))
        for axis in open_axes:
            sizes[axis] = num_ranks // known
        return Layout(**{axis: size or 1 for axis, size in sizes.items()})

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(asdict(self).values())

    @property
    def model_size(self) -> int:
        """How many ranks hold one copy of the model together."""
        return self.size // self.dp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each axis, outermost axis first."""
        assert 0 <= rank < self.size, f"rank {rank} of {self}"
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return the ranks, rising, whose coordinates differ from those of ``rank`` on some of these axes at most."""
        fixed = {axis: index for axis, index in self.coordinate(rank).items() if axis not in axes}
        choices = [[fixed[axis]] if axis in fixed else range(getattr(self, axis)) for axis in AXES]
        return tuple(self._rank_at(indices) for indices in itertools.product(*choices))

    def _rank_at(self, indices: tuple[int, ...]) -> int:
        rank = 0
        for axis, index in zip(AXES, indices, strict=True):
            rank = rank * getattr(self, axis) + index
        return rank

    def __str__(self) -> str:
        """Return the sizes above 1 as ``--layout`` takes them; ``dp=1`` if there are none."""
        return ",".join(f"{axis}={size}" for axis, size in asdict(self).items() if size > 1) or "dp=1"


def sizes_of(text: str) -> dict[str, int | None]:
    """Return the size of each axis that a text names; None stands for ``auto``.

    Raises:
        UsageError: the text is of another form.
    """
    sizes: dict[str, int | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, is_sized, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UsageError(explain("a layout has no such axis", value=part, fix=f"{_FORM}; axes: {', '.join(AXES)}"))
        if axis in sizes:
            raise UsageError(explain(f"a layout names its axis {axis} twice", value=text, fix="name it once"))
        if not is_sized or not (size == "auto" or (size.isdecimal() and int(size) > 0)):
            what = "the size of a layout's axis is a number of ranks, or auto"
            raise UsageError(explain(what, value=part, fix=_FORM))
        sizes[axis] = None if size == "auto" else int(size)
    if text.strip() and not sizes:
        raise UsageError(explain("a layout names at least one axis", value=text, fix=_FORM))
    if list(sizes.values()).count(None) > 1:
        what = "a layout leaves the size of one axis open at most"
        raise UsageError(explain(what, value=text, fix="write auto once"))
    return sizes


def _does_not_fit(sizes: dict[str, int | None], strategy: str, num_ranks: int) -> str:
    asked = ",".join(f"{axis}={'auto' if size is None else size}" for axis, size in sizes.items())
    known = math.prod(size for size in sizes.values() if size is not None)
    of_strategy = f" of strategy {strategy}" if strategy else ""  # the script may name it
    what = f"the layout{of_strategy} does not fit the world of {num_ranks} ranks"
    if None in sizes.values():
        fix = f"start a multiple of {known} ranks, or name sizes whose product divides {num_ranks}"
    elif num_ranks % known == 0 and "dp" not in sizes:
        fix = f"add dp=auto, or start {known} ranks"
    else:
        fix = f"start {known} ranks, or name sizes whose product is {num_ranks}"
    return explain(what, value=asked, fix=fix)


@dataclass(frozen=True)
class StageTimes:
    """What a stage of a pipeline holds, and how long its rank computes for it; times in seconds.

    Attributes:
        number: the number of the stage.
        rank: the index of its rank along pp.
        first: the name of the first call in it.
        last: the name of the last one.
        predicted_s: what the cut expected of a batch, forward and backward; None where it was made by hand.
        busy_s: how long the rank has computed for the stage: since the first batch, or in a step of a comparison.
        microbatches: into how many a batch is cut, and why, in words.
    """

    number: int
    rank: int
    first: str
    last: str
    predicted_s: float | None
    busy_s: float
    microbatches: str

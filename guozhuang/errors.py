"""The exceptions that users see, and the function that formats all their texts: fault, value, rank, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ABSENT = object()


def explain(what: str, *, value: object = _ABSENT, rank: int | None = None, fix: str = "") -> str:
    """Compose the text of an exception: what was wrong, the value, the rank, and what to do.

    Args:
        what: what was wrong: a sentence without its full stop.
        value: the value that was wrong; shown by ``repr``. Leave it out where there is none.
        rank: the rank that noticed; leave it out where every process would notice the same.
        fix: what to do about it, in the imperative.

    Returns:
        ``[rank 3] what (got 'value'). Fix: what to do.``
    """
    text = f"[rank {rank}] {what}" if rank is not None else what
    if value is not _ABSENT:
        text += f" (got {value!r})"
    text = text.removesuffix(".") + "."
    if fix:
        text += f" Fix: {fix.removesuffix('.')}."
    return text


def rank_table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out a plain-text table with a line per rank, for errors that compare ranks.

    Args:
        heading: the names of the columns.
        rows: one sequence per line, as long as ``heading``; cells are shown by ``str``.
    """
    cells = [[str(c) for c in heading], *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heading))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


class UsageError(ValueError):
    """A value, an option or an environment that cannot work; the text names it and says what to do."""


class MismatchError(ValueError, RuntimeError):
    """Ranks disagree on something that must be equal; raised on every rank, with a table of a line per rank.

    Also a ``RuntimeError``, because that is what ``torch.nn.parallel.DistributedDataParallel`` raises here.
    """


class UnusedParameterError(RuntimeError):
    """A parameter got no gradient in the last backward although none was expected to be unused."""


class WorldError(RuntimeError):
    """Processes could not connect or communicate: a rank was lost, or a wait ran into its time-out."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or is not as it was written; the text names the file."""


class RankFailed(RuntimeError):
    """The function of ``guozhuang.launch`` raised on a rank, or a rank ended before it returned.

    The text has the rank and its traceback; ``__cause__`` is the exception itself, if it could be pickled.

    Attributes:
        rank: the rank; None if it is not known.
    """

    def __init__(self, text: str, *, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class PeerLost(WorldError):
    """Another process of the group ended, or did not respond within the time-out; every rank that waited for it raises this.

    Attributes:
        rank: the lost rank, within the group.
        pid: the lost rank's process id on this node; None if it is not known.
        waiting_in: what this rank was doing when it noticed, e.g. ``"all_reduce of 1024 float32"``.
    """

    def __init__(self, text: str, *, rank: int, pid: int | None, waiting_in: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.pid = pid
        self.waiting_in = waiting_in

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the attributes when the exception is pickled, to be sent to another process."""
        return _peer_lost, (str(self), self.rank, self.pid, self.waiting_in)


def _peer_lost(text: str, rank: int, pid: int | None, waiting_in: str) -> PeerLost:
    return PeerLost(text, rank=rank, pid=pid, waiting_in=waiting_in)

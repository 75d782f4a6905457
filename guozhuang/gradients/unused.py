"""Parameters that got no gradient: agreed on between ranks where that was expected, reported for all ranks where it was not.

Ranks may differ in what they miss. The rank that noticed leaves a notice, so that ranks that see only a broken exchange can
say the cause too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import PeerLost, UnusedParameterError, WorldError, explain, rank_table
from ..groups import StepNotices


class UnusedReport:
    """What the ranks of a group have missed. Every rank must construct it, in the same order as others.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._notices = StepNotices(group, "unused") if self._size > 1 else None

    def error(self, missing: Sequence[str], step: int) -> UnusedParameterError:
        """Leave a notice of what this rank missed in a step and compose the error with the notices of all ranks."""
        found = {self._rank: ", ".join(missing)}
        if self._notices is not None:
            self._notices.leave(step, ", ".join(missing))
            found |= self._notices.read(step, patience_s=2.0)
        return self._compose(found)

    def error_elsewhere(self, step: int) -> UnusedParameterError | None:
        """Compose the error if another rank has left a notice about this rank's step or the one before.

        An older notice was for an error that the program has caught, and says nothing of what goes wrong now.
        """
        if self._notices is None:
            return None
        found = self._notices.read(step, patience_s=0.0) or self._notices.read(step - 1, patience_s=0.0)
        return self._compose(found) if found else None

    def cause_of(self, error: RuntimeError, what: str, step: int) -> RuntimeError:
        """Compose the error for a collective that failed: the unused parameters of another rank, or a rank that is gone.

        Args:
            error: what the collective raised.
            what: names it.
            step: in which it was.
        """
        elsewhere = self.error_elsewhere(step)
        if elsewhere is None and isinstance(error, PeerLost):
            return PeerLost(f"{error} [{what}, step {step}]", rank=error.rank, pid=error.pid, waiting_in=what)
        return elsewhere or WorldError(
            explain(
                f"{what} in step {step} failed: {error}",
                rank=self._rank,
                fix="unless this rank's own error stands above, look at the rank that stopped first; the others only "
                "noticed that it was gone",
            )
        )

    def _compose(self, found: dict[int, str]) -> UnusedParameterError:
        rows = [(rank, found.get(rank, "(none reported)")) for rank in range(self._size)]
        text = explain(
            "parameters got no gradient in the last backward, and finding unused parameters was not asked for",
            rank=self._rank,
            fix="pass find_unused_parameters=True, or make every parameter take part in the loss on every rank",
        )
        return UnusedParameterError(f"{text}\n{rank_table(('rank', 'parameters without a gradient'), rows)}")


class UsedAnywhere:
    """Whether any rank of the group had a gradient, for each parameter: one all-reduce, under way from the start.

    Every rank must construct it at the same point of the pass.

    Args:
        flags: which parameters this rank used; as many on every rank.
        group: the ranks.
        device: where the group communicates.
    """

    def __init__(self, flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> None:
        self._flags = torch.tensor(flags, dtype=torch.int32, device=device)
        self._work = None
        if group.size() > 1:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[bool]:
        """Wait for the other ranks and return the answer, the same on all of them."""
        if self._work is not None:
            self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]

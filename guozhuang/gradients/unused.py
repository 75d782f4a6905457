"""Finds parameters that no rank used, where that is allowed, and composes the error about unused ones where it is not.

Ranks may lack gradients of different parameters. A rank that raises the error first leaves a notice in the store, so that other
ranks, whose exchange only breaks, can name the cause too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import PeerLost, UnusedParameterError, WorldError, explain, rank_table
from ..groups import StepNotices
from ..watch.waits import waits


class UnusedReport:
    """Reports parameters that got no gradient on some rank. Every rank must construct its reports, in the same order.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._notices = StepNotices(group, "unused") if self._size > 1 else None

    def error(self, missing: Sequence[str], indices: Sequence[int], step: int) -> UnusedParameterError:
        """Leave a notice of the parameters that had no gradient here and compose the error from the notices of all ranks."""
        found = {self._rank: ", ".join(missing)}
        if self._notices is not None:
            self._notices.leave(step, ", ".join(missing))
            found |= self._notices.read(step, patience_s=2.0)
        here = f"Parameter indices which did not receive grad for rank {self._rank}: {' '.join(map(str, indices))}"
        here += f"\nParameters which did not receive grad for rank {self._rank}: {', '.join(missing)}"
        return self._compose(found, here)

    def error_elsewhere(self, step: int) -> UnusedParameterError | None:
        """Return the error about unused parameters if another rank's notice concerns this step or the one before; else None.

        An older notice belongs to an error that the program has caught, and does not explain a failure of now.
        """
        if self._notices is None:
            return None
        found = self._notices.read(step, patience_s=0.0) or self._notices.read(step - 1, patience_s=0.0)
        return self._compose(found) if found else None

    def cause_of(self, error: RuntimeError, what: str, step: int) -> RuntimeError:
        """Compose the error for a collective that failed: the unused parameters of another rank, or a rank that is gone.

        Args:
            error: the error that the collective raised.
            what: the collective, in words.
            step: number of the step in which it failed.
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

    def _compose(self, found: dict[int, str], here: str = "") -> UnusedParameterError:
        """Compose the error; trainers and tests look for PyTorch's sentences, which are part of it."""
        rows = [(rank, found.get(rank, "(none reported)")) for rank in range(self._size)]
        text = explain(
            "Expected to have finished reduction in the prior iteration before starting a new one: parameters got no gradient "
            "in the last backward, and finding unused parameters was not asked for",
            rank=self._rank,
            fix="enable it by passing the keyword argument `find_unused_parameters=True`, or make every parameter take part in "
            "the loss on every rank: make sure that all `forward` function outputs participate in calculating loss",
        )
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            text += " For PyTorch's own checks set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
        table = rank_table(("rank", "parameters without a gradient"), rows)
        return UnusedParameterError("\n".join(part for part in (text, here, table) if part))


class UsedAnywhere:
    """Finds out for each parameter how many ranks had a gradient, by an all-reduce that starts with the construction.

    Every rank must construct it at the same point of the pass.

    Args:
        flags: for each parameter whether this rank used it; every rank passes equally many. An int32 tensor is overwritten.
        group: the ranks.
        device: device of the tensor that is reduced; the group must support it.
    """

    def __init__(self, flags: Sequence[bool] | torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
        self._flags = torch.as_tensor(flags, dtype=torch.int32, device=device)
        self._work = None
        if group.size() > 1:
            self._work = dist.all_reduce(self._flags, group=group, async_op=True)

    def counts(self) -> list[int]:
        """Wait for the all-reduce; return for each parameter how many ranks used it, the same on all ranks."""
        if self._work is not None:
            waits.for_work(self._work)
        return [int(count) for count in self._flags.tolist()]

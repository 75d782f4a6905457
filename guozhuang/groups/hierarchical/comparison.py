"""Whether all ranks ask for the same, found out before anything of it crosses the link.

Gloo compares nothing: it mixes up different operations of the same size, and ends the process on different sizes.

[Note: what a comparison costs]
Every call begins with a digest of what it asks for: its name, sizes, dtype, operation and root, in 16 bytes. The digest goes
to the ranks of the lane through gloo, and to the ranks of the node through the group inside it, which is one more
barrier there. The one over the link is only waited for when the call first uses the link itself: it travels while the ranks
of the node combine their values. So a large call does not notice it, and a small one pays part of one message's way.
Comparing in the node as well as along the lane leaves no pair out: whoever differs from another rank differs from one of its
own node, or its node's lanes differ from another node's. Ranks that see no difference learn of it as of any failure.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from guozhuang.errors import MismatchError, explain
from guozhuang.groups.gloo import Crossing

FIX: Final = "let every rank make the same calls in the same order, with the same sizes and dtypes"
_NUM_REMEMBERED = 2  # a rank can be one call ahead of another, not two: every call waits for all digests


class Disagreement(MismatchError):
    """Ranks asked for different things; this one's view of it, without a table.

    Attributes:
        number: of the call, counted from 1.
    """

    def __init__(self, number: int, rank: int) -> None:
        super().__init__(explain("ranks asked for different collectives", rank=rank, fix=FIX))
        self.number = number


class Comparison:
    """Compares what ranks ask for, one call after the other.

    Args:
        rank: for errors.
        inside: the group of this rank's node, of ``num_inside`` ranks; None where it has one rank.
        num_inside: see there.
        lane: gloo among one rank of each node; None where this rank has no part in it.
        num_nodes: how many ranks the lane has.
        wait: waits for a work of the lane, with a limit.
    """

    def __init__(
        self,
        rank: int,
        inside: dist.ProcessGroup | None,
        num_inside: int,
        lane: Crossing | None,
        num_nodes: int,
        wait: Callable[[dist.Work, str], None],
    ) -> None:
        self._rank, self._inside, self._lane, self._wait = rank, inside, lane, wait
        self._of_node, self._of_lane = _rows(num_inside), _rows(num_nodes)
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        self._mine = torch.empty(0)
        self._work: dist.Work | None = None
        self._number = 0
        #: Number and words of the last calls.
        self.asked: deque[tuple[int, str]] = deque(maxlen=_NUM_REMEMBERED)

    def begin(self, what: str, node_first: bool = False) -> None:
        """Say what this rank asks for, and compare with the ranks of the node.

        Args:
            what: the call in words; whatever must be equal must be in it.
            node_first: let the digest cross the link only when all ranks of the node have come.

        Raises:
            Disagreement: ranks of this node differ.
        """
        self._number += 1
        self.asked.append((self._number, what))
        self._mine = torch.frombuffer(bytearray(hashlib.blake2b(what.encode(), digest_size=16).digest()), dtype=_DTYPE)
        if not node_first:
            self._send()
        if self._inside is not None:
            self._inside._allgather_base(self._of_node, self._mine, self._options).wait()
            self._look(self._of_node)
        if node_first:
            self._send()

    def settle(self) -> None:
        """Wait for the digests of the other nodes. Does nothing the second time.

        Raises:
            Disagreement: ranks of the lane differ.
        """
        if self._work is not None:
            work, self._work = self._work, None
            self._wait(work, self.asked[-1][1])
            self._look(self._of_lane)

    def _send(self) -> None:
        if self._lane is not None:
            self._work = self._lane.group._allgather_base(self._of_lane, self._mine, self._options)

    def _look(self, gathered: Tensor) -> None:
        mine = self._mine.tolist()
        if any(row != mine for row in gathered.view(-1, 2).tolist()):
            raise Disagreement(self._number, self._rank)


_DTYPE: Final = torch.int64


def _rows(num_ranks: int) -> Tensor:
    return torch.empty(2 * num_ranks, dtype=_DTYPE)

"""Check that all ranks make the same call, before its data crosses the link.

Gloo checks nothing: it mixes up different operations of the same size, and ends the process if sizes differ.

[Note: what a comparison costs]
Every call begins with a 16-byte digest of its name, sizes, dtype, operation and root. The digest goes to the ranks of the
lane through gloo, and to the ranks of the node through the node's group, which costs one more barrier there. A call waits for
the digests from the lane only when it first uses the link: they travel while the ranks of the node combine their values. So
the cost is hidden in a large call, and is a part of one message's latency in a small one.
Comparing in the node and along the lane covers every pair: a rank that differs from another differs from one of its own
node, or its node's lanes differ from another node's. Ranks that see no difference are notified as of any failure.
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
_NUM_REMEMBERED = 2  # one rank can be one call ahead of another, not two: every call waits for all digests


class Disagreement(MismatchError):
    """Ranks made different calls; this error is one rank's view, without a table.

    Attributes:
        number: which call differed, counted from 1.
    """

    def __init__(self, number: int, rank: int) -> None:
        super().__init__(explain("ranks asked for different collectives", rank=rank, fix=FIX))
        self.number = number


class Comparison:
    """Compares the calls of all ranks, one call after the other.

    Args:
        rank: for errors.
        inside: the group of this rank's node, of ``num_inside`` ranks; None if the node has only this rank.
        num_inside: the number of ranks in ``inside``.
        lane: gloo among one rank of each node; None if this rank is in no lane.
        num_nodes: the number of ranks in ``lane``.
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
        #: Number and words of the last calls, for the table of a mismatch.
        self.asked: deque[tuple[int, str]] = deque(maxlen=_NUM_REMEMBERED)

    def begin(self, what: str, node_first: bool = False) -> None:
        """Begin the comparison of a call, and finish it among the ranks of the node.

        Args:
            what: the call in words; it must contain everything that must be equal on all ranks.
            node_first: send the digest over the link only after all ranks of the node have joined.

        Raises:
            Disagreement: ranks of this node made different calls.
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
        """Wait for the digests of the other nodes, and compare them. A second call does nothing.

        Raises:
            Disagreement: ranks of the lane made different calls.
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

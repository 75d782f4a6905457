"""Flat copies of the weights that a lane (a thread with a group of its own) averages while training continues.

The copies are allocated once. Only one thread accesses them at a time: the lane's while a job is in flight, else the trainer's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from ..errors import WorldError, explain
from ..groups.serial import Lane, SerialWork
from ..groups.subgroups import end_together
from ..watch.waits import waits
from ..weights.flat import FlatWeights, Named, as_real
from .node_groups import NodeGroups
from .numbers import is_finite, some_of

_log = logging.getLogger("guozhuang")


class NotFinite:
    """Logs which weights hold NaN or infinity; it logs again only after all weights were finite in between."""

    def __init__(self) -> None:
        self._said = False

    def look(self, flat: FlatWeights, values: Sequence[Tensor], step: int) -> bool:
        """Return whether all values are finite; log a warning if not.

        Args:
            flat: the layout of the parameters in ``values``.
            values: flat tensors into which ``flat.read`` copied the weights.
            step: the number of the last step; negative if it is not known.
        """
        if all(is_finite(each) for each in values):
            self._said = False
            return True
        if not self._said:
            self._said = True
            found = [name for name, view in flat.by_name(values).items() if not bool(view.isfinite().all())]
            when = f"after step {step} " if step >= 0 else ""
            what = f"{when}the weights of {some_of(found)} hold NaN or infinity; averaging hands them to others"
            fix = "look at the learning rate and at this rank's data"
            _log.warning("%s", explain(what, rank=dist.get_rank(), fix=fix))
        return False


@contextlib.contextmanager
def naming_peers(what: Callable[[], str], group: dist.ProcessGroup, fix: str | None = None) -> Iterator[None]:
    """Turn a RuntimeError of a collective in the ``with`` block into a WorldError that names the other ranks.

    Args:
        what: called after an error; returns a text that says what failed and with which ranks.
        group: the ranks.
        fix: the advice in the error text; None advises to look for a rank that ended or does not make its steps.
    """
    try:
        yield
    except WorldError:
        raise
    except RuntimeError as error:
        fix = fix or "look for the rank that ended first, or that does not make its steps"
        raise WorldError(explain(f"{what()}: {error}", rank=group.rank(), fix=fix)) from error


def others(group: dist.ProcessGroup) -> str:
    """Return the numbers of the other ranks of a group, for error texts."""
    return ", ".join(str(other) for other in range(group.size()) if other != group.rank())


def mean(flats: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average flat tensors over the group, in place, with equal bits on all ranks. Every rank must call.

    Tensors of float16 and bfloat16 are summed in float32: their own sum could overflow, and would round at each addition.

    Raises:
        WorldError: a rank has ended, or did not take part within the group's time-out.
    """
    wide = [each.float() if each.is_floating_point() and each.itemsize < 4 else each for each in flats]
    with naming_peers(lambda: f"averaging weights with the other ranks ({others(group)}) failed", group):
        for each in wide:
            dist.all_reduce(each, group=group)
    for flat, each in zip(flats, wide, strict=True):
        each /= group.size()
        if each is not flat:
            flat.copy_(each)


def swap(messages: Sequence[tuple[int, Tensor, Tensor, int]], group: dist.ProcessGroup, why: str) -> None:
    """Send a tensor to each of some ranks and receive one from each. Each of them must call, with the matching messages.

    Args:
        messages: the rank of a peer, the tensor to send to it, the tensor to receive from it, and a tag for both.
        group: the ranks.
        why: says in an error why the peer was to take part: "a neighbour in the ring".

    Raises:
        WorldError: a peer has ended, or did not take part within the group's time-out; the text names it.
    """
    ops, peers = [], [peer for peer, *_ in messages for _ in range(2)]
    for peer, sent, got, tag in messages:
        ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer, tag=tag))
        ops.append(dist.P2POp(dist.irecv, got, group=group, group_peer=peer, tag=tag))
    works: list[dist.Work] = []
    ended: list[dist.Work] = []

    def failed() -> str:
        # Some backends return one work for all messages; then any of the peers may have failed.
        who = [peers[len(ended)]] if len(works) == len(peers) else dict.fromkeys(peers)
        return f"rank {' or '.join(map(str, who))}, {why}, did not exchange its weights"

    with naming_peers(failed, group, "look for the first error of that rank"):
        works += dist.batch_isend_irecv(ops)
        for work in works:
            waits.for_work(work)
            ended.append(work)


def through_nodes(
    entering: Sequence[Tensor], leaving: Sequence[Tensor], nodes: NodeGroups, act: Callable[[], object]
) -> None:
    """Average flat tensors inside each node, ``act`` on its first rank, and then give all its ranks the result. Collective.

    Args:
        entering: what is averaged, in place.
        leaving: what the ranks of a node get from its first rank, on which ``act`` has set it.
        nodes: the groups of this rank.
        act: called on the first rank of each node.

    Raises:
        WorldError: a rank of this node has ended, or did not take part within the group's time-out.
    """
    mean(entering, nodes.inside)
    if nodes.leads:
        act()
    who = others(nodes.inside)
    with naming_peers(lambda: f"sharing weights with the other ranks of this node ({who}) failed", nodes.inside):
        for each in leaving:
            dist.broadcast(each, group_src=0, group=nodes.inside)


class WeightLane(Lane):
    """A ``Lane`` (a thread with a group of its own) with flat copies of the weights. Every rank must construct it.

    Args:
        parameters: the parameters whose weights are copied.
        group: the ranks; the lane makes another group of the same ranks.
        num_copies: the number of copies, each a list of flat tensors.

    Attributes:
        flat: the layout of the parameters in the flat tensors.
        copies: the copies of the weights.
        not_finite: lets jobs log which weights hold NaN or infinity.
    """

    def __init__(self, parameters: Named, group: dist.ProcessGroup, num_copies: int = 1) -> None:
        super().__init__(group)
        self.flat = FlatWeights(as_real(parameters))
        self.copies = [self.flat.empty() for _ in range(num_copies)]
        self.not_finite = NotFinite()
        self._work: SerialWork | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a job was started and has not been waited for yet."""
        return self._work is not None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the lane's thread, after all kernels that the trainer has launched. No other job may be in flight."""
        assert self._work is None
        self._work = self.run(job, dict.fromkeys(each.device for each in self.copies[0]))

    def has_ended(self) -> bool:
        """Return, without waiting, whether the job in flight has ended, so that :meth:`wait` would not block."""
        return self._work is not None and self._work.is_completed()

    def wait(self) -> None:
        """Wait until the job has ended, and raise its error if it raised one. The group's time-out limits its collectives."""
        assert self._work is not None
        work, self._work = self._work, None
        work.wait()

    def drop(self) -> None:
        """Wait for the job in flight, if there is one, without using its result."""
        if self._work is not None:
            self.wait()

    def end(self, group: dist.ProcessGroup) -> None:
        """Wait for the job in flight, and end the lane's group. Every rank must call; the lane is not used again.

        Args:
            group: the group from which the lane was made.
        """
        self.drop()
        end_together([self.group], group)

    def agree(self) -> None:
        """Wait for the job in flight, then replace the weights by their mean over all ranks. Every rank must call."""
        self.drop()
        copy = self.copies[0]
        self.flat.read(copy)

        def average() -> None:
            self.not_finite.look(self.flat, copy, -1)
            mean(copy, self.group)

        self.start(average)
        self.wait()
        self.flat.write(copy)

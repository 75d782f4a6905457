"""The process group of ranks on several nodes, as torch.distributed calls it: arguments in, works out.

What travels how, with ranks on two nodes or more and at least two on one of them:

- all_reduce, broadcast, reduce, barrier, and, where all nodes have equally many ranks, all_gather and reduce_scatter (lists of
  equal sizes, single, coalesced): inside the node through its own group, between nodes lane by lane. Every byte crosses the
  link once for each node that needs it, not for each rank.
- all_to_all, gather, scatter, monitored_barrier; all_gather and reduce_scatter with unequal nodes or sizes; tensors on other
  devices, sparse ones, bool and int16 reductions: through one gloo group of all ranks.
- send, recv, recv of any source: that gloo group, outside of the order of the collectives.

With one rank per node everything goes through that gloo group. Every call but send, recv and monitored_barrier begins with a
comparison of what the ranks ask for, see the note in ``comparison``. bfloat16 and float16 are summed inside the node as
its group does it (in float32), then rounded; gloo adds the nodes' sums in the dtype itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from guozhuang.groups.hierarchical.calls import Calls, PreparedSteps, collective
from guozhuang.groups.hierarchical.tensors import Flat, listed, words


class HierarchicalGroup(Calls):
    """A process group over several nodes that uses memory inside each of them. Every rank must construct it.

    A rank that is lost raises on every other rank, which then cannot use the group any more: within a second if it died,
    after the time-out if its machine went silent. See the notes in ``failure`` and ``crossing``.

    Args:
        store: of this group alone.
        rank: this process within the group.
        size: how many ranks there are.
        timeout: the limit of each collective.
        identities: one text per rank, equal for ranks of the same node.
        inside: makes the group inside a node, of ranks that share memory, from (store, rank, size, timeout).

    Raises:
        UsageError: not one identity per rank.
        MismatchError: (from collectives, on every rank) ranks asked for different things.
        WorldError: (from collectives) a rank is gone or did not come in time; ``PeerLost`` where it is known which one.
    """

    # ---- in two steps

    @collective(dist.AllreduceOptions)
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedSteps:
        """Combine a tensor of all ranks, in place on every rank."""
        return self._reduction("all_reduce", listed(tensors), opts.reduceOp)

    @collective(dist.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> PreparedSteps:
        """Combine several tensors of all ranks, in place on every rank."""
        return self._reduction("all_reduce", listed(tensors), opts.reduceOp)

    @collective(dist.ReduceOptions)
    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedSteps:
        """Combine a tensor of all ranks into that of rank ``opts.rootRank``; the others' is used up."""
        return self._reduction("reduce", listed(tensors), opts.reduceOp, opts.rootRank)

    @collective(dist.BroadcastOptions)
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedSteps:
        """Copy a tensor of rank ``opts.rootRank`` to all ranks."""
        tensors, writes = listed(tensors), opts.rootRank != self._rank

        def job() -> None:
            for tensor in tensors:
                with Flat(tensor, writes) as flat:
                    self._collectives.broadcast(flat.view(torch.uint8), opts.rootRank)

        what = words("broadcast", tensors, root=opts.rootRank)
        return PreparedSteps(tensors, what, job if self._moves(tensors) else None, writes)

    @collective(AllgatherOptions)
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedSteps:
        """Lay the tensors of all ranks into one, in rank order."""
        return self._gathering([output], [given])

    @collective(AllgatherOptions)
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedSteps:
        """``all_gather_single`` of several pairs."""
        return self._gathering(outputs, inputs)

    @collective(AllgatherOptions)
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> PreparedSteps:
        """Copy the tensor of every rank into a list of tensors, in rank order."""
        return self._gathering_lists(outputs, inputs)

    @collective(AllgatherOptions)
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedSteps:
        """``allgather`` of several tensors; ``outputs`` has a list per rank, each with one tensor per input."""
        if all(len(each) == len(inputs) for each in outputs):
            outputs = [list(each) for each in zip(*outputs, strict=True)]
        return self._gathering_lists(outputs, inputs)

    @collective(dist.ReduceScatterOptions)
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedSteps:
        """Combine the tensors of all ranks, whose r-th part is for rank r."""
        return self._scattering([output], [given], opts.reduceOp)

    @collective(dist.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedSteps:
        """``reduce_scatter_single`` of several pairs."""
        return self._scattering(outputs, inputs, opts.reduceOp)

    @collective(dist.ReduceScatterOptions)
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> PreparedSteps:
        """Combine lists of tensors of all ranks, whose r-th tensor is for rank r."""
        given, pairs = [tensor for each in inputs for tensor in each], list(zip(outputs, inputs, strict=True))
        fits = all(len(each) == self._size and all(t.numel() == output.numel() for t in each) for output, each in pairs)
        fits = fits and self.nodes.is_even and self._reduces([*outputs, *given], opts.reduceOp)

        def job() -> None:
            for output, each in pairs:
                self._reduce_scatter(output, torch.cat([tensor.detach().reshape(-1) for tensor in each]), opts.reduceOp)

        return PreparedSteps(outputs, words("reduce_scatter", given, opts.reduceOp), job if fits else None)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have come."""
        opts = opts if opts is not None else dist.BarrierOptions()
        return self._start(self._collectives.barrier, [], "barrier", opts, node_first=True)

    # ---- through gloo alone

    @collective(dist.GatherOptions)
    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> PreparedSteps:
        """Collect the tensors of all ranks at one."""
        return PreparedSteps(
            [tensor for each in outputs for tensor in each], words("gather", inputs, root=opts.rootRank)
        )

    @collective(dist.ScatterOptions)
    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> PreparedSteps:
        """Hand the tensors of one rank out to all."""
        return PreparedSteps(outputs, words("scatter", outputs, root=opts.rootRank))

    # Sizes may differ, also between two ranks' views of what one gives the other: gloo's to find out.

    @collective(dist.AllToAllOptions)
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> PreparedSteps:
        """Exchange a tensor with every rank."""
        return PreparedSteps(outputs, "all_to_all")

    @collective(dist.AllToAllOptions)
    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> PreparedSteps:
        """Exchange a part of a tensor with every rank."""
        return PreparedSteps([output], "all_to_all")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """A barrier that names the ranks that did not come."""
        self._whole.group.monitored_barrier(*args, **kwargs)

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> dist.Work:
        """Send to a rank."""
        work: dist.Work = self._whole.group.send(tensors, destination, tag)
        return work

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Receive from a rank."""
        work: dist.Work = self._whole.group.recv(tensors, source, tag)
        return work

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive from whoever sends first."""
        work: dist.Work = self._whole.group.recv_anysource(tensors, tag)
        return work

    # ---- how a call is prepared

    def _reduction(self, name: str, tensors: Sequence[Tensor], op: Any, root: int | None = None) -> PreparedSteps:
        def job() -> None:
            for tensor in tensors:
                with Flat(tensor) as flat:
                    if root is None:
                        self._collectives.all_reduce(flat, op)
                    else:
                        self._collectives.reduce(flat, op, root)

        return PreparedSteps(tensors, words(name, tensors, op, root), job if self._reduces(tensors, op) else None)

    def _gathering(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> PreparedSteps:
        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._all_gather(output, given)

        return PreparedSteps(outputs, words("all_gather", inputs), job if self._gathers(outputs, inputs) else None)

    def _gathering_lists(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> PreparedSteps:
        """Prepare an all_gather of each input into the list at its place: in two steps where all in a list are like it."""
        held, num_ranks = [tensor for each in outputs for tensor in each], self._size
        fits = self.nodes.is_even and self._moves([*inputs, *held]) and len(outputs) == len(inputs)
        fits = fits and all(
            len(each) == num_ranks and all(tensor.numel() == given.numel() for tensor in each)
            for each, given in zip(outputs, inputs, strict=True)
        )

        def job() -> None:
            for each, given in zip(outputs, inputs, strict=True):
                gathered = torch.empty((num_ranks, given.numel()), dtype=given.dtype)
                self._all_gather(gathered, given)
                for tensor, row in zip(each, gathered, strict=True):
                    tensor.detach().copy_(row.view(tensor.shape))

        return PreparedSteps(held, words("all_gather", inputs), job if fits else None)

    def _scattering(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any) -> PreparedSteps:
        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, op)

        fits = self._gathers(inputs, outputs) and self._reduces(inputs, op)
        return PreparedSteps(outputs, words("reduce_scatter", inputs, op), job if fits else None)

    def _all_gather(self, output: Tensor, given: Tensor) -> None:
        with Flat(output) as gathered, Flat(given, writes=False) as flat:
            self._collectives.all_gather(gathered.view(torch.uint8), flat.view(torch.uint8))

    def _reduce_scatter(self, output: Tensor, given: Tensor, op: Any) -> None:
        with Flat(output) as scattered, Flat(given, writes=False) as flat:
            self._collectives.reduce_scatter(scattered, flat, op)

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

from guozhuang.groups.hierarchical.calls import Calls
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

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks, in place on every rank."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        tensors = listed(tensors)
        what = words("all_reduce", tensors, opts.reduceOp)
        if not self._reduces(tensors, opts.reduceOp):
            return self._by_gloo(what, tensors, "allreduce", tensors, opts)
        return self._start(lambda: self._all_reduce(tensors, opts.reduceOp), tensors, what, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Combine several tensors of all ranks, in place on every rank."""
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        tensors = listed(tensors)
        what = words("all_reduce", tensors, opts.reduceOp)
        if not self._reduces(tensors, opts.reduceOp):
            return self._by_gloo(what, tensors, "allreduce_coalesced", tensors, opts)
        return self._start(lambda: self._all_reduce(tensors, opts.reduceOp), tensors, what, opts)

    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks into that of rank ``opts.rootRank``; the others' is used up."""
        opts = opts if opts is not None else dist.ReduceOptions()
        tensors = listed(tensors)
        what = words("reduce", tensors, opts.reduceOp, opts.rootRank)
        if not self._reduces(tensors, opts.reduceOp):
            return self._by_gloo(what, tensors, "reduce", tensors, opts)

        def job() -> None:
            for tensor in tensors:
                with Flat(tensor) as flat:
                    self._collectives.reduce(flat, opts.reduceOp, opts.rootRank)

        return self._start(job, tensors, what, opts)

    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Copy a tensor of rank ``opts.rootRank`` to all ranks."""
        opts = opts if opts is not None else dist.BroadcastOptions()
        tensors = listed(tensors)
        what = words("broadcast", tensors, root=opts.rootRank)
        if not self._moves(tensors):
            return self._by_gloo(what, tensors, "broadcast", tensors, opts)

        def job() -> None:
            for tensor in tensors:
                with Flat(tensor) as flat:
                    self._collectives.broadcast(flat.view(torch.uint8), opts.rootRank)

        return self._start(job, tensors, what, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Lay the tensors of all ranks into one, in rank order."""
        opts = opts if opts is not None else AllgatherOptions()
        what = words("all_gather", [given])
        if not self._gathers([output], [given]):
            return self._by_gloo(what, [output], "_allgather_base", output, given, opts)
        return self._start(lambda: self._all_gather(output, given), [output], what, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """``all_gather_single`` of several pairs."""
        opts = opts if opts is not None else AllgatherOptions()
        what = words("all_gather", inputs)
        if not self._gathers(outputs, inputs):
            return self._by_gloo(what, outputs, "allgather_into_tensor_coalesced", outputs, inputs, opts)

        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._all_gather(output, given)

        return self._start(job, outputs, what, opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank into a list of tensors, in rank order."""
        opts = opts if opts is not None else AllgatherOptions()
        held = [tensor for each in outputs for tensor in each]
        if not self._gathers_lists(outputs, inputs):
            return self._by_gloo(words("all_gather", inputs), held, "allgather", outputs, inputs, opts)
        return self._start(lambda: self._lists(outputs, inputs), held, words("all_gather", inputs), opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """``allgather`` of several tensors; ``outputs`` has a list per rank, each with one tensor per input."""
        opts = opts if opts is not None else AllgatherOptions()
        held = [tensor for each in outputs for tensor in each]
        what = words("all_gather", inputs)
        of_inputs = [list(each) for each in zip(*outputs, strict=False)]
        if not (all(len(each) == len(inputs) for each in outputs) and self._gathers_lists(of_inputs, inputs)):
            return self._by_gloo(what, held, "allgather_coalesced", outputs, inputs, opts)
        return self._start(lambda: self._lists(of_inputs, inputs), held, what, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Combine the tensors of all ranks, whose r-th part is for rank r."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """``reduce_scatter_single`` of several pairs."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        what = words("reduce_scatter", inputs, opts.reduceOp)
        if not (self._gathers(inputs, outputs) and self._reduces(inputs, opts.reduceOp)):
            if len(outputs) == 1:
                return self._by_gloo(what, outputs, "_reduce_scatter_base", outputs[0], inputs[0], opts)
            return self._by_gloo(what, outputs, "reduce_scatter_tensor_coalesced", outputs, inputs, opts)

        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, opts.reduceOp)

        return self._start(job, outputs, what, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Combine lists of tensors of all ranks, whose r-th tensor is for rank r."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        given = [tensor for each in inputs for tensor in each]
        what = words("reduce_scatter", given, opts.reduceOp)
        fits = all(len(each) == self.size() and all(t.numel() == output.numel() for t in each)
                   for output, each in zip(outputs, inputs, strict=True))  # fmt: skip
        if not (fits and self.nodes.is_even and self._reduces([*outputs, *given], opts.reduceOp)):
            return self._by_gloo(what, outputs, "reduce_scatter", outputs, inputs, opts)

        def job() -> None:
            for output, each in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, torch.cat([tensor.detach().reshape(-1) for tensor in each]), opts.reduceOp)

        return self._start(job, outputs, what, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have come."""
        opts = opts if opts is not None else dist.BarrierOptions()
        return self._start(self._collectives.barrier, [], "barrier", opts, node_first=True)

    # ---- through gloo alone

    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Collect the tensors of all ranks at one."""
        opts = opts if opts is not None else dist.GatherOptions()
        held = [tensor for each in outputs for tensor in each]
        return self._by_gloo(words("gather", inputs, root=opts.rootRank), held, "gather", outputs, inputs, opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:
        """Hand the tensors of one rank out to all."""
        opts = opts if opts is not None else dist.ScatterOptions()
        return self._by_gloo(words("scatter", outputs, root=opts.rootRank), outputs, "scatter", outputs, inputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Exchange a tensor with every rank."""
        opts = opts if opts is not None else dist.AllToAllOptions()
        # Sizes may differ, also between two ranks' views of what one gives the other: gloo's to find out.
        return self._by_gloo("all_to_all", outputs, "alltoall", outputs, inputs, opts)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Exchange a part of a tensor with every rank."""
        opts = opts if opts is not None else dist.AllToAllOptions()
        splits = list(output_splits), list(input_splits)
        return self._by_gloo("all_to_all", [output], "alltoall_base", output, given, *splits, opts)

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

    # ---- several tensors, one after the other

    def _all_reduce(self, tensors: Sequence[Tensor], op: Any) -> None:
        for tensor in tensors:
            with Flat(tensor) as flat:
                self._collectives.all_reduce(flat, op)

    def _all_gather(self, output: Tensor, given: Tensor) -> None:
        with Flat(output) as gathered, Flat(given) as flat:
            self._collectives.all_gather(gathered.view(torch.uint8), flat.view(torch.uint8))

    def _gathers_lists(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> bool:
        """Whether each list has a tensor for every rank that is like this rank's input, and the nodes allow two steps."""
        held = [tensor for each in outputs for tensor in each]
        return (
            self.nodes.is_even
            and self._moves([*inputs, *held])
            and len(outputs) == len(inputs)
            and all(
                len(each) == self.size() and all(tensor.numel() == given.numel() for tensor in each)
                for each, given in zip(outputs, inputs, strict=True)
            )
        )

    def _lists(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        for each, given in zip(outputs, inputs, strict=True):
            gathered = torch.empty((self.size(), given.numel()), dtype=given.dtype)
            self._all_gather(gathered, given)
            for tensor, row in zip(each, gathered, strict=True):
                tensor.detach().copy_(row.view(tensor.shape))

    def _reduce_scatter(self, output: Tensor, given: Tensor, op: Any) -> None:
        with Flat(output) as scattered, Flat(given) as flat:
            self._collectives.reduce_scatter(scattered, flat, op)

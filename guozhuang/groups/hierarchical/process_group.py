"""The process group of ranks on several nodes, with the methods that torch.distributed calls.

The route of each call, with ranks on two nodes or more and at least two on one of them:

- all_reduce, broadcast, reduce, barrier, and, where all nodes have equally many ranks, all_gather and reduce_scatter (lists of
  equal sizes, single, coalesced): inside the node through its own group, between nodes lane by lane. Every byte crosses the
  link once for each node that needs it, not for each rank.
- all_to_all, gather, scatter, monitored_barrier; all_gather and reduce_scatter with unequal nodes or sizes; tensors on other
  devices, sparse ones, bool and int16 reductions: through one gloo group of all ranks.
- send, recv, recv of any source: that gloo group, outside of the order of the collectives.

With one rank per node everything uses that gloo group. Every call but send, recv and monitored_barrier begins with a
comparison of the ranks' calls, see the note in ``failure``. The node's group sums bfloat16 and float16 in float32 and
rounds the result; gloo then adds the nodes' sums in the dtype itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from guozhuang.groups.hierarchical.calls import Calls
from guozhuang.groups.profiling import recorded
from guozhuang.groups.shared_memory.arguments import Bytes
from guozhuang.groups.verbs import PreparedCall, collective


class HierarchicalGroup(Calls):
    """A process group over several nodes that uses shared memory inside each node. Every rank must construct it.

    When a rank is lost, every other rank raises, and the group cannot be used any more: within a second if the process died,
    after the time-out if its machine went silent. See the notes in ``failure`` and ``gloo``.

    Args:
        store: a store that only this group uses.
        rank: this process within the group.
        size: the number of ranks.
        timeout: the limit of each collective.
        processes: the process of each rank; ranks of one node share memory.

    Raises:
        UsageError: the number of processes is not that of the ranks.
        MismatchError: (from collectives, on every rank) ranks made different calls.
        WorldError: (from collectives) a rank is gone or did not join in time; ``PeerLost`` if that rank is known.
    """

    # ---- These collectives run in two steps, inside the node and between nodes, wherever they can.

    @collective
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Combine a tensor of all ranks, in place on every rank."""
        return self._reduction("all_reduce", listed(tensors), opts.reduceOp)

    @collective
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> PreparedCall:
        """Combine several tensors of all ranks, in place on every rank."""
        return self._reduction("all_reduce", listed(tensors), opts.reduceOp)

    @collective
    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Combine a tensor of all ranks into the tensor of rank ``opts.rootRank``; other ranks' tensors are overwritten."""
        return self._reduction("reduce", listed(tensors), opts.reduceOp, opts.rootRank)

    @collective
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Copy a tensor of rank ``opts.rootRank`` to all ranks."""
        tensors, writes = listed(tensors), opts.rootRank != self._rank

        def job() -> None:
            held = Bytes()
            for tensor in tensors:
                plain = held.target(tensor) if writes else held.plain(tensor)
                self._collectives.broadcast(flat(plain).view(torch.uint8), opts.rootRank)
            held.put_back()

        what = words("broadcast", tensors, root=opts.rootRank)
        return PreparedCall(job if self._moves(tensors) else None, tensors, what, writes)

    @collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Concatenate the tensors of all ranks in rank order."""
        return self._gathering([output], [given])

    @collective
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedCall:
        """Do several ``all_gather_single`` as one call."""
        return self._gathering(outputs, inputs)

    @collective
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> PreparedCall:
        """Copy the tensor of every rank into a list of tensors, in rank order."""
        return self._gathering_lists(outputs, inputs)

    @collective
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedCall:
        """Do several ``allgather`` as one call; ``outputs`` has a list per rank, each with one tensor per input."""
        if all(len(each) == len(inputs) for each in outputs):
            outputs = [list(each) for each in zip(*outputs, strict=True)]
        return self._gathering_lists(outputs, inputs)

    @collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Combine the tensors of all ranks; rank r receives the r-th part."""
        return self._scattering([output], [given], opts.reduceOp)

    @collective
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PreparedCall:
        """Do several ``reduce_scatter_single`` as one call."""
        return self._scattering(outputs, inputs, opts.reduceOp)

    @collective
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> PreparedCall:
        """Combine the lists of tensors of all ranks; rank r receives the r-th tensor."""
        given, pairs = [tensor for each in inputs for tensor in each], list(zip(outputs, inputs, strict=True))
        fits = all(len(each) == self._size and all(t.numel() == output.numel() for t in each) for output, each in pairs)
        fits = fits and self.nodes.is_even and self._reduces([*outputs, *given], opts.reduceOp)

        def job() -> None:
            for output, each in pairs:
                self._reduce_scatter(output, torch.cat([tensor.detach().reshape(-1) for tensor in each]), opts.reduceOp)

        return PreparedCall(job if fits else None, outputs, words("reduce_scatter", given, opts.reduceOp))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return a work that ends when all ranks have joined."""
        opts = opts if opts is not None else dist.BarrierOptions()

        def begin() -> dist.Work:
            return self._start(self._collectives.barrier, [], "barrier", opts, node_first=True)

        return recorded("hierarchical:barrier", [], begin) if profiler._is_profiler_enabled else begin()

    # ---- These calls run through gloo alone.

    @collective
    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> PreparedCall:
        """Copy the tensors of all ranks to the root."""
        taken = [tensor for each in outputs for tensor in each]
        return PreparedCall(None, taken, words("gather", inputs, root=opts.rootRank))

    @collective
    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> PreparedCall:
        """Copy the r-th tensor of the root's list to rank r."""
        return PreparedCall(None, outputs, words("scatter", outputs, root=opts.rootRank))

    # In the next two collectives sizes may differ between ranks; gloo checks that both ends of a pair agree.

    @collective
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> PreparedCall:
        """Send the r-th tensor of this rank's list to rank r, and receive one from every rank."""
        return PreparedCall(None, outputs, "all_to_all")

    @collective
    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> PreparedCall:
        """Send the r-th part of this rank's tensor to rank r, and receive a part from every rank."""
        return PreparedCall(None, [output], "all_to_all")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; the error names the ranks that did not join."""
        self._whole.group.monitored_barrier(*args, **kwargs)

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> dist.Work:
        """Start sending a tensor to a rank, through gloo."""
        work: dist.Work = self._whole.group.send(tensors, destination, tag)
        return work

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Start receiving a tensor from a rank, through gloo."""
        work: dist.Work = self._whole.group.recv(tensors, source, tag)
        return work

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Start receiving a tensor from the first rank that sends one with this tag, through gloo."""
        work: dist.Work = self._whole.group.recv_anysource(tensors, tag)
        return work

    # ---- These methods prepare calls.

    def _reduction(self, name: str, tensors: Sequence[Tensor], op: Any, root: int | None = None) -> PreparedCall:
        def job() -> None:
            held = Bytes()
            for plain in map(held.target, tensors):
                if root is None:
                    self._collectives.all_reduce(flat(plain), op)
                else:
                    self._collectives.reduce(flat(plain), op, root)
            held.put_back()

        return PreparedCall(job if self._reduces(tensors, op) else None, tensors, words(name, tensors, op, root))

    def _gathering(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> PreparedCall:
        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._all_gather(output, given)

        return PreparedCall(job if self._gathers(outputs, inputs) else None, outputs, words("all_gather", inputs))

    def _gathering_lists(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> PreparedCall:
        """Prepare an all_gather of each input into the list of the same index: in two steps if all sizes are equal."""
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

        return PreparedCall(job if fits else None, held, words("all_gather", inputs))

    def _scattering(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any) -> PreparedCall:
        def job() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, op)

        fits = self._gathers(inputs, outputs) and self._reduces(inputs, op)
        return PreparedCall(job if fits else None, outputs, words("reduce_scatter", inputs, op))

    def _all_gather(self, output: Tensor, given: Tensor) -> None:
        held = Bytes()
        gathered, plain = flat(held.target(output)), flat(held.plain(given))
        self._collectives.all_gather(gathered.view(torch.uint8), plain.view(torch.uint8))
        held.put_back()

    def _reduce_scatter(self, output: Tensor, given: Tensor, op: Any) -> None:
        held = Bytes()
        self._collectives.reduce_scatter(flat(held.target(output)), flat(held.plain(given)), op)
        held.put_back()


def flat(plain: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as a 1-d tensor of real numbers in the same memory."""
    plain = plain.detach()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(-1)


def listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Return the tensors of an argument that may be a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def words(collective: str, tensors: Sequence[Tensor], op: Any = None, root: int | None = None) -> str:
    """Describe a call in words, for errors and for the comparison among ranks.

    ``all_reduce of 1024 float32, sum``; of several tensors: ``all_reduce of 2 tensors, float32, sum: 1024 + 10``. Sizes come
    last, because a long text is cut at its end.

    Args:
        collective: the collective's name.
        tensors: the tensors whose sizes and dtypes must be equal on all ranks.
        op: the ReduceOp of a reduction.
        root: the rank that sends or receives.
    """
    text, kinds = collective, [_kind_of(tensor) for tensor in tensors]
    if len(kinds) == 1:
        text += f" of {tensors[0].numel()} {kinds[0]}"
    elif kinds:
        text += f" of {len(kinds)} tensors, {' and '.join(sorted(set(kinds)))}"
    if op is not None:
        text += f", {getattr(op, 'op', op).name.lower()}"
    if root is not None:
        text += f", root {root}"
    if len(kinds) < 2:
        return text
    is_mixed = len(set(kinds)) > 1
    sizes = [f"{t.numel()} {kind}" if is_mixed else str(t.numel()) for t, kind in zip(tensors, kinds, strict=True)]
    return f"{text}: {' + '.join(sizes)}"


def _kind_of(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        kind += " sparse"
    return kind if tensor.is_cpu else f"{kind} on {tensor.device.type}"

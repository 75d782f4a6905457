"""The collectives as torch.distributed calls them, turned into operations on shared memory.

Every method takes the arguments of ``torch.distributed`` (tensors in lists, an options object) and returns a work. Every rank
must call it, in the same order. Tensors that are not on the CPU go to a group for their device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from guozhuang.errors import explain
from guozhuang.groups.gloo import OtherDevices
from guozhuang.world import versions

from ..serial import CallWork
from ..turns import Turns, take_timeout
from ..verbs import PreparedCall, UnsupportedTensor, VerbGroup, check_memory, collective
from . import arguments
from .arguments import Bytes
from .collectives import Combining
from .endpoint import Terms, refuse
from .engine import ONE_SHOT_BYTES, make_repeats
from .operations import Operations, describe

# The collectives whose calls are kept for when they come again, in the order of the kinds in _repeats.c.
_REPEATED: Final = {
    versions.name_of(method): kind
    for kind, method in enumerate(("allreduce", "broadcast", "all_gather_single", "reduce_scatter_single", "barrier"))
}
# How long a wait spins before it sleeps, in microseconds: less on the group's own thread, which runs beside computations.
SYNC_SPIN_US: Final = 50
ASYNC_SPIN_US: Final = 20
CROWDED_SPIN_US: Final = 100  # each look offers the core to the other ranks


def _first_tensor(args: Sequence[Any]) -> Tensor | None:
    """Return the first tensor of a call's arguments, which may be lists of tensors, or lists of such lists."""
    for each in args:
        if isinstance(each, Tensor):
            return each
        if isinstance(each, list | tuple) and (found := _first_tensor(each)) is not None:
            return found
    return None


class CollectiveCalls(VerbGroup):
    """The collectives of a group, as torch.distributed calls them.

    Args:
        rank: this process in the group.
        size: number of ranks.
        turns: runs the calls in order.
        operations: the collectives on shared memory.
        others: groups for tensors on other devices.
        timeout_s: limit of each call whose options have none.
        crowded: whether ranks outnumber cores; then waits offer the core before each look.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        turns: Turns,
        operations: Operations,
        others: OtherDevices,
        timeout_s: float,
        crowded: bool,
    ) -> None:
        super().__init__(rank, size, "shm")
        self._turns, self._operations, self._others, self._timeout_s = turns, operations, others, timeout_s
        self._sync_spin_us, self._async_spin_us = (CROWDED_SPIN_US, 0) if crowded else (SYNC_SPIN_US, ASYNC_SPIN_US)
        self._num_calls = 0
        self._link = operations.link
        self._link.sync_terms = timeout_s, self._sync_spin_us
        self._repeats = make_repeats(rank, size)
        self._done = CallWork()

    # The methods below combine tensors of all ranks.

    @collective
    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Combine a tensor of all ranks, on all ranks; each rank gets the same bits."""
        tensor = tensors[0] if len(tensors) == 1 else arguments.one(tensors, "all_reduce", self._rank)
        return self._sparse(tensor, opts) if tensor.layout != torch.strided else self._reduce(tensor, None, opts)

    @collective
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> PreparedCall:
        """Combine several tensors of all ranks, on all ranks; small tensors are sent together."""
        arguments.check(tensors, "all_reduce", self._rank)
        how = arguments.combining(opts.reduceOp, tensors[0].dtype, self._size, self._rank)
        among = f", of tensors of {[tensor.numel() for tensor in tensors]}".encode()

        def run(terms: Terms) -> None:
            small = [tensor for tensor in tensors if tensor.numel() * tensor.itemsize <= ONE_SHOT_BYTES]
            for tensor in tensors:
                if len(small) < 2 or tensor.numel() * tensor.itemsize > ONE_SHOT_BYTES:
                    self._reduce_now(tensor, how, None, terms, among)
            if len(small) > 1:
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in small])
                self._reduce_now(flat, how, None, terms, among)
                for tensor, part in zip(small, flat.split([tensor.numel() for tensor in small]), strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

        return PreparedCall(run, tensors, "all_reduce of several tensors")

    @collective
    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Combine a tensor of all ranks, on the root; other ranks' tensors stay as they are."""
        tensor = arguments.one(tensors, "reduce", self._rank)
        return self._reduce(tensor, arguments.root(opts.rootRank, self._size, self._rank), opts)

    @collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PreparedCall:
        """Combine the r-th tensor of every rank's list on rank r; sizes may differ within the list."""
        output, given = arguments.one(outputs, "reduce_scatter", self._rank), inputs[0]
        arguments.check_list(output, given, self._size, "reduce_scatter", self._rank)
        how = arguments.combining(opts.reduceOp, output.dtype, self._size, self._rank)

        def run(terms: Terms) -> None:
            held = Bytes()
            pieces = [held.give(tensor) for tensor in given]
            target = arguments.piece(held.target_apart(output, pieces, self._rank))
            self._operations.reduce_scatter(target, pieces, given[0], False, how, terms)
            held.put_back()

        return PreparedCall(run, [output], "reduce_scatter")

    @collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Combine the r-th part of every rank's tensor on rank r."""
        return self._pairs("reduce_scatter", [output], [given], opts, opts.reduceOp)

    @collective
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Do several ``reduce_scatter_single`` as one work."""
        return self._pairs("reduce_scatter", outputs, inputs, opts, opts.reduceOp)

    # The methods below copy tensors between ranks.

    @collective
    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> PreparedCall:
        """Copy the root's tensor to all ranks."""
        tensor = arguments.one(tensors, "broadcast", self._rank)
        arguments.check([tensor], "broadcast", self._rank)
        root = arguments.root(opts.rootRank, self._size, self._rank)

        def run(terms: Terms) -> None:
            held = Bytes()
            plain = held.plain(tensor) if root == self._rank else held.target(tensor)
            self._operations.broadcast(arguments.piece(plain), plain, root, terms)
            held.put_back()

        return PreparedCall(run, [tensor], "broadcast", root != self._rank)

    @collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Copy rank r's tensor to the r-th tensor of the list, on all ranks; sizes may differ among ranks."""
        given, taken = arguments.one(inputs, "all_gather", self._rank), outputs[0]
        arguments.check_list(given, taken, self._size, "all_gather", self._rank)
        return PreparedCall(lambda terms: self._gather_list(taken, given, terms), list(taken), "all_gather")

    @collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Do several ``allgather`` as one work; ``outputs[r][i]`` receives input i of rank r."""
        arguments.expect(outputs, self._size, "all_gather_coalesced", self._rank)
        if any(len(each) != len(inputs) for each in outputs):
            refuse("all_gather_coalesced takes an output for each input", [len(each) for each in outputs], self._rank)
        columns = list(zip(*outputs, strict=True))
        for given, taken in zip(inputs, columns, strict=True):
            arguments.check_list(given, taken, self._size, "all_gather", self._rank)

        def run(terms: Terms) -> None:
            for given, taken in zip(inputs, columns, strict=True):
                self._gather_list(taken, given, terms)

        return PreparedCall(run, [each for row in outputs for each in row], "all_gather of several tensors")

    @collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Copy rank r's tensor to the r-th part of the output, on all ranks."""
        return self._pairs("all_gather", [output], [given], opts)

    @collective
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Do several ``all_gather_single`` as one work."""
        return self._pairs("all_gather", outputs, inputs, opts)

    @collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Copy rank r's tensor to the r-th tensor of the root's list."""
        given, root = arguments.one(inputs, "gather", self._rank), arguments.root(opts.rootRank, self._size, self._rank)
        taken = outputs[0] if root == self._rank else []
        arguments.check_list(given, taken, self._size if root == self._rank else 0, "gather", self._rank)

        def run(terms: Terms) -> None:
            held = Bytes()
            pieces = [held.take(tensor) for tensor in taken]
            plain = held.apart(given, pieces, root if taken else None)
            self._operations.gather(arguments.piece(plain), given, pieces, root, terms)
            held.put_back()

        return PreparedCall(run, list(taken), "gather")

    @collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PreparedCall:
        """Copy the r-th tensor of the root's list to rank r."""
        output = arguments.one(outputs, "scatter", self._rank)
        root = arguments.root(opts.rootRank, self._size, self._rank)
        given = inputs[0] if root == self._rank else []
        arguments.check_list(output, given, self._size if root == self._rank else 0, "scatter", self._rank)

        def run(terms: Terms) -> None:
            held = Bytes()
            pieces = [held.give(tensor) for tensor in given]
            target = held.target_apart(output, pieces, root) if given else held.target(output)
            self._operations.scatter(arguments.piece(target), output, pieces, root, terms)
            held.put_back()

        return PreparedCall(run, [output], "scatter")

    @collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Copy the r-th tensor of every rank's list to rank r; sizes may all differ."""
        arguments.check([*outputs, *inputs], "all_to_all", self._rank)
        for tensors in (outputs, inputs):
            arguments.expect(tensors, self._size, "all_to_all", self._rank)

        def run(terms: Terms) -> None:
            held = Bytes()
            taken = [held.take(tensor) for tensor in outputs]
            sent = [arguments.piece(held.apart(tensor, taken)) for tensor in inputs]
            self._operations.all_to_all(taken, sent, outputs[0].dtype, terms)
            held.put_back()

        return PreparedCall(run, outputs, "all_to_all")

    @collective
    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> PreparedCall:
        """Copy the r-th part of every rank's tensor to rank r; splits are rows of the first dim, no splits mean equal parts."""
        arguments.check([output, given], "all_to_all", self._rank)
        takes = arguments.rows_per_rank(output, output_splits, self._size, self._rank)
        gives = arguments.rows_per_rank(given, input_splits, self._size, self._rank)

        def run(terms: Terms) -> None:
            held, each = Bytes(), given.itemsize
            whole = held.take(output)
            taken = arguments.cut(whole, [num * each for num in takes])
            sent = arguments.cut(arguments.piece(held.apart(given, [whole])), [num * each for num in gives])
            self._operations.all_to_all(taken, sent, given.dtype, terms)
            held.put_back()

        return PreparedCall(run, [output], "all_to_all")

    @collective
    def barrier(self, opts: Any) -> PreparedCall:
        """Wait until all ranks have joined."""
        return PreparedCall(lambda terms: self._operations.barrier(b"barrier", terms), [], "barrier")

    # The methods below prepare and start calls.

    def _elsewhere(self, verb: str, method: str, args: Sequence[Any]) -> Callable[[], dist.Work] | None:
        """Return a function that makes the call on the group for the first tensor's device; None if that is the CPU."""
        first = args[0]
        if type(first) is list and first:
            first = first[0]
        tensor = first if type(first) is Tensor else _first_tensor(args[:-1])  # isinstance is slow on tensors
        if tensor is not None:
            if tensor.is_cpu:
                return None
            device = tensor.device
        elif len(args) > 1:
            refuse(f"{verb} takes tensors", args[0], self._rank)
        elif (device := args[0].device) is None or device.type == "cpu":  # a barrier has no tensors
            return None
        return partial(getattr(self._others.group_on(device), method), *args)

    @override
    def _again(self, method: str, args: tuple[Any, ...]) -> dist.Work | None:
        """Run a synchronous call whose like was called twice before. See [Note: calls that repeat] in _repeats.c.

        All such calls return the same work, which holds no tensors: the caller has them, and to make one costs much beside the
        call itself.
        """
        kind = _REPEATED.get(method)
        if kind is None or (job := self._repeats.find(kind, self._link.turn, args)) is None:
            return None
        self._num_calls += 1  # first, as in ``_begin``: while this rank waits for others, it has started the call
        if self._turns.at_once(job):
            return self._done
        self._num_calls -= 1
        return None

    def _begin(self, call: PreparedCall, method: str, args: Sequence[Any]) -> dist.Work:
        """Run a prepared call in its turn: before this method returns, or later if the options say ``asyncOp``."""
        run, tensors, what, _ = call
        assert run is not None
        opts, link = args[-1], self._link
        timeout_s = take_timeout(opts) or self._timeout_s
        self._num_calls += 1
        if opts.asyncOp:
            return self._turns.later(lambda: link.perform(run, what, (timeout_s, self._async_spin_us)), tensors, what)
        kind = _REPEATED.get(method)

        def job() -> None:
            link.perform(run, what, (timeout_s, self._sync_spin_us))
            if kind is not None and link.single is not None:
                turn = link.turn ^ 1  # that of the operation which has just ended
                self._repeats.put(kind, turn, tuple(args), partial(link.single, turn))

        return self._turns.now(job, tensors, what)

    def _report_refusal(self, verb: str, why: str, options: Any) -> None:
        give_turn = self._turns.later if getattr(options, "asyncOp", False) else self._turns.now
        give_turn(lambda: self._link.refuse(verb, why, (self._timeout_s, self._async_spin_us)), [], verb)

    def _reduce(self, tensor: Tensor, root: int | None, opts: Any) -> PreparedCall:
        how = arguments.combining(opts.reduceOp, tensor.dtype, self._size, self._rank)
        name = "all_reduce" if root is None else "reduce"
        is_plain = type(tensor) is Tensor and arguments.is_plain(tensor)
        if not is_plain:
            check_memory(tensor, name, self._rank)
            is_plain = arguments.is_plain(tensor)
        run = partial(self._operations.reduce if is_plain else self._reduce_now, tensor, how, root)
        return PreparedCall(run, [tensor], name, not is_plain and root in (None, self._rank))

    def _reduce_now(self, tensor: Tensor, how: Combining, root: int | None, terms: Terms, among: bytes = b"") -> None:
        held = Bytes()
        plain = held.target(tensor) if root in (None, self._rank) else held.plain(tensor)
        self._operations.reduce(plain, how, root, terms, among)
        held.put_back()

    def _sparse(self, tensor: Tensor, opts: Any) -> PreparedCall:
        """Sum sparse tensors: every rank gathers the entries of all ranks, and adds them in rank order."""
        if tensor.layout != torch.sparse_coo or opts.reduceOp != dist.ReduceOp.SUM:
            fix = "use a sum of COO tensors, or .to_dense()"
            value = f"{tensor.layout}, {opts.reduceOp.op.name.lower()}"
            text = "all_reduce: this layout and operation do not go together"
            raise UnsupportedTensor(explain(text, value=value, rank=self._rank, fix=fix))
        what = describe("all_reduce", [], tensor.dtype) + f", sparse, shape {tuple(tensor.shape)}".encode()

        def run(terms: Terms) -> None:
            given = tensor.detach().coalesce()
            parts = []
            for part in (given.indices().t().contiguous(), given.values().contiguous()):
                nums = self._operations.counts(what, len(part), terms)
                rows = torch.empty((sum(nums), *part.shape[1:]), dtype=part.dtype)
                pieces = [arguments.piece(each) for each in rows.split(nums)]
                self._operations.all_gather(arguments.piece(part), part, pieces, terms)
                parts.append(rows)
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape).coalesce())

        return PreparedCall(run, [tensor], "all_reduce", writes=False)

    def _pairs(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, reduce_op: Any = None
    ) -> PreparedCall:
        """Prepare an all_gather or a reduce_scatter of each input into the output of the same index."""
        pairs = list(zip(outputs, inputs, strict=True))
        for pair in pairs:
            arguments.check(pair, name, self._rank)
        how = None if reduce_op is None else arguments.combining(reduce_op, outputs[0].dtype, self._size, self._rank)

        def run(terms: Terms) -> None:
            for pair in pairs:
                self._gather_one(*pair, terms) if how is None else self._scatter_one(*pair, how, terms)

        return PreparedCall(run, outputs, name if len(pairs) == 1 else f"{name} of several tensors")

    def _gather_list(self, taken: Sequence[Tensor], given: Tensor, terms: Terms) -> None:
        held = Bytes()
        pieces = [held.take(tensor) for tensor in taken]
        plain = held.apart(given, pieces, self._rank)
        self._operations.all_gather(arguments.piece(plain), plain, pieces, terms)
        held.put_back()

    def _gather_one(self, output: Tensor, given: Tensor, terms: Terms) -> None:
        held = Bytes()
        whole = held.take(output)
        num_bytes, rest = divmod(whole.num_bytes, self._size)
        if rest:
            refuse(f"all_gather: the output does not divide by {self._size} ranks", output.numel(), self._rank)
        pieces = arguments.cut(whole, [num_bytes] * self._size)
        plain = held.apart(given, pieces, self._rank)
        self._operations.all_gather(arguments.piece(plain), plain, pieces, terms)
        held.put_back()

    def _scatter_one(self, output: Tensor, given: Tensor, how: Combining, terms: Terms) -> None:
        held = Bytes()
        plain = held.plain(given)
        num_bytes, rest = divmod(plain.numel() * plain.itemsize, self._size)
        if rest:
            refuse(f"reduce_scatter: the input does not divide by {self._size} ranks", given.numel(), self._rank)
        pieces = arguments.cut(arguments.piece(plain), [num_bytes] * self._size)
        target = arguments.piece(held.target_apart(output, pieces, self._rank))
        self._operations.reduce_scatter(target, pieces, plain, True, how, terms)
        held.put_back()

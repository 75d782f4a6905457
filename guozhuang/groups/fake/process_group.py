"""The process group of a fake world.

[Note: what the others would have sent] Nobody else is there, so every result is what this rank would get if all others had
sent what it has itself: a sum is its own value times the number of ranks, a gather is copies of its own part, a message is the
last one of the same size and dtype that went the other way, or zeros. Values stay finite and shapes are right. In the store
each rank has written what this rank has written: so comparisons between ranks find them equal.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from guozhuang.errors import UsageError, explain
from guozhuang.groups.base import OwnBackend
from guozhuang.groups.serial import NO_LIMIT, CallWork
from guozhuang.groups.verbs import PreparedCall, VerbGroup, collective

from .recorder import Recorder

#: The name that ``torch.distributed.get_backend`` returns for a group of a fake world.
NAME: Final = "guozhuang_fake"
_BESIDE_BYTES: Final = 6 << 20  # threads of gloo with their heaps, and its segments: as measured with 2 and 4 ranks


class FakeWork(CallWork):
    """The work of a recorded call, which has ended; waiting for it is recorded, once.

    Args:
        recorder: records the wait.
        call: the number of the call.
        tensors: the tensors that hold the result.
        is_waited: whether the call itself has waited.
        copies: memory of the call, which is freed with the work.
    """

    def __init__(
        self, recorder: Recorder, call: int, tensors: Sequence[Tensor], is_waited: bool, copies: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(tensors)
        self._recorder, self._call, self._is_waited = recorder, call, is_waited
        self._copies = copies

    @override
    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        self._copies = ()
        if not self._is_waited:
            self._is_waited = True
            self._recorder.wait(self._call)
        return True

    @override
    def get_future(self) -> Future[list[Tensor]]:
        if not self._is_waited:
            self._recorder.take(self._call)
        future: Future[list[Tensor]] = Future()
        future.set_result(list(self._tensors))
        return future


class FakeGroup(VerbGroup, OwnBackend):
    """A group whose collectives are recorded and carry nothing. See [Note: what the others would have sent].

    Args:
        store: a store of the fake world.
        rank: this process in the group.
        ranks: the group's ranks in the world.
        timeout: the group's time-out, which nothing here waits for.
        recorder: records the calls.

    Attributes:
        recorder: as given.
        number: of the group, in the trace.
    """

    _copies = True  # whether the calls make copies, as those of gloo do
    _beside_bytes = _BESIDE_BYTES

    def __init__(
        self, store: dist.Store, rank: int, ranks: tuple[int, ...], timeout: datetime.timedelta, recorder: Recorder
    ) -> None:
        super().__init__(rank, len(ranks), NAME)
        self._store, self._timeout, self.recorder = store, timeout, recorder
        self._ranks, self.number = ranks, recorder.group_number()
        recorder.beside_bytes = max(recorder.beside_bytes, self._beside_bytes if len(ranks) > 1 else 0)
        self._sent: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by the other rank, number of elements and dtype

    @collective
    def allreduce(self, tensors: list[Tensor], opts: Any) -> PreparedCall:
        """Record an all-reduce."""
        return self._reduced(tensors, opts, "all_reduce")

    @collective
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> PreparedCall:
        """Record an all-reduce of several tensors."""
        return self._reduced(tensors, opts, "all_reduce")

    @collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> PreparedCall:
        """Record a reduce."""
        return self._reduced(tensors, opts, "reduce")

    @collective
    def broadcast(self, tensors: list[Tensor], opts: Any) -> PreparedCall:
        """Record a broadcast; every rank keeps what it has."""
        return self._call("broadcast", _bytes(tensors), tensors)

    @collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record an all-gather into lists."""
        return self._call(
            "all_gather",
            _bytes(outputs[0]),
            outputs[0],
            lambda: [_fit(each, inputs[0]) for each in outputs[0]],
            outputs[0],
        )

    @collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record an all-gather of several tensors; ``outputs[r][i]`` is input i of rank r."""
        flat = [tensor for row in outputs for tensor in row]
        pairs = [pair for row in outputs for pair in zip(row, inputs, strict=True)]
        return self._call("all_gather", _bytes(flat), flat, lambda: [_fit(*pair) for pair in pairs])

    @collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Record an all-gather."""
        return self._gathered([output], [given])

    @collective
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record several all-gathers as one."""
        return self._gathered(outputs, inputs)

    @collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PreparedCall:
        """Record a reduce-scatter of lists."""
        mine = inputs[0][self._rank]
        return self._call(
            "reduce_scatter", _bytes(inputs[0]), outputs, lambda: self._sum(outputs[0], mine, opts), inputs[0]
        )

    @collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> PreparedCall:
        """Record a reduce-scatter."""
        return self._scattered([output], [given], opts)

    @collective
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record several reduce-scatters as one."""
        return self._scattered(outputs, inputs, opts)

    @collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record a gather."""
        taken = outputs[0] if outputs else []
        num_bytes = _bytes(inputs) * self._size
        return self._call("gather", num_bytes, taken, lambda: [_fit(each, inputs[0]) for each in taken])

    @collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PreparedCall:
        """Record a scatter; ranks that are not the root get zeros."""
        mine = inputs[0][self._rank] if inputs else outputs[0].new_zeros(())
        return self._call("scatter", _bytes(outputs) * self._size, outputs, lambda: _fit(outputs[0], mine))

    @collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> PreparedCall:
        """Record an all-to-all of lists."""
        mine = inputs[self._rank]
        return self._call("all_to_all", _bytes(inputs), outputs, lambda: [_fit(each, mine) for each in outputs])

    @collective
    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> PreparedCall:
        """Record an all-to-all."""
        takes, gives = (
            tensor.split(list(splits)) if splits else tensor.chunk(self._size) if tensor.numel() else [tensor]
            for tensor, splits in ((output, output_splits), (given, input_splits))
        )
        mine = gives[min(self._rank, len(gives) - 1)]
        return self._call("all_to_all", _bytes([given]), [output], lambda: [_fit(each, mine) for each in takes])

    @collective
    def barrier(self, opts: Any) -> PreparedCall:
        """Record a barrier."""
        return self._call("barrier", 0, [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Record a barrier."""
        self.barrier().wait()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Record a message to another rank of the group."""
        (tensor,) = tensors
        call = self._record("send", _bytes(tensors), (self._ranks[self._rank], self._ranks[dst]))
        self._sent[dst, tensor.numel(), tensor.dtype] = tensor.detach().clone()
        self.recorder.go_on()
        return FakeWork(self.recorder, call, tensors, False)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Record a message from another rank of the group."""
        (tensor,) = tensors
        call = self._record("recv", _bytes(tensors), (self._ranks[src], self._ranks[self._rank]))
        _fit(tensor.detach(), self._sent.get((src, tensor.numel(), tensor.dtype), tensor.new_zeros(())))
        self.recorder.go_on()
        return FakeWork(self.recorder, call, tensors, False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Refuse: the rank that would send is not known."""
        what = "in a fake world no one sends, so a receive from any rank has no sender"
        raise UsageError(explain(what, rank=self._ranks[self._rank], fix="name the rank to receive from"))

    # The methods below record and fill in.

    def _record(self, operation: str, num_bytes: int, ranks: tuple[int, ...], blocking: bool = False) -> int:
        return self.recorder.start(operation, num_bytes, ranks, blocking=blocking, group=self.number)

    def _call(
        self,
        operation: str,
        num_bytes: int,
        tensors: Sequence[Tensor],
        fill: Callable[[], object] = lambda: None,
        copied: Sequence[Tensor] = (),
    ) -> PreparedCall:
        """Return a call; ``copied`` are the tensors of which gloo makes a copy for as long as the call takes."""

        def made(blocking: bool) -> tuple[int, list[Tensor]]:
            call = self.recorder.start(
                operation, num_bytes, self._ranks, blocking=blocking, group=self.number,
                element_bytes=tensors[0].element_size() if tensors else 4,
            )  # fmt: skip
            with torch.no_grad():
                copies = [each.detach().clone() for each in copied if self._copies and each.device.type == "cpu"]
                fill()
            self.recorder.go_on()
            return call, copies

        return PreparedCall(made, tensors, operation)

    @override
    def _begin(self, call: PreparedCall, method: str, args: Sequence[Any]) -> dist.Work:
        assert call.job is not None
        blocking = not args[-1].asyncOp
        number, copies = cast("tuple[int, list[Tensor]]", call.job(blocking))
        return FakeWork(self.recorder, number, call.tensors, blocking, () if blocking else copies)

    @override
    def _report_refusal(self, verb: str, why: str, options: Any) -> None:
        """Do nothing: no peer waits."""

    def _reduced(self, tensors: list[Tensor], opts: Any, operation: str) -> PreparedCall:
        return self._call(
            operation, _bytes(tensors), tensors, lambda: [self._sum(each, each, opts) for each in tensors]
        )

    def _gathered(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> PreparedCall:
        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                for part in output.view(-1).chunk(self._size) if output.numel() else ():
                    _fit(part, given)

        return self._call("all_gather", _bytes(outputs), outputs, fill, outputs)

    def _scattered(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> PreparedCall:
        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                if output.numel():
                    self._sum(output, given.reshape(-1).chunk(self._size)[self._rank], opts)

        return self._call("reduce_scatter", _bytes(inputs), outputs, fill, inputs)

    def _sum(self, into: Tensor, mine: Tensor, opts: Any) -> Tensor:
        """Combine equal tensors of all ranks."""
        into = into.detach() if into is mine else _fit(into, mine)
        kind = opts.reduceOp
        if kind == dist.ReduceOp.SUM and into.dtype is not torch.bool:
            into.mul_(self._size)
        elif kind == dist.ReduceOp.PREMUL_SUM:
            into.mul_(self._size * float(kind.factor))
        return into

    # Properties that torch.distributed reads.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    @override
    def _get_backend(self, device: torch.device | str) -> Any:
        return self

    @override
    def _group_on(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """Do nothing: the group holds nothing."""

    def abort(self) -> None:
        """Do nothing: the group holds nothing."""


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(
        each._nnz() * (each.values().element_size() + 8 * each.sparse_dim())
        if each.is_sparse
        else each.numel() * each.element_size()
        for each in tensors
    )


def _fit(into: Tensor, given: Tensor) -> Tensor:
    """Copy a tensor into another one; of a size that differs, as many elements as fit, and zeros."""
    into, given = into.detach(), given.detach()
    if into.numel() == given.numel():
        return into if into.data_ptr() == given.data_ptr() else into.copy_(given.reshape(into.shape))
    flat = torch.zeros(into.numel(), dtype=into.dtype, device=into.device)
    num = min(into.numel(), given.numel())
    flat[:num] = given.reshape(-1)[:num]
    return into.copy_(flat.view(into.shape))

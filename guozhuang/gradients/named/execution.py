"""Carries out what a round made ready: one batch after the other, in the same order on every rank of the channel.

[Note: in place and packed] Tensors that are reduced together form one flat tensor. Where they lie one after the other in memory
of the channel, on all ranks, that stretch is reduced as it is: no copies (fusion.runs). All others are packed into a buffer
that lasts, and unpacked. A rank that has joined feeds zeros: it knows shapes, dtypes and places from the others' requests, so
it makes the same collectives of the same sizes. Only whether this rank copies is its own affair.

[Note: streams of a channel] On an accelerator a batch runs in a stream of the channel, behind the event that each submission
recorded in the stream of whoever submitted it; what waits on a handle puts the end of the batch before what it launches next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .adaptive import adaptive_sum
from .arithmetic import combine, scale
from .fusion import runs
from .memory import Scratch
from .movements import all_gather, all_to_all, broadcast, reduce_scatter
from .submission import Handle, Kind, Reduction, Submission
from .table import Request, Response


class Entry:
    """What this rank has submitted and what has not ended.

    Attributes:
        request: what other ranks know of it.
        submission: the tensors.
        handle: of the one who waits.
        since: when it was submitted, on the monotonic clock, in seconds.
        ready: on an accelerator: what its tensors are behind.
    """

    __slots__ = ("handle", "ready", "request", "since", "submission")

    def __init__(
        self, request: Request, submission: Submission, handle: Handle, since: float, ready: torch.Event | None
    ) -> None:
        self.request, self.submission, self.handle = request, submission, handle
        self.since, self.ready = since, ready


@dataclass
class Result:
    """What one entry gets.

    Attributes:
        outputs: its tensors.
        received_splits: of an all-to-all.
        launched: on an accelerator: device, and the event after which outputs are there.
    """

    outputs: Sequence[Tensor]
    received_splits: list[int] | None = None
    launched: tuple[torch.device, torch.Event] | None = None


@dataclass
class _Part:
    """One tensor of a batch. A rank that has joined has neither input nor output for it."""

    num_elements: int
    dtype: torch.dtype
    given: Tensor | None
    output: Tensor | None


@dataclass
class _Repeated:
    """What a batch of all-reduces comes to, if it is in place and asked for by the very same submissions again."""

    stretches: list[tuple[Tensor, Sequence[_Part]]]
    results: dict[str, Result]


class Executor:
    """Carries out batches on this rank. One thread uses it.

    Args:
        group: carries the data.
        cpu_group: carries that of tensors on the CPU, where the former does not.
        rank: this process in the channel.
        allocate: makes flat zeros in memory that the group reduces in place.
        averages: kinds of device whose floating-point numbers the group averages by itself.

    Attributes:
        joined_on: the index of the device on which zeros of a rank that has joined are made, if it never had tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup,
        rank: int,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
        averages: frozenset[str],
    ) -> None:
        self._group: Any = group
        self._cpu_group: Any = cpu_group
        self._rank, self._size = rank, group.size()
        self._allocate, self._averages = allocate, averages
        self._buffers: dict[tuple[torch.dtype, torch.device], Scratch] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._device: torch.device | None = None  # where this rank's tensors were
        self.joined_on = 0

    def carry_out(self, batch: Sequence[Response], entries: Mapping[str, Entry]) -> dict[str, Result]:
        """Do a batch; every rank of the channel must call, with the same batch.

        Args:
            batch: from ``fusion.batches``.
            entries: what this rank has pending under the batch's names; nothing where it has joined.
        """
        kind = batch[0].request.device
        if kind == "cpu":
            return self._carry_out(batch, entries, torch.device("cpu"))
        tensors = [tensor for entry in entries.values() for tensor in entry.submission.tensors]
        if tensors:
            self._device = tensors[0].device
        elif self._device is None:
            self._device = torch.device(kind, self.joined_on)
        device = self._device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        with stream:  # see [Note: streams of a channel]
            for entry in entries.values():
                if entry.ready is not None:
                    stream.wait_event(entry.ready)
            results = self._carry_out(batch, entries, device)
            event = stream.record_event()
        for result in results.values():
            result.launched = device, event
        if device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(stream)
        return results

    def close(self) -> None:
        """Let go of groups and memory."""
        self._group = self._cpu_group = None
        self._buffers.clear()

    def _carry_out(
        self, batch: Sequence[Response], entries: Mapping[str, Entry], device: torch.device
    ) -> dict[str, Result]:
        if batch[0].request.kind == Kind.ALLREDUCE:
            return self._all_reduce(batch, entries, device)
        if batch[0].request.kind == Kind.BROADCAST:
            return self._broadcast(batch, entries, device)
        [response] = batch
        if response.request.kind in (Kind.BARRIER, Kind.JOIN):
            return {response.name: Result(())}
        return {response.name: self._move(response, entries[response.name].submission.tensors, device)}

    def _move(self, response: Response, tensors: Sequence[Tensor], device: torch.device) -> Result:
        request, group = response.request, self._group_for(device)
        asked = [response.requests[rank] for rank in range(self._size)]
        if request.kind == Kind.ALLTOALL:
            splits = [each.splits or () for each in asked]
            output, received = all_to_all(tensors[0], splits, self._rank, group)
            return Result([output], received)
        if request.kind == Kind.ALLGATHER:
            rows = [[each.shapes[i][0] for each in asked] for i in range(len(tensors))]
            return Result([all_gather(tensor, of_each, group) for tensor, of_each in zip(tensors, rows, strict=True)])
        assert request.kind == Kind.REDUCESCATTER
        averages = device.type in self._averages
        return Result([reduce_scatter(tensor, request, self._rank, averages, group) for tensor in tensors])

    def _broadcast(
        self, batch: Sequence[Response], entries: Mapping[str, Entry], device: torch.device
    ) -> dict[str, Result]:
        results: dict[str, Result] = {}
        given: list[Tensor] = []
        taken: list[Tensor] = []
        for response in batch:
            submission = entries[response.name].submission
            outputs = _outputs(submission)
            results[response.name] = Result(outputs)
            for pair in _pairs(submission.tensors, outputs):
                given.append(pair[0])
                taken.append(pair[1])
        root = batch[0].request.root
        assert root is not None
        broadcast(given, taken, root, self._rank, self._group_for(device))
        return results

    # Reductions.

    def _all_reduce(
        self, batch: Sequence[Response], entries: Mapping[str, Entry], device: torch.device
    ) -> dict[str, Result]:
        request = batch[0].request
        about = [batch, *[entry.submission.known.token for entry in entries.values()]]
        known = next((entry.submission.known for entry in entries.values()), None)
        repeated: _Repeated | None = None if known is None else known.together.get(about)
        if repeated is not None:
            for flat, of_flat in repeated.stretches:
                self._reduce_flat(flat, of_flat, request)
            return repeated.results
        results: dict[str, Result] = {}
        parts: list[_Part] = []
        is_in_place = len(entries) == len(batch)
        for response in batch:
            request, entry = response.request, entries.get(response.name)
            sizes = zip(map(prod, request.shapes), request.dtypes, strict=True)
            if entry is None:
                parts += [_Part(num, dtype, None, None) for num, dtype in sizes]
                continue
            outputs, given = _outputs(entry.submission), entry.submission.tensors
            results[response.name] = Result(outputs)
            is_in_place = is_in_place and outputs is given
            pairs = _pairs(given, outputs)
            parts += [_Part(num, dtype, *pair) for (num, dtype), pair in zip(sizes, pairs, strict=True)]
        found = runs(batch) if request.reduction != Reduction.ADASUM else None
        if found is not None:
            together = [[parts[i] for i in run.order] for run in found]
        else:
            dtypes = dict.fromkeys(part.dtype for part in parts)
            together = [[part for part in parts if part.dtype == dtype] for dtype in dtypes]
        stretches: list[tuple[Tensor, Sequence[_Part]]] = []
        for each in together:
            of_flat = [part for part in each if part.num_elements]
            stretch = self._reduce(of_flat, request, device)
            if stretch is not None:
                stretches.append((stretch, of_flat))
        if known is not None and is_in_place and len(stretches) == len(together):
            known.together.put(about, _Repeated(stretches, results))
        return results

    def _reduce(self, parts: Sequence[_Part], request: Request, device: torch.device) -> Tensor | None:
        """Reduce tensors of one dtype as one. See [Note: in place and packed]. Returns the memory if it was in place."""
        if not parts:
            return None
        flat = _stretch(parts)
        if flat is not None:
            self._reduce_flat(flat, parts, request)
            return flat
        num_elements = sum(part.num_elements for part in parts)
        flat = self._buffer(num_elements, parts[0].dtype, device)
        pieces = flat.split([part.num_elements for part in parts])
        if all(part.given is not None for part in parts):
            torch.cat([part.given.reshape(-1) for part in parts if part.given is not None], out=flat)
        else:  # this rank has joined, but for what it asked for before
            for part, piece in zip(parts, pieces, strict=True):
                piece.zero_() if part.given is None else piece.copy_(part.given.reshape(-1))
        self._reduce_flat(flat, parts, request)
        taken = [
            (part.output.view(-1), piece) for part, piece in zip(parts, pieces, strict=True) if part.output is not None
        ]
        if taken:
            torch._foreach_copy_([each for each, _ in taken], [piece for _, piece in taken])
        return None

    def _reduce_flat(self, flat: Tensor, parts: Sequence[_Part], request: Request) -> None:
        group = self._group_for(flat.device)
        if request.reduction == Reduction.ADASUM:
            scale(flat, request.prescale)
            adaptive_sum(flat, [part.num_elements for part in parts], group)
            scale(flat, request.postscale)
            return

        def collective(tensor: Tensor, op: Any) -> Tensor:
            if self._size > 1:
                collectives.all_reduce(tensor, op, group)
            return tensor

        combine(flat, request, self._size, flat.device.type in self._averages, collective)

    def _buffer(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._buffers:
            self._buffers[dtype, device] = Scratch(self._allocate)
        return self._buffers[dtype, device].take(num_elements, dtype, device)

    def _group_for(self, device: torch.device) -> Any:
        return self._cpu_group if device.type == "cpu" else self._group


def _outputs(submission: Submission) -> Sequence[Tensor]:
    if submission.outputs is not None:
        return submission.outputs
    return [torch.empty_like(tensor, requires_grad=False) for tensor in submission.tensors]


def _pairs(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Inputs and outputs; the same object where they are the same."""
    written = [_writable(tensor) for tensor in given]
    return list(zip(written, written if outputs is given else map(_writable, outputs), strict=True))


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or the same memory: what was made in ``torch.inference_mode`` can be written only there."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _stretch(parts: Sequence[_Part]) -> Tensor | None:
    """The outputs as one flat tensor, holding the inputs, if they are one; None if they have to be packed."""
    first = parts[0].output
    if first is None:
        return None
    if len(parts) == 1:
        if parts[0].given is not None and parts[0].given is not first:
            first.copy_(parts[0].given)
        return first.detach().view(-1)
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.output is None or part.output is not part.given or part.output.data_ptr() != end:
            return None
        if part.output.untyped_storage().data_ptr() != storage:
            return None
        end += part.num_elements * part.output.itemsize
    num_elements = (end - first.data_ptr()) // first.itemsize
    return first.detach().as_strided((num_elements,), (1,), first.storage_offset())

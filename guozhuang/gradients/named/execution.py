"""Carries out the collectives that a round made ready, batch by batch, in the same order on every rank of the channel.

[Note: in place and packed] Tensors that are reduced together form one flat tensor. A single tensor, and a group whose tensors
lie one after the other in memory, is reduced in place, without copies. Other tensors are packed into a permanent buffer, and
unpacked after the reduction; so a large tensor is reduced alone: to copy it would cost more than another message. A rank that
has joined supplies zeros: it knows shapes and dtypes from other ranks' requests, so it makes the same collectives of the same
sizes. Whether a rank packs or reduces in place may differ between ranks, as it does not change the collective.

[Note: streams of a channel] On an accelerator a batch runs in a stream of the channel, after the event that each submission
recorded in the submitting thread's stream. ``Handle.wait`` makes the waiting thread's stream wait for the end of the batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import same_place
from . import collectives
from .movements import all_gather, all_to_all, broadcast, reduce_scatter
from .reductions import adaptive_sum, combine, scale
from .requests import NamedRequest, Response
from .submission import Handle, Kind, Reduction, Submission

# Larger tensors are sent alone: packing pays only where a message costs more than copying its bytes.
_PACKED_BYTES: Final = {Kind.ALLREDUCE: 1 << 20, Kind.BROADCAST: 256 << 10}
_NUM_TAKEN: Final = 100  # uses of a buffer after which it shrinks if all needed less than half of it


def batches(responses: Sequence[Response], threshold_bytes: int, fuse_groups: bool) -> list[list[Response]]:
    """Divide responses (collectives that are ready) into batches, each carried out at once; alike on every rank.

    Each batch begins with the first remaining response and adds later ones with the same key that fit into the threshold. It
    skips others as long as the bytes of all that were taken or skipped stay within the threshold.

    Args:
        responses: responses without error, in the same order on all ranks.
        threshold_bytes: most bytes of one batch; a larger response is a batch of its own.
        fuse_groups: whether a response of several tensors may share a batch.
    """
    left = deque((response, _key(response, fuse_groups), response.request.num_bytes) for response in responses)
    num_alike = Counter(key for _, key, _ in left)
    found = []
    while left:
        first, key, num_bytes = left.popleft()
        num_alike[key] -= 1
        taken, passed, passed_bytes = [first], [], 0
        looks, num_ahead = key is not None and num_bytes < threshold_bytes, num_alike[key]
        while looks and num_ahead:  # num_ahead: how many responses with this key remain
            other = response, other_key, more = left.popleft()
            num_ahead -= other_key == key
            if other_key == key and num_bytes + more <= threshold_bytes:
                taken.append(response)
                num_alike[key] -= 1
                num_bytes += more
                continue
            passed.append(other)
            passed_bytes += more
            looks = num_bytes + passed_bytes <= threshold_bytes
        found.append(taken)
        left.extendleft(reversed(passed))
    return found


def _key(response: Response, fuse_groups: bool) -> Hashable | None:
    """Return the properties that responses of one batch must share; None for a response that is a batch of its own."""
    request = response.request
    if (len(request.shapes) > 1 and not fuse_groups) or request.num_bytes > _PACKED_BYTES.get(request.kind, -1):
        return None
    if request.kind == Kind.BROADCAST:
        return request.kind, request.device, request.root
    if len(set(request.dtypes)) != 1:
        return None
    return request.dtypes[0], request.device, request.reduction, request.prescale, request.postscale


class Scratch:
    """A buffer for one use at a time. It grows when more is needed, and shrinks when 100 uses needed less than half of it.

    Args:
        allocate: makes flat tensors: ``allocate(num_elements, dtype, device)``.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], Tensor]) -> None:
        self._allocate = allocate
        self._held: Tensor | None = None
        self._most = self._num_taken = 0

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a part of the buffer, uninitialized; the part returned before must not be used any more.

        Dtype and device must be the same in all calls.
        """
        self._most, self._num_taken = max(self._most, num_elements), self._num_taken + 1
        size = 0 if self._held is None else self._held.numel()
        shrinks = self._num_taken >= _NUM_TAKEN and 2 * self._most < size
        if self._held is None or size < num_elements or shrinks:
            self._held = None  # free the old buffer before the new one is allocated
            self._held = self._allocate(self._most if shrinks else num_elements, dtype, device)
        if self._num_taken >= _NUM_TAKEN:
            self._most = self._num_taken = 0
        return self._held[:num_elements]


# One tensor of an all-reduce: its number of elements, the input and the output, which are None on a rank that has joined.
_Part: TypeAlias = tuple[int, Tensor | None, Tensor | None]


class Executor:
    """Carries out batches of collectives on this rank. Only one thread may use it.

    Args:
        group: the group for tensors on accelerators.
        cpu_group: the group for tensors on the CPU; may be the same.
        rank: rank of this process in the channel.
        allocate: allocates flat zeros in memory that the group reduces in place.
        averages: types of device on which the group averages floating-point numbers by itself.

    Attributes:
        joined_on: index of the device on which a rank that has joined makes zeros, if it never submitted tensors on one.
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
        self._device: torch.device | None = None  # accelerator of the tensors that this rank submitted last
        self.joined_on = 0

    def carry_out(self, batch: Sequence[Response], handles: Mapping[str, Handle]) -> None:
        """Carry out a batch and put the results into the handles. Every rank of the channel must call it with the same batch.

        Args:
            batch: one of the lists that ``batches`` returns.
            handles: this rank's handles by name; a rank that has joined lacks them.
        """
        kind = batch[0].request.device
        if kind == "cpu":
            self._carry_out(batch, handles, torch.device("cpu"))
            return
        tensors = [tensor for handle in handles.values() for tensor in handle.submission.tensors]
        if tensors:
            self._device = tensors[0].device
        elif self._device is None:
            self._device = torch.device(kind, self.joined_on)
        device = self._device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        with stream:  # see [Note: streams of a channel]
            for handle in handles.values():
                if handle.ready is not None:
                    stream.wait_event(handle.ready)
            self._carry_out(batch, handles, device)
            event = stream.record_event()
        for handle in handles.values():
            handle.launched = device, event
        if device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(stream)

    def close(self) -> None:
        """Drop the references to groups and memory."""
        self._group = self._cpu_group = None
        self._buffers.clear()

    def _carry_out(self, batch: Sequence[Response], handles: Mapping[str, Handle], device: torch.device) -> None:
        group, request = self._cpu_group if device.type == "cpu" else self._group, batch[0].request
        for handle in handles.values():
            if request.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
                handle.outputs = _outputs(handle.submission)
        if request.kind == Kind.ALLREDUCE:
            self._all_reduce(batch, handles, device, group)
        elif request.kind == Kind.BROADCAST:
            assert request.root is not None
            pairs = [pair for each in batch for pair in _pairs(handles[each.name])]
            given, taken = [tensor for tensor, _ in pairs], [output for _, output in pairs]
            broadcast(given, taken, request.root, self._rank, group)
        elif request.kind not in (Kind.BARRIER, Kind.JOIN):
            self._move(batch[0], handles[batch[0].name], device, group)

    def _move(self, response: Response, handle: Handle, device: torch.device, group: Any) -> None:
        request, tensors = response.request, handle.submission.tensors
        asked = [response.requests[rank] for rank in range(self._size)]
        if request.kind == Kind.ALLTOALL:
            splits = [each.splits or () for each in asked]
            output, handle.received_splits = all_to_all(tensors[0], splits, self._rank, group)
            handle.outputs = [output]
        elif request.kind == Kind.ALLGATHER:
            rows = [[each.shapes[i][0] for each in asked] for i in range(len(tensors))]
            handle.outputs = [all_gather(each, of_each, group) for each, of_each in zip(tensors, rows, strict=True)]
        else:
            averages = device.type in self._averages
            handle.outputs = [reduce_scatter(each, request, self._rank, averages, group) for each in tensors]

    def _all_reduce(
        self, batch: Sequence[Response], handles: Mapping[str, Handle], device: torch.device, group: Any
    ) -> None:
        by_dtype: dict[torch.dtype, list[_Part]] = {}
        for response in batch:
            handle, request = handles.get(response.name), response.request
            pairs = [(None, None)] * len(request.shapes) if handle is None else _pairs(handle)
            for shape, dtype, (given, output) in zip(request.shapes, request.dtypes, pairs, strict=True):
                if num_elements := prod(shape):
                    by_dtype.setdefault(dtype, []).append((num_elements, given, output))
        for dtype, parts in by_dtype.items():
            self._reduce(parts, dtype, batch[0].request, device, group)

    def _reduce(
        self, parts: Sequence[_Part], dtype: torch.dtype, request: NamedRequest, device: torch.device, group: Any
    ) -> None:
        """Reduce tensors of one dtype as one flat tensor. See [Note: in place and packed]."""
        sizes = [num_elements for num_elements, _, _ in parts]
        flat = _stretch(parts)
        if flat is not None:
            self._reduce_flat(flat, sizes, request, group)
            return
        flat = self._buffers.setdefault((dtype, device), Scratch(self._allocate)).take(sum(sizes), dtype, device)
        pieces = flat.split(sizes)
        inputs = [given.reshape(-1) for _, given, _ in parts if given is not None]
        if len(inputs) == len(parts):
            torch.cat(inputs, out=flat)
        else:  # this rank has joined: zeros, except for tensors that it submitted before
            for (_, given, _), piece in zip(parts, pieces, strict=True):
                piece.zero_() if given is None else piece.copy_(given.reshape(-1))
        self._reduce_flat(flat, sizes, request, group)
        outputs = {i: output.view(-1) for i, (_, _, output) in enumerate(parts) if output is not None}
        if outputs:
            torch._foreach_copy_(list(outputs.values()), [pieces[i] for i in outputs])

    def _reduce_flat(self, flat: Tensor, sizes: Sequence[int], request: NamedRequest, group: Any) -> None:
        if request.reduction == Reduction.ADASUM:
            scale(flat, request.prescale)
            adaptive_sum(flat, sizes, group)
            scale(flat, request.postscale)
            return

        def collective(tensor: Tensor, op: Any) -> Tensor:
            if self._size > 1:
                collectives.all_reduce(tensor, op, group)
            return tensor

        combine(flat, request, self._size, flat.device.type in self._averages, collective)


def _outputs(submission: Submission) -> Sequence[Tensor]:
    if submission.outputs is not None:
        return submission.outputs
    return [torch.empty_like(tensor, requires_grad=False) for tensor in submission.tensors]


def _pairs(handle: Handle) -> list[tuple[Tensor, Tensor]]:
    """Return the input and the output of each tensor; both are one object if the collective works in place."""
    given = handle.submission.tensors
    written = [_writable(tensor) for tensor in given]
    return list(zip(written, written if handle.outputs is given else map(_writable, handle.outputs), strict=True))


def _writable(tensor: Tensor) -> Tensor:
    """Return the tensor; if it was made in ``torch.inference_mode``, and so is read-only here, a writable one on its memory."""
    return same_place(tensor) if tensor.is_inference() else tensor


def _stretch(parts: Sequence[_Part]) -> Tensor | None:
    """Return the outputs, filled with the inputs, as one flat tensor; None if they are not contiguous and must be packed."""
    _, given, first = parts[0]
    if first is None:
        return None
    if len(parts) == 1:
        if given is not None and given is not first:
            first.copy_(given)
        return first.detach().view(-1)
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for num_elements, given, output in parts:
        if output is None or output is not given or output.data_ptr() != end:
            return None
        if output.untyped_storage().data_ptr() != storage:
            return None
        end += num_elements * output.itemsize
    return first.detach().as_strided(((end - first.data_ptr()) // first.itemsize,), (1,), first.storage_offset())

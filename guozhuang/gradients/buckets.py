"""Groups parameters into buckets by their sizes, and makes each bucket's flat tensor with its views. No communication.

The layout follows PyTorch's DDP (Li et al., 2020, https://arxiv.org/abs/2006.15704): parameters in the order in which their
gradients become ready, a small first bucket so that communication starts early, then buckets up to a cap. A bucket is larger
than its cap only if it is a single parameter that is larger.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

FIRST_CAP_BYTES = 1 << 20
DEFAULT_CAP_BYTES = 25 << 20  # chosen by benchmarks/bucket_cap.py; its table stands in benchmarks/README.md

Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]
"""``allocate(num_elements, dtype, device)`` returns a 1-dimensional tensor of zeros."""


def in_process_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in ordinary memory, by ``torch.zeros``."""
    return torch.zeros(num_elements, dtype=dtype, device=device)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients: the parameter's own, unless the program has set its ``grad_dtype``."""
    return parameter.grad_dtype or parameter.dtype


NUM_MARKS = 8  # elements behind the gradients of one bucket, in which ranks tell each other a number of so many bits


@dataclass(frozen=True, slots=True)
class Slot:
    """The properties of one parameter that decide its bucket. A sparse gradient fits no flat tensor and is exchanged alone."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the dense gradient in bytes."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Caps:
    """Upper bounds of the buckets' sizes in bytes, in the order of the buckets; all further buckets have the last bound."""

    each: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.each and all(cap > 0 for cap in self.each), f"bucket caps must be positive: {self.each}"

    def of(self, position: int) -> int:
        """Return the cap of the ``position``-th bucket in bytes."""
        return self.each[min(position, len(self.each) - 1)]

    @classmethod
    def usual(cls, cap_bytes: int = DEFAULT_CAP_BYTES) -> Caps:
        """Return caps of at most 1 MiB for the first bucket and ``cap_bytes`` for each further one."""
        return cls((min(FIRST_CAP_BYTES, cap_bytes), cap_bytes))


def assign(slots: Sequence[Slot], order: Iterable[int], caps: Caps) -> list[tuple[int, ...]]:
    """Group parameters into buckets.

    Args:
        slots: the properties of every parameter, by index.
        order: the indices in the order in which gradients are expected; each index once.
        caps: bounds of the buckets' sizes; the buckets of each (dtype, device) are counted separately.

    Returns:
        Buckets as tuples of parameter indices, in the order in which they are expected to fill up. All parameters of a
        bucket share dtype and device; a sparse one is alone.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed_of: dict[tuple[torch.dtype, torch.device], int] = {}
    finished: list[tuple[int, tuple[int, ...]]] = []  # (position in ``order`` of the last parameter, the bucket)
    position_of: dict[int, int] = {}

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        bucket = open_buckets.pop(key)
        finished.append((position_of[bucket[-1]], tuple(bucket)))
        sizes[key] = 0
        closed_of[key] = closed_of.get(key, 0) + 1

    for position, index in enumerate(order):
        assert index not in position_of, f"parameter {index} stands in the order twice"
        position_of[index] = position
        slot = slots[index]
        if slot.sparse:
            finished.append((position, (index,)))
            continue
        key = (slot.dtype, slot.device)
        if key in open_buckets and sizes[key] + slot.num_bytes > caps.of(closed_of.get(key, 0)):
            close(key)
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + slot.num_bytes
    for key in list(open_buckets):
        close(key)
    assert len(position_of) == len(slots), f"the order names {len(position_of)} of {len(slots)} parameters"
    return [bucket for _, bucket in sorted(finished)]


class Bucket:
    """One flat tensor, and the parameters whose gradients are views into it.

    Attributes:
        index: place in the order of exchanges.
        is_last: whether it is the last bucket of the layout.
        names: names of the parameters, in the order of their views.
        parameters: the parameters themselves.
        flat: 1-dimensional, of the gradients' dtype and device; empty for a sparse bucket. It may be replaced between steps, so
            read this attribute each time.
        marks: the elements behind ``flat`` in which a number travels with the gradients; None: there are none.
        sent: what travels now: ``flat``, or ``flat`` and ``marks``, as :meth:`mark` and :meth:`unmark` say.
        offsets: for each parameter the element of ``flat`` at which its view begins; there may be padding between them.
        views: one tensor per parameter, of its shape and memory format, sharing memory with ``flat``; none if sparse.
        sparse: whether the bucket is a single parameter with sparse gradients.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        sparse: bool = False,
        allocate: Allocate = in_process_memory,
        offsets: Sequence[int] | None = None,
        num_elements: int | None = None,
        has_marks: bool = False,
    ) -> None:
        assert parameters and (not sparse or len(parameters) == 1)
        self.index = index
        self.is_last = is_last
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.sparse = sparse
        self._allocate, self._num_marks = allocate, NUM_MARKS if has_marks else 0
        self._is_marked = False
        sizes = [0 if sparse else p.numel() for p in parameters]
        self.offsets = list(itertools.accumulate(sizes[:-1], initial=0)) if offsets is None else offsets
        self._num_elements = sum(sizes) if num_elements is None else num_elements
        self.renew()

    def renew(self) -> None:
        """Replace ``flat`` and the views by new memory of zeros; a program that holds an old view keeps the old memory."""
        first = self.parameters[0]
        self._whole = self._allocate(self._num_elements + self._num_marks, gradient_dtype(first), first.device)
        self.flat, self.marks = self._whole, None
        if self._num_marks:
            storage, start = self._whole.untyped_storage(), self._whole.storage_offset()
            self.flat = self._whole.new_empty(0).set_(storage, start, (self._num_elements,), (1,))
            self.marks = self._whole.new_empty(0).set_(storage, start + self._num_elements, (self._num_marks,), (1,))
        dense = () if self.sparse else self.parameters
        self.views = [view_in(self.flat, at, p) for at, p in zip(self.offsets, dense, strict=False)]

    @property
    def sent(self) -> Tensor:
        """What an exchange sends that knows of marks."""
        return self._whole if self._is_marked else self.flat

    def mark(self, number: int) -> None:
        """Let a number of :data:`NUM_MARKS` bits travel with the gradients; then :meth:`unmark` reads what has come."""
        assert self.marks is not None
        self._is_marked = True
        self.marks.copy_(_bits()[number])

    def unmark(self, size: int) -> bool:
        """Let the gradients travel alone; return whether the marks hold the sum of equal numbers of ``size`` ranks."""
        assert self.marks is not None
        self._is_marked = False
        return all(value in (0, size) for value in self.marks.tolist())

    @property
    def can_be_freed(self) -> bool:
        """False once a program has seen the memory through numpy: PyTorch frees no such storage. :meth:`renew` helps."""
        return self.flat.untyped_storage().resizable()

    def free(self) -> None:
        """Give the memory of ``flat`` and the views back until :meth:`hold`; it must be memory of :func:`in_process_memory`."""
        self.flat.untyped_storage().resize_(0)

    def hold(self) -> None:
        """Give ``flat`` and the views memory again if they have none; its values are arbitrary then."""
        storage = self.flat.untyped_storage()
        num_bytes = self._whole.numel() * self._whole.element_size()
        if storage.nbytes() < num_bytes:
            storage.resize_(num_bytes)

    def zero(self) -> None:
        """Set the whole bucket to zero."""
        self.hold()
        self.flat.zero_()

    @property
    def num_bytes(self) -> int:
        """Size of ``flat`` in bytes."""
        return self.flat.numel() * self.flat.element_size()


@dataclass(frozen=True, slots=True)
class Placement:
    """The buckets that were allocated for a layout, and for each parameter the index of its bucket."""

    layout: list[tuple[int, ...]]
    buckets: list[Bucket]
    bucket_of: list[int]

    @property
    def dense(self) -> list[Bucket]:
        """The buckets that have a flat tensor: all but the sparse ones."""
        return [bucket for bucket in self.buckets if not bucket.sparse]


def place(
    layout: Sequence[tuple[int, ...]],
    names: Sequence[str],
    parameters: Sequence[Tensor],
    slots: Sequence[Slot],
    allocate: Allocate = in_process_memory,
) -> Placement:
    """Allocate the flat tensors of a layout that :func:`assign` made."""
    buckets: list[Bucket] = []
    bucket_of = [0] * len(parameters)
    for b, members in enumerate(layout):
        members_names, members_parameters = [names[i] for i in members], [parameters[i] for i in members]
        sparse = slots[members[0]].sparse
        is_first = not sparse and all(bucket.sparse for bucket in buckets)
        is_last = b == len(layout) - 1
        buckets.append(Bucket(b, is_last, members_names, members_parameters, sparse, allocate, has_marks=is_first))
        for i in members:
            bucket_of[i] = b
    return Placement(list(layout), buckets, bucket_of)


@functools.cache
def _bits() -> Tensor:
    """Return a table of 0 and 1: in each row the bits of its number."""
    return torch.tensor([[number >> bit & 1 for bit in range(NUM_MARKS)] for number in range(1 << NUM_MARKS)])


def view_in(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a tensor in ``flat``'s memory from ``offset`` (elements) on, with the shape and :func:`dense_stride` of ``like``.

    The tensor is made by ``set_``, not by slicing, so that autograd does not take it for a view: then in-place calls work that
    autograd refuses on views (``p.grad.detach_()`` in older training scripts), and it has a version counter of its own.
    """
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    start = flat.storage_offset() + offset
    return empty.set_(flat.untyped_storage(), start, like.shape, dense_stride(like))


def same_place(tensor: Tensor) -> Tensor:
    """Return a second tensor over the memory of ``tensor``, without its graph; autograd does not take it for a view."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that the tensor's elements have in the flat memory of a bucket.

    These are the tensor's own strides if it has no gaps (row-major or channels_last), else those of a row-major tensor.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return _row_major(tensor.shape)
            expected *= size
    return tuple(tensor.stride())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

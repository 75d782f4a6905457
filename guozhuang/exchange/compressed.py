"""Mean of the gradients in a lossy code: each rank averages one part of the bucket; gradients and means are both sent coded.

Formula, with n ranks, a code C with decoder D, and the bucket cut into n rows x_1 ... x_n of equal length (the last padded):
rank r sends C(x_i + e_i) to rank i for all i, and keeps e_i <- x_i + e_i - D(C(x_i + e_i)) with error feedback, else e = 0.
Rank i computes m_i, the mean of the rows it got, and sends C(m_i + s_i) to all, with a feedback s_i of its own. All ranks
decode the same bytes, so they get equal bits.
Error: that of the code, twice. Without feedback a biased code's errors add up over steps; with feedback the sum of the results
of all steps differs from the exact sum only by the final feedback. If feedback overflows, because gradients are finite but
huge, it is set to zero for that rank's rows, and the result of the step is NaN.
Source: the two-way scheme of BytePS (Jiang et al. 2020, OSDI) and of Bagua's ByteGrad (Gan et al. 2021, arXiv:2107.01499);
error feedback as in Karimireddy et al. 2019, arXiv:1901.09847.

[Note: momentum correction] With momentum mu each rank sends u <- mu u + g in place of its gradient g (with Nesterov's,
g + mu u), and the optimizer uses no momentum. Momentum in the optimizer would see a gradient only when it arrives: an element
that stayed in the feedback for a hundred steps would start its momentum a hundred steps late. Masking (only for codes that send
few elements): u <- 0 for an element that was sent, so that old momentum does not move it further in an outdated direction.
Source: Lin et al. 2018, arXiv:1712.01887 (masked); BytePS (Nesterov's, not masked).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.serial import Lane
from ..world import versions
from .base import Done, GradientExchange, Work
from .codecs.base import Codec
from .codecs.topk import Sparsifier
from .numbers import check_floating_point, is_finite, num_numbers, numbers, some_of, warn_unless_finite

_NUM_LANES = 2  # background threads with a group each: one computes while the other sends
# A header of two float32 precedes each row's code: the first is NaN if the row is not finite and so was not coded, else 0.0;
# the second is 1.0 if the rank has nothing to add to the mean, else 0.0.
_HEADER_BYTES = 8
_log = logging.getLogger("guozhuang")


class AroundCode(Protocol):
    """An object that changes a bucket's values before coding and after decoding; called in a background thread."""

    def enter(self, values: Tensor) -> bool:
        """Change this rank's gradients in place, before they are coded.

        Args:
            values: 1-dimensional, float32, finite.

        Returns:
            False if this rank has nothing to add; then its values are not coded, and its feedback stays unchanged.
        """
        ...

    def leave(self, values: Tensor, share: float) -> None:
        """Change the decoded mean in place. It has equal bits on all ranks before this call, and should have them after it.

        Args:
            values: as in ``enter``: the sum over the ranks that added something, divided by the number of all ranks. NaN in
                rows in which a rank had NaN or infinity.
            share: the share of ranks that added something, from 0 to 1.
        """
        ...


class Residuals:
    """Errors of a lossy code, or momentum: one float32 per element of the buckets, in rows of equal length for all ranks.

    They can be read and loaded by parameter, so that they survive a change of the bucket layout.

    Args:
        buckets: the layout.
        group: the ranks.
        owned: True if this rank keeps only the row of each bucket that it averages; False if it keeps all rows.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, owned: bool) -> None:
        self._group, self._owned = group, owned
        self._spans: dict[str, tuple[int, int, int]] = {}
        self._kept: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}
        self._first: dict[int, int] = {}  # by bucket index, the position in the bucket of the first kept element
        size = group.size()
        for bucket in buckets:
            length = -(-num_numbers(bucket) // size)
            self._kept[bucket.index] = torch.zeros(1 if owned else size, length, device=bucket.flat.device)
            begin = 0
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                count = parameter.numel() * (2 if parameter.is_complex() else 1)
                self._spans[name] = (bucket.index, begin, begin + count)
                begin += count
            self._first[bucket.index] = first = group.rank() * length if owned else 0
            self._padding[bucket.index] = self._kept[bucket.index].view(-1)[max(0, num_numbers(bucket) - first) :]

    def clear_padding(self, index: int) -> None:
        """Zero the errors of the padding, which belongs to no parameter and so would not be in a checkpoint."""
        self._padding[index].zero_()

    def rows(self, index: int) -> Tensor:
        """Return a bucket's rows of errors, to be changed in place: (ranks, row length), or (1, row length) if ``owned``.

        A caller that writes to them must call :meth:`clear_padding` afterwards.
        """
        return self._kept[index]

    def forget_not_finite(self, index: int) -> list[str]:
        """Zero the rows of a bucket that hold NaN or infinity; return the names of the parameters with such elements."""
        kept = self._kept[index]
        if is_finite(kept):
            return []
        broken, first = ~kept.isfinite(), self._first[index]
        places = broken.view(-1)
        names = [
            name
            for name, (of, begin, end) in self._spans.items()
            if of == index and bool(places[max(0, begin - first) : max(0, end - first)].any())
        ]
        kept[broken.any(dim=1)] = 0.0
        return names

    def by_name(self) -> dict[str, Tensor]:
        """Return flat copies of the errors by parameter. If ``owned``, they are gathered, and every rank must call."""
        whole = {index: self._gathered(kept) for index, kept in self._kept.items()}
        return {name: whole[index][begin:end].clone() for name, (index, begin, end) in self._spans.items()}

    def _gathered(self, kept: Tensor) -> Tensor:
        if not self._owned or self._group.size() == 1:
            return kept.view(-1)
        whole = kept.new_empty(self._group.size() * kept.numel())
        versions.all_gather_single(whole, kept.view(-1), group=self._group)
        return whole

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load the values that ``by_name`` returned, possibly for another layout; zero parameters that are missing."""
        size, rank = self._group.size(), self._group.rank()
        for index, kept in self._kept.items():
            whole = kept.new_zeros(size * kept.shape[1])
            for name, (of, begin, end) in self._spans.items():
                if of == index and name in values:
                    whole[begin:end] = values[name].to(whole.device)
            rows = whole.view(size, -1)
            kept.copy_(rows[rank : rank + 1] if self._owned else rows)


@dataclass
class _BucketMemory:
    """The buffers with which :class:`Compressed` exchanges one bucket.

    ``rows`` holds the bucket as float32 rows, or is None if the bucket's own memory can be viewed as such rows. ``scratch`` is
    for the decoded values that were sent, or is None if momentum is not masked. ``sent`` and ``got`` hold one code per rank.
    """

    rows: Tensor | None
    scratch: Tensor | None
    sent: Tensor
    got: Tensor
    mean: Tensor
    mean_code: Tensor
    random: torch.Generator


@dataclass
class CompressedState:
    """The state of :class:`Compressed`.

    Attributes:
        group: the ranks.
        lanes: the threads, each with a group of its own, in which the collectives run.
        memory: the buffers, by bucket index.
        feedback: the errors of the gradients that this rank sent, and of the means that it sent; empty without error feedback.
        momentum: u of [Note: momentum correction] for this rank's gradients; None without momentum.
    """

    group: dist.ProcessGroup
    lanes: Sequence[Lane]
    memory: Mapping[int, _BucketMemory]
    feedback: Sequence[Residuals]
    momentum: Residuals | None = None


@dataclass(frozen=True)
class Compressed(GradientExchange[CompressedState]):
    """Averages gradients by a reduce-scatter and an all-gather, both in a lossy code.

    Args:
        codec: the code.
        error_feedback: whether to add the error of the code to the next gradient.
        seed: the seed of the code's random bits.
        momentum: momentum of the gradients that are sent, see [Note: momentum correction]; the optimizer's own must be 0. Each
            synchronized backward is one step of this momentum.
        nesterov: whether the momentum is Nesterov's.
        masks_momentum: whether to zero the momentum of elements that were sent; affects only ``TopK`` and ``RandomK``.

    Raises:
        UsageError: ``momentum`` is below 0 or not below 1, or ``nesterov`` is set without a momentum.
    """

    codec: Codec
    error_feedback: bool = False
    seed: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    masks_momentum: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(explain("momentum must be at least 0 and below 1", value=self.momentum))
        if self.nesterov and not self.momentum:
            raise UsageError(explain("nesterov asks for a momentum", value=self.momentum, fix="give momentum=0.9"))

    @property
    @override
    def repeatable(self) -> bool:
        return not self.error_feedback and not self.momentum

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: CompressedState | None = None
    ) -> CompressedState:
        check_floating_point(buckets, type(self.codec).__name__)
        size = group.size()
        memory = {bucket.index: self._allocate(bucket, size) for bucket in buckets}
        lanes = before.lanes if before is not None else [Lane(group) for _ in range(_NUM_LANES if size > 1 else 0)]
        keeps = self.error_feedback and size > 1
        feedback = [Residuals(buckets, group, owned) for owned in (False, True)] if keeps else []
        for new, old in zip(feedback, before.feedback if before is not None else (), strict=False):
            new.load(old.by_name())
        momentum = Residuals(buckets, group, owned=False) if self.momentum else None
        if momentum is not None and before is not None and before.momentum is not None:
            momentum.load(before.momentum.by_name())
        return CompressedState(group, lanes, memory, feedback, momentum)

    @override
    def state_dict(self, state: CompressedState) -> dict[str, Any]:
        """Return by parameter the errors of what this rank "sent" and of the "means" (equal on all ranks), and "momentum"."""
        saved = dict(zip(("sent", "means"), (each.by_name() for each in state.feedback), strict=False))
        return saved if state.momentum is None else {**saved, "momentum": state.momentum.by_name()}

    @override
    def load_state_dict(self, state: CompressedState, saved: Mapping[str, Any]) -> None:
        kept = dict(zip(("sent", "means"), state.feedback, strict=False))
        if state.momentum is not None:
            kept["momentum"] = state.momentum
        if kept.keys() != saved.keys():
            what = f"this {type(self.codec).__name__} exchange keeps {sorted(kept)}, and the checkpoint holds {sorted(saved)}"
            fix = "choose the exchange, its settings and the number of ranks that the checkpoint was saved with"
            raise UsageError(explain(what, rank=state.group.rank(), fix=fix))
        for name, each in kept.items():
            each.load(saved[name])

    def _allocate(self, bucket: Bucket, size: int) -> _BucketMemory:
        device, length = bucket.flat.device, -(-num_numbers(bucket) // size)
        num_bytes = _HEADER_BYTES + self.codec.row_bytes(length)

        def codes(rows: int) -> Tensor:
            return torch.zeros(rows, num_bytes, dtype=torch.uint8, device=device)

        cut = bucket.flat.dtype in (torch.float32, torch.complex64) and num_numbers(bucket) == size * length
        masks = self.momentum and self.masks_momentum and isinstance(self.codec, Sparsifier)
        rows = None if cut else torch.zeros(size, length, device=device)
        scratch = torch.zeros(size, length, device=device) if masks else None
        mean, random = torch.zeros(1, length, device=device), torch.Generator(device)
        return _BucketMemory(rows, scratch, codes(size), codes(size), mean, codes(1), random)

    @override
    def start(self, bucket: Bucket, state: CompressedState, step: int) -> Work:
        return self.start_around(bucket, state, step, None)

    def start_around(self, bucket: Bucket, state: CompressedState, step: int, around: AroundCode | None) -> Work:
        """Start the exchange like ``start``; if there are several ranks, call ``around`` before coding and after decoding."""
        if not bucket.flat.numel():
            return Done()
        if state.group.size() == 1:
            values = numbers(bucket)
            if state.momentum is not None and is_finite(values):
                self._build_up(values, state.momentum.rows(bucket.index).view(-1)[: values.numel()])
            return Done()
        lane = state.lanes[bucket.index % len(state.lanes)]
        return lane.run(lambda: self._exchange(bucket, state, lane.group, step, around), [bucket.flat.device])

    def _build_up(self, values: Tensor, momentum: Tensor) -> None:
        """Update the momentum with the gradients, and replace the gradients by it."""
        momentum.mul_(self.momentum).add_(values)
        if self.nesterov:
            values.add_(momentum, alpha=self.momentum)
        else:
            values.copy_(momentum)

    def _exchange(
        self, bucket: Bucket, state: CompressedState, group: dist.ProcessGroup, step: int, around: AroundCode | None
    ) -> None:
        memory, flat, rank = state.memory[bucket.index], numbers(bucket), group.rank()
        feedback, mean_feedback = state.feedback or (None, None)
        rows = _rows(memory, flat, group.size())
        values = rows.view(-1)[: flat.numel()]
        fine = warn_unless_finite(bucket, values, step, rank, "all gradients of its bucket become NaN on all ranks")
        adds = not fine or around is None or around.enter(values)
        momentum = None if state.momentum is None or not fine else state.momentum.rows(bucket.index)
        if momentum is not None:
            self._build_up(rows, momentum)
        place = step, bucket.index, rank, 0
        kept = [each for each in (feedback, state.momentum) if each is not None]
        coded = self._encode(rows, memory.sent, (fine, adds), feedback, memory, place)
        if coded and not self._repair(kept, memory.sent, place):
            self._mask(momentum, memory)
        dist.all_to_all_single(memory.got, memory.sent, group=group)
        num_without = self._decode_mean(memory.got, memory.mean)
        fine, place = is_finite(memory.mean), (step, bucket.index, rank, 1)
        coded = self._encode(memory.mean, memory.mean_code, (fine, True), mean_feedback, memory, place)
        if coded and mean_feedback is not None:
            self._repair([mean_feedback], memory.mean_code, place)
        versions.all_gather_single(memory.got, memory.mean_code, group=group)
        self._decode(memory.got, rows)
        if around is not None:
            around.leave(values, 1 - num_without / group.size())
        if memory.rows is not None:
            flat.copy_(values)

    def _encode(
        self,
        rows: Tensor,
        codes: Tensor,
        which: tuple[bool, bool],
        feedback: Residuals | None,
        memory: _BucketMemory,
        place: tuple[int, int, int, int],
    ) -> bool:
        """Write each row's header and, if ``which``, (rows are finite, rank has something to add), is (True, True), its code.

        The values in ``rows`` may change. Errors of the code are kept in ``feedback``. Return whether rows were coded.
        """
        fine, adds = which
        header = codes[:, :_HEADER_BYTES].view(torch.float32)
        header[:, 0] = 0.0 if fine else math.nan
        header[:, 1] = 0.0 if adds else 1.0
        if not (fine and adds):
            return False  # nothing was coded, so the kept errors wait for a later step
        index = place[1]
        memory.random.manual_seed(hash((self.seed, *place)) & (2**63 - 1))  # hash of integers: same in all processes
        body = codes[:, _HEADER_BYTES:]
        if feedback is None:
            self.codec.encode(rows, body, memory.random)
        else:
            self.codec.encode_with_feedback(rows, body, memory.random, feedback.rows(index))
            feedback.clear_padding(index)
        return True

    def _repair(self, kept: Sequence[Residuals], codes: Tensor, place: tuple[int, int, int, int]) -> bool:
        """Zero rows of the residuals that overflowed, which would otherwise stay NaN for ever; return whether any did.

        If so, the codes are marked, so that the result is NaN on all ranks, and a warning names the parameters.
        """
        step, index, rank, _ = place
        names = [name for each in kept for name in each.forget_not_finite(index)]
        if names:
            codes[:, :_HEADER_BYTES].view(torch.float32)[:, 0] = math.nan
            who = some_of(list(dict.fromkeys(names)))
            what = f"step {step}: what is kept of the gradient of {who} overflowed float32 and is forgotten; "
            what += "all gradients of its bucket become NaN on all ranks"
            _log.warning("%s", explain(what, rank=rank, fix="look for gradients that are far too large"))
        return bool(names)

    def _mask(self, momentum: Tensor | None, memory: _BucketMemory) -> None:
        """Zero the momentum of elements that were sent, if momentum is masked."""
        if momentum is None or memory.scratch is None:
            return
        self.codec.decode(memory.sent[:, _HEADER_BYTES:], memory.scratch)
        momentum.masked_fill_(memory.scratch != 0, 0.0)

    def _decode_mean(self, codes: Tensor, mean: Tensor) -> int:
        """Decode the codes of all ranks and write their mean; return how many ranks had nothing to add."""
        if bool((codes[:, :_HEADER_BYTES].view(torch.float32) == 0).all()):  # all rows were coded in this step
            self.codec.decode_mean(codes[:, _HEADER_BYTES:], mean)
            return 0
        rows = mean.new_empty(codes.shape[0], mean.shape[1])
        num_without = self._decode(codes, rows)
        torch.mean(rows, dim=0, keepdim=True, out=mean)
        return num_without

    def _decode(self, codes: Tensor, rows: Tensor) -> int:
        """Decode the codes of all ranks; zero the rows of ranks with nothing to add, and return the number of such ranks."""
        self.codec.decode(codes[:, _HEADER_BYTES:], rows)
        header = codes[:, :_HEADER_BYTES].view(torch.float32)
        without = header[:, 1] != 0
        num_without = int(without.sum())
        if num_without:
            rows[without] = 0.0
        broken = header[:, 0].isnan()
        if bool(broken.any()):
            rows[broken] = math.nan
        return num_without

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        """Return the bytes for one bucket: a code of 1/n of it to each other rank, twice (its gradients, then the mean)."""
        if world_size == 1:
            return 0
        num_bytes = _HEADER_BYTES + self.codec.row_bytes(-(-num_elements // world_size))
        return 2 * (world_size - 1) * num_bytes


def _rows(memory: _BucketMemory, flat: Tensor, size: int) -> Tensor:
    """Return the bucket as ``size`` equal rows of float32: a view of its memory if possible, else a copy padded with zeros."""
    if memory.rows is None:
        return flat.view(size, -1)
    values = memory.rows.view(-1)
    values[: flat.numel()].copy_(flat)
    values[flat.numel() :].zero_()
    return memory.rows

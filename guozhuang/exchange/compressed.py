"""Mean of the gradients in a lossy code: each rank averages its part of the bucket, and both ways are coded.

Formula, with n ranks, a code C with decoder D, and the bucket cut into n rows x_1 ... x_n of equal length (the last padded):
rank r sends C(x_i + e_i) to rank i for all i, and keeps e_i <- x_i + e_i - D(C(x_i + e_i)) with error feedback, else e = 0.
Rank i averages what it got, m_i, and sends C(m_i + s_i) to all, with a feedback s_i of its own. All ranks decode the same
bytes, so they end with equal bits.
Error: that of the code, twice. Without feedback a biased code's errors add up over steps; with it the sum over all steps is
off by what the feedback holds at the end, once.
Source: the two-way scheme of BytePS (Jiang et al. 2020, OSDI) and of Bagua's ByteGrad (Gan et al. 2021, arXiv:2107.01499);
error feedback as in Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import Bucket
from ..errors import UsageError, explain
from .base import Done, GradientExchange, Work
from .codec import Codec
from .lane import Lane
from .numbers import is_finite, num_numbers, numbers, where_not_finite
from .residuals import Residuals

_NUM_LANES = 2  # one computes while the other sends
_HEADER_BYTES = 8  # before each row's code: 0.0, or NaN for a row that holds what no code can express
_log = logging.getLogger("guozhuang")


@dataclass
class _Memory:
    """What one bucket needs: the rows in float32, and the codes that leave and arrive."""

    rows: Tensor
    decoded: Tensor
    sent: Tensor
    got: Tensor
    mean: Tensor
    mean_code: Tensor
    random: torch.Generator


@dataclass
class CompressedState:
    """What changes while training, or is made once per layout.

    Attributes:
        lanes: in which the rounds run.
        memory: by index of the bucket.
        feedback: the errors of what this rank sent, and of the means that it sent; empty without error feedback.
    """

    group: dist.ProcessGroup
    lanes: Sequence[Lane]
    memory: Mapping[int, _Memory]
    feedback: Sequence[Residuals]


@dataclass(frozen=True)
class Compressed(GradientExchange[CompressedState]):
    """Scatter, reduce and gather, all in a code.

    Args:
        codec: the code.
        error_feedback: whether to add to the next gradient what the code lost of this one.
        seed: of the code's random bits.
    """

    codec: Codec
    error_feedback: bool = False
    seed: int = 0

    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: CompressedState | None = None
    ) -> CompressedState:
        """Allocate codes and feedback; feedback of an earlier layout is carried over by parameter. Every rank must call.

        Raises:
            UsageError: gradients that are no floating-point or complex numbers.
        """
        size = group.size()
        memory = {}
        for bucket in buckets:
            if not (bucket.flat.is_floating_point() or bucket.flat.is_complex()):
                what = f"{type(self.codec).__name__} codes floating-point gradients, not {bucket.flat.dtype}"
                raise UsageError(explain(what, value=bucket.names[0], fix="exchange such a model with ddp"))
            memory[bucket.index] = self._allocate(num_numbers(bucket), size, bucket.flat.device)
        lanes = before.lanes if before is not None else [Lane(group) for _ in range(_NUM_LANES if size > 1 else 0)]
        keeps = self.error_feedback and size > 1
        feedback = [Residuals(buckets, group, owned) for owned in (False, True)] if keeps else []
        for new, old in zip(feedback, before.feedback if before is not None else (), strict=False):
            new.load(old.by_name())
        return CompressedState(group, lanes, memory, feedback)

    def state_dict(self, state: CompressedState) -> dict[str, Any]:
        """Return the feedback by parameter: "sent" is this rank's own, "means" the same on all. Every rank must call."""
        return dict(zip(("sent", "means"), (each.by_name() for each in state.feedback), strict=False))

    def load_state_dict(self, state: CompressedState, saved: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        for each, values in zip(state.feedback, (saved["sent"], saved["means"]), strict=False):
            each.load(values)

    def _allocate(self, num_numbers: int, size: int, device: torch.device) -> _Memory:
        length = -(-num_numbers // size)
        num_bytes = _HEADER_BYTES + self.codec.row_bytes(length)

        def numbers(rows: int) -> Tensor:
            return torch.zeros(rows, length, device=device)

        def codes(rows: int) -> Tensor:
            return torch.zeros(rows, num_bytes, dtype=torch.uint8, device=device)

        random = torch.Generator(device)
        return _Memory(numbers(size), numbers(size), codes(size), codes(size), numbers(1), codes(1), random)

    def start(self, bucket: Bucket, state: CompressedState, step: int) -> Work:
        """Hand the bucket to a lane."""
        if state.group.size() == 1:
            return Done()
        lane = state.lanes[bucket.index % len(state.lanes)]
        return lane.run(lambda: self._exchange(bucket, state, lane.group, step))

    def _exchange(self, bucket: Bucket, state: CompressedState, group: dist.ProcessGroup, step: int) -> None:
        memory, flat, rank = state.memory[bucket.index], numbers(bucket), group.rank()
        feedback, mean_feedback = state.feedback or (None, None)
        rows = memory.rows.view(-1)[: flat.numel()]
        rows.copy_(flat)
        memory.rows.view(-1)[flat.numel() :].zero_()
        fine = is_finite(rows)
        if not fine:
            _log.warning("%s", explain(f"step {step}: {where_not_finite(bucket)}", rank=rank))
        self._encode(memory.rows, memory.sent, memory.decoded, fine, feedback, memory, (step, bucket.index, rank, 0))
        dist.all_to_all_single(memory.got, memory.sent, group=group)
        self._decode(memory.got, memory.decoded)
        torch.mean(memory.decoded, dim=0, keepdim=True, out=memory.mean)
        own, fine = memory.decoded[:1], is_finite(memory.mean)
        self._encode(memory.mean, memory.mean_code, own, fine, mean_feedback, memory, (step, bucket.index, rank, 1))
        dist.all_gather_into_tensor(memory.got, memory.mean_code, group=group)
        self._decode(memory.got, memory.rows)
        flat.copy_(rows)

    def _encode(
        self,
        rows: Tensor,
        codes: Tensor,
        scratch: Tensor,
        fine: bool,
        feedback: Residuals | None,
        memory: _Memory,
        place: tuple[int, int, int, int],
    ) -> None:
        """Code ``rows`` (changed), each after its header; keep what is lost."""
        codes[:, :_HEADER_BYTES].view(torch.float32).fill_(0.0 if fine else math.nan)
        if not fine:
            return  # what was lost before stays to be sent
        index = place[1]
        if feedback is not None:
            rows += feedback.rows(index)
        memory.random.manual_seed(hash((self.seed, *place)) & (2**63 - 1))  # of integers: the same in every process
        body = codes[:, _HEADER_BYTES:]
        self.codec.encode(rows, body, memory.random)
        if feedback is not None:
            self.codec.decode(body, scratch)
            feedback.keep(index, rows, scratch)

    def _decode(self, codes: Tensor, rows: Tensor) -> None:
        self.codec.decode(codes[:, _HEADER_BYTES:], rows)
        broken = codes[:, :_HEADER_BYTES].view(torch.float32)[:, 0].isnan()
        if bool(broken.any()):
            rows[broken] = math.nan

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        """Return the bytes of one bucket of so many elements: n-1 codes of 1/n to others, and one code to each of them."""
        if world_size == 1:
            return 0
        num_bytes = _HEADER_BYTES + self.codec.row_bytes(-(-num_elements // world_size))
        return 2 * (world_size - 1) * num_bytes

"""The ranks that divide a sequence between them, and what they send for attention: all-to-alls and turns of a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from ...errors import UsageError, explain
from ..activations.names import changes_in_place
from ..activations.tensor import DividedTensor, Handler, Ranks, all_whole, divided_among, handles
from ..running import first_argument, running_frames
from ..spans import SpansOfRanks


class Team(Ranks):
    """The ranks of one sequence, as one of them sees it, and what they agreed on.

    Attributes:
        attention: ``"auto"``, ``"ulysses"`` or ``"ring"``.
        names: of the model's modules, by their ``id``.
        in_blocks: names of the blocks that are running now, outermost first.
        sees_causal: whether attention with a causal mask was met in a ring; later sequences are then divided in zigzag order.
    """

    handlers: ClassVar[dict[str, Handler]] = {}

    def __init__(self, group: dist.ProcessGroup, attention: str, names: Mapping[int, str]) -> None:
        super().__init__(group)
        self.attention, self.names = attention, names
        self.in_blocks: list[str] = []
        self.sees_causal = False

    @override
    def spans(self, length: int) -> SpansOfRanks:
        if self.sees_causal and length >= 2 * self.size:
            return SpansOfRanks.zigzag(length, self.size)
        return SpansOfRanks.in_order(length, self.size)

    @override
    def on_whole(self, first: DividedTensor, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute it on whole tensors outside of blocks; refuse it inside of them, where it may join tokens."""
        if self.in_blocks or changes_in_place(name):
            self.refuse_model(f"the operation {name.strip('_')!r}")
        return self.computed_on_copies(func, args, kwargs)

    @override
    def refuse(self, first: DividedTensor, name: str, why: str) -> NoReturn:
        self.refuse_model(f"{name} of an activation ({why})")

    @override
    def refuse_function(self, first: DividedTensor, name: str) -> NoReturn:
        self.refuse_model(f"the autograd function {name}")

    def refuse_model(self, what: str) -> NoReturn:
        """Raise the error for something in the model that cannot be computed from divided tokens.

        Raises:
            UsageError: always; the text names the module that runs.
        """
        inside = next((each for each in map(first_argument, running_frames()) if id(each) in self.names), None)
        name = (self.names[id(inside)] if inside is not None else "") or (self.in_blocks[-1] if self.in_blocks else "")
        what = (
            f"The sequence cannot be divided in this model: {what} may join tokens in a way that is not attention"
            + (f", in {name!r}" if name else "")
            + (f", a {type(inside).__qualname__}" if inside is not None and name else "")
        )
        fix = (
            "train it by another strategy (tensor and pipeline divide such models), or let it act on each token "
            "alone; attention is followed in torch's scaled_dot_product_attention, MultiheadAttention, matmul and "
            "einsum; gradient checkpointing needs use_reentrant=False"
        )
        raise UsageError(explain(what, rank=self.rank, fix=fix))

    def to_heads(self, local: Tensor, spans: SpansOfRanks) -> Tensor:
        """From ``(batch, all heads, own tokens, features)`` to ``(batch, own heads, all tokens, features)``."""
        batch, num_heads, num_tokens, width = local.shape
        own_heads = num_heads // self.size
        given = (
            local.transpose(0, 1).contiguous().view(-1)
        )  # heads are outermost: the first part goes to the first rank
        gives = [own_heads * batch * num_tokens * width] * self.size
        takes = [own_heads * batch * count * width for count in spans.counts]
        got = given.new_empty(sum(takes))
        dist.all_to_all_single(got, given, takes, gives, group=self.group)
        parts = [
            part.view(own_heads, batch, count, width)
            for part, count in zip(got.split(takes), spans.counts, strict=True)
        ]
        return spans.joined(parts, 2).transpose(0, 1)

    def to_tokens(self, local: Tensor, spans: SpansOfRanks) -> Tensor:
        """From ``(batch, own heads, all tokens, features)`` to ``(batch, all heads, own tokens, features)``."""
        batch, own_heads, _, width = local.shape
        heads = local.transpose(0, 1)
        parts = [spans.part(heads, 2, rank).reshape(-1) for rank in range(self.size)]
        count = spans.counts[self.rank]
        takes = [own_heads * batch * count * width] * self.size
        got = local.new_empty(sum(takes))
        dist.all_to_all_single(got, torch.cat(parts), takes, [part.numel() for part in parts], group=self.group)
        return got.view(self.size * own_heads, batch, count, width).transpose(0, 1)

    def passed_on(self, flat: Tensor, num_got: int) -> tuple[Tensor, dist.Work]:
        """Start to send ``flat`` to the next rank and to receive ``num_got`` elements from the one before.

        Returns:
            What is received, and the work to wait for.
        """
        got = flat.new_empty(num_got)
        gives, takes = [0] * self.size, [0] * self.size
        gives[(self.rank + 1) % self.size], takes[(self.rank - 1) % self.size] = flat.numel(), num_got
        work = dist.all_to_all_single(got, flat, takes, gives, group=self.group, async_op=True)
        assert work is not None
        return got, work


class _Exchange(torch.autograd.Function):
    """From tokens to heads or back; the backward goes the other way."""

    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, spans: SpansOfRanks, team: Team, to_heads: bool) -> Tensor:
        ctx.spans, ctx.team, ctx.to_heads = spans, team, to_heads
        return (team.to_heads if to_heads else team.to_tokens)(local, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (ctx.team.to_tokens if ctx.to_heads else ctx.team.to_heads)(gradient, ctx.spans), None, None, None


def to_heads(local: Tensor, spans: SpansOfRanks, team: Team) -> Tensor:
    """``Team.to_heads()`` with gradients."""
    return _Exchange.apply(local, spans, team, True)  # type: ignore[no-any-return,no-untyped-call]


def to_tokens(local: Tensor, spans: SpansOfRanks, team: Team) -> Tensor:
    """``Team.to_tokens()`` with gradients."""
    return _Exchange.apply(local, spans, team, False)  # type: ignore[no-any-return,no-untyped-call]


@handles("cat", "concat", "concatenate", ranks=Team)
def _add_tokens(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Join tokens to others: the result is whole, inside of blocks too, as keys that follow those of a cache."""
    tensors = [each for each in tensors if tuple(each.shape) != (0,)]
    lead = next(divided_among(tensors))
    return func(all_whole(tensors), dim=dim) if len(tensors) > 1 and dim % lead.dim() == lead.at else NotImplemented


@handles("conv1d", ranks=Team)
def _convolve(
    func: Any, input: Any, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    """A convolution with a kernel of one token is a linear layer."""
    is_one = weight.shape[-1] == 1 and stride in (1, (1,), [1]) and padding in (0, (0,), [0])
    if not isinstance(input, DividedTensor) or input.position != -1 or not is_one:
        return NotImplemented
    return input.like(func(input.local, weight, bias, stride, padding, dilation, groups))

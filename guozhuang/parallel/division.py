"""Parameters of which each rank holds a part: how they are cut, gathered, and measured as wholes.

[Note: divided parameters] A parameter is divided in two ways, and may be in both. *Cut*: the ranks of a tensor group hold
slices of one of its dims. *Owned*: of the stages of a pipeline, those that compute with it hold it; on others it has 0 elements
and never a gradient, so that optimizers pass over it. Either way the Parameter object stays the one that the script's optimizer
holds. What needs whole values (norms, states, checkpoints) asks :func:`division_of`, and nothing else knows the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from ..weights.equal_start import broadcast_tensors
from ..world.devices import device_of
from .spans import Span, SpansOfRanks, take

#: The attribute of a tensor that says how it is divided.
ATTRIBUTE = "_guozhuang_division"


@dataclass(frozen=True)
class Division:
    """How this rank's part of a tensor lies in the whole one. See [Note: divided parameters].

    Attributes:
        shape: of the whole tensor.
        dim: the dim that is cut; None if the tensor is not cut.
        spans: which ranges of ``dim`` this rank holds, in the order in which they lie in its part.
        group: the ranks that hold the other parts; None if the tensor is not cut.
        owners: the ranks in ``stages`` that hold the tensor; None: all of them.
        stages: the ranks of the pipeline; None without one.
        copy: with a pipeline, all ranks that hold one copy of the model together; None: they are those of ``stages``.
        is_kept: whether the tensor stays as large where it is not owned.
        keeper: the rank of ``group`` that has the optimizer's state of the whole tensor; None: each rank has that of its part.
        everyones: the spans of each rank of ``group``, once they were asked for.
    """

    shape: torch.Size
    dim: int | None = None
    spans: tuple[Span, ...] = ()
    group: dist.ProcessGroup | None = None
    owners: tuple[int, ...] | None = None
    stages: dist.ProcessGroup | None = None
    copy: dist.ProcessGroup | None = None
    is_kept: bool = False
    keeper: int | None = None
    everyones: list[tuple[Span, ...]] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_owned(self) -> bool:
        """Whether this rank's stage holds the tensor."""
        return self.owners is None or self.stages is None or self.stages.rank() in self.owners

    @property
    def has_state(self) -> bool:
        """Whether this rank has a state of the optimizer for the tensor, or for its part."""
        return self.is_owned and (self.keeper is None or (self.group is not None and self.group.rank() == self.keeper))

    @property
    def is_first_owner(self) -> bool:
        """Whether this rank's stage is the one that counts the tensor in sums over stages."""
        return self.stages is None or self.stages.rank() == (self.owners or (0,))[0]

    @property
    def part_shape(self) -> torch.Size:
        """The shape of this rank's part."""
        if not self.is_owned and not self.is_kept:
            return torch.Size([0])
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.spans)
        return torch.Size([*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]])


def division_of(tensor: Tensor) -> Division | None:
    """Return how a parameter or buffer is divided; None if it is not."""
    found: Division | None = getattr(tensor, ATTRIBUTE, None)
    return found


def divide(parameter: nn.Parameter, dim: int, spans: Iterable[Span], group: dist.ProcessGroup | None) -> None:
    """Keep of a parameter only some ranges of one dim, in place. Every rank of the group must call it.

    Args:
        parameter: whole and equal on all ranks of the group; its gradient, if there is one, is cut too.
        dim: the dim that is cut.
        spans: the ranges ``(start, stop)`` that this rank keeps, in this order; all ranks together keep everything.
        group: the ranks that keep the rest; None if there is one rank, and then nothing is cut.
    """
    assert division_of(parameter) is None, "a parameter is cut once"
    if group is None:
        return
    dim %= parameter.dim()
    made = Division(parameter.shape, dim, tuple((int(start), int(stop)) for start, stop in spans), group)
    _set(parameter, made)


def disown(
    tensor: Tensor,
    owners: Sequence[int],
    stages: dist.ProcessGroup | None,
    *,
    keep: bool = False,
    copy: dist.ProcessGroup | None = None,
) -> None:
    """Record which stages of a pipeline hold a tensor, and empty it on the others. Every rank of the pipeline must call it.

    Args:
        tensor: a parameter or a buffer of the model; it may be cut already.
        owners: the ranks in ``stages`` that hold it, rising. Several hold a tied parameter.
        stages: the ranks of the pipeline; None if there is one, and then nothing happens.
        keep: leave the tensor as it is where it is not owned: for buffers, which the script's own forward may read.
        copy: the ranks that hold one copy of the model together, if they are others than those of the pipeline.
    """
    if stages is None:
        return
    assert owners and sorted(owners) == list(owners), owners
    known = division_of(tensor) or Division(tensor.shape)
    made = replace(known, owners=tuple(owners), stages=stages, copy=copy, is_kept=keep)
    if keep:
        setattr(tensor, ATTRIBUTE, made)
    else:
        _set(tensor, made)


def keep_whole(parameter: Tensor, keeper: int) -> Division:
    """Let one rank of the group of a cut parameter keep the optimizer's state, as of the whole one. Every rank must call it."""
    known = division_of(parameter)
    assert known is not None and known.dim is not None
    made = replace(known, keeper=keeper)
    setattr(parameter, ATTRIBUTE, made)
    return made


def _set(tensor: Tensor, division: Division) -> None:
    """Reduce a tensor, and its gradient, to this rank's part; the tensor stays the same object."""
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None
        already = division_of(tensor)
        cut = replace(division, dim=None, spans=(), group=None) if already is not None else division
        tensor.data = part(tensor.data, cut)
        if gradient is not None and division.is_owned:
            tensor.grad = part(gradient, cut)
    setattr(tensor, ATTRIBUTE, division)


def part(whole_tensor: Tensor, division: Division) -> Tensor:
    """Return this rank's part of a whole tensor, in memory of its own; of 0 elements where another stage holds it."""
    if not division.is_owned and not division.is_kept:
        return whole_tensor.new_empty(0)
    if division.dim is None:
        return whole_tensor
    return take(whole_tensor, division.dim, division.spans).clone(memory_format=torch.contiguous_format)


def whole(tensor: Tensor, division: Division) -> Tensor:
    """Return the whole of a tensor that is divided like a parameter. Every rank of its groups must call it.

    Args:
        tensor: this rank's part: the parameter, or a tensor of its shape such as a gradient or an optimizer's state. Where
            another stage holds it, any tensor of the right dtype and device.
        division: that of the parameter.
    """
    found = tensor.detach()
    if division.is_owned and division.group is not None:
        assert division.dim is not None
        found = spans_of_ranks(division).gathered(found, division.dim, division.group)
    if division.stages is not None and division.owners is not None:
        dense = torch.contiguous_format  # ranks send memory, not elements
        found = found.clone(memory_format=dense) if division.is_owned else found.new_empty(division.shape)
        if len(division.owners) < division.stages.size():
            dist.broadcast(found, group=division.stages, group_src=division.owners[0])
    return found


def spans_of_ranks(division: Division) -> SpansOfRanks:
    """Return the spans of each rank of the group. The first call for a parameter is collective."""
    assert division.group is not None and division.dim is not None
    if not division.everyones:
        found: list[Any] = [None] * division.group.size()
        dist.all_gather_object(found, division.spans, group=division.group)
        division.everyones.extend(found)
    return SpansOfRanks(division.shape[division.dim], tuple(division.everyones))


def norms_of(parameters: Sequence[Tensor], values: Sequence[Tensor | None], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norm of each whole tensor of which the ranks hold parts. Every rank must call it, with the same parameters.

    Args:
        parameters: say how the values are divided; parameters that are not divided are welcome.
        values: this rank's part of each: the parameters themselves, their gradients, or anything of their shape. None: nothing,
            as for a gradient that did not come, and for a parameter that another stage holds.
        norm_type: the p of the p-norm, above 0, also ``inf``.

    Returns:
        A 0-dimensional float64 tensor each; 0 for None and for what another stage of a pipeline holds.
    """
    powers = summed(parameters, _powers_here(parameters, values, norm_type), norm_type)
    return list(powers if math.isinf(norm_type) else powers ** (1.0 / norm_type))


def norm_of(
    parameters: Sequence[Tensor],
    values: Sequence[Tensor | None],
    norm_type: float = 2.0,
    *,
    is_of_stage: bool = False,
) -> Tensor:
    """Return the norm of all whole tensors together. Every rank must call it, with the same parameters; see :func:`norms_of`.

    A tensor that several stages of a pipeline hold counts once.

    Args:
        parameters, values, norm_type: as in :func:`norms_of`.
        is_of_stage: one stage of a pipeline holds all of them, so that no other one takes part.

    Returns:
        A 0-dimensional float64 tensor, equal on all ranks that take part.
    """
    powers = _powers_here(parameters, values, norm_type)
    return norm_of_parts(parameters, powers, norm_type, is_of_stage=is_of_stage)


def stages_of(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Return the ranks of the pipeline over whose stages parameters are spread; None without one."""
    return next((d.stages for p in parameters if (d := division_of(p)) is not None and d.stages is not None), None)


def norm_of_parts(
    parameters: Sequence[Tensor], powers: Tensor, norm_type: float = 2.0, *, is_of_stage: bool = False
) -> Tensor:
    """Return the norm of all whole tensors together, of whose parts the powers are known. Every rank must call it.

    Args:
        parameters: say how the tensors are divided.
        powers: for each, the sum of the p-th powers of this rank's part, for ``inf`` the largest absolute value: float64.
        norm_type: the p of the p-norm.
        is_of_stage: as in :func:`norm_of`.
    """
    powers = summed(parameters, powers, norm_type)
    divisions = [division_of(each) for each in parameters]
    counts = [each is None or each.is_first_owner for each in divisions]
    powers = powers[torch.tensor(counts, dtype=torch.bool, device=powers.device)]
    stages = stages_of(parameters)
    total = powers.new_zeros(1)
    if len(powers):
        total = (powers.max() if math.isinf(norm_type) else powers.sum()).reshape(1)
    if stages is not None and not is_of_stage:
        total = over_ranks(total, stages, norm_type)
    return (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).reshape(())


def checked_norm(total: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Return a norm by which gradients are to be clipped.

    Raises:
        RuntimeError: it is not finite, and that is an error.
    """
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        what = f"the total norm of order {norm_type:g} of the gradients is not finite, so they cannot be clipped"
        fix = "look for the step that made them so, or leave error_if_nonfinite out"
        raise RuntimeError(explain(what, value=float(total), fix=fix))
    return total


def _powers_here(parameters: Sequence[Tensor], values: Sequence[Tensor | None], norm_type: float) -> Tensor:
    """Return the sum of the p-th powers, or the largest absolute value, of this rank's part of each tensor."""
    if not norm_type > 0:
        what = "norm_type must be above 0 where parameters are divided among ranks"
        raise UsageError(explain(what, value=norm_type, fix="use 2.0"))
    device = device_of(value for value in values if value is not None)
    found = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    mine: list[tuple[int, Tensor]] = []
    for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        division = division_of(parameter)
        if value is None or (division is not None and not division.is_owned):
            continue
        if division is not None and division.group is not None:
            value = _counted(value, division)
        if value.numel():
            mine.append((i, value.detach().abs() if value.is_complex() else value.detach()))
    if mine:
        # In float64, because many of them are summed, and their powers could overflow.
        norms = torch.stack([n.to(found) for n in torch._foreach_norm([v for _, v in mine], norm_type, torch.float64)])
        places = torch.tensor([i for i, _ in mine], device=device)
        found[places] = norms if math.isinf(norm_type) else norms**norm_type
    return found


def summed(parameters: Sequence[Tensor], powers: Tensor, norm_type: float) -> Tensor:
    """Return the powers of whole tensors, by parameter in the first dim, as far as the ranks of this stage hold them."""
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for i, division in enumerate(map(division_of, parameters)):
        if division is not None and division.group is not None and division.is_owned:
            groups.setdefault(division.group, []).append(i)
    for group, indices in groups.items():
        places = torch.tensor(indices, device=powers.device)
        powers[places] = over_ranks(powers[places], group, norm_type)
    return powers


def _counted(value: Tensor, division: Division) -> Tensor:
    """Return of this rank's part what no lower rank of the group holds too."""
    everyones, dim = spans_of_ranks(division).of_ranks, division.dim
    assert division.group is not None and dim is not None
    is_taken = torch.zeros(division.shape[dim], dtype=torch.bool)
    for start, stop in (span for spans in everyones[: division.group.rank()] for span in spans):
        is_taken[start:stop] = True
    own = torch.cat([is_taken[start:stop] for start, stop in division.spans]) if division.spans else is_taken[:0]
    return value.index_select(dim, (~own).nonzero().view(-1).to(value.device)) if bool(own.any()) else value


def take_first(
    parameters: Iterable[Tensor],
    value_of: Callable[[Tensor], Tensor | None],
    tensors: dist.ProcessGroup | None,
    among: Callable[[tuple[int, ...]], dist.ProcessGroup],
) -> None:
    """Give all ranks of a copy of the model that hold the same elements the values that the first of them has.

    A method that rounds what it exchanges rounds together what lies together, which differs between these ranks. Every rank of
    the copy must call it.

    Args:
        parameters: all of the model.
        value_of: what is made equal: a parameter's gradient, or its data; None: nothing.
        tensors: the ranks that hold slices of matrices; None: none are cut. They hold all others alike.
        among: returns the group of the stages that hold a parameter together.
    """
    known = [(p, division_of(p), value) for p in parameters if (value := value_of(p)) is not None]
    # Sparse gradients are averaged exactly, in the same order everywhere.
    held = [(p, d, v) for p, d, v in known if v.layout == torch.strided and (d is None or d.is_owned)]
    if tensors is not None:
        broadcast_tensors([value for _, d, value in held if d is None or d.dim is None], tensors, source=0)
    for parameter, division, value in held:
        # A stage of frozen layers alone exchanges nothing and does not come here, so nobody waits for it.
        is_tied = division is not None and division.owners is not None and len(division.owners) > 1
        if is_tied and parameter.requires_grad:
            assert division is not None and division.owners is not None
            broadcast_tensors([value], among(division.owners), source=0)


def over_ranks(values: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Return the sums, or the largest values, over the ranks of a group."""
    if not math.isinf(norm_type):
        dist.all_reduce(values, group=group)
        return values
    # A MAX reduction may lose a NaN, so NaN is sent as a flag.
    sent = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values.dtype)])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return torch.where(sent[1] > 0, math.nan, sent[0])

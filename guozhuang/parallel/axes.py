"""The process groups of a layout: which ranks share the batch, and which hold one copy of the model together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError, explain
from ..groups.subgroups import is_open, subgroup
from ..world.layout import AXES, DATA_AXES, MODEL_AXES, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .activations.tensor import Ranks


@dataclass(frozen=True)
class Around:
    """What is done around a model whose ranks work on parts of each sample, so that its callers see whole samples.

    Attributes:
        inputs: takes and returns the positional and the keyword arguments of the model: this rank's part of each.
        outputs: takes and returns what the model has returned: whole on every rank.
        ranks: those that divide samples between them; None: samples are whole.
    """

    inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: Callable[[Any], Any]
    ranks: Ranks | None = None


#: Around a model whose ranks work on whole samples: nothing is done.
WHOLE = Around(lambda args, kwargs: (args, dict(kwargs)), lambda found: found)


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


def with_mean_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return an input that all ranks have whole; its gradient is the mean of the ranks' gradients, which is one process's.

    Every rank of the group must call it, and its backward.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _MeanGradient.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


class Axes:
    """The groups of a layout, as one rank sees them. Made by :func:`make_axes`.

    Args:
        layout: the layout.
        everyone: the group of all its ranks.
        made: the groups of several ranks, by the ranks of ``everyone`` that are in them.

    Attributes:
        layout: the layout.
        everyone: the group of all its ranks.
    """

    def __init__(
        self, layout: Layout, everyone: dist.ProcessGroup, made: Mapping[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        self.layout, self.everyone = layout, everyone
        self._made = dict(made)
        self._coordinate = layout.coordinate(everyone.rank())
        self._mesh: DeviceMesh | None = None

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self.layout, axis))

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis."""
        return self._coordinate[axis]

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of ``everyone``, rising, that are this rank's peers along these axes together, itself among them."""
        return self.layout.ranks_along(axes, self.everyone.rank())

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of this rank's peers along these axes together; None if it would have one rank.

        Not collective for a single axis, for ``DATA_AXES``, ``MODEL_AXES`` and all axes; the first call for others is: every
        member must make it.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._made:
            self._made[ranks] = subgroup(self.everyone, ranks)
        return self._made[ranks]

    @property
    def mesh(self) -> DeviceMesh:
        """A device mesh of the axes that have several ranks, outermost first, named as they are; made of these groups."""
        if self._mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            names = [axis for axis in AXES if self.size(axis) > 1]
            groups = [group for axis in names if (group := self.group(axis)) is not None]
            if not groups:
                raise UsageError(explain("a layout of one rank has no mesh", value=str(self.layout)))
            everyone = dist.get_process_group_ranks(self.everyone)
            ranks = torch.tensor(everyone, dtype=torch.int).view([self.size(axis) for axis in names])
            kind = "cpu" if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend(groups[0])) else "cuda"
            given = groups[0] if len(groups) == 1 else groups
            self._mesh = DeviceMesh.from_group(given, kind, ranks, mesh_dim_names=tuple(names))
        return self._mesh


# By the group of all ranks, and by the ranks in them. PyTorch keeps groups until they are destroyed.
_groups: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def make_axes(layout: Layout, group: dist.ProcessGroup | None = None) -> Axes:
    """Make the groups of a layout. Every rank must call it.

    Axes with the same ranks share one group, also those of several models: a rank whose stage has no part in what is done for
    one of them need not know which one that is. No group is the default one, so that what a script does there needs no order
    with what happens here.

    Args:
        layout: sizes whose product is the number of ranks.
        group: the ranks; all by default.
    """
    everyone = dist.group.WORLD if group is None else group
    assert everyone is not None and everyone.size() == layout.size, f"{layout} for {everyone}"
    known = _groups.setdefault(everyone, weakref.WeakValueDictionary())
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for axes in (*((axis,) for axis in AXES), DATA_AXES, MODEL_AXES, AXES):
        ranks = layout.ranks_along(axes, everyone.rank())
        if len(ranks) > 1 and ranks not in made:
            there = known.get(ranks)  # perhaps destroyed by the script, which something on this rank may outlive
            made[ranks] = there if there is not None and is_open(there) else subgroup(everyone, ranks)
            known[ranks] = made[ranks]
    return Axes(layout, everyone, made)

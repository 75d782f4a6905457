"""The ranks that an image is divided over, and what they do with operations that need rows of all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from ...errors import UsageError, explain
from ..activations.names import changes_in_place
from ..activations.tensor import DividedTensor, Handler, Place, Ranks, divided_among, handles

_log = logging.getLogger("guozhuang")
_OTHERWISE = "train with another strategy than space"
# What to do instead of functions of PyTorch's own that the model may get to by its modules.
_INSTEAD = {
    "CheckpointFunction": "call torch.utils.checkpoint with use_reentrant=False",
    "BackwardHookFunction": "remove the backward hooks of modules inside of the model",
}


class Region(Ranks):
    """The ranks that divide the rows of images between them.

    Attributes:
        num_dims: the number of spatial dimensions of the model's images.
        named: operations that were named in the log already.
    """

    handlers: ClassVar[dict[str, Handler]] = {}

    def __init__(self, group: dist.ProcessGroup, num_dims: int) -> None:
        super().__init__(group)
        self.num_dims = num_dims
        self.named: set[str] = set()

    @override
    def refuse(self, first: DividedTensor, name: str, why: str) -> NoReturn:
        what = f"{name} of an activation that space divides cannot be right: {why}"
        raise UsageError(explain(what, value=tuple(first.shape), fix=f"leave it out, or {_OTHERWISE}"))

    @override
    def refuse_function(self, first: DividedTensor, name: str) -> NoReturn:
        what = "a torch.autograd.Function of the model got an activation whose rows lie on several ranks; its backward "
        fix = _INSTEAD.get(name, f"write it with functions of torch, or {_OTHERWISE}")
        raise UsageError(explain(what + "would see some rows as all", value=name, fix=fix))

    @override
    def on_whole(self, first: DividedTensor, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the operation on whole tensors; divide results that are images of the same height again."""
        if changes_in_place(name) and isinstance(args[0], DividedTensor):
            what = f"{name} changes an activation in place whose rows lie on several ranks"
            fix = f"use an operation that returns its result, or {_OTHERWISE}"
            raise UsageError(explain(what, value=tuple(first.shape), fix=fix))
        if name not in self.named:
            self.named.add(name)
            if self.rank == 0:
                what = "space: %s of shape %s is computed on the whole tensor by every rank"
                _log.warning(f"{what}: right, but its memory is not divided", name, tuple(first.shape))
        found = self.computed_on_copies(func, args, kwargs)

        def divided(result: Any) -> Any:
            is_image = isinstance(result, Tensor) and result.dim() == first.dim()
            if not is_image or result.shape[first.at] != first.place.size:
                return result
            part = first.place.cut(result, first.at)
            # By itself, so that the whole is freed; but a view of a copy is watched for changes.
            return first.like(part if any(result is view for view, *_ in self.copies) else part.clone())

        return tree_map(divided, found)


def made_of_rows(input: DividedTensor, local: Tensor, num_rows: int) -> DividedTensor:
    """Return a divided tensor with this many rows, in the same dimension of as many others."""
    ranks = input.place.ranks
    return DividedTensor(local, Place(input.at, ranks.spans(num_rows), ranks))


def handles_rows(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for these operations on divided images; not asked where rows are folded into others."""

    def register(handler: Handler) -> Handler:
        def closed(func: Any, *args: Any, **kwargs: Any) -> Any:
            is_folded = any(each.place.is_folded for each in divided_among((args, kwargs)))
            return NotImplemented if is_folded else handler(func, *args, **kwargs)

        return handles(*names, ranks=Region)(closed)

    return register


@handles_rows("requires_grad_")
def _refuse(func: Any, input: DividedTensor, *args: Any, **kwargs: Any) -> NoReturn:
    input.place.ranks.refuse(input, "requires_grad_", "it is an activation inside the model")

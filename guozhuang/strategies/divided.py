"""Train a model that is divided over the ranks of a layout, with a strategy that averages gradients between its copies.

[Note: data parallelism around a divided model] Ranks at the same place of different copies of the model hold the same parts of
it, and average the gradients of those parts in a group of their own. Without a pipeline DistributedDataParallel does so as
usual, while backward runs. In a pipeline a parameter's gradient grows with each microbatch, and some schedules compute it
without autograd, so no hook tells when it is complete. The pipeline itself says when its backward has ended; the gradients
are then handed to the very same reducer, by a backward from the parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ..distributed import DistributedDataParallel
from ..errors import UsageError, explain
from ..exchange import GradientExchange
from ..parallel.axes import Axes, make_axes
from ..parallel.division import division_of
from ..parallel.prepare import Divided, Wishes, check_wishes, divide_model
from ..sharding.elementwise import needs_whole_tensors
from ..units import listed
from ..world.layout import DATA_AXES
from . import ways
from .prepared import StandsForModule
from .ways import Setup, WithExchange, device_ids, several

if TYPE_CHECKING:
    from .table import Strategy


class PreparedParallel(StandsForModule):
    """A divided model, standing for its module.

    Args:
        divided: the model, divided.
        inside: averages gradients between copies of the model; None where there is one copy.
    """

    def __init__(self, divided: Divided, inside: DistributedDataParallel | None) -> None:
        super().__init__()
        self.add_module("module", divided.model)
        # Not as parts, whose parameters would have a second name.
        self.__dict__.update(_divided=divided, _inside=inside, _is_running=False)
        if divided.pipe is not None:
            divided.pipe.at_backward_end = None if inside is None else self._average
        self._stands = True

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        divided: Divided = self.__dict__["_divided"]
        inside: DistributedDataParallel | None = self.__dict__["_inside"]
        for each in divided.around:
            args, kwargs = each.inputs(args, kwargs)
        if divided.pipe is not None:
            if inside is not None:
                args, kwargs = inside._pre_forward(*args, **kwargs)
            found = divided.pipe(*args, **kwargs)
        else:
            with divided.drawing():
                found = (self.module if inside is None else inside)(*args, **kwargs)
        for each in reversed(divided.around):
            found = each.outputs(found)
        return found

    def no_sync(self) -> Any:
        """Return a context in which backwards leave gradients on their ranks; see ``DistributedDataParallel.no_sync``."""
        inside: DistributedDataParallel | None = self.__dict__["_inside"]
        return _nothing() if inside is None else inside.no_sync()

    def _average(self) -> None:
        """Hand the gradients of a pipeline's backward to the reducer. See [Note: data parallelism around a divided model]."""
        inside: DistributedDataParallel = self.__dict__["_inside"]
        if not inside.require_backward_grad_sync:
            return
        trained = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        with torch.enable_grad():
            inside._post_forward(())
        torch.autograd.backward(trained, gradients)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def prepare_divided(model: nn.Module, optimizer: Any, setup: Setup, chosen: Strategy) -> tuple[nn.Module, Any]:
    """Prepare a model for a layout that divides it, with ``chosen`` between its copies. Every rank must call it.

    Args:
        model: whole, and equal on all ranks.
        optimizer: the user's; a tuple of several for a strategy that divides optimizers.
        setup: the properties of the run.
        chosen: averages gradients between the copies of the model.

    Raises:
        UsageError: layout, strategy, model and optimizer do not go together; the text says which.
    """
    _check_inside(chosen, setup)
    wishes = Wishes(**setup.wishes)
    check_wishes(wishes)
    axes = make_axes(setup.world.layout)
    found = divide_model(model, axes, wishes)
    _check_steps(model, several(optimizer))
    inside, optimizer = _inside(chosen, model, optimizer, setup, axes)
    return PreparedParallel(found, inside), optimizer


def _check_inside(chosen: Strategy, setup: Setup) -> None:
    can = chosen.prepare is ways.ddp or isinstance(chosen.prepare, WithExchange | ways.Sharded)
    if not can:
        what = f"strategy {chosen.name} cannot average gradients between copies of a divided model"
        fix = "choose hybrid, sharded or a strategy that exchanges gradients such as quantize8, or leave --layout out"
        raise UsageError(explain(what, value=str(setup.world.layout), fix=fix))
    if setup.num_groups > 1:
        what = "a divided model has a group of its own for each axis"
        raise UsageError(explain(what, value=f"--groups {setup.num_groups}", fix="leave --groups or --layout out"))


def _check_steps(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer needs whole matrices, and ranks hold parts of them."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        cut = [name_of[id(p)] for p in held if (d := division_of(p)) is not None and d.dim is not None]
        if cut and needs_whole_tensors(optimizer):
            what = f"{type(optimizer).__name__} needs whole matrices, and the axis tp divides {listed(cut)}"
            fix = "leave these parameters to an optimizer such as AdamW, or choose a layout without tp"
            raise UsageError(explain(what, fix=fix))


def _inside(
    chosen: Strategy, model: nn.Module, optimizer: Any, setup: Setup, axes: Axes
) -> tuple[DistributedDataParallel | None, Any]:
    """Return what averages gradients between the copies of the model, and the optimizer to step."""
    group = axes.group(*DATA_AXES)
    if group is None:
        return None, optimizer
    if isinstance(chosen.prepare, ways.Sharded):
        from ..sharding import shard

        lazy = chosen.prepare.exchange
        return None, shard(model, optimizer, group, exchange=None if lazy is None else lazy())[1]
    foreign = [n for n, p in model.named_parameters() if (d := division_of(p)) is not None and not d.is_owned]
    vars(model)["_ddp_params_and_buffers_to_ignore"] = foreign
    options = {"device_ids": device_ids(model), "process_group": group, **setup.ddp_options}
    exchange: Any = None
    if isinstance(chosen.prepare, WithExchange):
        exchange, optimizer = chosen.prepare.make(optimizer)
    inside = DistributedDataParallel(model, **options)
    if isinstance(exchange, GradientExchange):
        inside.use_exchange(exchange)
    elif exchange is not None:
        inside.use_weight_exchange(exchange, optimizer)
    return inside, optimizer

"""Train a model that is divided over the ranks of a layout, with a strategy that averages gradients between its copies.

[Note: data parallelism around a divided model] Ranks at the same place of different copies of the model hold the same parts of
it, and average the gradients of those parts in a group of their own. Without a pipeline DistributedDataParallel does so as
usual, while backward runs. In a pipeline a parameter's gradient grows with each microbatch, and some schedules compute it
without autograd, so no hook tells when it is complete. The pipeline itself says when its backward has ended; the gradients
are then handed to the very same reducer, by a backward from the parameters alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..distributed import DistributedDataParallel
from ..errors import UsageError, explain
from ..exchange import GradientExchange
from ..optim.divided import DividedOptimizer
from ..parallel.axes import WHOLE, make_axes
from ..parallel.division import division_of
from ..parallel.prepare import Divided, Wishes, check_wishes, divide_model, draw_alike
from ..parallel.state import fit, gather_optimizer_states
from ..sharding.elementwise import needs_whole_tensors
from ..units import listed
from ..weights.equal_start import broadcast_tensors
from ..world.layout import DATA_AXES, MODEL_AXES, Layout
from . import ways
from .model_step import plain_step
from .prepared import PreparedDDP, StandsForModule, has_graph
from .ways import PreparedPair, Setup, WithExchange, device_ids, several

if TYPE_CHECKING:
    from ..sharding import ShardedOptimizer
    from ..world.layout import StageTimes
    from .table import Strategy


class PreparedParallel(StandsForModule):
    """A divided model, standing for its module.

    Args:
        divided: the model, divided.
        make_inside: makes what averages gradients between copies of the model, once parameters are where they stay; None: there
            is one copy, or the optimizer averages.
        loss: for :meth:`step`.
        sharded: what averages gradients in their place.
    """

    def __init__(
        self,
        divided: Divided,
        make_inside: Callable[[], DistributedDataParallel] | None,
        loss: Callable[..., Any] | None = None,
        sharded: Sequence[ShardedOptimizer] = (),
    ) -> None:
        super().__init__()
        self.add_module("module", divided.model)
        # In the dictionary: as parts they would give parameters a second name.
        self.__dict__.update(_divided=divided, _make_inside=make_inside, _loss=loss, _sharded=sharded)
        if divided.pipe is None:
            divided.inside = make_inside and make_inside()
        elif make_inside is not None or sharded:
            divided.pipe.at_backward_end = self._average

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        divided: Divided = self.__dict__["_divided"]
        inside = self._inside
        trains = self.module.training and torch.is_grad_enabled()
        if divided.pipe is not None and inside is not None and trains:
            inside.take_up_changes()  # here, because none are while a backward runs
        if divided.pipe is not None and trains:
            groups = [inside.process_group] if inside is not None and inside.forward_sync_buffers else []
            for group in groups or [each.group for each in self.__dict__["_sharded"][:1]]:
                broadcast_tensors(self.module.buffers(), group, source=0)
        return divided(*args, **kwargs)

    @property
    def _inside(self) -> DistributedDataParallel | None:
        found: DistributedDataParallel | None = self.__dict__["_divided"].inside
        return found

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if inspect.ismethod(found) and found.__self__ is self.__dict__["_modules"].get("module"):
            return functools.wraps(found)(functools.partial(self._call_method, found))
        return found

    def _call_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module; where it calls the module, that is a call of the prepared model."""
        module, divided = self.module, self.__dict__["_divided"]
        num_calls = 0

        def forward(*inputs: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            del vars(module)["forward"]
            try:
                return self(*inputs, **options)
            finally:
                vars(module)["forward"] = forward

        if "forward" in vars(module):  # the method of a method, or a forward of the script's own
            return method(*args, **kwargs)
        vars(module)["forward"] = forward
        try:
            found = method(*args, **kwargs)
        finally:
            vars(module).pop("forward", None)
        if num_calls or not torch.is_grad_enabled() or not has_graph(found):
            return found
        if divided.pipe is not None or divided.around is not WHOLE:
            what = f"the method {method.__name__!r} computes by parts of a divided model, which are not whole here"
            fix = "let it call the model itself, as in self(x), or choose a layout without pp, space and sequence"
            raise UsageError(explain(what, value=str(divided.axes.layout), fix=fix))
        return found if self._inside is None else self._inside._post_forward(found)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss and the gradients of one batch, by the loss given to ``prepare``. Every rank must call it.

        Args:
            args: the model's arguments, and last what the loss compares its outputs with.
            kwargs: the model's keyword arguments.

        Returns:
            The mean loss over this copy's batch, detached. Gradients are averaged; the optimizer has not stepped.
        """
        divided: Divided = self.__dict__["_divided"]
        loss = self.__dict__["_loss"]
        if loss is None:
            what = "model.step() needs the loss function"
            raise UsageError(explain(what, fix="give it to gz.prepare(model, optimizer, loss=loss_fn)"))
        with divided.batches.compared(args, kwargs):
            if divided.pipe is not None:
                divided.draw_alike()
                return divided.pipe.step(*args, **kwargs)
            return plain_step(self, loss, args, kwargs)

    def stage_times(self) -> list[StageTimes]:
        """Return the stages of a pipeline on this rank, and their times; none without a pipeline, or before its first batch."""
        divided: Divided = self.__dict__["_divided"]
        found: list[StageTimes] = divided.pipe.plans.times() if divided.pipe is not None else []
        return found

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange of gradients between the copies of the model. Every rank must call it."""
        return {} if self._inside is None else self._inside.exchange_state_dict()

    def load_exchange_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`exchange_state_dict` returned on this rank. Every rank must call it."""
        if self._inside is not None:
            self._inside.load_exchange_state_dict(saved)
        elif saved:  # a pipeline chooses its stages in its first forward
            self.__dict__["_saved_exchange"] = saved

    def draw_alike(self) -> None:
        """Give the ranks that hold one copy of the model the same random numbers from now on. Each must call it."""
        draw_alike(self.__dict__["_divided"].axes, next(self.module.parameters()).device)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards leave gradients on their ranks; see ``DistributedDataParallel.no_sync``."""
        return contextlib.nullcontext() if self._inside is None else self._inside.no_sync()

    def _average(self) -> None:
        """Hand the gradients of a pipeline's backward to the reducer. See [Note: data parallelism around a divided model]."""
        for each in self.__dict__["_sharded"]:
            each.carrier.backward_ended()
        if self.__dict__["_make_inside"] is None:
            return
        owned = [p for p in self.module.parameters() if (d := division_of(p)) is None or d.is_owned]
        if not any(p.requires_grad for p in owned):  # a stage whose layers are frozen has nothing to average
            return
        if self._inside is None:
            self.__dict__["_divided"].inside = self.__dict__["_make_inside"]()
            if (saved := self.__dict__.pop("_saved_exchange", None)) is not None:
                self.load_exchange_state_dict(saved)
        inside = self._inside
        assert inside is not None
        if not inside.require_backward_grad_sync:
            return
        trained = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        inside.take_up_changes()
        if inside.reducer is not None:
            inside.reducer.expect_backward()  # which goes through no graph of a forward
        torch.autograd.backward(trained, gradients)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        what = "a divided model cannot be copied: each rank has a part of it"
        raise UsageError(
            explain(what, fix="keep model.state_dict(), which is whole, on every rank; or load it into a new module")
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        what = "a divided model cannot be pickled: each rank has a part of it"
        raise UsageError(
            explain(what, fix="save model.state_dict(), which is whole; call it on every rank, and save on one")
        )


def prepare_divided(model: nn.Module, optimizer: Any, setup: Setup, chosen: Strategy) -> PreparedPair:
    """Prepare a model for a layout that divides it, with ``chosen`` between its copies. Every rank must call it.

    Args:
        model: whole, and equal on all ranks.
        optimizer: the user's, or a tuple of several.
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
    given = several(optimizer)
    _check_steps(model, given, axes.layout)

    def fit_all() -> None:
        for each in given:
            fit(each.state)

    fit_all()
    if found.pipe is not None:
        found.pipe.at_cut = fit_all
    peers = tuple(group for group in (axes.group(*MODEL_AXES),) if group is not None)
    group = axes.group(*DATA_AXES)
    if group is not None and isinstance(chosen.prepare, ways.Sharded):
        from ..sharding import shard

        lazy, has_stages = chosen.prepare.exchange, found.pipe is not None
        _, made = shard(model, given, group, exchange=None if lazy is None else lazy(), has_stages=has_stages)
        for each in made:
            each.peers = peers
            gather_optimizer_states(each)

        def begin() -> None:
            for each in made:
                each.begin()

        if found.pipe is not None:
            found.pipe.at_cut = begin
        whole = made if isinstance(optimizer, tuple) else made[0]
        return _pair(PreparedParallel(found, None, wishes.loss, made), whole, found, wishes)
    exchange = None
    if group is not None and isinstance(chosen.prepare, WithExchange):
        exchange, optimizer = chosen.prepare.make(optimizer)
    stepping = tuple(DividedOptimizer(each, peers) for each in several(optimizer))
    stepped = stepping if isinstance(optimizer, tuple) else stepping[0]
    if group is None:
        return _pair(PreparedParallel(found, None, wishes.loss), stepped, found, wishes)

    def inside() -> DistributedDataParallel:
        foreign = [n for n, p in model.named_parameters() if (d := division_of(p)) is not None and not d.is_owned]
        vars(model)["_ddp_params_and_buffers_to_ignore"] = foreign
        options = {"device_ids": device_ids(model), "process_group": group, "init_sync": False, **setup.ddp_options}
        if found.pipe is not None and not options.get("static_graph"):  # no forward of its own tells which were unused
            options["find_unused_parameters"] = True
        made = (DistributedDataParallel if found.pipe is not None else PreparedDDP)(model, **options)
        if isinstance(made, PreparedDDP):
            for each in several(stepped):
                made.look_at_steps(each)
        if exchange is not None:
            made.use_exchange(exchange)
        return made

    return _pair(PreparedParallel(found, inside, wishes.loss), stepped, found, wishes)


class _Inputs(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_and_kwargs = args, kwargs


def inputs_of(loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the loss function gives to the model."""

    def called(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Inputs(args, kwargs)

    try:
        loss_fn(called, batch)
    except _Inputs as found:
        return found.args_and_kwargs
    raise UsageError(explain("the loss function did not call the model", fix="call model(...) in it, once"))


class PipelineStep:
    """The step of a pipeline whose schedule computes the loss of each microbatch. See [Note: who owns the step] in ways.py.

    Args:
        divided: the model in stages.
        optimizers: what is stepped.
    """

    def __init__(self, divided: Divided, optimizers: Sequence[Optimizer]) -> None:
        self._divided, self._optimizers = divided, optimizers

    def __call__(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        passed: Callable[[str], object] = lambda part: None,
    ) -> Tensor:
        """Train on one batch; see ``Step``."""
        args, kwargs = inputs_of(loss_fn, batch)

        def loss(output: Any, part: Any) -> Any:
            return loss_fn(lambda *args, **kwargs: output, part)

        pipe = self._divided.pipe
        assert pipe is not None
        with self._divided.batches.compared(batch):
            self._divided.draw_alike()
            found = pipe.train(args, kwargs, batch, loss)
        passed("forward")
        passed("backward")
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        passed("optimizer")
        return found


def _pair(prepared: PreparedParallel, optimizer: Any, divided: Divided, wishes: Wishes) -> PreparedPair:
    """Return what ``prepare`` does; its step follows the schedule, if that is another one than the script's own loop has."""
    if divided.pipe is None or wishes.loss is None or wishes.schedule == "gpipe":
        return PreparedPair(prepared, optimizer)
    return PreparedPair(prepared, optimizer, PipelineStep(divided, several(optimizer)), is_callable=True)


def _check_steps(model: nn.Module, optimizers: Sequence[Optimizer], layout: Layout) -> None:
    """Raise if an optimizer needs whole matrices, or all of them, and ranks hold parts."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        if layout.pp > 1 and isinstance(optimizer, torch.optim.LBFGS):
            what = "LBFGS searches along a line through all weights at once, and stages of a pipeline hold some of them each"
            raise UsageError(
                explain(what, value=str(layout), fix="use an optimizer such as AdamW, or a layout without pp")
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        cut = [name_of[id(p)] for p in held if (d := division_of(p)) is not None and d.dim is not None]
        if cut and needs_whole_tensors(optimizer):
            what = f"{type(optimizer).__name__} needs whole matrices, and the axis tp divides {listed(cut)}"
            fix = "leave these parameters to an optimizer such as AdamW, or choose a layout without tp"
            raise UsageError(explain(what, fix=fix))


def _check_inside(chosen: Strategy, setup: Setup) -> None:
    """Raise if ``chosen`` cannot train copies of a divided model."""
    layout = setup.world.layout
    fix = "choose hybrid, sharded or a strategy that exchanges gradients such as quantize8, or leave --layout out"
    prepare = chosen.prepare
    if not (prepare is ways.ddp or isinstance(prepare, WithExchange | ways.Sharded)):
        what = f"strategy {chosen.name} cannot average gradients between copies of a divided model"
        raise UsageError(explain(what, value=str(layout), fix=fix))
    if isinstance(prepare, WithExchange) and not (
        prepare.exchange and isinstance(prepare.exchange(), GradientExchange)
    ):
        what = f"strategy {chosen.name} exchanges weights or brings its optimizer, which it cannot for a divided model"
        raise UsageError(explain(what, value=str(layout), fix=fix))
    if setup.num_groups > 1:
        what = "a divided model has a group of its own for each axis"
        raise UsageError(explain(what, value=f"--groups {setup.num_groups}", fix="leave --groups or --layout out"))

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..distributed import DistributedDataParallel
from ..distributed.arguments import LEFT_OUT
from ..errors import UsageError, explain
from ..exchange import GradientExchange
from ..exchange.weights import WeightExchange
from ..gradients.additions import Additions
from ..optim.divided import DividedOptimizer
from ..optim.wrapped import WrappedOptimizer
from ..parallel.axes import WHOLE, make_axes
from ..parallel.division import division_of, take_first
from ..parallel.equal_batches import mode_of
from ..parallel.prepare import Divided, Wishes, check_wishes, divide_model, draw_alike
from ..parallel.proof import before_step
from ..parallel.state import fit, gather_optimizer_states
from ..sharding.elementwise import choose_keepers, needs_whole_tensors
from ..weights.equal_start import broadcast_tensors
from ..world.layout import DATA_AXES, MODEL_AXES, Layout
from . import ways
from .model_step import PipelineStep, plain_step
from .prepared import PreparedDDP, StandsForModule, has_graph
from .ways import PreparedPair, Setup, WithExchange, device_ids, several

if TYPE_CHECKING:
    from ..sharding import ShardedOptimizer
    from ..weights.around import AroundSteps
    from ..world.layout import StageTimes
    from .table import Strategy


class PreparedParallel(StandsForModule):
    """A divided model, standing for its module.

    Args:
        divided: the model, divided.
        given: the script's own optimizers, whose state is divided too.
        make_inside: makes what averages gradients between copies of the model, once parameters are where they stay; None: there
            is one copy, or the optimizer averages.
        loss: for :meth:`step`.
        sharded: what averages gradients in their place.
        is_exact: whether what averages gradients gives their exact mean.
    """

    def __init__(
        self,
        divided: Divided,
        given: Sequence[Optimizer],
        make_inside: Callable[[], DistributedDataParallel] | None,
        loss: Callable[..., Any] | None = None,
        sharded: Sequence[ShardedOptimizer] = (),
        is_exact: bool = True,
    ) -> None:
        super().__init__()
        self.add_module("module", divided.model)
        # In the dictionary: as parts they would give parameters a second name.
        self.__dict__.update(_divided=divided, _given=given, _make_inside=make_inside, _loss=loss, _sharded=sharded)
        self.__dict__.update(_holds_gradients=False, _additions=Additions(list(divided.model.named_parameters())))
        divided.averages, divided.equal_buffers = self._averages, self._equal_buffers
        divided.has_exact_gradients = make_inside is None or is_exact
        for each in given:
            fit(each.state)
        if divided.pipe is None:
            divided.inside = make_inside and make_inside()
        else:
            divided.pipe.at_cut, divided.pipe.at_backward_end = self._begin, self._average
            divided.before_batch = self._before_batch

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.__dict__["_additions"].refuse(self.module, frozenset(), self.__dict__["_divided"].axes.everyone.rank())
        return self.__dict__["_divided"](*args, **kwargs)

    def _before_batch(self) -> None:
        """Before a batch of a pipeline in training: take up changes of the model, and make buffers equal."""
        divided, inside = self.__dict__["_divided"], self._inside
        if divided.pipe is None or not (self.module.training and torch.is_grad_enabled()):
            return
        if inside is not None and inside.around is not None:
            inside.around.note_forward()
        if inside is not None:
            inside.take_up_changes()  # here, because none are while a backward runs
        self._equal_buffers()

    def _equal_buffers(self) -> None:
        """Give all copies the buffers of the first one, where a forward in this mode begins so. Every rank must call it."""
        divided, inside = self.__dict__["_divided"], self._inside
        begins = self.module.training and torch.is_grad_enabled() and (inside is None or inside.forward_sync_buffers)
        if divided.pipe is None and inside is not None:
            begins = inside.will_sync_module_buffers()
        group = divided.axes.group(*DATA_AXES)
        if group is not None and begins:
            broadcast_tensors(self.module.buffers(), group, source=0)

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
        pipe = divided.pipe
        if pipe is None:
            with divided.batches.compared(mode_of(divided.model), args, kwargs):
                return plain_step(self, loss, args, kwargs)
        return divided.batch(
            (args, kwargs),
            functools.partial(pipe.step, *args, **kwargs),
            lambda: plain_step(divided.model, loss, args, dict(kwargs)),
        )

    def stage_times(self) -> list[StageTimes]:
        """Return the stages of a pipeline on this rank, and their times; none without a pipeline, or before its first batch."""
        divided: Divided = self.__dict__["_divided"]
        found: list[StageTimes] = divided.pipe.plans.times() if divided.pipe is not None else []
        return found

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange of gradients between the copies of the model. Every rank must call it."""
        if self._inside is None:  # what was loaded waits for the first forward
            return dict(self.__dict__.get("_saved_exchange", {}))
        return self._inside.exchange_state_dict()

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
        if self.__dict__["_divided"].pipe is not None:
            return self._held()
        return contextlib.nullcontext() if self._inside is None else self._inside.no_sync()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        before, self.__dict__["_holds_gradients"] = self.__dict__["_holds_gradients"], True
        try:
            yield
        finally:
            self.__dict__["_holds_gradients"] = before

    def _averages(self) -> bool:
        inside = self._inside
        if inside is None or inside.keeps_gradients or self.__dict__["_holds_gradients"]:
            return False
        return bool(inside.require_backward_grad_sync)

    @property
    def around(self) -> AroundSteps | None:
        """What exchanges weights with the other copies of the model; None if nothing does, or not before the first forward."""
        return None if self._inside is None else self._inside.around

    def agree(self) -> None:
        """Make the weights of all copies of the model equal, if weights are exchanged. Every rank must call it."""
        if self._inside is not None:
            self._inside.agree()

    @override
    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.agree()
        return super().train(mode)

    def _begin(self) -> None:
        """Set up data parallelism for the parameters that this rank's stage holds. Every rank must call it."""
        for each in self.__dict__["_given"]:
            fit(each.state)
        for sharded in self.__dict__["_sharded"]:
            sharded.begin()
        if (make := self.__dict__["_make_inside"]) is None:
            return
        left_out = set(getattr(self.module, LEFT_OUT, ()))
        named = [(n, p) for n, p in self.module.named_parameters() if n not in left_out]
        owned = [p for _, p in named if (d := division_of(p)) is None or d.is_owned]
        if not any(p.requires_grad for p in owned):  # a stage of frozen layers has nothing to average
            return
        self.__dict__["_divided"].inside = make()
        if (saved := self.__dict__.pop("_saved_exchange", None)) is not None:
            self.load_exchange_state_dict(saved)

    def _average(self) -> None:
        """Hand the gradients of a pipeline's backward to the reducer. See [Note: data parallelism around a divided model]."""
        for each in self.__dict__["_sharded"]:
            each.carrier.backward_ended()
        if self._inside is None and self.__dict__["_make_inside"] is not None:
            self._begin()  # layers may be trained from now on that were frozen
        inside = self._inside
        if inside is None or inside.keeps_gradients or self.__dict__["_holds_gradients"]:
            return
        trained = [p for p in self.module.parameters() if p.requires_grad and p.grad is not None]
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
    group = axes.group(*DATA_AXES)
    is_sharded = group is not None and isinstance(chosen.prepare, ways.Sharded)
    needs_whole = _check_steps(given, axes.layout, group.size() if group is not None and is_sharded else 1)
    for each in given:
        fit(each.state)
    peers = tuple(group for group in (axes.group(*MODEL_AXES),) if group is not None)
    is_alike = chosen.exact or (axes.size("tp") == 1 and found.pipe is None)

    def align(value_of: Callable[[Tensor], Tensor | None]) -> None:
        among: Any = None if found.pipe is None else found.pipe.ties.among
        take_first(model.parameters(), value_of, axes.group("tp"), among)

    if group is not None and isinstance(chosen.prepare, ways.Sharded):
        from ..sharding import shard

        lazy, has_stages = chosen.prepare.exchange, found.pipe is not None
        _, made = shard(model, given, group, exchange=None if lazy is None else lazy(), has_stages=has_stages)
        for each in made:
            each.peers = peers
            each.register_step_pre_hook(lambda *_: before_step())
            gather_optimizer_states(each, found.batches.meet)
            if not is_alike:
                each.register_step_post_hook(lambda *_: align(lambda p: p))
        whole = made if isinstance(optimizer, tuple) else made[0]
        return _pair(PreparedParallel(found, given, None, wishes.loss, made), whole, found, wishes)
    exchange: Any = None
    if group is not None and isinstance(chosen.prepare, WithExchange):
        exchange, optimizer = chosen.prepare.make(optimizer)
    stepping: list[WrappedOptimizer] = []
    for each, whole_ones in zip(several(optimizer), needs_whole, strict=True):
        if isinstance(each, WrappedOptimizer):  # which the strategy has brought
            each.peers = peers
            gather_optimizer_states(each.inner, found.batches.meet)
            stepping.append(each)
        else:
            stepping.append(DividedOptimizer(each, peers, whole_ones, found.batches.meet))
    stepped = tuple(stepping) if isinstance(optimizer, tuple) else stepping[0]
    if group is None:
        return _pair(PreparedParallel(found, given, None, wishes.loss), stepped, found, wishes)

    left_out = list(getattr(model, LEFT_OUT, ()))

    def inside() -> DistributedDataParallel:
        foreign = [n for n, p in model.named_parameters() if (d := division_of(p)) is not None and not d.is_owned]
        vars(model)[LEFT_OUT] = [*left_out, *foreign]
        options = {"device_ids": device_ids(model), "process_group": group, "init_sync": False, **setup.ddp_options}
        if found.pipe is not None and not options.get("static_graph"):  # no forward of its own tells which were unused
            options["find_unused_parameters"] = True
        made = (DistributedDataParallel if found.pipe is not None else PreparedDDP)(model, **options)
        if isinstance(made, PreparedDDP):
            made.look_at_steps(stepping[0])  # of several, each of which may step after the first one's zero_grad
        if isinstance(exchange, GradientExchange):
            made.use_exchange(exchange)
        elif exchange is not None:
            made.use_weight_exchange(exchange, stepping[0])
            if made.around is not None and not is_alike:
                made.around.after_exchange = lambda: align(lambda p: p)
        if made.reducer is not None and not is_alike:
            made.reducer.after_pass = lambda: align(lambda p: p.grad)
        return made

    is_exact = chosen.exact and not isinstance(exchange, WeightExchange)
    prepared = PreparedParallel(found, given, inside, wishes.loss, is_exact=is_exact)
    return _pair(prepared, stepped, found, wishes)


def _pair(prepared: PreparedParallel, optimizer: Any, divided: Divided, wishes: Wishes) -> PreparedPair:
    """Return what ``prepare`` does; its step follows the schedule, if that is another one than the script's own loop has."""
    if divided.pipe is None or wishes.loss is None or wishes.schedule == "gpipe":
        return PreparedPair(prepared, optimizer)
    return PreparedPair(prepared, optimizer, PipelineStep(divided, several(optimizer)), is_callable=True)


def _check_steps(optimizers: Sequence[Optimizer], layout: Layout, num_owners: int) -> list[bool]:
    """Return which optimizers step whole matrices of which ranks hold slices; raise if one needs all weights at once."""
    needs_whole = []
    for optimizer in optimizers:
        if layout.pp > 1 and isinstance(optimizer, torch.optim.LBFGS):
            what = "LBFGS searches along a line through all weights at once, and stages of a pipeline hold some of them each"
            raise UsageError(
                explain(what, value=str(layout), fix="use an optimizer such as AdamW, or a layout without pp")
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        is_cut = any((d := division_of(p)) is not None and d.dim is not None for p in held)
        # In a pipeline it has whole tensors, but not all of them: an unknown one may look at all.
        needs_whole.append((is_cut or layout.pp > 1) and needs_whole_tensors(optimizer) and is_cut)
        if needs_whole[-1]:
            choose_keepers(optimizer, num_owners)
    return needs_whole


def _check_inside(chosen: Strategy, setup: Setup) -> None:
    """Raise if ``chosen`` cannot train copies of a divided model."""
    layout = setup.world.layout
    fix = "choose hybrid, sharded or a strategy that exchanges gradients such as quantize8, or leave --layout out"
    prepare = chosen.prepare
    if not (prepare is ways.ddp or isinstance(prepare, WithExchange | ways.Sharded)):
        what = f"strategy {chosen.name} cannot average gradients between copies of a divided model"
        raise UsageError(explain(what, value=str(layout), fix=fix))
    exchange = prepare.exchange() if isinstance(prepare, WithExchange) and prepare.exchange is not None else None
    if isinstance(exchange, WeightExchange):
        if not exchange.in_step:
            what = f"under strategy {chosen.name} the ranks of one copy of the model would take up weights at different times"
            raise UsageError(
                explain(what, value=str(layout), fix="choose local-sgd or decentralized, or leave --layout out")
            )
        if layout.space * layout.sequence > 1:
            what = f"strategy {chosen.name} leaves gradients on their ranks, and along space and sequence they are parts of one"
            raise UsageError(explain(what, value=str(layout), fix="choose a layout of dp, pp and tp, or hybrid"))
    if setup.num_groups > 1:
        what = "a divided model has a group of its own for each axis"
        raise UsageError(explain(what, value=f"--groups {setup.num_groups}", fix="leave --groups or --layout out"))

"""The functions that apply each strategy to a model and its optimizer; the table in ``table.py`` refers to them.

[Note: who owns the step] Most strategies leave the training step to the script: forward, loss, backward, ``optimizer.step()``.
A strategy that interleaves these parts (a pipeline computes several pieces of a batch at once, and only its last rank has the
loss) has to own the whole step. So each strategy returns, besides the model and the optimizer, a :class:`Step`: if the strategy
does not own the step, it is a :class:`PlainStep`, which runs the same calls as a script's own loop. A script that trains by
``prepared.step(batch, loss_fn)`` runs under every strategy. A strategy that owns the step returns a model whose forward raises
an error that names ``step``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang.errors import UsageError, explain
from guozhuang.exchange import GradientExchange
from guozhuang.groups import round_robin
from guozhuang.groups.subgroups import timeout_s
from guozhuang.strategies.prepared import PreparedDataParallel, PreparedDDP, PreparedTorchDDP
from guozhuang.world import World

_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Setup:
    """The properties of the run for which a strategy prepares a model.

    Attributes:
        world: the world of this process.
        num_replicas: how many copies a strategy of one process makes; None leaves the choice to the strategy.
        num_groups: how many process groups take the buckets in turn.
        ddp_options: arguments of DistributedDataParallel, for strategies that wrap the model in it.
        wishes: how the model is to be divided, where ``world.layout`` divides it: the arguments of ``parallel.prepare.Wishes``.
    """

    world: World
    num_replicas: int | None = None
    num_groups: int = 1
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    wishes: Mapping[str, Any] = field(default_factory=dict)


class Step(Protocol):
    """One training step: forward, loss, backward, the optimizer's step, and gradients set to None."""

    def __call__(
        self, batch: Any, loss_fn: Callable[[Any, Any], Tensor], *, passed: Callable[[str], object] = ...
    ) -> Tensor:
        """Train on one batch. Every rank must call, each with its own batch.

        Args:
            batch: passed to ``loss_fn``.
            loss_fn: ``loss_fn(model, batch)`` calls the model once and returns the mean loss over the batch, a tensor of one
                element. A strategy may call it with a part of the batch (along the first dim of all its tensors) and with a
                stand-in for the model.
            passed: called with "forward", "backward" and "optimizer" when that phase has ended; a strategy that interleaves
                phases calls it at the end of the last piece of each.

        Returns:
            The loss on this rank's batch, detached.

        Raises:
            UsageError: ``loss_fn`` did not return a tensor of one element.
        """
        ...


def several(optimizer: Optimizer | tuple[Optimizer, ...]) -> tuple[Optimizer, ...]:
    """Return what a prepared pair has as its second value, one optimizer or several, as a tuple."""
    return (optimizer,) if isinstance(optimizer, Optimizer) else optimizer


class PlainStep:
    """The step of strategies without a step of their own: forward, backward, optimizer step and zero_grad."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | tuple[Optimizer, ...]) -> None:
        self._model, self._optimizers = model, several(optimizer)

    def __call__(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        passed: Callable[[str], object] = lambda part: None,
    ) -> Tensor:
        """Train on one batch; see :class:`Step`."""
        loss = loss_fn(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "the loss function must return a tensor of one element"
            raise UsageError(explain(what, value=loss, fix="return the mean loss"))
        passed("forward")
        loss.backward()
        passed("backward")
        update(self._optimizers, passed)
        return loss.detach()


def update(optimizers: Iterable[Optimizer], passed: Callable[[str], object]) -> None:
    """Let the optimizers make their step, then set their gradients to None; the last part of every training step."""
    made = tuple(optimizers)
    for optimizer in made:
        optimizer.step()
    for optimizer in made:
        optimizer.zero_grad()
    passed("optimizer")


class PreparedPair(tuple[nn.Module, Any]):
    """The tuple ``model, optimizer``, with the strategy's training step as an attribute. See [Note: who owns the step].

    Args:
        model: the model to be called in place of the user's.
        optimizer: the optimizer to be stepped in place of the user's; a tuple if the user gave several.
        step: the step of a strategy that has one; None for a plain one.
        is_callable: whether the model can be called too, so that the script may as well train it by its own loop.

    Attributes:
        step: trains on one batch, under any strategy.
        owns_step: whether the model can be trained by ``step`` only.
    """

    step: Step
    owns_step: bool

    def __new__(
        cls,
        model: nn.Module,
        optimizer: Optimizer | tuple[Optimizer, ...],
        step: Step | None = None,
        *,
        is_callable: bool = False,
    ) -> PreparedPair:
        """Make the tuple; without ``step``, a plain forward, backward and optimizer step is used."""
        made = super().__new__(cls, (model, optimizer))
        made.step, made.owns_step = step or PlainStep(model, optimizer), step is not None and not is_callable
        return made


def single(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Change nothing: the process trains alone."""
    return model, optimizer


def none(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Change nothing on any rank, and log a warning that the ranks do not communicate."""
    if setup.world.rank == 0:
        _log.warning(
            "strategy none: the ranks exchange nothing, so each trains a model of its own on its share of the data. "
            "It is a bound on speed for comparisons, not a way to train."
        )
    return model, optimizer


def ddp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Wrap the model in this project's DistributedDataParallel."""
    options = {"device_ids": device_ids(model), "process_group": _group(setup), **setup.ddp_options}
    wrapped = PreparedDDP(model, **options)
    wrapped.look_at_steps(optimizer)
    return wrapped, optimizer


class Lazy:
    """A deferred call, which imports its module only when it is called: each import costs a millisecond or more.

    Args:
        path: the path of the callable in the package, ``module:name``, for example ``exchange.cast:Cast``.
        *args: its arguments; a ``Lazy`` among them is replaced by the result of calling it.
        **options: its keyword arguments; a ``Lazy`` among them is replaced as well.
    """

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        self._path, self._args, self._options = path, args, options

    def __call__(self, *first: Any) -> Any:
        """Import the callable, and call it with ``first`` before its own arguments."""
        module, _, name = self._path.partition(":")
        found: Any = importlib.import_module(f"guozhuang.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        args = [arg() if isinstance(arg, Lazy) else arg for arg in self._args]
        options = {key: arg() if isinstance(arg, Lazy) else arg for key, arg in self._options.items()}
        return found(*first, *args, **options)

    def uses(self, module: str) -> bool:
        """Return whether the call, or one among its arguments, is of a module of the package."""
        inside = (each for each in (*self._args, *self._options.values()) if isinstance(each, Lazy))
        return self._path.partition(":")[0] == module or any(each.uses(module) for each in inside)


@dataclass(frozen=True)
class WithExchange:
    """Wraps the model in DistributedDataParallel with an exchange of gradients or of weights.

    Attributes:
        exchange: creates the exchange; None to use the one that ``optimizer.exchange()`` returns (``QAdam``).
        around: wraps the user's optimizer in the one that steps; None to use the user's own.
    """

    exchange: Lazy | None
    around: Lazy | None = None

    def make(self, optimizer: Optimizer) -> tuple[Any, Optimizer]:
        """Return a new exchange, and the optimizer that is to be stepped."""
        if self.around is not None:
            optimizer = self.around(optimizer)
        brought: Any = optimizer
        return (brought.exchange() if self.exchange is None else self.exchange()), optimizer

    def __call__(self, model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer to use in place of the user's. Every rank must call."""
        exchange, optimizer = self.make(optimizer)
        wrapped = PreparedDDP(model, **{"device_ids": device_ids(model), **setup.ddp_options})
        if isinstance(exchange, GradientExchange):
            wrapped.use_exchange(exchange)
        else:
            wrapped.use_weight_exchange(exchange, optimizer)
        wrapped.look_at_steps(optimizer)
        return wrapped, optimizer


#: Wraps the model in DistributedDataParallel, and finds out in the first steps which exact way of averaging is the fastest.
auto = Lazy("strategies.auto:prepare_auto")


def wraps_in_ddp(prepare: Callable[..., object]) -> bool:
    """Return whether a strategy's function wraps the model in DistributedDataParallel, ours or PyTorch's."""
    return prepare in (ddp, torch_ddp, auto) or isinstance(prepare, WithExchange)


def torch_ddp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Wrap the model in PyTorch's DistributedDataParallel."""
    options = {"device_ids": device_ids(model), "process_group": _group(setup), **setup.ddp_options}
    wrapped = PreparedTorchDDP(model, **options)
    wrapped.look_at_steps(optimizer)
    return wrapped, optimizer


def takes_several(prepare: Callable[..., object]) -> bool:
    """Return whether a strategy's function takes a model with several optimizers: it needs none of them, or divides each."""
    return prepare in (single, none, ddp, torch_ddp) or isinstance(prepare, Sharded)


@dataclass(frozen=True)
class Sharded:
    """Divides the optimizer's work and its state between the ranks.

    Attributes:
        exchange: creates the exchange that averages gradients; None for an exact sum.
    """

    exchange: Lazy | None = None

    def __call__(self, model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer to use in place of the user's. Every rank must call."""
        from guozhuang.sharding import shard

        return shard(model, optimizer, exchange=None if self.exchange is None else self.exchange())


def sharded_gradients(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Divide gradients and the optimizer's state by PyTorch's fully_shard."""
    from guozhuang.sharding.fully import shard_fully  # imported only when needed, because it imports DTensor

    return shard_fully(model, optimizer, keep_weights=True)


def sharded_weights(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Divide weights, gradients and the optimizer's state by PyTorch's fully_shard."""
    from guozhuang.sharding.fully import shard_fully

    return shard_fully(model, optimizer, keep_weights=False)


def dp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Wrap the model in DataParallel: a replica per device, in this process."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    num_accelerators = 0 if on_cpu else torch.accelerator.device_count()
    wanted = setup.num_replicas
    if num_accelerators:
        if wanted is not None and wanted > num_accelerators:
            raise UsageError(
                explain(
                    f"strategy dp was asked for {wanted} replicas and there are {num_accelerators} accelerators",
                    value=wanted,
                    fix=f"ask for at most {num_accelerators}, or keep the model on the CPU",
                )
            )
        kind = setup.world.device.type
        devices = [torch.device(kind, i) for i in range(wanted or num_accelerators)]
    else:
        # Each replica's forward runs in a thread, and PyTorch already uses all cores for one forward: two replicas are
        # enough to show what the method costs, and more would only compete for the cores.
        devices = [torch.device("cpu")] * (wanted or 2)
        if wanted is None:
            _log.info("strategy dp: 2 replicas on the CPU; ask for another number with num_replicas=")
    return PreparedDataParallel(model, device_ids=devices), optimizer


def _group(setup: Setup) -> dist.ProcessGroup | None:
    """Return the group to which buckets are sent; None stands for the default group."""
    if setup.num_groups == 1:
        return None
    assert dist.group.WORLD is not None
    return round_robin.over(setup.num_groups, timeout_s(dist.group.WORLD))


def device_ids(model: nn.Module) -> list[torch.device] | None:
    """Return the model's device in a list if it is a single accelerator; None for the CPU or several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    return list(devices) if len(devices) == 1 and next(iter(devices)).type != "cpu" else None

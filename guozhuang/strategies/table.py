"""Which ways to train there are: the table from a name to what is done to the model and the optimizer.

This is the only file that knows all of them. A new strategy is one entry here and whatever it is made of elsewhere.
"""

from __future__ import annotations

import atexit
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from guozhuang.data_parallel import DataParallel
from guozhuang.distributed import DistributedDataParallel
from guozhuang.distributed.recording import record_steps
from guozhuang.errors import UsageError, explain
from guozhuang.exchange import GradientExchange
from guozhuang.groups import round_robin
from guozhuang.groups.subgroups import timeout_s
from guozhuang.strategies.exchanges import METHODS, Method
from guozhuang.timeline import Timeline
from guozhuang.world import World, current, requested_groups, requested_strategy, requested_timeline

DEFAULT = "ddp"

_WRAPPERS = (DistributedDataParallel, DataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)

_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Setup:
    """What a strategy is told besides the model and the optimizer.

    Attributes:
        world: the world of this process.
        num_replicas: how many copies a strategy of one process makes; None leaves the choice to the strategy.
        num_groups: how many process groups take the buckets in turn.
    """

    world: World
    num_replicas: int | None = None
    num_groups: int = 1


Prepared: TypeAlias = tuple[nn.Module, Optimizer]


@dataclass(frozen=True)
class Strategy:
    """One complete way to train.

    Attributes:
        name: the word that selects it.
        summary: one line for tables and help.
        exact: the weights equal those of a single process on the joined batch, to rounding.
        trains: False for a bound on speed that must not be used to train.
        one_process: the whole global batch goes through one process; a world of several ranks is impossible.
        prepare: does it; called on every rank.
        source: the paper or the software that it comes from, for reports; empty where there is none.
        takes_groups: its buckets can be handed to several process groups in turn.
        warmup_steps: steps at the start in which it sends more than later.
    """

    name: str
    summary: str
    exact: bool
    trains: bool
    one_process: bool
    prepare: Callable[[nn.Module, Optimizer, Setup], Prepared]
    source: str = ""
    takes_groups: bool = False
    warmup_steps: int = 0


def _single(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    return model, optimizer


def _none(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    if setup.world.rank == 0:
        _log.warning(
            "strategy none: the ranks exchange nothing, so each trains a model of its own on its share of the data. "
            "It is a bound on speed for comparisons, not a way to train."
        )
    return model, optimizer


def _ddp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    return DistributedDataParallel(model, device_ids=_device_ids(model), process_group=_group(setup)), optimizer


def _exchanging(method: Method) -> Callable[[nn.Module, Optimizer, Setup], Prepared]:
    def prepare(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
        if method.around is not None:
            optimizer = method.around(optimizer)
        wrapped = DistributedDataParallel(model, device_ids=_device_ids(model))
        exchange = method.make(optimizer)
        if isinstance(exchange, GradientExchange):
            wrapped.use_exchange(exchange)
        else:
            wrapped.use_weight_exchange(exchange, optimizer)
        return wrapped, optimizer

    return prepare


def _torch_ddp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=_device_ids(model), process_group=_group(setup))
    return wrapped, optimizer


def _horovod(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    # What serves scripts of other systems stands on top of the package, and nothing below may know it: this one name is looked
    # up when it is asked for, so that a strategy of that kind can be compared all the same.
    prepared: Prepared = importlib.import_module("guozhuang.compat.horovod.strategy").prepare(model, optimizer)
    return prepared


def _sharded(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    from guozhuang.sharding import shard

    return shard(model, optimizer)


def _sharded_gradients(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    from guozhuang.sharding.fully import shard_fully  # DTensor and all that it imports

    return shard_fully(model, optimizer, keep_weights=True)


def _sharded_weights(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
    from guozhuang.sharding.fully import shard_fully

    return shard_fully(model, optimizer, keep_weights=False)


def _dp(model: nn.Module, optimizer: Optimizer, setup: Setup) -> Prepared:
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
        # A thread computes a replica's forward, and PyTorch already spreads one forward over the cores: two replicas
        # show what the method costs, more would only crowd them.
        devices = [torch.device("cpu")] * (wanted or 2)
        if wanted is None:
            _log.info("strategy dp: 2 replicas on the CPU; ask for another number with num_replicas=")
    return DataParallel(model, device_ids=devices), optimizer


def _group(setup: Setup) -> dist.ProcessGroup | None:
    """What takes the buckets: None for the default group."""
    if setup.num_groups == 1:
        return None
    assert dist.group.WORLD is not None
    return round_robin.over(setup.num_groups, timeout_s(dist.group.WORLD))


def _device_ids(model: nn.Module) -> list[torch.device] | None:
    """Name the device only where there is exactly one accelerator to name; CPU and several devices take None."""
    devices = {parameter.device for parameter in model.parameters()}
    return list(devices) if len(devices) == 1 and next(iter(devices)).type != "cpu" else None


_VLDB = (
    "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, arXiv:2006.15704"
)
_ZERO = (
    "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, "
    "arXiv:1910.02054"
)

# Simplest to live with first: where measurements tie, the earlier one is recommended.
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy(
                "single",
                "one process, all cores, the whole global batch",
                exact=True,
                trains=True,
                one_process=True,
                prepare=_single,
            ),
            Strategy(
                "ddp",
                "a process per share; gradients averaged while backward runs",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_ddp,
                source=_VLDB,
                takes_groups=True,
            ),
            Strategy(
                "torch-ddp",
                "the same by PyTorch's own DistributedDataParallel, the peer",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_torch_ddp,
                source=_VLDB,
                takes_groups=True,
            ),
            Strategy(
                "horovod",
                "a DistributedOptimizer: gradients are matched by name, in whatever order they come",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_horovod,
                source="Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018, "
                "arXiv:1802.05799",
            ),
            Strategy(
                "dp",
                "one process, a replica per share in threads, one optimizer",
                exact=True,
                trains=True,
                one_process=True,
                prepare=_dp,
                source="torch.nn.DataParallel, of which it is a drop-in; Krizhevsky, One weird trick for parallelizing "
                "convolutional neural networks, 2014, arXiv:1404.5997",
            ),
            Strategy(
                "sharded",
                "each rank updates its part of the weights; in the shared memory of one CPU node they exist once",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_sharded,
                source=_ZERO,
            ),
            Strategy(
                "sharded-gradients",
                "gradients and optimizer state divided, by PyTorch's fully_shard",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_sharded_gradients,
                source=_ZERO,
            ),
            Strategy(
                "sharded-weights",
                "weights divided too, gathered layer by layer, by PyTorch's fully_shard",
                exact=True,
                trains=True,
                one_process=False,
                prepare=_sharded_weights,
                source=_ZERO,
            ),
            *(
                Strategy(
                    name,
                    method.summary,
                    exact=method.exact,
                    trains=True,
                    one_process=False,
                    prepare=_exchanging(method),
                    source=method.source,
                    warmup_steps=method.warmup_steps,
                )
                for name, method in METHODS.items()
            ),
            Strategy(
                "none",
                "ranks without any communication: the bound on speed, not a way to train",
                exact=False,
                trains=False,
                one_process=False,
                prepare=_none,
            ),
        )
    }
)


def get(name: str) -> Strategy:
    """Look a strategy up.

    Raises:
        UsageError: there is none of that name; the text lists those there are.
    """
    if name not in STRATEGIES:
        raise UsageError(explain("there is no such strategy", value=name, fix=f"choose one of {', '.join(STRATEGIES)}"))
    return STRATEGIES[name]


def check_groups(strategy: Strategy, num_groups: int) -> None:
    """Refuse several groups for a strategy that hands nothing to groups.

    Raises:
        UsageError: it is asked for more groups than it can use.
    """
    if num_groups > 1 and not strategy.takes_groups:
        takers = [one.name for one in STRATEGIES.values() if one.takes_groups]
        what = f"strategy {strategy.name} does not hand buckets to several groups"
        fix = f"leave --groups out, or choose one of {', '.join(takers)}"
        raise UsageError(explain(what, value=f"--groups {num_groups}", fix=fix))


def prepare(
    model: nn.Module, optimizer: Optimizer, strategy: str | None = None, *, num_replicas: int | None = None
) -> Prepared:
    """Make a plain model and its optimizer train over the whole world. Every rank must call this, after ``init()``.

    Under ``guozhuang run --groups K`` the buckets of a strategy that exchanges gradients go to K process groups in turn.
    Under ``guozhuang run --timeline FILE`` what the model and the optimizer do from now on is recorded, and written when
    the process ends. A model that lies on the CPU while this rank owns an accelerator is moved there, which is said in the log.

    Args:
        model: the bare model, not wrapped yet; the same on every rank.
        optimizer: over parameters of that model.
        strategy: a name from :data:`STRATEGIES`. None: what ``guozhuang run --strategy`` asked for, else ``"ddp"``.
        num_replicas: for ``"dp"`` only: how many devices share the batch. None: every accelerator, or 2 on the CPU.

    Returns:
        What to call in place of the model, and what to step in place of the optimizer.

    Raises:
        UsageError: ``init()`` was not called, the name is unknown, the strategy is impossible in this world, the model
            is wrapped already or has nothing to train, or the optimizer holds parameters that the model lacks.
    """
    world = current()
    if world is None:
        raise UsageError(
            explain("prepare() was called before init()", fix="call `world = guozhuang.init()` first, on every rank")
        )
    asked_for = strategy if strategy is not None else requested_strategy()
    chosen = get(asked_for if asked_for is not None else DEFAULT)
    num_groups = requested_groups()
    check_groups(chosen, num_groups)
    _check(model, optimizer, chosen, world, num_replicas)
    _place(model, optimizer, world)
    if world.rank == 0:
        why = "as asked" if asked_for is not None else "the default"
        _log.info("strategy %s (%s): %s; %d rank(s)", chosen.name, why, chosen.summary, world.size)
    prepared = chosen.prepare(model, optimizer, Setup(world, num_replicas, num_groups))
    path = requested_timeline()
    if path is not None:
        timeline = Timeline(world.rank)
        record_steps(*prepared, timeline)
        atexit.register(timeline.write, f"{path}.rank{world.rank}")
    return prepared


def _check(model: nn.Module, optimizer: Optimizer, chosen: Strategy, world: World, num_replicas: int | None) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            explain(
                "prepare() takes a torch optimizer as its second value",
                value=type(optimizer).__name__,
                rank=world.rank,
                fix="make one from model.parameters() and hand it over",
            )
        )
    if chosen.one_process and world.size > 1:
        raise UsageError(
            explain(
                f"strategy {chosen.name} is for one process and this world has {world.size} ranks",
                value=chosen.name,
                rank=world.rank,
                fix="start the script in one process, or choose a strategy of several ranks such as ddp",
            )
        )
    if num_replicas is not None and (chosen.name != "dp" or num_replicas < 1):
        raise UsageError(
            explain("num_replicas is a count >= 1 for the strategy dp only", value=num_replicas, fix="leave it out")
        )
    if isinstance(model, _WRAPPERS):
        raise UsageError(
            explain("the model is wrapped already", value=type(model).__name__, fix="hand over the bare model")
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        fix = "call requires_grad_(True) on what is to be trained, or use the model as it is"
        raise UsageError(explain("no parameter of the model requires a gradient", value=type(model).__name__, fix=fix))
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise UsageError(
            explain(
                "the optimizer holds parameters that are not the model's",
                value=strangers,
                rank=world.rank,
                fix="make the optimizer from the parameters of the very model you hand over",
            )
        )


def _place(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Bring a model from the CPU to this rank's accelerator."""
    if world.device.type == "cpu" or any(p.device.type != "cpu" for p in model.parameters()):
        return
    fix = f"call model.to({str(world.device)!r}) before the optimizer is made"
    if optimizer.state:
        what = f"the model is on the CPU, this rank trains on {world.device}, and the optimizer has already stepped"
        raise UsageError(explain(what, rank=world.rank, fix=fix))
    before = {id(parameter) for parameter in model.parameters()}
    model.to(world.device)
    # CPU to CUDA keeps the Parameter objects, so the optimizer follows; some other devices get new ones.
    if before != {id(parameter) for parameter in model.parameters()}:
        what = f"moving the model to {world.device} made new parameters, which the optimizer does not know"
        raise UsageError(explain(what, rank=world.rank, fix=fix))
    _log.info("rank %d: the model was moved to %s", world.rank, world.device)

"""``prepare``: checks the requested strategy against the model and the world, applies it, and records steps on a timeline."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from guozhuang.distributed import DistributedDataParallel
from guozhuang.distributed.arguments import LEFT_OUT
from guozhuang.errors import UsageError, explain
from guozhuang.groups.agreement import agree
from guozhuang.groups.subgroups import timeout_s
from guozhuang.registry import registry
from guozhuang.sharding.optimizer import ShardedOptimizer
from guozhuang.sharding.prepared import EqualBuffers
from guozhuang.strategies.arguments import check_ddp_options, check_kinds, check_pair
from guozhuang.strategies.effects import check_axes, check_comparisons, check_own
from guozhuang.strategies.prepared import StandsForModule, warn_of_differences
from guozhuang.strategies.steps import look_for_nan, measure_own_time, record_steps
from guozhuang.strategies.table import DEFAULT, Strategy, check_groups, get
from guozhuang.strategies.ways import PlainStep, PreparedPair, Setup, Sharded, several, wraps_in_ddp
from guozhuang.timeline import Timeline
from guozhuang.world import (
    Layout,
    World,
    current,
    init,
    lay_out,
    requested_attention,
    requested_audit,
    requested_bucket_cap_mb,
    requested_checkpoint,
    requested_groups,
    requested_layout,
    requested_microbatches,
    requested_proof,
    requested_schedule,
    requested_strategy,
    requested_timeline,
)
from guozhuang.world.layout import AXES, HYBRID

_NO_WEIGHTS = "this strategy does not weigh the gradients of the ranks by their samples"
_log = logging.getLogger("guozhuang")

#: The attribute of a prepared model that holds a :class:`PreparedAlready`: one that every wrapper reads.
MARK = LEFT_OUT


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str | None = None,
    *,
    num_replicas: int | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    layout: str | None = None,
    cut: Sequence[str] | None = None,
    plan: Mapping[str, str] | None = None,
    loss: Callable[..., Any] | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    attention: str | None = None,
    proof: bool | None = None,
) -> PreparedPair:
    """Prepare a plain model and its optimizer to train over the whole world. Every rank must call this.

    Calls ``init()`` if the script has not; scripts that need the rank or the device before this call it themselves.

    Under ``guozhuang run --groups K`` the buckets of a strategy that exchanges gradients go to K process groups in turn.
    Under ``guozhuang run --timeline FILE`` the steps of the model and the optimizer are recorded from now on, and written to a
    file when the process ends. A model on the CPU is moved to this rank's accelerator, if it has one, with a line in the log.

    Args:
        model: the bare model, not wrapped yet; the same on every rank.
        optimizer: over parameters of that model; or several of them, as Muon for matrices and AdamW for the rest, which
            ``ddp`` and ``sharded`` take. They come back as a tuple, and each steps by its own ``step``.
        strategy: a name from :data:`STRATEGIES`. None: the one of ``guozhuang run --strategy``, else ``"ddp"``.
        num_replicas: for ``"dp"`` only: how many devices share the batch. None: every accelerator, or 2 on the CPU.
        ddp_options: arguments of ``DistributedDataParallel`` for strategies that wrap the model in it, for example
            ``{"find_unused_parameters": True}``. Strategies that do not wrap it do without those that tell how gradients are
            grouped and awaited, and refuse others.
        layout: how many ranks lie along each axis, as in ``"pp=2,tp=2,dp=auto"``: ``pp`` divides the model's layers, ``tp`` its
            matrices, ``space`` images, ``sequence`` sequences, ``dp`` the batch. None: that of ``guozhuang run --layout``, else
            all ranks lie along the strategy's own axis. Gradients are averaged along ``dp``.
        cut: for stages of a pipeline: the names of the modules at which a new stage begins. None: by measured cost.
        plan: for divided matrices: "columns" or "rows" by patterns of module names, as in ``{"layer.*.up": "columns"}``.
            None: the plan of the model's family.
        loss: for ``model.step(x, y)``, which schedules other than gpipe need: ``loss(outputs, targets)``, a mean over rows.
        microbatches: into how many parts a pipeline cuts a batch. None: ``guozhuang run --microbatches``, else chosen.
        schedule: in which order a pipeline works on them: "gpipe", "1f1b", "interleaved" or "zero-bubble". None:
            ``guozhuang run --schedule``, else gpipe, or with ``loss`` 1f1b.
        attention: how attention is divided with the sequences: "ulysses" (by heads), "ring", or "auto": by heads where their
            number divides by the ranks. None: that of ``guozhuang run --attention``, else auto.
        proof: whether the first batches of a divided model are compared with one process, before anything steps. None: yes,
            unless ``guozhuang run --no-proof`` was given.

    The returned model stands for yours: methods, attributes and parts are found on it under the same names, ``state_dict()``
    and ``named_parameters()`` have the same names under every strategy, and copies and pickles of it are of your module.
    Attributes that you set on it are set on your module. :func:`guozhuang.unwrap` gives your module.

    Returns:
        ``model, optimizer``, to be called and stepped in place of yours. Unpack the pair, or keep it: its method ``step(batch,
        loss_fn)`` trains on one batch under every strategy, even one that a script could not train by its own loop.

    Raises:
        MismatchError: ranks asked for different strategies, or have different models.
        UsageError: the name is unknown, the strategy is impossible in this world, the model
            is wrapped already or has nothing to train, or the optimizer holds parameters that the model lacks.
    """
    count = requested_microbatches() if microbatches is None else microbatches
    schedule = requested_schedule() if schedule is None else schedule
    wishes = {"cut": cut, "plan": plan, "loss": loss, "num_microbatches": count, "schedule": schedule}
    wishes["attention"] = requested_attention() if attention is None else attention
    wishes["proof"] = requested_proof() if proof is None else proof
    wishes["audit_every"] = requested_audit()
    prepared = prepare_unseen(
        model, optimizer, strategy, num_replicas=num_replicas, ddp_options=ddp_options, layout=layout, wishes=wishes
    )
    if (world := current()) is not None and world.rank == 0:
        warn_of_differences(prepared[0])
    return prepared


def prepare_unseen(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str | None = None,
    *,
    num_replicas: int | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    layout: str | None = None,
    wishes: Mapping[str, Any] | None = None,
) -> PreparedPair:
    """Do what :func:`prepare` does, for a trainer whose scripts see their own module alone and whose checkpoints are whole."""
    check_kinds(model, strategy, layout, num_replicas, ddp_options)
    world = current()
    if world is None:
        world = init()
    _refuse_loaders_of_no_world(world)
    asked_for = strategy if strategy is not None else requested_strategy()
    chosen = get(asked_for if asked_for is not None else DEFAULT)
    num_groups = requested_groups()
    check_groups(chosen, num_groups)
    options = dict(ddp_options or {})
    if (cap_mb := requested_bucket_cap_mb()) is not None:
        check_bucket_cap(chosen, cap_mb)
        if "bucket_cap_mb_list" not in options:
            options.setdefault("bucket_cap_mb", cap_mb)
    world = _lay_out(world, chosen, layout, is_named=strategy is not None)
    optimizers: tuple[Any, ...] = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    check_pair(model, optimizers, chosen, world, num_replicas)
    check_ddp_options(chosen, options)
    _place(model, optimizers, world)
    if group := dist.group.WORLD:  # before the strategy's own comparison, which would find other buckets or weights
        agree(group, "the strategy", [chosen.name], timeout_s(group), "give prepare() the same strategy on every rank")
    check_own(chosen, strategy, world.rank)
    if world.rank == 0:
        why = "as asked" if asked_for is not None else "the default"
        _log.info("strategy %s (%s): %s; %d rank(s)", chosen.name, why, chosen.summary, world.size)
    audit_every = requested_audit()
    is_divided = world.layout.model_size > 1 and not chosen.divides_itself
    check_axes(
        f"the layout {world.layout}",
        [axis for axis in AXES if getattr(world.layout, axis) > 1],
        attention=requested_attention(),
        microbatches=requested_microbatches(),
        schedule=requested_schedule(),
    )
    check_comparisons(chosen, is_divided, requested_proof(), audit_every)
    setup = Setup(world, num_replicas, num_groups, options, wishes or {})
    takes_all = len(optimizers) > 1 and (is_divided or isinstance(chosen.prepare, Sharded))
    stepped: Any = optimizers if takes_all else optimizers[0]
    form: Any = None
    if audit_every is not None and world.size > 1 and not is_divided:
        from guozhuang.parallel.proof.undivided import UndividedForm  # imported only when needed

        form = UndividedForm(model)
    if not is_divided:
        found = chosen.prepare(model, stepped, setup)
    else:
        from guozhuang.strategies.divided import prepare_divided  # imported only when needed

        found = prepare_divided(model, stepped, setup, chosen)
    if isinstance(optimizer, list | tuple):
        made = found[1] if isinstance(found[1], tuple) else (found[1], *optimizers[1:])
        if isinstance(found, PreparedPair) and not isinstance(found.step, PlainStep):
            found = PreparedPair(found[0], made, found.step, is_callable=not found.owns_step)
        else:
            found = PreparedPair(found[0], made)
    prepared = found if isinstance(found, PreparedPair) else PreparedPair(*found)
    _give_step(prepared[0], setup.wishes.get("loss"))
    for each in several(prepared[1]):
        registry.add_trained(model, prepared[0], each, chosen.name, _why_equal(prepared, chosen, world))
    if requested_checkpoint() is not None or registry.on_pause is not None:  # a session counts this model's steps too
        from guozhuang.checkpoint.run import begin_session  # imported only when needed

        begin_session()
    if chosen.trains and not chosen.one_process:
        own = vars(prepared[0])  # not by setattr, which finds a list of the script's on the module
        own[MARK] = PreparedAlready(chosen.name, own.get(MARK))
    look_for_nan(model, prepared[0], prepared[1], chosen, world)
    if world.size > 1:
        measure_own_time(prepared[0], prepared[1], chosen, world)
    if audit_every is not None and form is not None:
        from guozhuang.strategies.audit import audit_pair  # imported only when needed

        audit_pair(chosen.name, audit_every, model, prepared[0], several(prepared[1]), form)
    path = requested_timeline()
    if path is not None:
        timeline = Timeline(world.rank)
        record_steps(prepared[0], prepared[1], timeline)
        if registry.own_time is not None:
            registry.own_time.timer.timeline = timeline
        atexit.register(timeline.write, f"{path}.rank{world.rank}")
    return prepared


def _lay_out(world: World, chosen: Strategy, layout: str | None, *, is_named: bool) -> World:
    """Return the world with the layout that this training has, which is the one of the launcher unless the script names one."""
    if layout is None and not is_named:
        wanted = world.layout if chosen.name != HYBRID else Layout.parse(requested_layout(), HYBRID, world.size)
    else:
        wanted = Layout.parse(layout or requested_layout(), chosen.name, world.size)
    made_before_init = 1 if world.layout.dp > 1 else wanted.dp
    if wanted != world.layout:
        world = lay_out(wanted)
    shares = {each.num_replicas for each in registry.loaders if each.is_settled and not each.is_alone}
    if shares - {wanted.dp, made_before_init}:
        what = f"gz.loader() was called before gz.prepare(), which gives the ranks {wanted.dp} shares of the data"
        fix = "make the loader after prepare(), or give the layout to `guozhuang run --layout`"
        raise UsageError(explain(what, value=str(wanted), rank=world.rank, fix=fix))
    return world


def _why_equal(prepared: PreparedPair, chosen: Strategy, world: World) -> str:
    """Return why loaders must give equal parts of a batch to the ranks that train this model; "" if they need not."""
    model = prepared[0]
    if world.size == 1 or not chosen.trains:
        return ""
    if world.layout.model_size > 1:
        return f"ranks that divide the model ({world.layout}) share the samples of a batch"
    if world.device.type != "cpu" and any(type(part) is nn.SyncBatchNorm for part in model.modules()):
        return "torch.nn.SyncBatchNorm weighs all ranks alike in backward (gz.SyncBatchNorm weighs them by samples)"
    if isinstance(model, DistributedDataParallel):
        weighs = model.around is None and model.exchange.averages
    else:
        weighs = all(isinstance(each, ShardedOptimizer) for each in several(prepared[1]))
    return "" if weighs else _NO_WEIGHTS


def is_prepared(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> bool:
    """Return whether a model can be trained as it is, with these optimizers, if any. Every rank must call it.

    A strategy that changes a model in place leaves the same object to the next training, which brings another optimizer.
    Where that must be prepared too, what the strategy left on the model is taken off, and the answer is no.

    Args:
        model: the script's module, or what ``gz.prepare`` has returned.
        optimizers: those with which it is to be trained, as the script made them or as ``gz.prepare`` has returned them.
    """
    if isinstance(model, DistributedDataParallel):
        return True
    own = {id(each) for optimizer in optimizers for each in (optimizer, getattr(optimizer, "optimizer", None))}
    earlier = [each for each in registry.trained if model is each.model]
    if isinstance(model, StandsForModule) or not optimizers or any(id(each.optimizer) in own for each in earlier):
        return bool(earlier)
    if not isinstance(vars(model).get(MARK), PreparedAlready):
        return False
    registry.forget(model)
    from torch.distributed.fsdp import FSDPModule  # imported only when needed

    if isinstance(model, FSDPModule):
        # The script's optimizer holds the divided parameters, whose gradients are averaged in each backward.
        for optimizer in optimizers:
            registry.add_trained(model, model, optimizer, "sharded-weights", _NO_WEIGHTS)
        return True
    for each in earlier:
        each.optimizer.carrier.close()
    earlier_list = vars(model).pop(MARK).earlier
    if earlier_list is not None:
        vars(model)[MARK] = earlier_list
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, EqualBuffers):
            del model._forward_pre_hooks[key]
    return False


class PreparedAlready:
    """Refuses that a prepared model is wrapped once more, which would average twice: DistributedDataParallel reads this.

    Copies and pickles of the model can be wrapped.

    Args:
        strategy: the one that has prepared the model.
        earlier: what was in this attribute of the module before, which is a list of the script's or None.
    """

    def __init__(self, strategy: str, earlier: Any = None) -> None:
        self._strategy = strategy
        self.earlier: Any = earlier.earlier if isinstance(earlier, PreparedAlready) else earlier

    def __iter__(self) -> NoReturn:
        what = (
            f"gz.prepare has prepared this model by strategy {self._strategy}, and wrapping it would average it twice"
        )
        raise UsageError(
            explain(what, value=self._strategy, fix="train what prepare returned, or hand over the bare model")
        )

    def __reduce__(self) -> tuple[type[frozenset[str]], tuple[tuple[str, ...]]]:
        return frozenset, (tuple(self.earlier or ()),)


def _refuse_loaders_of_no_world(world: World) -> None:
    """Raise if the script used loaders before it entered a world of several ranks: each rank would train on everything."""
    if world.size > 1 and any(loader.is_settled and loader.is_of_no_world for loader in registry.loaders):
        what = "gz.loader() was used before gz.init() and gz.prepare(), so every rank would get all samples"
        fix = "call gz.init() first, or ask for batches and len() after prepare(); num_replicas=1 if all samples are meant"
        raise UsageError(explain(what, value=f"{world.size} ranks", rank=world.rank, fix=fix))


def check_bucket_cap(chosen: Strategy, cap_mb: float) -> None:
    """Raise if a cap of buckets was requested for a strategy that does not wrap the model in DistributedDataParallel.

    Raises:
        UsageError: the strategy has no such buckets.
    """
    if not wraps_in_ddp(chosen.prepare):
        what = f"strategy {chosen.name} does not put gradients into buckets of DistributedDataParallel"
        raise UsageError(explain(what, value=f"--bucket-cap-mb {cap_mb:g}", fix="leave it out, or choose ddp"))


def _give_step(model: nn.Module, loss: Callable[..., Any] | None) -> None:
    """Give a prepared model the method ``step`` of scripts that hand their loss over, unless its strategy has given it one."""
    if loss is None or "step" in vars(type(model)):
        return
    from guozhuang.strategies.model_step import StepOf  # imported only when needed

    if hasattr(model, "step") and not isinstance(model.step, StepOf | None):  # of an earlier prepare, or of its copy
        what = "the model has an attribute `step` of its own, which model.step(x, y) would hide"
        raise UsageError(explain(what, value=type(model).__name__, fix="rename it, or leave loss= out of prepare()"))
    vars(model)["step"] = StepOf(model, loss)


def _place(model: nn.Module, optimizers: Sequence[Optimizer], world: World) -> None:
    """Move a model from the CPU to this rank's accelerator, if it has one."""
    if world.device.type == "cpu" or any(p.device.type != "cpu" for p in model.parameters()):
        return
    fix = f"call model.to({str(world.device)!r}) before the optimizer is made"
    if any(each.state for each in optimizers):
        what = f"the model is on the CPU, this rank trains on {world.device}, and the optimizer has already stepped"
        raise UsageError(explain(what, rank=world.rank, fix=fix))
    before = {id(parameter) for parameter in model.parameters()}
    model.to(world.device)
    # On CUDA the move keeps the Parameter objects that the optimizer holds; for some other devices torch makes new ones.
    if before != {id(parameter) for parameter in model.parameters()}:
        what = f"moving the model to {world.device} made new parameters, which the optimizer does not know"
        raise UsageError(explain(what, rank=world.rank, fix=fix))
    _log.info("rank %d: the model was moved to %s", world.rank, world.device)

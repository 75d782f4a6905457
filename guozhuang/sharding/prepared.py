"""``shard``: divides the optimizer's work among the ranks of a group, each of which steps a part of the weights."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ..errors import UsageError, explain
from ..exchange.base import GradientExchange
from ..gradients.additions import Additions
from ..gradients.awaited import AwaitedBackwards
from ..gradients.forwards import tensors_with_graph
from ..gradients.output_hooks import OutputHook, is_traced
from ..gradients.passes import weakly
from ..sync_batch_norm import use_on_cpu
from ..units import listed
from ..weights.equal_start import broadcast_tensors, sparse_names, start_equal
from ..weights.points import points_of
from .arrivals import arrival_of
from .carrier import Carrier
from .elementwise import needs_whole_tensors
from .optimizer import ShardedOptimizer
from .parts import BucketLayout
from .whole import is_divided

if TYPE_CHECKING:
    from ..gradients.script_hooks import ScriptHooks


@overload
def shard(
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup | None = None,
    *,
    share_weights: bool = True,
    overlap_gather: bool = True,
    exchange: GradientExchange[Any] | None = None,
    has_stages: bool = False,
) -> tuple[nn.Module, ShardedOptimizer]: ...


@overload
def shard(
    model: nn.Module,
    optimizer: Sequence[Optimizer],
    group: dist.ProcessGroup | None = None,
    *,
    share_weights: bool = True,
    overlap_gather: bool = True,
    exchange: GradientExchange[Any] | None = None,
    has_stages: bool = False,
) -> tuple[nn.Module, tuple[ShardedOptimizer, ...]]: ...


def shard(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    group: dist.ProcessGroup | None = None,
    *,
    share_weights: bool = True,
    overlap_gather: bool = True,
    exchange: GradientExchange[Any] | None = None,
    has_stages: bool = False,
) -> tuple[nn.Module, ShardedOptimizer | tuple[ShardedOptimizer, ...]]:
    """Let each rank of a group step its part of the weights with the user's own optimizer. Every rank must call it.

    All ranks get rank 0's weights. If the group is one node's shared memory and the model is on the CPU, the weights then
    exist once, read by all ranks; otherwise each rank holds all of them, and they are all-gathered after each step.

    Args:
        model: equal on all ranks in names, shapes and dtypes; not wrapped.
        optimizer: holds parameters of the model, and acts element by element or on whole tensors (see
            :func:`~guozhuang.sharding.elementwise.needs_whole_tensors`). Or several optimizers of which each parameter has at
            most one, as Muon for matrices and AdamW for the rest; each steps its parameters when its own ``step`` is called.
        group: the ranks; all by default.
        share_weights: False: each rank holds all weights, also where one shared copy would be possible.
        overlap_gather: let new weights arrive while the program continues; code that reads one waits for it
            (:mod:`guozhuang.sharding.gathered`). Without effect in shared memory.
        exchange: averages gradients in place of an exact sum, for example ``Compressed(MinMax8())``; equal on all ranks. Each
            rank then holds all weights. Gradients are sent at the step, unless the method is ``repeatable``.
        has_stages: the model is a pipeline, whose stages are chosen later: the caller then calls ``begin()`` of the returned
            optimizers, ``carrier.backward_ended()`` after each backward, and makes buffers equal.

    Returns:
        The model itself (with SyncBatchNorm parts that work on CPU), and the optimizer to use in place of the user's; for
        several a tuple of them.

    Raises:
        UsageError: ``exchange`` is not a gradient exchange, the optimizer acts neither element by element nor on whole
            tensors, two optimizers hold the same parameter, or parameters cannot be divided (complex, sparse gradients, several
            devices) or are divided already.
        MismatchError: ranks hold different models or optimizers.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError(explain("there is no process group", fix="call gz.init() first, on every rank"))
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if any(isinstance(each, ShardedOptimizer) for each in optimizers):
        what = "the model and its optimizer are prepared already"
        value = [type(each).__name__ for each in optimizers]
        raise UsageError(explain(what, value=value, fix="hand over the user's own optimizer, once"))
    if exchange is not None and not isinstance(exchange, GradientExchange):
        fix = "give an object such as Compressed(MinMax8()); exchanges of weights do not go together with sharded"
        raise UsageError(explain("exchange takes a GradientExchange", value=exchange, fix=fix))
    for each in optimizers:
        needs_whole_tensors(each)
    check_parameters(model, optimizers)
    _warn_of_forgotten(model, optimizers)
    from .averaged import watch_clipping  # imported only when needed

    watch_clipping()
    if all(p.device.type == "cpu" for p in model.parameters()):
        model = use_on_cpu(model)
    start_equal(model, group)
    if not has_stages:
        model.register_forward_pre_hook(EqualBuffers(model, group))
    ranks, awaited = group, AwaitedBackwards()
    if not has_stages:
        model.register_forward_hook(AwaitsBackward(awaited))

    def make_carrier(names: Sequence[str], parameters: Sequence[nn.Parameter], layout: BucketLayout) -> Carrier:
        if (
            share_weights
            and exchange is None
            and sys.platform == "linux"
            and all(p.device.type == "cpu" for p in parameters)
        ):
            from .shared.carrier import SharedCarrier, can_share

            if can_share(ranks, parameters):
                shared = SharedCarrier(model, names, parameters, layout, ranks, not has_stages)
                shared.compare_ranks(awaited)
                return shared
        from .gathered import GatheredCarrier  # imported only when needed

        made = GatheredCarrier(model, names, parameters, layout, ranks, overlap_gather, exchange, not has_stages)
        made.compare_ranks(awaited)
        return made

    wrapped = tuple(ShardedOptimizer(model, each, group, make_carrier, has_stages) for each in optimizers)
    return model, wrapped[0] if isinstance(optimizer, Optimizer) else wrapped


class AwaitsBackward(OutputHook):
    """A forward hook that remembers training forwards until a gradient comes to what they have returned.

    Args:
        awaited: where they are remembered.
    """

    def __init__(self, awaited: AwaitedBackwards) -> None:
        self._awaited = awaited

    @_disable_dynamo
    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Remember this forward, if it is one of training. Not collective."""
        is_inside = torch._C._current_graph_task_id() != -1  # activation checkpointing repeats a forward in backward
        if not model.training or not torch.is_grad_enabled() or is_inside or is_traced():
            return
        if outputs := tensors_with_graph(output):
            hook = weakly(self._awaited.came, self._awaited.add())
            for each in outputs:
                each.register_hook(hook)


class EqualBuffers(OutputHook):
    """A hook that copies rank 0's buffers to all ranks before a training forward, as DistributedDataParallel does.

    It also refuses parameters that the model got after it was prepared, and looks after the script's hooks. Copies and pickles
    of the model get a hook that does nothing.

    Args:
        model: the model that the hook is registered on, whose parameters are divided already.
        group: the ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        named, averages_later = list(model.named_parameters()), group.size() > 1 and not is_divided(model)
        self._group, self._additions, self._points = group, Additions(named), points_of(group)
        self._script_hooks: ScriptHooks | None = None
        if averages_later:
            from ..gradients.script_hooks import ScriptHooks  # imported only when needed

            self._script_hooks = ScriptHooks(named, lambda: True, group.rank())

    @_disable_dynamo
    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """Broadcast buffers if gradients are enabled and the model is in training mode. Every rank must call the forward."""
        if torch.is_grad_enabled() and not _is_reference():
            self._additions.refuse(model, frozenset(), self._group.rank())
            if self._script_hooks is not None:
                self._script_hooks.look()
            if model.training and (buffers := list(model.buffers())):
                with self._points.inside("a forward of the model (training)"):
                    broadcast_tensors(buffers, self._group, source=0)


def _is_reference() -> bool:
    """Tell whether this is the reference of a proof, which is alone; the module is not imported for the question."""
    module = sys.modules.get("guozhuang.parallel.proof.reference")
    return module is not None and module.here is not None


def check_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError if the parameters of these optimizers cannot be divided; see :func:`shard`."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    if twice := sorted({name_of.get(i, "?") for i, count in Counter(map(id, held)).items() if count > 1}):
        what = f"two of the optimizers hold {listed(twice)}"
        raise UsageError(explain(what, fix="give each parameter to one optimizer"))
    if any(id(p) not in name_of for p in held):
        what = "the optimizer holds parameters that are not the model's"
        raise UsageError(explain(what, fix="make the optimizer from the parameters of the very model you hand over"))
    if not any(p.requires_grad for p in held):
        what = "no parameter of the optimizer requires a gradient"
        raise UsageError(explain(what, fix="call requires_grad_(True) on what is to be trained"))
    fix = "train with the strategy ddp"
    sparse = sparse_names(model)
    for p in held:
        name = name_of[id(p)]
        if name in sparse and p.requires_grad:
            raise UsageError(explain(f"{name} has sparse gradients, which have no place in flat parts", fix=fix))
        if p.is_complex():
            raise UsageError(
                explain(f"{name} is complex, and its parts cannot be stepped alone", value=p.dtype, fix=fix)
            )
        if arrival_of(p) is not None:
            raise UsageError(explain(f"{name} is divided among ranks already", fix="prepare a model once"))
    devices = {p.device for p in held}
    if len(devices) > 1:
        what = "the optimizer's parameters lie on several devices"
        raise UsageError(explain(what, value=sorted(map(str, devices)), fix="put the model on one device per rank"))


def _warn_of_forgotten(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn of parameters that require a gradient but are in no group: they are neither averaged nor stepped."""
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if forgotten:
        what = f"in no group of the optimizer, so that their gradients stay each rank's own, are {listed(forgotten)}"
        warnings.warn(explain(what, fix="give them to the optimizer, or call requires_grad_(False)"), stacklevel=4)

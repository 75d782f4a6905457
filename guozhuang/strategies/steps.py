"""Watches the steps of a prepared pair: records them on a timeline, measures this rank's own time, and looks for NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from guozhuang.distributed import DistributedDataParallel
from guozhuang.exchange.nan_watch import NanWatch
from guozhuang.gradients.passes import UncopiedHook
from guozhuang.registry import registry
from guozhuang.sharding.optimizer import ShardedOptimizer
from guozhuang.timeline import Timeline
from guozhuang.watch.waits import waits
from guozhuang.world import World, requested_hang_timeout, requested_slow_rank

from .effects import unmeasured
from .table import Strategy
from .ways import several, sharded_gradients, sharded_weights, torch_ddp


def record_steps(model: nn.Module, optimizer: Optimizer | tuple[Optimizer, ...], timeline: Timeline) -> None:
    """Register hooks that record every forward, backward and optimizer step of a prepared pair on a timeline."""
    began_ns: dict[str, int] = {}

    def begin(name: str) -> None:
        began_ns[name] = timeline.now()

    def end(name: str) -> None:
        if name in began_ns:
            timeline.add(name, "step", began_ns.pop(name), timeline.now())

    if isinstance(model, DistributedDataParallel):
        model.timeline = timeline
    watch_steps(model, optimizer, begin, end)


def look_for_nan(
    module: nn.Module, model: nn.Module, optimizer: Optimizer | tuple[Optimizer, ...], chosen: Strategy, world: World
) -> None:
    """Look for NaN before each step of the optimizer, under strategies that do not look when they exchange gradients.

    Those are the ones without an exchange (one process, a model that is divided over all ranks), and PyTorch's own.

    Args:
        module: the script's own, whose names parameters have.
        model: what stands for it.
        optimizer: what is stepped, or several.
        chosen: the strategy.
        world: with the layout of the ranks.
    """
    if isinstance(model, DistributedDataParallel) or isinstance(several(optimizer)[0], ShardedOptimizer):
        return
    is_averaged_inside = world.layout.model_size > 1 and world.layout.dp > 1 and not chosen.divides_itself
    if is_averaged_inside or chosen.prepare in (sharded_gradients, sharded_weights):
        return
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    for each in several(optimizer):
        watch = NanWatch(dist.group.WORLD, are_averaged=chosen.prepare is torch_ddp)
        each.register_step_pre_hook(UncopiedHook(_LookBeforeStep(watch, name_of)))


class _LookBeforeStep:
    """A hook of an optimizer's step."""

    def __init__(self, watch: NanWatch, name_of: Mapping[nn.Parameter, str]) -> None:
        self._watch, self._name_of, self._steps = watch, name_of, itertools.count()

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        here = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._watch.look_at([self._name_of.get(p, "some parameter") for p in here], here, next(self._steps))


def measure_own_time(
    model: nn.Module, optimizer: Optimizer | tuple[Optimizer, ...], chosen: Strategy, world: World
) -> None:
    """Measure this rank's own time in the phases of each step, and let the heartbeat tell it, so that a slow rank is named.

    It is not measured where no rank waits for another one, where ranks do different work (a divided model), nor on
    accelerators, whose work a rank only submits. Every rank must call it.
    """
    asked = "off" if requested_hang_timeout() == "off" else requested_slow_rank()
    if asked == "off" or world.size == 1 or world.device.type != "cpu":
        return
    if unmeasured(chosen, is_divided=world.layout.model_size > 1):
        return
    from guozhuang.watch.pace import OwnTimeNews, StepTimer  # imported only when needed

    if registry.own_time is None:
        waits.measure()
        registry.own_time = OwnTimeNews(StepTimer(waits), tells_table=asked == "warn")
    timer: StepTimer = registry.own_time.timer
    who = object()  # this pair, in a training that may have several, as a GAN has

    def end(name: str) -> None:
        if name == "optimizer":
            timer.stepped(who)

    watch_steps(model, several(optimizer)[:1], timer.begin, end, only_begins=True)


def watch_steps(
    model: nn.Module,
    optimizer: Any,
    begin: Callable[[str], None],
    end: Callable[[str], None],
    only_begins: bool = False,
) -> None:
    """Call ``begin`` and ``end`` around every "forward", "backward" and "optimizer" step.

    With ``only_begins``, the beginnings of forwards with gradients and of their backwards, and both ends of optimizer steps.
    """
    running = {"backward": False}

    def forward_began(module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the hooks of a module that is compiled whole are left out of its graph
            return
        running["backward"] = False  # the last one may have been broken off by an exception
        if not only_begins or torch.is_grad_enabled():
            begin("forward")

    def forward_ended(module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or (only_begins and not torch.is_grad_enabled()):
            return
        if not only_begins:
            end("forward")
        elif isinstance(output, torch.Tensor):  # the usual one, without a look into its parts
            if output.requires_grad:
                output.register_hook(backward_began)
            return
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(backward_began)

    def backward_began(gradient: torch.Tensor) -> None:
        if not running["backward"]:
            running["backward"] = True
            begin("backward")
            if only_begins:
                return
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # Queue from within a callback, so that the end is recorded after all callbacks that wait for exchanges have run.
            queue(lambda: queue(backward_ended))

    def backward_ended() -> None:
        running["backward"] = False
        end("backward")

    model.register_forward_pre_hook(UncopiedHook(forward_began))
    model.register_forward_hook(UncopiedHook(forward_ended))
    for each in several(optimizer):
        each.register_step_pre_hook(UncopiedHook(lambda opt, args, kwargs: begin("optimizer")))
        each.register_step_post_hook(UncopiedHook(lambda opt, args, kwargs: end("optimizer")))

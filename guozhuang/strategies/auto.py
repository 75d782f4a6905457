"""``--strategy auto``: races exact ways of averaging in the first steps of the training itself, and goes on with the fastest.

[Note: what can change between two steps] The script holds one model and one optimizer all along: the wrapper and the optimizer
that :func:`prepare_auto` returns. Behind them the caps of buckets can change, because buckets are laid out anew in any case,
and whether the optimizer's work is divided (``sharded``) or each rank steps whole weights (``ddp``): weights and optimizer
state are made whole or cut into parts, by the same code that saves and loads them. Nothing of the training is repeated or lost:
each step trains on its own batch, and both ways compute the same mean gradients and the same step, element by element. What
cannot change in a run is no contender: methods that would put other hooks on the model (``torch-ddp``, ``sharded-weights``),
that divide it, or that are inexact.

[Note: one decision] A contender is measured in blocks of steps. All ranks count the optimizer's steps, so they come to the end
of a block together, in the first forward after its last step. There rank 0, which alone has a clock, broadcasts what the next
block is: the contender, how many steps it has, and whether it is the last one.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from guozhuang import units
from guozhuang.cost.race import Race, RaceOutcome
from guozhuang.distributed.arguments import MIB
from guozhuang.errors import UsageError
from guozhuang.gradients.buckets import DEFAULT_CAP_BYTES, Caps
from guozhuang.registry import registry
from guozhuang.sharding.resting import RestingOptimizer
from guozhuang.strategies.prepared import PreparedDDP
from guozhuang.strategies.ways import Setup, device_ids

_log = logging.getLogger("guozhuang")

_FIRST_STEPS = 3  # in which buckets get their order and the optimizer its state; not measured
_AFTER_CHANGE = 2  # steps after a change that are not measured
_MOST_STEPS = 5  # measured steps of a block
_AIM_ROUNDS = 8  # blocks are made short enough for so many rounds in the time
_TIME_S, _MOST_TIME_S, _LEAST_ROUNDS = 60.0, 300.0, 3  # with slow steps the race goes on for at least so many rounds
_OTHER_CAPS_MIB = (4, 100)  # where gradients cross a network


@dataclass(frozen=True)
class Way:
    """One exact way to average gradients and step, to which a training can change between two steps.

    Attributes:
        name: for the log.
        is_sharded: whether each rank steps its part of the weights.
        caps: the caps of buckets.
    """

    name: str
    is_sharded: bool
    caps: Caps


def prepare_auto(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer to use in place of the user's, and begin the race. Every rank must call."""
    why_not = ""
    stepped = optimizer
    if setup.world.size > 1:
        from guozhuang.sharding import shard  # imported only when needed

        try:
            model, stepped = shard(model, optimizer, begins_at_rest=True)
        except UsageError as error:
            why_not = str(error)
    options = {"device_ids": device_ids(model), **setup.ddp_options}
    wrapped = RacingDDP(model, **options)
    wrapped.look_at_steps(stepped)
    usual = Way("ddp", False, wrapped._caps)
    ways = [usual]
    if isinstance(stepped, RestingOptimizer):
        ways.append(Way("sharded", True, wrapped._caps))
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if _crosses_a_network(setup) and not {"bucket_cap_mb", "bucket_cap_mb_list"} & setup.ddp_options.keys():
        ways += [
            Way(f"ddp with buckets of {cap} MiB", False, Caps.usual(cap * MIB))
            for cap in _OTHER_CAPS_MIB
            if num_bytes > min(cap * MIB, DEFAULT_CAP_BYTES)
        ]
    wrapped._race = RacedSteps(wrapped, stepped, ways, why_not) if len(ways) > 1 else None
    if wrapped._race is None and setup.world.rank == 0:
        _log.warning("strategy auto: ddp; nothing else to choose from%s", f": {why_not}" if why_not else "")
    return wrapped, stepped


def _crosses_a_network(setup: Setup) -> bool:
    return setup.world.size > 1 and (setup.world.num_nodes > 1 or dist.get_backend() == "gloo")


class RacingDDP(PreparedDDP):
    """A prepared model whose way of averaging may change between two steps, until a race has ended.

    Its own names begin with an underscore, so that they hide none of the module's.
    """

    _race: RacedSteps | None = None
    _kept: Any = None

    @override
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        race = self._race
        if race is not None and self.training and torch.is_grad_enabled():
            race.before_forward()
        return super()._pre_forward(*inputs, **kwargs)

    @override
    def join_hook(self, **kwargs: Any) -> Any:
        if self._race is not None:  # in join() ranks come to different numbers of steps
            self._race.give_up("the script trains inside join(), where ranks make different numbers of steps")
        return super().join_hook(**kwargs)

    def _average(self, caps: Caps | None) -> None:
        """Average gradients in buckets of these caps from now on; None: leave them as they are. Every rank must call it."""
        if caps is None:
            if self._reducer is not None:
                self._reducer.close()
            self._kept, self._reducer, self._needs_reducer = self._reducer, None, False
            return
        if not self._needs_reducer:
            self._reducer, self._kept, self._needs_reducer = self._kept, None, True
            if self._reducer is not None:
                self._reducer._connect()
        if caps != self._caps and self._reducer is not None:
            self._reducer.use_caps(caps)
        self._caps = caps

    def _forget_reducer(self) -> None:
        """Free the buckets of the reducer that is out of use."""
        self._kept = None


class RacedSteps:
    """The race of a training: changes its way at the ends of blocks. See [Note: one decision].

    Args:
        model: the prepared model.
        optimizer: what the script steps.
        ways: the contenders, first the default.
        why_not: why ``sharded`` is none of them; "" if it is.
    """

    def __init__(self, model: RacingDDP, optimizer: Optimizer, ways: Sequence[Way], why_not: str) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._ways, self._why_not = list(ways), why_not
        self._group, self._device = model.process_group, model.device
        self._now = 0  # the number of the present way
        self._num_steps, self._turn_at = 0, _FIRST_STEPS
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]
        self._versions: list[int] | None = None
        self._changes_gradients = False
        # The following are rank 0's.
        self._race: Race | None = None
        self._began_s = self._last_s = time.perf_counter()
        self._lasted: list[float] = []
        self._num_measured = 0
        self._waiting: list[str] = []
        self._round: dict[str, float] = {}
        if registry.on_clip is None:
            registry.on_clip = self._note_gradients

    # ---- what happens in a step -----------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """End the block if its last step was made. Every rank must call it before a forward of the training."""
        model = self._model()
        if model is not None and self._num_steps == 0 and model.reducer is not None:
            model.reducer.after_pass = self._note_gradients
        if self._num_steps >= self._turn_at:
            self._turn()

    def _note_gradients(self) -> None:
        """Record the state of the averaged gradients, to find out whether the script changes them before the step."""
        self._versions = self._version_of_each()

    def _version_of_each(self) -> list[int]:
        model = self._model()
        return [] if model is None else [-1 if p.grad is None else p.grad._version for p in model.parameters()]

    def _before_step(self) -> None:
        if self._num_steps < _FIRST_STEPS and self._versions is not None:
            self._changes_gradients |= self._versions != self._version_of_each()
            self._versions = None

    def _stepped(self) -> None:
        self._num_steps += 1
        if self._group.rank() != 0:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        self._lasted.append(now - self._last_s)
        self._last_s = now

    # ---- what happens between blocks --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        told = torch.zeros(3, dtype=torch.int64, device=self._device)
        if self._group.rank() == 0:
            told.copy_(torch.tensor(self._decide()))
        dist.broadcast(told, group_src=0, group=self._group)
        way, num_steps, is_last = (int(number) for number in told.tolist())
        self._change(way)
        self._turn_at = self._num_steps + num_steps
        self._lasted.clear()
        if is_last:
            if self._group.rank() == 0:
                self._say()
            self._end()

    def _decide(self) -> list[int]:
        """Judge the block that has ended; return the next block's way, its steps, and whether it is the last one."""
        if self._race is None:
            self._begin()
        else:
            measured = self._lasted[-self._num_measured :]
            self._round[self._ways[self._now].name] = statistics.median(measured)
        race = self._race
        assert race is not None
        if not self._waiting:
            if self._round:
                race.add(self._round)
                self._round = {}
            self._waiting = list(race.turn())
            took_s = time.perf_counter() - self._began_s
            limit_s = _TIME_S if race.num_rounds >= _LEAST_ROUNDS else _MOST_TIME_S
            if race.is_over or took_s > limit_s:
                return [self._number(race.alive[0]), 0, 1]
        following = self._number(self._waiting.pop(0))
        num_extra = 0 if following == self._now and race.num_rounds else min(_AFTER_CHANGE, self._num_measured)
        return [following, num_extra + self._num_measured, 0]

    def _begin(self) -> None:
        """Choose how many steps a block has, by the steps so far; leave ``sharded`` out where it would train otherwise."""
        if self._changes_gradients:
            self._why_not = (
                "the script changes gradients between backward and step by other functions than gz.clip_grad_norm_, and under "
                "sharded they are not averaged yet there"
            )
        names = [way.name for way in self._ways if not (way.is_sharded and self._changes_gradients)]
        self._race = Race(names)
        of_block_s = _TIME_S / (_AIM_ROUNDS * len(names))
        self._num_measured = max(1, min(_MOST_STEPS, int(of_block_s / max(self._lasted[-1], 1e-9)) - _AFTER_CHANGE))

    def _number(self, name: str) -> int:
        return next(i for i, way in enumerate(self._ways) if way.name == name)

    def _change(self, number: int) -> None:
        """Change to another way. Every rank calls it, between two steps. See [Note: what can change between two steps]."""
        before, after = self._ways[self._now], self._ways[number]
        self._now = number
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return
        if before.is_sharded != after.is_sharded:
            assert isinstance(optimizer, RestingOptimizer)
            if after.is_sharded:
                model._average(None)
                optimizer.begin()
            else:
                optimizer.rest()
        if not after.is_sharded:
            model._average(after.caps)

    def give_up(self, why: str) -> None:
        """End the race, and train the default way. Every rank must call it, between two steps."""
        self._change(0)
        if self._group.rank() == 0:
            _log.warning("strategy auto: %s, after %d steps: %s", self._ways[0].name, self._num_steps, why)
        self._end()

    def _say(self) -> None:
        """Log what was chosen, and why."""
        race = self._race
        assert race is not None
        found: RaceOutcome = race.outcome()
        took = units.duration(time.perf_counter() - self._began_s)
        left = "; ".join(
            f"{name}: {why}" for name, why in found.left.items() if name != found.default or not found.is_win
        )
        left += f"{'; ' * bool(left)}sharded was not tried: {self._why_not}" if self._why_not else ""
        _log.warning(
            "strategy auto: %s, %d steps of this training, %s%s",
            found.headline,
            self._num_steps,
            took,
            left and f". {left}",
        )

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if registry.on_clip == self._note_gradients:
            registry.on_clip = None
        model = self._model()
        if model is None:
            return
        model._race = None
        model._forget_reducer()
        if model._reducer is not None:
            model._reducer.after_pass = None

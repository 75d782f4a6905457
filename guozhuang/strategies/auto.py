"""``--strategy auto``: races exact ways of training in the first steps of the training itself, and goes on with the fastest.

[Note: what can change between two steps] The script holds one model and one optimizer all along: the wrapper and the optimizer
that :func:`prepare_auto` returns. Behind them the caps of buckets can change, because buckets are laid out anew in any case,
and whether each rank steps all weights or its part of them: see [Note: a divided step behind averaged gradients] in
sharding/resting.py. Nothing of the training is repeated or lost: each step trains on its own batch, and all ways compute the
same mean gradients and the same step, element by element. A contender must leave to the script all that ``ddp`` gives it, for
nobody can know what a script will do in a later step. So ``sharded`` itself is none, under which ``p.grad`` is no average; nor
are methods that would put other hooks on the model (``torch-ddp``, ``sharded-weights``), that divide it, or that are inexact.

[Note: one decision] A contender is measured in blocks of steps. All ranks count the optimizer's steps, so they come to the end
of a block together, in the first forward of the training after its last step. There rank 0, which alone has a clock, broadcasts
what the next block is: the contender, how many steps it has, and whether it is the last one.
"""

from __future__ import annotations

import logging
import math
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
from guozhuang.cost.race import Race
from guozhuang.distributed.arguments import MIB
from guozhuang.errors import UsageError
from guozhuang.gradients.buckets import DEFAULT_CAP_BYTES, Caps
from guozhuang.sharding.resting import RestingOptimizer, divide_later
from guozhuang.strategies.prepared import PreparedDDP
from guozhuang.strategies.ways import Setup, device_ids

_log = logging.getLogger("guozhuang")

_FIRST_STEPS = 3  # in which buckets get their order and the optimizer its state; not measured
_AFTER_CHANGE = 2  # steps after a change that are not measured
_MOST_STEPS = 5  # measured steps of a block
_AIM_ROUNDS = 8  # blocks are made short enough for so many rounds in the time
_TIME_S, _MOST_TIME_S, _LEAST_ROUNDS = 60.0, 300.0, 3  # with slow steps the race goes on for at least so many rounds
_OTHER_CAPS_MIB = (4, 100)  # where gradients cross a network
_DIVIDED = "ddp with a divided step"


@dataclass(frozen=True)
class Way:
    """One exact way to average gradients and step, to which a training can change between two steps.

    Attributes:
        name: for the log.
        is_divided: whether each rank steps its part of the weights.
        caps: the caps of buckets.
    """

    name: str
    is_divided: bool
    caps: Caps


def prepare_auto(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer to use in place of the user's, and begin the race. Every rank must call."""
    wrapped = RacingDDP(model, **{"device_ids": device_ids(model), **setup.ddp_options})
    group, stepped, why_not = wrapped.process_group, optimizer, ""
    usual = Way("ddp", False, wrapped._caps)
    ways = [usual]
    if group.size() > 1:
        this = weakref.ref(wrapped)
        averaged = [p for _, p in wrapped._averaged]
        try:
            stepped = divide_later(wrapped.module, optimizer, group, averaged, lambda: _are_averaged(this()))
            ways.append(Way(_DIVIDED, True, wrapped._caps))
        except UsageError as error:
            why_not = str(error)
    wrapped.look_at_steps(stepped)
    crosses_a_network = group.size() > 1 and (setup.world.num_nodes > 1 or dist.get_backend(group) == "gloo")
    if crosses_a_network and not {"bucket_cap_mb", "bucket_cap_mb_list"} & setup.ddp_options.keys():
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        ways += [
            Way(f"ddp with buckets of {cap} MiB", False, Caps.usual(cap * MIB))
            for cap in _OTHER_CAPS_MIB
            if num_bytes > min(cap * MIB, DEFAULT_CAP_BYTES)
        ]
    if len(ways) > 1:
        wrapped._race = RacedSteps(wrapped, stepped, ways, why_not)
    elif group.rank() == 0:
        _log.warning("strategy auto: ddp; nothing else to choose from%s", f": {why_not}" if why_not else "")
    return wrapped, stepped


def _are_averaged(model: RacingDDP | None) -> bool:
    """Return whether the gradients are averages, as of no backward that kept them local since the last average."""
    return model is None or model._local_at != model._num_averages or all(p.grad is None for p in model.parameters())


class RacingDDP(PreparedDDP):
    """A prepared model whose way of training may change between two steps, until a race has ended.

    Its own names begin with an underscore, so that they hide none of the module's.
    """

    _race: RacedSteps | None = None
    _local_at = -1  # how many averages there were when the last forward began whose gradients stay local

    @property
    def _num_averages(self) -> int:
        return 0 if self._reducer is None else self._reducer.step

    @override
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            if self._race is not None and self.training:
                self._race.before_forward()
            if not self.require_backward_grad_sync:
                self._local_at = self._num_averages
        return super()._pre_forward(*inputs, **kwargs)

    @override
    def join_hook(self, **kwargs: Any) -> Any:
        if self._race is not None:
            self._race.give_up("the script trains inside join(), where ranks make different numbers of steps")
        return super().join_hook(**kwargs)

    def _use_caps(self, caps: Caps) -> None:
        """Average gradients in buckets of these caps from the next forward on. Every rank must call it."""
        if caps != self._caps and self._reducer is not None:
            self._reducer.use_caps(caps)
        self._caps = caps


class RacedSteps:
    """The race of a training: changes its way at the ends of blocks. See [Note: one decision].

    Args:
        model: the prepared model.
        optimizer: what the script steps.
        ways: the contenders, first the default.
        why_not: why the divided step is none of them; "" if it is.
    """

    def __init__(self, model: RacingDDP, optimizer: Optimizer, ways: Sequence[Way], why_not: str) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._ways, self._why_not = list(ways), why_not
        self._group, self._device = model.process_group, model.device
        self._now = 0  # the number of the present way
        self._num_steps, self._turn_at = 0, float(_FIRST_STEPS)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
        # The following are rank 0's.
        self._race = Race([way.name for way in ways])
        self._began_s: float | None = None
        self._last_s = 0.0
        self._lasted: list[float] = []
        self._num_measured = 0
        self._waiting: list[str] = []
        self._round: dict[str, float] = {}

    # ---- what happens in a step -----------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """End the block if its last step was made. Every rank must call it before a forward of the training."""
        model = self._model()
        if self._num_steps < self._turn_at or model is None:
            return
        if model._chosen is not None or model.around is not None:
            self.give_up("the script has chosen an exchange or a communication hook of its own")
            return
        if self._group.rank() == 0:
            self._note_block()
        while self._turn():
            pass

    def _stepped(self) -> None:
        self._num_steps += 1
        if self._group.rank() != 0:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        if self._began_s is None:  # the first step ends now: data and compilers needed time until here
            self._began_s = now
        else:
            self._lasted.append(now - self._last_s)
        self._last_s = now

    # ---- what happens between blocks --------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Change to what rank 0 decides; return whether that failed, so that another decision is needed."""
        told = torch.zeros(3, dtype=torch.int64, device=self._device)
        if self._group.rank() == 0:
            told.copy_(torch.tensor(self._decide()))
        dist.broadcast(told, group_src=0, group=self._group)
        way, num_steps, is_last = (int(number) for number in told.tolist())
        why_not = self._change(way)
        if why_not and is_last:
            self.give_up(why_not)
        elif why_not:
            self._race.drop(self._ways[way].name, why_not)
            return True
        elif is_last:
            if self._group.rank() == 0:
                self._say()
            self._end()
        else:
            self._turn_at = self._num_steps + num_steps
        return False

    def _note_block(self) -> None:
        """Take the time of the block that has ended. After the first steps: choose how many steps a block has."""
        if self._num_measured:
            self._round[self._ways[self._now].name] = statistics.median(self._lasted[-self._num_measured :])
        else:
            of_block_s = _TIME_S / (_AIM_ROUNDS * len(self._ways))
            self._num_measured = max(
                1, min(_MOST_STEPS, int(of_block_s / max(min(self._lasted), 1e-9)) - _AFTER_CHANGE)
            )
        self._lasted.clear()

    def _decide(self) -> list[int]:
        """Return the next block's way, its steps, and whether it is the last one."""
        race = self._race
        self._waiting = [name for name in self._waiting if name in race.alive]
        if not self._waiting:
            if self._round:
                race.add(self._round)
                self._round = {}
            self._waiting = list(race.turn())
            assert self._began_s is not None
            limit_s = _TIME_S if race.num_rounds >= _LEAST_ROUNDS else _MOST_TIME_S
            if race.is_over or time.perf_counter() - self._began_s > limit_s:
                return [self._number(race.alive[0]), 0, 1]
        following = self._number(self._waiting.pop(0))
        num_extra = 0 if following == self._now and race.num_rounds else min(_AFTER_CHANGE, self._num_measured)
        return [following, num_extra + self._num_measured, 0]

    def _number(self, name: str) -> int:
        return next(i for i, way in enumerate(self._ways) if way.name == name)

    def _change(self, number: int) -> str:
        """Change to another way; return why that cannot be done, or "". Every rank calls it, between two steps."""
        model, optimizer, way = self._model(), self._optimizer(), self._ways[number]
        if model is None or optimizer is None:
            return ""
        if isinstance(optimizer, RestingOptimizer):
            if not way.is_divided:
                optimizer.rest()
            elif optimizer.is_resting and (why_not := optimizer.try_begin()):
                return why_not
        model._use_caps(way.caps)
        self._now = number
        return ""

    def give_up(self, why: str) -> None:
        """End the race if it goes on, and train the default way. Every rank must call it, between two steps."""
        if self._turn_at < math.inf or self._ways[self._now].is_divided:
            self._change(0)
            if self._group.rank() == 0:
                _log.warning("strategy auto: %s, after %d steps: %s", self._ways[0].name, self._num_steps, why)
            self._end()

    def _say(self) -> None:
        """Log what was chosen, and why."""
        found, now = self._race.outcome(), time.perf_counter()
        left = [f"{name}: {why}" for name, why in found.left.items() if name != found.default or not found.is_win]
        left += [f"{_DIVIDED} was not tried: {self._why_not}"] if self._why_not else []
        if self._ways[self._now].is_divided:
            left.append("optimizer.state_dict() needs every rank from now on")
        _log.warning(
            "strategy auto: %s, %d steps of this training, %s%s",
            found.headline,
            self._num_steps,
            units.duration(now - (self._began_s or now)),
            f". {'; '.join(left)}" if left else "",
        )

    def _end(self) -> None:
        self._turn_at = math.inf
        self._hook.remove()

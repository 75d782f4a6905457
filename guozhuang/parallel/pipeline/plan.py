"""How a model is divided into stages: decided once, with the first batch; and the routes for each further kind of inputs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain
from ...world import current
from ...world.machine import available_bytes
from ..division import disown
from ..random import Draws
from .blocks import find_units
from .cut import CallCost, balance, measure, table
from .deferred import DeferredWeights
from .forwards.calls import ObservedForward, Routes, observe, route
from .forwards.outputs import PLAIN, UnitOutputs
from .forwards.stage import Microbatch, Stage
from .microbatches import with_rows
from .runtime import PipelineRuntime
from .schedule import most_in_flight
from .transfers import StageTransfers

_log = logging.getLogger("guozhuang")
# A number among the inputs that changes in each step makes each of them another kind.
_MOST_PLANS: Final = 32


@dataclass(frozen=True)
class StagePlan:
    """How batches of one kind of inputs go through the stages.

    Attributes:
        routes: who computes what, and sends it to whom.
        runtime: carries it out.
    """

    routes: Routes
    runtime: PipelineRuntime


@dataclass(frozen=True)
class StageTimes:
    """What a stage of this rank holds, and how long it takes; times in seconds.

    Attributes:
        number: the number of the stage.
        rank: the index of its rank along pp.
        first: the name of the first call in it.
        last: the name of the last one.
        predicted_s: what the cut expected of a batch, forward and backward; None where it was made by hand.
        busy_s: how long this rank has computed for the stage, since the first batch.
    """

    number: int
    rank: int
    first: str
    last: str
    predicted_s: float | None
    busy_s: float


class StagePlans:
    """Divides a model into stages with its first batch. Every rank of the pipeline must make the same calls.

    Args:
        model: whole and equal on all ranks.
        group: the ranks of the pipeline.
        cut: the calls at which a new stage begins; None: chosen.
        schedule: the name of the schedule.
        stages_per_rank: number of stages of each rank.
        num_microbatches: into how many parts a batch is cut.
        everyone: all ranks of the layout, which cut alike.

    Attributes:
        units: the units of the model, by name.
        outputs: what they return for which shapes.
        owners: the ranks of the group that hold each parameter, by its name, once the model is divided.
        shared: the parameters that this rank and others hold, with those ranks.
        draws: the random operations of each of this rank's stages, by its number.
        costs: of the calls, as measured; empty if the cut was made by hand.
        at_cut: called once on every rank when the parameters of other ranks were freed.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        cut: Sequence[str] | None,
        schedule: str,
        stages_per_rank: int,
        num_microbatches: int,
        everyone: dist.ProcessGroup,
    ) -> None:
        self.model, self.group, self._everyone = model, group, everyone
        self._num_microbatches = num_microbatches
        self.costs: list[CallCost] = []
        self._cut, self._schedule, self._stages_per_rank = cut, schedule, stages_per_rank
        self.num_stages = group.size() * stages_per_rank
        self.units = find_units(model, self.num_stages)
        if len(self.units) < self.num_stages:
            what = f"the model has {len(self.units)} parts between which it can be cut, for {self.num_stages} stages"
            fix = "use fewer ranks along pp; a model is cut between the elements of its lists, or its children"
            raise UsageError(explain(what, value=list(self.units) or type(model).__name__, fix=fix))
        self.outputs = UnitOutputs(self.units)
        self.owners: dict[str, tuple[int, ...]] = {}
        self.shared: list[tuple[nn.Parameter, tuple[int, ...]]] = []
        rank, size = group.rank(), group.size()
        self.draws = {i: Draws(model, first=i == 0) for i in range(rank, self.num_stages, size)}
        self.at_cut: Callable[[], None] | None = None
        self._stage_of: dict[str, int] = {}
        self._plans: dict[Any, StagePlan] = {}
        self._transfers: StageTransfers | None = None
        self._busy_before: dict[int, float] = dict.fromkeys(self.draws, 0.0)  # in plans that were dropped
        self._deferred: DeferredWeights | None = None

    def plan(self, microbatch: Microbatch, *, runs_tail: bool = False) -> StagePlan:
        """Return the plan for inputs of this kind: of this structure, these types, in training or not.

        Args:
            microbatch: the first one of a batch.
            runs_tail: see :class:`guozhuang.parallel.pipeline.forwards.stage.Stage`.

        Raises:
            UsageError: the model cannot be divided, or not for these inputs; the text says why.
        """
        key = self._kind(microbatch, runs_tail)
        if key not in self._plans:
            calls = self._observed(microbatch)
            if not self._stage_of:
                self._divide(calls, microbatch)
            stage_of = self._stages(calls)
            lost = sorted(name for name in calls.parameters if len(self.owners[name]) < self.group.size())
            if lost:
                what = "with inputs of this kind the model's forward uses a parameter that other stages hold"
                raise UsageError(explain(what, value=lost[0], fix="use inputs of one kind from the first step on"))
            routes = route(calls, stage_of, self.num_stages, self.outputs.opaque)
            stages = {
                i: Stage(self.model, self.units, self.outputs, routes, draws, i, self.num_stages, runs_tail=runs_tail)
                for i, draws in self.draws.items()
            }
            device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
            # Calls outside of step have GPipe's order, for which no gradients of weights are left for later.
            schedule = "gpipe" if self._stages_per_rank == 1 else "interleaved"
            if runs_tail:
                schedule = self._schedule
            weights = self._weights() if schedule == "zero-bubble" else None
            runtime = PipelineRuntime(
                self.group, stages, schedule, self._stages_per_rank, routes.messages, device, weights, self._transfers
            )
            self._transfers = runtime.transfers
            self._plans[key] = StagePlan(routes, runtime)
            if len(self._plans) > _MOST_PLANS:
                oldest = self._plans.pop(next(iter(self._plans))).runtime
                for stage, seconds in oldest.busy_s.items():
                    self._busy_before[stage] += seconds
        return self._plans[key]

    def times(self) -> list[StageTimes]:
        """Return the stages of this rank with their times; none before the model is divided."""
        found = []
        for stage in self.draws if self._stage_of else ():
            names = [name for name, owner in self._stage_of.items() if owner == stage]
            costs = [cost.seconds for cost in self.costs if cost.name in names]
            predicted_s = sum(costs) * self._num_microbatches if costs else None
            busy_s = self._busy_before[stage] + sum(plan.runtime.busy_s[stage] for plan in self._plans.values())
            found.append(StageTimes(stage, self.group.rank(), names[0], names[-1], predicted_s, busy_s))
        return found

    def _weights(self) -> DeferredWeights:
        if self._deferred is None:
            self._deferred = DeferredWeights(self.model)
        return self._deferred

    def _observed(self, microbatch: Microbatch) -> ObservedForward:
        """Run the forward without its units twice, with one more row the second time, which shows dimensions of samples."""
        rows = microbatch.rows.stop - microbatch.rows.start
        found = []
        for count in (rows, rows + 1):
            args, kwargs = with_rows(microbatch, count)
            with contextlib.ExitStack() as stack:
                for each in self.draws.values():
                    stack.enter_context(each.probe(count))
                found.append(observe(self.model, self.units, self.outputs, args, kwargs))
        return found[0]

    def _kind(self, microbatch: Microbatch, runs_tail: bool) -> Any:
        leaves, spec = pytree.tree_flatten((microbatch.args, dict(microbatch.kwargs)))
        told = tuple(
            (leaf.dtype, leaf.dim())
            if isinstance(leaf, Tensor)
            else repr(leaf)
            if isinstance(leaf, PLAIN)
            else type(leaf)
            for leaf in leaves
        )
        return str(spec), told, self.model.training, torch.is_grad_enabled(), runs_tail

    def _divide(self, calls: ObservedForward, microbatch: Microbatch) -> None:
        """Choose the stage of each call, and free the parameters that this rank does not need."""
        names = [call.name for call in calls.calls]
        starts = self._starts(names) if self._cut is not None else self._chosen(names, microbatch)
        for i, name in enumerate(names):
            self._stage_of[name] = sum(i >= start for start in starts)
        size = self.group.size()
        users: dict[nn.Parameter, set[int]] = {}
        stage = 0
        for unit_name, unit in self.units.items():
            mine = {self._stage_of[call.name] for call in calls.calls if call.unit == unit_name}
            stage = max(mine, default=stage)  # a unit that this forward does not call goes with the one before it
            for parameter in unit.parameters():
                users.setdefault(parameter, set()).update(each % size for each in mine or {stage})
        for name, parameter in self.model.named_parameters():
            everywhere = name in calls.parameters or parameter not in users
            self.owners[name] = tuple(range(size)) if everywhere else tuple(sorted(users[parameter]))
        stages = self.group
        for name, parameter in self.model.named_parameters():
            owners = self.owners[name]
            disown(parameter, owners, stages)
            if len(owners) > 1:
                self.shared.append((parameter, owners))
        for unit_name, unit in self.units.items():
            mine = {self._stage_of[call.name] % size for call in calls.calls if call.unit == unit_name} or {0}
            for buffer in unit.buffers():
                disown(buffer, tuple(sorted(mine)), stages, keep=True)
        if self.at_cut is not None:
            self.at_cut()
        if self.group.rank() == 0:
            for i in range(self.num_stages):
                own = [name for name in names if self._stage_of[name] == i]
                _log.info("stage %d of %d: %s to %s", i, self.num_stages, own[0], own[-1])

    def _chosen(self, names: Sequence[str], microbatch: Microbatch) -> list[int]:
        """Measure the calls on the first stage's ranks, and return the places of the best cut, the same on all ranks."""
        if len(names) < self.num_stages:
            what = f"the model's forward makes {len(names)} calls between which it can be cut, for {self.num_stages} stages"
            raise UsageError(explain(what, value=list(names), fix="use fewer ranks along pp"))
        told: list[Any] = [None]
        if self.group.rank() == 0:  # other axes divide operations, which all of their ranks have to take part in
            told = [(measure(self.model, self.units, microbatch), available_bytes())]
        dist.broadcast_object_list(told, group=self._everyone, group_src=0)
        self.costs, available = told[0]
        if [cost.name for cost in self.costs] != list(names):
            what = "the model's forward calls other modules with real inputs than without values"
            different = [cost.name for cost in self.costs if cost.name not in names] or ["their order"]
            raise UsageError(explain(what, value=different[0], fix="name the places with cut=[...]"))
        # Until now each rank holds the whole model; what it frees is there too.
        world = current()
        limit = available / (world.local_size if world is not None else 1)
        limit += sum(p.numel() * p.itemsize for p in self.model.parameters())
        p, m, v = self.group.size(), self._num_microbatches, self._stages_per_rank
        in_flight = [-(-most_in_flight(self._schedule, p, m, i % p, v) // v) for i in range(self.num_stages)]
        try:
            starts = balance(self.costs, self.num_stages, in_flight, limit / v)
        except UsageError as error:
            starts = balance(self.costs, self.num_stages)
            if self._everyone.rank() == 0:
                _log.warning("%s", error)
        if self._everyone.rank() == 0:
            _log.info("stages, as measured on rank 0:\n%s", table(self.costs, starts, in_flight))
        return starts

    def _starts(self, names: Sequence[str]) -> list[int]:
        """Return the place, among the calls, of the first call of each stage but the first, as asked for by hand."""
        assert self._cut is not None
        if len(self._cut) != self.num_stages - 1:
            what = f"cut names where a new stage begins: {self.num_stages - 1} for {self.num_stages} stages"
            raise UsageError(explain(what, value=list(self._cut), fix=f"choose among: {', '.join(names[1:])}"))
        unknown = [each for each in self._cut if each not in names[1:]]
        if unknown:
            what = "cut names a part that the model's forward does not call after its first one"
            raise UsageError(explain(what, value=unknown[0], fix=f"choose among: {', '.join(names[1:])}"))
        starts = [names.index(each) for each in self._cut]
        if starts != sorted(set(starts)):
            fix = f"name them in the order of the calls: {', '.join(names[1:])}"
            raise UsageError(
                explain("cut names parts in another order than they are called", value=list(self._cut), fix=fix)
            )
        return starts

    def _stages(self, calls: ObservedForward) -> dict[str, int]:
        """Return the stage of each call; those that the first forward did not make go where their parameters are."""
        found: dict[str, int] = {}
        stage, size = 0, self.group.size()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for call in calls.calls:
            known = self._stage_of.get(call.name)
            holders = [set(self.owners[names[id(p)]]) for p in self.units[call.unit].parameters()]
            allowed = set(range(size)).intersection(*holders)
            if known is None or known < stage:
                later = [each for each in range(stage, self.num_stages) if each % size in allowed]
                if not later:
                    what = f"with inputs of this kind {call.name} is called after parts of later stages"
                    fix = "use inputs of one kind from the first step on, or another cut"
                    raise UsageError(explain(what, value=f"stage {known} after stage {stage}", fix=fix))
                known = later[0]
            stage = found[call.name] = known
        return found


def without_caches(model: nn.Module) -> Mapping[int, Any]:
    """Return the configurations of a model's modules that ask for a cache of keys and values, by identity."""
    found = (getattr(module, "config", None) for module in model.modules())
    return {id(each): each for each in found if getattr(each, "use_cache", None) is True}

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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain
from ...world import current
from ...world.devices import device_of
from ...world.layout import StageTimes
from ...world.machine import available_bytes
from ..axes import WHOLE, Around
from ..division import disown
from ..proof.records import unrecorded
from ..random import Draws
from .blocks import containers, find_units, refuse_backward_hooks
from .cut import MeasuredCalls, PipelineCut, choose_microbatches, cut_for, measure, now_s, table
from .deferred import DeferredWeights
from .forwards.calls import ObservedForward, Routes, observe, route
from .forwards.outputs import PLAIN, UnitOutputs
from .forwards.stage import GlueBuffers, Microbatch, Stage
from .microbatches import Dims, SampleDims, count_rows, cut_batch, with_rows
from .runtime import PipelineRuntime
from .transfers import StageTransfers

_log = logging.getLogger("guozhuang")
# A number among the inputs that changes in each step makes each of them another kind.
_MOST_PLANS: Final = 32
#: Number of microbatches for each rank of the pipeline, where none is asked for and nothing is known.
_USUAL_PER_RANK: Final = 2
_LARGE_MESSAGE_BYTES: Final = 256 << 10
_MESSAGES: Final = 4  # of each size are timed, of which the fastest counts


@dataclass(frozen=True)
class StagePlan:
    """How batches of one kind of inputs go through the stages.

    Attributes:
        routes: who computes what, and sends it to whom.
        runtime: carries it out.
    """

    routes: Routes
    runtime: PipelineRuntime


class StagePlans:
    """Divides a model into stages with its first batch. Every rank of the pipeline must make the same calls.

    Args:
        model: whole and equal on all ranks.
        group: the ranks of the pipeline.
        cut: the calls at which a new stage begins; None: chosen.
        schedule: the name of the schedule.
        stages_per_rank: number of stages of each rank.
        num_microbatches: into how many parts a batch is cut; None: chosen. See [Note: the number of microbatches] in cut.py.
        everyone: all ranks of the layout, which cut alike.
        around: divides the samples themselves, within each stage.
        copy: all ranks that hold one copy of the model together; None: those of the pipeline.

    Attributes:
        units: the units of the model, by name.
        outputs: what they return for which shapes.
        owners: the ranks of the group that hold each parameter, by its name, once the model is divided.
        shared: the parameters that this rank and others hold, with those ranks.
        draws: the random operations of each of this rank's stages, by its number.
        measured: the costs of the calls; None if the cut was made by hand.
        at_cut: called once on every rank when the parameters of other ranks were freed.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        cut: Sequence[str] | None,
        schedule: str,
        stages_per_rank: int,
        num_microbatches: int | None,
        everyone: dist.ProcessGroup,
        around: Around = WHOLE,
        copy: dist.ProcessGroup | None = None,
    ) -> None:
        if num_microbatches != 1 and any(getattr(each, "scale_grad_by_freq", False) for each in model.modules()):
            what = "an embedding divides gradients by how often a row is in the batch, which no microbatch shows"
            raise UsageError(explain(what, value="scale_grad_by_freq=True", fix="leave it out, or give microbatches=1"))
        self.model, self.group, self._everyone, self._around, self._copy = model, group, everyone, around, copy
        self._num_microbatches = num_microbatches
        self._usual_number = _USUAL_PER_RANK * group.size()
        # With BatchNorm the result depends on the microbatches, so their number must not depend on a measured time.
        self._may_choose = num_microbatches is None and not any(isinstance(m, _BatchNorm) for m in model.modules())
        self.measured: MeasuredCalls | None = None
        self._tried: dict[int, list[PipelineCut]] = {}
        self._last_rows, self._limit_bytes = 0, float("inf")
        self._cut, self._schedule, self._stages_per_rank = cut, schedule, stages_per_rank
        self._shape = schedule, group.size(), stages_per_rank
        self.num_stages = group.size() * stages_per_rank
        self.units = find_units(model, self.num_stages)
        if len(self.units) < self.num_stages:
            what = f"the model has {len(self.units)} parts between which it can be cut, for {self.num_stages} stages"
            fix = "use fewer ranks along pp; a model is cut between the elements of its lists, or its children"
            raise UsageError(explain(what, value=list(self.units) or type(model).__name__, fix=fix))
        self._samples = SampleDims()
        self.outputs, self._glue = UnitOutputs(self.units), GlueBuffers(model, self.units)
        self._around_units = containers(model, self.units)
        self.owners: dict[str, tuple[int, ...]] = {}
        self.shared: list[tuple[nn.Parameter, tuple[int, ...]]] = []
        rank, size = group.rank(), group.size()
        self._recorder = getattr(group, "recorder", None)  # of a fake world, in which this process plays all stages
        own = range(rank, self.num_stages, size) if self._recorder is None else range(self.num_stages)
        self.draws = {i: Draws(model, first=i == 0) for i in own}
        self.at_cut: Callable[[], None] | None = None
        self._stage_of: dict[str, int] = {}
        self._plans: dict[Any, StagePlan] = {}
        self._transfers: StageTransfers | None = None
        self._busy_before: dict[int, float] = dict.fromkeys(self.draws, 0.0)  # in plans that were dropped
        self._deferred: DeferredWeights | None = None

    def cut_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, runs_tail: bool = False
    ) -> tuple[StagePlan, list[Microbatch]]:
        """Return the microbatches of a batch, and the plan for inputs of this kind: structure, types, in training or not.

        Args:
            args: the positional inputs.
            kwargs: the keyword inputs.
            runs_tail: see :class:`guozhuang.parallel.pipeline.forwards.stage.Stage`.

        Raises:
            UsageError: the model cannot be divided, or not for these inputs; the text says why.
        """
        refuse_backward_hooks(self._around_units, self.units)
        rows = count_rows(args, kwargs)
        key = self._kind(args, kwargs, runs_tail)
        dims = self._samples.of(args, kwargs)
        if key not in self._plans:
            with unrecorded():
                try:
                    calls = self._observed(args, kwargs, dims)
                except Exception:
                    if not self._samples.look_elsewhere(args, kwargs):
                        raise
                    dims = self._samples.of(args, kwargs)
                    calls = self._observed(args, kwargs, dims)
                if not self._stage_of:
                    self._divide(calls, args, kwargs, dims)
            stage_of = self._stages(calls)
            lost = sorted(name for name in calls.parameters if len(self.owners[name]) < self.group.size())
            if lost:
                what = "with inputs of this kind the model's forward uses a parameter that other stages hold"
                raise UsageError(explain(what, value=lost[0], fix="use inputs of one kind from the first step on"))
            routes = route(calls, stage_of, self.num_stages, self.outputs.opaque)
            stages = {
                i: Stage(
                    *(self.model, self.units, self.outputs, routes, draws, i, self.num_stages, self._glue),
                    runs_tail=runs_tail,
                    around=self._around,
                )
                for i, draws in self.draws.items()
            }
            device = device_of(self.model.parameters())
            # Calls outside of step have GPipe's order, for which no gradients of weights are left for later.
            schedule = "gpipe" if self._stages_per_rank == 1 else "interleaved"
            if runs_tail:
                schedule = self._schedule
            weights = self._weights() if schedule in ("gpipe", "zero-bubble") else None
            runtime = PipelineRuntime(
                self.group, stages, schedule, self._stages_per_rank, routes.messages, device, weights, self._transfers
            )
            self._transfers = runtime.transfers
            self._plans[key] = StagePlan(routes, runtime)
            if len(self._plans) > _MOST_PLANS:
                oldest = self._plans.pop(next(iter(self._plans))).runtime
                for stage, seconds in oldest.busy_s.items():
                    self._busy_before[stage] += seconds
        self._last_rows = rows
        return self._plans[key], cut_batch(args, kwargs, self._number_for(rows), dims)

    def times(self) -> list[StageTimes]:
        """Return the stages of this rank with their times; none before the model is divided."""
        found = []
        told = self._told() if self._stage_of else ""
        for stage in self.draws if self._stage_of else ():
            names = [name for name, owner in self._stage_of.items() if owner == stage]
            predicted_s = None
            if self.measured is not None:
                m = min(self._number_for(self._last_rows), self._last_rows)
                costs = self.measured.at(self._last_rows / m)
                predicted_s = m * sum(cost.seconds for cost in costs if cost.name in names)
            busy_s = self._busy_before[stage] + sum(plan.runtime.busy_s[stage] for plan in self._plans.values())
            found.append(StageTimes(stage, self.group.rank(), names[0], names[-1], predicted_s, busy_s, told))
        return found

    def _number_for(self, rows: int) -> int:
        """Return into how many microbatches a batch of so many rows is cut, after the model was divided."""
        if self._num_microbatches is not None:
            return self._num_microbatches
        if self.measured is None or len(self.measured.rows) == 1:
            return self._usual_number
        if rows not in self._tried:
            starts = [list(self._stage_of.values()).index(stage) for stage in range(1, self.num_stages)]
            try:
                self._tried[rows] = self._try(rows, self._numbers(rows), starts)
            except UsageError:  # the batch is larger than the first one: it is not said that there is no memory for it
                return max(self._numbers(rows))
        return choose_microbatches(self._tried[rows], self._usual_number).num_microbatches

    def _try(self, rows: int, numbers: Sequence[int], starts: Sequence[int] | None = None) -> list[PipelineCut]:
        """Return what steps take with these numbers of microbatches; with those only for which there is memory.

        Raises:
            UsageError: with none of them there is.
        """
        assert self.measured is not None
        found, errors = [], []
        for m in numbers:
            try:
                found.append(cut_for(self.measured, rows, m, self._shape, self._limit_bytes, starts))
            except UsageError as error:
                errors.append(error)
        if not found:
            raise errors[-1]
        return found

    def _numbers(self, rows: int) -> list[int]:
        """Return the numbers of microbatches among which one is chosen."""
        p = self.group.size()
        return sorted({min(rows, m) for m in (1, p, 3 * p // 2, 2 * p, 3 * p, 4 * p, 6 * p, 8 * p)})

    def _told(self) -> str:
        """Return into how many microbatches batches like the last one are cut, and why."""
        m = self._number_for(self._last_rows)
        text = f"{min(m, self._last_rows)} microbatches"
        if self._num_microbatches is not None:
            return f"{text}, as asked for"
        tried = self._tried.get(self._last_rows, [])
        if len(tried) < 2:
            return f"{text}, {_USUAL_PER_RANK} for each rank"
        others = ", ".join(f"{1e3 * each.step_s:.0f} with {each.num_microbatches}" for each in tried)
        return f"{text}, chosen by the predicted ms of a step: {others}"

    def _weights(self) -> DeferredWeights:
        if self._deferred is None:
            self._deferred = DeferredWeights(self.model)
        return self._deferred

    def _observed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Dims) -> ObservedForward:
        """Run the forward without its units twice, with one more row the second time, which shows dimensions of samples."""
        number = self._num_microbatches or self._usual_number
        microbatch = cut_batch(args, kwargs, number, dims)[0]
        rows = microbatch.rows.stop - microbatch.rows.start
        found = []
        for count in (rows, rows + 1):
            few_args, few_kwargs = with_rows(microbatch, count)
            with contextlib.ExitStack() as stack:
                for each in self.draws.values():
                    stack.enter_context(each.probe(count))
                stack.enter_context(self._glue.unchanged())
                found.append(observe(self.model, self.units, self.outputs, few_args, few_kwargs))
        return found[0]

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], runs_tail: bool) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        told = tuple(
            (leaf.dtype, leaf.dim())
            if isinstance(leaf, Tensor)
            else repr(leaf)
            if isinstance(leaf, PLAIN)
            else type(leaf)
            for leaf in leaves
        )
        return str(spec), told, self.model.training, torch.is_grad_enabled(), runs_tail

    def _divide(self, calls: ObservedForward, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Dims) -> None:
        """Choose the stage of each call, and free the parameters that this rank does not need."""
        names = [call.name for call in calls.calls]
        starts = self._starts(names) if self._cut is not None else self._chosen(calls, args, kwargs, dims)
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
        stages = self.group if self._recorder is None else None
        if self._recorder is not None:
            self._recorder.shares = self._shares()
        for name, parameter in self.model.named_parameters():
            owners = self.owners[name]
            disown(parameter, owners, stages, copy=self._copy)
            if len(owners) > 1:
                self.shared.append((parameter, owners))
        for unit_name, unit in self.units.items():
            mine = {self._stage_of[call.name] % size for call in calls.calls if call.unit == unit_name} or {0}
            for buffer in unit.buffers():
                disown(buffer, tuple(sorted(mine)), stages, keep=True, copy=self._copy)
        if self.at_cut is not None:
            self.at_cut()
        if self.group.rank() == 0:
            for i in range(self.num_stages):
                own = [name for name in names if self._stage_of[name] == i]
                _log.info("stage %d of %d: %s to %s", i, self.num_stages, own[0], own[-1])

    def _shares(self) -> dict[int, float]:
        """Return which share of the parameters each rank holds."""
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        held = [sum(n for name, n in sizes.items() if r in self.owners[name]) for r in range(self.group.size())]
        return {rank: num / max(1, sum(sizes.values())) for rank, num in enumerate(held)}

    def _chosen(
        self, calls: ObservedForward, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Dims
    ) -> list[int]:
        """Measure the calls on the first stage's ranks, and return the places of the best cut, the same on all ranks."""
        names = [call.name for call in calls.calls]
        if len(names) < self.num_stages:
            what = f"the model's forward makes {len(names)} calls between which it can be cut, for {self.num_stages} stages"
            raise UsageError(explain(what, value=names, fix="use fewer ranks along pp"))
        p, rows = self.group.size(), count_rows(args, kwargs)
        numbers = (4 * p, p) if self._may_choose else (self._num_microbatches or self._usual_number,)
        sizes = {each.rows.stop: each for each in (cut_batch(args, kwargs, m, dims)[0] for m in numbers)}
        told: list[Any] = [None]
        if self.group.rank() == 0:  # other axes divide operations, which all of their ranks have to take part in
            shapes = {call.name: call.shapes for call in calls.calls}
            is_alone = self.group.size() == self._everyone.size()
            costs = measure(self.model, self.units, list(sizes.values()), shapes, self._around, is_alone)
            # Until now each rank holds the whole model; what it frees is there too.
            world = current()
            limit_bytes = available_bytes() / (world.local_size if world is not None else 1)
            limit_bytes += sum(p.numel() * p.itemsize for p in self.model.parameters())
            told = [(tuple(map(tuple, costs)), limit_bytes)]
        dist.broadcast_object_list(told, group=self._everyone, group_src=0)
        costs, self._limit_bytes = told[0]  # one limit: ranks with different ones might cut in different places
        if [cost.name for cost in costs[0]] != names:
            what = "the model's forward calls other modules with real inputs than without values"
            different = [cost.name for cost in costs[0] if cost.name not in names] or ["their order"]
            raise UsageError(explain(what, value=different[0], fix="name the places with cut=[...]"))
        told = [self._message_times()]
        dist.broadcast_object_list(told, group=self._everyone, group_src=0)
        self.measured = MeasuredCalls(tuple(sizes), costs, *told[0])
        candidates = self._numbers(rows) if len(sizes) > 1 else numbers
        try:
            tried = self._try(rows, candidates)
        except UsageError as error:
            if self._everyone.rank() == 0:
                _log.warning("%s", error)
            self._limit_bytes = float("inf")
            tried = self._try(rows, candidates)
        best = choose_microbatches(tried, self._usual_number)
        if self._everyone.rank() == 0:
            _log.info("stages, as measured on rank 0:\n%s", table(best.costs, best.starts, best.in_flight))
        return best.starts

    def _message_times(self) -> tuple[float, float]:
        """Return how many seconds a message along pp takes, and how many more for each byte. Every rank must call it."""
        if self._recorder is not None:
            told: tuple[float, float] = self._recorder.message_times
            return told
        device = device_of(self.model.parameters())
        shortest = []
        for num_bytes in (8, _LARGE_MESSAGE_BYTES):
            tensor, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
            for _ in range(_MESSAGES):
                began_s = now_s()
                dist.all_reduce(tensor, group=self.group)
                seconds.append(now_s() - began_s)
            shortest.append(min(seconds))
        p = self.group.size()  # each rank sends 2 (p - 1) / p of the bytes
        return shortest[0] / 2, max(shortest[1] - shortest[0], 0.0) * p / (2 * (p - 1) * _LARGE_MESSAGE_BYTES)

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

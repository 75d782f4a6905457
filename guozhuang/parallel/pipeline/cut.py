"""Where to cut a model into stages: measured costs of its calls, and the cut whose slowest stage is fastest.

[Note: the cost of a stage] The step of a pipeline takes (m + p - 1) times the time of its slowest stage, so the cut is to make
that stage fast. Each call of a unit is timed where it is, forward and backward, on a microbatch, on rank 0, and all
ranks take rank 0's figures. Minimizing the largest sum of contiguous parts is a dynamic program over the places of the cuts.
A stage needs memory for its parameters, their gradients and the optimizer's state, and for what autograd saves of each
microbatch in flight; cuts that need more than there is are not considered.

[Note: the number of microbatches] More microbatches leave ranks idle for less time, and each costs something whatever its
rows are: weights are read, gradients of weights added up, messages sent. Calls are therefore timed with two sizes of
microbatches, and the time with another size is on the line through both. For some numbers of microbatches the best cut is found
and the schedule carried out in thought with these times and that of a message, and the number whose step is shortest is taken.

[Note: equal choices] Times differ a little each time they are measured. If the fastest choice were always taken, two runs of
one script would often be cut at different places, and their sums be rounded differently. So cuts whose slowest stage is slower
by 3 % at most count as equally fast, and numbers of microbatches whose step is by 5 %; among such the one is taken that does
not depend on time: the cut whose largest stage needs least memory, and the usual number of microbatches, or else the smallest.
A call is timed several times, and if it has one thread by how long that thread computes, which others on the machine hardly
change.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain, rank_table
from ..activations.tensor import DividedTensor, local_of
from ..axes import WHOLE, Around
from .forwards.intercept import intercepted
from .forwards.stage import Microbatch
from .schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, make_schedule, most_in_flight, simulate

#: Bytes of the optimizer's state for each byte of a parameter: two moments, as of Adam.
STATE_PER_PARAMETER: Final = 2
# Which share a stage, and a step with another number of microbatches, may be slower. See [Note: equal choices].
_WORTH, _WORTH_MICROBATCHES = 0.03, 0.05
# A call is timed until the two shortest times differ by this share at most, so often at most, and in so many seconds.
_AGREES, _LEAST_RUNS, _MOST_RUNS, _MOST_TIMED_S = 0.01, 2, 10, 0.3


@dataclass(frozen=True)
class CallCost:
    """What one call of a unit costs.

    Attributes:
        name: of the call.
        seconds: of forward and backward of one microbatch.
        parameter_bytes: of the unit's parameters.
        saved_bytes: of the tensors that autograd saves in the forward of one microbatch, apart from parameters.
        output_bytes: of the tensors that it returns for one microbatch.
    """

    name: str
    seconds: float
    parameter_bytes: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0


def measure(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    microbatches: Sequence[Microbatch],
    shapes: Mapping[str, Hashable] = MappingProxyType({}),
    around: Around = WHOLE,
    is_alone: bool = True,
) -> list[list[CallCost]]:
    """Run the model on microbatches, and return for each the cost of each call in the order of the calls.

    Nothing of the model changes: buffers and random generators are put back, and gradients are not stored. Of calls of units of
    one class and of the same sizes only the first is run, and all get its time. It is run at least twice, and the shortest time
    counts: the first one pays for what is set up at a layer's first call, and others for what else the machine does.

    Args:
        model: whole.
        units: by name.
        microbatches: of different sizes.
        shapes: of what each call returns, by its name; a call without them is run.
        around: divides the samples themselves.
        is_alone: whether no other rank takes part in the calls; else each is run equally often on all of them.
    """
    most = _MOST_RUNS if is_alone else _LEAST_RUNS
    with _unchanged(model):
        return [_measured(model, units, each, shapes, around, most) for each in microbatches]


@dataclass(frozen=True)
class _Alike:
    """The cost of a call, and what it returned, for later calls of the same kind."""

    cost: CallCost
    output: Any


def _measured(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    microbatch: Microbatch,
    shapes: Mapping[str, Hashable],
    around: Around,
    most_runs: int,
) -> list[CallCost]:
    found: list[CallCost] = []
    alike: dict[Hashable, _Alike] = {}

    def on_call(name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first = alike.get(key := _kind(name, unit, args, kwargs))
        if first is None:
            first = alike[key] = _shortest(lambda: _run_timed(name, unit, proceed, args, kwargs), most_runs)
        found.append(replace(first.cost, name=name))
        return pytree.tree_map(_fresh, first.output)

    def _kind(name: str, unit: nn.Module, args: Any, kwargs: Any) -> Hashable:
        if name not in shapes:
            return name
        given = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves((args, kwargs)))
        return kinds[id(unit)], shapes[name], given, tuple(each.shape for each in unit.parameters()), repr(unit)

    kinds = {id(unit): type(unit) for unit in units.values()}
    with torch.enable_grad(), intercepted(units, on_call):
        args, kwargs = around.inputs(microbatch.args, microbatch.kwargs)
        around.outputs(model(*args, **kwargs))
    return found


def _shortest(run: Callable[[], _Alike], most_runs: int) -> _Alike:
    """Run until the two shortest times agree, or no time is left, and return the shortest."""
    runs: list[_Alike] = []
    while len(runs) < _LEAST_RUNS or (
        runs[1].cost.seconds > (1 + _AGREES) * runs[0].cost.seconds
        and sum(each.cost.seconds for each in runs) < _MOST_TIMED_S
        and len(runs) < most_runs
    ):
        runs = sorted([*runs, run()], key=lambda each: each.cost.seconds)
    return runs[0]


def _run_timed(name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> _Alike:
    """Run forward and backward of one call."""
    own = {p.untyped_storage().data_ptr() for p in unit.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves: list[Tensor] = []
    args, kwargs = pytree.tree_map(lambda leaf: _fresh(_detached(leaf, leaves)), (args, kwargs))
    clock = time.thread_time if torch.get_num_threads() == 1 and not torch.accelerator.is_available() else now_s
    began_s = clock()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = proceed(*args, **kwargs)
    roots = [local_of(each) for each in pytree.tree_leaves(output) if _has_graph(each)]
    weights: list[Tensor] = [p for p in unit.parameters() if p.requires_grad]
    forward_s = clock() - began_s
    try:
        if roots and (leaves or weights):
            seeds = [torch.ones_like(each) for each in roots]
            gradients = torch.autograd.grad(roots, leaves + weights, seeds, allow_unused=True)
            for each in gradients[len(leaves) :]:
                if each is not None and each.layout == torch.strided and each.is_contiguous():
                    each.add_(each)  # as later microbatches do to those of the first
    except RuntimeError:
        # Checkpoints of the old style compute no chosen gradients. A backward takes about as long as two forwards.
        began_s -= 2 * forward_s
    seconds = clock() - began_s
    num_bytes = sum(p.numel() * p.itemsize for p in unit.parameters())
    returned = sum(local_of(each).nbytes for each in pytree.tree_leaves(output) if isinstance(each, Tensor))
    output = pytree.tree_map(lambda leaf: _detached(leaf, []), output)
    return _Alike(CallCost(name, seconds, num_bytes, sum(saved.values()), returned), output)


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _fresh(leaf: Any) -> Any:
    """Return a tensor as one that a forward may change in place: a leaf of autograd's graph as something computed."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf * 1 if leaf.requires_grad else leaf.clone()


def _detached(leaf: Any, leaves: list[Tensor]) -> Any:
    """Return a tensor without its graph; one with a graph as a leaf, of which this rank's part is added to a list."""
    if not _has_graph(leaf):
        return leaf
    leaves.append(local_of(leaf).detach().requires_grad_())
    return leaf.like(leaves[-1]) if isinstance(leaf, DividedTensor) else leaves[-1]


def now_s() -> float:
    """Return the time, after what an accelerator was given to do has ended."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def balance(
    costs: Sequence[CallCost], num_stages: int, in_flight: Sequence[int] = (), limit_bytes: float = float("inf")
) -> list[int]:
    """Return where to cut a row of calls into contiguous stages, none empty, so that the slowest stage is about the fastest.

    Its time is at most 3 % longer than of any other cut. See [Note: equal choices].

    Args:
        costs: of the calls, in their order.
        num_stages: into how many stages.
        in_flight: by stage, of how many microbatches it holds activations; needed with ``limit_bytes`` only.
        limit_bytes: the most memory that a stage may need. See [Note: the cost of a stage].

    Returns:
        The place of the first call of each stage but the first.

    Raises:
        UsageError: every cut needs more memory; the text has a table of the stages of the one that is fastest without a limit.
    """
    found = _best(costs, num_stages, in_flight, limit_bytes)
    if found is None:
        starts = _best(costs, num_stages, in_flight, float("inf"))
        assert starts is not None, "there are fewer calls than stages"
        what = f"no cut into {num_stages} stages fits into {limit_bytes / 1e9:.2f} GB a rank; the fastest one needs\n"
        what += f"{table(costs, starts, in_flight)}\n"
        raise UsageError(explain(what, fix="use more ranks along pp, smaller microbatches, or the schedule 1f1b"))
    return found


def _need_bytes(stage: Sequence[CallCost], num_in_flight: int) -> int:
    """Return the memory that a stage of these calls needs."""
    held = num_in_flight * sum(cost.saved_bytes for cost in stage)
    return (2 + STATE_PER_PARAMETER) * sum(cost.parameter_bytes for cost in stage) + held


def _best(costs: Sequence[CallCost], num_stages: int, in_flight: Sequence[int], limit_bytes: float) -> list[int] | None:
    """Return the places of the cut that :func:`balance` chooses; None if no cut fits into memory."""
    seconds, parameters, saved = [0.0], [0], [0]
    for cost in costs:
        seconds.append(seconds[-1] + cost.seconds)
        parameters.append(parameters[-1] + cost.parameter_bytes)
        saved.append(saved[-1] + cost.saved_bytes)

    def need(start: int, stop: int, stage: int) -> float:
        held = (in_flight[stage] if in_flight else 1) * (saved[stop] - saved[start])
        return (2 + STATE_PER_PARAMETER) * (parameters[stop] - parameters[start]) + held

    def slowness(start: int, stop: int, stage: int) -> float:
        return seconds[stop] - seconds[start] if need(start, stop, stage) <= limit_bytes else float("inf")

    fastest, _ = _least(len(costs), num_stages, slowness)
    if fastest == float("inf"):
        return None

    def need_if_fast(start: int, stop: int, stage: int) -> float:
        return need(start, stop, stage) if slowness(start, stop, stage) <= (1 + _WORTH) * fastest else float("inf")

    return list(_least(len(costs), num_stages, need_if_fast)[1])


def _least(num_calls: int, num_stages: int, price: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The dynamic program: return the largest price of a stage under the cut for which it is least, and the cut's places.

    Args:
        num_calls: how many calls are cut.
        num_stages: into how many stages.
        price: of the calls from the first to before the second number as the stage of the third.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(price(0, stop, 0), ()) for stop in range(num_calls + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                ((max(best[i][0], price(i, stop, stage)), (*best[i][1], i)) for i in range(stage, stop)),
                default=(float("inf"), ()),
            )
            for stop in range(num_calls + 1)
        ]
    return best[-1]


@dataclass(frozen=True)
class MeasuredCalls:
    """The costs of all calls, as measured with microbatches of one size or two, and of a message.

    Attributes:
        rows: of the microbatches, rising.
        costs: with each of these sizes, in the order of the calls.
        message_s: how long a small message from one rank to another takes.
        byte_s: how much longer it takes for each byte.
    """

    rows: tuple[int, ...]
    costs: tuple[tuple[CallCost, ...], ...]
    message_s: float = 0.0
    byte_s: float = 0.0

    def at(self, rows: float) -> list[CallCost]:
        """Return the costs with microbatches of another size, on the line through those that were measured."""
        small, large = list(self.costs[0]), list(self.costs[-1])
        if len(self.rows) == 1:  # there is no telling what does not depend on the rows
            small = [replace(each, seconds=0.0, saved_bytes=0, output_bytes=0) for each in small]
        few = 0 if len(self.rows) == 1 else self.rows[0]
        share = (rows - few) / (self.rows[-1] - few)

        def value(a: float, b: float) -> float:
            return max(a + share * max(b - a, 0), 0)

        return [
            replace(
                a,
                seconds=value(a.seconds, b.seconds),
                saved_bytes=int(value(a.saved_bytes, b.saved_bytes)),
                output_bytes=int(value(a.output_bytes, b.output_bytes)),
            )
            for a, b in zip(small, large, strict=True)
        ]


@dataclass(frozen=True)
class PipelineCut:
    """A way to divide a model and its batches, and what a step is expected to take.

    Attributes:
        num_microbatches: m.
        costs: of the calls with one microbatch.
        starts: the place of the first call of each stage but the first.
        in_flight: by stage, of how many microbatches it holds activations.
        step_s: how long forwards and backwards of a batch take, from the first to the last.
    """

    num_microbatches: int
    costs: list[CallCost]
    starts: list[int]
    in_flight: list[int]
    step_s: float


def cut_for(
    measured: MeasuredCalls,
    num_rows: int,
    num_microbatches: int,
    shape: tuple[str, int, int],
    limit_bytes: float = float("inf"),
    starts: Sequence[int] | None = None,
) -> PipelineCut:
    """Return the best cut for a number of microbatches. See [Note: the cost of a stage].

    Args:
        measured: the costs.
        num_rows: of a batch.
        num_microbatches: into which it is cut.
        shape: the schedule's name, and the numbers of ranks and of stages of each.
        limit_bytes: the most memory that a rank may need.
        starts: the cut, if it is known.

    Raises:
        UsageError: every cut needs more memory.
    """
    name, p, v = shape
    m, num_stages = min(num_microbatches, num_rows), p * v
    costs = measured.at(num_rows / m)
    in_flight = [-(-most_in_flight(name, p, m, i % p, v) // v) for i in range(num_stages)]
    starts = list(starts) if starts is not None else balance(costs, num_stages, in_flight, limit_bytes / v)
    stages = [costs[a:b] for a, b in itertools.pairwise([0, *starts, len(costs)])]
    need = max(map(_need_bytes, stages, in_flight))
    if need > limit_bytes / v:
        what = f"a stage needs {need / 1e9:.2f} GB with {m} microbatches, and there are {limit_bytes / v / 1e9:.2f} GB"
        raise UsageError(explain(what, fix="use more ranks along pp, smaller batches, or the schedule 1f1b"))
    seconds = [sum(cost.seconds for cost in stage) for stage in stages]
    third, rest = [each / 3 for each in seconds], [2 * each / 3 for each in seconds]
    times = {FORWARD: third, BACKWARD: rest, INPUTS: third, WEIGHTS: third}
    largest = max((costs[start - 1].output_bytes for start in starts), default=0)
    message_s = measured.message_s + measured.byte_s * largest
    found = simulate(make_schedule(name, p, m, v), times=times, message_time=message_s)
    return PipelineCut(m, costs, starts, in_flight, found.end)


def choose_microbatches(tried: Sequence[PipelineCut], usual: int) -> PipelineCut:
    """Return a cut with about the shortest step: with the usual number of microbatches, or else the smallest.

    See [Note: equal choices].
    """
    shortest = min(each.step_s for each in tried)
    short = [each for each in tried if each.step_s <= (1 + _WORTH_MICROBATCHES) * shortest]
    return min(short, key=lambda each: (each.num_microbatches != usual, each.num_microbatches))


def table(costs: Sequence[CallCost], starts: Sequence[int], in_flight: Sequence[int] = ()) -> str:
    """Return a table with a line per stage: its calls, the predicted time of a microbatch and the memory it needs."""
    rows = []
    for stage, (start, stop) in enumerate(zip([0, *starts], [*starts, len(costs)], strict=True)):
        mine = costs[start:stop]
        need = _need_bytes(mine, in_flight[stage] if in_flight else 1)
        ms = 1e3 * sum(cost.seconds for cost in mine)
        rows.append((stage, mine[0].name, mine[-1].name, f"{ms:.1f}", f"{need / 1e6:.1f}"))
    return rank_table(("stage", "from", "to", "ms a microbatch", "MB"), rows)

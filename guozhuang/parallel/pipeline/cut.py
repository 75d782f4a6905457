"""Where to cut a model into stages: measured costs of its calls, and the cut whose slowest stage is fastest.

[Note: the cost of a stage] The step of a pipeline takes (m + p - 1) times the time of its slowest stage, so the cut is to make
that stage fast. Each call of a unit is timed where it is, forward and backward, on the first microbatch, on rank 0, and all
ranks take rank 0's figures. Minimizing the largest sum of contiguous parts is a dynamic program over the places of the cuts.
A stage needs memory for its parameters, their gradients and the optimizer's state, and for what autograd saves of each
microbatch in flight; cuts that need more than there is are not considered.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain, rank_table
from .forwards.intercept import intercepted
from .forwards.stage import Microbatch

#: Bytes of the optimizer's state for each byte of a parameter: two moments, as of Adam.
STATE_PER_PARAMETER: Final = 2
# A second pass is worth its time only if it is short: the first pays for what is set up at a layer's first call.
_LONGEST_FIRST_PASS_S: Final = 0.5


@dataclass(frozen=True)
class CallCost:
    """What one call of a unit costs.

    Attributes:
        name: of the call.
        seconds: of forward and backward of one microbatch.
        parameter_bytes: of the unit's parameters.
        saved_bytes: of the tensors that autograd saves in the forward of one microbatch, apart from parameters.
    """

    name: str
    seconds: float
    parameter_bytes: int = 0
    saved_bytes: int = 0


def measure(model: nn.Module, units: Mapping[str, nn.Module], microbatch: Microbatch) -> list[CallCost]:
    """Run the model on a microbatch, and return the cost of each call in the order of the calls.

    Nothing of the model changes: buffers and random generators are put back, and gradients are not stored. Calls of units of
    one class and of the same sizes get the median of their times.
    """
    began_s = time.perf_counter()
    with _unchanged(model):
        found = _measured(model, units, microbatch)
        if time.perf_counter() - began_s < _LONGEST_FIRST_PASS_S:
            again = _measured(model, units, microbatch)
            found = [min(pair, key=lambda each: each[1].seconds) for pair in zip(found, again, strict=True)]
    alike: dict[Any, list[float]] = {}
    for kind, cost in found:
        alike.setdefault((kind, cost.parameter_bytes, cost.saved_bytes), []).append(cost.seconds)
    medians = {key: statistics.median(seconds) for key, seconds in alike.items()}
    return [replace(cost, seconds=medians[kind, cost.parameter_bytes, cost.saved_bytes]) for kind, cost in found]


def _measured(
    model: nn.Module, units: Mapping[str, nn.Module], microbatch: Microbatch
) -> list[tuple[type[nn.Module], CallCost]]:
    found: list[tuple[type[nn.Module], CallCost]] = []

    def on_call(name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        own = {p.untyped_storage().data_ptr() for p in unit.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        args, kwargs = pytree.tree_map(_detached, (args, kwargs))
        given_args, given_kwargs = pytree.tree_map(_computed, (args, kwargs))
        began_s = _now_s()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = proceed(*given_args, **given_kwargs)
        roots = [each for each in pytree.tree_leaves(output) if _has_graph(each)]
        leaves = [each for each in pytree.tree_leaves((args, kwargs)) if _has_graph(each)]
        wanted = leaves + [p for p in unit.parameters() if p.requires_grad]
        forward_s = _now_s() - began_s
        try:
            if roots and wanted:
                torch.autograd.grad(roots, wanted, [torch.ones_like(each) for each in roots], allow_unused=True)
        except RuntimeError:
            # Checkpoints of the old style compute no chosen gradients. A backward takes about as long as two forwards.
            began_s -= 2 * forward_s
        num_bytes = sum(p.numel() * p.itemsize for p in unit.parameters())
        cost = CallCost(name, _now_s() - began_s, num_bytes, sum(saved.values()))
        found.append((kinds[id(unit)], cost))
        return pytree.tree_map(lambda leaf: _computed(_detached(leaf)), output)

    kinds = {id(unit): type(unit) for unit in units.values()}
    with torch.enable_grad(), intercepted(units, on_call):
        model(*microbatch.args, **microbatch.kwargs)
    return found


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _computed(leaf: Any) -> Any:
    """Return a leaf of autograd's graph as something computed, which a forward may change in place."""
    return leaf * 1 if _has_graph(leaf) else leaf


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    return leaf.detach().requires_grad_()


def _now_s() -> float:
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
    """Return where to cut a row of calls into contiguous stages, none empty, so that the slowest stage is fastest.

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


def _best(costs: Sequence[CallCost], num_stages: int, in_flight: Sequence[int], limit_bytes: float) -> list[int] | None:
    """The dynamic program: for each number of stages and of calls the slowest stage of the best cut, and its places."""
    seconds, parameters, saved = [0.0], [0], [0]
    for cost in costs:
        seconds.append(seconds[-1] + cost.seconds)
        parameters.append(parameters[-1] + cost.parameter_bytes)
        saved.append(saved[-1] + cost.saved_bytes)

    def slowest(start: int, stop: int, stage: int) -> float:
        if limit_bytes < float("inf"):
            held = in_flight[stage] * (saved[stop] - saved[start])
            if (2 + STATE_PER_PARAMETER) * (parameters[stop] - parameters[start]) + held > limit_bytes:
                return float("inf")
        return seconds[stop] - seconds[start]

    best: list[tuple[float, tuple[int, ...]]] = [(slowest(0, stop, 0), ()) for stop in range(len(costs) + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                ((max(best[i][0], slowest(i, stop, stage)), (*best[i][1], i)) for i in range(stage, stop)),
                default=(float("inf"), ()),
            )
            for stop in range(len(costs) + 1)
        ]
    return list(best[-1][1]) if best[-1][0] < float("inf") else None


def table(costs: Sequence[CallCost], starts: Sequence[int], in_flight: Sequence[int] = ()) -> str:
    """Return a table with a line per stage: its calls, the predicted time of a microbatch and the memory it needs."""
    rows = []
    for stage, (start, stop) in enumerate(zip([0, *starts], [*starts, len(costs)], strict=True)):
        mine = costs[start:stop]
        held = (in_flight[stage] if in_flight else 1) * sum(cost.saved_bytes for cost in mine)
        need = (2 + STATE_PER_PARAMETER) * sum(cost.parameter_bytes for cost in mine) + held
        ms = 1e3 * sum(cost.seconds for cost in mine)
        rows.append((stage, mine[0].name, mine[-1].name, f"{ms:.1f}", f"{need / 1e6:.1f}"))
    return rank_table(("stage", "from", "to", "ms a microbatch", "MB"), rows)

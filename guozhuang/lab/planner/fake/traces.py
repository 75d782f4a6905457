"""Traces of strategies, recorded in one process that plays a rank of a fake world; see groups/fake."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from guozhuang import strategies
from guozhuang.cost.trace import Trace
from guozhuang.errors import UsageError, explain
from guozhuang.groups import fake
from guozhuang.lab import measure
from guozhuang.lab.results import RunFailure
from guozhuang.records import build, to_json, write_text
from guozhuang.strategies import Strategy
from guozhuang.world import Layout

if TYPE_CHECKING:
    from guozhuang.lab.runs import Runs
    from guozhuang.lab.worker import RunSpec

#: The file in a run's folder that holds the trace.
TRACE_FILE: Final = "trace.json"
_SERVERS: Final = "its ranks exchange messages with servers, which a fake world does not have"
_NOT: Final = {
    "async-model-average": "when its ranks communicate depends on the clock and not on the steps",
    "parameter-server": _SERVERS,
    "async-parameter-server": _SERVERS,
    "torch-pipeline": "its stages wait for activations, which nobody sends in a fake world",
}


def recorded(
    runs: Runs, spec: RunSpec, log: Path, tick: Callable[[int], None] = lambda step: None
) -> tuple[Trace, ...] | RunFailure:
    """Record the trace of a strategy by training in one process.

    Args:
        runs: starts the process.
        spec: the run; its purpose is "trace". Its ``rank``, ``num_ranks``, ``num_nodes`` and ``backend`` (shm or gloo) say
            whose trace it is. As many steps are recorded as it has, or the period of the strategy if that is longer.
        log: the file for the output of the process.
        tick: called now and then with the number of steps done.

    Returns:
        One trace, if all ranks do the same; those of all ranks for a pipeline. Or the failure of the run.

    Raises:
        UsageError: the strategy cannot be recorded; the text says why.
    """
    found = runs.execute(spec, log, tick)
    if isinstance(found, RunFailure):
        return found
    document = json.loads((Path(spec.folder) / TRACE_FILE).read_text())
    return tuple(build(Trace, each) for each in document["traces"])


def record_trace(spec: RunSpec, make_trainer: Callable[..., Any]) -> None:
    """Train as a rank of a fake world, and write the trace of its steps to the run's folder.

    Args:
        spec: the run.
        make_trainer: makes what trains, of the run and the world.
    """
    torch.set_num_threads(spec.num_threads)
    strategy = strategies.get(spec.strategy)
    check_recordable(strategy)
    device = torch.device(spec.device or "cpu")
    here, recorder = fake.enter(spec.rank, spec.num_ranks, spec.num_nodes, spec.backend or "gloo", device)
    layout = Layout.parse(spec.layout, spec.strategy, spec.num_ranks)
    if layout.pp not in (1, spec.num_ranks):
        what = "one process plays all stages of a pipeline, and cannot play several pipelines beside each other"
        fix = f"record pp={spec.num_ranks}, or a layout without pp"
        raise UsageError(explain(what, value=str(layout), fix=fix))
    trainer = make_trainer(spec, here)
    trainer.last_gradient.stop()  # its hooks are no part of what a rank does
    if strategy.warmup_steps:  # what is sent then differs from what is sent later, and the batch does not matter
        whole = trainer.batch_size
        trainer.use_batch_size(min(2, whole))
        for number in range(strategy.warmup_steps):
            trainer.step(number + 1)
        trainer.use_batch_size(whole)
    for number in range(max(spec.num_warmup_steps, 3)):
        trainer.step(number + 1)
    period = period_of(trainer.model)
    trainer.on_part = recorder.passed
    is_known = measure.reset_peak_memory(device)
    recorder.begin()
    for number in range(max(spec.num_steps, period)):
        trainer.step(number + 1)
        recorder.step_ended()
    traces = recorder.traces(period, spec.num_threads)
    if len(traces) == 1 and is_known:  # with several stages the process holds more than any rank does
        on_device = device.type == "cuda"
        main = (measure.peak_memory_bytes() or 0) + recorder.beside_bytes
        peak = torch.cuda.max_memory_allocated(device) if on_device else main
        traces = (dataclasses.replace(traces[0], peak_bytes=peak),)
    write_text(Path(spec.folder) / TRACE_FILE, to_json({"traces": [dataclasses.asdict(each) for each in traces]}))


def check_recordable(strategy: Strategy) -> None:
    """Raise if the steps of a strategy cannot be recorded in a fake world.

    Raises:
        UsageError: it cannot; the text says why.
    """
    why = "it trains in one process" if strategy.one_process else _NOT.get(strategy.name)
    if why is not None:
        what = f"the steps of strategy {strategy.name} cannot be recorded in a fake world: {why}"
        raise UsageError(explain(what, value=strategy.name, fix="measure it with `guozhuang compare`"))


def period_of(model: Any) -> int:
    """Return after how many steps a prepared model does the same again: the ``every`` of its exchange of weights, or 1."""
    around = getattr(model, "around", None)
    return _every(getattr(around, "exchange", None))


def _every(exchange: Any) -> int:
    if not dataclasses.is_dataclass(exchange):
        return 1
    parts = [_every(getattr(exchange, field.name)) for field in dataclasses.fields(exchange)]
    return max([int(getattr(exchange, "every", 1)), *parts])

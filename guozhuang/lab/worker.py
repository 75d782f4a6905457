"""The program of one rank of a measured run: ``python -m guozhuang.lab.worker SPEC.json``, alone or under ``guozhuang run``.

A worker trains for a given number of steps, measures, and writes ``rank-R.json`` (or an ``error-*.json``) to the run's folder.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import mmap
import os
import signal
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from guozhuang import data, strategies, world
from guozhuang.data_parallel import DataParallel
from guozhuang.distributed import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.noise_scale import NoiseMeter, NoiseScale
from guozhuang.lab import measure
from guozhuang.lab.planner.fake.traces import record_trace
from guozhuang.lab.results import Phases, RankRecord
from guozhuang.records import build, to_json, write_text
from guozhuang.sharding.whole import full, full_weights, is_divided
from guozhuang.timeline import Timeline
from guozhuang.workloads import Workload, load
from guozhuang.workloads.base import fuse, to_device

# The noise scale is measured after the run, from so many backwards at most; a mean over them that forgets none.
_NOISE_STEPS, _NOISE_SMOOTHING = 20, 0.99


@dataclass(frozen=True)
class RunSpec:
    """The settings of a run, the same for each of its ranks.

    Attributes:
        name: the name of the row, for names of files.
        strategy: a name from ``guozhuang.strategies``.
        purpose: ``first``: a run of the first round, which also saves the weights and evaluates the model; ``timing``: measure
            only; ``timeline``: write a timeline instead of measuring; ``trial``: as ``timing``, for an estimate; ``profile``:
            measure the step closely for ``seconds``; ``collectives``: measure collectives for as long, and train nothing;
            ``trace``: one process plays rank ``rank`` of a fake world, and writes ``trace.json``.
        folder: the folder to which the ranks write their results.
        workload: the workload's name, or ``module:function``.
        options: the options of the workload.
        data_folder: the folder for data that a workload prepares once for all runs.
        num_ranks: the ranks that share the global batch; a strategy of one process trains on all of it.
        num_threads: compute threads of this process.
        num_cores: compute threads while only rank 0 works (evaluation).
        num_steps: the measured steps, after ``num_warmup_steps``.
        seed: seed of the initial weights and of the order of the samples.
        timeout_s: the limit of every wait for other ranks.
        device: ``cpu`` or ``cuda``; None: ``init`` chooses.
        backend: the backend of collectives; None: ``init`` chooses.
        num_groups: the number of process groups that exchange the buckets in turn.
        layout: the sizes of axes, as ``--layout`` takes them; None: the strategy's own.
        schedule: that of a pipeline, as ``--schedule`` takes it; None: the order of the script's own loop.
        seconds: how long a run for a profile measures; its steps are not counted beforehand.
        batch_sizes: other batch sizes that a profile measures.
        rank: the rank that a process plays in a fake world.
        num_nodes: the nodes of a fake world.
        batch_size: samples per rank and step in place of the workload's; None: the workload's.
        is_fused: whether the workload's optimizer is made to update all parameters in one kernel.
        bucket_cap_mb: the cap of a bucket, as ``--bucket-cap-mb`` takes it; None: the default.
    """

    name: str
    strategy: str
    purpose: str
    folder: str
    workload: str
    options: dict[str, Any]
    data_folder: str
    num_ranks: int
    num_threads: int
    num_cores: int
    num_steps: int
    num_warmup_steps: int
    seed: int
    timeout_s: float
    device: str | None = None
    backend: str | None = None
    num_groups: int = 1
    layout: str | None = None
    schedule: str | None = None
    seconds: float = 0.0
    batch_sizes: tuple[int, ...] = ()
    rank: int = 0
    num_nodes: int = 1
    batch_size: int | None = None
    is_fused: bool = False
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class RankFailure:
    """The exception that ended one process of a run, in ``error-PID.json`` of the run's folder.

    Attributes:
        time: of ``time.monotonic``, which all processes of a machine share: the earliest failure is the cause.
        who: the rank, "rank 3", or the process if it had not joined the others.
        text: the exception.
    """

    time: float
    who: str
    text: str


class _Trainer:
    """Holds the model, optimizer, data and clocks of one run, and trains one step at a time."""

    def __init__(self, spec: RunSpec, here: world.World) -> None:
        self.spec = spec
        self.on_part: Callable[[str], object] = lambda part: None  # called when a part of a step has ended
        self.workload = load(spec.workload, spec.options, Path(spec.data_folder))
        if spec.batch_size is not None:
            self.workload = dataclasses.replace(self.workload, batch_size=spec.batch_size)
        self.strategy = strategies.get(spec.strategy)
        self.clock = measure.Clock(here.device)
        self.timeline = Timeline(here.rank) if spec.purpose == "timeline" else None
        torch.manual_seed(spec.seed)
        self.bare = self.workload.model().to(here.device)
        optimizer = self.workload.optimizer(self.bare)
        if spec.is_fused:
            fuse(optimizer)
        self.last_gradient = measure.LastGradient(self.bare, self.clock)
        num_replicas = spec.num_ranks if spec.strategy == "dp" else None
        # Without a name of a schedule the model is trained as by a script that computes the loss itself.
        loss = None if spec.schedule is None else self.workload.loss
        prepared = strategies.prepare(
            self.bare,
            optimizer,
            spec.strategy,
            num_replicas=num_replicas,
            layout=spec.layout,
            loss=loss,
            schedule=spec.schedule,
        )
        (self.model, _), self.train = prepared, prepared.step
        self.here = here = world.current() or here  # a strategy that divides the model has laid out the ranks
        self.noise = self._meter()
        self.divided = is_divided(self.bare) or here.layout.model_size > 1
        if self.timeline is not None and hasattr(self.model, "timeline"):
            cast(Any, self.model).timeline = self.timeline  # so that the trace also shows the model's buckets
        # Of each share of the data: all strategies train on the same global batch.
        self.batch_size = self.workload.batch_size * (
            spec.num_ranks if self.strategy.one_process else here.layout.model_size
        )
        self.use_batch_size(self.batch_size)
        # Six marks of the clock for each step, which are converted to seconds at the end of the run.
        self.marks: list[tuple[Any, ...]] = []
        self.losses: list[torch.Tensor] = []
        self._progress = _Progress(Path(spec.folder) / "progress") if here.rank == 0 else None

    def use_batch_size(self, batch_size: int) -> None:
        """Train on batches of so many samples from now on, from the beginning of the data."""
        self.batch_size, self.batches = batch_size, _batches(self.workload, batch_size, self.spec.seed, self.here)

    def _meter(self) -> NoiseMeter | None:
        """Return what measures the gradient noise scale, still off; None in runs that do not measure it."""
        model = self.model
        if self.spec.purpose != "first" or self.here.size == 1 or self.spec.strategy != "ddp":
            return None
        if not isinstance(model, DistributedDataParallel) or type(model.exchange) is not AllReduce:
            return None
        meter = NoiseMeter(smoothing=_NOISE_SMOOTHING)
        meter.is_on = False
        model.use_exchange(NoiseScale(model.exchange, meter))
        return meter

    def noise_scale(self) -> float | None:
        """Return the gradient noise scale at these weights, from some backwards without a step. Every rank must call it."""
        if self.noise is None:
            return None
        self.noise.is_on = True
        for _ in range(min(_NOISE_STEPS, max(4, self.spec.num_steps // 5))):
            self.workload.loss(self.model, to_device(next(self.batches), self.here.device)).backward()
            self.bare.zero_grad()
        return self.noise.noise_scale(self.batch_size)

    def step(self, number: int, before_optimizer: Any = None) -> None:
        """Train on one batch; ``before_optimizer`` is called after backward, where memory use is highest."""
        now, timeline, ended = self.clock.now, self.timeline, list[Any]()
        start, start_ns = now(), timeline.now() if timeline is not None else 0

        def passed(part: str) -> None:
            nonlocal start_ns
            ended.append(now())
            self.on_part(part)
            if timeline is not None:
                timeline.add(part, "step", start_ns, timeline.now())
            if part == "backward" and before_optimizer is not None:
                before_optimizer()
            start_ns = timeline.now() if timeline is not None else 0

        batch = to_device(next(self.batches), self.here.device)
        passed("data")
        loss = self.train(batch, self.workload.loss, passed=passed)
        fetched, computed, returned, stepped = ended
        # Divided parameters are not the objects that ``last_gradient`` watches. With these, and in a step without a mark, the
        # phase "backward" lasts until the call returns.
        last_gradient = None if self.divided else self.last_gradient.take()
        last_gradient = returned if last_gradient is None else last_gradient
        self.marks.append((start, fetched, computed, last_gradient, returned, stepped))
        self.losses.append(loss)
        if self._progress is not None:
            self._progress.show(number)


def main(arguments: list[str]) -> None:
    """Execute the run that the file ``arguments[0]`` describes."""
    spec = build(RunSpec, json.loads(Path(arguments[0]).read_text()))
    faulthandler.enable()
    # By SIGUSR1 the parent process asks for the stacks of all threads, before it ends a run that hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(spec.folder)
    write_text(folder / f"pid-{os.getpid()}", str(os.getpid()))
    try:
        if spec.purpose == "trace":
            record_trace(spec, _Trainer)
            return
        here = world.init(device=spec.device, timeout_s=spec.timeout_s)
        record = _run(spec, here)
        if record is not None:
            write_text(folder / f"rank-{here.rank}.json", json.dumps(asdict(record)))
    except Exception as error:
        _write_error(folder, error)
        raise  # after an uncaught exception the process exits without waiting for other ranks
    gc.collect()  # free the wrapped model: it holds the group, whose threads must end before the interpreter exits
    world.shutdown()


def _run(spec: RunSpec, here: world.World) -> RankRecord | None:
    torch.set_num_threads(spec.num_threads)
    if spec.purpose in ("profile", "collectives"):
        _observe(spec, here)
        return None
    trainer = _Trainer(spec, here)
    pss = _warm_up(trainer)
    if isinstance(trainer.model, DataParallel):
        trainer.model.imbalance(reset=True)
    whole_life = not measure.reset_peak_memory(here.device)
    _wait_for_all(here)
    sent_before = measure.tcp_sent_bytes() if here.device.type == "cpu" else None
    stages_before = _stages(trainer)
    trainer.clock.wait()
    start = time.perf_counter()
    for number in range(spec.num_steps):
        trainer.step(spec.num_warmup_steps + number + 1)
    trainer.clock.wait()
    elapsed_s = time.perf_counter() - start
    sent_after = measure.tcp_sent_bytes() if sent_before is not None else None
    peak = measure.peak_memory_bytes()
    if trainer.timeline is not None:
        trainer.timeline.write(Path(spec.folder) / f"timeline-{here.rank}.json")
        return None
    if isinstance(trainer.model, DistributedDataParallel):
        trainer.model.agree()  # make weights equal: between two exchanges of weights each rank has different ones
    metrics = _keep_first(trainer) if spec.purpose == "first" else {}
    digest = measure.digest(full_weights(trainer.bare).values())
    trainable = [p for p in trainer.bare.parameters() if p.requires_grad]
    return RankRecord(
        rank=here.rank,
        num_steps=spec.num_steps,
        elapsed_s=elapsed_s,
        phases=_mean_phases(trainer),
        losses=tuple(float(loss) for loss in trainer.losses),
        sent_bytes=None if sent_before is None or sent_after is None else sent_after - sent_before,
        peak_bytes=peak,
        peak_whole_life=whole_life,
        pss_bytes=pss,
        peak_device_bytes=torch.cuda.max_memory_allocated(here.device) if here.device.type == "cuda" else None,
        main_share=trainer.model.imbalance().main_share if isinstance(trainer.model, DataParallel) else None,
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        weights_digest=digest,
        metrics=metrics,
        num_threads=spec.num_threads,
        device=str(here.device),
        dataset_size=len(trainer.workload.train),  # type: ignore[arg-type]
        batch_size=trainer.batch_size // trainer.here.layout.model_size,
        backend=str(torch.distributed.get_backend()) if here.size > 1 else "",
        noise_scale=trainer.noise_scale(),
        own_steps_s=measure.own_steps_s(trainer),
        stages=tuple(
            dataclasses.replace(now, busy_s=(now.busy_s - was.busy_s) / spec.num_steps)
            for now, was in zip(_stages(trainer), stages_before, strict=True)
        ),
        median_step_s=statistics.median(
            trainer.clock.seconds(step[0], step[-1]) for step in trainer.marks[spec.num_warmup_steps :]
        ),
        num_batch_norms=sum(_is_own_batch_norm(module) for module in trainer.bare.modules()),
    )


def _observe(spec: RunSpec, here: world.World) -> None:
    """Measure for a profile, and write what was found to ``observed-R.json`` of the run's folder."""
    from guozhuang.lab.predict import observe

    if spec.purpose == "collectives":
        found = observe.time_collectives(here, spec.seconds)
    else:
        found = observe.observe(_Trainer(spec, here), spec.seconds, spec.batch_sizes)
        _wait_for_all(here)
    write_text(Path(spec.folder) / f"observed-{here.rank}.json", to_json(asdict(found)))


def _stages(trainer: _Trainer) -> list[Any]:
    """Return the stages of a pipeline on this rank; none under other strategies."""
    found = getattr(type(trainer.model), "stage_times", None)
    return found(trainer.model) if found is not None else []


def _is_own_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether a module normalizes, in training, over the samples of this rank alone."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)


def _warm_up(trainer: _Trainer) -> int | None:
    """Train the warm-up steps, before the measured ones; return this rank's PSS (memory, in bytes) in the last of them."""
    num_steps = trainer.spec.num_warmup_steps
    found: list[int | None] = []

    def weigh() -> None:
        # All ranks must measure at the same moment, when each holds its gradients and optimizer state.
        _wait_for_all(trainer.here)
        found.append(measure.pss_bytes())
        _wait_for_all(trainer.here)

    for number in range(1, num_steps + 1):
        trainer.step(number, weigh if number == num_steps else None)
    if not trainer.divided:
        trainer.last_gradient.keep_last()
    return found[0]


def _keep_first(trainer: _Trainer) -> dict[str, float]:
    """Save an exact strategy's weights in the run's folder, and evaluate rank 0's bare model; every rank must call this."""
    metrics: dict[str, float] = {}
    # Every rank must call these, because divided weights are gathered.
    whole, buffers = full_weights(trainer.bare), {name: full(b) for name, b in trainer.bare.named_buffers()}
    if trainer.here.rank == 0:
        if trainer.strategy.exact:
            weights = {name: weight.cpu() for name, weight in whole.items()}
            torch.save(weights, Path(trainer.spec.folder) / "weights.pt")
        if trainer.workload.evaluate is not None:
            torch.set_num_threads(trainer.spec.num_cores)
            model = trainer.bare
            if trainer.divided:  # the forward of a divided model would need all ranks: evaluate a whole copy
                model = _load_whole(trainer.workload.model().to(trainer.here.device), whole, buffers, model.training)
            metrics = {name: float(value) for name, value in trainer.workload.evaluate(model).items()}
    _wait_for_all(trainer.here)
    return metrics


def _load_whole(
    into: torch.nn.Module, weights: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], is_training: bool
) -> torch.nn.Module:
    """Copy whole weights and buffers into ``into``, a model of the same class. Not collective."""
    with torch.no_grad():
        for name, p in into.named_parameters():
            p.copy_(weights[name])
        for name, buffer in into.named_buffers():
            buffer.copy_(buffers[name])
    return into.train(is_training)


def _mean_phases(trainer: _Trainer) -> Phases:
    marks = trainer.marks[trainer.spec.num_warmup_steps :]
    seconds = trainer.clock.seconds
    sums = [0.0] * 5
    for step in marks:
        for i, (start, end) in enumerate(pairwise(step)):
            sums[i] += seconds(start, end)
    data_s, forward_s, backward_s, exchange_s, optimizer_s = (total / len(marks) for total in sums)
    # In one process, or with divided weights, the time after the last gradient belongs to backward and is no exposed exchange.
    if trainer.strategy.one_process or trainer.divided:
        return Phases(data_s, forward_s, backward_s + exchange_s, None, optimizer_s)
    return Phases(data_s, forward_s, backward_s, exchange_s, optimizer_s)


def _batches(workload: Workload, batch_size: int, seed: int, here: world.World) -> Iterator[Any]:
    """Yield full batches of this rank's share of the training data for ever, in a new order each epoch."""
    loader = data.loader(
        workload.train, batch_size, seed=seed, ends="drop", drop_last=True, collate_fn=workload.collate, world=here
    )
    while True:
        yield from loader


def _wait_for_all(here: world.World) -> None:
    if here.size > 1:
        torch.distributed.barrier()


class _Progress:
    """Reports rank 0's number of steps to the parent process through a mapped file: one store into memory per step."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def show(self, step: int) -> None:
        struct.pack_into("=q", self._map, 0, step)


def _write_error(folder: Path, error: Exception) -> None:
    here = world.current()
    who = f"rank {here.rank}" if here is not None else f"process {os.getpid()}, before it joined the others"
    kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
    failure = RankFailure(time.monotonic(), who, f"{kind}{error}")
    write_text(folder / f"error-{os.getpid()}.json", json.dumps(asdict(failure)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""``predict``: how long a training step will take on a cluster, from the profile of one process, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from guozhuang.cost.cluster import GLOO, LOOPBACK, SHARED_MEMORY, SHARED_MEMORY_LINK, Cluster, LinkSpeed, Transport
from guozhuang.cost.collectives import collective_cost, gloo_segments, placed_cost
from guozhuang.cost.describe import TCP_LATENCY_S
from guozhuang.cost.fit import relative_least_squares
from guozhuang.cost.prediction.interval import Doubt, checked, doubts, half_width
from guozhuang.cost.prediction.profile import Profile, scaled, trace_name
from guozhuang.cost.simulate import WAITING as WAITING
from guozhuang.cost.simulate import StepTime, simulate
from guozhuang.cost.spread import Spread, simulate_spread
from guozhuang.cost.trace import HAND_OVER, RECV, SEND, Compute, Event, Start, Trace, Wait
from guozhuang.errors import UsageError, explain

#: Strategies whose step is known without a recording: the buckets follow from the gradients.
BUCKETED = ("ddp", "torch-ddp")
_FIRST_CAP, _CAP = 1 << 20, 25 << 20
#: Strategies whose ranks exchange activations: their messages, but for headers of so many bytes, and their blocking calls grow
#: with the batch.
_ACTIVATIONS, _HEADER_BYTES = ("pipeline", "tensor", "sequence", "space"), 384
#: Strategies that need no trace: ranks that do not communicate, and one process with all cores.
NO_EXCHANGE, ONE_PROCESS = "none", "single"
#: The part of a step that waits for the slowest rank, whose steps differ by chance.
SLOWEST = "slowest rank"
_MOST_CROWDED = 64


@dataclass(frozen=True)
class Prediction:
    """What is expected of a strategy on a number of ranks; times in seconds.

    Attributes:
        strategy: its name.
        num_ranks: ranks that train.
        batch_size: samples of a rank's step.
        step_s: a step of all ranks together, which lasts as long as that of the slowest.
        parts: what of it is spent on what; they add up to ``step_s``.
        bounds: the step if everything overlapped, and if nothing did.
        interval_s: in nine of ten cases the step is expected to last from the first to the second.
        perfect_s: the null model: the step of one rank alone on the machine, as if the others cost nothing.
        largest_term: the name of the largest of ``parts``.
        doubts: what makes the prediction uncertain, and by how much.
        memory_bytes: peak memory of a rank; None if it was not measured.
        interval_source: which measured errors the interval begins with.
    """

    strategy: str
    num_ranks: int
    batch_size: int
    step_s: float
    parts: dict[str, float]
    bounds: tuple[float, float]
    interval_s: tuple[float, float]
    perfect_s: float
    largest_term: str
    doubts: tuple[Doubt, ...]
    memory_bytes: float | None
    interval_source: str

    @property
    def widened(self) -> tuple[str, ...]:
        """Why the interval is wider than that of configurations that were measured: what this one has that those had not."""
        return tuple(each.why for each in self.doubts if each.why)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks in a second."""
        return self.num_ranks * self.batch_size / self.step_s

    @property
    def efficiency(self) -> float:
        """Weak efficiency: the step of one rank alone over that of these ranks, each with the same batch."""
        return self.perfect_s / self.step_s


def predict(
    profile: Profile,
    cluster: Cluster,
    strategy: str,
    num_ranks: int,
    batch_size: int | None = None,
    *,
    num_threads: int | None = None,
    cap_bytes: int | None = None,
) -> Prediction:
    """Predict a training step.

    Args:
        profile: what was measured of one process.
        cluster: where it will train; its part for so many ranks is taken.
        strategy: a name from ``guozhuang.strategies``.
        num_ranks: how many ranks.
        batch_size: samples of a rank's step; None: those of the profile.
        num_threads: compute threads of a rank; None: those of the profile.
        cap_bytes: the largest bucket, for strategies whose step follows from the gradients; None: their own.

    Raises:
        UsageError: fewer than one rank or sample, more ranks than the cluster has, a profile of another kind of machine, or a
            strategy of which the profile has no trace.
    """
    batch = profile.batch_size if batch_size is None else batch_size
    threads = profile.num_threads if num_threads is None else num_threads
    _check(profile, cluster, num_ranks, batch)
    part = cluster.with_ranks(num_ranks)
    on_one_machine = 1 if strategy == ONE_PROCESS else num_ranks if part.shares_host else part.ranks_per_node
    if strategy == ONE_PROCESS:
        return _of_one_process(profile, part, num_ranks, batch)
    traces = _traces(profile, part, strategy, batch, cap_bytes)
    alone = profile.crowd(1, threads)
    prepared = [replace(scaled(trace, alone), num_threads=threads) for trace in traces]
    crowding = _crowding(profile, part, on_one_machine, threads)
    if len(prepared) == 1 and any(isinstance(event, Start) for event in prepared[0].events):
        times = simulate(prepared[0], part, crowding=crowding, costs=collective_cost)
        spread = Spread(profile.lone_steps, profile.correlation)
        step_s = simulate_spread(prepared[0], part, spread, costs=collective_cost, crowding=crowding, alone=times)
        slowest = max(0.0, step_s - times.step_s)
    else:
        given = prepared[0] if len(prepared) == 1 else prepared
        times, slowest = simulate(given, part, crowding=crowding, costs=collective_cost), 0.0
    times = replace(times, bounds=_bounds(prepared, part, times.step_s + slowest, crowding[-1]))
    perfect_s = sum(seconds * alone[name] for name, seconds in profile.parts(batch).items())
    exposed = times.parts[WAITING] / times.step_s
    why = doubts(profile, part, strategy, batch, on_one_machine, threads, prepared, exposed)
    found = _prediction(strategy, part, num_ranks, batch, times, slowest, perfect_s, why)
    if len(prepared) > 1:  # the stages of a pipeline were recorded in one process
        return replace(found, memory_bytes=None)
    return replace(found, memory_bytes=profile.rank_memory_bytes(prepared[0], batch))


def _bounds(traces: Sequence[Trace], cluster: Cluster, step_s: float, crowded: float) -> tuple[float, float]:
    """Return the step if all communication overlapped with work, and if nothing of both did.

    Ranks that all do the same take turns on the cores of their machine. Stages of a pipeline, each of which has a trace, work
    one after the other if nothing overlaps.
    """
    works, calls = list[float](), list[float]()
    for trace in traces:
        works.append(sum(event.seconds for event in trace.events if isinstance(event, Compute)) / trace.num_steps)
        costs = [
            collective_cost(event.operation, event.num_bytes, event.ranks, cluster).seconds
            for event in trace.events
            if isinstance(event, Start) and event.operation not in (HAND_OVER, RECV)
            and (len(traces) == 1 or event.ranks[0] == trace.rank)
        ]  # fmt: skip
        calls.append(sum(costs) / trace.num_steps)
    turns = crowded if len(traces) == 1 else 1.0
    low, high = max(max(works) * turns, max(calls)), (sum(works) + sum(calls)) * turns
    return min(step_s, low), max(step_s, high)


def _crowding(profile: Profile, cluster: Cluster, most: int, threads: int) -> list[float]:
    """Return by what factor a rank slows down while 1, 2, ... ranks of its machine compute, on the cluster's cores."""
    own = profile.parts()

    def whole(num_ranks: int) -> float:
        factors = profile.crowd(num_ranks, threads)
        return sum(seconds * factors[part] for part, seconds in own.items())

    cores = cluster.cores_per_node or profile.num_cores
    found = []
    for num_ranks in range(1, min(most, _MOST_CROWDED) + 1):
        turns = max(1.0, num_ranks * threads / cores) / max(1.0, num_ranks * threads / profile.num_cores)
        found.append(max(1.0, whole(num_ranks) / whole(1) * turns))
    return found


def _check(profile: Profile, cluster: Cluster, num_ranks: int, batch_size: int) -> None:
    if num_ranks < 1:
        raise UsageError(explain("a training has at least one rank", value=num_ranks))
    if batch_size < 1:
        raise UsageError(explain("a rank's step has at least one sample", value=batch_size))
    if num_ranks > cluster.num_ranks and not (cluster.num_nodes == 1 and cluster.device is None):
        what = f"{num_ranks} ranks are more than {cluster.name or 'the cluster'} has"
        raise UsageError(explain(what, value=cluster.num_ranks, fix="ask for fewer, or describe a larger cluster"))
    computes_on = cluster.device.name if cluster.device is not None else "cpu"
    if (profile.device == "cpu") != (cluster.device is None):
        what = f"the profile was measured on {profile.device}, and the cluster computes on {computes_on}"
        fix = "profile on one device of that kind; guozhuang plan --model predicts devices from their data sheets"
        raise UsageError(explain(what, fix=fix))


def _traces(profile: Profile, cluster: Cluster, strategy: str, batch: int, cap_bytes: int | None) -> list[Trace]:
    """Return what one rank does that stands for all, or what each does: recorded, or from the times of the gradients."""
    num_ranks, own, parts = cluster.num_ranks, profile.parts(), profile.parts(batch)
    name = trace_name(strategy, num_ranks, cluster.num_nodes, cluster.transport.name)
    if name in profile.refused:  # the strategy itself has refused this model, or cannot be recorded
        raise UsageError(profile.refused[name])
    recorded = profile.traces.get(name)
    if recorded is not None and cap_bytes is None:
        factors = {part: parts[part] / seconds if seconds > 0 else 1.0 for part, seconds in own.items()}
        samples = batch / profile.batch_size if strategy in _ACTIVATIONS else 1.0
        return [_with_activations(scaled(trace, factors), samples) for trace in recorded]
    if strategy == NO_EXCHANGE or (num_ranks == 1 and strategy in BUCKETED):
        return [Trace(0, num_ranks, tuple(Compute(part, seconds) for part, seconds in parts.items()))]
    if strategy not in BUCKETED:
        nodes = f" of {cluster.num_nodes} nodes" * (cluster.num_nodes > 1)
        what = f"the profile has no trace of {strategy} on {num_ranks} ranks{nodes} over {cluster.transport.name}"
        raise UsageError(explain(what, fix=f"measure a profile with --strategies {strategy} --ranks {num_ranks}"))
    caps = (_FIRST_CAP, _CAP) if cap_bytes is None else (min(_FIRST_CAP, cap_bytes), cap_bytes)
    return [bucketed(profile, num_ranks, batch, caps)]


def _with_activations(trace: Trace, samples: float) -> Trace:
    """Return a trace whose activations have so many times the bytes."""
    events = tuple(
        replace(each, num_bytes=round(each.num_bytes * samples))
        if isinstance(each, Start)
        and (each.blocking or each.operation in (SEND, RECV))
        and each.num_bytes > _HEADER_BYTES
        else each
        for each in trace.events
    )
    return replace(trace, events=events)


def bucketed(profile: Profile, num_ranks: int, batch: int, caps: Sequence[int]) -> Trace:
    """Return what a rank does that averages its gradients in buckets while backward runs.

    Args:
        profile: has the times at which gradients are ready, in whose order buckets are filled.
        num_ranks: all ranks.
        batch: samples of its step.
        caps: the largest sizes of the first, the second ... bucket in bytes; the last one is that of all further ones.
    """
    parts = profile.parts(batch)
    stretch = parts["backward"] / profile.parts()["backward"]
    ready = [(each.ready_s * stretch, each.num_bytes) for each in profile.gradients if each.ready_s < math.inf]
    buckets: list[tuple[float, int]] = []
    size, last = 0, 0.0
    for ready_s, num_bytes in ready:
        if size and size + num_bytes > caps[min(len(buckets), len(caps) - 1)]:
            buckets.append((last, size))
            size = 0
        size, last = size + num_bytes, ready_s
    buckets.append((last, size))
    events: list[Event] = [Compute("data", parts["data"]), Compute("forward", parts["forward"])]
    now = 0.0
    for call, (ready_s, num_bytes) in enumerate(buckets):
        until = min(max(now, ready_s), parts["backward"])
        events += [Compute("backward", until - now), Start(call, "all_reduce", num_bytes, tuple(range(num_ranks)))]
        now = until
    events.append(Compute("backward", parts["backward"] - now))
    events += [Wait(call) for call in range(len(buckets))]
    events.append(Compute("optimizer", parts["optimizer"]))
    return Trace(0, num_ranks, tuple(events))


def _of_one_process(profile: Profile, cluster: Cluster, num_ranks: int, batch: int) -> Prediction:
    """Predict one process with all cores, which trains on the samples of all ranks."""
    threads = max(each.num_threads for each in profile.crowding if each.num_ranks == 1)
    crowd = profile.crowd(1, threads)
    parts = {name: seconds * crowd[name] for name, seconds in profile.parts(num_ranks * batch).items()}
    step_s = sum(parts.values())
    times = StepTime(step_s, parts, (step_s, step_s), step_s * threads, 0.0)
    why = doubts(profile, cluster, ONE_PROCESS, num_ranks * batch, 1, threads, (), 0.0)
    found = _prediction(ONE_PROCESS, cluster, num_ranks, batch, times, 0.0, step_s, why)
    return replace(found, memory_bytes=profile.memory_bytes(num_ranks * batch))


def _prediction(
    strategy: str,
    cluster: Cluster,
    num_ranks: int,
    batch: int,
    times: StepTime,
    slowest_s: float,
    perfect_s: float,
    why: Sequence[Doubt],
) -> Prediction:
    source, known = checked(strategy, cluster)
    found = (known, *why)
    spread = half_width(found)
    parts = {name: seconds for name, seconds in {**times.parts, SLOWEST: slowest_s}.items() if seconds > 0}
    step_s = times.step_s + slowest_s
    return Prediction(
        strategy=strategy,
        num_ranks=num_ranks,
        batch_size=batch,
        step_s=step_s,
        parts=parts,
        bounds=times.bounds,
        interval_s=(step_s * math.exp(-spread), step_s * math.exp(spread)),
        perfect_s=perfect_s,
        largest_term=max(parts, key=lambda part: parts[part]),
        doubts=found,
        memory_bytes=None,
        interval_source=source,
    )


def machine_of(profile: Profile, transport: str, memory_bytes: float | None = None) -> Cluster:
    """Return the machine that a profile was measured on as a cluster of one node, with its measured collectives.

    Args:
        profile: the profile.
        transport: the backend that carries collectives: ``"shm"``, ``"gloo"`` or ``"nccl"``.
        memory_bytes: memory of the machine; None if unknown.
    """
    link = {"shm": SHARED_MEMORY_LINK, "gloo": LOOPBACK}.get(transport, LOOPBACK)
    carried = {"shm": SHARED_MEMORY, "gloo": GLOO}.get(transport, Transport(transport))
    found = [each for each in profile.collectives if each.transport == transport and each.operation == "all_reduce"]
    if found:
        table = tuple((float(each.num_ranks), float(each.num_bytes), each.seconds) for each in found)
        link = replace(link, table=table, name=f"measured {link.name}")
    if found and transport == "gloo":
        rows = [
            (2 * (each.num_ranks - 1) / each.num_ranks * each.num_bytes, _messages(each.num_bytes, each.num_ranks))
            for each in found
        ]
        per_byte, per_message = relative_least_squares(rows, [max(each.processor_s, 1e-9) for each in found])
        carried = replace(carried, processor_s_per_byte=per_byte, processor_s_per_message=per_message)
    machine = Cluster(
        num_nodes=1,
        ranks_per_node=profile.num_cores,
        cores_per_node=profile.num_cores,
        inside=link,
        between=LinkSpeed(TCP_LATENCY_S, 0.0),
        transport=carried,
        node_memory_bytes=memory_bytes,
        name="here",
    )
    if transport != "gloo":
        return machine
    beside = [
        (
            float(each.num_bytes),
            max(
                0.0,
                each.seconds
                - placed_cost("all_gather", each.num_bytes, each.num_ranks, 1, each.num_ranks, machine).seconds,
            ),
        )
        for each in profile.collectives
        if each.transport == transport and each.operation == "all_gather"
    ]
    return replace(machine, transport=replace(carried, gather_s=tuple(sorted(beside))))


def _messages(num_bytes: int, num_ranks: int) -> float:
    segments = gloo_segments(num_bytes, num_ranks)
    return 2 * (segments - segments / num_ranks)

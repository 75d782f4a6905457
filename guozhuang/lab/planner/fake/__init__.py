"""``guozhuang plan --ranks N train.py``: one rank of a fake world runs for real, and the others by the cost model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from guozhuang.cost import laws
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.collectives import collective_cost
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.simulate import StepTime, simulate
from guozhuang.cost.trace import HAND_OVER, RECV, SEND, Start, Trace
from guozhuang.errors import UsageError, explain
from guozhuang.records import build, to_json, write_text
from guozhuang.units import size

if TYPE_CHECKING:
    from .rank import RankFound

_NUM_WARMUP_STEPS, _NUM_STEPS = 3, 8
_LIMIT_S: Final = 600.0
_USUAL: Final = "1cores,10gbit/0.1ms"  # a node and its network, where --on is not given


@dataclass(frozen=True)
class Sent:
    """What a rank begins in a step, by kind.

    Attributes:
        operation: of the calls.
        num_ranks: how many ranks take part.
        calls: how many there are in a step.
        tensor_bytes: of the tensors of all of them.
        wire_bytes: that this rank sends for them.
    """

    operation: str
    num_ranks: int
    calls: float
    tensor_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class Scaled:
    """The step of a world of some size, with the same batch on each rank.

    Attributes:
        num_ranks: its ranks.
        step_s: the predicted time of a step.
        efficiency: the time of one rank alone divided by that.
        speed_up: samples per second divided by those of one rank.
        karp_flatt: the serial share that explains the speed-up; None for one rank.
        amdahl: the speed-up by Amdahl's law with the serial share of the whole world.
        gustafson: the speed-up by Gustafson's law, with that share measured on the ranks.
    """

    num_ranks: int
    step_s: float
    efficiency: float
    speed_up: float
    karp_flatt: float | None
    amdahl: float
    gustafson: float


def run(found: argparse.Namespace) -> int:
    """Carry out ``guozhuang plan --ranks N [--on CLUSTER] [--strategy NAME] [--layout AXES] train.py ...``.

    Returns:
        The exit code: 0, or 2 if the rank failed, which has said why.
    """
    from guozhuang.launch.options import script

    num_ranks = _count(found.ranks, 1, "with a script --ranks is the number of ranks of the world", "--ranks 1024")
    rank = _count(found.rank, 0, "--rank is the rank that runs the script", "--rank 0")
    if rank >= num_ranks:
        what = f"a world of {num_ranks} ranks has the ranks 0 to {num_ranks - 1}"
        raise UsageError(explain(what, value=f"--rank {rank}", fix="name one of them"))
    script.check(argparse.Namespace(**vars(found) | {"module": False, "no_python": False, "run_path": False}), {})
    on = (found.on or [None])[0] if isinstance(found.on, list) else found.on
    cluster = parse_cluster(on or f"{num_ranks}x{_USUAL}", read=lambda name: Path(name).read_text())
    cluster = cluster.with_ranks(num_ranks)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="guozhuang-plan-") as folder:
        ran = _run_rank(found, rank, cluster, Path(folder))
    if ran is None:
        return 2
    rank_s = time.monotonic() - began
    sent = sent_by(ran.trace, cluster)
    step = simulate(ran.trace, cluster, costs=collective_cost)
    curve = scaling(ran.trace, cluster)
    document = {
        "ranks": num_ranks, "rank": rank, "cluster": cluster.name, "strategy": ran.strategy,
        "peak_bytes": ran.peak_bytes, "device_bytes": ran.device_bytes, "sent": [dataclasses.asdict(each) for each in sent],
        "step": dataclasses.asdict(dataclasses.replace(step, stretched=())),
        "scaling": [dataclasses.asdict(each) for each in curve],
    }  # fmt: skip
    if found.json:
        print(to_json(document))
    else:
        print(_report(found, ran, cluster, on is None, sent, step, curve, rank_s))
    return 0


def sent_by(trace: Trace, cluster: Cluster) -> list[Sent]:
    """Return what a rank begins in a step of its trace, the largest first; receives and threads of its own are left out."""
    calls: Counter[tuple[str, int]] = Counter()
    tensors: Counter[tuple[str, int]] = Counter()
    wire: Counter[tuple[str, int]] = Counter()
    for event in trace.events:
        if isinstance(event, Start) and event.operation not in (HAND_OVER, RECV):
            key = event.operation, len(event.ranks)
            calls[key] += 1
            tensors[key] += event.num_bytes
            cost = collective_cost(event.operation, event.num_bytes, event.ranks, cluster)
            wire[key] += cost.wire_bytes  # type: ignore[assignment]
    n = trace.num_steps
    found = [Sent(*key, calls[key] / n, tensors[key] / n, wire[key] / n) for key in calls]
    return sorted(found, key=lambda each: -each.wire_bytes)


def scaling(trace: Trace, cluster: Cluster) -> list[Scaled]:
    """Return the steps of worlds of 1, 2, 4, ... ranks up to that of a trace: its collectives among fewer ranks.

    What this rank does itself stays as it was recorded.
    """
    whole = trace.num_ranks
    sizes = [2**i for i in range(whole.bit_length()) if 2**i < whole] + [whole]
    times = {n: simulate(_among(trace, n), cluster.with_ranks(n), costs=collective_cost).step_s for n in sizes}
    alone_s = times[1]
    efficiency = {n: laws.weak_efficiency(alone_s, times[n]) for n in sizes}
    share = 1.0
    if whole > 1 and efficiency[whole] < 1:
        serial = min(1.0, max(0.0, laws.karp_flatt(whole * efficiency[whole], whole)))
        share = 1 - serial
    on_n = laws.share_on_n(share, whole) if whole > 1 else 1.0
    return [
        Scaled(
            n, times[n], efficiency[n], n * efficiency[n],
            laws.karp_flatt(n * efficiency[n], n) if n > 1 else None,
            laws.amdahl(share, n), laws.gustafson(on_n, n),
        )
        for n in sizes
    ]  # fmt: skip


def _among(trace: Trace, num_ranks: int) -> Trace:
    """Return the trace in a world of the ranks ``first`` to ``first + num_ranks``, of which its own is one."""
    first = min(trace.rank // num_ranks * num_ranks, trace.num_ranks - num_ranks)
    events: list[Any] = []
    for event in trace.events:
        if isinstance(event, Start) and event.operation != HAND_OVER:
            inside = [each - first for each in event.ranks if first <= each < first + num_ranks]
            if event.operation in (SEND, RECV):  # the peer is one of the ranks in any case
                inside = list(dict.fromkeys((each - first) % num_ranks for each in event.ranks))
            if len(inside) > 1:
                event = dataclasses.replace(event, ranks=tuple(inside))
            else:
                event = dataclasses.replace(event, operation=HAND_OVER, num_bytes=0, ranks=(trace.rank - first,))
        events.append(event)
    return Trace(trace.rank - first, num_ranks, tuple(events), trace.num_steps, trace.num_threads)


def _count(text: str | None, least: int, what: str, example: str) -> int:
    if text is None or not text.isdecimal() or int(text) < least:
        raise UsageError(explain(what, value=text, fix=f"write for example {example}"))
    return int(text)


def _run_rank(found: argparse.Namespace, rank: int, cluster: Cluster, folder: Path) -> RankFound | None:
    """Run the script in a process of its own; return what was found, None if it failed and has said why."""
    from guozhuang.lab.runs import ended_by_signals
    from guozhuang.launch.request import environment_of_rank

    from .rank import RankFound, ScriptSpec

    threads = max(1, cluster.cores_per_node // cluster.ranks_per_node)
    out, spec_file = folder / "found.json", folder / "spec.json"
    one_node = cluster.num_nodes == 1 and cluster.device is None
    spec = ScriptSpec(
        cluster.num_ranks, cluster.num_nodes, rank, "shm" if one_node else "gloo", threads,
        _NUM_WARMUP_STEPS, _NUM_STEPS, str(out),
    )  # fmt: skip
    write_text(spec_file, json.dumps(dataclasses.asdict(spec)))
    environ = environment_of_rank(
        rank, cluster.num_ranks, cluster.ranks_per_node, threads, strategy=found.strategy, layout=found.layout
    )
    command = [sys.executable, "-u", "-m", "guozhuang.lab.planner.fake.rank", str(spec_file)]
    try:
        with ended_by_signals():
            code = subprocess.run(
                [*command, found.training_script, *found.training_script_args],
                env=environ, timeout=_LIMIT_S, check=False, stdout=2, stdin=subprocess.DEVNULL,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        what = f"the rank made no {_NUM_WARMUP_STEPS + _NUM_STEPS} steps in {_LIMIT_S:g} s"
        raise UsageError(explain(what, fix="give the script a smaller model or batch")) from None
    if not out.exists():
        if code not in (0, 2):
            print(f"guozhuang plan: the rank ended with code {code}; its error stands above", file=sys.stderr)
        return None
    return build(RankFound, json.loads(out.read_text()))


def _report(
    found: argparse.Namespace, rank: RankFound, cluster: Cluster, supposed: bool, sent: Sequence[Sent],
    step: StepTime, curve: Sequence[Scaled], rank_s: float,
) -> str:  # fmt: skip
    trace = rank.trace
    how = f"strategy {rank.strategy}" if rank.strategy else "as the script trains"
    lines = [
        f"rank {trace.rank} of {trace.num_ranks} ran {found.training_script} in a fake world ({how}) for {rank_s:.0f} s; "
        f"{trace.num_steps} step{'s' * (trace.num_steps > 1)} recorded",
        f"cluster {cluster.name}: {cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks"
        + ("; supposed, name yours with --on" if supposed else ""),
    ]
    if not rank.has_asked or not sent:
        lines.append(
            "the rank exchanged nothing: each rank trains a model of its own. Fix: call gz.init() and gz.prepare(), or "
            "init_process_group() and DistributedDataParallel"
        )
    lines += ["", "a step of one rank", f"  {'operation':<16}{'ranks':>7}{'calls':>8}{'tensors':>12}{'sends':>12}"]
    lines += [
        f"  {each.operation:<16}{each.num_ranks:>7}{each.calls:>8g}{size(each.tensor_bytes):>12}"
        f"{size(each.wire_bytes):>12}"
        for each in sent
    ]
    memory = f"peak memory of the rank: {size(rank.peak_bytes)}, of which {size(rank.before_bytes)} "
    memory += "were in use before the script began"
    if rank.device_bytes:
        memory += f"; on its device {size(rank.device_bytes)}"
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in step.parts.items() if seconds >= 5e-5)
    low, high = step.bounds
    lines += ["", memory, "", f"predicted step: {1e3 * step.step_s:.1f} ms ({parts}); between {1e3 * low:.1f} and "
              f"{1e3 * high:.1f} with any overlap; {1e3 * curve[0].step_s:.1f} alone"]  # fmt: skip
    lines += ["", "the same batch on each rank (weak scaling); the laws with the serial share of the last row",
              f"  {'ranks':>6}{'step ms':>10}{'efficiency':>12}{'speed-up':>10}{'Karp-Flatt':>12}"
              f"{'Amdahl':>10}{'Gustafson':>11}"]  # fmt: skip
    for each in curve:
        serial = "" if each.karp_flatt is None else f"{100 * each.karp_flatt:.3f} %"
        lines.append(
            f"  {each.num_ranks:>6}{1e3 * each.step_s:>10.1f}{100 * each.efficiency:>10.1f} %{each.speed_up:>10.1f}"
            f"{serial:>12}{each.amdahl:>10.1f}{each.gustafson:>11.1f}"
        )
    return "\n".join(lines)

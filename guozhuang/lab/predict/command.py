"""``guozhuang predict``: from the profile of one process and a cluster to the step of every strategy on any number of ranks."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from guozhuang import workloads
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.prediction.predict import NO_EXCHANGE, ONE_PROCESS, Prediction, machine_of, predict
from guozhuang.cost.prediction.profile import Profile
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender, contenders, short_set
from guozhuang.lab.plan import writable
from guozhuang.lab.predict import profile as profiles
from guozhuang.lab.predict import table
from guozhuang.lab.predict.arguments import numbers
from guozhuang.lab.predict.cases import Case, unmeasured_machine, wanted
from guozhuang.lab.predict.curves import Curve, curve
from guozhuang.lab.predict.narrowing import ComparedCase, advice, as_measured, commands, measured_steps
from guozhuang.lab.predict.table import Predictions, Row
from guozhuang.lab.runs import Runs, ended_by_signals
from guozhuang.records import to_json
from guozhuang.world.machine import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS = 6  # numbers of ranks that are predicted if none are asked for


def run(namespace: argparse.Namespace, python_path: Sequence[str] = ()) -> int:
    """Carry out the command line: measure or read the profile, predict, and show it.

    Args:
        namespace: the parsed options.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH, relative to this package.

    Returns:
        0; 1 if nothing could be predicted; 130 if interrupted. No process is left, and no file is half written.

    Raises:
        UsageError: an option cannot work, or a process that was to be measured failed.
    """
    from rich.console import Console

    from guozhuang.lab.predict import report

    console = Console(stderr=True)
    try:
        with ended_by_signals(), tempfile.TemporaryDirectory(prefix="guozhuang-") as scratch:
            found, _, _ = perform(namespace, Path(scratch), console, python_path)
    except KeyboardInterrupt:
        console.print("Interrupted: every process was ended, and nothing was written.", highlight=False)
        return 130
    if namespace.json:
        sys.stdout.write(to_json(asdict(found)) + "\n")
    else:
        table.show(Console(), found)
    if namespace.out is not None:
        console.print(f"Report: {report.write(found, namespace.out)}", highlight=False, soft_wrap=True)
    return 0 if any(row.prediction is not None for row in found.rows) else 1


def perform(
    namespace: argparse.Namespace, scratch: Path, console: Console, python_path: Sequence[str]
) -> tuple[Predictions, Profile, Cluster]:
    """Measure or read the profile, and predict every row."""
    imported = set(sys.modules)
    on_cpu = namespace.device == "cpu" or not torch.cuda.is_available()
    described = _describe(namespace, unmeasured_machine(on_cpu))
    ranks = _ranks(namespace, described)
    path = namespace.profile
    if namespace.out is not None:
        writable(namespace.out)
    if path is not None:
        writable(path.absolute().parent, "--profile")
        if path.is_dir():
            raise UsageError(explain("--profile is a folder", value=str(path), fix="name a file"))
    compared = _compared(namespace, described, on_cpu, ranks[-1])
    cases = [_case(namespace, described, one, num_ranks) for one in compared for num_ranks in ranks]
    what = profiles.subject(namespace, scratch, console)
    measured = measured_steps(namespace.measured or (), what)

    @contextmanager
    def opened(num_threads: int) -> Iterator[Runs]:
        what.workload.model()
        # Modules that loading the workload and making a model have imported; the warm parent imports them too.
        modules = [name for name in sys.modules if name not in imported and not name.startswith("torch.")]
        with Runs(scratch, num_threads, modules, python_path) as runs:
            yield runs

    profile = profiles.kept(path, what, wanted(cases), console, opened)
    found = Predictions(
        command=shlex.join(["guozhuang", *sys.argv[1:]]),
        workload=workloads.title(namespace.workload),
        cluster=described.name,
        batch_size=profile.batch_size,
        profile_created=profile.created,
        rows=tuple(_row(namespace, what, profile, each, measured) for each in cases),
        profile_file=str(path or ""),
        curves=_curves(namespace, profile, described, cases),
        samples=namespace.samples,
    )
    return found, profile, described


def _curves(
    namespace: argparse.Namespace, profile: Profile, described: Cluster, cases: Sequence[Case]
) -> tuple[Curve, ...]:
    """Return the scaling curves of the strategies that could be predicted on every number of ranks."""
    found, most = list[Curve](), max(case.num_ranks for case in cases)
    for name in dict.fromkeys(case.one.name for case in cases):
        of_it = {case.num_ranks: case for case in cases if case.one.name == name}
        one = next(iter(of_it.values())).one
        if one.strategy == ONE_PROCESS:
            continue
        of_it.setdefault(1, _case(namespace, described, one, 1))
        try:
            found.append(
                curve(
                    name,
                    tuple(sorted(case.num_ranks for case in cases if case.one.name == name)),
                    profile.batch_size,
                    namespace.global_batch or profile.batch_size * most,
                    _Steps(namespace, profile, of_it),
                    samples=namespace.samples,
                    price=namespace.price,
                    noise_scale=namespace.noise_scale,
                )
            )
        except UsageError:
            continue  # its row in the table says why it cannot be predicted
    return tuple(found)


class _Steps:
    """Predicts one strategy for any batch; what was predicted once is remembered."""

    def __init__(self, namespace: argparse.Namespace, profile: Profile, cases: dict[int, Case]) -> None:
        self._profile, self._cases = profile, cases
        self._clusters = {n: _cluster(namespace, profile, case) for n, case in cases.items()}
        self._known: dict[tuple[int, int], Prediction] = {}

    def __call__(self, num_ranks: int, batch_size: int) -> Prediction:
        if (num_ranks, batch_size) not in self._known:
            case = self._cases[num_ranks]
            # One rank has nobody to exchange anything with: all strategies are measured against the same step.
            name = NO_EXCHANGE if num_ranks == 1 else case.one.name.partition("@")[0]
            threads = min(each.num_threads for each in self._cases.values())
            self._known[num_ranks, batch_size] = predict(
                self._profile, self._clusters[num_ranks], name, num_ranks, batch_size,
                num_threads=threads if num_ranks == 1 else case.num_threads,
            )  # fmt: skip
        return self._known[num_ranks, batch_size]


def _describe(namespace: argparse.Namespace, here: Cluster) -> Cluster:
    return parse_cluster(namespace.on, here, lambda name: Path(name).read_text(encoding="utf-8"))


def _ranks(namespace: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    if namespace.ranks is not None:
        return numbers(namespace.ranks)
    found = [1 << power for power in range(21) if 1 << power < cluster.num_ranks] + [cluster.num_ranks]
    return tuple(found[-_MOST_ROWS:])


def _compared(namespace: argparse.Namespace, cluster: Cluster, on_cpu: bool, most: int) -> tuple[Contender, ...]:
    for option, value in (
        ("--threads-per-rank", namespace.threads_per_rank),
        ("--global-batch", namespace.global_batch),
    ):
        if value is not None and value < 1:
            raise UsageError(explain(f"{option} is a count of at least 1", value=value))
    for option, value in (
        ("--samples", namespace.samples),
        ("--price", namespace.price),
        ("--noise-scale", namespace.noise_scale),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(explain(f"{option} is a number above 0", value=value))
    names = namespace.strategies or ",".join(
        name for name in short_set(on_cpu, cluster.num_nodes == 1) if name not in ("dp", ONE_PROCESS)
    )
    return contenders(names, None, 1, on_cpu, most)


def _case(namespace: argparse.Namespace, cluster: Cluster, one: Contender, num_ranks: int) -> Case:
    part = cluster.with_ranks(num_ranks)
    on_one = num_ranks if part.shares_host else part.ranks_per_node
    cores = part.cores_per_node or usable_cores()
    threads = namespace.threads_per_rank or max(1, min(cores, usable_cores()) // on_one)
    if one.strategy == ONE_PROCESS:
        on_one, threads = 1, usable_cores()
    is_here = part.num_nodes == 1 and namespace.on.partition(",")[0] in ("here", "1xhere")
    # One rank on each of several nodes meets the others over gloo alone.
    backend = one.backend or ("gloo" if part.num_nodes > 1 and part.ranks_per_node == 1 else part.transport.name)
    return Case(one, part, num_ranks, on_one, threads, backend, is_here)


def _cluster(namespace: argparse.Namespace, profile: Profile, case: Case) -> Cluster:
    """Return the cluster with this machine as measured, and with the backend of a row."""
    here = machine_of(profile, case.backend, float(psutil.virtual_memory().total))
    cluster = _describe(namespace, here)
    return cluster if case.backend == cluster.transport.name else replace(cluster, transport=here.transport)


def _row(
    namespace: argparse.Namespace,
    what: profiles.Subject,
    profile: Profile,
    case: Case,
    measured: Mapping[ComparedCase, tuple[float, ...]],
) -> Row:
    try:
        found = predict(
            profile,
            _cluster(namespace, profile, case),
            case.one.name.partition("@")[0],
            case.num_ranks,
            num_threads=case.num_threads,
        )
    except UsageError as error:
        return Row(case.one.name, case.num_ranks, None, str(error))
    several = case.num_ranks > 1 and case.one.strategy != ONE_PROCESS
    step = ComparedCase(case.one.name.partition("@")[0], case.backend * several, case.num_ranks, case.num_threads)
    if case.is_here and step in measured:
        return Row(case.one.name, case.num_ranks, as_measured(found, measured[step]))
    known = commands(what, step, namespace.threads_per_rank, namespace.profile, case.is_here, case.cluster.num_nodes)
    return Row(case.one.name, case.num_ranks, found, advice=advice(found, known))

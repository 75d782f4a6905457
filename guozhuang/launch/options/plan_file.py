"""The plan file: how a training is to be started, as ``guozhuang plan`` writes it and ``guozhuang run --plan`` reads it."""

from __future__ import annotations

import argparse
import difflib
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.records import build, checked_json, differences, to_json, write_text

_VERSION = 1

# Which option of `guozhuang run` each field of a plan stands for, with the attribute of its parsed command line.
_OPTIONS = {
    "strategy": ("--strategy", "strategy"),
    "layout": ("--layout", "layout"),
    "microbatches": ("--microbatches", "microbatches"),
    "schedule": ("--schedule", "schedule"),
    "backend": ("--backend", "backend"),
    "groups": ("--groups", "groups"),
    "bucket_cap_mb": ("--bucket-cap-mb", "bucket_cap_mb"),
    "threads_per_rank": ("--threads-per-rank", "threads_per_rank"),
}

# What each field holds in the file, beside None, in words and as a test.
_COUNT = ("a whole number of at least 1", lambda value: type(value) is int and value >= 1)
_TEXT = ("a text", lambda value: isinstance(value, str))
_NAMED = ("names with their values", lambda value: isinstance(value, dict))
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("num_nodes", "ranks_per_node", "microbatches", "groups", "threads_per_rank"), _COUNT),
    **dict.fromkeys(("strategy", "layout", "schedule", "backend", "hosts", "why", "date"), _TEXT),
    **dict.fromkeys(("versions", "prediction", "tuned_on"), _NAMED),
    "device": ("cpu or cuda", lambda value: value in ("cpu", "cuda")),
    "bucket_cap_mb": ("a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf),
    "in_the_script": (
        "a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
}  # fmt: skip
_OPTIONAL = ("microbatches", "groups", "threads_per_rank", "strategy", "layout", "schedule", "backend", "hosts", "device",
             "bucket_cap_mb")  # fmt: skip
_NEEDED = ("num_nodes", "ranks_per_node")


@dataclass(frozen=True)
class TrainingPlan:
    """One way to start a training; a field that is None leaves the choice to ``guozhuang run``.

    Attributes:
        num_nodes: on how many nodes the ranks are.
        ranks_per_node: how many ranks each node has.
        strategy: as ``--strategy`` takes it, and so for the next fields.
        layout: the sizes of axes.
        microbatches: into how many parts a pipeline cuts a batch.
        schedule: the order of a pipeline.
        backend: what carries collectives.
        groups: how many process groups take buckets in turn.
        bucket_cap_mb: the cap of a bucket of gradients, in MiB.
        threads_per_rank: how many threads each rank computes with.
        hosts: the hosts and their ranks as ``-H`` takes them, such as ``a:2,b:2``; None: the command line names them.
        device: ``"cuda"`` if each rank needs a CUDA device; ``"cpu"`` or None: the ranks find out what there is.
        in_the_script: what the script has to do itself, in words: its batch size, recomputation.
        why: why this plan was chosen, in words.
        date: the day on which it was made, as YYYY-MM-DD.
        versions: the versions of the packages that made it.
        prediction: what was expected of it; times in seconds.
        tuned_on: the machine, the versions and the training for which it was found by measuring, by their names; empty for a
            plan that was computed.
        schema_version: the version of this format.
    """

    num_nodes: int
    ranks_per_node: int
    strategy: str | None = None
    layout: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    backend: str | None = None
    groups: int | None = None
    bucket_cap_mb: float | None = None
    threads_per_rank: int | None = None
    hosts: str | None = None
    device: str | None = None
    in_the_script: tuple[str, ...] = ()
    why: str = ""
    date: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    prediction: Mapping[str, Any] = field(default_factory=dict)
    tuned_on: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = _VERSION

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all nodes together."""
        return self.num_nodes * self.ranks_per_node

    def options(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (option of ``guozhuang run``, attribute of its parsed command line, value) of each field that is set."""
        for name, (option, attribute) in _OPTIONS.items():
            if getattr(self, name) is not None:
                yield option, attribute, getattr(self, name)

    def command(self, script: str = "train.py") -> str:
        """Return the command line that starts the training as planned; with several nodes, the one of each node."""
        words = ["guozhuang", "run"]
        if self.hosts is not None:
            words += ["-H", self.hosts]
        elif self.num_nodes > 1:
            words += ["--nnodes", str(self.num_nodes), "--node-rank", "NODE", "--master-addr", "FIRST"]
        words += [] if self.hosts is not None else ["-np", str(self.ranks_per_node)]
        for option, _, value in self.options():
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, script])


def write_plan(plan: TrainingPlan, path: Path) -> None:
    """Write a plan to a file, which appears complete or not at all.

    Raises:
        UsageError: the file cannot be written, or holds something that would be lost, as :func:`replaced_plan` says.
    """
    replaced_plan(path, is_tuned=bool(plan.tuned_on))
    try:
        write_text(path, to_json(asdict(plan)) + "\n")
    except OSError as error:
        what = f"the plan cannot be written: {error.strerror}"
        raise UsageError(explain(what, value=str(path), fix="give --out the path of a file in a folder")) from error


def replaced_plan(path: Path, *, is_tuned: bool) -> TrainingPlan | None:
    """Return the plan that is in a file for a new one, which ``--out`` names; None if there is no such file.

    Args:
        path: the file.
        is_tuned: whether the new plan is found by measuring.

    Raises:
        UsageError: it is no file of an existing folder; or it holds something else than a plan, a plan that was measured where
            the new one is computed, or the reverse.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(explain("--out is no file of an existing folder", value=str(path), fix="name such a file"))
    if not path.exists():
        return None
    found = read_plan(str(path), "--out")
    if bool(found.tuned_on) != is_tuned:
        what = f"--out holds a plan that was {'not ' if is_tuned else ''}tuned, which would be lost"
        raise UsageError(explain(what, value=str(path), fix="name another file"))
    return found


def read_plan(path: str, option: str = "--plan") -> TrainingPlan:
    """Return the plan of a file.

    Args:
        path: the file.
        option: the option that names it, for the text of an error.

    Raises:
        UsageError: the file cannot be read, is no plan, or one of another version; the text names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = f"the plan {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        fix = f"give {option} a file that `guozhuang plan --out` or `guozhuang tune --out` wrote"
        raise UsageError(explain(what, fix=fix)) from error
    fix = "make it again with `guozhuang plan` or `guozhuang tune` and --out, or name another file"
    document = checked_json(text, _VERSION, f"plan ({path})", fix)
    for name in document.keys() - {"schema_version"} - _KINDS.keys():
        near = difflib.get_close_matches(name, _KINDS, 1)
        hint = f"write {near[0]}, or remove it" if near else "remove it"
        raise UsageError(explain(f"the plan {path} has an unknown field", value=name, fix=hint))
    for name, (words, is_one) in _KINDS.items():
        value = document.get(name)
        is_left_out = (name in _OPTIONAL and value is None) or (name not in document and name not in _NEEDED)
        if not is_left_out and not is_one(value):
            what = f"the plan {path} has no usable {name}"
            raise UsageError(explain(what, value=value, fix=f"write {words}, or {fix}"))
    return build(TrainingPlan, document)


def apply_plan(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set the options of a parsed command line of ``guozhuang run`` that ``--plan`` stands for.

    Options that are given beside the plan stay if they say the same. ``-H`` and ``--hostfile`` say where the plan's ranks are:
    each host gets those of a node. How many nodes there have to be is kept in ``found.planned_nodes``, for :func:`check_nodes`.

    Args:
        found: the parsed command line, which is changed.
        environ: the environment, from which torchrun's parser takes defaults (``PET_NPROC_PER_NODE``).

    Raises:
        UsageError: the file is no plan, or an option contradicts it; the text names both.
    """
    path: str = found.plan
    plan = read_plan(path)
    found.planned_nodes = plan.num_nodes
    if plan.tuned_on:
        _check_same_machine(found, plan.tuned_on)
    is_over_hosts = bool(found.hosts or plan.hosts) or found.hostfile is not None
    if plan.device == "cuda" and not is_over_hosts:
        _check_devices(path)
    for option, attribute, planned in plan.options():
        given = getattr(found, attribute)
        if given is not None and given != planned:
            raise _contradiction(path, f"{option} {planned}", f"{option} {given}")
        setattr(found, attribute, planned)
    if plan.hosts is not None and not found.hosts and found.hostfile is None:
        found.hosts = [plan.hosts]
    per_node = found.nproc_per_node if found.nproc_per_node != environ.get("PET_NPROC_PER_NODE") else None
    if per_node is not None and str(per_node) != str(plan.ranks_per_node):
        raise _contradiction(path, f"{plan.ranks_per_node} ranks on each node", f"--nproc-per-node {per_node}")
    planned = plan.num_ranks if is_over_hosts else plan.ranks_per_node
    if found.num_ranks is not None and str(found.num_ranks) != str(planned):
        raise _contradiction(
            path, f"{planned} ranks {'in all' if is_over_hosts else 'on each node'}", f"-np {found.num_ranks}"
        )
    found.num_ranks, found.nproc_per_node = None, str(plan.ranks_per_node)


def _check_same_machine(found: argparse.Namespace, tuned_on: Mapping[str, str]) -> None:
    """Raise if a plan was found by measuring on another machine or versions, where another may be the fastest."""
    from guozhuang.world.machine import describe  # imports torch, which parsers do without

    fix = "tune there: guozhuang tune --out FILE; or give its options one by one"
    if found.hosts or found.hostfile is not None:
        what = f"the plan {found.plan} was tuned on one machine, and -H or --hostfile name others"
        raise UsageError(explain(what, value=str(found.hosts or found.hostfile), fix=fix))
    here = describe().conditions
    differs = differences({name: value for name, value in tuned_on.items() if name in here}, here)
    if differs:
        what = f"the plan {found.plan} was tuned on another machine or other versions: {'; '.join(differs)}"
        raise UsageError(explain(what, fix=fix.replace("there", "here")))


def _check_devices(path: str) -> None:
    import torch  # which parsers do without

    if not torch.cuda.is_available():
        what = f"the plan {path} is for CUDA devices, and this machine has none that PyTorch can use"
        raise UsageError(explain(what, fix="run it where there are some, or make a plan for this machine's CPUs"))


def check_nodes(found: argparse.Namespace, least: int, most: int) -> None:
    """Raise if a run has another number of nodes than the plan that its command line names.

    Args:
        found: the command line, to which its plan was applied.
        least: the least number of nodes, or the number of hosts that get ranks.
        most: the greatest number of nodes.

    Raises:
        UsageError: the numbers differ; the text says how the nodes of the plan are named.
    """
    wanted = found.planned_nodes
    if wanted is None or (least, most) == (wanted, wanted):
        return
    given = str(most) if least == most else f"{least}:{most}"
    what = f"the plan {found.plan} is for {wanted} node{'s' * (wanted != 1)}, and this run has {given}"
    hosts = "-H " + ",".join(f"host{i}" for i in range(1, min(wanted, 2) + 1)) + ",..." * (wanted > 2)
    each = f"--nnodes {wanted} --node-rank I --master-addr ADDRESS on each node"
    fix = f"name them with {hosts}, or give {each}" if wanted > 1 else "name one host or none, or make another plan"
    raise UsageError(explain(what, value=given, fix=fix))


def _contradiction(path: str, planned: str, given: str) -> UsageError:
    what = f"{given} contradicts the plan {path}, which says {planned}"
    return UsageError(explain(what, fix="leave the option out, or --plan, or make another plan"))

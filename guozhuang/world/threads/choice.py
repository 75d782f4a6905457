"""Decide with how many threads a rank computes and on which cores. No I/O.

[Note: threads and cores] Every rank tells the others in the roll call on which CPUs (hardware threads) it may run. From the
CPUs of all ranks of its node a rank computes its share, whoever started it: ranks that may run on the same cores divide them,
and a rank that a launcher bound to cores of its own has those. So no launcher has to be known for its rules, but for two.
Slurm without its affinity plugin binds nothing, so what it gave to the step is a limit too. Open MPI's mpirun binds each of
at most two ranks to one core, and of more ranks to one NUMA node. Nobody asked for that, so where it leaves cores idle, ranks
run on those on which mpirun itself may run.

A number of threads or a placement that a user chose stays. One core counts once, however many hardware threads it has: a
second thread on it adds little to matrix products, and PyTorch built with MKL counts in the same way.

Ranks are bound to cores where asked, and by default only where their cores lie on several NUMA nodes, to whole nodes: memory
stays near. Inside a node binding gained too little to be a default (``benchmarks/threads.py`` measures it).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from guozhuang.world.machine import Core

#: Variables by which a user places the threads of OpenMP: its library then binds them, and maybe has bound this process.
_PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NOTHING = ("", "0", "false", "none", "disabled")
#: Options of Open MPI's mpirun by which a user binds ranks, in both of its spellings; ``--map-by`` only to parts of a node.
_BINDING = re.compile(r"--?(bind-to(-\w+)?|cpu-set|cpu-list|cpus-per-(proc|rank)|rankfile|rf|by(core|socket|numa))")
_MAPPED = re.compile(r"pe=|pe-list|core|hwthread|cache|numa|socket|package|rankfile", re.IGNORECASE)
_PARAMETERS = re.compile(
    r"(?:(?:OMPI|PRTE)_MCA_)?"
    r"(?:hwloc_\w*(?:binding_policy|cpu_set|cpu_list)|rmaps_\w*(?:mapping_policy|rank_file\w*)|orte_rankfile)"
)


@dataclass(frozen=True)
class CoresOfRank:
    """What a rank knows about its cores and threads when it enters a world.

    Attributes:
        rank: its number.
        cpus_of: the CPUs on which each rank of its node may run, by rank; its own among them.
        cores: the core of each of these CPUs.
        num_threads: torch's number of threads so far.
        chosen_by: the variable or function by which a user chose ``num_threads`` or a placement; "": nobody did.
        quota: processor time that control groups allow the ranks of this node, in cores; None: no limit.
        step_cpus: CPUs of this node that Slurm gave to the step; None: not told.
        bind: "auto", "cores", "numa" or "off".
        was_freed: whether the own CPUs are those of Open MPI's mpirun, instead of those to which it binds by default.
    """

    rank: int
    cpus_of: Mapping[int, Sequence[int]]
    cores: Mapping[int, Core]
    num_threads: int
    chosen_by: str = ""
    quota: float | None = None
    step_cpus: int | None = None
    bind: str = "auto"
    was_freed: bool = False


@dataclass(frozen=True)
class ThreadsOfRank:
    """How a rank computes.

    Attributes:
        num_threads: with so many threads.
        cpus: bound to these CPUs; None: as it is.
        text: both in words, with the reasons.
        refused: why the rank is not bound although that was asked for; "" where it is, or was not.
    """

    num_threads: int
    cpus: frozenset[int] | None
    text: str
    refused: str = ""


def chosen_by(environ: Mapping[str, str], agents: Sequence[str] | None, is_set: bool) -> str:
    """Return the variable or function by which a user chose the number of threads or their places; "" if nobody did.

    Args:
        environ: the environment of the rank.
        agents: the names of the variables that torchrun's agent was started with; None: there is no such agent, or it is
            unknown. Where OMP_NUM_THREADS is none of them, torchrun added it.
        is_set: whether the script called ``torch.set_num_threads``.
    """
    for name in _PLACING:
        if environ.get(name, "").strip().lower() not in _NOTHING:
            return name
    if is_set:
        return "torch.set_num_threads"
    for name in _NUMBERS:
        is_torchruns = agents is not None and name not in agents and environ.get(name) == "1"
        if environ.get(name, "").strip() and not is_torchruns:
            return name
    return ""


def asks_for_binding(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a user of Open MPI asked how ranks are bound, by mpirun's command line or by parameters of MCA.

    Args:
        command: the command line of mpirun.
        environ: the variables of mpirun and of the rank.
    """
    if any(_PARAMETERS.fullmatch(name) and _is_for_cores(name, value) for name, value in environ.items()):
        return True
    following = [*command[1:], ""]
    for word, after in zip(command, following, strict=False):
        option, equals, value = word.partition("=")
        if option in ("--map-by", "-map-by") and _MAPPED.search(value if equals else after):
            return True
        if _BINDING.fullmatch(option) or (_PARAMETERS.fullmatch(word) and _is_for_cores(word, after)):
            return True
    return False


def _is_for_cores(parameter: str, value: str) -> bool:
    return not parameter.endswith("mapping_policy") or bool(_MAPPED.search(value))


def leaves_idle(
    own: Sequence[int],
    mpiruns: Sequence[int],
    cores: Mapping[int, Core],
    num_ranks: int,
    num_local: int,
    wanted: int | None,
) -> bool:
    """Return whether Open MPI's default binding leaves cores idle, so that its ranks are to run on all CPUs of mpirun.

    By default it binds to a core where there are at most two ranks, else to a NUMA node (or, version 4, to a package).

    Args:
        own: the CPUs of this process.
        mpiruns: the CPUs of mpirun.
        cores: the core of each CPU.
        num_ranks: how many ranks mpirun started.
        num_local: how many of them on this node.
        wanted: the number of threads, if the user chose it.
    """
    if not set(own) < set(mpiruns):
        return False
    mine, there = ({cores[cpu] for cpu in cpus} for cpus in (own, mpiruns))
    nodes, packages = {core.node for core in mine}, {core.package for core in mine}
    is_node = len(nodes) == 1 and mine == {core for core in there if core.node in nodes}
    is_package = len(packages) == 1 and mine == {core for core in there if core.package in packages}
    is_default = len(mine) == 1 if num_ranks <= 2 else is_node or is_package
    return is_default and len(mine) * num_local < len(there) and (wanted is None or wanted > len(mine))


def choose(known: CoresOfRank) -> ThreadsOfRank:
    """Return with how many threads a rank computes, and on which CPUs. See [Note: threads and cores]."""
    num_threads, why = _threads(known)
    if known.chosen_by and known.num_threads != num_threads:
        num_threads, why = known.num_threads, known.chosen_by
    cpus, bound, obstacle = _binding(known)
    freed = "freed from mpirun's default binding" if known.was_freed else ""
    text = [
        f"{_counted(num_threads, 'thread')} a rank ({why})",
        freed,
        bound or (obstacle and f"not bound: {obstacle}"),
    ]
    return ThreadsOfRank(num_threads, cpus, ", ".join(filter(None, text)), obstacle if known.bind != "auto" else "")


def _threads(known: CoresOfRank) -> tuple[int, str]:
    """Return the number of threads that fit this rank, and where it comes from."""
    users = _users(known)
    own = {known.cores[cpu] for cpu in known.cpus_of[known.rank]}
    num_ranks = len(known.cpus_of)
    ranks = _counted(num_ranks, "rank")
    if len(own) == len(users):
        why = f"{_counted(len(own), 'core')} / {ranks}"
    elif all(users[core] == 1 for core in own):
        why = f"{_counted(len(own), 'core')} of its own"
    else:
        why = f"{_counted(len(own), 'core')}, some of them of other ranks too"
    limits = [(int(sum(Fraction(1, users[core]) for core in own)), why)]
    if known.quota is not None:
        limits.append((int(known.quota / num_ranks), f"a quota of {known.quota:g} cores / {ranks}"))
    if known.step_cpus is not None:
        limits.append((known.step_cpus // num_ranks, f"{known.step_cpus} CPUs of the Slurm step / {ranks}"))
    number, why = min(limits, key=lambda each: each[0])
    return max(1, number), why


def _users(known: CoresOfRank) -> Counter[Core]:
    """Return by how many ranks each core may be used."""
    return Counter(core for cpus in known.cpus_of.values() for core in {known.cores[cpu] for cpu in cpus})


def _binding(known: CoresOfRank) -> tuple[frozenset[int] | None, str, str]:
    """Return the CPUs that this rank is to be bound to (None: it stays as it is), how it is bound, or else what hinders it."""
    mine = set(known.cpus_of[known.rank])
    cores = sorted({known.cores[cpu] for cpu in mine})
    peers = sorted(rank for rank, cpus in known.cpus_of.items() if set(cpus) == mine)
    shared = max(_users(known).values())
    is_wanted = known.bind in ("cores", "numa") or (known.bind == "auto" and len({core.node for core in cores}) > 1)
    if len(known.cpus_of) == 1:
        return None, "", ""
    if shared == 1 or (not is_wanted and len(peers) < len(known.cpus_of)):
        return None, "bound by the launcher", ""
    if not is_wanted:
        return None, "not bound to cores", ""
    if shared > len(peers):
        return None, "", "ranks may run on some of the same cores"
    if len(peers) > len(cores):
        return None, "", f"{len(peers)} ranks share {_counted(len(cores), 'core')}"
    if known.quota is not None and known.quota < len(cores):
        return None, "", f"a quota of {known.quota:g} cores holds wherever they run"
    if known.chosen_by in _PLACING:
        return None, "", f"{known.chosen_by} places the threads"
    place, num = peers.index(known.rank), len(peers)
    block = cores[place * len(cores) // num : (place + 1) * len(cores) // num]
    if known.bind == "cores":
        return frozenset(cpu for cpu in mine if known.cores[cpu] in block), "bound to cores", ""
    near = {core.node for core in block}
    return frozenset(cpu for cpu in mine if known.cores[cpu].node in near), "bound to NUMA nodes", ""


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"

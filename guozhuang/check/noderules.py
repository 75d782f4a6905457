"""Rules for single nodes: processors, memory, devices, missing C extension. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from guozhuang import units
from guozhuang.check.results import CheckResults, Facts, Finding
from guozhuang.units import listed, ranks_text

#: Sizes of /dev/shm that cause a warning, and a note: DataLoader workers pass batches through it; containers have 64 MiB.
SMALL_SHM_BYTES, SCANT_SHM_BYTES = 320 << 20, 1 << 30
FULL_SHM_BYTES = 64 << 20
MIN_MEMLOCK_BYTES = 1 << 30
MIN_AVAILABLE_BYTES, MIN_AVAILABLE_SHARE = 1 << 30, 0.05
MAX_SWAP_BYTES = 1 << 30
MIN_OPEN_FILES = 1024


class Problem(NamedTuple):
    """A problem of one node; nodes with an equal problem share a finding, in which their names replace ``{}`` in the text."""

    level: str
    kind: str
    text: str
    fix: str


#: A function from the ranks of a node and the number of all ranks to the problems of that node.
NodeRule = Callable[[Sequence[Facts], int], Iterator[Problem]]


def all_of_them(results: CheckResults) -> Iterator[Finding]:
    """Find problems of single nodes by all rules of this module but ``devices``."""
    return of_nodes(results, _RULES)


def of_nodes(results: CheckResults, rules: Sequence[NodeRule]) -> Iterator[Finding]:
    """Apply rules to each node. Nodes with the same problem share a finding: a cluster of equal nodes gets one line."""
    where: dict[Problem, list[list[Facts]]] = {}
    for rule in rules:
        for ranks in results.nodes.values():
            for problem in rule(ranks, results.num_ranks):
                where.setdefault(problem, []).append(ranks)
    for problem, nodes in where.items():
        names = listed(ranks[0].host for ranks in nodes)
        who = tuple(each.rank for ranks in nodes for each in ranks)
        yield Finding(problem.level, problem.kind, problem.text.format(names), problem.fix, who)


def devices(results: CheckResults) -> Iterator[Finding]:
    """Find ranks without a device of their own, or with another kind of device than the others."""
    absent = [each for each in results.facts if each.device.endswith("(not there)")]
    if absent:
        ranks = tuple(each.rank for each in absent)
        text = f"{ranks_text(ranks).capitalize()} would have no device: {absent[0].host} shows {absent[0].num_devices}."
        fix = "start as many ranks per node as there are devices, or look at CUDA_VISIBLE_DEVICES"
        yield Finding("fail", "missing-device", text, fix, ranks)
    models = {each.device_name for each in results.facts if each.device.startswith("cuda")}
    kinds = {each.device.partition(":")[0] for each in results.facts}
    if len(kinds) > 1:
        ranks = tuple(each.rank for each in results.facts if each.device == "cpu")
        text = f"{ranks_text(ranks).capitalize()} see{'s' * (len(ranks) == 1)} no CUDA device, the others do."
        yield Finding("fail", "differing-devices", text, "look at `nvidia-smi` and the build of PyTorch there", ranks)
    elif len(models) > 1:
        names = listed(sorted(models))
        yield Finding("note", "differing-devices", f"Devices differ ({names}); the slowest sets the pace.")


def _processors(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    first = ranks[0]
    # A launcher may have bound each rank to its own cores, so the cores of all ranks are counted together.
    num_cores = float(len({core for each in ranks for core in each.resources.cores}))
    quota = first.resources.quota_cores
    cores = min(num_cores, quota or num_cores)
    num_threads = sum(each.resources.num_threads for each in ranks)
    of_cores = f"{cores:g} core{'s' * (cores != 1)}"
    fewer_threads = f"set OMP_NUM_THREADS={max(int(cores) // len(ranks), 1)}, or unset it: on CPUs gz.init then chooses"
    if len(ranks) > cores and not first.num_devices:
        text = f"{len(ranks)} ranks share {of_cores} on {{}}: they take turns, and each waits for the slowest."
        yield Problem("warn", "too-many-ranks", text, f"start at most {max(int(cores), 1)} per node")
    elif len(ranks) > 1 and num_threads > cores:
        each = first.resources.num_threads
        text = f"{len(ranks)} ranks {units.TIMES} {each} threads = {num_threads} threads share {of_cores} on {{}}."
        yield Problem("warn", "too-many-threads", text, fewer_threads)
    if quota is not None and quota < 0.9 * num_cores and num_threads > quota:
        text = f"The control group allows {quota:g} of {num_cores:g} cores on {{}}, and PyTorch sees all of them."
        yield Problem("note", "core-quota", text, fewer_threads)


def _shared_memory(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    here = ranks[0].resources
    if here.shm_bytes is not None and here.shm_bytes < SCANT_SHM_BYTES:
        size = units.size(here.shm_bytes)
        text = f"/dev/shm holds {size} on {{}}; DataLoader workers that need more end with a bus error."
        level = "warn" if here.shm_bytes < SMALL_SHM_BYTES else "note"
        yield Problem(
            level, "small-shm", text, "start the container with --shm-size=8g or --ipc=host, or num_workers=0"
        )
    elif here.shm_free_bytes is not None and here.shm_free_bytes < FULL_SHM_BYTES:
        text = f"/dev/shm is full on {{}} ({units.size(here.shm_free_bytes)} free); DataLoader workers need it."
        yield Problem("warn", "small-shm", text, "remove what ended programs left in /dev/shm")


def _locked_memory(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    here = ranks[0].resources
    if not (here.rdma_devices or ranks[0].num_devices):
        return  # without RDMA or CUDA nothing locks memory
    if here.memlock_bytes is not None and here.memlock_bytes < MIN_MEMLOCK_BYTES:
        why = f"RDMA ({here.rdma_devices[0]})" if here.rdma_devices else "pinned memory"
        text = f"A process may lock {units.size(here.memlock_bytes)} of memory on {{}}, too little for {why}."
        fix = "set memlock to unlimited (limits.conf, LimitMEMLOCK of sshd or slurmd, docker --ulimit memlock=-1)"
        yield Problem("warn" if here.rdma_devices else "note", "small-memlock", text, fix)


def _memory(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    here = ranks[0].resources
    fix = "end what else runs there, or start fewer ranks"
    available, total = here.available_bytes, here.memory_bytes
    if available is not None and total and available < max(MIN_AVAILABLE_BYTES, MIN_AVAILABLE_SHARE * total):
        text = f"{units.size(available)} of {units.size(total)} of memory are left on {{}}."
        yield Problem("warn", "low-memory", text, fix)
    if here.swap_used_bytes is not None and here.swap_used_bytes > MAX_SWAP_BYTES:
        text = f"{units.size(here.swap_used_bytes)} are swapped out on {{}}; a rank that waits for its memory holds up all."
        yield Problem("warn", "swap", text, fix)


def _open_files(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    limit = ranks[0].resources.num_open_files
    if limit is not None and limit < max(MIN_OPEN_FILES, 4 * num_ranks):
        text = f"A process may have {limit} files open on {{}}, few for the connections of {num_ranks} ranks."
        yield Problem("warn", "few-open-files", text, "raise it with `ulimit -n`")


def _engine(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    if any(each.shm_known and not each.c_engine for each in ranks):
        text = "The C extension of the shm backend is not built on {}: its groups are gloo groups there, several times slower."
        yield Problem("warn", "no-c-engine", text, "install a C compiler and run `pip install .` again")


_RULES: tuple[NodeRule, ...] = (
    _processors,
    _shared_memory,
    _locked_memory,
    _memory,
    _open_files,
    _engine,
)

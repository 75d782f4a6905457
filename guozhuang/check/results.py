"""The records of a check; their JSON form and back. Units stand in the names."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.records import build

#: Grows when a field changes its meaning or goes; new fields may come without.
SCHEMA_VERSION = 1

#: The entry of a digest among versions.
SOURCE = "guozhuang source"

#: What an absent rank did whose facts cannot be understood.
OTHER_VERSION = "runs another version of guozhuang"

#: ``fail`` breaks training, ``warn`` costs speed or breaks some programs, ``note`` is good to know.
LEVELS = ("fail", "warn", "note")


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of a node.

    Attributes:
        name: as the system calls it.
        addresses: IPv4 first.
        is_up: the system says that it is.
        mtu_bytes: None where the system does not tell, as below.
        speed_mbit_per_s: what the system tells; None or made up for interfaces that are no cards.
        is_card: a device stands behind it, it is no bridge, tunnel or pair of virtual ends.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    mtu_bytes: int | None
    speed_mbit_per_s: int | None
    is_card: bool


@dataclass(frozen=True)
class Network:
    """The network of a rank: addresses, interfaces, and the way to the others.

    Attributes:
        meeting_host: the name or address where ranks meet (MASTER_ADDR); "" in a world of one.
        meeting_addresses: what it resolves to here.
        meeting_error: why it does not.
        name_addresses: what this host's own name resolves to here.
        name_error: why it does not.
        requested: the interface asked for (GLOO_SOCKET_IFNAME), or None.
        routed: the interface that leads to where ranks meet; None where there is no way, or no need.
        in_use: the interface that carries what ranks exchange between nodes; None where nothing fits.
        address: the address on it; "" where there is none.
        interfaces: all of them.
        nccl_requested: what NCCL was told to use (NCCL_SOCKET_IFNAME, as it stands), or None.
    """

    meeting_host: str
    meeting_addresses: tuple[str, ...]
    meeting_error: str
    name_addresses: tuple[str, ...]
    name_error: str
    requested: str | None
    routed: str | None
    in_use: str | None
    address: str
    interfaces: tuple[NetworkInterface, ...]
    nccl_requested: str | None = None

    def interface(self, name: str | None) -> NetworkInterface | None:
        """The interface of that name."""
        return next((each for each in self.interfaces if each.name == name), None)


@dataclass(frozen=True)
class Resources:
    """The resources of a node that a rank may use. None: not limited, or not told by this system.

    Attributes:
        cores: those that this process may run on.
        quota_cores: processor time that its control group allows, in cores.
        num_threads: compute threads of this rank.
        memory_bytes: of the node, or what its control group allows.
        available_bytes: of it, free or to be had.
        swap_used_bytes: what the node has swapped out.
        shm_bytes: the size of /dev/shm.
        shm_free_bytes: what is free there.
        memlock_bytes: how much memory a process may lock.
        num_open_files: how many files a process may have open.
        rdma_devices: InfiniBand and RoCE devices.
    """

    cores: tuple[int, ...]
    quota_cores: float | None
    num_threads: int
    memory_bytes: int | None
    available_bytes: int | None
    swap_used_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    memlock_bytes: int | None
    num_open_files: int | None
    rdma_devices: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """The facts about one rank.

    Attributes:
        rank: its rank.
        host: the host's name.
        node: equal for ranks that share memory.
        pid: its process.
        launcher: who started it.
        device: where it would compute, in words.
        device_name: the model; "" for a CPU that does not tell.
        num_devices: accelerators that this process sees.
        system: kernel and machine.
        versions: by package: Python, torch, guozhuang and so on; what is absent is left out.
        c_engine: the C part of the shared-memory group is there.
        shm_known: the backend "shm" can be used on this system.
        network: how it reaches others.
        resources: what it may use.
    """

    rank: int
    host: str
    node: str
    pid: int
    launcher: str
    device: str
    device_name: str
    num_devices: int
    system: str
    versions: dict[str, str]
    c_engine: bool
    shm_known: bool
    network: Network
    resources: Resources


@dataclass(frozen=True)
class ClockOffset:
    """The lead of a node's clock over rank 0's, by the quickest of several exchanges (as NTP does).

    Attributes:
        rank: who answered; one rank per node.
        offset_s: positive: that clock is ahead.
        uncertainty_s: the offset is right to within this, whatever the ways to and fro took.
        num_repeats: exchanges.
    """

    rank: int
    offset_s: float
    uncertainty_s: float
    num_repeats: int


@dataclass(frozen=True)
class MeasuredLink:
    """A pair of ranks over one TCP connection. None: not measured.

    Attributes:
        a: the lower rank.
        b: the other.
        between_nodes: they are on different nodes.
        latency_s: half the median time of a small message to and fro.
        latency_repeats: how many.
        forward_bytes_per_s: from a to b, by the median time of large messages.
        forward_repeats: how many.
        backward_bytes_per_s: from b to a.
        backward_repeats: how many.
        failure: why there are no figures; "" if there are.
    """

    a: int
    b: int
    between_nodes: bool
    latency_s: float | None = None
    latency_repeats: int = 0
    forward_bytes_per_s: float | None = None
    forward_repeats: int = 0
    backward_bytes_per_s: float | None = None
    backward_repeats: int = 0
    failure: str = ""

    @property
    def slower_bytes_per_s(self) -> float | None:
        """The bandwidth of the slower direction."""
        known = [each for each in (self.forward_bytes_per_s, self.backward_bytes_per_s) if each is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class MeasuredReduction:
    """An all_reduce over all ranks.

    Attributes:
        backend: what carried it.
        is_default: it is the backend that ``gz.init`` chose here.
        device_type: where the tensor was.
        num_bytes: of the tensor.
        median_s: of the slowest rank; None if it failed.
        num_repeats: how many.
        failure: why there is no figure.
    """

    backend: str
    is_default: bool
    device_type: str
    num_bytes: int
    median_s: float | None = None
    num_repeats: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Absence:
    """A rank, or a host, that is not part of the result to its end.

    Attributes:
        rank: which; None for a host whose ranks have no numbers yet.
        host: its name, as far as it is known.
        what: ``"did not come"``, ``"stopped"``, ``"does not answer"``, ``"was ended"``,
            ``"could not meet the others"``, ``"cannot be reached"``, ``"came to no result"`` or :data:`OTHER_VERSION`.
        when: what was going on.
        reason: what is known of the cause; "" if nothing is.
    """

    rank: int | None
    host: str
    what: str
    when: str
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        level: one of :data:`LEVELS`.
        kind: a short name that stays the same, for programs: ``"slow-link"``.
        text: a plain sentence.
        fix: what to do, in the imperative; "" where there is nothing to do.
        ranks: whom it concerns; empty for all.
    """

    level: str
    kind: str
    text: str
    fix: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckResults:
    """The result of a check.

    Attributes:
        num_ranks: how many ranks there should be.
        launcher: who started them.
        facts: of the ranks that came, in rank order.
        clocks: one per node but rank 0's.
        links: measured and failed ones.
        reductions: of each backend and size.
        absences: who is missing.
        notes: what was left out on purpose, and why.
        duration_s: from the meeting of the ranks to the end.
        schema_version: of the JSON form.
    """

    num_ranks: int
    launcher: str
    facts: tuple[Facts, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    reductions: tuple[MeasuredReduction, ...] = ()
    absences: tuple[Absence, ...] = ()
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def nodes(self) -> dict[str, list[Facts]]:
        """The ranks of each node, nodes in the order of their lowest rank."""
        found: dict[str, list[Facts]] = {}
        for each in self.facts:
            found.setdefault(each.node, []).append(each)
        return found

    def host_of(self, rank: int) -> str:
        """The name of a rank's host; "" if it never came."""
        return next((each.host for each in self.facts if each.rank == rank), "")


def is_loopback(address: str) -> bool:
    """Whether it means this very host, wherever it is used."""
    return address.startswith("127.") or address == "::1"


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something breaks training, else 0."""
    return int(any(each.level == "fail" for each in findings))


def to_json(results: CheckResults, findings: Sequence[Finding]) -> str:
    """One document: the records, what was concluded from them, and the exit code that follows."""
    document = asdict(results)
    document["findings"] = [asdict(each) for each in findings]
    document["exit_code"] = exit_code(findings)
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def from_json(text: str) -> CheckResults:
    """Rebuild the records; conclusions are drawn again, not read.

    Raises:
        UsageError: the text is no such document, or of another version.
    """
    try:
        document = json.loads(text)
        version = document["schema_version"]
        if version != SCHEMA_VERSION:
            what = "the result is of another version of guozhuang"
            raise UsageError(explain(what, value=version, fix="install the same version on every host"))
        return build(CheckResults, document)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(explain(f"this is no result of a check: {error!r}")) from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

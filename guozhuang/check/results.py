"""The records of a check, and their conversion to and from JSON. Field names contain the unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from guozhuang import records

#: The version of the JSON form, increased when a field changes its meaning or is removed, but not when one is added.
SCHEMA_VERSION = 1

#: The key in ``Facts.versions`` of the digest of guozhuang's source files.
SOURCE = "guozhuang source"

#: ``Absence.what`` of a rank whose facts cannot be parsed.
OTHER_VERSION = "runs another version of guozhuang"

#: ``fail`` breaks training, ``warn`` costs speed or breaks some programs, ``note`` is information.
LEVELS = ("fail", "warn", "note")


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of a node.

    Attributes:
        name: the name that the system gives it.
        addresses: IPv4 first.
        is_up: whether the system reports it as up.
        mtu_bytes: largest packet; None if the system does not report it.
        speed_mbit_per_s: the reported speed; None or meaningless for interfaces that are not cards.
        is_card: whether it is a hardware device, not a bridge, a tunnel or a virtual pair.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    mtu_bytes: int | None
    speed_mbit_per_s: int | None
    is_card: bool


@dataclass(frozen=True)
class Network:
    """The network of a rank: addresses, interfaces, and the interface towards other nodes.

    Attributes:
        meeting_host: the name or address where ranks meet (MASTER_ADDR); "" in a world of one rank.
        meeting_addresses: the addresses to which ``meeting_host`` resolves on this host.
        meeting_error: why ``meeting_host`` does not resolve; "" if it does.
        name_addresses: the addresses that this host's own name resolves to here.
        name_error: why this host's own name does not resolve; "" if it does.
        requested: the interface requested by GLOO_SOCKET_IFNAME, or None.
        routed: the interface that leads to the meeting host; None if there is no route, or no need for one.
        in_use: the interface that carries traffic between nodes; None if no interface fits.
        address: this host's address on the interface ``in_use``; "" if that has none.
        interfaces: all interfaces of the host.
        nccl_requested: the value of NCCL_SOCKET_IFNAME, or None.
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
        """Return the interface of that name; None if there is none."""
        return next((each for each in self.interfaces if each.name == name), None)


@dataclass(frozen=True)
class Resources:
    """The resources of a node that a rank may use. None: unlimited, or not reported by this system.

    Attributes:
        cores: the cores that this process may run on, each by the number of its first hardware thread.
        quota_cores: processor time that its control group allows, in cores.
        num_threads: compute threads of this rank; where nobody chose them, as ``gz.init`` does.
        memory_bytes: memory of the node, or the limit of its control group.
        available_bytes: the part of it that can be allocated now.
        swap_used_bytes: swap space in use on the node.
        shm_bytes: size of /dev/shm.
        shm_free_bytes: free space in /dev/shm.
        memlock_bytes: limit of locked memory of a process.
        num_open_files: limit of open files of a process.
        rdma_devices: names of InfiniBand and RoCE devices.
        threads_by: the variable or function by which a user chose ``num_threads``; "": ``gz.init`` chooses;
            "unknown" from a version that does not tell.
        step_cpus: the CPUs that Slurm gave to this step on the node.
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
    threads_by: str = "unknown"
    step_cpus: int | None = None


@dataclass(frozen=True)
class Facts:
    """The facts about one rank that a check collects: its host, device, versions, network and resources.

    Attributes:
        rank: the rank that the facts are about.
        host: name of its host.
        node: identifies the node; equal for ranks that can share memory.
        pid: its process id.
        launcher: the launcher that started it.
        device: the device on which it would compute, as text.
        device_name: the device's model; for a CPU that does not report one, its architecture.
        num_devices: number of accelerators that this process sees.
        system: kernel and machine.
        versions: versions by package (Python, torch, guozhuang, ...); absent packages are left out.
        c_engine: whether the C part of the shared-memory group is built.
        shm_known: whether the backend "shm" can be used on this system.
        network: its network.
        resources: its resources.
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
    """The difference between a node's clock and rank 0's, by the fastest of several exchanges (as in NTP).

    Attributes:
        rank: the rank that was asked; one rank per node.
        offset_s: positive: that clock is ahead.
        uncertainty_s: the largest possible error of the offset, half the time of the exchange.
        num_repeats: number of exchanges.
    """

    rank: int
    offset_s: float
    uncertainty_s: float
    num_repeats: int


@dataclass(frozen=True)
class MeasuredLink:
    """The latency and bandwidth between two ranks, measured over one TCP connection; None if a value was not measured.

    Attributes:
        a: the lower rank.
        b: the higher rank.
        between_nodes: whether the ranks are on different nodes.
        latency_s: half the median time of a small message there and back.
        latency_repeats: number of small messages.
        forward_bytes_per_s: bandwidth from a to b, by the median time of large messages.
        forward_repeats: number of large messages from a to b.
        backward_bytes_per_s: bandwidth from b to a.
        backward_repeats: number of large messages from b to a.
        failure: why there are no values; "" if there are.
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
        """The bandwidth of the link's slower direction; None if neither direction was measured."""
        known = [each for each in (self.forward_bytes_per_s, self.backward_bytes_per_s) if each is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class MeasuredReduction:
    """The measurement of an all_reduce over all ranks.

    Attributes:
        backend: the backend that carried it.
        is_default: whether ``gz.init`` chose this backend here.
        device_type: type of the tensor's device.
        num_bytes: size of the tensor.
        median_s: median time of the slowest rank; None if it failed.
        num_repeats: number of calls.
        failure: why there is no time; "" if there is one.
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
    """A rank or host that did not take part in the check until its end.

    Attributes:
        rank: the number of the rank; None for a host whose ranks have no numbers yet.
        host: name of the host, if known.
        what: ``"did not come"``, ``"stopped"``, ``"does not answer"``, ``"was ended"``,
            ``"could not meet the others"``, ``"cannot be reached"``, ``"came to no result"`` or :data:`OTHER_VERSION`.
        when: the step of the check at that time.
        reason: the known cause; "" if unknown.
    """

    rank: int | None
    host: str
    what: str
    when: str
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One problem that a rule found.

    Attributes:
        level: one of :data:`LEVELS`.
        kind: a stable short name, for programs: ``"slow-link"``.
        text: a plain sentence.
        fix: what to do, in the imperative; "" if there is nothing to do.
        ranks: the ranks concerned; empty for all.
    """

    level: str
    kind: str
    text: str
    fix: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckResults:
    """The result of a check: facts about the ranks, measurements between them, and the ranks and hosts that are missing.

    Attributes:
        num_ranks: the number of ranks that should take part.
        launcher: the launcher that started them.
        facts: facts about the ranks that took part, in rank order.
        clocks: one offset for each node except rank 0's.
        links: measured links, and failed ones.
        reductions: one measurement for each backend and size.
        absences: missing ranks and hosts.
        notes: measurements that were left out on purpose, and why.
        duration_s: from the meeting of the ranks to the end.
        schema_version: version of the JSON form.
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
        """Return the name of a rank's host; "" if the rank never took part."""
        return next((each.host for each in self.facts if each.rank == rank), "")


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if a finding breaks training, else 0."""
    return int(any(each.level == "fail" for each in findings))


def to_json(results: CheckResults, findings: Sequence[Finding]) -> str:
    """Return a JSON document of the results of a check, the findings and the exit code."""
    document = asdict(results)
    document["findings"] = [asdict(each) for each in findings]
    document["exit_code"] = exit_code(findings)
    return records.to_json(document, lambda _: None)


def from_json(text: str) -> CheckResults:
    """Return the ``CheckResults`` in a JSON document of ``to_json``; the findings in it are not read.

    Raises:
        UsageError: the text is not such a document, or has another schema version.
    """
    fix = "install the same version on every host"
    return records.from_json(CheckResults, text, SCHEMA_VERSION, "result of a check", fix)

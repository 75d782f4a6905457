"""Measures the link between two ranks and all_reduce, and plans which pairs are measured at the same time.

A pair is a gloo group of two. The time of a large message ends when the receiving rank's answer arrives, so that
bytes that only lie in buffers do not count as sent.
"""

from __future__ import annotations

import datetime
import itertools
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from guozhuang import units, world
from guozhuang.check.results import MeasuredReduction
from guozhuang.errors import WorldError
from guozhuang.net.client import within
from guozhuang.world.devices import SHARED_MEMORY

#: The time limit for measuring one pair of ranks, in seconds.
PAIR_LIMIT_S = 6.0
#: The beginning of the failure's text if two ranks were connected, but a message did not arrive.
CONNECTED = "connected, but "
_SMALL_BYTES = 8
_MODES = ("echo", "take", "give")
_SMALL_REPEATS, _SMALL_BUDGET_S = 100, 0.05
_FIRST_BYTES, _MOST_BYTES = 64 << 10, 16 << 20
_LONG_ENOUGH_S = 0.008  # a message that takes longer is large enough to measure bandwidth
_LARGE_REPEATS, _LARGE_BUDGET_S = 5, 0.25
#: The most rounds of measurements that a check makes: more would take too long.
MAX_ROUNDS = 30
_MAX_PAIRS_OF_RANKS = 240
#: The tensor sizes for which all_reduce is measured: a small one shows the cost of a call, a DDP bucket's the bandwidth.
SMALL_TENSOR_BYTES, LARGE_TENSOR_BYTES = 4 << 10, 25 << 20
_MOST_REDUCTIONS, _REDUCTIONS_BUDGET_S = 50, 0.4


@dataclass(frozen=True)
class Schedule:
    """A plan that says which pairs are measured at the same time.

    Attributes:
        rounds: pairs of ranks for each round; in a round, no node takes part in two pairs.
        note: which pairs were left out and why; "" if none.
    """

    rounds: tuple[tuple[tuple[int, int], ...], ...]
    note: str = ""


def schedule(node_of: Mapping[int, str], max_rounds: int = MAX_ROUNDS) -> Schedule:
    """Plan to measure every pair of ranks; if that takes too many rounds, one pair per pair of nodes, as many as fit. No I/O.

    Args:
        node_of: the node of each rank.
        max_rounds: upper bound of the number of rounds.
    """
    ranks = sorted(node_of)
    num_pairs = len(ranks) * (len(ranks) - 1) // 2
    if num_pairs <= _MAX_PAIRS_OF_RANKS:
        rounds = _packed(list(itertools.combinations(ranks, 2)), node_of)
        if len(rounds) <= max_rounds:
            return Schedule(rounds)
    members: dict[str, list[int]] = {}
    for rank in ranks:
        members.setdefault(node_of[rank], []).append(rank)
    groups = list(members.values())
    # Pairs inside different nodes do not disturb each other, so one round measures a pair inside every node.
    inside = tuple((group[0], group[1]) for group in groups if len(group) > 1)
    between = _tournament([group[0] for group in groups])
    fitting = between[: max_rounds - 1]
    num_between = sum(len(each) for each in between)
    note = f"one pair per pair of nodes was measured ({len(ranks)} ranks have {num_pairs} pairs)"
    if len(fitting) < len(between):
        note = (
            f"{sum(len(each) for each in fitting)} of {num_between} pairs of nodes were measured: each node with "
            f"{len(fitting)} others, between one rank of each"
        )
    elif len(groups) == 1:
        note = f"one pair of ranks was measured ({len(ranks)} ranks on one node have {num_pairs} pairs)"
    return Schedule(tuple(each for each in (inside, *fitting) if each), note)


def _packed(pairs: Sequence[tuple[int, int]], node_of: Mapping[int, str]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return rounds of measurements: each pair of ranks is put in the first round in which both of its nodes are free."""
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[str]] = []
    for a, b in pairs:
        nodes = {node_of[a], node_of[b]}
        place = next((i for i, there in enumerate(busy) if not there & nodes), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append((a, b))
        busy[place] |= nodes
    return tuple(tuple(each) for each in rounds)


def _tournament(players: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Return rounds in which each player meets every other once, and at most one per round (the circle method)."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        met = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append(tuple((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


class PairError(Exception):
    """Two ranks could not be connected, or a message did not arrive.

    Attributes:
        has_ended: whether the connection was closed before the limit, as when the peer's process has ended.
    """

    def __init__(self, text: str, has_ended: bool = False) -> None:
        super().__init__(text)
        self.has_ended = has_ended


class Pair:
    """A gloo group of two ranks. Each pair has its own group, because a time-out in a gloo group ends all its connections.

    Both ranks must construct it.

    Args:
        store: the store of the world.
        key: prefix of the pair's keys in the store; used once.
        is_first: whether this is the lower rank.
        address: address of this host at which gloo listens.
        limit_s: limit for connecting, and for all messages together until :meth:`limit` sets another.

    Raises:
        PairError: there is no connection within the limit.
    """

    def __init__(self, store: dist.Store, key: str, is_first: bool, address: str, limit_s: float) -> None:
        self._peer = 1 if is_first else 0
        self.limit(limit_s)

        def make() -> Any:  # Any, because torch's type stubs of the group lack send and recv
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._threads = 1
            options._timeout = datetime.timedelta(seconds=limit_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            return dist.ProcessGroupGloo(dist.PrefixStore(key, store), 1 - self._peer, 2, options)

        try:
            self._group = within(limit_s + 1.0, "the store of the world", make)
        except (RuntimeError, WorldError) as error:
            is_over = time.monotonic() >= self._deadline - 0.1 * limit_s
            why = f"no connection at {address} within {limit_s:g} s" if is_over else f"{address}: {_first_line(error)}"
            raise PairError(why) from error

    def limit(self, limit_s: float) -> None:
        """Set a new time limit, for all further messages of this pair together."""
        self._deadline = time.monotonic() + limit_s

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor; return when gloo has accepted all of it.

        Raises:
            PairError: the limit has passed, or the connection was closed.
        """
        self._finish(lambda: self._group.send([tensor], self._peer, 0), tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive into a tensor of the sent size; raises like :meth:`send`."""
        self._finish(lambda: self._group.recv([tensor], self._peer, 0), tensor)

    def has_ended(self, limit_s: float) -> bool:
        """Return whether the peer has closed the connection. Ends this pair: gloo closes it when the limit has passed."""
        self.limit(limit_s)
        try:
            self.receive(torch.empty(1, dtype=torch.uint8))
        except PairError as error:
            return error.has_ended
        return False

    def _finish(self, begin: Any, tensor: torch.Tensor) -> None:
        left_s = self._deadline - time.monotonic()
        try:
            if left_s > 0:
                begin().wait(datetime.timedelta(seconds=max(left_s, 0.001)))
                return
        except RuntimeError as error:
            if time.monotonic() < self._deadline:
                raise PairError(f"{CONNECTED}not for long: {_first_line(error)}", has_ended=True) from error
        raise PairError(f"{CONNECTED}a message of {units.size(tensor.nbytes)} did not get through in time")


def lead(pair: Pair) -> dict[str, Any]:
    """Measure latency and bandwidth as the lower rank of a pair; return the measured fields of a ``MeasuredLink``.

    Raises:
        PairError: a message did not arrive.
    """
    latency_s = statistics.median(_exchange(pair, "echo", _SMALL_BYTES, 5)) / 2
    num = min(_SMALL_REPEATS, max(5, int(_SMALL_BUDGET_S / (2 * latency_s))))
    latencies = [took_s / 2 for took_s in _exchange(pair, "echo", _SMALL_BYTES, num)]
    latency_s = statistics.median(latencies)
    forward, forward_repeats = _bandwidth(pair, "take", latency_s)
    backward, backward_repeats = _bandwidth(pair, "give", latency_s)
    pair.send(torch.zeros(3, dtype=torch.int64))
    return {
        "latency_s": latency_s,
        "latency_repeats": len(latencies),
        "forward_bytes_per_s": forward,
        "forward_repeats": forward_repeats,
        "backward_bytes_per_s": backward,
        "backward_repeats": backward_repeats,
    }


def follow(pair: Pair) -> dict[str, Any]:
    """Answer the messages of :func:`lead` as the higher rank of a pair, until it ends; return {}, raise like :func:`lead`."""
    order = torch.zeros(3, dtype=torch.int64)
    pair.receive(order)
    while num := int(order[2]):
        receives, sends = _messages(_MODES[int(order[0])], int(order[1]))
        pair.send(order)
        for _ in range(num):
            pair.receive(receives)
            pair.send(sends)
        pair.receive(order)
    return {}


def _messages(mode: str, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors for an exchange: the message to the higher rank, and the message back."""
    whole, one = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    return (one if mode == "give" else whole), (one if mode == "take" else whole.clone())


def _exchange(pair: Pair, mode: str, num_bytes: int, num: int) -> list[float]:
    """Return the seconds of each message: to the higher rank and back ("echo"), only to it ("take"), or from it ("give")."""
    order = torch.tensor([_MODES.index(mode), num_bytes, num])
    pair.send(order)
    sends, receives = _messages(mode, num_bytes)
    pair.receive(order)  # the other rank is ready now
    found = []
    for _ in range(num):
        start = time.perf_counter()
        pair.send(sends)
        pair.receive(receives)
        found.append(time.perf_counter() - start)
    return found


def _bandwidth(pair: Pair, mode: str, latency_s: float) -> tuple[float, int]:
    """Return bytes per second, and the number of repeats. Messages grow until one takes long enough; latency is subtracted."""
    size, enough_s = _FIRST_BYTES, max(_LONG_ENOUGH_S, 10 * latency_s)
    took_s, num_repeats = _exchange(pair, mode, size, 1)[0], 1
    while took_s < enough_s and size < _MOST_BYTES:
        size = min(size * 4, _MOST_BYTES)
        took_s = _exchange(pair, mode, size, 1)[0]
    # On a slow link one message uses up the time budget, and is the only measurement.
    if took_s < _LARGE_BUDGET_S:
        num_repeats = max(1, min(_LARGE_REPEATS, int(_LARGE_BUDGET_S / took_s)))
        took_s = statistics.median(_exchange(pair, mode, size, num_repeats))
    return size / max(took_s - 2 * latency_s, took_s / 2), num_repeats


def _first_line(error: Exception) -> str:
    """Return the first sentence of a gloo error, without its source location."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0][:160]


def reductions(limit_s: float, sizes: Sequence[int]) -> Iterator[MeasuredReduction]:
    """Yield measurements of all_reduce as a training script would call it, in a world of ``gz.init`` that is left afterwards.

    Every rank must call it. The times are those of this rank.

    Args:
        limit_s: limit of connecting, and of each collective, in seconds.
        sizes: tensor sizes in bytes.

    Raises:
        UsageError, WorldError, RuntimeError: ``gz.init`` failed, or a rank was lost.
    """
    here = world.init(timeout_s=limit_s)
    try:
        backend = str(dist.get_backend())
        for num_bytes in sizes:
            yield _reduction(backend, True, here.device, num_bytes, None)
        if backend == SHARED_MEMORY and here.num_nodes == 1 and here.size > 1:
            gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=limit_s))
            for num_bytes in sizes:
                yield _reduction("gloo", False, here.device, num_bytes, gloo)
            dist.destroy_process_group(gloo)
    finally:
        world.shutdown()


def _reduction(
    backend: str, is_default: bool, device: torch.device, num_bytes: int, group: dist.ProcessGroup | None
) -> MeasuredReduction:
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(2):  # the first call creates connections and memory
        once()
    # All ranks must repeat equally often, so the time of the slowest rank determines the number of repeats.
    slowest = torch.tensor([once()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    num_repeats = max(3, min(_MOST_REDUCTIONS, int(_REDUCTIONS_BUDGET_S / max(slowest.item(), 1e-6))))
    return MeasuredReduction(
        backend, is_default, device.type, num_bytes, statistics.median(once() for _ in range(num_repeats)), num_repeats
    )

"""Measuring the link between two ranks, and which pairs are measured when.

One TCP connection with large buffers, which is how gloo sends too. A large message counts from its first byte to the
answer of who received it, so that what lies in buffers is not taken for sent.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang import units
from guozhuang.check.wire import Line, answer, call

#: A pair that takes longer is given up.
PAIR_LIMIT_S = 6.0
#: How a failure begins where the connection was made.
CONNECTED = "connected, but "
_SMALL_BYTES = 8
_SMALL_REPEATS, _SMALL_BUDGET_S = 100, 0.05
_FIRST_BYTES, _MOST_BYTES = 64 << 10, 16 << 20
_LONG_ENOUGH_S = 0.008  # a message that takes longer is not measured with a larger one
_LARGE_REPEATS, _LARGE_BUDGET_S = 5, 0.25
#: More rounds than this would take longer than a check may.
MAX_ROUNDS = 30
_MAX_PAIRS_OF_RANKS = 240


@dataclass(frozen=True)
class Schedule:
    """Which pairs are measured at the same time.

    Attributes:
        rounds: in each, no node takes part in two pairs.
        note: what was left out and why; "" if nothing was.
    """

    rounds: tuple[tuple[tuple[int, int], ...], ...]
    note: str = ""


def schedule(node_of: Mapping[int, str], max_rounds: int = MAX_ROUNDS) -> Schedule:
    """Every pair of ranks; where that takes too many rounds one pair per pair of nodes, and of those as many as fit. Pure.

    Args:
        node_of: the node of each rank.
        max_rounds: how many rounds there may be.
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
    # A pair inside each node costs one round, because nodes do not disturb each other.
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
    """Each pair goes to the first round in which both of its nodes are free."""
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
    """Everybody meets everybody once, each at most once a round (the circle method)."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        met = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append(tuple((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def measure_as_caller(address: str, port: int, word: str, limit_s: float) -> dict[str, Any]:
    """The lower rank of a pair: connect, then lead. Return the fields of a ``Link`` that were measured.

    Raises:
        OSError: the other rank cannot be reached, or fell silent.
    """
    deadline = time.monotonic() + limit_s
    line = call(address, port, limit_s, word=word)
    try:
        caller = _Caller(line, deadline)
        latency_s = statistics.median(caller.exchange("echo", _SMALL_BYTES, 5)) / 2
        num = min(_SMALL_REPEATS, max(5, int(_SMALL_BUDGET_S / (2 * latency_s))))
        latencies = [took_s / 2 for took_s in caller.exchange("echo", _SMALL_BYTES, num)]
        latency_s = statistics.median(latencies)
        forward, forward_repeats = _bandwidth(caller, "take", latency_s)
        backward, backward_repeats = _bandwidth(caller, "give", latency_s)
        line.send(num=0)
    finally:
        line.close()
    return {
        "latency_s": latency_s,
        "latency_repeats": len(latencies),
        "forward_bytes_per_s": forward,
        "forward_repeats": forward_repeats,
        "backward_bytes_per_s": backward,
        "backward_repeats": backward_repeats,
    }


def measure_as_called(listener: socket.socket, word: str, limit_s: float) -> None:
    """The higher rank of a pair: wait for the other and do as it says.

    Raises:
        OSError: it did not come, or fell silent.
    """
    deadline = time.monotonic() + limit_s
    line, _ = answer(listener, word, limit_s)
    try:
        connection = line.connection
        buffer = memoryview(bytearray(_MOST_BYTES))
        while (said := line.receive(_left_s(deadline)))["num"]:
            whole, one = buffer[: said["size"]], buffer[:1]
            receives, sends = {"echo": (whole, whole), "take": (whole, one), "give": (one, whole)}[said["mode"]]
            _send(connection, one, deadline)
            for _ in range(said["num"]):
                _receive(connection, receives, deadline)
                _send(connection, sends, deadline)
    finally:
        line.close()


class _Caller:
    """The leading end of a pair's connection."""

    def __init__(self, line: Line, deadline: float) -> None:
        self._line = line
        self._deadline = deadline
        self._buffer = memoryview(bytearray(_MOST_BYTES))

    def exchange(self, mode: str, size: int, num: int) -> list[float]:
        """Time messages of ``size`` bytes: to and fro ("echo"), to the other ("take") or from it ("give"), in seconds."""
        connection, one, whole = self._line.connection, self._buffer[:1], self._buffer[:size]
        sends, receives = {"echo": (whole, whole), "take": (whole, one), "give": (one, whole)}[mode]
        found = []
        try:
            self._line.send(_left_s(self._deadline), mode=mode, size=size, num=num)
            _receive(connection, one, self._deadline)  # it has read the line, and nothing of what follows
            for _ in range(num):
                start = time.perf_counter()
                _send(connection, sends, self._deadline)
                _receive(connection, receives, self._deadline)
                found.append(time.perf_counter() - start)
        except TimeoutError:
            text = f"{CONNECTED}a message of {units.size(size)} did not get through in time"
            raise TimeoutError(text) from None
        except OSError as error:
            raise ConnectionError(f"{CONNECTED}not for long: {error}") from error
        return found


def _bandwidth(caller: _Caller, mode: str, latency_s: float) -> tuple[float, int]:
    """(bytes per second, repeats). The messages grow until one takes long enough; the way to and fro is not counted."""
    size, enough_s = _FIRST_BYTES, max(_LONG_ENOUGH_S, 10 * latency_s)
    took_s, num_repeats = caller.exchange(mode, size, 1)[0], 1
    while took_s < enough_s and size < _MOST_BYTES:
        size = min(size * 4, _MOST_BYTES)
        took_s = caller.exchange(mode, size, 1)[0]
    # A link so slow that one message takes up the time is known by that one.
    if took_s < _LARGE_BUDGET_S:
        num_repeats = max(1, min(_LARGE_REPEATS, int(_LARGE_BUDGET_S / took_s)))
        took_s = statistics.median(caller.exchange(mode, size, num_repeats))
    return size / max(took_s - 2 * latency_s, took_s / 2), num_repeats


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _send(connection: socket.socket, data: memoryview, deadline: float) -> None:
    connection.settimeout(_left_s(deadline))
    connection.sendall(data)  # the time is for all of it


def _receive(connection: socket.socket, into: memoryview, deadline: float) -> None:
    done = 0
    while done < len(into):
        connection.settimeout(_left_s(deadline))  # of each piece: a link that trickles is never silent for long
        got = connection.recv_into(into[done:])
        if not got:
            raise ConnectionError("the connection ended")
        done += got

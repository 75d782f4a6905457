"""The slow tests in parts of about the same length, of which CI runs one after each `make test`.

A unit is a test function with all its parameters: its cases share ranks. Units go to the shard that has the least so far, the
longest unit first, by the seconds in slow_durations.tsv. `make test-slow SHARD=3 NOTE=yes` writes what they took there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from pathlib import Path

NUM_SHARDS = 12
DURATIONS = Path(__file__).with_name("slow_durations.tsv")
# Of a unit that nobody has timed yet, by what it is made of.
_GUESSED_S = {"hosts": 30.0, "processes": 15.0}


def unit(nodeid: str) -> str:
    """The test function of a test."""
    return nodeid.partition("[")[0]


def durations() -> dict[str, float]:
    """Seconds of each unit that was timed: its cases one after the other."""
    if not DURATIONS.exists():
        return {}
    rows = (line.split("\t") for line in DURATIONS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in rows}


def shard_of(units: Collection[str], number: int) -> set[str]:
    """The units of a shard.

    Raises:
        ValueError: there is no shard of this number.
    """
    if not 1 <= number <= NUM_SHARDS:
        raise ValueError(f"there is no shard {number}: they are 1 to {NUM_SHARDS}")
    return assigned(units, durations())[number - 1]


def assigned(units: Collection[str], took_s: Mapping[str, float]) -> list[set[str]]:
    """The units of each shard."""
    lengths = {name: took_s.get(name, _guessed_s(name)) for name in units}
    shards: list[set[str]] = [set() for _ in range(NUM_SHARDS)]
    loads = [(0.0, index) for index in range(NUM_SHARDS)]
    for name in sorted(units, key=lambda name: (-lengths[name], name)):
        load_s, index = heapq.heappop(loads)
        shards[index].add(name)
        heapq.heappush(loads, (load_s + lengths[name], index))
    return shards


def note(took_s: Mapping[str, float]) -> None:
    """Keep what units took, beside what is known of others."""
    known = durations() | {name: round(seconds, 1) for name, seconds in took_s.items()}
    DURATIONS.write_text("".join(f"{seconds:.1f}\t{name}\n" for name, seconds in sorted(known.items())))


def _guessed_s(name: str) -> float:
    return next((seconds for folder, seconds in _GUESSED_S.items() if f"/{folder}/" in name), 5.0)

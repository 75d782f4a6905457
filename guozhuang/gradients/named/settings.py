"""The settings of an engine, and what may change some of them while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Knobs:
    """What a tuner may change; the fields are those of ``Settings``.

    Attributes:
        fusion_threshold_bytes: of one fused operation; 0: nothing is fused.
        cycle_time_ms: between two rounds; None: as bytes and waiting ask.
        use_cache: whether requests are remembered.
    """

    fusion_threshold_bytes: int
    cycle_time_ms: float | None
    use_cache: bool


class Tuner(Protocol):
    """Turns what was observed into knobs. It lives on rank 0 of the world."""

    def observe(self, names: Iterable[str], num_bytes: int, seconds: float) -> Knobs | None:
        """Learn of one round of the world's channel that moved something.

        Args:
            names: of what was reduced or moved in it. A step may take one round or many; in the next one names come again.
            num_bytes: that were reduced or moved in it, of this rank's tensors.
            seconds: since the end of the last such round, so with all that was computed in between.

        Returns:
            New knobs, which all ranks take in the same round soon after; None to go on as before.
        """
        ...


class Autotune(Protocol):
    """How a tuner is made."""

    def check(self) -> None:
        """Raise UsageError where no tuner could be made; called on every rank, before any waits, in the caller's thread."""
        ...

    def make(self, settings: Settings) -> Tuner:
        """Make the tuner, on rank 0; UsageError if that fails."""
        ...


@dataclass(frozen=True)
class Settings:
    """How an engine works. Equal on all ranks.

    Attributes:
        fusion_threshold_bytes: of small tensors that travel as one; 0: none do.
        cycle_time_ms: between two rounds. None: a round begins when somebody waits, when enough bytes came together (4 MiB the
            first time, then 25 MiB), or when what was submitted first has waited for 100 ms.
        cache_capacity: how many requests are remembered, so that a repeated one costs a byte; 0: none.
        fuse_groups: whether a grouped operation may travel with others.
        stall_check: whether what waits for long is reported.
        stall_warning_s: after how many seconds, and how often from then on.
        stall_stop_s: after how many seconds everything fails; 0: after the time-out of the group, 30 minutes at least.
        autotune: makes what searches for the first three while the job runs; rank 0 decides for all.
    """

    fusion_threshold_bytes: int = 128 << 20
    cycle_time_ms: float | None = None
    cache_capacity: int = 1024
    fuse_groups: bool = True
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_stop_s: float = 0.0
    autotune: Autotune | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_threshold_bytes", "cycle_time_ms", "cache_capacity", "stall_warning_s", "stall_stop_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative (got {value!r})")

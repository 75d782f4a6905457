"""The settings of an engine, and the interface of a tuner that may change some of them while the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Knobs(NamedTuple):
    """The settings that a tuner may change; see the fields of ``Settings``.

    Attributes:
        fusion_threshold_bytes: most bytes of one fused operation; 0: nothing is fused.
        cycle_time_ms: time between the beginnings of two rounds; None: see ``Settings``.
        use_cache: whether requests that were made before are sent as numbers.
    """

    fusion_threshold_bytes: int
    cycle_time_ms: float | None
    use_cache: bool


class Tuner(Protocol):
    """Chooses ``Knobs`` from measurements of rounds. Only rank 0 of the world has a tuner."""

    def observe(self, names: Iterable[str], num_bytes: int, seconds: float) -> Knobs | None:
        """Measure one round of the world's channel in which data was sent.

        Args:
            names: names of the collectives of that round. A training step may take one round or many; a repeated name
                shows that the next step has begun.
            num_bytes: size of this rank's tensors in them.
            seconds: time since the end of the last such round, including computation between the two.

        Returns:
            New knobs, which all ranks apply in the same later round; None to keep the present ones.
        """
        ...


@dataclass(frozen=True)
class Settings:
    """The settings of an engine, which must be equal on all ranks.

    Attributes:
        fusion_threshold_bytes: most bytes of small tensors that are sent as one; 0: each is sent by itself.
        cycle_time_ms: time between the beginnings of two rounds. None: a round begins when a thread waits or polls, when 25 MiB
            were submitted, or when the oldest submission has waited for 100 ms.
        cache_capacity: number of requests that are remembered; a repeated one is sent as a number. 0: none is remembered.
        fuse_groups: whether a grouped operation may be fused with others.
        stall_check: whether collectives that wait for long are reported.
        stall_warning_s: seconds before the first report of a collective, and between further ones.
        stall_stop_s: seconds of waiting after which everything fails; 0: the time-out of the group, at least 30 minutes.
        autotune: called on rank 0, makes the tuner that searches for the first three settings while the job runs; it raises
            UsageError if it cannot. None: they are fixed.
    """

    fusion_threshold_bytes: int = 128 << 20
    cycle_time_ms: float | None = None
    cache_capacity: int = 1024
    fuse_groups: bool = True
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_stop_s: float = 0.0
    autotune: Callable[[Settings], Tuner] | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_threshold_bytes", "cycle_time_ms", "cache_capacity", "stall_warning_s", "stall_stop_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative (got {value!r})")

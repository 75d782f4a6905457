"""The settings of an engine, and what may change some of them while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class AutotuneSettings:
    """How threshold, cycle and cache are searched for while the job runs; rank 0 decides for all.

    Attributes:
        log: a file for a line per sample; None for none.
        warmup_samples: that are thrown away.
        steps_per_sample: of training, that make one score; five scores make a sample.
        max_samples: when to stop with the best.
        noise: what the Gaussian process takes for noise, between 0 and 1.
        fixed: names of fields of ``Knobs`` that the user has chosen and that stay.
    """

    log: str | None = None
    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8
    fixed: frozenset[str] = field(default_factory=frozenset)


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
    """Turns what was observed into knobs. It lives on rank 0 of the world; ``autotune.make_tuner(settings)`` makes it."""

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
        autotune: whether, and how, the first three are searched for.
    """

    fusion_threshold_bytes: int = 128 << 20
    cycle_time_ms: float | None = None
    cache_capacity: int = 1024
    fuse_groups: bool = True
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_stop_s: float = 0.0
    autotune: AutotuneSettings | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_threshold_bytes", "cycle_time_ms", "cache_capacity", "stall_warning_s", "stall_stop_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative (got {value!r})")

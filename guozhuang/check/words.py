"""How a check names ranks, hosts and speeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from guozhuang import units

_MOST = 6


def listed(names: Iterable[str]) -> str:
    """``a, b and c``, each once; of many the first few and how many more."""
    all_names = list(dict.fromkeys(names))
    if len(all_names) > _MOST:
        return f"{', '.join(all_names[:_MOST])} and {len(all_names) - _MOST} more"
    return " and ".join(filter(None, [", ".join(all_names[:-1]), *all_names[-1:]]))


def ranks_text(ranks: Sequence[int]) -> str:
    """``Rank 3`` or ``Ranks 3 to 5 and 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"Rank{'s' * (len(ranks) > 1)} {listed(parts)}"


def speed(bytes_per_s: float | None) -> str:
    """Bandwidth: ``11.8 MB/s``, ``1.24 GB/s``; decimal, as networks are sold."""
    if bytes_per_s is None:
        return units.ABSENT
    value, unit = bytes_per_s / 1e6, "MB/s"
    if value >= 999.5:
        value, unit = value / 1e3, "GB/s"
    return (
        f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"
    )


def card_speed(mbit_per_s: int | None) -> str:
    """A card's own word: ``100 Gbit/s``."""
    if mbit_per_s is None:
        return ""
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s} Mbit/s"


def short_time(seconds: float | None) -> str:
    """A latency: ``14.2 µs``, ``1.31 ms``."""
    if seconds is None:
        return units.ABSENT
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    return units.duration(seconds)

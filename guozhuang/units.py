"""Formats numbers, ranks and names for people: one form per kind, the same in the terminal and in the report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
ABSENT = DASH


def rate(value: float | None) -> str:
    """Format samples per second with three digits: ``7.25``, ``81.4``, ``1,234``."""
    return ABSENT if value is None else _three_digits(value)


def span(lowest: float, highest: float) -> str:
    """Format a range of rates: ``81.4 - 90.2`` with an en dash; ``ABSENT`` if both ends are the same."""
    return ABSENT if lowest == highest else f"{rate(lowest)} {DASH} {rate(highest)}"


def size(num_bytes: float | None) -> str:
    """Format bytes in binary units: ``0 B``, ``17.4 MiB``."""
    if num_bytes is None:
        return ABSENT
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def duration(seconds: float | None) -> str:
    """Format a time in the unit that reads best: ``8.31 s``, ``2 min 5 s``, ``3 h 20 min``."""
    if seconds is None:
        return ABSENT
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def milliseconds(seconds: float | None) -> str:
    """Format a time in milliseconds without the unit: ``12.3``."""
    return ABSENT if seconds is None else _three_digits(seconds * 1e3)


def times(ratio: float | None) -> str:
    """Format a ratio: ``1.84×``."""
    return ABSENT if ratio is None else f"{ratio:.2f}{TIMES}"


def percent(share: float | None) -> str:
    """Format a share (0 to 1) in percent: ``93 %``."""
    return ABSENT if share is None else f"{share * 100:.0f} %"


def metric(name: str, value: float | None) -> str:
    """Format a metric of the workload: an accuracy in percent, any other with four significant digits."""
    if value is None:
        return ABSENT
    return f"{value * 100:.1f} %" if name.startswith("accuracy") else f"{value:.4g}"


def tiny(value: float | None) -> str:
    """Format a small difference: ``0`` if it is exactly zero, else ``1.2e-07`` or ``0.15``."""
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.2g}" if 0.01 <= abs(value) < 100 else f"{value:.1e}"


def speed(bytes_per_s: float | None) -> str:
    """Format a bandwidth: ``11.8 MB/s``, ``1.24 GB/s``; in decimal units, as networks are sold."""
    if bytes_per_s is None:
        return ABSENT
    value, unit = bytes_per_s / 1e6, "MB/s"
    if value >= 999.5:
        value, unit = value / 1e3, "GB/s"
    return (
        f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"
    )


def card_speed(mbit_per_s: int | None) -> str:
    """Format the nominal speed that a network card reports: ``100 Gbit/s``."""
    if mbit_per_s is None:
        return ""
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s} Mbit/s"


def short_time(seconds: float | None) -> str:
    """Format a latency: ``14.2 µs``, ``1.31 ms``."""
    if seconds is None:
        return ABSENT
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    return duration(seconds)


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return ``a, b and c``, each name once; if there are more than ``most``, the first ones and the number of the rest."""
    all_names = list(dict.fromkeys(names))
    if len(all_names) > most:
        return f"{', '.join(all_names[:most])} and {len(all_names) - most} more"
    return " and ".join(filter(None, [", ".join(all_names[:-1]), *all_names[-1:]]))


def name_parts(name: str) -> list[str]:
    """Return the parts of a strategy's name between which a line may end: "low-", "precision-", "decentralized@", "gloo"."""
    return re.findall(r"[^-@,: ]+[-@,: ]?|[-@,: ]", name)


def wrapped_name(name: str, most: int) -> str:
    """Return a strategy's name in lines of at most ``most`` characters, if its parts are no longer than that."""
    lines = [""]
    for part in name_parts(name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def merged(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return each distinct text once, with the ranks that gave it, ordered by their lowest rank."""
    found: dict[str, list[int]] = {}
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return [(ranks, text) for text, ranks in found.items()]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, run)) for run in runs)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def terminal_table(title: str, headings: Sequence[str], num_left: int, *, no_wrap: bool = False) -> Table:
    """Return an empty table that ``rich`` can print in the terminal.

    Args:
        title: printed above it.
        headings: the headings of the columns.
        num_left: number of first columns that are aligned at the left; numbers stand at the right.
        no_wrap: keep each cell in one line.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_left else "right", vertical="bottom", no_wrap=no_wrap)
    return table


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text that can be printed: bytes of a name that are no text are shown as ``\\xe9``."""
    return os.fsencode(path).decode(errors="backslashreplace")

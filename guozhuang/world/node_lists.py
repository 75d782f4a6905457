"""Parsers of Slurm's short forms of lists: of nodes, ``gpu[001-003,7],x5``, and of counts, ``2(x2),1``. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator

from guozhuang.errors import UsageError, explain

# The most names or numbers that a list may have, more than any cluster has: a damaged list must not fill the memory.
_MOST = 1 << 20
_NUM_PORTS = 1 << 16
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_FIX = "it should be as Slurm set it; unset the SLURM_ variables if srun did not start this process"


def expand(text: str) -> list[str]:
    """Return the node names of a Slurm node list, as ``scontrol show hostnames`` prints them.

    Args:
        text: names with commas between them; ``[...]`` in a name holds numbers and ranges, leading zeros are kept. A name may
            have several brackets, of which the last varies fastest.

    Raises:
        UsageError: the list cannot be read.
    """
    names: list[str] = []
    for part in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any("[" in piece or "]" in piece for piece in pieces[0::2]):
            raise UsageError(explain("this list of Slurm nodes cannot be read", value=text, fix=_FIX))
        found = [pieces[0]]
        for inside, after in zip(pieces[1::2], pieces[2::2], strict=True):
            numbers = list(_numbers(inside, text))
            if (len(found) * len(numbers)) + len(names) > _MOST:
                raise UsageError(explain("this list of Slurm nodes has too many names", value=text, fix=_FIX))
            found = [before + number + after for before in found for number in numbers]
        names += found
    return names


def counts(text: str) -> list[int]:
    """Return the numbers of a Slurm list of counts: 2, 2, 1 for ``2(x2),1``.

    Raises:
        UsageError: the list cannot be read.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or not times or len(found) + times > _MOST:
            raise UsageError(explain("this list of counts of Slurm cannot be read", value=text, fix=_FIX))
        found += [int(match[1])] * times
    return found


def ports(text: str) -> list[int]:
    """Return the TCP ports of a list such as ``12000-12003,12008`` (SLURM_STEP_RESV_PORTS).

    Raises:
        UsageError: the list cannot be read.
    """
    found = []
    for number in _numbers(text.strip("[]"), text):
        if not 0 < int(number) < _NUM_PORTS:
            raise UsageError(explain(f"a TCP port must be below {_NUM_PORTS}, and above 0", value=text, fix=_FIX))
        found.append(int(number))
    return found


def _split(text: str) -> list[str]:
    """Split a Slurm list of nodes at the commas outside of brackets."""
    return re.split(r",(?![^\[\]]*\])", text)


def _numbers(inside: str, whole: str) -> Iterator[str]:
    """Yield the numbers of a list of numbers and ranges: 001, 002, 003, 7 for "001-003,7"."""
    for part in inside.split(","):
        match = _NUMBERS.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MOST:
            raise UsageError(explain(f"the range {part!r} in a list of Slurm cannot be read", value=whole, fix=_FIX))
        width = len(match[1])
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))

"""What the code between the parts of a model decides by their outputs: each microbatch has to decide alike.

One process decides once, for the whole batch. Where all microbatches decide alike, as they do where a guard against NaN stays
silent, that is taken for its decision; where they do not, some of them go another way than one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ....errors import UsageError, explain
from ...running import running_frames

_OURS = f"{__name__.partition('.')[0]}."


class Line(NamedTuple):
    """A line of the script or of a library that it uses."""

    file: str
    number: int


def reading_line() -> Line | None:
    """Return the line outside of PyTorch and of this package that runs; None if there is none."""
    for frame in running_frames():
        if not frame.f_globals.get("__name__", "").startswith(("torch.", _OURS)):
            return Line(frame.f_code.co_filename, frame.f_lineno)
    return None


class Decisions:
    """Compares what microbatches decide on some lines.

    Args:
        lines: those that were seen to read outputs of parts of the model.
    """

    def __init__(self, lines: frozenset[Line]) -> None:
        self._lines = lines
        self._first: list[tuple[Line, bool]] = []

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Hold in the forward of a microbatch.

        Args:
            number: of the microbatch; the first one is what others are compared with.

        Raises:
            UsageError: it has decided otherwise than the first one; the text names the line.
        """
        if not self._lines:
            yield
            return
        seen: list[tuple[Line, bool]] = []
        with _SeesDecisions(self._lines, seen):
            yield
        if number == 0:
            self._first = seen
        elif seen != self._first:
            pairs = zip(self._first, seen, strict=False)
            (line, _), _ = next((pair for pair in pairs if pair[0] != pair[1]), ((*self._first, *seen)[-1], None))
            what = f"the model's forward decides by values of the batch, and microbatches 0 and {number} decide differently"
            fix = "give --microbatches 1 (microbatches=1), compute both ways and take torch.where, or choose another strategy"
            raise UsageError(explain(what, value=f"{line.file}:{line.number}", fix=fix))


class _SeesDecisions(TorchFunctionMode):
    """Lists the truth values that some lines take of tensors."""

    def __init__(self, lines: frozenset[Line], seen: list[tuple[Line, bool]]) -> None:
        super().__init__()
        self._lines, self._seen = lines, seen

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        line = reading_line() if func is Tensor.__bool__ else None
        if line is not None and line in self._lines:
            self._seen.append((line, found))
        return found

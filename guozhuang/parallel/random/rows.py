"""Which dims of a random draw are rows of the batch: found by two looks at the model under different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import UsageError, explain

# The dims whose size is a multiple of the number of rows, each with that multiple.
Pattern = tuple[tuple[int, int], ...]
Draw = tuple[str, torch.Size]


class RowDims:
    """What is known of the draws of a model: which of their dims are rows.

    Attributes:
        saw_draws: whether the model drew anything in the last look.

    A dim of which rows are a factor, like (rows * heads, tokens, tokens), is taken to have rows as its outer factor.
    """

    def __init__(self) -> None:
        self.saw_draws = False
        # The first of two looks.
        self._look: tuple[int, list[Draw]] | None = None
        self._patterns: dict[tuple[str, int], set[Pattern]] = {}
        # Each draw's shape with a size of None where rows are.
        self._templates: dict[tuple[str, int], set[tuple[Pattern, tuple[int | None, ...]]]] = {}

    def look(self, num_rows: int, draws: Sequence[Draw]) -> None:
        """Learn from the draws that a run of the model made with this number of rows. Two looks, with other numbers, tell."""
        self.saw_draws = bool(draws)
        if self._look is None:
            self._look = (num_rows, list(draws))
            return
        (few, first), (many, second) = self._look, (num_rows, draws)
        self._look = None
        assert few != many, "two looks at the same number of rows tell nothing"
        if [(name, len(shape)) for name, shape in first] != [(name, len(shape)) for name, shape in second]:
            what = f"the model makes other random draws for {many} rows ({len(second)}) than for {few} ({len(first)})"
            raise UsageError(explain(what, fix="train it without a pipeline, or let each batch take the same way"))
        for (name, shape), (_, other) in zip(first, second, strict=True):
            pattern = []
            for dim, (size, other_size) in enumerate(zip(shape, other, strict=True)):
                if size != other_size:
                    if size % few or other_size % many or size // few != other_size // many:
                        what = f"the size of a random draw ({name}) is no multiple of the number of rows in dim {dim}"
                        value = f"{tuple(shape)} for {few} rows, {tuple(other)} for {many}"
                        raise UsageError(explain(what, value=value, fix="train the model without a pipeline"))
                    pattern.append((dim, size // few))
            key, dims = (name, len(shape)), {dim for dim, _ in pattern}
            template = tuple(None if dim in dims else size for dim, size in enumerate(shape))
            self._patterns.setdefault(key, set()).add(tuple(pattern))
            self._templates.setdefault(key, set()).add((tuple(pattern), template))

    def forget_look(self) -> None:
        """Begin again with the first of two looks: the model has failed in one."""
        self._look = None

    def of(self, name: str, shape: torch.Size, num_rows: int) -> Pattern:
        """Return which dims of a draw are rows.

        Args:
            name: of the operation.
            shape: of the draw, for a microbatch.
            num_rows: of the microbatch.

        Raises:
            UsageError: the shape leaves it open.
        """
        key = (name, len(shape))
        known = self._patterns.get(key)
        if known is None:
            alike = [dim for dim, size in enumerate(shape) if size == num_rows]
            if len(alike) == 1 or not shape:
                return tuple((dim, 1) for dim in alike)
        else:
            found = {each for each in known if all(shape[dim] == factor * num_rows for dim, factor in each)}
            if len(found) > 1:
                exact = {
                    pattern
                    for pattern, template in self._templates[key]
                    if pattern in found and all(want in (None, got) for want, got in zip(template, shape, strict=True))
                }
                found = exact or found
            if len(found) == 1:
                return found.pop()
        what = f"it cannot be told which dim of a random draw ({name}) is rows, in a microbatch of {num_rows}"
        fix = "train the model without a pipeline, or with microbatches of another number of rows"
        raise UsageError(explain(what, value=tuple(shape), fix=fix))

"""Counts the training forwards whose backward never came: what a rank leaves out that skips a batch.

[Note: forwards without a backward] A rank that skips a batch (``continue`` on NaN) has made as many backwards and optimizer
steps as the others, and one more forward. So the number of forwards without a backward tells. A forward is known to be without
one if its outputs have been freed and no gradient has come to them, or if a whole step has passed and none has come; a gradient
that comes later takes that back. Forwards that share one backward are no such case, however many there are. Neither are
forwards in evaluation mode or without gradients, and those that do not average gradients: one rank may make them alone.
One rank may keep outputs longer than others do, so that its number rises a step later, and before the first backward of several
there are forwards that wait for theirs. So ranks differ only if both numbers do: that of forwards left out, and that of all
forwards without a backward.
"""

from __future__ import annotations

import weakref


class Awaited:
    """One forward, as its outputs' hooks remember it."""

    def __init__(self, number: int, born: int) -> None:
        self.number, self.born, self.is_counted = number, born, False


class AwaitedBackwards:
    """The forwards of one model whose backward has not come. See [Note: forwards without a backward]."""

    def __init__(self) -> None:
        self._open: dict[int, weakref.ref[Awaited]] = {}
        self._num_made = self._num_steps = self._num_left_out = 0

    def add(self) -> Awaited:
        """Return what the hooks of a new forward's outputs keep, and hand to :meth:`came`."""
        self._num_made += 1
        made = Awaited(self._num_made, self._num_steps)
        self._open[made.number] = weakref.ref(made)
        return made

    def came(self, forward: Awaited) -> None:
        """Record that a gradient came to an output of this forward."""
        if self._open.pop(forward.number, None) is None and forward.is_counted:
            forward.is_counted = False
            self._num_left_out -= 1

    def stepped(self) -> None:
        """Record that a backward has averaged gradients, or a step has."""
        self._num_steps += 1

    def counts(self) -> tuple[int, int]:
        """Return the number of forwards whose backward will not come, as far as can be told, and of all without a backward."""
        for number, reference in list(self._open.items()):
            forward = reference()
            if forward is None or forward.born < self._num_steps:
                del self._open[number]
                self._num_left_out += 1
                if forward is not None:
                    forward.is_counted = True
        return self._num_left_out, self._num_left_out + len(self._open)

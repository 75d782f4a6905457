"""Tells whether gradients were changed between the last backward and the step, where a change would go wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import UsageError, explain


class SeenGradients:
    """The gradients of some parameters as they were when this package last saw them in a step.

    [Note: changed gradients] Under ``sharded`` ``p.grad`` is the rank's own gradient, and the step averages it. A function that
    is not linear (a limit by value, a sign, a scale that depends on the gradient) gives something else of a rank's gradient
    than of the mean. So a gradient that is another tensor, or has another version, than after the last backward is refused by
    name. A gradient that is None or zeros was dropped, which is linear. ``p.grad.data.mul_()`` and ``GradScaler.unscale_``,
    whose scale is the same everywhere, leave the version as it is.

    Args:
        names: names of the parameters, for errors.
        parameters: the parameters.
        rank: this rank, for errors.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], rank: int) -> None:
        self._names, self._parameters, self._rank = names, parameters, rank
        self.forget()

    def forget(self) -> None:
        """Begin a new step: no gradient was seen."""
        # By parameter: version and identity. Tensors are not held, for carriers count who refers to them.
        self._seen: list[tuple[int, int] | None] = [None] * len(self._parameters)

    @property
    def has_any(self) -> bool:
        """Whether a gradient was seen in this step."""
        return any(seen is not None for seen in self._seen)

    def note(self, index: int) -> None:
        """See a gradient as it is now."""
        gradient = self._parameters[index].grad
        self._seen[index] = None if gradient is None else (gradient._version, id(gradient))

    def note_all(self) -> None:
        """See all gradients as they are now."""
        for i in range(len(self._parameters)):
            self.note(i)

    def is_other(self, index: int) -> bool:
        """Whether a gradient was seen, and is gone or was changed since."""
        gradient, seen = self._parameters[index].grad, self._seen[index]
        return seen is not None and (gradient is None or seen != (gradient._version, id(gradient)))

    def check(self) -> None:
        """Raise if a gradient was changed since it was seen. See [Note: changed gradients].

        Raises:
            UsageError: it names the first such parameter.
        """
        for i, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or not self.is_other(i):
                continue
            if not gradient.detach().any():
                continue
            what = (
                f"the gradient of {self._names[i]} was changed after the last backward; it is the gradient of this rank "
                "alone, so that the step would use the mean of what ranks have made of theirs"
            )
            fix = "change gradients inside `with gz.averaged_gradients(model):`, or clip by gz.clip_grad_norm_"
            raise UsageError(explain(what, rank=self._rank, fix=fix))

"""The optimizer of a divided model: the user's own, which all ranks that hold one copy of the model step or skip together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..parallel.guard import as_plain
from ..parallel.proof import before_step
from ..parallel.state import gather_optimizer_states
from ..world.devices import device_of
from .whole_matrices import joined
from .wrapped import WrappedOptimizer


class DividedOptimizer(WrappedOptimizer):
    """Lets the user's optimizer step this rank's parts of the parameters. Its state is whole, with the whole model's indices.

    Args:
        inner: the user's optimizer.
        peers: the groups of the ranks that hold one copy of the model together.
        needs_whole: whether the optimizer steps whole matrices, see [Note: the keeper of a matrix] in whole_matrices.py.
        meet: called before the collectives of ``state_dict()``, with the name of the call.
    """

    def __init__(
        self,
        inner: Optimizer,
        peers: Sequence[dist.ProcessGroup],
        needs_whole: bool = False,
        meet: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.wrap(inner, moves_state_hooks=False)
        self.peers, self._needs_whole = tuple(peers), needs_whole
        gather_optimizer_states(inner, meet)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this rank's parts, as the user's optimizer keeps it."""
        return self.inner.state

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Step this rank's parts.

        Args:
            closure: passed to the user's optimizer.
            grad_scaler: passed by ``torch.amp.GradScaler.step``: if a rank finds a gradient that is not finite, all skip. Every
                rank must call it.

        Returns:
            The result of ``closure``, else None.
        """
        before_step()
        parameters: list[list[Any]] = [group["params"] for group in self.param_groups]
        if grad_scaler is not None:
            held: list[Tensor] = [p for some in parameters for p in some]
            gradients = [p.grad for p in held if p.grad is not None]
            device = device_of(held)
            if not self.unscale_together(grad_scaler, gradients, device, self.peers):
                self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before prepare()
                return None
        loss = None
        if self._needs_whole and closure is not None:  # its gradients are there before they travel
            with torch.enable_grad():
                loss, closure = closure(), None
        whole = joined(parameters) if self._needs_whole else contextlib.nullcontext(parameters)
        held = [p for group in self.param_groups for p in group["params"]]
        # A closure is the script's own code, which may read what it likes.
        plain = as_plain(held) if closure is None else contextlib.nullcontext()
        with whole as stepped, self.inner_holds(stepped), plain:
            found = self.inner.step() if closure is None else self.inner.step(closure)
        return found if loss is None else loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as in ``torch.optim``."""
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the format of ``torch.optim``. Every rank must call it."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state. Every rank must call it."""
        self.inner.load_state_dict(state_dict)

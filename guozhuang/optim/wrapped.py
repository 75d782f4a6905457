"""The base class of optimizers that wrap the user's own optimizer and let it make the steps.

[Note: one scale for all ranks] ``torch.amp.GradScaler`` keeps a flag "infinity found" in tensors of its own, and adapts its
scale by it in ``update()``. So if one rank found an infinity in its part, the flag must be set in the scalers of all ranks:
all step or all skip. PyTorch passes the scaler to ``step`` of an optimizer that asks for it by an argument ``grad_scaler``.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import UsageError, explain

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = (
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


class WrappedOptimizer(Optimizer):
    """An optimizer that lets the user's optimizer step; a subclass calls :meth:`wrap` in place of ``Optimizer.__init__``.

    [Note: a wrapped optimizer] The user's instance makes the steps, so that its class, its groups, its schedulers and all edits
    of ``param_groups`` keep their meaning. Its hooks are moved to the wrapper, which the program calls; a direct call of the
    instance's own ``step()`` is refused.

    Attributes:
        inner: the user's optimizer.
        peers: the groups of the ranks that hold one copy of a divided model together, which step or skip together.
    """

    inner: Optimizer
    peers: tuple[dist.ProcessGroup, ...] = ()

    # GradScaler passes itself to step() if this is True; step() can then read the scale, and unscale or skip by itself.
    _step_supports_amp_scaling = True

    def wrap(self, inner: Optimizer, moves_state_hooks: bool) -> None:
        """Make this object the wrapper of the user's optimizer: share its groups, and move its hooks here.

        Args:
            inner: the user's optimizer.
            moves_state_hooks: whether hooks of ``state_dict`` and ``load_state_dict`` are no longer called by ``inner``.
        """
        # Optimizer.__init__ is not called: it would create groups and state separate from those of ``inner``.
        self.inner, self.defaults, self._is_stepping = inner, inner.defaults, False
        for name in (*_STEP_HOOKS, *STATE_HOOKS):
            setattr(self, name, getattr(inner, name))  # the same dictionary, so that the user's handles still work
            if moves_state_hooks or name in _STEP_HOOKS:
                setattr(inner, name, OrderedDict())
        self._patch_step_function()
        inner.register_step_pre_hook(self._refuse_other_steps)
        # Hide a warning that is meant for authors of optimizers: GradScaler may stop passing itself to step().
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the user's optimizer, with the user's parameters."""
        return self.inner.param_groups

    @contextmanager
    def inner_holds(self, parameters: Iterable[list[Any]]) -> Iterator[None]:
        """Put other parameters into the groups of ``inner`` inside this context, and allow ``inner.step()`` there.

        Args:
            parameters: the parameters of each group.
        """
        whole: list[list[Tensor]] = [group["params"] for group in self.param_groups]
        for group, some in zip(self.param_groups, parameters, strict=True):
            group["params"] = some
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            for group, params in zip(self.param_groups, whole, strict=True):  # loading may have replaced the groups
                group["params"] = params

    def unscale_together(
        self, scaler: Any, gradients: Sequence[Tensor], device: torch.device, groups: Iterable[dist.ProcessGroup]
    ) -> bool:
        """Unscale gradients unless the user did, and tell whether to step. See [Note: one scale for all ranks].

        Args:
            scaler: the scaler, before or after ``unscale_(optimizer)``.
            gradients: this rank's.
            device: theirs.
            groups: of the ranks that step or skip together; each rank must call it.
        """
        state = scaler._per_optimizer_states[id(self)]
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        if state["stage"] is OptState.READY:
            local = torch.zeros((), dtype=torch.float32, device=device)
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients:
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
            inverse = scaler._scale.double().reciprocal().float().to(device)
            for same in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(same, local, inverse)
        else:
            local = sum((value.to(device) for value in found.values()), torch.zeros((), device=device))
        agreed = (local > 0).to(torch.float32).reshape(1)
        for group in groups:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        found.clear()
        found[device] = agreed.reshape(())
        return not agreed.item()

    def _refuse_other_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            what = f"this {type(optimizer).__name__} steps through the {type(self).__name__} that was made around it"
            fix = f"call step() of that {type(self).__name__}; if gz.prepare() made it, prepare returned it"
            raise UsageError(explain(what, fix=fix))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        what = f"a {type(self).__name__} cannot be copied or pickled: it belongs to process groups and their exchange"
        raise UsageError(
            explain(what, fix="keep optimizer.state_dict(); call that of a ShardedOptimizer on every rank")
        )

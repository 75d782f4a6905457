"""``QAdam``: Adam whose momentum is sent in a lossy code, once its second moment has settled.

Formula, with W = ``warmup_steps``, for step t of a parameter. t <= W: Adam (or AdamW), by torch's own step. t > W: v keeps its
value after step W, and m <- b1 m + (1 - b1) g, p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^W)) + eps). Each rank sends its
own b1 m + (1 - b1) g_r in a code, see :mod:`guozhuang.exchange.adam_momentum`; ``p.grad`` is the mean gradient that follows
from the momenta of all ranks, so clipping, weight decay and accumulation have the same meaning as with Adam.
Error: none in the warm-up; then that of a frozen v, and that of the code. No step's gradient is left out.
Traffic: in the warm-up an all-reduce; then the code, for momenta and for their means.
Source: 1-bit Adam, Tang et al. 2021, arXiv:2102.02888; QAdam of Bagua, Gan et al. 2021, arXiv:2107.01499.

[Note: an element without a second moment] If an element had no gradient in the warm-up (a word that had not occurred yet), its
v is 0, and the first m, or the first rounding error of a code, would be divided by eps: a step of thousands. When v is frozen,
such an element gets the mean v of the other elements of its parameter. A parameter with v = 0 in all elements stays with Adam
until some v is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ..errors import UsageError, explain
from ..world.devices import device_of
from .wrapped import WrappedOptimizer

if TYPE_CHECKING:
    from ..exchange.base import GradientExchange
    from ..exchange.codecs.base import Codec


class QAdam(WrappedOptimizer):
    """Adam that sends few bytes, by ``ddp.use_exchange(optimizer.exchange())``. Its settings must be equal on all ranks.

    It steps an Adam or AdamW of torch, ``inner``, and shares its ``param_groups`` and ``state``, so checkpoints are Adam's and
    can be loaded into Adam. With ``torch.amp.GradScaler``, it gets the scale in the first ``scaler.step(optimizer)``; a run
    that is resumed after the warm-up must set ``optimizer.grad_scaler = scaler`` before its first backward.

    Args:
        params: parameters or groups, as for ``torch.optim.Adam``.
        lr: learning rate.
        betas: decay of the two moments; may differ by group.
        eps: added to the root of the second moment.
        weight_decay: added to gradients times weights (L2) or, if decoupled, taken off the weights.
        warmup_steps: the number of steps after which v is frozen, and of synchronized backward passes after which momentum is
            sent coded. The paper uses a tenth to a fifth of all steps; far fewer suffice if the learning rate has then peaked.
        codec: the code of the momentum; None is 8 bits, ``MinMax8()``. ``OneBit()`` with ``error_feedback`` is 1-bit Adam.
        error_feedback: whether to add the error of the code to the next momentum that is sent.
        seed: the seed of the code's random bits.
        decoupled_weight_decay: as in AdamW.
        **options: further options of ``torch.optim.Adam``: amsgrad, maximize, foreach, fused.

    Raises:
        UsageError: ``warmup_steps`` below 1; ``capturable`` or ``differentiable``, which are not supported.

    Attributes:
        inner: the Adam or AdamW of torch that is stepped.
        grad_scaler: the GradScaler whose scale the gradients are multiplied by; None without one.
    """

    inner: Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 100,
        codec: Codec | None = None,
        error_feedback: bool = False,
        seed: int = 0,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        options["decoupled_weight_decay"] = decoupled_weight_decay
        self._take(Adam(params, lr, betas, eps, weight_decay, **options), warmup_steps, codec, error_feedback, seed)

    @classmethod
    def around(
        cls,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 100,
        codec: Codec | None = None,
        error_feedback: bool = False,
        seed: int = 0,
    ) -> QAdam:
        """Make a QAdam that steps an Adam or AdamW of torch, with its groups and schedulers; call only QAdam's ``step()`` then.

        Args:
            optimizer: a ``torch.optim.Adam`` or ``AdamW``, not of a subclass, new or already stepped.
            warmup_steps: as in the constructor; steps that ``optimizer`` already made count.
            codec: as in the constructor.
            error_feedback: as in the constructor.
            seed: as in the constructor.

        Raises:
            UsageError: ``optimizer`` is of another class; also the errors of the constructor.
        """
        made: QAdam = cls.__new__(cls)
        made._take(optimizer, warmup_steps, codec, error_feedback, seed)
        return made

    def _take(self, inner: Optimizer, warmup_steps: int, codec: Codec | None, error_feedback: bool, seed: int) -> None:
        if not isinstance(inner, Adam) or type(inner) not in (Adam, AdamW):
            what = "what is made around an optimizer here takes the moments of torch.optim.Adam or torch.optim.AdamW"
            fix = "use one of them, or a strategy that leaves the optimizer alone, such as quantize8 or onebit"
            raise UsageError(explain(what, value=type(inner).__name__, fix=fix))
        if warmup_steps < 1:
            what = "warmup_steps must be at least 1: without a second moment no step has a length"
            raise UsageError(explain(what, value=warmup_steps, fix="give 100, or a tenth of all steps"))
        self.wrap(inner, moves_state_hooks=False)
        self.warmup_steps = warmup_steps
        self._codec, self._error_feedback, self._seed = codec, error_feedback, seed
        self._frozen: set[Tensor] = set()
        self._assumed_unscaled = False
        self.grad_scaler: Any = None
        self._check_groups()

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for option in ("capturable", "differentiable"):
                if group.get(option):
                    raise UsageError(explain(f"QAdam does not support {option}=True", fix="leave it out"))

    def exchange(self) -> GradientExchange[Any]:
        """Return the exchange for ``ddp.use_exchange``: an all-reduce in the warm-up, then the coded momentum."""
        from ..exchange.adam_momentum import AdamMomentum
        from ..exchange.allreduce import AllReduce
        from ..exchange.codecs.quantize8 import MinMax8
        from ..exchange.compressed import Compressed
        from ..exchange.warmup import Warmup

        compressed = Compressed(self._codec or MinMax8(), error_feedback=self._error_feedback, seed=self._seed)
        return Warmup(self.warmup_steps, AllReduce(), AdamMomentum(self, compressed))

    # ---- methods that the exchange calls -----------------------------------------------------------------------------------

    def momenta(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor | None, float]]:
        """Return for each parameter (its momentum, with the sign of gradients; b1). The tensors must not be changed.

        The pair is (None, 0.0) for a parameter that is not in the optimizer, and (None, b1) before the first step.
        """
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        found: list[tuple[Tensor | None, float]] = []
        for p in parameters:
            group = group_of.get(p)
            moment = self.inner.state[p].get("exp_avg") if p in self.inner.state else None
            if group is None:
                found.append((None, 0.0))
            else:
                beta = float(group["betas"][0])
                found.append((-moment if moment is not None and group["maximize"] else moment, beta))
        return found

    @property
    def num_steps(self) -> int:
        """The number of steps that were made, or loaded: the greatest of all parameters."""
        return int(max(self._counts([p for p, state in self.inner.state.items() if "step" in state]), default=0))

    def loss_scale(self) -> float:
        """Return the factor by which the current gradients are multiplied; 1.0 if no GradScaler is known."""
        if self.grad_scaler is None:
            self._assumed_unscaled = True
            return 1.0
        return float(self.grad_scaler.get_scale())

    # ---- methods that make a step ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Step the parameters with ``p.grad``, which holds the mean gradient over ranks.

        Args:
            closure: computes the loss and the gradients.
            grad_scaler: given by ``torch.amp.GradScaler.step``.

        Returns:
            The result of ``closure``, else None.

        Raises:
            UsageError: gradients were exchanged as if they were not scaled, but a GradScaler calls this step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers that were made with ``inner``
        if grad_scaler is not None and not self._learn_scale(grad_scaler):
            return loss
        self._assumed_unscaled = False
        frozen, others = self._divide()
        if others:
            whole = [group["params"] for group in self.param_groups]
            rest = [[p for p in some if p not in self._frozen] for some in whole] if frozen else whole
            with self.inner_holds(rest):
                self.inner.step()
        for group, members in zip(self.param_groups, frozen, strict=False):
            if members:
                self._step_frozen(group, members)
        return loss

    def _learn_scale(self, scaler: Any) -> bool:
        """Unscale the gradients unless the user did; return whether to step, which is False after an overflow."""
        if self._assumed_unscaled and scaler.get_scale() != 1.0:
            what = "momentum was exchanged before the scale of the loss was known"
            raise UsageError(explain(what, fix="set `optimizer.grad_scaler = scaler` before the first backward"))
        self.grad_scaler = scaler
        held = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in held if p.grad is not None]
        device = device_of(held)
        return self.unscale_together(scaler, gradients, device, self.peers)

    def _divide(self) -> tuple[list[list[Tensor]], bool]:
        """Return the parameters with a gradient and a frozen second moment, by group; and whether Adam must step others."""
        used = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        self._freeze([(p, group) for group, some in zip(self.param_groups, used, strict=True) for p in some])
        frozen = [[p for p in some if p in self._frozen] for some in used]
        num_frozen, num_used = sum(map(len, frozen)), sum(map(len, used))
        return (frozen if num_frozen else []), num_frozen < num_used or not num_used

    def _freeze(self, used: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Freeze the second moment v of parameters whose warm-up has ended. See [Note: an element without a second moment].

        ``state["frozen_at"]`` is the number of steps in which v was updated: W, or more for a loaded state of Adam.
        """
        candidates = [(p, group) for p, group in used if p not in self._frozen and self.inner.state.get(p)]
        for (p, group), count in zip(candidates, self._counts([p for p, _ in candidates]), strict=True):
            state = self.inner.state[p]
            if "frozen_at" in state:
                self._frozen.add(p)
                continue
            if count < self.warmup_steps:
                continue
            for name in ("exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg_sq",):
                v = torch.view_as_real(state[name]) if p.is_complex() else state[name]
                num = int(torch.count_nonzero(v))
                if num == 0:
                    break
                if num < v.numel():  # sums in float64, so that their order, which may differ by host, has no effect
                    v.masked_fill_(v == 0, float(v.sum(dtype=torch.float64) / num))
            else:
                state["frozen_at"] = count
                self._frozen.add(p)

    def _counts(self, parameters: Sequence[Tensor]) -> list[float]:
        if not parameters:
            return []
        steps = [self.inner.state[p]["step"] for p in parameters]
        counts: list[float] = torch.stack([step.to(steps[0].device) for step in steps]).tolist()
        return counts

    @torch.no_grad()
    def _step_frozen(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.inner.state[p] for p in parameters]
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = float(beta1), float(beta2)
        torch._foreach_add_([state["step"] for state in states], 1)
        counts = self._counts(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        moments = [state["exp_avg"] for state in states]
        squares = [state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] for state in states]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if decay != 0 and group["decoupled_weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay != 0:
            grads = list(torch._foreach_add(grads, parameters, alpha=decay))
        parameters, grads, moments, squares = (_real(some) for some in (parameters, grads, moments, squares))
        torch._foreach_lerp_(moments, grads, 1 - beta1)
        lengths = torch._foreach_sqrt(squares)
        torch._foreach_div_(lengths, [(1 - beta2 ** state["frozen_at"]) ** 0.5 for state in states])
        torch._foreach_add_(lengths, float(group["eps"]))
        torch._foreach_addcdiv_(parameters, moments, lengths, [-lr / (1 - beta1**count) for count in counts])

    # ---- methods that other parts of torch call ----------------------------------------------------------------------------

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer, ``inner``, which steps."""
        return self.inner.state

    def __repr__(self) -> str:
        return f"QAdam(warmup_steps={self.warmup_steps}, around {self.inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; its parameters have a warm-up of their own."""
        self.inner.add_param_group(param_group)
        self._check_groups()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's Adam, the same on every rank; without the exchange's, which DDP saves."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that was saved by this class or by torch's Adam."""
        self.inner.load_state_dict(state_dict)
        self._frozen.clear()
        self._check_groups()


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

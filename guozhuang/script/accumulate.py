"""``accumulate``: several backwards for one optimizer step, with one exchange, under every strategy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UsageError, explain
from ..registry import Trained, registry
from ..strategies import unwrap
from .global_mean import TokensOfStep, checked_count


class accumulate:
    """Add up the gradients of ``steps`` micro-batches, and exchange them once, with the last one. Every rank must do the same.

    Divide each loss by ``steps``: the gradient is then that of the mean over a batch ``steps`` times as large, to rounding. ::

        for micro in gz.accumulate(model, steps=4):        # all micro-batches of one optimizer step
            x, y = next(batches)
            (loss_fn(model(x), y) / 4).backward()
        optimizer.step()

    Or around one micro-batch, where the loop counts differently; the count goes on from one call to the next::

        with gz.accumulate(model, steps=4) as is_last:
            (loss_fn(model(x), y) / 4).backward()
        if is_last:
            optimizer.step()

    Micro-batches with different numbers of tokens: draw them first, and tell how many tokens this rank has in the step ::

        batches = [next(stream) for _ in range(4)]
        num_tokens = sum((y != -100).sum() for _, y in batches)
        for micro in gz.accumulate(model, steps=4, weight=num_tokens):
            x, y = batches[micro]
            gz.global_mean(loss_sum(model(x), y), (y != -100).sum()).backward()
        optimizer.step()

    Clip and unscale gradients after the last micro-batch, by ``gz.clip_grad_norm_`` and ``scaler.unscale_(optimizer)``.

    Args:
        model: what ``prepare`` returned; also a wrapper of PyTorch with ``no_sync()``, or a plain module.
        steps: micro-batches in one step of the optimizer, at least 1; the same on all ranks.
        weight: the number of this rank's tokens in all micro-batches of the step, for losses made by ``gz.global_mean``; given
            on every rank, or on none.

    Raises:
        UsageError: ``steps`` is no count, or it or ``weight`` differs from that of the micro-batches before; ``weight`` is not
            the sum of what ``gz.global_mean`` was given (raised after the last micro-batch); and from ``step()`` of the model's
            optimizer, if micro-batches are missing whose gradients would be exchanged with the last one.
    """

    def __init__(self, model: nn.Module, steps: int, weight: float | Tensor | None = None) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            what = "`steps` is the number of micro-batches in an optimizer step, at least 1"
            raise UsageError(explain(what, value=steps, fix="pass a whole number"))
        found = registry.trained_with(model)
        self._wrapper: Any = getattr(model, "_orig_mod", model) if found is None else found.model
        self._optimizer: Any = None if found is None else found.optimizer
        self._count = _count_of(self._wrapper, found)
        self._count.forget_dropped(self._wrapper, self._optimizer)
        self._steps = steps
        self._weight = None if weight is None else checked_count(weight)
        self._held: contextlib.ExitStack | None = None
        if self._count.done and self._count.steps != steps:
            what = f"micro-batch {self._count.done + 1} of {self._count.steps} came with another number of steps"
            raise UsageError(explain(what, value=steps, fix="keep the number until the optimizer has stepped"))
        if self._count.done and self._count.window is not None and self._count.window.weight != self._weight:
            what = f"micro-batch {self._count.done + 1} of {self._count.steps} came with another `weight`"
            fix = "give the tokens of the whole step, the same with each of its micro-batches"
            raise UsageError(explain(what, value=self._weight, fix=fix))

    def __iter__(self) -> Iterator[int]:
        """Yield 0 to ``steps - 1``: the number of the micro-batch that the body of the loop computes."""
        if self._count.done:
            what = f"a new step begins after micro-batch {self._count.done} of {self._count.steps} of the one before"
            fix = "let each loop run to its end, for the last micro-batch exchanges the gradients; or call zero_grad() first"
            raise UsageError(explain(what, fix=fix))
        for number in range(self._steps):
            with self:
                yield number

    def __enter__(self) -> bool:
        """Begin a micro-batch; the result tells whether it is the last one before ``optimizer.step()``."""
        is_last = self._count.done + 1 == self._steps
        self._count.steps = self._steps
        if self._count.done == 0:
            self._expect(self._steps)
        if self._count.done == 0 or self._count.window is None:
            self._count.window = TokensOfStep(self._steps, self._weight)
        self._held = contextlib.ExitStack()
        self._held.enter_context(_hold(self._wrapper, not is_last))
        if self._weight is not None or self._steps > 1:
            self._held.enter_context(self._count.window.inside())
        return is_last

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        assert self._held is not None
        self._held.__exit__(kind, error, traceback)
        self._count.done = (self._count.done + 1) % self._steps
        if kind is not None and self._steps > 1:  # also where a loop was left by `break`
            self._count.done, self._count.was_cut = max(self._count.done, 1), True
        if self._count.done == 0:
            self._expect(1)
            window, self._count.window = self._count.window, None
            if kind is None and window is not None:
                window.check()

    def _expect(self, num_passes: int) -> None:
        """Tell an optimizer that exchanges gradients itself with how many backwards a step comes."""
        set_passes = getattr(self._optimizer, "set_backward_passes_per_step", None)
        if set_passes is not None and self._optimizer.backward_passes_per_step != num_passes:
            set_passes(num_passes)


class _Count:
    """How many micro-batches of the coming step are done, and how many it has; and the check at the step of the optimizer."""

    def __init__(self) -> None:
        self.done = self.steps = 0
        self.was_cut = False  # whether an exception or a `break` ended a micro-batch
        self.window: TokensOfStep | None = None  # what the losses of the step's micro-batches are made of

    def forget_dropped(self, model: nn.Module, optimizer: Any) -> None:
        """Begin a new step if the last one was cut and its gradients were dropped since."""
        if not self.was_cut:
            return
        stepped = model.parameters() if optimizer is None else _all_of(optimizer)
        if all(p.grad is None for p in stepped):
            for part in model.modules() if hasattr(model, "unshard") else ():
                divided: Any = part
                if hasattr(
                    part, "unshard"
                ):  # PyTorch's fully_shard holds gradients of whole weights, out of zero_grad's reach
                    divided.unshard()
                    for p in part.parameters():
                        p.grad = None
                    divided.reshard()
            self.done, self.was_cut = 0, False

    def check(self, optimizer: object, *_: object) -> None:
        if self.done:
            done, self.done, self.was_cut = self.done, 0, False
            what = (
                f"optimizer.step() came after micro-batch {done} of {self.steps}, whose gradients are not exchanged yet"
            )
            raise UsageError(
                explain(what, fix="step after the last one, and leave out the rest of an epoch (drop_last)")
            )


def _all_of(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


_counts: weakref.WeakKeyDictionary[nn.Module, _Count] = weakref.WeakKeyDictionary()


def _count_of(model: nn.Module, found: Trained | None) -> _Count:
    module = unwrap(model)
    if module not in _counts:
        _counts[module] = count = _Count()
        if found is not None:
            found.optimizer.register_step_pre_hook(count.check)
        elif model is not module:  # a wrapper that knows no optimizer
            _check_any_step(module, count)
    return _counts[module]


def _check_any_step(module: nn.Module, count: _Count) -> None:
    """Let the step of any optimizer of the module's parameters be checked, as long as the module lives."""
    this = weakref.ref(module)

    def check(optimizer: Optimizer, *_: object) -> None:
        if count.done and (alive := this()) is not None:
            own = {id(p) for p in alive.parameters()}
            if any(id(p) in own for p in _all_of(optimizer)):
                count.check(optimizer)

    weakref.finalize(module, register_optimizer_step_pre_hook(check).remove)


@contextlib.contextmanager
def _hold(wrapper: Any, holds: bool) -> Iterator[None]:
    """Keep the gradients of backwards inside on this rank if ``holds``; where they are exchanged at the step, do nothing."""
    if holds and hasattr(wrapper, "no_sync"):
        with wrapper.no_sync():
            yield
    elif hasattr(wrapper, "set_requires_gradient_sync"):  # PyTorch's fully_shard
        wrapper.set_requires_gradient_sync(not holds)
        try:
            yield
        finally:
            wrapper.set_requires_gradient_sync(True)
    else:
        yield

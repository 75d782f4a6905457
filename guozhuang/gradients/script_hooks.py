"""Hooks of the script on parameters: each sees the gradient of its rank before the average, where not everything is right.

[Note: hooks before the average] A hook of ``register_hook`` changes a rank's own gradient, and the results are averaged. That
is what one process computes if the hook is linear, as a mask or a scale is. A limit by value, a sign or a norm gives something
else of each rank's gradient than of their mean, without a word. So when a hook changes a gradient for the first time, it is
called twice more to see whether it is additive; not of a gradient that has overflowed, unless the hook makes numbers of its
infinities. Hooks that only look are not called again. An optimizer that a hook steps in
backward would use gradients that are not averaged; so a step asks whether it is in a backward.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UsageError, explain
from .output_hooks import is_traced

_LOCK: Final = threading.RLock()  # other threads make and drop models; a finalizer may do so while the lock is held
_log = logging.getLogger("guozhuang")
_ALL: Final[weakref.WeakSet[ScriptHooks]] = weakref.WeakSet()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    with _LOCK:
        watches = list(_ALL)
    for each in watches:
        each.check_step(optimizer, in_backward=torch._C._current_graph_task_id() != -1)


register_optimizer_step_pre_hook(_before_step)


class ScriptHooks:
    """Looks after the hooks that the script registers on the parameters of one model. See [Note: hooks before the average].

    Args:
        named: the parameters whose gradients are averaged, by name.
        awaits_average: tells whether gradients that arrive now are averaged later.
        rank: rank of this process, for errors.
        warns: whether a hook that is not linear, and gradients of no backward, are warned of, and not refused.
        num_passes: tells how many backwards have averaged gradients, where backwards do.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        awaits_average: Callable[[], bool],
        rank: int,
        warns: bool = False,
        num_passes: Callable[[], int] | None = None,
    ) -> None:
        self._num_passes = num_passes or (lambda: 0)
        self._sees_passes, self._num_forwards, self._num_local = num_passes is not None, 0, 0
        # How many forwards, local forwards and averaging backwards there had been when an optimizer stepped last.
        self._counts_at: weakref.WeakKeyDictionary[Optimizer, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self._names = {id(p): name for name, p in named}
        self._named, self._awaits_average, self._rank, self._warns = list(named), awaits_average, rank, warns
        self._has_warned = False
        self._known: list[Any] = []  # hooks that were tried out
        with _LOCK:
            _ALL.add(self)

    def look(self, is_local: bool = False) -> None:
        """Begin to look after hooks that were registered since the last call; before each forward with gradients.

        Args:
            is_local: whether the backward of the coming forward averages nothing, as inside ``no_sync``.
        """
        self._num_forwards += 1
        self._num_local += is_local
        hooked = [(name, p) for name, p in self._named if p._backward_hooks]
        if not hooked or not self._awaits_average() or is_traced():
            return
        for name, parameter in hooked:
            hooks: Any = parameter._backward_hooks
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Tried) or hook in self._known or is_own(hook):
                    continue
                hooks[key] = _Tried(self, hook, name, hooks, key)

    def check_step(self, optimizer: Optimizer, in_backward: bool) -> None:
        """Raise if an optimizer would use gradients that are not averaged.

        Raises:
            UsageError: it steps in a backward; or there are gradients, and no backward through a forward has averaged any.
        """
        own = (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names)
        first = next(own, None)
        if first is None or not self._awaits_average():
            return
        if in_backward:
            name = self._names[id(first)]
            what = f"optimizer.step() came in backward, where the gradient of {name} is this rank's own and not averaged yet"
            fix = (
                "step after loss.backward() and not in a hook; for less memory let the strategy sharded divide one optimizer "
                "among the ranks"
            )
            raise UsageError(explain(what, rank=self._rank, fix=fix))
        before = self._counts_at.get(optimizer, (0, 0, 0))
        now = self._counts_at[optimizer] = self._num_forwards, self._num_local, self._num_passes()
        has_called, was_local, has_averaged = (a != b for a, b in zip(now, before, strict=True))
        if not self._sees_passes or not has_called or was_local or has_averaged:
            return
        if not any(_has_gradient(p) for p in (first, *own)):
            return
        what = "optimizer.step() came with gradients of no backward of this model, so they are this rank's own"
        fix = (
            "call loss.backward(), which averages them over the ranks; those that torch.autograd.grad returns are averaged at "
            "the step by the strategy sharded"
        )
        self._say(explain(what, rank=self._rank, fix=fix))

    def note_tried(self, hook: Any) -> None:
        """Remember that a hook was tried out."""
        self._known.append(hook)

    def refuse_hook(self, name: str) -> None:
        """Raise, or warn, because the hook on a parameter is not linear."""
        what = (
            f"a hook changes the gradient of {name} by something else than a mask or a scale, and gets the gradient of this "
            "rank alone, before the average over the ranks"
        )
        fix = (
            "change averages: after the last backward, inside `with gz.averaged_gradients(model):`, or clip there by "
            "torch.nn.utils.clip_grad_value_ or gz.clip_grad_norm_"
        )
        self._say(explain(what, rank=self._rank, fix=fix))

    def _say(self, text: str) -> None:
        if not self._warns:
            raise UsageError(text)
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s (said once)", text)


class _Tried:
    """A hook of the script that is tried out when it changes a gradient for the first time.

    Args:
        owner: what is told about the result.
        hook: the hook of the script.
        name: the parameter's name.
        hooks: the parameter's hooks, by key.
        key: the key of this one.
    """

    def __init__(self, owner: ScriptHooks, hook: Callable[[Tensor], Any], name: str, hooks: Any, key: int) -> None:
        self._owner, self._hook, self._name, self._hooks, self._key = weakref.ref(owner), hook, name, hooks, key

    def __call__(self, gradient: Tensor) -> Any:
        """Return what the hook of the script returns.

        Raises:
            UsageError: it changes the gradient, and is not linear.
        """
        owner = self._owner()
        if owner is None or torch.is_grad_enabled() or gradient.layout != torch.strided or is_traced():
            return self._hook(gradient)
        before = gradient.detach().clone()
        given = self._hook(gradient)
        result = gradient if given is None else given
        if torch.equal(result, before) or self._passes_odd(before, result):  # the latter is to be tried again
            return given
        if self._key in self._hooks:  # it has not removed itself
            self._hooks[self._key] = self._hook
        owner.note_tried(self._hook)
        if not self._is_additive(before, result.detach().clone()):
            owner.refuse_hook(self._name)
        return given

    def _passes_odd(self, before: Tensor, after: Tensor) -> bool:
        """Return whether a gradient has infinities or NaN, as after an overflow, which the hook keeps or masks."""
        odd = ~before.isfinite()
        if before.shape != after.shape or not bool(odd.any()):
            return False
        changed = odd & after.isfinite()
        if not bool(changed.any()):
            return True
        return not bool(after[changed].any()) and not bool(self._result(torch.ones_like(before))[changed].any())

    def _is_additive(self, first: Tensor, of_first: Tensor) -> bool:
        if not bool(first.isfinite().all()):  # and it made numbers of some of these, which are in the average too
            return False
        second = -3.0 * first.flatten().flip(0).view(first.shape)
        both = first + second
        of_second, of_both = (self._result(each) for each in (second, both))
        if of_second.shape != of_both.shape:
            return False
        tolerance = torch.finfo(first.dtype).eps ** 0.5
        most = float(torch.maximum(of_first.abs().max(), of_second.abs().max())) if first.numel() else 0.0
        return torch.allclose(of_both, of_first + of_second, rtol=tolerance, atol=tolerance * most)

    def _result(self, gradient: Tensor) -> Tensor:
        given = self._hook(gradient)
        result: Tensor = gradient if given is None else given
        return result.detach()

    def __reduce__(self) -> Any:
        return cast, (None, self._hook)  # it returns the hook: [Note: pickles without this package] in registry.py


def _has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return gradient is not None
    return bool(gradient.any())  # zeros are what zero_grad may leave


def is_own(hook: Any, *others: str) -> bool:
    """Return whether this package has registered a hook, of a tensor, a module or an optimizer, and not the script.

    A hook of the script that is tried out stays the script's.

    Args:
        hook: the hook.
        others: packages whose hooks are no script's either, as "torch.distributed.".
    """
    inner = getattr(hook, "hook", hook)  # PyTorch wraps some
    inner = getattr(inner, "func", inner)  # of a functools.partial
    owner = type(getattr(inner, "__self__", inner))
    if owner is contextlib.nullcontext:  # [Note: pickles without this package] in registry.py
        return True
    names = (getattr(inner, "__module__", None), owner.__module__)
    return not isinstance(inner, _Tried) and any(str(name).startswith(("guozhuang.", *others)) for name in names)

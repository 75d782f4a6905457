"""Calls of a model's units, seen and answered from outside while the model's own forward runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from ....errors import UsageError, explain

_RUN = "_guozhuang_on_call"
_watched: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class OnCall(Protocol):
    """Answers one call of a unit."""

    def __call__(self, name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the caller of the unit gets.

        Args:
            name: of the call: the unit's name, with ``#2``, ``#3`` at its second and third call in this forward.
            unit: the module that is called.
            proceed: calls the unit itself with the arguments that it is given.
            args: the positional arguments of the call.
            kwargs: its keyword arguments.
        """
        ...


@contextlib.contextmanager
def intercepted(units: Mapping[str, nn.Module], on_call: OnCall) -> Iterator[None]:
    """Let a function answer the calls of units until the block ends; calls of a unit inside of another go past it.

    The class of each unit is a subclass of its own meanwhile, whose ``__call__`` is the only difference: hooks, activation
    checkpointing and whatever else a class does in its ``__call__`` lie inside of ``proceed``.

    Raises:
        UsageError: the class of a unit cannot be extended, such as that of a scripted module.
    """
    counts: collections.Counter[str] = collections.Counter()
    is_inside = False

    def called(name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return proceed(*args, **kwargs)
        counts[name] += 1
        is_inside = True
        try:
            return on_call(name if counts[name] == 1 else f"{name}#{counts[name]}", unit, proceed, args, kwargs)
        finally:
            is_inside = False

    kinds: list[tuple[nn.Module, type]] = []
    try:
        for name, unit in units.items():
            kind = type(unit)
            try:
                object.__setattr__(unit, "__class__", _watched_class(kind))
            except TypeError as error:
                what = f"a pipeline cannot be cut at {name}, because Python cannot extend its class"
                fix = "give the module itself, not a scripted one"
                raise UsageError(explain(what, value=kind.__name__, fix=fix)) from error
            kinds.append((unit, kind))
            unit.__dict__[_RUN] = functools.partial(called, name, unit)
        yield
    finally:
        for unit, kind in reversed(kinds):
            del unit.__dict__[_RUN]
            object.__setattr__(unit, "__class__", kind)


def _watched_class(kind: type) -> type:
    found = _watched.get(kind)
    if found is None:

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__[_RUN](functools.partial(kind.__call__, self), args, kwargs)

        names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        found = _watched[kind] = type(kind.__name__, (kind,), names)
        if "forward" in vars(
            found
        ):  # put there by the class's __init_subclass__, as Hugging Face's layers do to checkpoint
            delattr(found, "forward")
    return found

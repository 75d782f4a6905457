"""A hook that holds nobody, and does nothing in a copy of what it was registered with."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class HookOf:
    """Calls a method when it is called with a certain object first, while both are there; a copy of it calls nothing."""

    def __init__(self, whose: object = None, method: Callable[[object], object] | None = None) -> None:
        self._whose = None if whose is None else weakref.ref(whose)
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, caller: object, *_: object) -> None:
        """Call the method with the caller, if it is the one."""
        if self._whose is not None and self._method is not None and caller is self._whose():
            method = self._method()
            if method is not None:
                method(caller)

    def __reduce__(self) -> tuple[type[HookOf], tuple[()]]:
        return HookOf, ()

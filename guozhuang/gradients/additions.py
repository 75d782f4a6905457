"""Detects parameters added to a module after it was wrapped: their gradients would stay local, and the ranks diverge."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..errors import UsageError, explain
from ..units import listed

# The lock guards the set of all ``Additions`` and their notes, because other threads may build modules at any time. It is
# reentrant, because a finalizer that builds a module may interrupt the thread that holds the lock.
_LOCK: Final = threading.RLock()
_ALL: Final[weakref.WeakSet[Additions]] = weakref.WeakSet()


def _note(owner: nn.Module, name: str, value: Any) -> None:
    with _LOCK:
        for additions in _ALL:
            additions.note(owner)


# These hooks are registered once and never removed: PyTorch iterates over them without a lock whenever a module is built.
register_module_parameter_registration_hook(_note)
register_module_module_registration_hook(_note)


class Additions:
    """Finds added parameters without a search in each step: PyTorch calls a hook when a module gets a parameter or submodule.

    Only registered parameters count: ``torch.func.functional_call`` replaces parameters by other tensors for a while.

    Args:
        known: the parameters that the wrapper averages, by name.
    """

    def __init__(self, known: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._known = [p for _, p in known]
        # Modules of any model that got a parameter or a submodule since the last check.
        self._changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._added: list[tuple[str, nn.Parameter]] = []
        with _LOCK:
            _ALL.add(self)

    def note(self, owner: nn.Module) -> None:
        """Record that a module got a parameter or a submodule; called with the lock held."""
        self._changed.add(owner)

    def refuse(self, module: nn.Module, ignored: frozenset[str], rank: int) -> None:
        """Raise if parameters were added to the module that are trained but not averaged.

        Args:
            module: the module without the wrapper.
            ignored: names of parameters that are not averaged on purpose.
            rank: rank of this process, for the error.

        Raises:
            UsageError: there are such parameters; the text names them.
        """
        if self._changed:
            named = list(module.named_parameters())
            parts = set(module.modules())
            with _LOCK:
                changed = [part for part in self._changed if part in parts]
                self._changed.clear()
            given = {id(p) for part in changed for p in part.parameters()}
            given -= {id(p) for p in self._known} | {id(p) for _, p in self._added}
            self._added += [(name, p) for name, p in named if id(p) in given and name not in ignored]
        trained = [name for name, p in self._added if p.requires_grad]
        if trained:
            held = {id(p) for p in module.parameters()}  # ignore parameters that were removed again
            self._added = [(name, p) for name, p in self._added if id(p) in held]
            trained = [name for name, p in self._added if p.requires_grad]
        if trained:
            what = "parameters were added to the model after it was prepared or wrapped; their gradients would not be averaged"
            fix = "change the model first and prepare it then (or wrap it anew), or switch their requires_grad off"
            raise UsageError(explain(what, value=listed(trained), rank=rank, fix=fix))

"""Parameters that a module was given after it was wrapped: their gradients would stay local, and the ranks drift apart."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..errors import UsageError, explain
from ..gradients.passes import weakly


class Additions:
    """Finds added parameters without looking at the module in each step: PyTorch tells whenever any module gets something.

    Args:
        known: the parameters that the wrapper averages, by name.
    """

    def __init__(self, known: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._known = [p for _, p in known]
        self._may_be_more = False
        self._frozen: list[tuple[str, nn.Parameter]] = []  # added, and not trained so far
        hook = weakly(self._note)
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            weakref.finalize(self, register(hook).remove)

    def _note(self, *_: Any) -> None:
        self._may_be_more = True

    def refuse(self, parameters: Callable[[], Sequence[tuple[str, nn.Parameter]]], rank: int) -> None:
        """Raise if there are trained parameters that are not averaged.

        Args:
            parameters: returns those that the module has now, by name.
            rank: of this process, for the error.

        Raises:
            UsageError: there are; the text names them.
        """
        if self._may_be_more:
            known = {id(p) for p in self._known}
            self._frozen = [(name, p) for name, p in parameters() if id(p) not in known]
            self._may_be_more = False
        added = [name for name, p in self._frozen if p.requires_grad]
        if added:
            shown = ", ".join(added[:5]) + (f" and {len(added) - 5} more" if len(added) > 5 else "")
            what = "parameters were added to the module after it was wrapped; their gradients would not be averaged"
            fix = "add them first and wrap then (wrap the module anew), or switch their requires_grad off"
            raise UsageError(explain(what, value=shown, rank=rank, fix=fix))

"""Which modules of a model draw random numbers: only while these run are PyTorch's operations looked at one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import UsageError, explain
from ..running import first_argument, running_frames
from .divided import Declaration, declared, declaring

# Modules that are always watched: they draw while they are in training and their probability is above 0.
_DRAWING = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)


class Watch:
    """Enters a dispatch mode around the calls of modules that draw, in a forward and where checkpointing calls them again.

    Args:
        module: the model.
        mode: what looks at operations.

    Attributes:
        modules: those that are watched, each with the parts that were declared when it was last called in a forward.
        num_found: rises whenever something was seen to draw for the first time.
        is_forward: the model is in its forward; set by the owner.
    """

    def __init__(self, module: nn.Module, mode: TorchDispatchMode) -> None:
        self.modules: dict[nn.Module, tuple[Declaration, ...]] = {}
        self.num_found = 0
        self.is_forward = False
        self._model, self._mode = module, mode
        self._is_entered = False
        self._entered: list[tuple[nn.Module, contextlib.ExitStack]] = []
        self._hooked: set[nn.Module] = set()
        # Modules that were seen to draw though no probability of theirs told.
        self._draw_untold: set[nn.Module] = set()
        for each in module.modules():
            if isinstance(each, _DRAWING):
                self._add(each)

    def begin(self) -> None:
        """Begin a forward: have hooks on the modules that may draw in it. A module that never does costs no time for them."""
        self._leave(None)  # of a look at the model, in which not all hooks are called
        for module in self.modules:
            if module not in self._hooked and self._draws(module):
                self._hook(module)

    def end(self) -> None:
        """End a forward: leave what was entered, also where no hook was called, as in a stage whose forward ends early."""
        self._leave(None)

    def _leave(self, module: nn.Module | None) -> None:
        """Leave what was entered since a module was; everything, for None."""
        while self._entered:
            left, stack = self._entered.pop()
            stack.close()
            if left is module:
                return

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at all operations in this block."""
        if self._is_entered:
            yield
            return
        self._is_entered = True
        try:
            with self._mode:
                yield
        finally:
            self._is_entered = False

    def _add(self, module: nn.Module) -> None:
        if module not in self.modules:
            self.modules[module] = ()
            self.num_found += 1

    def _hook(self, module: nn.Module) -> None:
        """Watch a module from its next call on."""
        self._hooked.add(module)

        def before(called: nn.Module, args: Any) -> None:
            stack = contextlib.ExitStack()
            self._entered.append((module, stack))
            if not self._draws(module):
                return
            if self.is_forward:
                self.modules[module] = declared()
                stack.enter_context(self.looking())
            elif torch._C._current_graph_task_id() != -1:
                again = tuple(each for each in self.modules[module] if each not in declared())
                stack.enter_context(declaring((*again, *declared())))
                stack.enter_context(self.looking())

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if any(each is module for each, _ in self._entered):  # unless it got its hooks in this very call
                self._leave(module)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def add_caller(self) -> None:
        """Watch the innermost module of the model whose forward is being computed, because it draws."""
        is_recomputed = False
        for frame in running_frames():
            module = first_argument(frame) if frame.f_code.co_name == "forward" else None
            if isinstance(module, nn.Module) and any(each is module for each in self._model.modules()):
                if is_recomputed:
                    what = "a function that torch.utils.checkpoint runs draws random numbers outside of any module"
                    raise UsageError(explain(what, value=type(module).__name__, fix="give checkpoint a module"))
                self._add(module)
                if module not in self._hooked:
                    self._hook(module)
                    self.num_found += 1
                if not self._draws(module):
                    self._draw_untold.add(module)
                    self.num_found += 1
                return
            is_recomputed = is_recomputed or frame.f_code.co_filename.endswith("torch/utils/checkpoint.py")
        self.num_found += 1  # there is no module to watch, so all operations must be looked at in the next forward, too

    def _draws(self, module: nn.Module) -> bool:
        """Return whether a watched module may draw when it is called now."""
        if not isinstance(module, _DRAWING) or module in self._draw_untold:
            return True
        probability = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else module.dropout
        return module.training and probability > 0

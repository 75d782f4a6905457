"""Of which kind a forward is: forwards of one kind are proved once."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _pytree as pytree

from ...registry import registry
from .undivided import UndividedForm

if TYPE_CHECKING:
    from ..prepare import Divided

_MOST_CUTS = 2
_num_registered = 0


def _note_registration(*_: Any) -> None:
    global _num_registered
    _num_registered += 1


def watch_registrations() -> None:
    """Notice from now on when a module gets another part."""
    register_module_module_registration_hook(_note_registration)


class ProvedModel:
    """What was proved of one model: the kinds of its forwards.

    Args:
        divided: the model.
        form: what it was before.
        every: after so many optimizer steps, which all ranks count alike, nothing counts as proved any more; None: never.
    """

    def __init__(self, divided: Divided, form: UndividedForm, every: int | None = None) -> None:
        self.form: UndividedForm | None = form  # which holds the model
        self.divided = weakref.ref(divided, self._forget)
        self._kinds: set[Hashable] = set()
        #: How often forwards of a kind could not be compared yet.
        self.num_waits: collections.Counter[Hashable] = collections.Counter()
        self._num_cuts: collections.Counter[Hashable] = collections.Counter()
        self._every, self._began_at_step = every, registry.num_steps
        self._structure: tuple[int, list[nn.Module], int] = (-1, [], 0)

    @property
    def kinds(self) -> set[Hashable]:
        """The kinds of forwards that were proved."""
        if self._every is not None and registry.num_steps >= self._began_at_step + self._every:
            self._kinds, self._began_at_step = set(), registry.num_steps
        return self._kinds

    def was_cut_short(self, kind: Hashable) -> None:
        """Note that a comparison ended before the backward; the next one of its kind is the last."""
        self._num_cuts[kind] += 1
        if self._num_cuts[kind] == _MOST_CUTS:
            self.kinds.add(kind)

    def _forget(self, _: object) -> None:
        self.form = None

    def kind(self, inputs: Any) -> Hashable:
        """Return the kind of a forward with these inputs."""
        divided = self.divided()
        assert divided is not None
        if self._structure[0] != _num_registered:
            modules = dict(divided.model.named_modules())
            told = hash(tuple((name, type(module)) for name, module in modules.items()))
            self._structure = (_num_registered, list(modules.values()), told)
        _, modules_now, told = self._structure
        leaves, spec = pytree.tree_flatten(inputs)
        given = tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        num_training = sum(module.training for module in modules_now)
        return told, num_training, torch.is_grad_enabled(), str(spec), given

"""``fuse_optimizer``: lets an optimizer step all parameters of a group as one tensor, with the same result to the bit.

[Note: what is flat] The weights of a group and the tensors of its state become views of one storage each, once. Gradients stay
where they are, since the engine that averages them may own their memory, and are copied into a flat tensor in each fused step
unless they lie one behind the other. So ``zero_grad()`` may drop them. Whatever moved since the last step (weights that were
given other memory, a loaded state) is made flat again.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang.errors import explain

_log = logging.getLogger("guozhuang")
Kind = TypeVar("Kind", bound=Optimizer)

# Each element steps by itself in these; a subclass may look at whole tensors.
_ELEMENTWISE = {"SGD", "Adam", "AdamW", "RMSprop", "Rprop", "ASGD", "Adamax", "Adadelta", "Adagrad", "NAdam", "RAdam"}


def fuse_optimizer(optimizer: Kind, do_flatten: bool = True, check_flatten: bool = True) -> Kind:
    """Give an optimizer the method ``fuse_step``, which steps each group as one tensor; ``step`` stays as it is.

    Both may alternate. An optimizer that looks at whole tensors (LAMB, Muon, QAdam) steps as in ``step``, and a line of the log
    says so. ``optimizer._bagua_fused_count`` counts the groups that were stepped as one.

    Args:
        optimizer: an optimizer of PyTorch; it is changed.
        do_flatten: make weights and states flat where they are not; False: fuse only what lies one behind the other already.
        check_flatten: taken for Bagua's sake; what is flat is checked in each step.

    Returns:
        The same optimizer.

    Raises:
        RuntimeError: it was fused before.
    """
    if is_fused_optimizer(optimizer):
        raise RuntimeError("trying to fuse an optimizer twice!")
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    elementwise = type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")
    if not elementwise:
        what = f"{type(optimizer).__name__} may look at whole tensors: its fuse_step is its step"
        _log.warning("%s", explain(what, fix="fuse SGD, Adam and others that step each element by itself"))
    fused = _Fused(optimizer, do_flatten) if elementwise else None

    def fuse_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if fused is None:
            return self.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with fused.as_one():
            self.step()
        return loss

    optimizer.fuse_step = types.MethodType(fuse_step, optimizer)  # type: ignore[attr-defined]
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Return whether ``fuse_optimizer`` was called with it."""
    return hasattr(optimizer, "_bagua_fused_count")


def calculate_mutual_groups(tensors_list: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the places of tensors that lie one behind the other in memory in all lists, in groups of at least two.

    Args:
        tensors_list: lists of equal lengths, such as weights and gradients of the same parameters.

    Returns:
        Groups of places in the lists, each in the order of memory.
    """
    if not tensors_list or not tensors_list[0]:
        return []
    order = sorted(range(len(tensors_list[0])), key=lambda i: tensors_list[0][i].data_ptr())
    groups: list[list[int]] = [order[:1]]
    for i in order[1:]:
        if all(_follows(tensors[groups[-1][-1]], tensors[i]) for tensors in tensors_list):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [group for group in groups if len(group) > 1]


def _follows(one: Tensor, next_one: Tensor) -> bool:
    """Return whether a tensor begins where another one ends, in one storage and of one dtype."""
    return (
        one.untyped_storage().data_ptr() == next_one.untyped_storage().data_ptr()
        and one.dtype == next_one.dtype
        and one.is_contiguous()
        and next_one.is_contiguous()
        and next_one.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
    )


def _flat_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one 1-dimensional tensor in their memory; None if they do not lie one behind the other."""
    if not tensors[0].is_contiguous() or not all(map(_follows, tensors[:-1], tensors[1:])):
        return None
    first = tensors[0].detach()
    return first.as_strided((sum(t.numel() for t in tensors),), (1,), first.storage_offset())


class _Fused:
    """The flat tensors of an optimizer's groups. See [Note: what is flat]."""

    def __init__(self, optimizer: Optimizer, do_flatten: bool) -> None:
        self._optimizer, self._do_flatten = optimizer, do_flatten

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let the optimizer hold one parameter for those of each group that can step together, inside the ``with`` block."""
        optimizer = self._optimizer
        made: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        before = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                kept = list(group["params"])
                for some in self._alike(group["params"]):
                    if (one := self._one_of(some)) is not None:
                        made.append((one, some))
                        taken = set(map(id, some))
                        kept = [p for p in kept if id(p) not in taken] + [one]
                        optimizer._bagua_fused_count += 1  # type: ignore[attr-defined]
                group["params"] = kept
            yield
        finally:
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = params
            for one, some in made:
                self._split(optimizer.state.pop(one, {}), some)

    def _alike(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters that have gradients and equal counters of steps, by device and dtype; at least two each."""
        found: dict[Any, list[nn.Parameter]] = {}
        for p in params:
            if p.grad is None or p.grad.is_sparse or p.is_complex() or p.grad.dtype != p.dtype or p.numel() == 0:
                continue
            state = self._optimizer.state.get(p, {})
            scalars = tuple((name, _scalar(value)) for name, value in state.items() if not _is_of(value, p))
            whole = tuple(name for name, value in state.items() if _is_of(value, p))
            found.setdefault((p.device, p.dtype, scalars, whole), []).append(p)
        return [some for some in found.values() if len(some) > 1]

    def _one_of(self, some: list[nn.Parameter]) -> nn.Parameter | None:
        """Return the parameters as one, with gradient and state; None if they are not flat and are to stay so."""
        weights = self._flat([p.data for p in some], lambda p, view: setattr(p, "data", view), some)
        if weights is None:
            return None
        one = nn.Parameter(weights)
        gradients = [p.grad for p in some if p.grad is not None]
        found = _flat_of(gradients)
        one.grad = torch.cat([g.reshape(-1) for g in gradients]) if found is None else found
        state = self._optimizer.state
        if some[0] in state:
            flat: dict[str, Any] = {}
            for name, value in state[some[0]].items():
                if not _is_of(value, some[0]):
                    flat[name] = value.clone() if isinstance(value, Tensor) else value
                    continue

                def put(p: nn.Parameter, view: Tensor, name: str = name) -> None:
                    state[p][name] = view

                flat[name] = self._flat([state[p][name] for p in some], put, some)
                if flat[name] is None:
                    return None
            state[one] = flat
        return one

    def _flat(
        self, tensors: list[Tensor], put: Callable[[nn.Parameter, Tensor], object], some: list[nn.Parameter]
    ) -> Tensor | None:
        """Return the tensors as one; if they are not flat, make them so by ``put``, or return None."""
        found = _flat_of(tensors)
        if found is None and self._do_flatten:
            found = torch.cat([t.detach().reshape(-1) for t in tensors])
            for p, view in zip(some, _views(found, some), strict=True):
                put(p, view)
        return found

    def _split(self, state: dict[str, Any], some: list[nn.Parameter]) -> None:
        """Give the parameters their parts of the state of all of them, as views, and each its own counters."""
        num = sum(p.numel() for p in some)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() == num and value.dim() == 1:
                for p, view in zip(some, _views(value, some), strict=True):
                    self._optimizer.state[p][name] = view
            else:
                for p in some:
                    self._optimizer.state[p][name] = value.clone() if isinstance(value, Tensor) else value


def _views(flat: Tensor, some: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = flat.split([p.numel() for p in some])
    return [part.view(p.shape) for part, p in zip(parts, some, strict=True)]


def _is_of(value: Any, p: nn.Parameter) -> bool:
    """Return whether a value of the state has an element for each one of the parameter; counters have dimension 0."""
    return isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)

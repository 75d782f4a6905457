"""The first batch as a proof: before anything steps, the divided run is compared with the undivided one.

See [Note: what is proved] in first_batch.py.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...world.layout import MODEL_AXES
from ..axes import Axes
from .first_batch import Proof, going_on
from .kinds import watch_registrations

__all__ = ["Proof", "before_step", "proof_of"]


def before_step() -> None:
    """Tell the proof that is going on that an optimizer is about to step. Every rank must call it."""
    if going_on.proof is not None:
        going_on.proof.before_step()


def _watched_backward(*args: Any, **kwargs: Any) -> Any:
    """Do what ``torch.autograd.backward`` does; the first one in a proof is looked at."""
    if going_on.proof is None or going_on.depth or torch._C._current_graph_task_id() != -1:  # or a part of another one
        return _torchs_backward(*args, **kwargs)
    going_on.depth += 1
    try:
        found = _torchs_backward(*args, **kwargs)
    finally:
        going_on.depth -= 1
    tensors = args[0] if args else kwargs.get("tensors")
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
    is_loss = all(each.numel() == 1 for each in roots)
    going_on.proof.after_backward(sum(float(each.detach()) for each in roots) if is_loss else None)
    return found


_torchs_backward = torch.autograd.backward
_is_watching = False


def watch() -> None:
    """Let proofs see backwards and changes of modules, from the first divided model on."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        torch.autograd.backward = _watched_backward
        watch_registrations()


# A proof holds its group, so it is held by its models alone. By the layout, too: models of several may share a group.
_proofs: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Proof]]] = weakref.WeakKeyDictionary()


def proof_of(axes: Axes) -> Proof | None:
    """Return the proof of the models that the same ranks hold together; None if each rank holds a whole one."""
    group = axes.group(*MODEL_AXES)
    if group is None or getattr(group, "recorder", None) is not None:  # a fake world has no values
        return None
    watch()
    known = _proofs.setdefault(group, {})
    layout = str(axes.layout)
    found = known[layout]() if layout in known else None
    if found is None:
        found = Proof(axes)
        known[layout] = weakref.ref(found)
    return found

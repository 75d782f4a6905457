"""What is compared of a forward: its outputs, and all that it leaves behind in the model and in the generators."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...generators import checksums
from ...gradients.forwards import leaves_of
from ..activations.tensor import local_of

_INTERNAL = frozenset(vars(nn.Module()))
# What DistributedDataParallel and this package keep in modules.
_OWN = ("_ddp", "_guozhuang")
_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass
class Sums:
    """Sums over the elements of all that a module has returned in a forward; they add up over microbatches and ranks.

    Attributes:
        count: of the elements.
        total: their sum.
        squares: the sum of their squares.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, tensor: Tensor) -> None:
        """Add the elements of a tensor."""
        values = tensor.detach().double()
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())


@dataclass
class ForwardRecord:
    """What one forward returned and left behind.

    Attributes:
        outputs: tensors and numbers in what it returned, flattened; None where there is something else.
        parts: sums over the outputs of each module, by its name, in the order of the first calls.
        changed: attributes of modules that it changed, as ``name.attribute``: numbers, texts and tensors.
        buffers: all buffers, by name.
        generators: for each random generator its state before and after, as a checksum.
    """

    outputs: list[Any] = field(default_factory=list)
    parts: dict[str, Sums] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, tuple[str, str]] = field(default_factory=dict)

    def take_outputs(self, outputs: Any) -> None:
        """Keep what the forward has returned."""
        self.outputs = [
            leaf.detach() if isinstance(leaf, Tensor) else leaf if isinstance(leaf, _PLAIN) else None
            for leaf in leaves_of(outputs)
        ]


class _Running(threading.local):
    """The record and the names of the modules of the forward that runs on this thread."""

    def __init__(self) -> None:
        self.record: ForwardRecord | None = None
        self.names: dict[int, str] = {}


_running = _Running()


def _note_output(record: ForwardRecord, module: nn.Module, _: Any, output: Any) -> None:
    name = _running.names.get(id(module))
    if _running.record is not record or name is None:  # in another thread
        return
    for leaf in leaves_of(output):
        if isinstance(leaf, Tensor) and not leaf.is_meta and (mine := local_of(leaf)).is_floating_point():
            record.parts.setdefault(name, Sums()).add(mine)


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[ForwardRecord]:
    """Record a forward of the model in this block; its outputs are to be given to the record afterwards."""
    record = ForwardRecord()
    attributes, generators = _attributes(model), checksums()
    before = _running.record, _running.names
    _running.record, _running.names = record, {id(module): name for name, module in model.named_modules() if name}
    handle = register_module_forward_hook(functools.partial(_note_output, record))
    try:
        yield record
    finally:
        handle.remove()
        _running.record, _running.names = before
    for key, (value, token) in _attributes(model).items():
        if key not in attributes or attributes[key][1] != token:
            record.changed[key] = value
    record.buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    after = checksums()
    record.generators = {name: (state, after.get(name, "")) for name, state in generators.items()}


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what runs in this block out of the record: a model that is tried, measured or looked at."""
    before, _running.record = _running.record, None
    try:
        yield
    finally:
        _running.record = before


def attribute(model: nn.Module, key: str) -> Any:
    """Return the present value of an attribute as records have it; None if there is none."""
    path, _, name = key.rpartition(".")
    return _kept(vars(model.get_submodule(path)).get(name))


def _attributes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each attribute's value, and what tells whether it has changed."""
    found: dict[str, tuple[Any, Any]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _INTERNAL or name.startswith(_OWN) or isinstance(value, nn.Module):
                continue
            kept = _kept(value)
            if isinstance(kept, Tensor):
                found[f"{path}.{name}"] = kept, (id(value), None if kept.is_inference() else kept._version)
            elif kept is not None or value is None:
                found[f"{path}.{name}"] = kept, (type(kept), repr(kept))
    return found


def _kept(value: Any) -> Any:
    """Return what a record keeps of an attribute; None if it is of no kind that is compared."""
    if isinstance(value, (*_PLAIN, Tensor)):
        return value
    if isinstance(value, list | tuple) and len(value) <= _MOST_KEPT and all(isinstance(each, _PLAIN) for each in value):
        return tuple(value)
    return None


_MOST_KEPT = 64

"""Makes the models of all ranks equal at the start: compares parameters, and copies their values from rank 0."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import _broadcast_coalesced

from ..groups import agree
from ..groups.subgroups import timeout_s
from ..watch.waits import waits
from ..world import current
from .flat import FlatWeights

_BROADCAST_BYTES = 250 << 20  # upper bound of the flattened copies in one broadcast


def describe(named_tensors: Iterable[tuple[str, Tensor]], sparse: frozenset[str] = frozenset()) -> list[str]:
    """Return one line per tensor with every property that must be equal on all ranks.

    These are name, shape, dtype, device type, the strides of a parameter that is not row-major (its gradient in a bucket has
    them too), whether it requires a gradient, and whether that is sparse (its name is in ``sparse``).
    """
    return [_line(name, tensor, name in sparse) for name, tensor in named_tensors]


def sparse_names(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters whose gradients are sparse: those of modules with ``sparse=True`` (Embedding).

    A parameter that several modules share has the name that ``module.named_parameters()`` gives it.
    """
    sparse = {
        id(parameter)
        for part in module.modules()
        if getattr(part, "sparse", False) is True
        for parameter in part.parameters(recurse=False)
    }
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in sparse)


def _line(name: str, tensor: Tensor, sparse: bool) -> str:
    parts = [name, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."), tensor.device.type]
    if isinstance(tensor, nn.Parameter) and tensor.layout == torch.strided:
        # The stride of a dimension of size 1 has no meaning, and depends on how the tensor was made.
        sizes = [size for size in tensor.shape if size > 1]
        strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        if tensor.numel() > 0 and strides != [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]:
            parts.append(f"strides {tuple(strides)}")
    if tensor.requires_grad:
        parts.append("trained, sparse gradient" if sparse else "trained")
    return " ".join(parts)


def verify_equal_layout(group: dist.ProcessGroup, lines: Sequence[str]) -> None:
    """Raise on every rank, with a table, unless all ranks describe the same model. Every rank must call it.

    Raises:
        MismatchError: names, shapes, dtypes, memory layouts, counts or options differ.
        WorldError: a rank did not call within the group's time-out.
    """
    fix = "build the same model with the same options on every rank"
    agree(group, "the parameters of the model", lines, timeout_s(group), fix)


def start_equal(
    module: nn.Module,
    group: dist.ProcessGroup,
    ignored: frozenset[str] = frozenset(),
    buffers: bool = True,
    options: Sequence[str] = (),
) -> None:
    """Compare the ranks' modules and copy rank 0's weights and buffers to all of them. Every rank must call it.

    Between machines what is equal already, as after an equal seed or of one checkpoint, is not sent: digests are compared,
    which is ten times as fast as a link of 1 Gbit/s.

    Args:
        module: equal on all ranks but for its values.
        group: the ranks.
        ignored: names of parameters and buffers that are neither compared nor copied.
        buffers: whether buffers are compared and copied.
        options: further lines that must be equal on all ranks.

    Raises:
        MismatchError: names, shapes, dtypes, memory layouts or options differ.
        WorldError: a rank did not call within the group's time-out.
    """
    state = state_of(module, ignored, buffers)
    verify_equal_layout(group, [*options, *describe(state, sparse_names(module))])
    tensors = [tensor for _, tensor in state]
    world = current()
    if world is not None and world.num_nodes > 1 and tensors and group.size() > 1:
        tensors = different(tensors, group)
    broadcast_tensors(tensors, group, source=0)


def different(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors that are not, on every rank, bit-identical to rank 0's."""
    device = tensors[0].device
    mine = torch.stack([_digest(tensor) for tensor in tensors]).to(device)
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=0)
    num_different = (mine != first).any(1).long()
    dist.all_reduce(num_different, group=group)
    return [tensor for tensor, number in zip(tensors, num_different.tolist(), strict=True) if number]


def _digest(tensor: Tensor) -> Tensor:
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.frombuffer(bytearray(hashlib.sha256(values.numpy().data).digest()), dtype=torch.uint8)


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Copy the tensors' values from one rank of the group to all, in place, flattened into few messages.

    Every rank must call it, with equal shapes and dtypes.

    Args:
        tensors: dense tensors of any dtype; autograd's version counters are left as they are.
        group: the ranks.
        source: rank within the group whose values are copied.
    """
    whole = [tensor.detach() for tensor in tensors]
    if not whole or group.size() == 1:
        return
    plain = [torch.view_as_real(t) if t.is_complex() else t for t in whole]
    with torch.no_grad(), waits.inside(), _unsafe_preserve_version_counter(tuple(plain)):
        _broadcast_coalesced(group, plain, _BROADCAST_BYTES, source)


def state_of(module: nn.Module, ignored: frozenset[str], buffers: bool) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs of the parameters and, if ``buffers``, of the buffers, without the ignored ones."""
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    if buffers:
        named += list(module.named_buffers())
    return [(name, tensor) for name, tensor in named if name not in ignored]


def take_mean(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Average tensors over ranks, in place; elements that are equal on all ranks stay bit-identical, also infinities."""
    if group.size() == 1:
        return
    wide = torch.float64 if any(t.dtype == torch.float64 for _, t in named) else torch.float32
    mean = FlatWeights(named, dtype=wide)
    flats = mean.copy()
    for flat in flats:
        base = flat.clone()
        dist.broadcast(base, group=group, group_src=0)
        change = torch.where(flat == base, 0.0, flat - base)
        dist.all_reduce(change, group=group)
        torch.add(base, change, alpha=1 / group.size(), out=flat)
    mean.write(flats)


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors' present values when the context ends, whatever is written to them inside."""
    before = [tensor.clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors in this context ordinary ones, which later code may write to, also inside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        yield

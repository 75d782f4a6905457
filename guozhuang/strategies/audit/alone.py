"""In a copy of a rank: become the one process that trains alone, on the joined batches of all ranks."""

from __future__ import annotations

import gc
import io
import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...distributed import DistributedDataParallel
from ...parallel.proof.undivided import UndividedForm
from ...registry import BatchWeight, registry
from ...sharding.carrier import Carrier
from ...sharding.optimizer import ShardedOptimizer
from ...sharding.whole import is_dtensor
from ...world import World
from ...world.layout import Layout


class AuditedPair:
    """A model and its optimizers, as they were prepared together. The optimizers are held weakly; the model, while they live.

    Args:
        module: the script's own.
        model: what stands for it.
        optimizers: what the script steps.
        form: what the module was before.
    """

    def __init__(
        self, module: nn.Module, model: nn.Module, optimizers: Iterable[Optimizer], form: UndividedForm
    ) -> None:
        self._held: tuple[nn.Module, nn.Module, UndividedForm] | None = module, model, form
        self._optimizers = [weakref.ref(each, self._forget) for each in optimizers]

    def _forget(self, _: object) -> None:
        self._held = None

    @property
    def is_alive(self) -> bool:
        """Whether the script can still train the model."""
        return self._held is not None

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is the first of them, whose steps are counted."""
        return self._optimizers[0]() is optimizer

    @property
    def optimizers(self) -> list[Any]:
        """What the script steps."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    @property
    def module(self) -> nn.Module:
        """The script's own module."""
        assert self._held is not None
        return self._held[0]

    @property
    def model(self) -> nn.Module:
        """What stands for the module."""
        assert self._held is not None
        return self._held[1]

    @property
    def form(self) -> UndividedForm:
        """What the module was before."""
        assert self._held is not None
        return self._held[2]


def whole_values(pairs: Iterable[AuditedPair], keeps: bool) -> dict[int, Tensor]:
    """Return the whole values of divided parameters, by identity, if ``keeps``. Every rank must call it.

    New weights that are still on their way are waited for.
    """
    found: dict[int, Tensor] = {}
    for pair in pairs:
        for optimizer in pair.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.carrier.synchronize()
        for parameter in pair.module.parameters():
            if is_dtensor(parameter):
                made: Any = parameter.detach()
                whole = made.full_tensor()
                if keeps:
                    found[id(parameter)] = whole
    return found


def become_one_process(
    pairs: Iterable[AuditedPair], wholes: Mapping[int, Tensor], before_step: Callable[..., Any]
) -> None:
    """Let the script go on in this copy of rank 0 as in a world of one process.

    Models have memory and parameters of their own, and nothing averages their gradients. All groups have one rank: sums over it
    are what they were, and everything else still ends this process.

    Args:
        pairs: what the script trains.
        wholes: what :func:`whole_values` has returned.
        before_step: the hook of the optimizers' steps that is to be called before all others.
    """
    for pair in pairs:
        gradients = {p: p.grad for p in pair.module.parameters() if p.grad is not None and not is_dtensor(p)}
        if hasattr(pair.module, "set_requires_gradient_sync"):  # which gz.accumulate may be about to call
            vars(pair.module)["set_requires_gradient_sync"] = lambda *_, **__: None
        keeps_gradients = not any(isinstance(each, ShardedOptimizer) for each in pair.optimizers)
        _put_in_whole(pair.module, wholes)
        pair.form.restore({})
        if keeps_gradients:  # means already, which a script may add to
            for parameter, gradient in gradients.items():
                parameter.grad = gradient.clone()
        model: Any = pair.model
        if isinstance(model, DistributedDataParallel):
            _kept.append(model._reducer)  # what is dropped may say goodbye to others
            model.leave_gradients_local()
            model.forward_sync_buffers = False
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            inside: Any = model.module
            vars(model)["forward"] = lambda *args, inside=inside, **kwargs: inside(*args, **kwargs)
            vars(model)["_pre_forward"] = lambda *args, **kwargs: (args, kwargs)
            vars(model)["_post_forward"] = lambda outputs: outputs
        for optimizer in pair.optimizers:
            if wholes:
                optimizer.zero_grad = lambda *_, module=pair.module, **__: module.zero_grad()
            _be_first(optimizer, before_step)
    Carrier._alive.clear()
    registry.weight = weight = BatchWeight()
    vars(weight)["set"] = lambda *_: None  # what loaders hand out is the whole batch
    for world in [each for each in gc.get_objects() if type(each) is World]:  # also those that the script holds
        alone = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node_rank": 0, "num_nodes": 1}
        for name, value in {**alone, "layout": Layout()}.items():
            object.__setattr__(world, name, value)
    for kind in _kinds(dist.ProcessGroup):
        kind.size, kind.rank = (lambda _: 1), (lambda _: 0)
        for name in ("allreduce", "broadcast", "reduce", "barrier"):
            setattr(kind, name, lambda *_, **__: _Nothing())


_kept: list[Any] = []


def _kinds(base: Any) -> list[Any]:
    return [base, *(each for kind in base.__subclasses__() for each in _kinds(kind))]


class _Nothing(dist.Work):
    """The work of a collective of one rank."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def _be_first(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def _put_in_whole(module: nn.Module, wholes: Mapping[int, Tensor]) -> None:
    """Put whole parameters in the place of divided ones."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in wholes:
                whole = wholes[id(parameter)]
                part._parameters[name] = made.setdefault(
                    id(parameter), nn.Parameter(whole, requires_grad=parameter.requires_grad)
                )


class Spool:
    """A file through which batches come to copies of this process; made before they are forked, and never waits.

    [Note: the spool] A copy may be slower than the ranks, or may have to wait for its turn. So batches lie in a file without a
    name, of which all have the same descriptor, and each copy is told by a pipe of its own where the next one begins: a pipe
    takes 4,096 such places before it is read, so there must not be more batches.
    """

    _PLACE = struct.Struct("<qq")

    def __init__(self, num_readers: int) -> None:
        self._file, name = tempfile.mkstemp()
        os.unlink(name)
        self._end = 0
        self._pipes = [os.pipe() for _ in range(num_readers)]

    def put(self, batch: Any) -> None:
        """Add a batch, for all readers."""
        buffer = io.BytesIO()
        torch.save(batch, buffer)
        octets = memoryview(buffer.getvalue())
        end = self._end
        while octets:
            written = os.pwrite(self._file, octets, end)
            octets, end = octets[written:], end + written
        for _, writing in self._pipes:
            os.write(writing, self._PLACE.pack(self._end, end))
        self._end = end

    def read_by(self, number: int) -> Callable[[], Any]:
        """In a copy of this process: return what gives the next batch, for the reader of this number."""
        for _, writing in self._pipes:
            os.close(writing)
        reading = self._pipes[number][0]

        def take() -> Any:
            place = os.read(reading, self._PLACE.size)
            if not place:  # the rank has gone another way
                os._exit(0)
            start, end = self._PLACE.unpack(place)
            return torch.load(io.BytesIO(os.pread(self._file, end - start, start)), weights_only=False)

        return take

    def close(self) -> None:
        """In the process that made it: give the file up."""
        for file in (self._file, *(each for pipe in self._pipes for each in pipe)):
            os.close(file)

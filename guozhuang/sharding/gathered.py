"""The ``Carrier`` for any process group: each bucket is reduce-scattered, stepped in parts, and all-gathered.

[Note: reading waits] After a step each rank holds new values of its own part only; the rest arrives by an all-gather that
writes into the memory of the parameters. Until it is done nothing may read that memory, and there are many readers: the next
forward, but also a moving average, a norm that is printed, ``state_dict``, ``copy.deepcopy``, ``torch.save``. Hooks on
modules would miss most of them, and also forwards that read the weights of another module. So the parameters themselves
change their class until then: to one whose ``__torch_function__`` PyTorch calls before any operation on them, in eager
Python. That call waits for the all-gather, restores the class of every parameter of that all-gather, and runs the operation.
Operations that only ask for the gradient, the shape and the like do not wait.

Two kinds of code read a parameter without Python: compiled graphs (``torch.compile``, ScriptModules), and C++ extensions that
are given the parameter itself and are not called through ``torch.ops``. If a graph was compiled in this process, or the
model has a ScriptModule, :func:`reads_past_python` returns True, and the step itself waits. For such extensions there is
``overlap_gather=False``. The backward pass, which also runs in C++, reads only what a forward has read before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree
from typing_extensions import override

from ..errors import MismatchError, explain
from ..exchange.base import GradientExchange, Several, Work
from ..gradients.buckets import NUM_MARKS, Bucket, Placement, view_in
from ..gradients.step_reducer import StepReducer
from ..groups.allocation import zeros_for
from ..watch.waits import waits
from ..world.versions import all_gather_single
from .carrier import Carrier, is_at, put_back
from .parts import BucketLayout, FlatBucket
from .scatter import KeepPart, Scatter


class GatheredCarrier(Carrier):
    """A :class:`~guozhuang.sharding.carrier.Carrier` for any group and device.

    Memory: one copy each of weights and gradients, and one more of the gradients of this rank's part.

    Args:
        model: the model that the parameters belong to.
        names: names of the parameters, for errors.
        parameters: equal on all ranks.
        layout: layout of the parameters.
        group: the ranks.
        overlap_gather: let new weights arrive while the program continues; readers wait for them, see [Note: reading waits].
        exchange: averages gradients; None: an exact sum, by a reduce-scatter.
        listens: whether gradients are handled as they arrive.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: dist.ProcessGroup,
        overlap_gather: bool = True,
        exchange: GradientExchange[Any] | None = None,
        listens: bool = True,
    ) -> None:
        self._model, self._overlap_gather = model, overlap_gather
        allocate = zeros_for(group)
        flats = [allocate(b.num_elements, b.dtype, b.device) for b in layout.buckets]
        self._places = [view_in(flats[b], offset, p) for p, (b, offset) in zip(parameters, layout.places, strict=True)]
        for parameter, place, name in zip(parameters, self._places, names, strict=True):
            put_back(parameter, place, name, group.rank())
        buckets = []
        for b in layout.buckets:
            members = [names[i] for i in b.parameters], [parameters[i] for i in b.parameters]
            is_last = b.index == len(layout.buckets) - 1
            buckets.append(
                Bucket(b.index, is_last, *members, False, allocate, offsets=b.offsets, num_elements=b.num_elements)
            )
        placement = Placement([b.parameters for b in layout.buckets], buckets, [b for b, _ in layout.places])
        # SyncBatchNorm has collectives in backward: with it, buckets sent in backward could be in another order on each rank.
        # So could those of several carriers, where a rank has no gradient for some parameters.
        has_own_order = listens and not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())

        def may_send_early() -> bool:
            return has_own_order and sum(each.group is group for each in Carrier.alive()) <= 1

        method = Scatter(layout) if exchange is None else KeepPart(exchange, layout)
        self._reducer = StepReducer(names, parameters, placement, group, method, may_send_early)
        self.exchanging = None if exchange is None else self._reducer
        self._gatherings: list[Gathering] = []
        self._sent: list[Work | None] = [None] * len(buckets)
        super().__init__(names, parameters, layout, group, flats, listens)

    @override
    def _use_blocks(self) -> None:
        starts = [self.layout.buckets[b.bucket].slice_of(self._rank)[0] for b in self.blocks]
        means = self._reducer.state.means
        self._block_means = [
            self._of_block(b, means[b.bucket], b.start - start) for b, start in zip(self.blocks, starts, strict=True)
        ]
        self._blocks_of: list[list[int]] = [[] for _ in self.layout.buckets]
        for i, block in enumerate(self.blocks):
            self._blocks_of[block.bucket].append(i)

    @override
    def _on_gradient(self, index: int) -> None:
        self._reducer.on_gradient(index)

    @override
    def _send_rest(self) -> None:
        self.synchronize()
        self._reducer.send_rest()

    @override
    def _meet(self) -> frozenset[int]:
        self.synchronize()
        for parameter, place, name in zip(self.parameters, self._places, self._names, strict=True):
            if place.numel() and not is_at(parameter, place):
                put_back(parameter, place, name, self._rank)
        used = self._reducer.agree(self._tell() % (1 << NUM_MARKS))
        self._compare(self._reducer.told_alike and not self._reducer.is_mixed_up)
        if self._reducer.is_mixed_up:
            what = (
                "some ranks had gradients in a backward of this step and others had none, and between backward and step the "
                "script calls a collective, which was paired with gradients of other ranks, so that its result is wrong"
            )
            fix = "make a backward on every rank in each step, with a batch x[:0] where a rank has no samples; or give the "
            fix += "script's own collectives a group of their own, by torch.distributed.new_group()"
            raise MismatchError(explain(what, rank=self._rank, fix=fix))
        return frozenset(i for i, is_used in enumerate(used) if not is_used)

    @override
    def _means(self, keep: bool) -> Iterator[Sequence[int]]:
        """Set the blocks' gradients bucket by bucket, and send a bucket's new weights while the next bucket is stepped."""
        for bucket in self.layout.buckets:
            self._reducer.wait(bucket.index)
            indices = self._blocks_of[bucket.index]
            for i in indices:
                self.weights[i].grad = None if self._held[i] <= self._unused else self._block_means[i]
            yield indices
            if not keep:
                self._send(bucket.index)

    def _send(self, bucket: int) -> None:
        """Start the all-gather of a bucket's new weights, unless no parameter of it was used."""
        if self._sent[bucket] or self._unused.issuperset(self.layout.buckets[bucket].parameters):
            return
        layout, flat = self.layout.buckets[bucket], self._flats[bucket]
        self._sent[bucket] = send_slices(layout, flat, self.group)

    @override
    def _publish(self) -> None:
        # Overlap stays off once it is off: torch._dynamo.reset() clears its record of compiled code, but that code still runs.
        self._overlap_gather = self._overlap_gather and not reads_past_python(self._model)
        for bucket in self.layout.buckets:
            self._send(bucket.index)
        for bucket, work in zip(self.layout.buckets, self._sent, strict=True):
            if work is None:
                continue
            readers = [self.parameters[i] for i in bucket.parameters]
            if not self._overlap_gather or not all(
                type(p) is nn.Parameter for p in readers
            ):  # a subclass of Parameter must keep its class, so wait here
                waits.for_work(work)
            else:
                self._gatherings.append(Gathering(work, readers))
        self._reducer.choose_next()

    @override
    def _start_over(self) -> None:
        self._sent = [None] * len(self._sent)
        self._reducer.start_over()

    @override
    def synchronize(self) -> None:
        while self._gatherings:
            self._gatherings.pop().finish()


def send_slices(bucket: FlatBucket, flat: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to send each rank's slice of a bucket's flat tensor to all ranks, in place. Every rank must call it."""
    if bucket.is_whole:  # slices of any size: each owner sends its own
        sent = [
            dist.broadcast(part, group=group, group_src=owner, async_op=True)
            for owner, part in enumerate(flat.split(bucket.slice_sizes))
            if part.numel()
        ]
        return Several([work for work in sent if work is not None])
    low, high = bucket.slice_of(group.rank())
    work: Work = all_gather_single(flat, flat[low:high], group=group, async_op=True)
    return work


_FREE = (
    *("shape", "dtype", "device", "layout", "ndim", "grad", "requires_grad", "is_leaf", "grad_fn"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes", "is_quantized"),
)
_FREE_CALLS = ("size", "numel", "dim", "stride", "is_floating_point", "is_contiguous", "register_hook", "__hash__")


def _free() -> frozenset[Any]:
    tensor: Any = torch.Tensor
    getters = [getattr(tensor, name).__get__ for name in _FREE]
    setters = [tensor.grad.__set__, tensor.requires_grad.__set__, tensor.grad.__delete__]
    return frozenset([*getters, *setters, *(getattr(tensor, name) for name in _FREE_CALLS)])


#: Operations that read no element, and therefore do not wait.
FREE = _free()


class Gathering:
    """A running all-gather, and the parameters whose new values it brings.

    Args:
        work: the running all-gather.
        parameters: objects of the class ``nn.Parameter`` itself; they become :class:`Arriving` until the all-gather has ended.
    """

    def __init__(self, work: Work, parameters: Sequence[nn.Parameter]) -> None:
        self._work = work
        self._parameters = parameters
        for parameter in parameters:
            parameter.__dict__["_gathering"] = self
            parameter.__class__ = Arriving

    def finish(self) -> None:
        """Wait for the all-gather, and restore the class of its parameters. A second call does nothing."""
        waits.for_work(self._work)
        for parameter in self._parameters:
            if type(parameter) is Arriving:
                cast(Any, parameter).__class__ = nn.Parameter
            parameter.__dict__.pop("_gathering", None)


class Arriving(nn.Parameter):
    """The class of a parameter while its new values are being gathered. See [Note: reading waits]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the new values of all ``Arriving`` parameters among the arguments, then run the operation."""
        if func in FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if type(leaf) is cls:
                _finish(leaf)
        return func(*args, **(kwargs or {}))

    # Copying and pickling look at the parameter's class before they read it, so these two methods wait first.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Wait for the parameter's new values, then copy it."""
        _finish(self)
        return cast(nn.Parameter, cast(Any, nn.Parameter).__deepcopy__(self, memo))

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        """Wait for the parameter's new values, then pickle it."""
        _finish(self)
        return cast(Any, nn.Parameter).__reduce_ex__(self, proto)


def _finish(parameter: nn.Parameter) -> None:
    gathering = parameter.__dict__.get("_gathering")
    if gathering is not None:
        gathering.finish()
    elif type(parameter) is Arriving:  # another thread ended the wait meanwhile, or this is a shallow copy
        cast(Any, parameter).__class__ = nn.Parameter


def reads_past_python(model: nn.Module) -> bool:
    """Tell whether compiled code may read the model's parameters. See [Note: reading waits]."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # PyTorch records the backend None for its own functions that must not be compiled; they do not count here.
    if compiler is not None and any(backend is not None for backend in compiler.cached_backends.values()):
        return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in model.modules())

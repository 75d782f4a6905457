"""The collectives that torch.distributed calls on a process group, and what a group does with each call before it starts.

``VERBS`` lists the methods. A group that checks arguments derives from ``VerbGroup`` and decorates its methods with
``collective``: such a method returns a ``PreparedCall``, which the group then starts. If the check fails on one rank, the other
ranks would wait for it until the time-out; so the refusal is reported to them in place of the call.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.autograd import profiler

from guozhuang.errors import UsageError, explain
from guozhuang.groups.base import PythonGroup
from guozhuang.groups.profiling import recorded, tensors_in
from guozhuang.world import versions


class Verb(NamedTuple):
    """A kind of collective that a process group has a method for.

    Attributes:
        name: the collective's name in error texts, that of the public function.
        options: returns default options (the last argument), for a call that gives none.
    """

    name: str
    options: Callable[[], Any]


#: The collectives of a process group, by the name of the group's method.
VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "allreduce": Verb("all_reduce", dist.AllreduceOptions),
        "allreduce_coalesced": Verb("all_reduce", dist.AllreduceCoalescedOptions),
        "reduce": Verb("reduce", dist.ReduceOptions),
        "broadcast": Verb("broadcast", dist.BroadcastOptions),
        "allgather": Verb("all_gather", AllgatherOptions),
        "allgather_coalesced": Verb("all_gather", AllgatherOptions),
        "all_gather_single": Verb("all_gather", AllgatherOptions),
        "all_gather_single_coalesced": Verb("all_gather", AllgatherOptions),
        "reduce_scatter": Verb("reduce_scatter", dist.ReduceScatterOptions),
        "reduce_scatter_single": Verb("reduce_scatter", dist.ReduceScatterOptions),
        "reduce_scatter_single_coalesced": Verb("reduce_scatter", dist.ReduceScatterOptions),
        "gather": Verb("gather", dist.GatherOptions),
        "scatter": Verb("scatter", dist.ScatterOptions),
        "alltoall": Verb("all_to_all", dist.AllToAllOptions),
        "all_to_all_single": Verb("all_to_all", dist.AllToAllOptions),
        "barrier": Verb("barrier", dist.BarrierOptions),
    }
)


def start(group: Any, method: str, *args: Any, **fields: Any) -> Any:
    """Call a collective of any group, for a caller that waits for it at once, and return its work.

    Args:
        group: the group; PyTorch's own or one of this package.
        method: the method's name, a key of ``VERBS``.
        args: the arguments before the options.
        fields: fields of the options, such as ``reduceOp`` and ``rootRank``.
    """
    options = VERBS[method].options()
    for field, value in {"asyncOp": False, **fields}.items():
        setattr(options, field, value)
    return getattr(group, versions.RENAMED.get(method, method))(*args, options)


class PreparedCall(NamedTuple):
    """A call whose arguments were checked.

    Attributes:
        job: does this rank's part of the call; its arguments are up to the group.
        tensors: the tensors that hold the result.
        what: the call in words, for errors.
        writes: whether this rank writes to ``tensors``.
    """

    job: Callable[..., object] | None
    tensors: Sequence[Tensor]
    what: str
    writes: bool = True


class VerbGroup(PythonGroup):
    """A group whose collectives are methods decorated with ``collective``. Constructor: see ``PythonGroup``."""

    def _elsewhere(self, verb: str, method: str, args: Sequence[Any]) -> Callable[[], dist.Work] | None:
        """Return a function that starts the call on another group, by ``method`` there; None if this group runs the call."""
        return None

    def _again(self, method: str, args: tuple[Any, ...]) -> dist.Work | None:
        """Run a call that is like an earlier one without preparing it anew, and return its work; None: nothing was done."""
        return None

    @abc.abstractmethod
    def _begin(self, call: PreparedCall, method: str, args: Sequence[Any]) -> dist.Work:
        """Start a prepared call in order with the group's other calls; ``args``: the method's arguments, the options last."""

    @abc.abstractmethod
    def _report_refusal(self, verb: str, why: str, options: Any) -> None:
        """Report to the peers, in this call's turn, that this rank refuses its arguments."""


def collective(prepare: Callable[..., PreparedCall]) -> Callable[..., dist.Work]:
    """Decorate a method that checks arguments: the result starts the prepared call, or reports a failed check to the peers."""
    # The methods take the tensors for the result, those that are given if these are others, more arguments, and options.
    (verb, options), native = VERBS[prepare.__name__], versions.name_of(prepare.__name__)
    num_arguments = prepare.__code__.co_argcount - 1

    @versions.never_compiled
    @functools.wraps(prepare)
    def call(self: VerbGroup, *args: Any, opts: Any = None) -> dist.Work:
        if len(args) < num_arguments:
            args = (*args, opts)
        if not profiler._is_profiler_enabled and (done := self._again(native, args)) is not None:
            return done
        if args[-1] is None:
            args = (*args[:-1], options())
        try:
            start = self._elsewhere(verb, native, args)
            if start is None:
                prepared = prepare(self, *args)
                if prepared.writes:
                    for each in prepared.tensors:
                        if each.layout is torch.strided and not each.is_contiguous():
                            check_written(each, verb, self._rank)
        except Exception as error:  # without a report the peers would wait for the whole time-out
            why = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            self._report_refusal(verb, why.removeprefix(f"[rank {self._rank}] "), args[-1])
            raise
        if start is not None:
            return start()
        if not profiler._is_profiler_enabled:
            return self._begin(prepared, native, args)
        given = tensors_in(args[min(num_arguments, 3) - 2]) if num_arguments > 1 else []
        return recorded(f"{self._backend}:{verb}", given, functools.partial(self._begin, prepared, native, args))

    return call


def check_written(tensor: Tensor, what: str, rank: int) -> None:
    """Refuse a result tensor whose elements share memory, as ``expand`` makes them."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        value = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        text = f"{what}: elements of the tensor share memory"
        raise UsageError(explain(text, value=value, rank=rank, fix="pass tensor.contiguous()"))


class UnsupportedTensor(UsageError, NotImplementedError):
    """A tensor is of a kind that the group does not carry. Also a NotImplementedError, which PyTorch's own groups raise."""


def check_memory(tensor: Tensor, what: str, rank: int) -> None:
    """Refuse a tensor without memory of its own: a DTensor, a FakeTensor, and other wrappers of tensors.

    The result of a functional collective of PyTorch is waited for, and passes.
    """
    try:
        address = 0 if hasattr(tensor, "fake_mode") else tensor.data_ptr()  # a FakeTensor warns where it is asked
    except RuntimeError:
        address = 0
    if address or not tensor.numel():
        return
    if type(tensor) is not Tensor:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(tensor, AsyncCollectiveTensor):
            tensor.trigger_wait()
            return
    fix = "pass its local part, dtensor.to_local()" if hasattr(tensor, "to_local") else "pass a plain tensor of the CPU"
    raise UnsupportedTensor(
        explain(f"{what}: this tensor has no memory of its own", value=type(tensor).__name__, rank=rank, fix=fix)
    )

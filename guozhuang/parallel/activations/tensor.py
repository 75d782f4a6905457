"""``DividedTensor``: a tensor of which this rank holds a part, and what each operation of PyTorch does with it.

[Note: as if it were whole] To the model's code it is the whole tensor: ``shape``, ``size()``, ``dim()`` answer for the whole,
so the model makes its views, masks and positions as one process does. Each operation comes to ``__torch_function__``, where a
handler that is registered for its name computes this rank's part of the result from its parts of the arguments, and from those
of other ranks where it needs them. Autograd sees the local tensors only. An operation that no handler knows gets whole tensors,
or is refused, as the ranks decide. Nothing is computed from a part by a function that takes it for the whole.

[Note: gradients of parts] On each rank the gradient of its part is n times the whole model's, n being the number of ranks; for
what all ranks have alike (parameters, pooled features), the mean of the ranks' gradients is the whole model's. So the backward
of a gather, after which each rank may do something else, adds the ranks' gradients of a rank's part; what was summed over the
ranks gets the sum of gradients; what all ranks had and each took a part of gets that part's gradient, and 0 elsewhere. The
output of the model is gathered for a loss that is equal on all ranks, whose gradients are equal too: their sum is n times
one's own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._pytree import tree_iter
from typing_extensions import override

from ...errors import UsageError, explain
from ...world.versions import reduce_scatter_single
from ..running import first_argument, running_frames
from ..spans import Span, SpansOfRanks, memory_format
from .names import DESCRIBES, is_elementwise, name_of

#: Takes an operation and its arguments, and returns the result, or NotImplemented for arguments that it is not for.
Handler = Callable[..., Any]
#: The handlers for all divided tensors, by the name of an operation.
HANDLERS: dict[str, Handler] = {}

_REFUSED = {
    "register_hook": "the gradient of a part of it would reach the hook",
    "retain_grad": "the gradient of a part of it would be kept",
    "register_post_accumulate_grad_hook": "it is no parameter",
    **dict.fromkeys(("data_ptr", "untyped_storage", "set_", "resize_", "as_strided"), "its parts lie on several ranks"),
}


class Ranks(abc.ABC):
    """The ranks that divide activations between them, as one of them sees it.

    Attributes:
        group: their process group, in the order of the parts.
        rank, size: this rank in the group, and how many they are.
        handlers: what these ranks do with operations before the handlers for all divided tensors are asked.
        with_gradients: whether the running forward was called with gradients enabled.
        is_running: whether a forward is running.
        copies: views of gathered copies that the running forward has made, their versions then, and what was gathered.
    """

    handlers: ClassVar[dict[str, Handler]] = {}

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.with_gradients = self.is_running = False
        self.copies: list[tuple[Tensor, int, list[Tensor]]] = []

    def begin(self, is_running: bool = True) -> None:
        """Begin a forward, or end it."""
        self.with_gradients, self.is_running, self.copies = torch.is_grad_enabled(), is_running, []

    def spans(self, length: int) -> SpansOfRanks:
        """Return how a dimension of this size is divided now."""
        return SpansOfRanks.in_order(length, self.size)

    def place(self, numbers: Sequence[int]) -> Place:
        """Return the place of :attr:`Place.numbers`."""
        dim, outer, inner, length, is_in_order = numbers
        spans = (SpansOfRanks.in_order if is_in_order else SpansOfRanks.zigzag)(length, self.size)
        return Place(dim, spans, self, outer, inner)

    @abc.abstractmethod
    def on_whole(self, first: DividedTensor, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute what no handler knows on whole tensors, or refuse it."""

    @abc.abstractmethod
    def refuse(self, first: DividedTensor, name: str, why: str) -> NoReturn:
        """Raise the error for an operation on an activation that cannot be right."""

    @abc.abstractmethod
    def refuse_function(self, first: DividedTensor, name: str) -> NoReturn:
        """Raise the error for a ``torch.autograd.Function`` of the model that got an activation."""

    def computed_on_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation on gathered copies. In one process, what is a view of them would be one of the activation."""
        copied = all_whole((args, kwargs))
        found = func(*copied[0], **copied[1])
        pairs = zip(tree_iter((args, kwargs)), tree_iter(copied), strict=True)
        bases = {id(_base(copy)): each.local for each, copy in pairs if type(each) is DividedTensor}
        for each in tree_iter(found):
            if isinstance(each, Tensor) and id(_base(each)) in bases:
                self.watch(each, bases.values())
        return found

    def watch(self, copy: Tensor, parts: Iterable[Tensor]) -> None:
        """Watch a copy that is a view of an activation in one process: neither may be changed in place and the other used."""
        if self.is_running and not copy.is_inference():
            self.copies.append((copy, copy._version, [_base(each) for each in parts]))

    def check_copies(self, used: Any) -> None:
        """Refuse to use an activation after a change in place of a view of a copy: it did not change with it."""
        bases = [_base(each.local) for each in divided_among(used)]
        for view, version, parts in self.copies:
            if view._version != version and any(part is base for part in parts for base in bases):
                what = "the model has changed in place what it picked from an activation; the activation did not change with it"
                fix = "use an operation that returns its result, or train with another strategy"
                raise UsageError(explain(what, value=tuple(view.shape), rank=self.rank, fix=fix))

    def gathered(self, local: Tensor, dim: int, spans: SpansOfRanks) -> Tensor:
        """Return the whole of a divided tensor, without a gradient. Every rank must call it."""
        return spans.gathered(local, dim, self.group).contiguous(memory_format=memory_format(local))

    def summed_part(self, whole: Tensor, dim: int, spans: SpansOfRanks) -> Tensor:
        """Return this rank's part of the sum of all ranks' ``whole``. Every rank must call it."""
        shape = list(whole.shape)
        shape[dim] = max(spans.counts)
        given = whole.new_zeros(self.size, *shape)
        for rank, count in enumerate(spans.counts):
            given[rank].narrow(dim, 0, count).copy_(spans.part(whole, dim, rank))
        mine = given.new_empty(shape)
        reduce_scatter_single(mine.view(-1), given.view(-1), group=self.group)
        return mine.narrow(dim, 0, spans.counts[self.rank])

    def combine(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Combine a tensor over the ranks in place; the sum by default."""
        if not tensor.is_meta:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


class Place(NamedTuple):
    """Where a tensor is divided.

    Attributes:
        dim: the divided dimension, counted from the front.
        spans: what each rank has of it.
        ranks: the ranks.
        outer, inner: the dimension may be several that a view has folded into one: ``outer`` divided dimensions, one after the
            other, each of ``inner`` entries for each of its own.
    """

    dim: int
    spans: SpansOfRanks
    ranks: Ranks
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension in the whole tensor."""
        return self.outer * self.spans.length * self.inner

    @property
    def local_size(self) -> int:
        """The size of the dimension in this rank's part."""
        return self.outer * self.spans.counts[self.ranks.rank] * self.inner

    @property
    def is_folded(self) -> bool:
        """Whether the dimension is several."""
        return self.outer != 1 or self.inner != 1

    @property
    def own_ranges(self) -> list[Span]:
        """The ranges of the dimension in the whole tensor that this rank has."""
        length, inner = self.spans.length, self.inner
        return [
            ((outer * length + start) * inner, (outer * length + stop) * inner)
            for outer in range(self.outer)
            for start, stop in self.spans.of_ranks[self.ranks.rank]
        ]

    @property
    def numbers(self) -> tuple[int, ...]:
        """What :meth:`Ranks.place` makes this place of, on any rank."""
        is_in_order = self.spans == SpansOfRanks.in_order(self.spans.length, self.ranks.size)
        return self.dim, self.outer, self.inner, self.spans.length, is_in_order

    def at(self, dim: int) -> Place:
        """Return the same division in another dimension."""
        return self if dim == self.dim else Place(dim, *self[1:])

    def is_like(self, other: Place) -> bool:
        """Return whether both divide the same way, in whatever dimension."""
        return self is other or self[1:] == other[1:]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor whose dimension ``dim`` is to be divided so."""
        spans, rank = self.spans, self.ranks.rank
        if not self.is_folded:
            return spans.part(whole, dim, rank)
        dim %= whole.dim()
        unfolded = whole.unflatten(dim, (self.outer, spans.length, self.inner))
        return spans.part(unfolded, dim + 1, rank).flatten(dim, dim + 2)


class DividedTensor(Tensor):
    """This rank's part of a tensor that several ranks hold together. See [Note: as if it were whole].

    Attributes:
        local: the part; an ordinary tensor with autograd's graph.
        place: where it is divided.
    """

    local: Tensor
    place: Place

    @staticmethod
    @override
    def __new__(cls, local: Tensor, place: Place) -> DividedTensor:
        shape = list(local.shape)
        shape[place.dim] = place.size
        made: DividedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.place = local, place
        return made

    @property
    def at(self) -> int:
        """The divided dimension, counted from the front."""
        return self.place.dim

    @property
    def position(self) -> int:
        """The divided dimension, counted from the end, as broadcasting does: negative."""
        return self.place.dim - self.local.dim()

    def like(self, local: Tensor, at: int | None = None) -> DividedTensor:
        """Return another tensor that is divided so, in the same dimension or in another."""
        return DividedTensor(local, self.place if at is None else self.place.at(at))

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rank, dim = self.place.ranks.rank, self.at
        return f"DividedTensor(shape={tuple(self.shape)}, rank {rank}'s part of dimension {dim}: {self.local!r})"

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and type(args[0]) is DividedTensor else next(divided_among((args, kwargs)))
        ranks = first.place.ranks
        name, handlers = _KNOWN.get((func, type(ranks))) or _know(func, type(ranks))
        if handlers is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _check(first, name, func, args, kwargs)
        for handler in handlers:
            found = handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return ranks.on_whole(first, name, func, args, kwargs)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        what = "an operation that PyTorch's functions do not announce got an activation of which each rank has a part"
        fix = "call it through a function of torch, or train this model with another strategy"
        raise UsageError(explain(what, value=str(func), fix=fix))


def handles(*names: str, ranks: type[Ranks] | None = None) -> Callable[[Handler], Handler]:
    """Register ``handler(operation, *args, **kwargs)`` for operations of these names, for these ranks alone or for all."""

    def register(handler: Handler) -> Handler:
        (HANDLERS if ranks is None else ranks.handlers).update(dict.fromkeys(names, handler))
        return handler

    return register


# By operation and kind of ranks: its name, and its handlers in the order in which they are asked; None: it describes.
_KNOWN: dict[tuple[Any, type[Ranks]], tuple[str, list[Handler] | None]] = {}


def _know(func: Any, kind: type[Ranks]) -> tuple[str, list[Handler] | None]:
    name = name_of(func)
    found = [table[name] for table in (kind.handlers, HANDLERS) if name in table]
    if name not in HANDLERS:
        if is_elementwise(name):
            found.append(HANDLERS["elementwise"])
        elif not found and isinstance(func, FunctionType) and any(each in func.__code__.co_names for each in _ASK):
            found.append(_opened(func))
    _KNOWN[func, kind] = name, None if name in DESCRIBES else found
    return _KNOWN[func, kind]


_ASK = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _opened(func: FunctionType) -> Handler:
    """Run a torch function that is written in Python as it is written, so that the functions it calls come here."""
    names = {**func.__globals__, **dict.fromkeys(_ASK, lambda *_: False)}
    inside = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return lambda _, *args, **kwargs: inside(*args, **kwargs)


def divided_among(arguments: Any) -> Iterator[DividedTensor]:
    """Yield the divided tensors among arguments: in tuples, lists and dictionaries too."""
    if type(arguments) is DividedTensor:
        yield arguments
    elif isinstance(arguments, tuple | list):
        for each in arguments:
            yield from divided_among(each)
    elif isinstance(arguments, Mapping):
        yield from divided_among(list(arguments.values()))


def _check(first: DividedTensor, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be right."""
    ranks = first.place.ranks
    if ranks.copies:
        ranks.check_copies((args, kwargs))
    why = _REFUSED.get(name) or ("it is an activation inside the model" if name.endswith(" =") else None)
    if kwargs.get("out") is not None:
        why = "the result of out= would be parts of several ranks"
    if func is torch.autograd.grad:
        why = "the gradient of this rank's part would be taken for the whole one"
    if why is not None:
        ranks.refuse(first, name, why)
    if ranks.with_gradients and not torch.is_grad_enabled() and (function := _running_function()):
        ranks.refuse_function(first, function)


def _running_function() -> str | None:
    """Return the name of the innermost ``torch.autograd.Function`` of the model whose forward is running."""
    for frame in running_frames():
        first = first_argument(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(first, FunctionCtx):
            if frame.f_globals["__name__"].startswith("guozhuang."):  # a pipeline runs the model inside of its own
                return None
            return type(first).__name__.removesuffix("Backward")
    return None


class _Gather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, dim: int, spans: SpansOfRanks, ranks: Ranks, equal: bool) -> Tensor:
        ctx.dim, ctx.spans, ctx.ranks, ctx.equal = dim, spans, ranks, equal
        return ranks.gathered(local, dim, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.equal:
            mine = ctx.spans.part(gradient, ctx.dim, ctx.ranks.rank) * ctx.ranks.size
        else:
            mine = ctx.ranks.summed_part(gradient, ctx.dim, ctx.spans)
        return mine, None, None, None, None


def whole_of(value: Any, equal: bool = False) -> Any:
    """Gather a divided tensor; any other value is returned as it is. Every rank must call it. See [Note: gradients of parts].

    Args:
        equal: whether all ranks compute the same from the result, as they do from outputs: the backward then sends nothing.
    """
    if type(value) is not DividedTensor:
        return value
    place, local, dim = value.place, value.local, value.place.dim
    if place.ranks.copies:
        place.ranks.check_copies(value)
    if place.is_folded:
        local, dim = local.unflatten(dim, (place.outer, -1, place.inner)), dim + 1
    whole: Tensor = _Gather.apply(local, dim, place.spans, place.ranks, equal)  # type: ignore[no-untyped-call]
    return whole.flatten(dim - 1, dim + 1) if place.is_folded else whole


def local_of(value: Any) -> Any:
    """Return this rank's part of a divided tensor, as an ordinary one; any other value is returned as it is."""
    return value.local if type(value) is DividedTensor else value


def all_whole(value: Any) -> Any:
    """Gather the divided tensors in nested arguments."""
    if isinstance(value, tuple | list):
        return type(value)([all_whole(each) for each in value])
    if isinstance(value, dict):
        return {key: all_whole(each) for key, each in value.items()}
    return whole_of(value)


def cut_where_it_meets(value: Any, place: Place, position: int) -> Any:
    """Return the local operand to go with one divided at ``position``, counted from the last dimension (negative).

    What is divided in the same way is there; what is divided otherwise is gathered; and what is whole is cut, unless
    broadcasting repeats it.
    """
    if type(value) is DividedTensor:
        if value.position == position and value.place.is_like(place):
            return value.local
        value = whole_of(value)
    if not isinstance(value, Tensor) or value.dim() < -position or value.shape[position] == 1:
        return value
    if value.shape[position] != place.size:
        what = f"a tensor of shape {tuple(value.shape)} must match the size of another in dimension {position}: {place.size}"
        raise RuntimeError(what)
    return place.cut(value, position)

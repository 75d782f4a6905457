"""``DividedTokens``: a tensor of which this rank holds some tokens, while the model computes as if it were whole.

[Note: as if it were whole] Sizes that a model sees are those of the whole tensor, so it makes its views, masks and positions as
one process does. Each torch function that gets such a tensor is looked up by its name among the rules of this folder. A rule
computes this rank's part of the result from this rank's parts of the operands, and knows in which dimension the result is
divided; whole operands are cut where they meet a divided one. A function that has no rule, or joins tokens in a way that no
rule knows, is given whole tensors outside of the blocks, and is refused inside them. Nothing is computed from a part by
a function that takes it for the whole.

The local part is the tensor itself; its class says that functions come here first, and its attribute ``place`` where it is
divided. Both belong to the Python object. An autograd function keeps tensors without them, so that its backward would take
a part for the whole; those of other packages are therefore refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from typing_extensions import override

from guozhuang.errors import UsageError, explain

from .spans import Span, TokenSpans
from .team import Team, gather, gather_equal

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Torch functions by name, without the underscores of operators and in-place forms, to the rule for them.
_RULES: dict[str, Rule] = {}
_FOUND: dict[Any, Rule] = {}


@dataclass(frozen=True)
class Place:
    """Where a tensor is divided.

    Attributes:
        dim: the divided dimension, counted from the front.
        spans: the tokens of each rank.
        team: the ranks.
        outer, inner: the dimension may be several that a view has folded into one: ``outer`` sequences, one after the
            other, each of ``inner`` entries for each token.
    """

    dim: int
    spans: TokenSpans
    team: Team
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension in the whole tensor."""
        return self.outer * self.spans.length * self.inner

    @property
    def local_size(self) -> int:
        """The size of the dimension in this rank's part."""
        return self.outer * self.spans.counts[self.team.rank] * self.inner

    @property
    def own_ranges(self) -> list[Span]:
        """The ranges of the dimension in the whole tensor that this rank has."""
        length, inner = self.spans.length, self.inner
        return [
            ((outer * length + start) * inner, (outer * length + stop) * inner)
            for outer in range(self.outer)
            for start, stop in self.spans.of_ranks[self.team.rank]
        ]

    def at(self, dim: int) -> Place:
        """The same division in another dimension."""
        return self if dim == self.dim else dataclasses.replace(self, dim=dim)

    def is_like(self, other: Place) -> bool:
        """Whether both divide the same way, in whatever dimension."""
        return self.spans == other.spans and (self.outer, self.inner) == (other.outer, other.inner)


class DividedTokens(Tensor):
    """This rank's part of a tensor that is divided by tokens. See [Note: as if it were whole]."""

    place: Place

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            # The backward of one of this package's autograd functions, which knows that what it has kept is a part.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return (_FOUND.get(func) or _find(func))(func, args, kwargs or {})

    @override
    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"DividedTokens(rank {self.place.team.rank}, dim {self.place.dim}: {self.detach().as_subclass(Tensor)})"
            )


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of the torch functions with these names. It sees divided tensors as the local ones they are."""

    def add(function: Rule) -> Rule:
        def closed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                for each in args:
                    if type(each) is DividedTokens:
                        check_history(each)
                return function(func, args, kwargs)

        _RULES.update(dict.fromkeys(names, closed))
        return closed

    return add


def divided(local: Tensor, place: Place) -> Tensor:
    """Say that a tensor is this rank's part of one that is divided at ``place``. Changes and returns the tensor itself."""
    local.__class__ = DividedTokens
    local.place = place  # type: ignore[attr-defined]
    return local


def place_of(value: Any) -> Place | None:
    """Where a value is divided; None if it is whole, or no tensor."""
    return value.place if type(value) is DividedTokens else None


def cut(whole: Tensor, place: Place, dim: int) -> Tensor:
    """Return this rank's part of a whole tensor whose dimension ``dim`` is to be divided as ``place`` is."""
    spans, rank = place.spans, place.team.rank
    if place.outer == place.inner == 1:
        return spans.part(whole, dim, rank)
    dim %= whole.dim()
    return spans.part(whole.unflatten(dim, (place.outer, spans.length, place.inner)), dim + 1, rank).flatten(
        dim, dim + 2
    )


def cut_where_it_meets(value: Any, place: Place, position: int) -> Any:
    """Cut a whole operand that is broadcast against one divided at ``position``, counted from the last dimension (negative)."""
    if not isinstance(value, Tensor) or value.dim() < -position or value.shape[position] == 1:
        return value
    if value.shape[position] != place.size:
        raise RuntimeError(
            f"a tensor of shape {tuple(value.shape)} does not fit one of {place.size} entries in dimension {position}"
        )
    return cut(value, place, position)


def whole_of(value: Any, equal: bool = False) -> Any:
    """Gather a divided tensor; any other value is returned as it is. Every rank of the sequence must call it.

    Args:
        equal: whether all ranks do the same with the result, so that its gradient is the same on all of them.
    """
    place = place_of(value)
    if place is None:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        check_history(value)
        local, dim = value, place.dim
        is_folded = not place.outer == place.inner == 1
        if is_folded:
            local, dim = local.unflatten(dim, (place.outer, -1, place.inner)), dim + 1
        whole = (gather_equal if equal else gather)(local, dim, place.spans, place.team)
        return whole.flatten(dim - 1, dim + 1) if is_folded else whole


def each_divided(value: Any) -> Iterator[DividedTokens]:
    """The divided tensors among arguments: in tuples, lists and dictionaries too."""
    if type(value) is DividedTokens:
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from each_divided(each)
    elif isinstance(value, Mapping):
        yield from each_divided(list(value.values()))


def check_history(value: Any) -> None:
    """Raise if a divided tensor comes from an autograd function of another package. See [Note: as if it were whole]."""
    made_by: Any = value.grad_fn
    if isinstance(made_by, BackwardCFunction):
        function: Any = made_by._forward_cls  # type: ignore[attr-defined]
        if function.__module__.partition(".")[0] != "guozhuang":
            refuse(value.place.team, f"the autograd function {function.__qualname__}")


def refuse(team: Team, what: str) -> NoReturn:
    """Raise the error for something in the model that cannot be computed from divided tokens.

    Raises:
        UsageError: always; the text names the module that runs.
    """
    inside = next((each for each in _running_modules() if id(each) in team.names), None)
    name = (team.names[id(inside)] if inside is not None else "") or (team.in_blocks[-1] if team.in_blocks else "")
    raise UsageError(
        explain(
            f"The sequence cannot be divided in this model: {what} may join tokens in a way that is not attention"
            + (f", in {name!r}" if name else "")
            + (f", a {type(inside).__qualname__}" if inside is not None and name else ""),
            rank=team.rank,
            fix="train it by another strategy (tensor and pipeline divide such models), or let it act on each token "
            "alone; attention is followed in torch's scaled_dot_product_attention, MultiheadAttention, matmul and einsum; "
            "gradient checkpointing needs use_reentrant=False",
        )
    )


def _running_modules() -> Iterator[nn.Module]:
    """The modules whose methods run, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back  # type: ignore[assignment]


def by_gathering(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with whole tensors where there is no rule for it. See [Note: as if it were whole]."""
    name = _name_of(func)
    team = next(each_divided((args, kwargs))).place.team
    changes = kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__"))
    if team.in_blocks or changes or name.startswith(("__set", "__i")):
        refuse(team, f"the operation {name.strip('_')!r}")
    with torch._C.DisableTorchFunctionSubclass():
        return func(*_gathered(args), **_gathered(kwargs))


def _gathered(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_gathered(each) for each in value])
    if isinstance(value, dict):
        return {key: _gathered(each) for key, each in value.items()}
    return whole_of(value)


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # of a property of tensors
        return ("" if name == "__get__" else "__set_") + str(func.__self__.__name__)
    return name.partition(".")[0]


def _find(func: Any) -> Rule:
    name = _name_of(func)
    base = name.strip("_")
    found = _RULES.get(name) or _RULES.get(base)
    if found is None and _is_python(func):
        found = _opened(func)
    if found is None:
        packet = getattr(torch.ops.aten, base, None)
        if packet is not None and any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()):
            found = _RULES["*"]
    _FOUND[func] = found or by_gathering
    return _FOUND[func]


_ASK = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _is_python(func: Any) -> bool:
    return isinstance(func, FunctionType) and any(name in func.__code__.co_names for name in _ASK)


def _opened(func: FunctionType) -> Rule:
    """Run a torch function that is written in Python as it is written, so that the functions it calls come here."""
    inside = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(_ASK, lambda *_: False)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    inside.__kwdefaults__ = func.__kwdefaults__
    return lambda _, args, kwargs: inside(*args, **kwargs)

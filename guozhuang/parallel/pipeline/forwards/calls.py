"""Which units a model's forward calls, in which order, and whose outputs each of them needs.

[Note: a forward without its units] The model's own forward runs with every unit passed over: its call returns zeros of the
right shapes (``outputs.py``). What is left is the code between the units, called *glue*: loops, masks, residual additions,
reshapes. It runs for real, on the real inputs, and each of its operations is seen. Tensors that come of a unit's output are
known by their memory, so that an input of a unit, or of the model's result, tells which outputs it was computed from. Where
glue reads a value into Python (``if x.max() > 1``), everything that follows needs what was read.

What follows the last call is the model's *tail*: it makes what the model returns of the outputs of units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ....errors import UsageError, explain
from ....world.devices import device_of
from ...running import running_frames
from .decisions import Line, reading_line
from .intercept import intercepted
from .outputs import UnitOutputs, filled, tensors_in, with_hooks

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
}
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Value(NamedTuple):
    """One tensor that a unit returns: the name of its call, and its place among the leaves of the output."""

    call: str
    leaf: int


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit in a forward.

    Attributes:
        name: the unit's name, with ``#2`` at its second call.
        unit: the unit's name.
        needs: the outputs of earlier calls that its inputs are computed from.
        hides_graph: it lies in an activation checkpoint of the old kind, which computes its graph in the backward only.
        shapes: of the tensors that it returns.
    """

    name: str
    unit: str
    needs: frozenset[Value]
    hides_graph: bool
    shapes: tuple[torch.Size, ...]


@dataclass(frozen=True)
class ObservedForward:
    """What one run of a model's forward has shown. See [Note: a forward without its units].

    Attributes:
        calls: in their order.
        tail: the outputs of units that the model's result is computed from.
        changed: the outputs that glue changes in place.
        parameters: the parameters that glue reads itself, by their names in the model.
        deciding: the lines where Python code reads values of outputs, before the last call.
    """

    calls: tuple[UnitCall, ...]
    tail: frozenset[Value]
    changed: frozenset[Value]
    parameters: frozenset[str]
    deciding: frozenset[Line]


def observe(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    outputs: UnitOutputs,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ObservedForward:
    """Run a model's forward without its units, and return what it calls. The generator's state stays as it was.

    Args:
        model: whole: its units still have their parameters.
        units: by name.
        outputs: what units return for which shapes; it learns here.
        args: the positional inputs.
        kwargs: the keyword inputs.

    Raises:
        UsageError: something that a unit does cannot be known on other ranks; the text names it.
    """
    sources = _Sources(model)
    calls: list[UnitCall] = []
    deciding: set[Line] = set()
    device = device_of(tensors_in((args, dict(kwargs))))

    def on_call(name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with sources.paused():
            needs = sources.of_all(tensors_in((args, kwargs))) | sources.read
            deciding.update(sources.lines)
            is_hidden = _is_in_old_checkpoint()
            output = outputs.run(name, unit, proceed, args, kwargs)
            shapes = tuple(leaf.shape for leaf in output.leaves if isinstance(leaf, Tensor))
            calls.append(UnitCall(name, name.partition("#")[0], frozenset(needs), is_hidden, shapes))
            # Memory of its own for each: glue may change it in place.
            zeros = {
                i: torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
                for i, leaf in enumerate(output.leaves)
                if isinstance(leaf, Tensor)
            }
            for i, tensor in zeros.items():
                sources.add(tensor, Value(name, i))
            found = filled(output, zeros, 0.0, device)
        return with_hooks(unit, args, kwargs, found)

    rows = next((each.shape[0] for each in tensors_in((args, dict(kwargs))) if each.dim()), 0)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        _samples_are_first(model, rows),
        intercepted(units, on_call),
        sources,
    ):
        try:
            found = model(*args, **kwargs)
        except NotImplementedError as error:
            if "meta" not in str(error):
                raise
            raise _taken_from_inside(model) from error
    if any(each.is_meta for each in tensors_in(found)):
        raise _taken_from_inside(found)
    tail = sources.of_all(tensors_in(found)) | sources.read
    changed, parameters = frozenset(sources.changed), frozenset(sources.parameters)
    return ObservedForward(tuple(calls), frozenset(tail), changed, parameters, frozenset(deciding))


def _taken_from_inside(where: Any) -> UsageError:
    what = "the model uses or returns tensors that were taken from inside of its parts, which other stages compute"
    asked = "output_attentions, output_hidden_states, output_router_logits"
    fix = f"do not ask for them (in Hugging Face models: {asked}), or use a layout without pp"
    return UsageError(explain(what, value=type(where).__name__, fix=fix))


@contextlib.contextmanager
def _samples_are_first(model: nn.Module, rows: int) -> Iterator[None]:
    """Raise if a module in which samples are the second dimension is called, in this block, with what lay first as the first.

    A batch that was cut along its sequences would be computed without an error, and wrong.
    """

    def check(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("query", kwargs.get("input"))
        if isinstance(given, Tensor) and given.dim() == 3 and given.shape[0] == rows != given.shape[1]:
            name = next(name for name, each in model.named_modules() if each is module)
            what = f"a pipeline cuts a batch along the first dimension, where {name} has steps of a sequence, and not samples"
            fix = "construct it with batch_first=True and let samples be the first dimension of the model's inputs"
            raise UsageError(explain(what, value=f"{type(module).__name__} on {tuple(given.shape)}", fix=fix))

    handles = [
        module.register_forward_pre_hook(check, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_in_old_checkpoint() -> bool:
    return any(frame.f_code is checkpoint.CheckpointFunction.forward.__code__ for frame in running_frames())


class _Sources:
    """For each tensor that glue makes, the outputs of units that it was computed from."""

    def __init__(self, model: nn.Module) -> None:
        self.read: set[Value] = set()
        self.lines: set[Line] = set()
        self.changed: set[Value] = set()
        self.parameters: set[str] = set()
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
        self._found: dict[int, set[Value]] = {}
        self._made: dict[int, Value] = {}
        self._kept: list[Any] = []  # memory is not given to another tensor while its address is known here
        self._is_paused = False
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._modes.enter_context(_SeesReads(self))
        self._modes.enter_context(_SeesOperations(self))

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look away: what happens in this block is no glue."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def add(self, tensor: Tensor, value: Value) -> None:
        """Note that this tensor is an output of a unit."""
        key = self._key(tensor)
        if key is not None:
            self._found[key] = {value}
            self._made[key] = value

    def of_all(self, tensors: Any) -> set[Value]:
        """Return the outputs that any of these tensors was computed from."""
        keys = [self._key(each) for each in tensors]
        return set().union(*(self._found.get(key, ()) for key in keys if key is not None))

    def reads(self, tensors: Any) -> None:
        """Note that Python code has read values of these tensors."""
        if not self._is_paused:
            self.read |= self.of_all(tensors)

    def operation(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Note what an operation's results were computed from."""
        if self._is_paused:
            return
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        sources = self.of_all(given)
        if func in _READS:
            self.read |= sources
            if sources and (line := reading_line()) is not None:
                self.lines.add(line)
        self.parameters |= {self._names[key] for each in given if (key := self._key(each)) in self._names}
        for each in pytree.tree_leaves(found):
            if isinstance(each, Tensor) and sources and (key := self._key(each)) is not None:
                self._found[key] = self._found.get(key, set()) | sources
        if func._schema.is_mutable:
            written = [
                args[i] if i < len(args) else kwargs.get(argument.name)
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            keys = [self._key(each) for each in pytree.tree_leaves(written) if isinstance(each, Tensor)]
            self.changed |= {self._made[key] for key in keys if key in self._made}

    def _key(self, tensor: Tensor) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a layout without one memory, such as a sparse one
            return None
        self._kept.append(storage)
        return int(storage._cdata)


class _SeesOperations(TorchDispatchMode):
    def __init__(self, sources: _Sources) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._sources.operation(func, args, kwargs or {}, found)
        return found


class _SeesReads(TorchFunctionMode):
    """Sees the methods that read a tensor's memory without an operation."""

    def __init__(self, sources: _Sources) -> None:
        super().__init__()
        self._sources = sources

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING_METHODS:
            self._sources.reads(args[:1])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Routes:
    """Which calls each stage makes, and which outputs each sends to which.

    Attributes:
        stage_of: the stage of each call, by its name.
        order: the names of all calls, in their order.
        messages: the values that one stage sends another, by both, in one order for both ends.
        result: the values that the last stage gives to the tail.
        changed, deciding: see :class:`ObservedForward`.
    """

    stage_of: dict[str, int]
    order: tuple[str, ...]
    messages: dict[tuple[int, int], tuple[Value, ...]]
    result: tuple[Value, ...]
    changed: frozenset[Value]
    deciding: frozenset[Line]


def route(calls: ObservedForward, stage_of: Mapping[str, int], num_stages: int, opaque: Mapping[str, Any]) -> Routes:
    """Return what each stage sends to which, if each computes the calls that are its own.

    Every stage sends something to the next, so that it is part of the pipeline even if nothing needs it.

    Args:
        calls: of the model's forward.
        stage_of: the stage of each call; never falls along the calls.
        num_stages: how many there are.
        opaque: the calls whose outputs are not known in advance; all later stages and the tail get them.

    Raises:
        UsageError: an output has no graph that another stage's could be joined to.
    """
    last = num_stages - 1
    place = {call.name: i for i, call in enumerate(calls.calls)}
    needed: dict[int, set[Value]] = {stage: set() for stage in range(num_stages)}
    for call in calls.calls:
        needed[stage_of[call.name]] |= call.needs
    result = set(calls.tail)
    for name in opaque.keys() & stage_of.keys():
        values = {Value(name, i) for i, leaf in enumerate(opaque[name].leaves) if isinstance(leaf, Tensor)}
        for stage in range(stage_of[name] + 1, num_stages):
            needed[stage] |= values
        result |= values
    needed[last] |= result
    messages: dict[tuple[int, int], list[Value]] = {(stage, stage + 1): [] for stage in range(last)}
    for stage, values in needed.items():
        for value in sorted(values, key=lambda value: (place[value.call], value.leaf)):
            if stage_of[value.call] != stage:
                messages.setdefault((stage_of[value.call], stage), []).append(value)
    hidden = {call.name for call in calls.calls if call.hides_graph}
    crossing = {value.call for values in messages.values() for value in values} | {value.call for value in result}
    if hidden & crossing:
        name = min(hidden & crossing, key=lambda name: place[name])
        what = f"{name} lies in an activation checkpoint of the old kind, which hides its graph from other stages"
        raise UsageError(explain(what, value="use_reentrant=True", fix="give checkpoint(..., use_reentrant=False)"))
    tail = tuple(sorted(result, key=lambda value: (place[value.call], value.leaf)))
    sent = {edge: tuple(values) for edge, values in messages.items()}
    return Routes(dict(stage_of), tuple(place), sent, tail, calls.changed, calls.deciding)

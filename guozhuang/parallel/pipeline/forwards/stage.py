"""One stage of a pipeline: the model's own forward, of which it computes some calls and passes over the rest.

A stage runs the model's forward on a microbatch. Calls that it owns are made. Calls of earlier stages return what was
received, or a tensor of the right shape without content where nothing here needs them. After the last call that the stage owns
the forward ends. So the model stays as it was written: no layer is moved, no name changes, and masks, positions and loops are
the model's own. See [Note: a forward without its units] in ``calls.py``.

Tensors without content hold NaN. If a value was needed of which nothing told, the loss is NaN, and not a little wrong.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....errors import UsageError, explain
from ...activations.tensor import DividedTensor, local_of
from ...axes import WHOLE, Around
from ...random import Draws
from .calls import Routes, Value
from .decisions import Decisions
from .intercept import intercepted
from .outputs import UnitOutput, UnitOutputs, filled, tensors_in, with_hooks, without_hooks


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch.

    Attributes:
        number: counts from 0 within the batch.
        args: the positional inputs of the model, cut to these rows.
        kwargs: the keyword inputs.
        rows: which rows of the batch.
        num_rows: of the batch.
        dims: of each leaf of the inputs, in which dimension it was cut; None: it is whole.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: slice
    num_rows: int
    dims: tuple[int | None, ...] = ()


@dataclass
class StageOutput:
    """What the forward of a stage returns.

    Attributes:
        sends: by destination stage the tensors that it needs, in the order of the routes.
        result: of the last stage: the tensors that the tail needs, or what the model returns; None of others.
    """

    sends: Mapping[int, Sequence[Tensor | None]] = field(default_factory=dict)
    result: Any = None


class _ForwardEnds(BaseException):
    """Leaves the model's forward after the last call that a stage makes. No ``except Exception`` of the model stops it."""


class GlueBuffers:
    """The persistent buffers of a model outside its units, which its forward may change, as a count of its calls.

    The forward of a stage runs for each microbatch, and to its end on the last stage only. What it does to these buffers is
    undone; the model's tail runs once for the batch, as in one process.

    Args:
        model: whole.
        units: by name.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        inside = {id(module) for unit in units.values() for module in unit.modules()}
        self._places = [
            (module, key)
            for module in model.modules()
            if id(module) not in inside
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        ]

    @contextlib.contextmanager
    def unchanged(self, *, is_allowed: bool = True) -> Iterator[None]:
        """Let the model's forward see and change copies until the block ends.

        Raises:
            UsageError: it has changed one, and that is not allowed.
        """
        kept = [module._buffers[key] for module, key in self._places]
        for (module, key), buffer in zip(self._places, kept, strict=True):
            module._buffers[key] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            now = [module._buffers[key] for module, key in self._places]
            for (module, key), buffer in zip(self._places, kept, strict=True):
                module._buffers[key] = buffer
        for (module, key), was, is_now in zip(self._places, kept, now, strict=True):
            if not is_allowed and was is not None and (is_now is None or not torch.equal(was, is_now)):
                what = f"the model's forward changes its buffer {key}, which under this schedule each stage would do by itself"
                fix = "change it outside of forward, or use the schedule gpipe"
                raise UsageError(explain(what, value=type(module).__name__, fix=fix))


class Stage:
    """One stage of a model.

    Args:
        model: the whole model; the units of other stages may have no parameters left.
        units: by name; see :func:`guozhuang.parallel.pipeline.blocks.find_units`.
        outputs: what units return for which shapes.
        routes: which stage makes which call, and who gets its outputs.
        draws: this stage's random operations.
        index: of this stage.
        num_stages: of the pipeline.
        glue: the buffers outside of units.
        runs_tail: the last stage runs the model's forward to its end, and its result is what the model returns.
        around: divides the samples themselves; what is sent are this rank's parts.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        outputs: UnitOutputs,
        routes: Routes,
        draws: Draws,
        index: int,
        num_stages: int,
        glue: GlueBuffers,
        *,
        runs_tail: bool = False,
        around: Around = WHOLE,
    ) -> None:
        self._around = around
        # By source stage, which parts it has last sent; by destination, which ones were last sent there.
        self._came: dict[int, list[tuple[int, ...]]] = {}
        self._went: dict[int, list[tuple[int, ...]]] = {}
        self._model, self._units, self._outputs, self._routes, self.index = model, units, outputs, routes, index
        self.draws, self._glue, self._is_step = draws, glue, runs_tail
        self._decisions = Decisions(routes.deciding)
        self._is_last, self._runs_tail = index == num_stages - 1, runs_tail and index == num_stages - 1
        self._own = frozenset(name for name, stage in routes.stage_of.items() if stage == index)
        self._end = next((name for name in reversed(routes.order) if name in self._own), None)
        self.sends = {target: values for (source, target), values in routes.messages.items() if source == index}
        self.receives = {source: values for (source, target), values in routes.messages.items() if target == index}
        crossing = [*self.sends.values(), routes.result if self._is_last else ()]
        self._crossing = frozenset(value for values in crossing for value in values)

    def forward(self, microbatch: Microbatch, received: Mapping[int, Sequence[Tensor | None]]) -> StageOutput:
        """Compute one microbatch.

        Args:
            microbatch: its inputs, equal on all stages.
            received: by source stage the tensors that :attr:`receives` names, in that order.

        Raises:
            UsageError: the forward did not call the units that it called before.
        """
        given: dict[Value, Tensor] = {}
        is_first = microbatch.number == 0
        if is_first:
            self.draws.begin()
        for source, tensors in received.items():
            values = self.receives[source]
            mine = self._from_local(source, tensors[: len(values)], tensors[len(values)], is_first)
            given.update((v, t) for v, t in zip(values, mine, strict=True) if t is not None)
            if is_first and source == self.index - 1 and (state := tensors[len(values) + 1]) is not None:
                self.draws.set_state(state)
        kept = dict(given)
        result = None
        drawing = self.draws.microbatch(microbatch.rows, microbatch.num_rows, self._model.training)
        with drawing, self._glue.unchanged(is_allowed=not self._is_step):
            if self._end is not None or self._runs_tail:
                end = None if self._runs_tail else self._end
                forward = PassingForward(
                    self._units, self._outputs, self._routes, self.draws, self._own, given, self._crossing
                )
                args, kwargs = self._around.inputs(microbatch.args, microbatch.kwargs)
                with self._decisions.of(microbatch.number):
                    found = forward.run(self._model, args, kwargs, end)
                kept.update(forward.kept)
                result = found if self._runs_tail else None
        if self._is_last and not self._runs_tail:
            result = [kept[value] for value in self._routes.result]
        result = self._around.outputs(result)
        sends: dict[int, list[Tensor | None]]
        sends = {
            target: self._to_local(target, [kept.get(value) for value in values], is_first)
            for target, values in self.sends.items()
        }
        if is_first and not self._is_last:
            sends[self.index + 1].append(self.draws.state())
        return StageOutput(sends, result)

    def _to_local(self, target: int, tensors: Sequence[Tensor | None], is_first: bool) -> list[Tensor | None]:
        """Return a message: this rank's parts, and which parts they are, if those of the last message were others."""
        told = [each.place.numbers if isinstance(each, DividedTensor) else () for each in tensors]
        before, self._went[target] = [()] * len(told) if is_first else self._went[target], told
        words = [word for numbers in told for word in (len(numbers), *numbers)]
        return [*map(local_of, tensors), torch.tensor(words, dtype=torch.int64) if told != before else None]

    def _from_local(
        self, source: int, tensors: Sequence[Tensor | None], told: Tensor | None, is_first: bool
    ) -> list[Tensor | None]:
        """Return what a message of :meth:`_to_local` was made of."""
        if is_first:
            self._came[source] = [()] * len(tensors)
        if told is not None:
            words = iter(told.tolist())
            self._came[source] = [tuple(next(words) for _ in range(count)) for count in words]
        ranks = self._around.ranks
        return [
            DividedTensor(local, ranks.place(numbers)) if local is not None and numbers and ranks is not None else local
            for local, numbers in zip(tensors, self._came[source], strict=True)
        ]

    def around_backward(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Return a context in which the backward of a microbatch runs, of which activation checkpointing is a part."""
        return self.draws.backward(microbatch.rows, microbatch.num_rows)


class PassingForward:
    """One run of a model's forward that passes over calls.

    Args:
        units: by name.
        outputs: what units return for which shapes.
        routes: what the forward calls.
        draws: the random operations of this stage.
        own: the calls that are made.
        given: outputs of other calls.
        crossing: outputs of own calls that are wanted.
        pieces: outputs of other calls that are to be joined: those of the microbatches of a batch, in their order.

    Attributes:
        kept: the outputs that were wanted, after the run.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        outputs: UnitOutputs,
        routes: Routes,
        draws: Draws,
        own: frozenset[str],
        given: Mapping[Value, Tensor],
        crossing: frozenset[Value],
        pieces: Mapping[Value, Sequence[Tensor]] | None = None,
    ) -> None:
        self._units, self._outputs, self._routes, self._draws, self._own = units, outputs, routes, draws, own
        self._given, self._crossing, self._pieces = given, crossing, pieces or {}
        self._crossing_calls = {value.call for value in crossing}
        self._device = torch.device("cpu")
        self._position = 0
        self._end: str | None = None
        self.kept: dict[Value, Tensor] = {}

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], end: str | None) -> Any:
        """Run the forward, up to the call of this name or to its end; return what the model returned, or None."""
        self._end = end
        self._device = next((each.device for each in tensors_in((args, dict(kwargs)))), self._device)
        with intercepted(self._units, self._on_call):
            try:
                found = model(*args, **kwargs)
            except _ForwardEnds:
                return None
        if self._position != len(self._routes.order):
            self._differs("ended")
        if end is not None:
            return None
        return found

    def _on_call(self, name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._position >= len(self._routes.order) or self._routes.order[self._position] != name:
            self._differs(f"called {name}")
        self._position += 1
        if name in self._own:
            with self._draws.unit(own=True):
                found, args, kwargs = without_hooks(unit, proceed, args, kwargs)
                if name in self._crossing_calls:
                    self._keep(name, found)  # as its hooks find it, because they are called where it is received too
                if unit._forward_hooks:
                    found = self._hooked(name, unit, args, kwargs, found)
            if name == self._end:
                raise _ForwardEnds
            return found
        with self._draws.unit(own=False):
            return self._passed_over(name, unit, proceed, args, kwargs)

    def _hooked(self, name: str, unit: nn.Module, args: Any, kwargs: Any, found: Any) -> Any:
        watched = [each for each in self.kept.values() if not each.is_inference()]
        versions = [each._version for each in watched]
        found = with_hooks(unit, args, kwargs, found)
        if versions != [each._version for each in watched]:
            what = f"a forward hook of {name} changes its output in place, of which other stages get what it was before"
            raise UsageError(explain(what, value=type(unit).__name__, fix="let the hook return a new tensor"))
        return found

    def _passed_over(self, name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = self._outputs.of(name, unit, proceed, args, kwargs)
        places = [i for i, leaf in enumerate(output.leaves) if isinstance(leaf, Tensor)]
        given = {i: self._given[Value(name, i)] for i in places if Value(name, i) in self._given}
        for i in places:
            if (value := Value(name, i)) in self._pieces:
                given[i] = _joined(value, self._pieces[value], output, self._outputs)
            elif i not in given and value in self._routes.changed:
                given[i] = torch.zeros(output.leaves[i].shape, dtype=output.leaves[i].dtype, device=self._device)
        return with_hooks(unit, args, kwargs, filled(output, given, math.nan, self._device))

    def _keep(self, name: str, found: Any) -> None:
        for i, leaf in enumerate(pytree.tree_leaves(found)):
            value = Value(name, i)
            if value not in self._crossing or not isinstance(leaf, Tensor):
                continue
            self.kept[value] = leaf.clone() if value in self._routes.changed else leaf

    def _differs(self, what: str) -> None:
        order, place = self._routes.order, self._position
        expected = f"call {order[place]}" if place < len(order) else "end"
        what = f"the model's forward {what} where it was to {expected}, as in its first run with inputs of this kind"
        fix = "a forward that calls other modules for other data cannot be divided into stages"
        raise UsageError(explain(what, value=f"call {place + 1} of {len(order)}", fix=fix))


def _joined(value: Value, pieces: Sequence[Tensor], output: UnitOutput, outputs: UnitOutputs) -> Tensor:
    """Return a whole batch's output, of those of its microbatches."""
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    shape = output.leaves[value.leaf].shape
    if value.call in outputs.opaque or len(shape) != first.dim():
        dims = [d for d in range(first.dim()) if len({piece.shape[d] for piece in pieces}) > 1] or list(
            range(first.dim())
        )
    else:
        dims = [d for d in range(first.dim()) if sum(piece.shape[d] for piece in pieces) == shape[d] != first.shape[d]]
    if not dims:
        what = f"{value.call} returns a tensor without a dimension for samples, which the model's output is made of"
        fix = "return a value for each sample, because those of microbatches cannot be joined, or give microbatches=1"
        raise UsageError(explain(what, value=tuple(first.shape), fix=fix))
    return torch.cat(list(pieces), dims[0])

"""Random operations in the forward of a divided model draw what one process draws for the whole batch and the whole model.

[Note: whole draws] The generators of all ranks that hold one copy of the model have equal states when a forward begins. A draw
is made for the whole shape, and a rank takes its part, so after it the states are equal again, and are one process's.
In a pipeline a stage works on a microbatch at a time: the first one draws for all rows, later ones get their rows of what was
kept. The state goes from stage to stage with the first microbatch, so no number is drawn by two stages.
A draw is found again by the generator's state before it. For that, the generator is set in each microbatch to where it was in
the first one. What torch.utils.checkpoint computes again gets the same numbers, because it restores the generator's state.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ...errors import UsageError, explain
from ...world.devices import device_of
from .divided import DividedDim, declared, parts_of, take
from .operations import Operation, default_generator, generator_of, is_meta, operation, zeros
from .rows import Draw, Pattern, RowDims
from .watching import Watch

# How the place of a draw between units is sent: two int64.
_GLUE_BYTES = 16


@dataclass
class _Kept:
    """What a draw of the first microbatch leaves for the others.

    Attributes:
        drawn: this rank's part of the dims that are not rows, for all rows of the batch.
        state: the generator's, after the draw.
        num_taken: how many rows were taken; with the last one it is forgotten.
    """

    drawn: Tensor
    state: Tensor
    num_taken: int = 0


class Draws:
    """The random operations of one model or of one stage of a pipeline. See [Note: whole draws].

    Args:
        module: the model or the stage's modules.
        first: this is the first stage, or there is no pipeline.
    """

    def __init__(self, module: nn.Module, first: bool = True) -> None:
        self._first = first
        self._rows = RowDims()
        device = device_of(module.parameters())
        self._generators = [torch.default_generator]
        if device.type not in ("cpu", "meta"):
            self._generators.append(default_generator(device))
        self._watch = Watch(module, _Mode(self))
        # Which of how many rows; None: all.
        self._microbatch: tuple[slice, int] | None = None
        # All operations of the first forwards in training, and of those in evaluation, are looked at, to find the modules
        # that draw; then only those modules are.
        self._is_settled = {True: False, False: False}
        self._is_looking = False
        self._last: list[Tensor] = []
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._start: list[Tensor] | None = None
        self._end: list[Tensor] | None = None
        self._place = [0, 0]
        self._unit_depth = 0
        self._has_entered, self._has_left, self._is_tail = False, False, False
        # The generators' states before the draws between units: those of earlier stages, and this stage's own.
        self._received: dict[tuple[int, int], list[Tensor]] = {}
        self._made: dict[tuple[int, int], list[Tensor]] = {}

    def __deepcopy__(self, memo: object) -> Draws:
        """Return itself: a copy of a model outside of the prepared one draws as any other model."""
        return self

    def may_draw(self, is_training: bool) -> bool:
        """Return whether the model was seen to draw, or was not looked at enough yet; alike on all ranks."""
        return not self._is_settled[is_training] or bool(self._watch.modules)

    # Without a pipeline.

    @contextlib.contextmanager
    def forward(self, is_training: bool = True) -> Iterator[None]:
        """Hold in a forward on this rank's whole batch. Parts are declared inside, by ``divided``."""
        with self._in_forward(is_training, None):
            yield

    # In a pipeline.

    @contextlib.contextmanager
    def probe(self, num_rows: int) -> Iterator[None]:
        """Hold around a run of the model on the meta or fake device; a second one, of other many rows, tells what rows are.

        Enter it inside of ``FakeTensorMode``. Nothing is drawn from the real generators.
        """
        states = self._states()
        seen: list[Draw] = []
        try:
            with _Seen(seen):
                yield
        except BaseException:
            self._rows.forget_look()
            raise
        finally:
            self._set(states)
        self._rows.look(num_rows, seen)

    def begin(self) -> None:
        """Begin a step: nothing is kept from the last one."""
        self._kept.clear()
        self._received.clear()
        self._made.clear()
        self._start = self._end = None

    def set_state(self, state: Tensor) -> None:
        """Take over the generators from the stage before, whose :meth:`state` it was; before the first microbatch."""
        found = self._decoded(state)
        self._start = found.pop((-1, -1))
        self._received = found

    def state(self) -> Tensor:
        """Return the generators' states after this stage, for the next one: uint8 on the CPU, one-dimensional."""
        assert self._end is not None, "no microbatch was computed"
        rows = [((-1, -1), self._end), *self._received.items(), *self._made.items()]
        cells = [torch.cat([torch.tensor(place).view(torch.uint8), *states]) for place, states in rows]
        return torch.cat(cells)

    def end(self, state: Tensor) -> None:
        """Set this rank's generators to the :meth:`state` of the last stage."""
        self._set(self._decoded(state)[(-1, -1)])

    @contextlib.contextmanager
    def microbatch(self, rows: slice, num_rows: int, is_training: bool = True) -> Iterator[None]:
        """Hold in the stage's forward of one microbatch.

        Args:
            rows: of the batch, which are this microbatch.
            num_rows: of the batch.
            is_training: whether the model is in training.
        """
        if self._start is None:
            assert self._first, "the state of the stage before must be set"
            self._start = self._states()
        self._set(self._start)
        self._place, self._unit_depth = [0, 0], 0
        self._has_entered, self._has_left = self._first, False
        with self._in_forward(is_training, (rows, num_rows)):
            yield
        if self._end is None:
            self._end = self._states()

    @contextlib.contextmanager
    def backward(self, rows: slice, num_rows: int) -> Iterator[None]:
        """Hold in the stage's backward of one microbatch: for modules that torch.utils.checkpoint calls again there."""
        before, self._microbatch = self._microbatch, (rows, num_rows)
        try:
            yield
        finally:
            self._microbatch = before

    @contextlib.contextmanager
    def tail(self, state: Tensor, num_rows: int, is_training: bool = True) -> Iterator[None]:
        """Hold where every rank computes what comes after the last unit, for the whole batch, and passes over all units.

        It stands in the place of :meth:`end`: the generators are afterwards in one process's state.

        Args:
            state: the last stage's :meth:`state`.
            num_rows: of the batch.
            is_training: whether the model is in training.
        """
        self._received = self._decoded(state)
        self._set(self._received.pop((-1, -1)))
        self._place, self._unit_depth = [0, 0], 0
        self._has_entered, self._has_left, self._is_tail = True, False, True
        try:
            with self._in_forward(is_training, (slice(0, num_rows), num_rows)):
                yield
        finally:
            self._is_tail = False

    @contextlib.contextmanager
    def unit(self, own: bool) -> Iterator[None]:
        """Hold around the call of a unit, also where it is passed over because it is another stage's.

        Code between units runs on every stage that needs its results. By this a stage knows which draws of such code are its
        own to make, which were made before it, and which nobody needs here.
        """
        if not self._watch.is_forward:  # computed again by torch.utils.checkpoint
            yield
            return
        if self._unit_depth == 0:
            self._place = [self._place[0] + 1, 0]
            self._has_left = self._has_left or (self._has_entered and not own and not self._is_tail)
            self._has_entered = self._has_entered or own
        self._unit_depth += 1
        try:
            yield
        finally:
            self._unit_depth -= 1

    # The work.

    @contextlib.contextmanager
    def _in_forward(self, is_training: bool, microbatch: tuple[slice, int] | None) -> Iterator[None]:
        assert not self._watch.is_forward, "a forward in a forward"
        self._watch.begin()
        self._watch.is_forward, self._microbatch = True, microbatch
        self._is_looking = not self._is_settled[is_training]
        self._last, num_before = self._states(), self._watch.num_found
        try:
            with self._watch.looking() if self._is_looking else contextlib.nullcontext():
                yield
        finally:
            self._watch.end()
            self._watch.is_forward, self._microbatch = False, None
        if self._is_looking:
            self._is_settled[is_training] = self._watch.num_found == num_before
        elif threading.current_thread() is threading.main_thread() and not all(
            map(torch.equal, self._last, self._states())
        ):
            # All ranks find this together, because they draw at the same places. Beside the main thread others may draw, too.
            self._is_settled[is_training] = False
            self._set(self._last)
            warnings.warn(
                "the model drew random numbers in code that drew none in its first steps: in this step they are not those of"
                " one process, in all further steps they are",
                stacklevel=2,
            )

    def draw(self, op: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operation: make the whole draw, or find it, and return this rank's part."""
        assert self._start is None or self._microbatch is not None or self._watch.is_forward, (
            "a backward outside of Draws.backward"
        )
        is_untrained = op.kind == "dropout" and args[2:3] == (False,)
        if is_untrained or is_meta(args, kwargs):
            return func(*args, **kwargs)  # nothing is drawn, or only shapes are wanted
        generator = generator_of(func, args, kwargs)
        if op.kind in ("kernel", "unknown"):
            return self._draw_unknown(op, generator, lambda: func(*args, **kwargs))
        self._note_caller()
        shape = op.shape(func, args, kwargs)
        parts, whole = parts_of(shape, declared())
        with self._at_place(generator) as is_needed:
            if not is_needed:
                return op.answer(zeros(args, shape), args)
            pattern: Pattern = ()
            if self._microbatch is not None and self._microbatch[0] != slice(0, self._microbatch[1]):
                rows = self._microbatch[0]
                pattern = self._rows.of(op.name, whole, rows.stop - rows.start)
            if not parts and self._microbatch is None:
                found = func(*args, **kwargs)
            else:
                found = self._part(op, func, args, kwargs, whole, parts, pattern, generator)
        if self._watch.is_forward:
            self._last = self._states()
        return found

    def _part(
        self,
        op: Operation,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: torch.Size,
        parts: Sequence[DividedDim],
        pattern: Pattern,
        generator: torch.Generator,
    ) -> Any:
        rows, num_rows = self._microbatch or (slice(0, 1), 1)
        length = rows.stop - rows.start
        sizes = list(shape)
        for dim, _ in pattern:
            sizes[dim] = sizes[dim] // length * num_rows
        whole = torch.Size(sizes)
        if (op.kind == "permutation" and (pattern or parts)) or (
            op.name == "multinomial" and any(dim == len(shape) - 1 for dim in (*dict(pattern), *(p.dim for p in parts)))
        ):
            what = f"{op.name} chooses among elements of which other ranks or other microbatches have a part"
            raise UsageError(explain(what, value=tuple(shape), fix="choose outside of the model's forward"))

        def own(tensor: Tensor) -> Tensor:
            for dim, _ in pattern:
                factor = tensor.shape[dim] // num_rows  # for this rank's part of what was merged into rows
                tensor = tensor.narrow(dim, factor * rows.start, factor * length)
            return tensor

        def fill(tensor: Tensor, local: Tensor) -> Tensor:
            if any(len(part.spans) > 1 or part.merged for part in parts):
                what = f"{op.name} needs values of which this rank has several ranges"
                raise UsageError(explain(what, fix="draw uniform numbers by torch.rand_like and compare them"))
            own(take(tensor, parts)).copy_(local)
            return tensor

        key = (*_key(op, generator, whole, args), *parts)  # microbatches may be divided in different ways
        kept = self._kept.get(key) if self._microbatch is not None else None
        if kept is None:
            drawn = take(op.draw(func, args, kwargs, whole, fill), parts)
            if self._microbatch is not None and length < num_rows and op.kind != "valued":
                kept = self._kept[key] = _Kept(drawn, generator.get_state())
        else:
            drawn = kept.drawn
            generator.set_state(kept.state)
        if kept is not None:
            kept.num_taken += length
            if kept.num_taken >= num_rows:
                del self._kept[key]
        return op.answer(own(drawn), args)

    def _draw_unknown(self, op: Operation, generator: torch.Generator, run: Callable[[], Any]) -> Any:
        """Run an operation whose draws cannot be made whole: a kernel that draws by itself gets numbers of this rank's own."""
        state = generator.get_state()
        if op.kind == "unknown":
            found = run()
            has_drawn = not torch.equal(state, generator.get_state())
            if has_drawn and (declared() or self._microbatch is not None):
                what = f"the random operation {op.name} cannot be divided among ranks or microbatches"
                raise UsageError(explain(what, fix="draw by torch.rand_like, randn_like or nn.functional.dropout"))
        elif declared() or self._microbatch is not None:
            spans = [getattr(each, "part", None) for each in declared()]
            told = state.numpy().tobytes() + repr((spans, self._microbatch)).encode()
            generator.manual_seed(int.from_bytes(hashlib.sha256(told).digest()[:7], "big"))
            seeded = generator.get_state()
            found = run()
            has_drawn = not torch.equal(seeded, generator.get_state())  # without dropout it draws nothing
            generator.set_state(state)
            if has_drawn:
                torch.rand(4, generator=generator, device=generator.device)
        else:
            found = run()
            has_drawn = not torch.equal(state, generator.get_state())
        if has_drawn:
            self._note_caller()
        if self._watch.is_forward:
            self._last = self._states()
        return found

    def _note_caller(self) -> None:
        if self._watch.is_forward and self._is_looking:
            self._watch.add_caller()

    @contextlib.contextmanager
    def _at_place(self, generator: torch.Generator) -> Iterator[bool]:
        """Have the generator in the state of a draw between units; say whether anybody needs the draw on this stage."""
        if not self._watch.is_forward or self._microbatch is None or self._unit_depth:
            yield True
            return
        place = (self._place[0], self._place[1])
        self._place[1] += 1
        if place in self._received:
            states = self._states()
            self._set(self._received[place])
            yield True
            self._set(states)
        elif self._has_entered and not self._has_left:
            self._made[place] = self._states()
            yield True
        else:
            yield False

    def _states(self) -> list[Tensor]:
        return [each.get_state() for each in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _decoded(self, state: Tensor) -> dict[tuple[int, int], list[Tensor]]:
        sizes = [len(each) for each in self._states()]
        found = {}
        for row in state.view(-1, _GLUE_BYTES + sum(sizes)):
            place = row[:_GLUE_BYTES].clone().view(torch.int64).tolist()
            found[place[0], place[1]] = [each.clone() for each in row[_GLUE_BYTES:].split(sizes)]
        return found


def _key(op: Operation, generator: torch.Generator, whole: torch.Size, args: tuple[Any, ...]) -> tuple[object, ...]:
    scalars = tuple(repr(each) for each in args if not isinstance(each, Tensor))
    return op.name, id(generator), generator.get_state().numpy().tobytes(), whole, scalars


class _Mode(TorchDispatchMode):
    """Hands random operations to ``Draws``."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch need not keep its compiler away from each operation, which took half of the time."""
        return False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        op = operation(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        return self._draws.draw(op, func, args, kwargs or {})


class _Seen(TorchDispatchMode):
    """Lists the random operations of a run."""

    def __init__(self, seen: list[Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        op = operation(func)
        if op is not None and op.kind not in ("kernel", "unknown"):
            self._seen.append((op.name, parts_of(op.shape(func, args, kwargs or {}), declared())[1]))
        return func(*args, **(kwargs or {}))

"""Divide a model over the ranks of a layout: its matrices, its images or sequences, its layers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError, explain
from ..weights.equal_start import start_equal
from ..world.devices import device_of
from .axes import WHOLE, Around, Axes
from .caches import CacheSettings
from .clipping import watch_norms
from .equal_batches import EqualBatches, mode_of
from .guard import as_plain, guard
from .proof import Proof, proof_of
from .proof.undivided import UndividedForm
from .random import Draws, align
from .state import gather_states

#: What a schedule of a pipeline is called. The first is the one under which the script's own loop stays as it is.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
#: In which ways attention is divided with the sequences; the first chooses among the others.
ATTENTION = ("auto", "ulysses", "ring")


class Pipe(Protocol):
    """A model divided into stages, as its callers see it: the whole batch in, whole outputs out, on every rank.

    Attributes:
        at_backward_end: called once on every rank when the backward through the pipe has ended, and gradients of parameters
            that several stages hold have been added up; None: nothing is.
        ties: knows the groups of the stages that hold a parameter together.
        at_cut: called once on every rank when the stages have been chosen and parameters of other stages were emptied.
        plans: knows the stages and, by ``times()``, how long they take.
    """

    plans: Any
    ties: Any
    at_backward_end: Callable[[], None] | None
    at_cut: Callable[[], None] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on a whole batch. Every rank of the pipeline must call it, with equal arguments."""
        ...

    def train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, loss: Callable[..., Any]) -> Tensor:
        """Do what :meth:`step` does with another loss: ``loss(outputs, targets)`` for some rows of both."""
        ...

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward, loss and backward of a whole batch, and return its mean loss, detached. Every rank must call it."""
        ...


@dataclass(frozen=True)
class Wishes:
    """How a script or the command line wants its model divided, besides the layout.

    Attributes:
        cut: the modules, by name, at which a new stage begins; None: chosen by cost.
        plan: how matrices are cut, by patterns of module names; None: that of the model's family.
        loss: ``loss(outputs, targets)`` for ``model.step``; None: the script computes its loss itself.
        num_microbatches: into how many parts a pipeline cuts a batch; None: chosen.
        schedule: one of :data:`SCHEDULES`; None: the first, or with ``loss`` the second.
        attention: one of :data:`ATTENTION`; None: the first.
        proof: whether the first batches are compared with the undivided model.
        audit_every: after so many optimizer steps they are compared again; None: never.
    """

    cut: Sequence[str] | None = None
    plan: Mapping[str, str] | None = None
    loss: Callable[..., Any] | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    attention: str | None = None
    proof: bool = True
    audit_every: int | None = None


@dataclass
class Divided:
    """A model whose parts are spread over the ranks of a layout.

    Attributes:
        model: the script's own module, of which this rank holds its parts.
        axes: the groups of the layout.
        around: what is done to its inputs before it is called and to its outputs afterwards, unless the pipe does it.
        pipe: the pipeline that is called in place of the model; None without stages.
        draws: makes random operations in the model's forward draw as in one process; None with a pipe, which sees to that.
        inside: the model wrapped in what averages its gradients; None if nothing has to be wrapped.
        batches: compares the batches of the ranks that hold one copy of the model.
        before_batch: called before each forward of a batch.
        equal_buffers: gives all copies of the model the buffers of the first one, if the next forward would.
        proof: compares the first batches with the undivided model; None: nothing does.
        averages: whether the next backward leaves the mean over the copies of the model in ``p.grad``.
        has_exact_gradients: whether ``p.grad`` is exact after a backward: this copy's, or the mean over all copies.
    """

    model: nn.Module
    axes: Axes
    around: Around = WHOLE
    pipe: Pipe | None = None
    draws: Draws | None = None
    inside: Callable[..., Any] | None = None
    batches: EqualBatches = field(init=False)
    before_batch: Callable[[], object] = lambda: None
    equal_buffers: Callable[[], object] = lambda: None
    proof: Proof | None = None
    averages: Callable[[], bool] = lambda: False
    has_exact_gradients: bool = True

    def __post_init__(self) -> None:
        self.batches = EqualBatches(self.axes, device_of(self.model.parameters()))
        self._guarded: list[nn.Parameter] = []
        self._caches = CacheSettings(self.model)

    def drawing(self) -> AbstractContextManager[None]:
        """Return the context in which the model is called: random operations draw there as in one process."""
        return nullcontext() if self.draws is None else self.draws.forward(self.model.training)

    def begin_batch(self) -> None:
        """Before a forward: in training the ranks that hold one copy of the model are to draw the same random numbers."""
        self.before_batch()
        group = self.axes.group("pp", "space", "sequence", "tp") if self.batches.are_shared else None
        if group is not None and self.model.training and (self.draws is None or self.draws.may_draw(True)):
            align(group, device_of(self.model.parameters()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on a whole batch, which the ranks that hold one copy of it share. Each must call it.

        Raises:
            UsageError: it is not what one process computes; see :class:`Proof`.
        """
        abandoned = nullcontext() if self.proof is None else self.proof.abandoned_on_error()
        with abandoned, self.batches.compared(mode_of(self.model), args, kwargs):
            self.begin_batch()
            if self.proof is None:
                return self._run(args, kwargs)
            return self.proof.forward(self, args, kwargs, lambda: self._run(args, kwargs))

    def batch(self, inputs: Any, run: Callable[[], Tensor], undivided: Callable[[], Tensor]) -> Tensor:
        """Run forward, loss and backward of a batch, which the ranks that hold one copy of the model share.

        Args:
            inputs: what is compared between these ranks, and tells the kind of the batch.
            run: does so with the pipe, and returns the loss.
            undivided: does so with the model as one process has it.

        Raises:
            UsageError: it is not what one process computes; see :class:`Proof`.
        """

        def run_plain() -> Tensor:
            with self.as_plain():
                return run()

        with self.batches.compared(mode_of(self.model), *inputs):
            self.begin_batch()
            return run_plain() if self.proof is None else self.proof.batch(self, inputs, run_plain, undivided)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call: Callable[..., Any] = self.model if self.inside is None else self.inside
        with self.as_plain():
            args, kwargs = self.around.inputs(args, kwargs)
            # Tensor parallelism alone leaves the model its cache; where it holds parts of the tokens, nobody could read it.
            caches = self._caches.off() if self.around is not WHOLE else nullcontext()
            with self.drawing(), caches:
                found = (call if self.pipe is None else self.pipe)(*args, **kwargs)
            return self.around.outputs(found)

    @contextlib.contextmanager
    def as_plain(self) -> Iterator[None]:
        """Let operations in this block compute with parameters as they are; see [Note: guarded parameters] in guard.py."""
        with as_plain(self._guarded):
            yield
        if self.pipe is not None and not self._guarded:  # its first forward has chosen the stages
            self.guard()

    def guard(self) -> None:
        """Guard the parameters that are divided now."""
        self._guarded = guard(self.model)

    def stay_whole(self) -> None:
        """In the reference of a proof, where the model is whole again: exchange nothing from now on."""
        self.batches.stay_alone()
        self.before_batch = lambda: None
        if self.pipe is not None or self.around is not WHOLE:
            self._caches.turn_off()
        self.inside = self.pipe = self.draws = None
        self.around = WHOLE


def check_schedule(name: str) -> None:
    """Raise ``UsageError`` unless there is a schedule of this name; the text has those that there are."""
    if name not in SCHEDULES:
        fix = f"choose one of {', '.join(SCHEDULES)}"
        raise UsageError(explain("a pipeline has no such schedule", value=name, fix=fix))


def check_wishes(wishes: Wishes) -> None:
    """Raise if something is asked for that does not exist, or that does not go together.

    A script may say how it wants its model cut under any layout, also one that cuts nothing.

    Raises:
        UsageError: the text names what was asked for.
    """
    if wishes.schedule is not None:
        check_schedule(wishes.schedule)
    if wishes.attention is not None and wishes.attention not in ATTENTION:
        fix = f"choose one of {', '.join(ATTENTION)}"
        raise UsageError(explain("there is no such way to divide attention", value=wishes.attention, fix=fix))
    count = wishes.num_microbatches
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        what = "the number of microbatches is a whole number of at least 1"
        raise UsageError(explain(what, value=count, fix="give a count, or leave it out"))
    if wishes.schedule not in (None, "gpipe") and wishes.loss is None:
        what = f"schedule {wishes.schedule} needs the loss of each microbatch"
        fix = "give prepare(..., loss=loss_fn) and call model.step(x, y), or leave the schedule out"
        raise UsageError(explain(what, value=wishes.schedule, fix=fix))


def divide_model(model: nn.Module, axes: Axes, wishes: Wishes) -> Divided:
    """Divide a model over the ranks that hold one copy of it together. Every rank must call it, with equal models.

    All ranks get rank 0's weights, buffers and state of the random generator first. Matrices are divided before samples, and
    both before layers, so that a stage is made of modules that are divided already.

    Args:
        model: whole; changed in place. Its Parameter objects stay those that an optimizer holds.
        axes: the groups of the layout.
        wishes: what was asked for besides the layout.

    Raises:
        UsageError: the model, the layout and the wishes do not go together; the text says which.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        what = "the model has parameters whose shape is not known yet, so they cannot be divided"
        raise UsageError(explain(what, value=type(model).__name__, fix="call the model on one batch before prepare()"))
    start_equal(model, axes.everyone)
    draw_alike(axes, device_of(model.parameters()))
    watch_norms(model)
    found = Divided(model, axes)
    gather_states(model, found.batches.meet)
    found.proof, form = (proof_of(axes), UndividedForm(model)) if wishes.proof else (None, None)
    if axes.size("tp") > 1:
        _later("tensor", "divide_tensors")(model, axes, wishes.plan)
    if axes.size("space") > 1:
        found.around = _later("space", "divide_space")(model, axes)
    elif axes.size("sequence") > 1:
        found.around = _later("sequence", "divide_sequence")(model, axes, wishes.attention or ATTENTION[0])
    if axes.size("pp") > 1:
        found.pipe = _later("pipeline", "divide_pipeline")(
            model,
            axes,
            cut=wishes.cut,
            num_microbatches=wishes.num_microbatches,
            schedule=wishes.schedule,
            loss=wishes.loss,
            around=found.around,
        )
        found.around = WHOLE
    elif axes.group("space", "sequence", "tp") is not None:
        found.draws = Draws(model)
    if found.proof and form:
        form.was_divided()
        found.proof.add(found, form, wishes.audit_every)
    if found.pipe is None:
        found.guard()
    return found


def _later(package: str, name: str) -> Callable[..., Any]:
    """Return a function of a package that is imported at its first use only."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{package}"), name)
    return found


def draw_alike(axes: Axes, device: torch.device) -> None:
    """Give the ranks that hold one copy of the model the same random numbers from now on: those of the first of them."""
    group = axes.group("pp", "space", "sequence", "tp")
    if group is not None:
        align(group, device)

"""Divide a model over the ranks of a layout: its matrices, its images or sequences, its layers.

[Note: equal batches] The ranks that hold one copy of the model work on the same batch: each computes the script's loss. A
script that shares out its data by rank, or whose ranks shuffle differently from some epoch on, would train on a mix of batches
without any error. So in each forward the ranks exchange checksums of their inputs: 128 bytes. Where the first operation of the
forward waits for all ranks anyhow, they are compared before it. Ranks of a pipeline begin at different times, so theirs are
looked at when the batch has gone through, and those of an accelerator with the next batch, by when they have been computed.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from ..errors import MismatchError, UsageError, explain, rank_table
from ..weights.equal_start import start_equal
from ..world.devices import device_of
from ..world.layout import MODEL_AXES
from ..world.versions import all_gather_single
from .axes import WHOLE, Around, Axes
from .caches import CacheSettings
from .clipping import watch_norms
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


class EqualBatches:
    """Compares the batches of the ranks that hold one copy of the model together. See [Note: equal batches].

    Args:
        axes: the groups of the layout.
        device: where checksums are exchanged: that of the parameters, which the groups serve.
    """

    _NUM_WORDS = 16  # of 8 bytes: one for each input, as far as they reach; the last one is for all others

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self._group, self._device = axes.group(*MODEL_AXES), device
        # A pipeline, and divided in no other way.
        self._is_pipeline = self._group is not None and axes.size("pp") == self._group.size()
        self._is_first, self._is_inside = True, False
        self._check_last: Callable[[], None] = lambda: None

    @property
    def are_shared(self) -> bool:
        """Whether other ranks work on the same batches."""
        return self._group is not None

    def stay_alone(self) -> None:
        """Compare nothing from now on."""
        self._group = None

    @contextlib.contextmanager
    def compared(self, *inputs: Any) -> Iterator[None]:
        """Raise in this context, on every rank of a copy of the model, unless all have the same inputs. Each must enter it.

        Raises:
            MismatchError: the text names the first input that differs, and the ranks.
        """
        if self._group is None or self._is_inside:
            yield
            return
        self._check_last()
        words, lines = self._digest(inputs)
        found = words.new_empty(self._group.size() * self._NUM_WORDS)
        goes_on = self._is_pipeline and not self._is_first and found.device.type == "cpu"
        work = all_gather_single(found, words, group=self._group, async_op=goes_on)
        self._is_first = False
        if found.device.type != "cpu":
            self._check_last = self._on_accelerator(found, lines)
        elif not goes_on:
            self._check(found, lines)
        self._is_inside = True
        try:
            yield
        except Exception:
            if goes_on and work.is_completed():  # unequal batches are why something failed
                self._check(found, lines)
            raise
        finally:
            self._is_inside = False
        if goes_on:
            work.wait()
            self._check(found, lines)

    def _on_accelerator(self, found: Tensor, lines: Sequence[str]) -> Callable[[], None]:
        """Return what compares the words once they are there, for which the queue of kernels does not have to run empty."""
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        event = torch.Event(found.device.type)
        event.record()

        def check() -> None:
            self._check_last = lambda: None
            event.synchronize()
            self._check(copy, lines)

        return check

    def _digest(self, inputs: Any) -> tuple[Tensor, list[str]]:
        """Return checksums of the inputs, on the device of the parameters, and a line for each of them."""
        words, lines = [0] * self._NUM_WORDS, []
        later: list[tuple[int, Tensor]] = []
        for i, (path, leaf) in enumerate(_pytree.tree_leaves_with_path(inputs)):
            place = min(i, self._NUM_WORDS - 1)
            line = f"{_pytree.keystr(path[1:])} {_kind(leaf)}"
            words[place] = zlib.crc32(line.encode(), words[place])
            lines.append(line)
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_meta or not leaf.numel():
                continue
            octets = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            if leaf.device.type == "cpu":
                words[place] = zlib.crc32(octets.numpy().data, words[place])
            else:
                later.append((place, _checksum(octets)))
        found = torch.tensor(words).to(self._device, non_blocking=True)
        for place, value in later:
            found[place] += value.to(self._device)
        return found, lines

    def _check(self, found: Tensor, lines: Sequence[str]) -> None:
        assert self._group is not None
        rows = found.view(self._group.size(), self._NUM_WORDS).tolist()
        if all(row == rows[0] for row in rows):
            return
        place = next(i for i in range(self._NUM_WORDS) if len({row[i] for row in rows}) > 1)
        what = f"input {place} of the model differs between ranks that hold one copy of the model together"
        fix = "load data by gz.loader, or share it out by world.data_rank of world.data_size, and draw random inputs by torch"
        shown = lines[place] if place < len(lines) else "nothing"
        ranks = dist.get_process_group_ranks(self._group)
        table = rank_table(
            ("rank", "checksum"), [(rank, f"{row[place]:x}") for rank, row in zip(ranks, rows, strict=True)]
        )
        text = explain(what, value=shown, rank=dist.get_rank(), fix=fix)
        raise MismatchError(f"{text}\n{table}")


def _checksum(octets: Tensor) -> Tensor:
    """Return a sum over the bytes that depends on their order, computed on their device: 0-dimensional, int64."""
    if len(octets) % 8:
        numbers = octets.long()
    else:  # rows in the middle of a tensor may begin where no number of 8 bytes does
        numbers = (octets if octets.storage_offset() % 8 == 0 else octets.clone()).view(torch.int64)
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=octets.device)).sum()


def _kind(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    # The text of any other object may tell an address, a device or an order that differs between ranks.
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype)
    return repr(leaf)[:60] if is_plain or type(leaf).__module__ == "numpy" else type(leaf).__qualname__


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
        with abandoned, self.batches.compared(args, kwargs):
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

        with self.batches.compared(*inputs):
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
    gather_states(model)
    watch_norms(model)
    found = Divided(model, axes)
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

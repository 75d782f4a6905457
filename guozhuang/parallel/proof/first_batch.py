"""The first batch as a proof: before anything steps, the divided run is compared with the undivided one.

[Note: what is proved] A pipeline assumes that rows are independent and that one forward stands for all; tensor parallelism
assumes that nothing between two layers looks at all features; both assume that the script takes from the model what the model
returns. No list of habits is complete, so the result is looked at: outputs, loss, gradients, buffers, attributes of modules and
the states of random generators, after the first forward of a kind (structure of the model, its mode, kind of inputs), after the
first backward and before the step. The undivided run is the script itself, see [Note: the reference process] in reference.py.
Sums over the outputs of each module are kept on both sides, so that the first module that differs can be named.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import MismatchError, UsageError, WorldError, explain
from ...gradients.forwards import leaves_of
from ...world import current
from ...world.layout import MODEL_AXES
from . import reference
from .causes import cure, explained
from .compare import (
    KINDS,
    Deviation,
    differences_of_forward,
    differences_of_loss,
    differences_of_parameter,
    first_part,
    token_of,
)
from .kinds import ProvedModel
from .noise import TIMES, LossRounding, Noise, ReferencePair, fork_pair
from .records import ForwardRecord, recording
from .reference import ReferenceReport, gradients_of, lack_of, values_of
from .reports import Reports
from .undivided import UndividedForm, gathered

if TYPE_CHECKING:
    from ..axes import Axes
    from ..prepare import Divided

_log = logging.getLogger("guozhuang")
_MOST_KINDS = 16
_MOST_WAITS = 100  # of the forwards of one kind that begin with gradients of earlier batches


class _GoingOn(threading.local):
    """The proof that is going on in this thread, and how many backwards run within each other."""

    def __init__(self) -> None:
        self.proof: Proof | None = None
        self.depth = 0


going_on = _GoingOn()


_num_models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Proof:
    """Proves the forwards of the models that the same ranks hold together. Every rank must make the same calls.

    Args:
        axes: the groups of the layout, of which some ranks hold one copy of a model together.
    """

    def __init__(self, axes: Axes) -> None:
        group = axes.group(*MODEL_AXES)
        assert group is not None, "a model that is whole needs no proof"
        self._group, self._axes, self._reports = group, axes, Reports(group, axes.group("dp"))
        self._models: dict[int, ProvedModel] = {}
        self._references: ReferencePair | None = None
        self._had_backward = self._has_graph = False
        self._pending: list[tuple[ProvedModel, Hashable]] = []
        self._tokens: dict[tuple[int, str], Any] = {}
        self._compared: dict[int, Divided] = {}
        self._rounding = LossRounding()

    def add(self, divided: Divided, form: UndividedForm, every: int | None = None) -> None:
        """Prove the forwards of a model from now on, and again after so many optimizer steps. Every rank must call it."""
        # Counted by group, because a rank may have forgotten models, and this proof with them, that another one still has.
        number = _num_models[self._group] = _num_models.get(self._group, -1) + 1
        self._models[number] = ProvedModel(divided, form, every)

    def forward(
        self, divided: Divided, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run a forward, and compare it where one of its kind was not compared before.

        Args:
            divided: the model.
            args, kwargs: what it is called with: whole, and equal on all ranks.
            run: runs the divided forward.

        Raises:
            UsageError: it differs from that of one process; on every rank.
        """
        if self._had_backward and reference.here is None:
            self._close(proved=True)
        report = None
        if going_on.proof is self and reference.here is None:
            # None where the script has given the last batch up, and one process goes on with it.
            report = self._next_report("forward")
        mine, kind = self._of(divided), None
        if reference.here is None and going_on.proof is not self:
            kind = mine.kind((args, kwargs))
            if kind in mine.kinds or not self._begin(mine, kind):
                return run()
        if reference.here is not None:
            return self._in_reference(divided, args, kwargs)
        self._pending.append((mine, mine.kind((args, kwargs)) if kind is None else kind))
        try:
            with recording(divided.model) as record:
                found = run()
        except Exception as error:
            with self.abandoned_on_error():
                self._failed(divided, error, report)
                raise
        record.take_outputs(found)
        self._has_graph = self._has_graph or _has_graph(found)
        told = report or self._next_report("forward")
        if told is None:
            return found
        self._compare(lambda noise: self._forward_differences(divided, record, told, noise), told, divided, record)
        if not self._has_graph:
            self._close(proved=True)
        return found

    def batch(
        self, divided: Divided, inputs: Any, run: Callable[[], Tensor], undivided: Callable[[], Tensor]
    ) -> Tensor:
        """Run forward, loss and backward of a batch, and compare them where none of their kind was compared before.

        Args:
            divided: the model.
            inputs: what the kind is told by.
            run: does so with the divided model, and returns the loss.
            undivided: does so with the model as one process has it.

        Raises:
            UsageError: as in :meth:`forward`.
        """
        if self._had_backward and reference.here is None:
            self._close(proved=True)
        mine = self._of(divided)
        kind = ("batch", mine.kind(inputs))
        if reference.here is not None and self._had_backward:
            reference.here.leave("another batch begins")
        if reference.here is None and (kind in mine.kinds or not self._begin(mine, kind)):
            return run()
        going_on.depth += 1
        try:
            with self.abandoned_on_error(), recording(divided.model) as record:
                loss = (run if reference.here is None else undivided)()
        finally:
            going_on.depth -= 1
        if reference.here is not None:
            told = ReferenceReport(
                "backward", record=record, loss=float(loss), gradients=gradients_of(self._by_number())
            )
            self._had_backward, self._tokens = True, self._tokens_now()
            reference.here.tell(told)
            return loss
        self._pending.append((mine, kind))
        report = self._next_report("backward")
        if report is not None:

            def differences(noise: Noise) -> list[Deviation]:
                found = self._forward_differences(divided, record, report, noise)
                return found + self._backward_differences(float(loss), report, noise)

            self._compare(differences, report, divided, record)
            self._had_backward, self._tokens = True, self._tokens_now()
        return loss

    def after_backward(self, loss: float | None) -> None:
        """Compare what the first backward has left; in the reference, report it."""
        if self._had_backward:
            return
        self._had_backward, self._tokens = True, self._tokens_now()
        if reference.here is not None:
            told = ReferenceReport(
                "backward", loss=loss, rounding=self._rounding.norm, gradients=gradients_of(self._by_number())
            )
            reference.here.tell(told)
            return
        report = self._next_report("backward")
        if report is None:
            return
        self._compare(lambda noise: self._backward_differences(loss, report, noise), report)

    def before_step(self) -> None:
        """Compare what the script has done to gradients and parameters since the backward; in the reference, report it."""
        if not self._had_backward:
            return
        is_changed = self._tokens_now() != self._tokens
        if reference.here is not None:
            told = ReferenceReport("step")
            if is_changed:
                told.gradients = gradients_of(self._by_number())
                told.values = values_of(self._by_number())
            reference.here.tell(told)
            reference.here.leave("the optimizer steps")
        report = self._next_report("step")
        if report is not None:

            def differences(noise: Noise) -> list[Deviation]:
                if report.values or report.gradients:
                    # Where there are copies of the model, each reference has changed the gradients of its copy, not the mean.
                    return [] if self._axes.size("dp") > 1 else self._gradient_differences(report, noise)
                if not is_changed:
                    return []
                found = "the script has changed some before the step, and in one process it does not"
                return [Deviation("gradient", "", found)]

            self._compare(differences, report)
        self._close(proved=True)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """End the references if this block raises."""
        try:
            yield
        except BaseException:
            if reference.here is None:
                self._close(proved=False)
            raise

    # The work.

    def _failed(self, divided: Divided, error: Exception, report: ReferenceReport | None) -> None:
        """Say of an error in a divided forward whether one process has it too; the rank with the reference knows."""
        if isinstance(error, UsageError | MismatchError | WorldError):
            return
        layout = self._axes.layout
        told = report if report is not None or self._references is None else self._references.next()
        if told is not None and told.event == "forward":
            what = f"under layout {layout} the model's forward fails, and in one process it does not"
            first_line = str(error).partition("\n")[0]
            value, fix = f"{type(error).__name__}: {first_line}", cure(layout, divided.model)
            raise UsageError(explain(what, value=value, fix=fix)) from error
        error.add_note(f"This was the first forward of its kind under layout {layout}: {cure(layout, divided.model)}.")

    def _of(self, divided: Divided) -> ProvedModel:
        return next(each for each in self._models.values() if each.divided() is divided)

    def _alive(self) -> dict[int, Divided]:
        found = ((i, each.divided()) for i, each in self._models.items())
        return {i: divided for i, divided in found if divided is not None}

    def _by_number(self) -> dict[int, nn.Module]:
        """Return the models that are compared."""
        return {i: divided.model for i, divided in self._compared.items()}

    def _tokens_now(self) -> dict[tuple[int, str], Any]:
        return {
            (i, name): (token_of(p), token_of(p.grad))
            for i, model in self._by_number().items()
            for name, p in model.named_parameters()
        }

    def _begin(self, mine: ProvedModel, kind: Hashable) -> bool:
        """Fork the references; return whether there are any, and in them True too. Every rank must call it."""
        if len(mine.kinds) >= _MOST_KINDS:
            return False
        alive = self._alive()
        parameters = [p for divided in alive.values() for p in divided.model.parameters()]
        is_first = self._group.rank() == 0
        world = current()
        num_together = 1 if world is None else max(1, world.local_size // self._axes.layout.model_size)
        lacks = lack_of(parameters, num_together if is_first else 0)
        # An evaluation has no use for gradients.
        holds = torch.is_grad_enabled() and any(p.grad is not None and bool(p.grad.any()) for p in parameters)
        everyones: list[Any] = [None] * self._axes.everyone.size()
        dist.all_gather_object(everyones, (holds, lacks, list(alive)), group=self._axes.everyone)
        why = next((each for _, each, _ in everyones if each), "")
        if any(each for each, _, _ in everyones):
            mine.num_waits[kind] += 1
            if mine.num_waits[kind] < _MOST_WAITS:
                return False  # the next window is waited for
            why = f"gradients of earlier batches were there before each of {_MOST_WAITS} forwards"
        if why:
            mine.kinds.add(kind)
            if is_first:
                _log.warning("proof: it is not compared with one process, because %s", why)
            return False
        # A model that one rank has forgotten may still be waiting for the collection of garbage on another one.
        everywhere = set(alive).intersection(*(numbers for _, _, numbers in everyones))
        self._compared = {number: alive[number] for number in sorted(everywhere)}
        wholes: dict[int, Tensor] = {}
        for divided in self._compared.values():
            divided.equal_buffers()
            wholes |= gathered(divided.model, keeps=is_first)
        self._began_s = time.monotonic()
        going_on.proof, self._had_backward, self._has_graph, self._pending = self, False, False, []
        self._rounding = LossRounding()
        if is_first:
            self._references = fork_pair(lambda _: self._become_undivided(wholes))
        return True

    def _become_undivided(self, wholes: Mapping[int, Tensor]) -> list[nn.Module]:
        for number, divided in self._compared.items():
            form = self._models[number].form
            assert form is not None
            form.restore(wholes)
            divided.stay_whole()
        return list(self._by_number().values())

    def _in_reference(self, divided: Divided, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert reference.here is not None
        if self._had_backward:
            reference.here.leave("another forward begins")
        with recording(divided.model) as record:
            found = divided.model(*args, **kwargs)
        record.take_outputs(found)
        self._rounding.watch(found)
        self._has_graph = self._has_graph or _has_graph(found)
        reference.here.tell(ReferenceReport("forward", record=record))
        if not self._has_graph:
            reference.here.leave("there is no backward")
        return found

    def _next_report(self, event: str) -> ReferenceReport | None:
        """Return the reference's next report on every rank, without its tensors on others; None if it has ended.

        If it ends before the backward, so does the comparison; forwards of these kinds are compared once more.
        """
        report, why = self._reports.next(self._references, event)
        if report is None and self._axes.everyone.rank() == 0:
            _log.warning("proof: not compared with one process from the %s on: %s", event, why)
        if report is None and event != "step":
            for mine, kind in self._pending:
                mine.was_cut_short(kind)
            self._close(proved=False)
        return report

    def _forward_differences(
        self, divided: Divided, record: ForwardRecord, report: ReferenceReport, noise: Noise
    ) -> list[Deviation]:
        is_first = self._group.rank() == 0
        return list(differences_of_forward(divided.model, record, report.record, is_first, noise))

    def _backward_differences(self, loss: float | None, report: ReferenceReport, noise: Noise) -> list[Deviation]:
        found = list(differences_of_loss(loss, report.loss, noise))
        return found + self._gradient_differences(report, noise)

    def _gradient_differences(self, report: ReferenceReport, noise: Noise) -> list[Deviation]:
        found: list[Deviation] = []
        models = self._by_number()
        if not all(each.has_exact_gradients for each in self._compared.values()):
            return found
        is_whole = self._axes.size("space") * self._axes.size("sequence") == 1
        total, of_ranks = 0.0, [None] * self._group.size()
        mine: Any = {number for number, each in self._compared.items() if each.averages()}  # none on a frozen stage
        dist.all_gather_object(of_ranks, mine, group=self._group)
        for number, model in models.items():
            averages = any(each and number in each for each in of_ranks)
            if not averages and not is_whole:
                continue  # each rank has what its part of the samples gives
            for name, parameter in model.named_parameters():
                if (number, name) not in report.gradients:
                    continue
                wanted = self._reports.tensor(report, "gradients", (number, name), is_mean=averages)
                total = max(total, 0.0 if wanted is None else float(wanted.norm()))
                floor = 100 * torch.finfo(parameter.dtype).eps * total
                floor += TIMES * noise.get(("gradient", f"{number}.{name}"), 0.0)
                found += differences_of_parameter("gradient", name, parameter, parameter.grad, wanted, floor)
                if (number, name) in report.values:
                    value = self._reports.tensor(report, "values", (number, name))
                    floor = TIMES * noise.get(("value", f"{number}.{name}"), 0.0)
                    found += differences_of_parameter("value", name, parameter, parameter, value, floor)
        return found

    def _compare(
        self,
        differences: Callable[[Noise], list[Deviation]],
        report: ReferenceReport,
        divided: Divided | None = None,
        record: ForwardRecord | None = None,
    ) -> None:
        """Raise on every rank if there is a difference on any that rounding does not explain."""
        found = self._everyones(differences({}))
        if found and found[0][0] >= KINDS.index("output"):  # the first ones have nothing to do with rounding
            found = self._everyones(differences(self._reports.noise(self._references)))
        if not found:
            return
        name = None
        if record is not None:
            of_ranks: list[Any] = [None] * self._group.size()
            dist.all_gather_object(of_ranks, record.parts, group=self._group)
            name = first_part(report.record.parts, of_ranks)
        models = [each.model for each in self._compared.values()]
        self._close(proved=False)
        _, rank, first = found[0]
        text = explained(first, name, self._axes.layout, None if divided is None else divided.model, models)
        raise UsageError(explain(text.what, rank=dist.get_process_group_ranks(self._axes.everyone)[rank], fix=text.fix))

    def _everyones(self, mine: list[Deviation]) -> list[tuple[int, int, Deviation]]:
        """Return the differences on all ranks, the most telling first, with the numbers of their kinds and ranks."""
        everyones: list[Any] = [None] * self._axes.everyone.size()
        dist.all_gather_object(everyones, mine, group=self._axes.everyone)
        return sorted((KINDS.index(each.kind), rank, each) for rank, some in enumerate(everyones) for each in some)

    def _close(self, *, proved: bool) -> None:
        """End the references."""
        if proved:
            for mine, kind in self._pending:
                mine.kinds.add(kind)
            if self._pending and self._axes.everyone.rank() == 0:
                _log.info("proof: as in one process (compared in %.1f s)", time.monotonic() - self._began_s)
        if self._references is not None:
            self._references.end()
        self._reports.forget()
        self._references, self._had_backward, self._pending, self._tokens = None, False, [], {}
        self._compared = {}
        going_on.proof = None


def _has_graph(found: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(found))

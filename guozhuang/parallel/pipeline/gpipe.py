"""A pipeline under the script's own loop: ``model(x)`` on the whole batch, the script's loss, ``loss.backward()``.

[Note: the order of GPipe as one autograd function] The forward of all microbatches is the forward of one autograd function; the
outputs that the model's tail needs are its results, on every rank, and the tail makes of them what the model returns. So the
script's loss sees the whole batch, whatever it computes. Its backward reaches the function with gradients of these outputs, and
the function's backward is that of all microbatches, in the reverse order of stages. Activations of all microbatches are held
in between, as in GPipe (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain
from ...groups.subgroups import subgroup
from ...world.layout import MODEL_AXES
from ..axes import WHOLE, Around, Axes
from ..caches import CacheSettings
from .forwards.batch_norm import BatchStatistics
from .forwards.stage import Microbatch, PassingForward
from .plan import StagePlan, StagePlans
from .runtime import PipelineRun
from .shares import PartLoss
from .step import train_batch


@dataclass
class _Batch:
    """One batch between its forward and its backward.

    Attributes:
        run: its microbatches in the stages of this rank.
        microbatches: its parts.
        state: of the random generators, after the last stage.
        inputs: for each microbatch, its parts of the inputs that require a gradient.
    """

    run: PipelineRun
    microbatches: list[Microbatch]
    state: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: list[list[Tensor]] = field(default_factory=list)


class GPipe:
    """A model divided into stages that is called like the model itself. Every rank of the pipeline must make the same calls.

    The model is divided at the first call: until then its parameters are whole.

    Args:
        model: whole and equal on all ranks.
        axes: the groups of the layout.
        cut: the calls at which a new stage begins; None: chosen.
        num_microbatches: into how many parts a batch is cut; None: chosen.
        schedule: the order of :meth:`step`; calls have GPipe's order.
        loss: for :meth:`step`.
        around: divides the samples themselves, within each stage.

    Attributes:
        at_backward_end: called once on every rank when a backward has ended that went through the pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        cut: Sequence[str] | None = None,
        num_microbatches: int | None = None,
        schedule: str = "gpipe",
        loss: PartLoss | None = None,
        around: Around = WHOLE,
    ) -> None:
        group = axes.group("pp")
        assert group is not None, "a pipeline has several ranks"
        self.model, self.group = model, group
        count = stages_per_rank(schedule, group.size(), cut)
        copy = axes.group(*MODEL_AXES)
        self.plans = StagePlans(model, group, cut, schedule, count, num_microbatches, axes.everyone, around, copy)
        self.num_steps, self._loss = 0, loss
        self.at_backward_end: Callable[[], None] | None = None
        self.statistics = BatchStatistics([model])
        self.caches = CacheSettings(model)
        self.ties = TiedGradients(group)
        self._has_callback = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on a whole batch, and return what the model returns, on every rank.

        Raises:
            UsageError: the model cannot be divided.
        """
        with self.caches.off():
            plan, microbatches = self.plans.cut_batch(args, kwargs)
            batch = _Batch(plan.runtime.begin(microbatches), microbatches)
            leaves = [
                each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad
            ]
            if torch.is_grad_enabled():
                anchor = torch.empty(0, requires_grad=True)
                found: Any = _Passes.apply(self, plan, batch, anchor, *leaves)  # type: ignore[no-untyped-call]
            else:
                found = self._forwards(plan, batch)
            count = len(plan.routes.result)
            pieces = {value: found[i::count] for i, value in enumerate(plan.routes.result)}
            draws, plans = list(self.plans.draws.values())[-1], self.plans
            tail = PassingForward(plans.units, plans.outputs, plan.routes, draws, frozenset(), {}, frozenset(), pieces)
            with draws.tail(batch.state, microbatches[0].num_rows, self.model.training):
                return tail.run(self.model, args, kwargs, None)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward, loss and backward of a whole batch by the schedule. Every rank of the pipeline must call it.

        Args:
            *args: the positional inputs of the model, and at the end what the loss compares its output with.
            **kwargs: its keyword inputs.

        Returns:
            The loss of the batch, detached, on every rank.

        Raises:
            UsageError: no loss was given to ``prepare``, or it cannot be computed by microbatches.
        """
        if self._loss is None:
            what = "model.step(...) needs the loss of each microbatch"
            raise UsageError(explain(what, fix="give prepare(..., loss=loss_fn), or call model(x) and loss.backward()"))
        if not args:
            what = "model.step(...) takes the model's inputs and then the targets"
            raise UsageError(explain(what, fix="call model.step(x, y)"))
        return self.train(args[:-1], kwargs, args[-1], self._loss)

    def train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, loss: PartLoss) -> Tensor:
        """Do what :meth:`step` does with another loss; see ``step.py``."""
        return train_batch(self, args, kwargs, targets, loss)

    def _forwards(self, plan: StagePlan, batch: _Batch) -> list[Tensor]:
        """Run the forward half, and return the outputs that the tail needs, of each microbatch in turn."""
        draws, is_alone = list(self.plans.draws.values())[-1], len(batch.microbatches) == 1

        def conclude(number: int) -> list[Tensor]:
            # The script may change in place what was not joined of several microbatches.
            found = [each.detach().clone() if is_alone else each.detach() for each in batch.run.results[number]]
            for tensor, result in zip(found, batch.run.results[number], strict=True):
                tensor.requires_grad_(result.requires_grad)
            return [*found, draws.state()] if number == 0 else found

        with self.statistics.collecting(len(batch.microbatches)):
            batch.run.execute("F", conclude=conclude)
        first, *others = ([each for each in told if each is not None] for told in batch.run.conclusions)
        batch.state = first.pop()
        return [*first, *(each for found in others for each in found)]

    def _backwards(self, batch: _Batch, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward half, and add up the gradients of parameters that several ranks hold."""
        count = len(gradients) // len(batch.microbatches)

        def seeds(number: int, result: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
            mine = gradients[number * count : (number + 1) * count]
            pairs = [(t, g) for t, g in zip(result, mine, strict=True) if g is not None and t.requires_grad]
            return [t for t, _ in pairs], [g for _, g in pairs]

        with self.gathering_gradients(), self.statistics.discarding():
            batch.run.execute("BIW", seeds)
        if not self._has_callback:
            self._has_callback = True
            Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._has_callback = False
        self.end_backward()

    @contextlib.contextmanager
    def gathering_gradients(self) -> Iterator[None]:
        """Hold in the backwards of a batch: ranks add up what they hold together, and hooks see the gradient of the batch."""
        with _hooks_later(self.model.parameters()), self.ties.added_up(self.plans.shared):
            yield

    def end_backward(self) -> None:
        """Do what is to be done when a backward has ended. Hooks of parameters have seen the gradients before."""
        if self.at_backward_end is not None:
            with _silent(self.model.parameters()):
                self.at_backward_end()

    @property
    def at_cut(self) -> Callable[[], None] | None:
        """Called once on every rank at the first forward, when parameters of other ranks were freed; None: nothing is."""
        return self.plans.at_cut

    @at_cut.setter
    def at_cut(self, found: Callable[[], None] | None) -> None:
        self.plans.at_cut = found


class _Passes(torch.autograd.Function):
    """The passes of one batch through the pipeline. See [Note: the order of GPipe as one autograd function]."""

    @staticmethod
    def forward(
        ctx: Any, pipe: GPipe, plan: StagePlan, batch: _Batch, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.told = pipe, batch
        for each in batch.microbatches:
            tensors = pytree.tree_leaves((each.args, dict(each.kwargs)))
            batch.inputs.append([leaf for leaf in tensors if isinstance(leaf, Tensor) and leaf.requires_grad])
        with torch.enable_grad():
            found = pipe._forwards(plan, batch)
        ctx.mark_non_differentiable(*(each for each in found if not each.requires_grad))
        return tuple(each.detach() if each.requires_grad else each for each in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.told is None:
            what = "a second backward went through a pipeline, whose activations are freed after the first one"
            fix = "add the losses and call backward() once, without retain_graph=True"
            raise UsageError(explain(what, fix=fix))
        if torch.is_grad_enabled():
            what = "a pipeline has no gradients of gradients"
            raise UsageError(explain(what, value="create_graph=True", fix="leave create_graph out"))
        pipe, batch = ctx.told
        ctx.told = None
        pipe._backwards(batch, gradients)
        return None, None, None, None, *_input_gradients(batch, pipe.group)


def _input_gradients(batch: _Batch, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the gradients of the inputs that require one, which several stages may have computed parts of."""
    found = []
    first = batch.microbatches[0]
    leaves = pytree.tree_leaves((first.args, dict(first.kwargs)))
    pairs = zip(leaves, first.dims, strict=True)
    dims = [dim for leaf, dim in pairs if isinstance(leaf, Tensor) and leaf.requires_grad]
    for i, dim in enumerate(dims):
        parts = [each[i] for each in batch.inputs]
        grads = [part.grad if part.grad is not None else torch.zeros_like(part) for part in parts]
        joined = (torch.stack(grads).sum(0) if dim is None else torch.cat(grads, dim)).contiguous()
        dist.all_reduce(joined, group=group)
        found.append(joined)
    return found


@contextlib.contextmanager
def _silent(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Let the script's hooks of parameters see no gradient in this block; yields the parameters that have some."""
    found: list[nn.Parameter] = []
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for parameter in parameters:
        before = len(kept)
        both: tuple[Any, Any] = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        for hooks in both:
            # Those that exchange gradients do so for each part, and tell whether they are idle; the rest comes once.
            own = {key: hook for key, hook in (hooks or {}).items() if not hasattr(hook, "is_idle")}
            if own:
                kept.append((hooks, own))
                hooks.update(dict.fromkeys(own, _ignore))
        if len(kept) > before:
            found.append(parameter)
    try:
        yield found
    finally:
        for hooks, own in kept:
            hooks.update({key: hook for key, hook in own.items() if key in hooks})


@contextlib.contextmanager
def _hooks_later(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let hooks of parameters see the gradient of a batch, as without stages, when the backwards of its parts have ended."""
    with _silent(parameters) as hooked:
        before = [parameter.grad for parameter in hooked]
        for parameter in hooked:
            parameter.grad = None
        yield
    for parameter, was in zip(hooked, before, strict=True):
        gradient, parameter.grad = parameter.grad, was
        if gradient is not None:
            torch.autograd.backward(parameter, gradient)


def _ignore(_: Tensor) -> None:
    """Stand for a hook of a parameter."""


class TiedGradients:
    """Adds up the gradients of parameters that several ranks of a pipeline hold: tied weights, and what glue uses itself.

    Args:
        group: the ranks of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @contextlib.contextmanager
    def added_up(self, shared: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> Iterator[None]:
        """Let each rank have the sum of what all ranks add to the gradients of these parameters in this block.

        Args:
            shared: parameters, in one order on all ranks, with the ranks that hold them.
        """
        before = [parameter.grad for parameter, _ in shared]
        for parameter, _ in shared:
            parameter.grad = None
        yield
        has = torch.tensor([float(parameter.grad is not None) for parameter, _ in shared])
        if len(shared):
            dist.all_reduce(has, group=self._group)
        for (parameter, owners), was, any_has in zip(shared, before, has.tolist(), strict=True):
            if any_has and self._group.rank() in owners:
                mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                dist.all_reduce(mine, group=self.among(owners))
                parameter.grad = mine
            if was is not None:
                parameter.grad = was if parameter.grad is None else was.add_(parameter.grad)

    def among(self, owners: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of some ranks of the pipeline. Each of them must call it."""
        if len(owners) == self._group.size():
            return self._group
        if owners not in self._groups:
            self._groups[owners] = subgroup(self._group, owners)
        return self._groups[owners]


def divide_pipeline(
    model: nn.Module,
    axes: Axes,
    *,
    cut: Sequence[str] | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    loss: Callable[..., Any] | None = None,
    around: Around = WHOLE,
) -> GPipe:
    """Divide a model into the stages of a pipeline. Every rank of the group must call it.

    Args:
        model: whole and equal on all ranks.
        axes: the groups of the layout.
        cut: the calls at which a new stage begins; None: chosen.
        num_microbatches: into how many parts a batch is cut; None: chosen.
        schedule: the name of the schedule; None: chosen.
        loss: for ``step``.
        around: divides the samples themselves, within each stage.

    Raises:
        UsageError: the model has no parts to cut between, or the schedule is another one than "gpipe".
    """
    if schedule is None:
        schedule = "gpipe" if loss is None else "1f1b"
    return GPipe(model, axes, cut, num_microbatches, schedule, loss, around)


def stages_per_rank(schedule: str, num_ranks: int, cut: Sequence[str] | None) -> int:
    """Return how many stages each rank has: as many as ``cut`` says, and 2 under "interleaved" without it.

    Raises:
        UsageError: the stages do not divide by the ranks.
    """
    if schedule != "interleaved":
        return 1
    if cut is None:
        return 2
    count, rest = divmod(len(cut) + 1, num_ranks)
    if rest or count < 2:
        what = f"schedule interleaved has 2 or more stages on each of {num_ranks} ranks, and cut makes {len(cut) + 1}"
        raise UsageError(explain(what, value=list(cut), fix=f"name {2 * num_ranks - 1} places, or leave cut out"))
    return count

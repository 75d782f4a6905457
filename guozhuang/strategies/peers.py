"""PyTorch's own pipeline and tensor parallelism as strategies, to be measured beside those of this project.

Both are used as their documentation shows, with the cut and the plan that a careful user would write for a model of known
structure. Where PyTorch refuses a model its own error is passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..errors import UsageError, explain
from ..parallel.axes import make_axes
from ..parallel.division import disown
from ..parallel.pipeline.blocks import find_blocks
from ..world.layout import Layout
from .model_step import inputs_of
from .ways import PreparedPair, Setup, update

_MICROBATCHES_PER_RANK = 2


def torch_tensor(model: nn.Module, optimizer: Optimizer, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """Divide linear layers by ``torch.distributed.tensor.parallel.parallelize_module``. Every rank must call it.

    Raises:
        UsageError: the layout has other axes, or no attention or feed-forward part of linear layers is known in the model.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    axes = make_axes(_alone("tp", setup.world.layout, "torch-tensor"))
    plan: dict[str, Any] = {
        name: ColwiseParallel() if by == "columns" else RowwiseParallel() for name, by in linear_plan(model).items()
    }
    if not plan:
        what = f"no attention or feed-forward part of linear layers is known in {type(model).__name__}"
        fix = "PyTorch's plans divide nn.Linear and nn.Embedding only; choose tensor, or another strategy"
        raise UsageError(explain(f"torch-tensor has nothing to divide: {what}", fix=fix))
    before = dict(model.named_parameters())
    for tensor in (*before.values(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    parallelize_module(model, axes.mesh["tp"], plan)
    now = {id(before[name]): parameter for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
    return model, optimizer


def linear_plan(model: nn.Module) -> dict[str, str]:
    """Return which linear layers are divided by "columns" and which by "rows": those of parts that are known by structure."""
    from ..parallel.tensor.families import ATTENTIONS, FEED_FORWARDS

    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        for pattern in (*ATTENTIONS, *FEED_FORWARDS):
            paths = [*((path, "columns") for path in pattern.columns), (pattern.rows, "rows")]
            parts = [(f"{name}.{path}".lstrip("."), _below(module, path), by) for path, by in paths]
            if not pattern.packed and all(type(part) is nn.Linear and full not in plan for full, part, _ in parts):
                plan.update((full, by) for full, _, by in parts)
                break
    return plan


def torch_pipeline(model: nn.Module, optimizer: Optimizer, setup: Setup) -> PreparedPair:
    """Train by ``torch.distributed.pipelining``: the model is traced with the first batch, and cut between blocks.

    The blocks are counted out, as PyTorch leaves the cut to its user. The schedule is GPipe's, or 1F1B with
    ``--schedule 1f1b``. Every rank must call it.

    Raises:
        UsageError: the layout has other axes, the schedule is another one, or the model has fewer blocks than there are ranks.
    """
    axes = make_axes(_alone("pp", setup.world.layout, "torch-pipeline"))
    group = axes.group("pp")
    assert group is not None
    schedule = setup.wishes.get("schedule") or "gpipe"
    if schedule not in ("gpipe", "1f1b"):
        fix = "choose gpipe or 1f1b, or the strategy pipeline"
        raise UsageError(explain("torch-pipeline knows two schedules here", value=schedule, fix=fix))
    names = [name for blocks in find_blocks(model) for name in blocks.names]
    if len(names) < group.size():
        what = f"{type(model).__name__} has {len(names)} blocks for {group.size()} stages"
        raise UsageError(explain(what, fix="start fewer ranks"))
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    starts = [names[len(names) * stage // group.size()] for stage in range(1, group.size())]
    num_microbatches = setup.wishes.get("num_microbatches") or _MICROBATCHES_PER_RANK * group.size()
    step = TorchPipelineStep(model, optimizer, group, starts, schedule, num_microbatches, setup.world.device)
    return PreparedPair(_TrainedByStep(model), optimizer, step)


class TorchPipelineStep:
    """The step of ``torch-pipeline``; see ``Step``. Every rank must call it, with the same batch.

    Args:
        model: whole, and equal on all ranks.
        optimizer: over its parameters.
        group: the ranks, one for each stage.
        starts: names of the modules at which the second stage begins, and each further one.
        schedule: "gpipe" or "1f1b".
        num_microbatches: into how many parts a batch is cut.
        device: the device of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        starts: list[str],
        schedule: str,
        num_microbatches: int,
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._group, self._device = model, optimizer, group, device
        self._starts, self._kind, self._num_microbatches = starts, schedule, num_microbatches
        self._schedule: Any = None
        self._spec: Any = None
        self._batch: Any = None
        self._loss_fn: Callable[[Any, Any], Tensor] = lambda model, batch: batch

    def __call__(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        passed: Callable[[str], object] = lambda part: None,
    ) -> Tensor:
        """Train on one batch; see ``Step``."""
        args, kwargs = inputs_of(loss_fn, batch)
        rows = next(each.shape[0] for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if self._schedule is None:
            self._schedule = self._make(args, kwargs, rows)
        self._batch, self._loss_fn = batch, loss_fn
        losses: list[Tensor] = []
        is_first, is_last = self._group.rank() == 0, self._group.rank() == self._group.size() - 1
        targets = {"target": torch.arange(rows, device=self._device), "losses": losses} if is_last else {}
        self._schedule.step(
            *(args if is_first else ()), **(kwargs if is_first else {}), **targets, return_outputs=False
        )
        passed("forward")
        passed("backward")
        update((self._optimizer,), passed)
        loss = (
            torch.stack([each.detach() for each in losses]).mean() if is_last else torch.zeros((), device=self._device)
        )
        dist.broadcast(loss, group=self._group, group_src=self._group.size() - 1)
        return loss

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

        if rows % self._num_microbatches:
            what = f"torch-pipeline cuts a batch of {rows} into {self._num_microbatches} equal microbatches"
            raise UsageError(explain(what, value=rows, fix="choose --microbatches so that it divides the batch"))
        one = rows // self._num_microbatches
        args, kwargs = pytree.tree_map(
            lambda each: each[:one] if isinstance(each, Tensor) and each.dim() and each.shape[0] == rows else each,
            (args, kwargs),
        )
        with torch.no_grad(), torch.random.fork_rng():
            self._spec = pytree.tree_structure(self._model(*args, **kwargs))  # a traced stage returns bare tensors
        split = dict.fromkeys(self._starts, SplitPoint.BEGINNING)
        pipe = pipeline(self._model, args, kwargs, split_spec=split)
        holders: dict[int, set[int]] = {}
        for number in range(self._group.size()):
            for parameter in pipe.get_stage_module(number).parameters():
                holders.setdefault(id(parameter), set()).add(number)
        for parameter in self._model.parameters():
            if id(parameter) not in holders or len(holders[id(parameter)]) > 1:
                what = "PyTorch's pipeline copies tied weights into both stages and lets them drift apart"
                raise UsageError(explain(what, fix="choose the strategy pipeline, which keeps them equal"))
            disown(parameter, sorted(holders[id(parameter)]), self._group, keep=True)
        stage: Any = pipe.build_stage(self._group.rank(), self._device, self._group)
        stage.submod = _Contiguous(stage.submod)
        kind: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self._kind]
        return kind(stage, self._num_microbatches, loss_fn=self._loss)

    def _loss(self, output: Any, rows: Tensor) -> Tensor:
        length = self._schedule._n_microbatches * rows.shape[0]
        part = pytree.tree_map(
            lambda each: each[rows] if isinstance(each, Tensor) and each.dim() and each.shape[0] == length else each,
            self._batch,
        )
        found = pytree.tree_unflatten(output if isinstance(output, list | tuple) else [output], self._spec)
        return self._loss_fn(lambda *args, **kwargs: found, part)


class _Contiguous(nn.Module):
    """A stage whose inputs and outputs can be sent: an expanded mask, as many models make one, cannot."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        traced: Any = stage
        self.stage, self.graph = stage, traced.graph
        for node in self.graph.find_nodes(op="placeholder"):  # of which PyTorch makes the memory to receive into
            if isinstance(node.meta.get("val"), Tensor):
                node.meta["val"] = node.meta["val"].contiguous()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.stage(*args, **kwargs)
        return pytree.tree_map(lambda each: each.contiguous() if isinstance(each, Tensor) else each, found)


class _TrainedByStep(nn.Module):
    """Stands where a script would call the model; its forward is refused, because the step is PyTorch's schedule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        what = "torch-pipeline owns the training step, so the model cannot be called"
        raise UsageError(explain(what, fix="train by prepared.step(batch, loss_fn), or choose the strategy pipeline"))


def _below(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _alone(axis: str, layout: Layout, strategy: str) -> Layout:
    if layout.size < 2 or getattr(layout, axis) != layout.size:
        what = f"strategy {strategy} puts all ranks, at least two, on the axis {axis}"
        raise UsageError(explain(what, value=str(layout), fix="leave --layout out, or choose hybrid"))
    return layout

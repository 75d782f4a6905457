"""Records forward, backward and optimizer step of a training loop as spans of a timeline, by hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from ..timeline import Timeline
from .module import DistributedDataParallel


def record_steps(model: nn.Module, optimizer: Optimizer, timeline: Timeline) -> None:
    """Register hooks that record every forward, backward and optimizer step."""
    began_ns: dict[str, int] = {}

    def begin(name: str) -> None:
        began_ns[name] = timeline.now()

    def end(name: str) -> None:
        if name in began_ns:
            timeline.add(name, "step", began_ns.pop(name), timeline.now())

    def forward_ended(module: nn.Module, inputs: Any, output: Any) -> None:
        end("forward")
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(backward_began)

    def backward_began(gradient: torch.Tensor) -> None:
        if "backward" not in began_ns:
            begin("backward")
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # Callbacks run in the order in which they were queued: the inner one runs after those that wait for exchanges.
            queue(lambda: queue(lambda: end("backward")))

    if isinstance(model, DistributedDataParallel):
        model.timeline = timeline
    model.register_forward_pre_hook(lambda module, inputs: begin("forward"))
    model.register_forward_hook(forward_ended)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: begin("optimizer"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: end("optimizer"))

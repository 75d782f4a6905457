"""The program of the one rank of ``guozhuang plan --ranks N train.py``: it runs the script in a fake world, and records steps.

[Note: where a step begins] Scripts differ in what they call in a step, but all of them call the model, backward and an
optimizer. A step begins with the first training forward after an optimizer has stepped. It ends where the next one begins, so
fetching the next batch is its last part. After the measured steps the process ends at once: the script's own code for its end
might save what a rank of a fake world has trained. A script that ends earlier is measured by the steps that it has made, if
there are some after those that warm up.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from guozhuang.cost.trace import Trace
from guozhuang.errors import UsageError, explain
from guozhuang.groups import fake
from guozhuang.groups.fake import Recorder
from guozhuang.lab import measure
from guozhuang.lab.planner.fake.traces import check_recordable, period_of
from guozhuang.records import build, to_json, write_text
from guozhuang.registry import registry
from guozhuang.strategies import get
from guozhuang.world import requested_strategy

_FEWEST_STEPS: Final = 2  # that are measured


@dataclass(frozen=True)
class ScriptSpec:
    """What the rank is to do.

    Attributes:
        num_ranks: ranks of the fake world.
        num_nodes: nodes of it.
        rank: the rank that is played.
        backend: "shm" or "gloo".
        num_threads: compute threads of a rank.
        num_warmup_steps: steps before the measured ones.
        num_steps: measured steps; more if the strategy does the same only after more.
        out: the file for what was found.
    """

    num_ranks: int
    num_nodes: int
    rank: int
    backend: str
    num_threads: int
    num_warmup_steps: int
    num_steps: int
    out: str


@dataclass(frozen=True)
class RankFound:
    """What was found about a rank.

    Attributes:
        trace: of its steps.
        peak_bytes: its peak of main memory, of which ``before_bytes`` were in use when the script began.
        before_bytes: see there.
        device_bytes: its peak of an accelerator's memory.
        parameter_bytes: of what its optimizers hold.
        has_asked: whether the script has entered the world.
        strategy: by which ``gz.prepare`` has prepared its model; empty if it has not.
    """

    trace: Trace
    peak_bytes: int
    before_bytes: int
    device_bytes: int
    parameter_bytes: int
    has_asked: bool
    strategy: str


class _Watch:
    """Finds the steps of a script. See [Note: where a step begins]."""

    def __init__(self, spec: ScriptSpec, recorder: Recorder) -> None:
        self._spec, self._recorder = spec, recorder
        self._root: nn.Module | None = None
        self.has_stepped, self._left, self._most_left = False, -1, 0
        self._names, self._every = list[str](), 1
        self.num_done = 0  # steps after which another one has begun
        self.has_asked, self.before_bytes = False, measure.peak_memory_bytes() or 0
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._finding = nn.modules.module.register_module_forward_pre_hook(self._on_any_forward)
        register_optimizer_step_post_hook(self._on_step)
        self._watch_backward()
        self._replace_starts()

    @property
    def fewest_steps(self) -> int:
        """The steps that a script has to make: the last of them shows where the one before it ends."""
        return self._spec.num_warmup_steps + self._warmup_steps() + max(_FEWEST_STEPS, self._every) + 1

    def _on_any_forward(self, module: nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return
        self._finding.remove()  # the first module that trains is the outermost one
        self._root = module
        module.register_forward_pre_hook(self._on_forward, prepend=True)
        self._on_forward(module, inputs)

    def _on_forward(self, module: nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._recorder.passed("data")
        if self.has_stepped:
            self.has_stepped = False
            self._step_ended()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self.has_stepped = True
        self._recorder.passed("optimizer")

    def _step_ended(self) -> None:
        self.num_done += 1
        if self._left > 0:
            self._left -= 1
            self._recorder.step_ended()
            if self._left == 0:
                self.leave()
        elif self.num_done == self._spec.num_warmup_steps + self._warmup_steps():
            # What is known of the models is noted here: a script that ends takes them with it.
            self._names = sorted({each.strategy for each in registry.trained})
            self._every = max((period_of(each.model) for each in registry.trained), default=1)
            self._left = self._most_left = max(self._spec.num_steps, self._every)
            self._recorder.begin()
        self._recorder.passed("data")

    def _warmup_steps(self) -> int:
        return max((get(each.strategy).warmup_steps for each in registry.trained), default=0)

    def _watch_backward(self) -> None:
        theirs = torch.autograd.backward

        def backward(*args: Any, **options: Any) -> None:
            self._recorder.passed("forward")
            theirs(*args, **options)
            self._recorder.passed("backward")

        torch.autograd.backward = backward  # Tensor.backward looks it up here

    def _replace_starts(self) -> None:
        """Answer a script that makes its process group, and refuse one that starts its own ranks."""
        spec = self._spec

        def init_process_group(*args: Any, **options: Any) -> None:
            self.has_asked = True
            size, rank = options.get("world_size", -1), options.get("rank", -1)
            if size not in (-1, None, spec.num_ranks) or rank not in (-1, None, spec.rank):
                what = "the script makes a process group of its own numbers, and not of the launcher's"
                fix = "leave rank= and world_size= out of init_process_group, or take RANK and WORLD_SIZE"
                raise UsageError(explain(what, value=f"rank {rank} of {size}", fix=fix))

        def start(*args: Any, **options: Any) -> NoReturn:
            what = "the script starts its ranks itself, and here it is to be one of them"
            raise UsageError(explain(what, fix="write it for a launcher: one process is one rank (guozhuang run)"))

        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
        torch.multiprocessing.spawn = torch.multiprocessing.start_processes = start

    def script_ended(self) -> None:
        """Leave as after the last measured step, if enough steps of those that are left were made."""
        if 0 < self._left <= self._most_left - max(_FEWEST_STEPS, self._every):
            self.leave()

    def leave(self) -> NoReturn:
        """Write what was found, and end the process."""
        held = {id(p): p.numel() * p.element_size() for each in self._optimizers.values() for group in each.param_groups
                for p in group["params"]}  # fmt: skip
        found = RankFound(
            trace=self._recorder.traces(self._every, self._spec.num_threads)[0],
            peak_bytes=(measure.peak_memory_bytes() or 0) + self._recorder.beside_bytes,
            before_bytes=self.before_bytes,
            device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            parameter_bytes=sum(held.values()),
            has_asked=self.has_asked or bool(self._names),
            strategy=", ".join(self._names),
        )
        write_text(Path(self._spec.out), to_json(dataclasses.asdict(found)))
        _end(0)


def _end(code: int) -> NoReturn:
    """End this process and its children at once, such as the workers of a DataLoader."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str]) -> None:
    """Run a script (``arguments[1]``, with its arguments after it) as the rank that the file ``arguments[0]`` describes."""
    spec = build(ScriptSpec, json.loads(Path(arguments[0]).read_text()))
    torch.set_num_threads(spec.num_threads)
    if (asked_for := requested_strategy()) is not None:
        check_recordable(get(asked_for))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here, recorder = fake.enter(spec.rank, spec.num_ranks, spec.num_nodes, spec.backend, device)
    if here.layout.pp > 1:
        what = "a rank of a pipeline needs what the other stages send, and here nobody is"
        raise UsageError(explain(what, value=str(here.layout), fix="choose a layout without pp"))
    watch = _Watch(spec, recorder)
    sys.argv = arguments[1:]
    sys.path[0] = str(Path(arguments[1]).resolve().parent)
    try:
        runpy.run_path(arguments[1], run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise
    watch.script_ended()
    what = f"the script ended after {watch.num_done + watch.has_stepped} steps of a rank"
    fix = (
        f"let it make {watch.fewest_steps} or more: more epochs, or more data ({spec.num_ranks} ranks share it)"
        if watch.num_done
        else "call the model in training mode, backward and optimizer.step() in the script"
    )
    raise UsageError(explain(what, value=arguments[1], fix=fix))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"guozhuang plan: {error}", file=sys.stderr)
        _end(2)

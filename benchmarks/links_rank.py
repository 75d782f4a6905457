"""One rank of links.py: every contestant takes its turns in the same processes; what was measured is printed as JSON.

A turn makes a fresh model and optimizer from the same seed, wraps them, takes a few steps that are not timed, and then so many
that they fill the turn's time; rank 0 chooses how many. Nothing of a contestant is left when the next one begins: no thread, no
connection. A turn's time is that of the slowest rank (the hosts share one clock, that of the machine).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

import guozhuang
from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.exchange import GradientExchange
from guozhuang.exchange.warmup import Warmup
from guozhuang.optim import QAdam
from guozhuang.strategies import WithExchange
from guozhuang.workloads import bert

TORCH, TORCH_FP16 = "torch-ddp", "torch-ddp fp16 hook"
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_VOCABULARY, _CLASSES, _BATCHES = 30522, 4, 8
_LEAST_STEPS = 2  # untimed: PyTorch's DDP and ours lay buckets out anew after the first backward
#: Strategies whose ranks hold one copy of the model together.
DIVIDED = ("pipeline", "tensor")
_PERIODS = ("every", "steps")  # what the fields of methods that do not send in each step are called


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all ranks do.

    Attributes:
        models: sizes, without "bert-"; one after the other.
        contestants: names, in the order of the first round.
        rounds: how many turns each gets at most.
        turn_s: seconds that the timed steps of a turn should fill.
        max_steps: of a turn, unless its period is longer.
        warmup_s: seconds after which untimed steps end, once there were two of them.
        warmups: untimed steps by contestant, for those whose own warm-up is to be gone through.
        periods: timed steps are a multiple of this, by contestant.
        budget_s: for all; what a model does not need is left to the next. No turn begins that would not end in time.
        batch: samples a rank and step.
        tokens: of a sample.
        fused: whether AdamW updates all parameters in one kernel.
        backend: of the collectives.
    """

    models: list[str]
    contestants: list[str]
    rounds: int
    turn_s: float
    max_steps: int
    warmup_s: float
    warmups: dict[str, int]
    periods: dict[str, int]
    budget_s: float
    batch: int
    tokens: int
    fused: bool
    backend: str = "gloo"


@dataclasses.dataclass
class Contestant:
    """What a turn trains.

    Attributes:
        module: called in place of the model.
        optimizer: stepped in place of the optimizer.
        period: after so many steps it has done everything once.
        settles: untimed steps after which a period of steps sends what any other does.
    """

    module: nn.Module
    optimizer: Optimizer
    period: int = 1
    settles: int = _LEAST_STEPS


def make(name: str, model: nn.Module, optimizer: Optimizer) -> Contestant:
    """Wrap a model as the contestant does; a method that begins with whole gradients for some steps begins after them.

    ``name@4`` is the same with buckets of at most 4 MiB.
    """
    name, _, cap = name.partition("@")
    cap_mb = float(cap) if cap else None
    if name in (TORCH, TORCH_FP16):
        wrapped = TorchDDP(model, bucket_cap_mb=cap_mb)
        if name == TORCH_FP16:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return Contestant(wrapped, optimizer)
    entry = strategies.get(name).prepare
    if not isinstance(entry, WithExchange) and name != "ddp":
        return Contestant(*strategies.prepare(model, optimizer, name))
    ours = guozhuang.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    if name == "ddp":
        return Contestant(ours, optimizer)
    assert isinstance(entry, WithExchange)
    exchange, optimizer = entry.make(optimizer)
    if isinstance(optimizer, QAdam):
        optimizer.warmup_steps = 1  # it cannot be without
        exchange = optimizer.exchange()
    elif isinstance(exchange, Warmup):
        exchange = exchange.then
    if isinstance(exchange, GradientExchange):
        ours.use_exchange(exchange)
        return Contestant(ours, optimizer)
    ours.use_weight_exchange(exchange, optimizer)
    assert ours.around is not None
    ours.around.step = getattr(exchange, "start_step", 0)
    period, overlap = max(getattr(exchange, field, 1) for field in _PERIODS), getattr(exchange, "overlap_steps", 0)
    # What was started in one period is sent and waited for in the next one.
    return Contestant(ours, optimizer, period, period + overlap if overlap else _LEAST_STEPS)


class Batches:
    """Random tokens, others on each rank, the same for all contestants; a divided model's ranks all have the whole batch."""

    def __init__(self, plan: Plan, rank: int, shares: int = 1) -> None:
        random = torch.Generator().manual_seed(rank)
        shape = _BATCHES, plan.batch * shares, plan.tokens
        self._ids = torch.randint(1, _VOCABULARY, shape, generator=random)
        self._labels = torch.randint(0, _CLASSES, shape[:2], generator=random)
        self._mask = torch.ones_like(self._ids[0])

    def step(self, contestant: Contestant, number: int) -> torch.Tensor:
        """Make one training step; return the loss before it."""
        at = number % _BATCHES
        logits = contestant.module(input_ids=self._ids[at], attention_mask=self._mask).logits
        loss = nn.functional.cross_entropy(logits, self._labels[at])
        loss.backward()
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()
        return loss.detach()


def build(size: str, plan: Plan) -> nn.Module:
    """A new model, always the same."""
    torch.manual_seed(0)
    return bert.build(
        bert.SIZES[f"bert-{size}"], num_classes=_CLASSES, vocabulary_size=_VOCABULARY, pad_id=0, dropout=0.0,
        max_length=plan.tokens,
    )  # fmt: skip


def turn(name: str, size: str, plan: Plan, batches: Batches) -> dict[str, Any]:
    """One contestant's turn; what rank 0 returns counts."""
    model = build(size, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=bert.SIZES[f"bert-{size}"].adamw_lr, fused=plan.fused or None)
    contestant = make(name, model, optimizer)
    period = max(plan.periods.get(name, 1), contestant.period)
    losses, step_s = _warm_up(name, contestant, plan, batches)
    num_steps = max(1, min(plan.max_steps, int(plan.turn_s / step_s)))
    num_steps = int(_of_rank_0(-(-num_steps // period) * period))
    # The clock begins where a step ends, because some strategies leave work to the next step.
    losses.append(batches.step(contestant, len(losses)))
    before, all_before = (_sent_bytes(), _cpu_s(), time.monotonic()), _machine_cpu_s()
    for _ in range(num_steps):
        losses.append(batches.step(contestant, len(losses)))
    after, all_after = (_sent_bytes(), _cpu_s(), time.monotonic()), _machine_cpu_s()
    begun, ended = _greatest(before[2]), _greatest(after[2])
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    per_step = torch.tensor([after[i] - before[i] for i in (0, 1)], dtype=torch.float64) / num_steps
    dist.all_reduce(per_step)
    contestant.module.eval()  # ends what is under way
    return {
        "steps": num_steps,
        "seconds": ended - begun,
        "samples_per_s": num_steps * plan.batch * dist.get_world_size() / (ended - begun),
        "sent_bytes_per_step": float(per_step[0]) / dist.get_world_size(),
        "cpu_s_per_step": float(per_step[1]) / dist.get_world_size(),
        # Of all ranks and whatever else computed; on a machine that is all theirs little more than that of the ranks.
        "machine_cpu_s_per_step": (all_after - all_before) / num_steps,
        "losses": (mean_losses / dist.get_world_size()).tolist(),
    }


def _warm_up(name: str, contestant: Contestant, plan: Plan, batches: Batches) -> tuple[list[torch.Tensor], float]:
    """Take the untimed steps; return their losses, and the seconds of the last one."""
    losses: list[torch.Tensor] = []
    least = max(plan.warmups.get(name, _LEAST_STEPS), contestant.settles)
    began = time.monotonic()
    while True:
        start = time.monotonic()
        losses.append(batches.step(contestant, len(losses)))
        now = time.monotonic()
        if _of_rank_0(float(len(losses) >= least and (now - began > plan.warmup_s or len(losses) > least))):
            return losses, now - start


def _of_rank_0(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(box, 0)
    return box.item()


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.softirq + times.irq)


def _greatest(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return box.item()


def _sent_bytes() -> int:
    return int(_COUNTER.read_text())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _nothing_left() -> Any:
    """End the groups that were made inside."""
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    try:
        yield
    finally:
        gc.collect()
        for group in [group for group in groups if group not in before]:
            dist.destroy_process_group(group)


def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By model and contestant a list of turns."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    own, whole = Batches(plan, dist.get_rank()), Batches(plan, 0, dist.get_world_size())
    build(plan.models[0], plan)  # imports all that it needs, which takes many seconds
    dist.barrier()
    whole_end = time.monotonic() + plan.budget_s
    for done, size in enumerate(plan.models):
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in plan.contestants}
        took: dict[str, float] = {}
        refused: set[str] = set()
        end = time.monotonic() + (whole_end - time.monotonic()) / (len(plan.models) - done)
        for number in range(plan.rounds):
            # Forwards, then backwards: the one after another one changes too.
            for name in plan.contestants[:: 1 if number % 2 == 0 else -1]:
                expected = took.get(name, statistics.median([0.0, *took.values()]))
                if name in refused or _of_rank_0(float(time.monotonic() + expected > end)):
                    continue
                start = time.monotonic()
                try:
                    with _nothing_left():
                        batches = whole if name in DIVIDED else own
                        turns[name].append({"round": number, **turn(name, size, plan, batches)})
                except UsageError as error:  # raised before anything was sent, on all ranks alike
                    refused.add(name)
                    say(f"{name} cannot be raced here: {error}")
                    continue
                took[name] = time.monotonic() - start
                last = turns[name][-1]
                speed = f"{last['samples_per_s']:.1f} samples/s in {last['steps']} steps"
                say(f"bert-{size}, round {number + 1}: {name}: {speed} (the turn took {took[name]:.0f} s)")
        found[size] = turns
    return found


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    world = guozhuang.init(plan.backend, "cpu", timeout_s=300)
    progress = Path(sys.argv[2])

    def say(text: str) -> None:
        if world.rank == 0:
            with contextlib.suppress(OSError), progress.open("a") as file:
                file.write(text + "\n")

    found = measure(plan, say)
    print("FOUND " + json.dumps(found if world.rank == 0 else {}), flush=True)
    guozhuang.shutdown()


if __name__ == "__main__":
    main()

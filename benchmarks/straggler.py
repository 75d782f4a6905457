"""Who waits for a straggler: samples/s of the other ranks while one rank takes twice as long for each step.

    python benchmarks/straggler.py [--rounds 5] [--window-s 4] [--contenders ddp,async-model-average] [--json FILE]

Four ranks over gloo. What a step computes is a sleep of 50 ms in forward and a small model of 0.26 million weights, so that
four ranks on two cores do not crowd each other: the benchmark shows who waits for whom, not how fast anything computes. The
straggler is the last rank; after its forward it sleeps for as long as the forward took, and so takes no core from the others.

`ddp` and `local-sgd` make one number of steps on all ranks. Asynchronous contenders train for one time on all ranks, each as
many steps as it can; then the ranks agree on one set of weights, and the time for that is printed apart. All contenders live
in the same processes and take turns, each with and without the straggler, round after round. A ratio is taken within a round;
medians over rounds are printed. Asked of the asynchronous ones: the others keep at least 85 % of the speed that they have
without a straggler, of their own and of that under `ddp`. A server that bounds staleness cannot: over
a long time its ranks are as fast as the slowest, and the bound only hides a rank that is slow now and then. So it is raced with
the strategy's bound and with one that is not met in a window. A contender that cannot run here is left out, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import guozhuang
from guozhuang.errors import UsageError
from guozhuang.exchange.parameter_server import AsyncParameterServer
from guozhuang.strategies import STRATEGIES

RANKS, BATCH, COMPUTE_S, WIDTH = 4, 8, 0.05, 256
STRAGGLER = RANKS - 1
ASYNCHRONOUS = ("async-model-average", "async-parameter-server")
# NAME:STEPS is the asynchronous parameter server with that bound in place of the strategy's.
CONTENDERS = ("ddp", "async-model-average", "local-sgd", "async-parameter-server", "async-parameter-server:1000")


class Slow(nn.Module):
    """A few layers behind a sleep; `straggles` makes forward take twice as long."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.straggles = False

    def forward(self, x: Tensor) -> Tensor:
        began_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        y = self.layers(x)
        if self.straggles:
            time.sleep(time.perf_counter() - began_s)
        return y


class Contender:
    """One way to train, in one rank."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.bare = Slow()
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=1e-4)
        self.model: nn.Module
        strategy, _, bound = name.partition(":")
        if bound:
            exchange = AsyncParameterServer(max_staleness_steps=int(bound), average=True)
            self.model, self.optimizer = guozhuang.DistributedDataParallel(self.bare), optimizer
            self.model.use_weight_exchange(exchange, optimizer)
        else:
            self.model, self.optimizer = guozhuang.prepare(self.bare, optimizer, strategy)
        self.is_asynchronous = strategy in ASYNCHRONOUS
        self.x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, straggles: bool, is_slow: bool, window_s: float) -> dict[str, float]:
        """Train for a window; every rank must call. Returns this rank's speed, and how long it took to agree."""
        self.bare.straggles = straggles and is_slow
        self.model.train()
        dist.barrier()
        began_s, num_steps = time.perf_counter(), 0
        if self.is_asynchronous:
            while time.perf_counter() - began_s < window_s:
                self.step()
                num_steps += 1
        else:
            for _ in range(int(window_s / COMPUTE_S / (2 if straggles else 1))):
                self.step()
                num_steps += 1
        took_s = time.perf_counter() - began_s
        dist.barrier()
        met_s = time.perf_counter()
        self.model.eval()
        agreed_s = time.perf_counter() - met_s
        return {"samples": num_steps * BATCH, "took_s": took_s, "agreed_s": agreed_s}


def measure(rank: int, port: int, names: list[str], rounds: int, window_s: float, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    guozhuang.init("gloo", "cpu")
    contenders: list[Contender] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            contenders.append(Contender(name, rank))
        except UsageError as error:  # the same on all ranks
            left_out[name] = str(error)
    for contender in contenders:
        contender.run(False, False, 0.2)
    results: dict[str, Any] = {"left_out": left_out, "rounds": []}
    for number in range(rounds):
        turns = [(contender, straggles) for contender in contenders for straggles in (False, True)]
        first = number % len(turns)
        found: dict[str, Any] = {}
        for contender, straggles in turns[first:] + turns[:first]:
            everyones: list[Any] = [None] * RANKS
            dist.all_gather_object(everyones, contender.run(straggles, rank == STRAGGLER, window_s))
            speeds = [each["samples"] / each["took_s"] for each in everyones]
            others = statistics.mean(speeds[:STRAGGLER])
            every = sum(each["samples"] for each in everyones) / max(each["took_s"] for each in everyones)
            agreed_s = max(each["agreed_s"] for each in everyones)
            found[f"{contender.name}/{straggles}"] = {"others": others, "all": every, "agreed_s": agreed_s}
        results["rounds"].append(found)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


def show(results: dict[str, Any], names: list[str]) -> None:
    rounds = results["rounds"]
    print(
        f"samples/s of one of the {RANKS - 1} others, and of all {RANKS} ranks together; "
        f"medians of {len(rounds)} rounds (min .. max)"
    )
    print("kept: others with a straggler / others without one; of ddp's: / others under ddp without one; asked: 0.85")
    heading = ("", "others, none slow", "one slow", "kept", "of ddp's", "all, one slow", "all / ddp's", "agreed in")
    widths = (30, 19, 10, 21, 21, 15, 21, 10)
    print("".join(f"{text:<{width}}" for text, width in zip(heading, widths, strict=True)))
    for name in names:
        if name in results["left_out"]:
            continue
        without = [each[f"{name}/False"] for each in rounds]
        slow = [each[f"{name}/True"] for each in rounds]
        ddp = [(each["ddp/False"], each["ddp/True"]) for each in rounds]
        cells = (
            name,
            f"{statistics.median(each['others'] for each in without):.0f}",
            f"{statistics.median(each['others'] for each in slow):.0f}",
            spread([a["others"] / b["others"] for a, b in zip(slow, without, strict=True)]),
            spread([a["others"] / b["others"] for a, (b, _) in zip(slow, ddp, strict=True)]),
            f"{statistics.median(each['all'] for each in slow):.0f}",
            spread([a["all"] / b["all"] for a, (_, b) in zip(slow, ddp, strict=True)]),
            f"{1e3 * statistics.median(each['agreed_s'] for each in slow):.0f} ms",
        )
        print("".join(f"{text:<{width}}" for text, width in zip(cells, widths, strict=True)))
    for name, why in results["left_out"].items():
        print(f"{name} left out: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = options.contenders.split(",")
    if "ddp" not in names:
        parser.error("the others are compared with ddp: name it among the contenders")
    for name in names:
        strategy, _, bound = name.partition(":")
        if strategy not in STRATEGIES or (bound and (strategy != ASYNCHRONOUS[1] or not bound.isdecimal())):
            parser.error(f"{name!r} cannot be raced")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (free_port(), names, options.rounds, options.window_s, folder), nprocs=RANKS)
        results = json.loads(Path(folder, "result.json").read_text())
    show(results, names)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""Race parameter servers over torch RPC against ours, and `ddp`, on one example: samples/s of two trainers and one server.

    python benchmarks/rpc.py [--rounds 9] [--steps 40] [--hidden 20000] [--batch-size 64]

A perceptron with one hidden layer, SGD, one thread a process; 20,000 hidden units are 460,002 parameters. `rpc batched` is what
examples/rpc_batched.py does (weights of all trainers equal, as under `ddp` and `ParameterServer`), `rpc autograd` what
examples/rpc_parameter_server.py does: the server computes, for one trainer at a time. All run in the same two trainers, with a
process for the server of RPC and one for each of ours, and take turns, round after round. A ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed import rpc  # noqa: E402

import guozhuang as gz  # noqa: E402
from examples import rpc_batched, rpc_parameter_server  # noqa: E402
from guozhuang.exchange.parameter_server import AsyncParameterServer, ParameterServer  # noqa: E402

NUM_TRAINERS = 2
NAMES = ("rpc autograd", "rpc batched", "AsyncParameterServer", "ParameterServer", "ddp")
BASE = "rpc batched"


def race(process: int, ports: list[int], options: argparse.Namespace, folder: str) -> None:
    """Process 0 serves over RPC; trainers 1 and 2 take part in both worlds."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # the examples tell that they are under way
        if process > 0:
            told = {"RANK": process - 1, "LOCAL_RANK": process - 1, "MASTER_PORT": ports[0]}
            told |= {"WORLD_SIZE": NUM_TRAINERS, "LOCAL_WORLD_SIZE": NUM_TRAINERS}
            os.environ.update({name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"})
            gz.init(device="cpu")
        meeting = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ports[1]}")
        name = f"trainer{process}" if process else rpc_batched.SERVER
        rpc.init_rpc(name, rank=process, world_size=1 + NUM_TRAINERS, rpc_backend_options=meeting)
        if process > 0:
            speeds = take_turns(process, ports, options)
            if process == 1:
                Path(folder, "result.json").write_text(json.dumps(speeds))
        rpc.shutdown()
        if process > 0:
            gz.shutdown()


def take_turns(process: int, ports: list[int], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the samples/s of all trainers, by contender and round; on process 1 alone they are all."""
    turns: dict[str, Callable[[], float]] = {
        "rpc autograd": lambda: over_rpc(process, lambda i: (rpc_parameter_server.train, (i, options))),
        "rpc batched": lambda: batched(process, options),
        "AsyncParameterServer": Ours(process, "async", ports[3], options),
        "ParameterServer": Ours(process, "sync", ports[2], options),
        "ddp": Ours(process, "ddp", 0, options),
    }
    speeds: dict[str, list[float]] = {name: [] for name in NAMES}
    for r in range(-1, options.rounds):  # the first round is not counted
        for name in NAMES[r % len(NAMES) :] + NAMES[: r % len(NAMES)]:
            dist.barrier()
            speed = turns[name]()
            if r >= 0:
                speeds[name].append(speed)
    dist.barrier()
    return speeds


def over_rpc(process: int, call: Callable[[int], tuple[Any, Any]]) -> float:
    """Process 1 starts the training on both trainers; the other one waits at the next barrier."""
    if process != 1:
        return 0.0
    asked = []
    for i in range(1, 1 + NUM_TRAINERS):
        function, arguments = call(i)
        asked.append(rpc.rpc_async(f"trainer{i}", function, args=arguments, timeout=0))
    return float(sum(speed for _, _, speed in torch.futures.wait_all(asked)))


def batched(process: int, options: argparse.Namespace) -> float:
    if process != 1:
        return 0.0
    server = rpc.remote(rpc_batched.SERVER, rpc_batched.BatchingServer, args=(NUM_TRAINERS, options))
    return over_rpc(process, lambda i: (rpc_batched.train, (server, i, options)))


class Ours:
    """One of our contenders in one trainer: the model and data of the examples."""

    def __init__(self, process: int, kind: str, port: int, options: argparse.Namespace) -> None:
        self.options = options
        self.generator = torch.Generator().manual_seed(process)
        model = rpc_batched.make_model(options.hidden)
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.lr)
        os.environ["GUOZHUANG_SERVERS"] = f"1@127.0.0.1:{port}"
        self.model = gz.DistributedDataParallel(model)
        if kind == "sync":
            self.model.use_exchange(ParameterServer(servers=1))
        elif kind == "async":
            self.model.use_weight_exchange(AsyncParameterServer(servers=1), self.optimizer)
        self.step()  # meets its server while the variable names it
        del os.environ["GUOZHUANG_SERVERS"]

    def step(self) -> None:
        inputs = torch.randn(self.options.batch_size, 20, generator=self.generator)
        labels = (inputs[:, :4].sum(1) > 0).long()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def __call__(self) -> float:
        for step in range(self.options.steps):
            if step == self.options.warmup_steps:
                begin_s = time.perf_counter()
            self.step()
        mine = (
            self.options.batch_size * (self.options.steps - self.options.warmup_steps) / (time.perf_counter() - begin_s)
        )
        return gz.reduce(mine, "sum")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--warmup-steps", type=int, default=5, help="of them that are not counted")
    parser.add_argument("--hidden", type=int, default=20000)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    options.lr, options.no_turns = 0.01, False
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"})
    ports = [free_port() for _ in range(4)]
    module = "guozhuang.exchange.parameter_server.server"
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--store", f"127.0.0.1:{port}", "--number", "0", "--count", "1", "--listen"]
        )
        for port in ports[2:]
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(race, (ports, options, folder), nprocs=1 + NUM_TRAINERS)
            speeds = json.loads(Path(folder, "result.json").read_text())
    finally:
        for server in servers:
            server.terminate()
            server.wait(10)
    print(f"samples/s are medians; ratios to {BASE} are medians of the rounds' ratios (min .. max)")
    for name in NAMES:
        ratios = [a / b for a, b in zip(speeds[name], speeds[BASE], strict=True)]
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"{name:22}{statistics.median(speeds[name]):>10.1f}   {told}")


if __name__ == "__main__":
    main()

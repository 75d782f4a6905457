"""One large image on several ranks: `space` against one process of one thread, in memory and in speed.

    python -m benchmarks.space [--networks unet,resnet] [--size 768] [--ranks 2] [--rounds 7] [--steps 1] [--json FILE]

Every rank has one thread. The one process is rank 0, while the others wait; then all ranks take the same steps on the same
image, round after round. A round's ratio is taken within the round; the median over rounds is printed, with the smallest and
the largest. Beforehand both take steps from equal weights on an image of half the size, and the relative differences of
losses, gradients and running statistics are printed: the norm of the difference by the norm, of all tensors together. Memory
is what autograd keeps for backward, counted by storages (saved_tensors_hooks), without parameters: the largest rank's, times
the number of ranks, by that of one process; 1.15 was asked.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import guozhuang as gz
from tests.image_networks import ResNet, UNet, saved_bytes

NETWORKS: dict[str, Callable[[], nn.Module]] = {"unet": lambda: UNet(width=16), "resnet": lambda: ResNet(width=32)}
MEMORY, SPEED = 1.15, 1.7  # asked


def loss_of(output: Any) -> Tensor:
    output = output["mask"] if isinstance(output, dict) else output
    target = torch.arange(output.numel() // output.shape[1]).view(-1, *output.shape[2:]) % output.shape[1]
    return F.cross_entropy(output, target)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model(image))
    loss.backward()
    optimizer.step()
    return loss.item()


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors together, relative to their norm."""
    differences = sum(float((found[name] - each).double().square().sum()) for name, each in expected.items())
    return float((differences / sum(float(each.double().square().sum()) for each in expected.values())) ** 0.5)


def differences(name: str, size: int, dtype: torch.dtype, steps: int) -> dict[str, float]:
    """The worst of some steps from equal weights."""
    torch.manual_seed(0)
    one, image = NETWORKS[name]().to(dtype), torch.randn(1, 3, size, size).to(dtype)
    mine: nn.Module = copy.deepcopy(one)
    optimizer_of_one = torch.optim.SGD(one.parameters(), 0.02)
    mine, optimizer = gz.prepare(mine, torch.optim.SGD(mine.parameters(), 0.02))
    found = {"losses": 0.0, "gradients": 0.0, "running statistics": 0.0}
    for _ in range(steps):
        losses = step(one, optimizer_of_one, image), step(mine, optimizer, image)
        both = (gz.unwrap(mine), one)
        gradients = [
            {key: each.grad for key, each in network.named_parameters() if each.grad is not None} for network in both
        ]
        buffers = [dict(network.named_buffers()) for network in both]
        found["losses"] = max(found["losses"], abs(losses[1] - losses[0]) / abs(losses[0]))
        found["gradients"] = max(found["gradients"], apart(*gradients))
        found["running statistics"] = max(found["running statistics"], apart(*buffers))
    return found


def race(name: str, size: int, rounds: int, steps: int) -> dict[str, Any]:
    """The row of one network."""
    torch.set_num_threads(1)
    world = gz.init()
    rank, num_ranks = world.rank, world.size
    off = {"float32, 1 step": differences(name, size // 2, torch.float32, 1)}
    off["float64, 3 steps"] = differences(name, size // 2, torch.float64, 3)
    torch.manual_seed(0)
    one, image = NETWORKS[name](), torch.randn(1, 3, size, size)
    model: nn.Module = copy.deepcopy(one)
    own = {each.untyped_storage().data_ptr() for network in (one, model) for each in network.parameters()}
    optimizer_of_one = torch.optim.SGD(one.parameters(), 0.02)
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.02))
    step(one, optimizer_of_one, image)
    step(model, optimizer, image)
    share = torch.tensor(float(saved_bytes(model, image, own)))
    dist.all_reduce(share, dist.ReduceOp.MAX)
    whole = saved_bytes(one, image, own)
    ratios, times = [], []
    for _ in range(rounds):
        taken = []
        for network, its in ((one, optimizer_of_one), (model, optimizer)):
            dist.barrier()
            start = time.perf_counter()
            if network is model or rank == 0:
                for _ in range(steps):
                    step(network, its, image)
            dist.barrier()
            taken.append((time.perf_counter() - start) / steps)
        times.append(taken)
        ratios.append(taken[0] / taken[1])
    return {
        "network": name,
        "size": size,
        "ranks": num_ranks,
        "one_ms": statistics.median(each[0] for each in times) * 1e3,
        "space_ms": statistics.median(each[1] for each in times) * 1e3,
        "speed": statistics.median(ratios),
        "speed_range": [min(ratios), max(ratios)],
        "saved_mib": whole / 2**20,
        "memory": share.item() / whole * num_ranks,
        "differences": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="unet,resnet")
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.networks.split(","):
        given = (name, options.size, options.rounds, options.steps)
        row = gz.launch(race, given, nproc=options.ranks, strategy="space")[0]
        rows.append(row)
        least, most = row["speed_range"]
        print(
            f"{name}, one image of {options.size} x {options.size}, {options.ranks} ranks: "
            f"{row['one_ms']:.0f} ms in one process, {row['space_ms']:.0f} ms: "
            f"{row['speed']:.2f} x ({least:.2f} .. {most:.2f}; asked on 2 ranks: {SPEED}); "
            f"activations {row['saved_mib']:.0f} MiB, a rank {row['memory']:.3f} / n (asked: {MEMORY})",
            flush=True,
        )
        for when, found in row["differences"].items():
            print(
                f"  relative differences, {when}: " + ", ".join(f"{what} {value:.1e}" for what, value in found.items())
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

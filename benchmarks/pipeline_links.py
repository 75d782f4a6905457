"""Race a pipeline against PyTorch's DDP on two hosts with a slow link: BERT-base, AdamW, 16 x 64 tokens a step in all.

    python -m benchmarks.pipeline_links [--links 1gbit/0.1,100mbit/0.1] [--rounds 3] [--steps 2] [--layers 12]
        [--microbatches M] [--json FILE]

Needs root: the hosts are network namespaces of this machine (tests/hosts/network.py), each with one rank of one thread. All
contenders live in the same processes and take turns: PyTorch's DDP, `ddp`, and `pipeline` with GPipe's order. A step is the
forward, the script's own loss on the whole batch, backward and AdamW; both kinds train on the same 16 sequences. A ratio is
taken within a round; medians over rounds are printed, with the bytes that host 0 puts on its link in a step, and the greatest
difference of the first loss from that of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import guozhuang
from tests.hosts.network import Hosts, missing, run_everywhere

BATCH, TOKENS, VOCABULARY = 16, 64, 30522
CONTENDERS = ("torch-ddp", "ddp", "pipeline")
ASKED = {"1gbit": 2.0, "100mbit": 10.0}


def bert(num_layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=num_layers, num_labels=4, **none))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    return words, torch.randint(0, 4, (BATCH,), generator=generator)


def loss_of(model: Callable[..., Any], words: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=words).logits, answers)


def measure(rounds: int, num_steps: int, num_layers: int, microbatches: int | None) -> dict[str, Any]:
    """Run by each rank; what rank 0 returns counts."""
    world = guozhuang.init("gloo", "cpu", timeout_s=300)
    words, answers = batch()
    mine = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
    trained: dict[str, tuple[Any, torch.optim.Optimizer, Any, Any]] = {}
    for name in CONTENDERS:
        model = bert(num_layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        if name == "torch-ddp":
            trained[name] = TorchDDP(model), optimizer, words[mine], answers[mine]
        else:
            whole = name == "pipeline"
            options: dict[str, Any] = {"microbatches": microbatches} if whole and microbatches else {}
            prepared = guozhuang.prepare(model, optimizer, name, **options)
            trained[name] = *prepared, words if whole else words[mine], answers if whole else answers[mine]
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    found: dict[str, Any] = {name: {"step_s": [], "bytes": []} for name in CONTENDERS}
    for turn in range(-1, rounds):  # the first round is not counted
        for name in CONTENDERS[:: 1 if turn % 2 else -1]:
            model, optimizer, x, y = trained[name]
            dist.barrier()
            sent, start = int(counter.read_text()), time.perf_counter()
            for _ in range(num_steps if turn >= 0 else 1):
                loss = loss_of(model, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if turn < 0:
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    found[name]["loss"] = float(total) / world.size
            dist.barrier()
            if turn >= 0:
                found[name]["step_s"].append((time.perf_counter() - start) / num_steps)
                found[name]["bytes"].append((int(counter.read_text()) - sent) / num_steps)
    guozhuang.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="1gbit/0.1,100mbit/0.1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, help="of the pipeline; chosen by default")
    parser.add_argument("--json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.rank:
        print("FOUND " + json.dumps(measure(asked.rounds, asked.steps, asked.layers, asked.microbatches)), flush=True)
        return
    if why := missing(delay=True):
        sys.exit(why)
    with torch.no_grad():
        alone = float(loss_of(bert(asked.layers), *batch()))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", "benchmarks.pipeline_links", "--rank", "--rounds", str(asked.rounds)]
    command += ["--steps", str(asked.steps), "--layers", str(asked.layers)]
    if asked.microbatches:
        command += ["--microbatches", str(asked.microbatches)]
    everything = {}
    for link in asked.links.split(","):
        rate, _, delay = link.partition("/")
        with Hosts(2, rate, float(delay or 0)) as hosts:
            printed = run_everywhere(hosts, [1, 1], command, env, timeout_s=3600)
        line = next(line for line in printed[0].splitlines() if line.startswith("FOUND "))
        found = everything[link] = json.loads(line.removeprefix("FOUND "))
        print(
            f"{link}: BERT with {asked.layers} layers, {BATCH} x {TOKENS} tokens a step, 2 hosts of one rank and thread"
        )
        for name in CONTENDERS:
            pairs = zip(found["torch-ddp"]["step_s"], found[name]["step_s"], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs]
            print(
                f"  {name:10} {statistics.median(found[name]['step_s']):8.3f} s a step  "
                f"{statistics.median(ratios):6.2f} x torch-ddp (least {min(ratios):.2f}, most {max(ratios):.2f})  "
                f"{statistics.median(found[name]['bytes']) / 1e6:8.1f} MB sent by host 0  "
                f"first loss {found[name]['loss'] - alone:+.1e}"
            )
        if rate in ASKED:
            print(f"  asked: pipeline at {ASKED[rate]} x torch-ddp")
    if asked.json:
        Path(asked.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()

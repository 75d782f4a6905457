"""Race a pipeline against PyTorch's DDP on two hosts with a slow link: BERT-base, AdamW, 16 x 64 tokens a step in all.

    python -m benchmarks.pipeline_links [--links 1gbit/0.1,100mbit/0.1] [--rounds 3] [--steps 2] [--layers 12]
        [--microbatches M] [--contenders torch-ddp,ddp,pipeline] [--batch 16] [--tokens 64] [--json FILE]

Needs root: the hosts are network namespaces of this machine (tests/hosts/network.py), each with one rank of one thread. All
contenders live in the same processes and take turns: PyTorch's DDP, `ddp`, and `pipeline` with GPipe's order. A step is the
forward, the script's own loss on the whole batch, backward and AdamW; both kinds train on the same 16 sequences. A ratio is
taken within a round; medians over rounds are printed, with the bytes that host 0 puts on its link in a step, and the greatest
difference of the first loss from that of one process. For `pipeline` the seconds that each stage computed in a step,
of `prepare` and of the first step, and how it was divided, are printed too.
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

VOCABULARY = 30522
CONTENDERS = ("torch-ddp", "ddp", "pipeline")
ASKED = {"1gbit": 2.0, "100mbit": 10.0}


def bert(num_layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=num_layers, num_labels=4, **none))


def batch(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    return words, torch.randint(0, 4, (rows,), generator=generator)


def loss_of(model: Callable[..., Any], words: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=words).logits, answers)


def measure(asked: argparse.Namespace, contenders: list[str]) -> dict[str, Any]:
    """Run by each rank; what rank 0 returns counts."""
    world = guozhuang.init("gloo", "cpu", timeout_s=300)
    words, answers = batch(asked.batch, asked.tokens)
    mine = slice(world.rank * asked.batch // world.size, (world.rank + 1) * asked.batch // world.size)
    trained: dict[str, tuple[Any, torch.optim.Optimizer, Any, Any]] = {}
    found: dict[str, Any] = {name: {"step_s": [], "bytes": []} for name in contenders}
    for name in contenders:
        model = bert(asked.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        if name == "torch-ddp":
            trained[name] = TorchDDP(model), optimizer, words[mine], answers[mine]
        else:
            whole = name == "pipeline"
            options: dict[str, Any] = {"microbatches": asked.microbatches} if whole and asked.microbatches else {}
            dist.barrier()
            start = time.perf_counter()
            prepared = guozhuang.prepare(model, optimizer, name, **options)
            found[name]["prepare_s"] = time.perf_counter() - start
            trained[name] = *prepared, words if whole else words[mine], answers if whole else answers[mine]
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    for turn in range(-2, asked.rounds):  # the first two are not counted: there memory is taken from the system
        for name in contenders[:: 1 if turn % 2 else -1]:
            model, optimizer, x, y = trained[name]
            dist.barrier()
            sent, start = int(counter.read_text()), time.perf_counter()
            before = [each.busy_s for each in model.stage_times()] if name == "pipeline" else []
            for _ in range(asked.steps if turn >= 0 else 1):
                loss = loss_of(model, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if turn == -2:
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    found[name]["loss"] = float(total) / world.size
            dist.barrier()
            if turn == -2:
                found[name]["first_s"] = time.perf_counter() - start
            if turn < 0:
                continue
            found[name]["step_s"].append((time.perf_counter() - start) / asked.steps)
            found[name]["bytes"].append((int(counter.read_text()) - sent) / asked.steps)
            if name == "pipeline":
                pairs = zip(model.stage_times(), before, strict=True)
                mine_s = [(each.predicted_s or 0.0, (each.busy_s - was) / asked.steps) for each, was in pairs]
                everyones: list[Any] = [None] * world.size
                dist.all_gather_object(everyones, mine_s)
                found[name]["chosen"] = model.stage_times()[0].microbatches
                found[name].setdefault("stages", []).append([each for one in everyones for each in one])
    guozhuang.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="1gbit/0.1,100mbit/0.1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--microbatches", type=int, help="of the pipeline; chosen by default")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="the first is what others are compared with")
    parser.add_argument("--json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    contenders = asked.contenders.split(",")
    torch.set_num_threads(1)
    if asked.rank:
        print("FOUND " + json.dumps(measure(asked, contenders)), flush=True)
        return
    if why := missing(delay=True):
        sys.exit(why)
    with torch.no_grad():
        alone = float(loss_of(bert(asked.layers), *batch(asked.batch, asked.tokens)))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", "benchmarks.pipeline_links", "--rank", *sys.argv[1:]]
    everything = {}
    for link in asked.links.split(","):
        rate, _, delay = link.partition("/")
        with Hosts(2, rate, float(delay or 0)) as hosts:
            printed = run_everywhere(hosts, [1, 1], command, env, timeout_s=3600)
        line = next(line for line in printed[0].splitlines() if line.startswith("FOUND "))
        found = everything[link] = json.loads(line.removeprefix("FOUND "))
        print(
            f"{link}: BERT with {asked.layers} layers, {asked.batch} x {asked.tokens} tokens a step, "
            "2 hosts of one rank and thread"
        )
        for name in contenders:
            pairs = zip(found[contenders[0]]["step_s"], found[name]["step_s"], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs]
            print(
                f"  {name:10} {statistics.median(found[name]['step_s']):8.3f} s a step  "
                f"{statistics.median(ratios):6.2f} x {contenders[0]} (least {min(ratios):.2f}, most {max(ratios):.2f})  "
                f"{statistics.median(found[name]['bytes']) / 1e6:8.1f} MB sent by host 0  "
                f"first loss {found[name]['loss'] - alone:+.1e}, prepare {found[name].get('prepare_s', 0):.2f} s, "
                f"first step {found[name]['first_s']:.2f} s"
            )
        for number, stage in enumerate(zip(*found.get("pipeline", {}).get("stages", []), strict=True)):
            predicted_s, busy_s = (statistics.median(each) for each in zip(*stage, strict=True))
            print(f"    stage {number} computed {busy_s:.3f} s of a step, {predicted_s:.3f} s predicted")
        if "pipeline" in found:
            print(f"    {found['pipeline']['chosen']}")
        if rate in ASKED:
            print(f"  asked: pipeline at {ASKED[rate]} x torch-ddp")
    if asked.json:
        Path(asked.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()

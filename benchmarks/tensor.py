"""Race tensor parallelism against PyTorch's ``parallelize_module`` (DTensor) and against one process, in one run.

    python benchmarks/tensor.py [--rows mlp,bert-mini,bert-mini-mlm] [--rounds 7] [--ranks 2]
        [--contenders one,shm,gloo,dtensor-shm,dtensor-gloo] [--json FILE]

Ranks with one thread each. ``one`` is rank 0 alone with one thread, on the same batch. All contenders of a row live in the same
processes at the same time and take turns, forward and backward of some batches each, round after round, so that a change of the
machine's speed meets all of them. A round's ratio is taken within the round; the median over rounds is printed, and the worst
relative error of a whole gradient against ``one``. Rows: ``mlp`` is 256-1024-256 on 512 rows; ``bert-mini`` the layers of
BERT-mini on 16 sequences of 64 tokens; ``bert-mini-mlm`` all of it, with a vocabulary of 30,522 and the loss. No dropout.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from guozhuang.parallel.axes import Axes
from guozhuang.parallel.division import division_of, whole
from guozhuang.parallel.tensor import divide_tensors
from guozhuang.world.layout import Layout

ALL = ("one", "shm", "gloo", "dtensor-shm", "dtensor-gloo")
COLUMNS = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
ROWS_OF_BERT = ("attention.output.dense", "output.dense")


def bert_config(**told: Any) -> Any:
    from transformers import BertConfig

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, **none, **told
    )


def mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor], dict[str, str], int]:
    x = torch.randn(512, 256)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return model, lambda model: model(x.detach().requires_grad_()).square().mean(), {"0": "columns", "2": "rows"}, 40


def bert_plan(prefix: str) -> dict[str, str]:
    return {f"{prefix}layer.*.{name}": "columns" for name in COLUMNS} | {
        f"{prefix}layer.*.{name}": "rows" for name in ROWS_OF_BERT
    }


def bert_layers() -> tuple[nn.Module, Callable[[nn.Module], Tensor], dict[str, str], int]:
    from transformers import BertModel

    x = torch.randn(16, 64, 256)
    model = BertModel(bert_config(), add_pooling_layer=False).encoder
    return model, lambda model: model(x).last_hidden_state.square().mean(), bert_plan(""), 4


def bert_mlm() -> tuple[nn.Module, Callable[[nn.Module], Tensor], dict[str, str], int]:
    from transformers import BertForMaskedLM

    ids, model = torch.randint(5, 30000, (16, 64)), BertForMaskedLM(bert_config())
    labels = ids.masked_fill(torch.rand(16, 64) > 0.15, -100)
    return model, lambda model: model(input_ids=ids, labels=labels).loss, bert_plan("bert.encoder."), 2


MAKERS = {"mlp": mlp, "bert-mini": bert_layers, "bert-mini-mlm": bert_mlm}


class Contender:
    """One way to compute the row's gradients, in one rank."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss_of: Callable[[nn.Module], Tensor],
        plan: dict[str, str],
        groups: dict[str, dist.ProcessGroup],
    ) -> None:
        self.name, self.model, self._loss_of = name, model, loss_of
        self._is_idle = name == "one" and dist.get_rank() != 0
        group = groups["gloo" if name.endswith("gloo") else "shm"]
        if name.startswith("dtensor"):
            styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
            mesh = DeviceMesh.from_group(group, "cpu")
            parallelize_module(model, mesh, {entry: styles[word]() for entry, word in plan.items()})
        elif name != "one":
            everyone = tuple(range(group.size()))
            divide_tensors(model, Axes(Layout(tp=group.size()), group, {everyone: group}))

    def turn(self, num_batches: int) -> None:
        if self._is_idle:
            return
        for _ in range(num_batches):
            self.model.zero_grad()
            self._loss_of(self.model).backward()

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self._loss_of(self.model).backward()
        found = {}
        for name, parameter in self.model.named_parameters():
            division, gradient = division_of(parameter), parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                found[name] = gradient.redistribute(placements=[Replicate()]).to_local()
            else:
                found[name] = gradient if division is None else whole(gradient, division)
        return found


def measure(rank: int, n: int, port: int, names: list[str], contending: list[str], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shm", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    world = dist.group.WORLD
    assert world is not None
    groups = {"shm": world, "gloo": dist.new_group(backend="gloo")}
    results = {}
    for label in names:
        torch.manual_seed(0)
        model, loss_of, plan, num_batches = MAKERS[label]()
        contenders = [Contender(name, copy.deepcopy(model), loss_of, plan, groups) for name in contending]
        found = {contender.name: contender.gradients() for contender in contenders}
        # Gradients that are zero but for rounding, such as those of the keys' biases, are held against the largest one.
        least = 1e-4 * max(float(value.norm()) for value in found[contending[0]].values())
        errors = {
            name: max(
                float((own[key] - value).norm() / value.norm().clamp_min(least)) for key, value in found["one"].items()
            )
            for name, own in found.items()
            if "one" in found
        }
        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                dist.barrier()
                start = time.perf_counter()
                contender.turn(num_batches)
                dist.barrier()
                if number:  # the first round warms up
                    times[contender.name].append(1e3 * (time.perf_counter() - start) / num_batches)
        results[label] = {"ms": times, "error": errors}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def report(results: dict[str, Any], n: int) -> None:
    print(f"{n} ranks; ms are medians; x one and x dtensor-shm are medians of the rounds' ratios (min .. max)")
    for label, result in results.items():
        times = result["ms"]
        print(f"\n{label:15}{'ms':>9}   {'x one':26}{'x dtensor-shm':26}{'gradient error':>15}")
        for name in times:
            line = f"{name:15}{statistics.median(times[name]):9.2f}   "
            for under in ("one", "dtensor-shm"):
                ratios = [a / b for a, b in zip(times.get(under, []), times[name], strict=False)]
                text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})" if ratios else ""
                line += f"{text:26}"
            print(line + f"{result['error'].get(name, float('nan')):15.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(MAKERS))
    parser.add_argument("--contenders", default=",".join(ALL))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        arguments = (told.ranks, port, told.rows.split(","), told.contenders.split(","), told.rounds, folder)
        mp.spawn(measure, arguments, nprocs=told.ranks)
        text = Path(folder, "result.json").read_text()
    if told.json:
        told.json.write_text(text)
    report(json.loads(text), told.ranks)


if __name__ == "__main__":
    main()

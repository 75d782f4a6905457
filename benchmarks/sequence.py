"""Race divided sequences, by heads and by a ring, against one process; and find the longest sequence at equal memory.

    python -m benchmarks.sequence [--rows gpt2-mini,bert-mini] [--tokens 2048] [--rounds 7] [--ranks 2]
        [--contenders one,ulysses-shm,ring-shm,ulysses-gloo,ring-gloo] [--no-longest]

Ranks with one thread each; one sequence a step, forward and backward. ``one`` is rank 0 alone with one thread. All contenders
of a row live in the same processes and take turns, round after round; a round's ratio is taken within the round, and the median
is printed with the worst relative error of the whole gradient against ``one``. Memory is the bytes of activations that autograd
keeps for the backward on the fullest rank. The longest sequence is the one for which a rank keeps no more bytes than one
process keeps for ``--tokens``; asked are 0.9 n times as many tokens. GPT-2 and BERT with 4 layers, 256 features, 4 heads;
no dropout. Last, what PyTorch's own ``context_parallel`` does on these ranks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from guozhuang.parallel.axes import Axes, make_axes
from guozhuang.parallel.sequence import divide_sequence
from guozhuang.world.layout import Layout
from tests.ranks import run_ranks

ALL = ("one", "ulysses-shm", "ring-shm", "ulysses-gloo", "ring-gloo")
WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 1000
STEP = 32  # tokens; how exact the longest sequence is


def build(row: str, num_tokens: int) -> nn.Module:
    """Return the model of a row for sequences of that length; equal on all ranks."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
    if row == "gpt2-mini":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": num_tokens, "use_cache": False}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2Model(GPT2Config(**common, **sizes, **none))
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": num_tokens}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**common, **sizes, **none), add_pooling_layer=False)


def forward(model: nn.Module, around: Any, num_tokens: int) -> Tensor:
    """Return the loss of one sequence."""
    ids = torch.randint(0, VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    args, kwargs = ((), {"input_ids": ids}) if around is None else around.inputs((), {"input_ids": ids})
    found = model(*args, **kwargs)
    hidden: Tensor = (found if around is None else around.outputs(found)).last_hidden_state
    return hidden.square().mean()


def saved_bytes(model: nn.Module, around: Any, num_tokens: int) -> int:
    """Return the bytes that autograd keeps for the backward besides the parameters."""
    held: dict[int, Tensor] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, around, num_tokens)
    return sum(each.untyped_storage().nbytes() for at, each in held.items() if at not in parameters)


def divided(model: nn.Module, contender: str, axes: dict[str, Axes]) -> tuple[nn.Module, Any]:
    """Return a copy of the model as a contender trains it, and what is done around it."""
    model = copy.deepcopy(model)
    if contender == "one":
        return model, None
    way, backend = contender.split("-")
    return model, divide_sequence(model, axes[backend], way)


def gradient(model: nn.Module, num_ranks: int) -> Tensor:
    """Return all gradients as one vector, averaged over ranks."""
    found = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in model.parameters()])
    if num_ranks > 1:
        dist.all_reduce(found)
    return found / num_ranks


def measure(rank: int, size: int, rows: list[str], contenders: list[str], options: argparse.Namespace) -> list[str]:
    torch.set_num_threads(1)
    everyone = dist.new_group(backend="shm")
    axes = {
        "shm": make_axes(Layout(sequence=size), everyone),
        "gloo": make_axes(Layout(sequence=size)),
    }
    lines = []
    for row in rows:
        model = build(row, options.tokens)
        made = {name: divided(model, name, axes) for name in contenders}
        lines += race(rank, size, row, made, options)
        if options.longest:
            lines += longest(
                rank, size, row, [name for name in contenders if name.endswith("-shm")], axes, options.tokens
            )
    return [*lines, context_parallel()]


def race(rank: int, size: int, row: str, made: dict[str, Any], options: argparse.Namespace) -> list[str]:
    times: dict[str, list[float]] = {name: [] for name in made}
    gradients: dict[str, Tensor] = {}
    for turn in range(options.rounds + 1):  # the first one warms up
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            model, around = made[name]
            dist.barrier()
            start = time.perf_counter()
            if around is not None or rank == 0:
                model.zero_grad()
                forward(model, around, options.tokens).backward()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[name].append(took.item())
            if not turn and (around is not None or rank == 0):
                gradients[name] = gradient(model, 1 if around is None else size)
    lines = [f"{row}, {options.tokens} tokens, {size} ranks"]
    for name in made:
        own = times[name][1:]
        line = f"  {name:14}{statistics.median(own) * 1e3:9.1f} ms"
        if name != "one" and "one" in made:
            ratios = [a / b for a, b in zip(times["one"][1:], own, strict=True)]
            line += f"   {statistics.median(ratios):5.2f} x one ({min(ratios):.2f} .. {max(ratios):.2f})"
            if rank == 0:
                error = (gradients[name] - gradients["one"]).norm() / gradients["one"].norm()
                line += f"   gradient error {error.item():.1e}"
        lines.append(line)
    return lines


def longest(rank: int, size: int, row: str, names: list[str], axes: dict[str, Axes], num_tokens: int) -> list[str]:
    most = torch.tensor(saved_bytes(build(row, num_tokens), None, num_tokens))
    lines = []
    for name in names:
        low, high = num_tokens // STEP, size * num_tokens * 11 // 10 // STEP
        whole = build(row, high * STEP)
        model, around = divided(whole, name, axes)
        while low < high:  # the longest that fits is from low to high
            middle = (low + high + 1) // 2
            used = torch.tensor(saved_bytes(model, around, middle * STEP))
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            low, high = (middle, high) if used <= most else (low, middle - 1)
        share = low * STEP / (size * num_tokens)
        lines.append(
            f"  {name:14}{low * STEP} tokens in the {most.item() / 1e6:.1f} MB of one process: {share:.3f} n (asked 0.9)"
        )
    return lines


def context_parallel() -> str:
    """Try PyTorch's own ring attention."""
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query, key, value = (torch.randn(1, HEADS, 64, 32) for _ in range(3))
    try:
        with torch_context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
    except Exception as error:  # whatever it says is the result
        return f"torch context_parallel: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "torch context_parallel: ran"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    split: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--rows", type=split, default=["gpt2-mini", "bert-mini"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contenders", type=split, default=list(ALL))
    parser.add_argument("--no-longest", dest="longest", action="store_false")
    options = parser.parse_args()
    found = run_ranks(
        measure, options.ranks, options.rows, options.contenders, options, timeout_s=3600, group_timeout_s=600
    )
    print("\n".join(found[0]))


if __name__ == "__main__":
    main()

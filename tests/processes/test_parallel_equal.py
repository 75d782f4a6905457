"""A divided model trains as one process does: every model of the table under every layout that can divide it.

The twin is plain PyTorch in one process: losses, gradients, clipped norms, running statistics, the saved state of model and
optimizer, and the generator's state agree to 1e-6, and two runs without
stages agree bit by bit. Batches have another number of rows each
time, which microbatches do not divide; the loss is a mean over labels that are not left out, and couples all samples.
In float64, for the reason that ``test_equivalence.py`` gives.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.division import division_of, whole
from guozhuang.parallel.random import Draws
from guozhuang.world.layout import Layout
from tests.processes.cases import results_of_cases
from tests.processes.parallel_models import KINDS, Kind

# Rows of each step, on all copies of the model together; the last batch is ragged.
ROWS = (8, 8, 6)
NUM_MICROBATCHES = 3
CLIP = 0.5

TOKEN_MODELS, IMAGE_MODELS = ("bert", "gpt2", "t5"), ("resnet", "unet")
LAYOUTS = {
    2: {
        "pp=2": TOKEN_MODELS + IMAGE_MODELS,
        "tp=2": (*TOKEN_MODELS, "bart", *IMAGE_MODELS),
        "space=2": IMAGE_MODELS,
        "sequence=2": TOKEN_MODELS,
    },
    4: {
        "pp=2,tp=2": TOKEN_MODELS + IMAGE_MODELS,
        "pp=2,dp=2": ("gpt2", "unet"),
        "dp=2,tp=2": ("bert", "unet"),
        "dp=2,space=2": ("unet",),
        "dp=2,sequence=2": ("gpt2",),
        "space=2,tp=2": IMAGE_MODELS,
        "sequence=2,tp=2": ("bert", "t5"),
        "pp=2,space=2": ("unet",),
        "pp=2,sequence=2": ("bert",),
        "pp=4": ("bert",),
    },
}
# Combinations that a documented limit refuses, each with the text of the error.
REFUSED: dict[tuple[str, str], str] = {
    **{(model, "pp=2,sequence=2"): "sequences cannot be divided in a pipeline yet" for model in TOKEN_MODELS},
    **{(model, "pp=2,space=2"): "space and pp cannot divide one model together" for model in IMAGE_MODELS},
}
DROPOUT, NO_DROPOUT = "0.1", "0.0"


def cases(num_ranks: int, *rates: str) -> list[str]:
    return [f"{model} {layout} {r}" for layout, models in LAYOUTS[num_ranks].items() for model in models for r in rates]


# For each number of ranks and each backend: what is not slow, and what is.
TABLE: dict[tuple[int, str], tuple[Sequence[str], Sequence[str]]] = {
    (2, "shm"): (("bert pp=2 0.1", "unet space=2 0.1"), cases(2, DROPOUT, NO_DROPOUT)),
    (2, "gloo"): (
        (),
        ("bert pp=2 0.1", "bart tp=2 0.1", "t5 pp=2 0.1", "gpt2 tp=2 0.1", "resnet space=2 0.1", "bert sequence=2 0.1"),
    ),
    (4, "shm"): ((), cases(4, DROPOUT)),
    (4, "gloo"): ((), ("t5 pp=2,tp=2 0.1", "unet space=2,tp=2 0.1")),
}


def made(kind: Kind, rate: float) -> nn.Module:
    torch.manual_seed(3)
    model = kind.make(rate).double()
    for module in model.modules():
        if isinstance(
            module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm
        ):  # otherwise gradients of zeros are rounding alone
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model.train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)


def batches(kind: Kind, copies: int) -> Iterator[list[tuple[dict[str, Tensor], Tensor]]]:
    """Of each step: the batch of each copy of the model."""
    generator = torch.Generator().manual_seed(11)
    for rows in ROWS:
        yield [kind.batch(rows, generator) for _ in range(copies)]


def trained_alone(kind: Kind, rate: float, copies: int, microbatched: bool) -> dict[str, Any]:
    """What one process gets. Copies draw for themselves, and gradients are averaged over them."""
    model = made(kind, rate)
    optimizer = optimizer_of(model)
    torch.manual_seed(5)
    states = [torch.get_rng_state()] * copies
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for step in batches(kind, copies):
        optimizer.zero_grad()
        losses = []
        for i, (batch, targets) in enumerate(step):
            torch.set_rng_state(states[i])
            has_norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
            outputs = in_microbatches(model, batch) if microbatched and has_norms else model(**batch)
            loss = kind.loss(outputs, targets)
            states[i] = torch.get_rng_state()
            (loss / copies).backward()
            losses.append(loss.item())
        found["losses"].append(losses)
        found["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return found | states_of(model, optimizer) | {"generators": states}


def in_microbatches(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a model returns whose BatchNorm normalizes each microbatch by itself, and learns statistics of the whole batch."""
    (images,) = batch.values()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0].detach())) for norm in norms]
    before = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}
    draws, start, outputs = Draws(model), 0, []
    for part in torch.tensor_split(images, NUM_MICROBATCHES):
        with draws.microbatch(slice(start, start + len(part)), len(images)):
            outputs.append(model(part))
        start += len(part)
    for hook in hooks:
        hook.remove()
    for norm in norms:
        for name, buffer in before[norm].items():  # in the place of those that the graph holds
            setattr(norm, name, buffer)
        rows = torch.cat(seen[norm])
        nn.functional.batch_norm(rows, norm.running_mean, norm.running_var, None, None, True, norm.momentum)
        norm.num_batches_tracked += 1
    return torch.cat(outputs)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict()["state"])}


def trained_divided(kind: Kind, rate: float, layout: str) -> dict[str, Any]:
    """What this rank gets of the divided model."""
    model = made(kind, rate)
    parameters = dict(model.named_parameters())
    prepared, optimizer = gz.prepare(
        model,
        optimizer_of(model),
        strategy="hybrid",
        layout=layout,
        microbatches=NUM_MICROBATCHES if "pp" in layout else None,
    )
    world = gz.init()
    torch.manual_seed(5)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    peers = make_axes(world.layout).group("pp", "space", "sequence", "tp")
    if peers is not None and peers.rank():
        torch.manual_seed(6)  # a script may seed by rank, or draw on one rank only
    for step in batches(kind, world.data_size):
        batch, targets = step[world.data_rank]
        optimizer.zero_grad()
        loss = kind.loss(prepared(**batch), targets)
        loss.backward()
        found["losses"].append(loss.item())
        gradients = {}
        for name, parameter in parameters.items():
            division, gradient = division_of(parameter), parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            gradients[name] = (gradient if division is None else whole(gradient, division)).clone()
        found["gradients"].append(gradients)
        found["norms"].append(float(gz.clip_grad_norm_(prepared.parameters(), CLIP)))
        optimizer.step()
    return found | states_of(prepared, optimizer) | {"generators": torch.get_rng_state()}


def check_close(found: Any, wanted: Any, what: str) -> None:
    """Tensors agree to 1e-6 of the largest of their elements."""
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor) and found.shape == wanted.shape, (
            what,
            type(found),
            getattr(found, "shape", None),
        )
        largest = float(wanted.double().abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(
            found, wanted, rtol=1e-6, atol=1e-6 * max(largest, 1e-3), msg=lambda m: f"{what}: {m}"
        )
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (what, sorted(map(str, found.keys() ^ wanted.keys())))
        for key in wanted:
            check_close(found[key], wanted[key], f"{what} {key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), what
        for i, each in enumerate(wanted):
            check_close(found[i], each, f"{what} {i}")
    else:
        assert found == pytest.approx(wanted, rel=1e-6), (what, found, wanted)


def check_case(name: str) -> None:
    model, layout, rate = name.split()
    kind, copies = KINDS[model], Layout.parse(layout, "hybrid", dist.get_world_size()).dp
    if (model, layout) in REFUSED:
        with pytest.raises(gz.errors.UsageError, match=REFUSED[model, layout]):
            trained_divided(kind, float(rate), layout)
        return
    wanted = trained_alone(kind, float(rate), copies, "pp" in layout)
    found = trained_divided(kind, float(rate), layout)
    index = gz.init().data_rank
    for step in range(len(ROWS)):
        check_close(found["losses"][step], wanted["losses"][step][index], f"step {step} loss")
        gradients = wanted["gradients"][step]
        check_close({n: found["gradients"][step][n] for n in gradients}, gradients, f"step {step} gradient of")
        check_close(found["norms"][step], wanted["norms"][step], f"step {step} norm")
    check_close(found["model"], wanted["model"], "state")
    check_close(found["optimizer"], wanted["optimizer"], "optimizer's state")
    assert torch.equal(found["generators"], wanted["generators"][index]), "the generator is elsewhere"
    if (
        dist.get_world_size() > 2 or "pp" in layout
    ):  # where stages begin follows measured times, and norms then round otherwise
        return
    again = trained_divided(kind, float(rate), layout)
    assert again["losses"] == found["losses"] and again["norms"] == found["norms"], "two runs differ"
    for key, value in found["model"].items():
        assert torch.equal(again["model"][key], value), f"{key} differs between two runs"


def run_table(rank: int, world_size: int, module: str, names: Sequence[str], backend: str) -> dict[str, str]:
    """Run cases one after the other on this rank; return the tracebacks of those that failed."""
    torch.set_num_threads(1)
    gz.init(backend, timeout_s=20)
    failures: dict[str, str] = {}
    for name in names:
        started_s = time.monotonic()
        try:
            check_case(name)
        except Exception:
            failures[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - started_s:.2f} s", flush=True)
        failed: list[Any] = [None] * world_size
        try:
            dist.all_gather_object(failed, name in failures)
        except Exception as error:  # ranks went apart in this case; none of those that follow can run
            failures.setdefault(name, f"the other ranks did not come to the end of the case: {error}")
            rest = names[list(names).index(name) + 1 :]
            return failures | dict.fromkeys(rest, f"not run, after {name} failed")
    gz.shutdown()
    return failures


def shm(rank: int, world_size: int, module: str, names: Sequence[str]) -> dict[str, str]:
    return run_table(rank, world_size, module, names, "shm")


def gloo(rank: int, world_size: int, module: str, names: Sequence[str]) -> dict[str, str]:
    return run_table(rank, world_size, module, names, "gloo")


def rows_of_table() -> Iterator[Any]:
    for (num_ranks, backend), (quick, slow) in TABLE.items():
        for names, marks in ((quick, []), ([name for name in slow if name not in quick], [pytest.mark.slow])):
            check = results_of_cases(__name__, num_ranks, names, {"shm": shm, "gloo": gloo}[backend], 400, init=False)
            for name in names:
                yield pytest.param(check, name, marks=marks, id=f"{name} {backend} {num_ranks} ranks")


@pytest.mark.parametrize(("check", "name"), list(rows_of_table()))
def test_one_process_is_equalled(check: Any, name: str) -> None:
    check(name)

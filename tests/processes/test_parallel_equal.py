"""A divided model trains as one process does: every model of the table under every layout that can divide it.

The twin is plain PyTorch in one process: losses, gradients, clipped norms, running statistics, the saved state of model and
optimizer, and the generator's state agree to 1e-6, and two runs whose stages begin at the same modules agree bit by bit.
Batches have another number of rows each time, which microbatches do not divide; the loss is a mean over labels that are not
left out, and couples all samples where the whole batch is at hand. In float64, for the reason that ``test_equivalence.py``
gives.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import guozhuang as gz
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.division import division_of, whole
from guozhuang.parallel.prepare import SCHEDULES
from guozhuang.parallel.random import Draws
from guozhuang.world.layout import Layout
from tests.processes.cases import results_of_cases
from tests.processes.parallel_models import KINDS, Kind
from tests.ranks import GROUP_TIMEOUT_S
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.timeout(10 * LIMIT_S)  # the first row of a number of ranks runs all of them

# Rows of each step, on all copies of the model together; the last batch is ragged.
ROWS = (8, 8, 6)
NUM_MICROBATCHES = 3
CLIP = 0.5

TOKEN_MODELS, IMAGE_MODELS = ("bert", "gpt2", "t5"), ("resnet", "unet")
LAYOUTS = {
    2: {
        "pp=2": (*TOKEN_MODELS, "bart", *IMAGE_MODELS),
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
        "pp=2,space=2": IMAGE_MODELS,
        "pp=2,sequence=2": TOKEN_MODELS,
        "pp=4": ("bert",),
    },
}
DROPOUT, NO_DROPOUT = "0.1", "0.0"


def cases(num_ranks: int, *rates: str) -> list[str]:
    return [f"{model} {layout} {r}" for layout, models in LAYOUTS[num_ranks].items() for model in models for r in rates]


# Cases besides those of LAYOUTS. What may follow the rate: see ``Case``.
SPECIAL = {
    2: (
        "bert pp=2 0.1 1f1b",
        "gpt2 pp=2 0.1 interleaved",
        "t5 pp=2 0.1 zero-bubble",
        "bart pp=2 0.1 1f1b",
        "resnet pp=2 0.1 zero-bubble",
        "unet pp=2 0.1 1f1b",
        "bert pp=2 0.1 steps=20",
        "gpt2 tp=2 0.1 steps=20",
        "t5 sequence=2 0.1 steps=20",
        "resnet space=2 0.1 steps=20",
        "unet pp=2 0.1 steps=20 zero-bubble",
        "bert sequence=2 0.1 then:pp=2",
        "gpt2 pp=2 0.1 then:tp=2",
        "t5 tp=2 0.1 then:pp=2 zero-bubble",
        "resnet tp=2 0.1 then:pp=2",
        "unet pp=2 0.1 then:space=2",
        "bert tp=2 0.1 parts=2",
        "gpt2 pp=2 0.1 parts=2",
        "t5 sequence=2 0.1 parts=2",
        "resnet space=2 0.1 parts=2",
        "unet pp=2 0.1 parts=2",
        "bert pp=2 0.1 bf16",
        "gpt2 tp=2 0.1 bf16",
        "t5 sequence=2 0.1 bf16",
        "resnet space=2 0.1 bf16",
        "unet pp=2 0.1 bf16 1f1b",
    ),
    4: (
        "bert pp=4 0.1 1f1b",
        "gpt2 pp=4 0.1 zero-bubble",
        "t5 pp=2,tp=2 0.1 1f1b",
        "unet pp=2,dp=2 0.1 zero-bubble",
        "bert dp=2,tp=2 0.1 sharded",
        "gpt2 dp=2,sequence=2 0.1 sharded parts=2",
        "unet dp=2,space=2 0.1 sharded",
        "bert pp=2,dp=2 0.1 sharded 1f1b",
        "t5 pp=2,dp=2 0.1 sharded then:dp=2,tp=2",
        "bert pp=2,sequence=2 0.1 1f1b",
        "resnet pp=2,space=2 0.1 zero-bubble",
        "unet pp=2,space=2 0.1 bf16",
        "gpt2 pp=2,sequence=2 0.1 bf16 then:pp=2,tp=2",
        "bert pp=2,tp=2 0.1 steps=20",
        "unet dp=2,tp=2 0.1 steps=20",
        "bert pp=2,tp=2 0.1 then:dp=2,sequence=2",
        "gpt2 dp=2,tp=2 0.1 sharded then:pp=4",
        "resnet space=2,tp=2 0.1 then:pp=2,tp=2",
        "t5 pp=2,dp=2 0.1 parts=2",
        "gpt2 pp=2,tp=2 0.1 bf16",
    ),
    8: (
        "bert pp=2,dp=2,tp=2 0.1",
        "unet pp=2,dp=2,tp=2 0.1",
        "gpt2 pp=4,tp=2 0.1 1f1b",
        "t5 pp=2,dp=2,tp=2 0.1 then:dp=4,tp=2",
    ),
}

# For each number of ranks and each backend: what is not slow, and what is.
TABLE: dict[tuple[int, str], tuple[Sequence[str], Sequence[str]]] = {
    (2, "shm"): (("bert pp=2 0.1", "unet space=2 0.1"), (*cases(2, DROPOUT, NO_DROPOUT), *SPECIAL[2])),
    (2, "gloo"): (
        (),
        ("bert pp=2 0.1", "bart tp=2 0.1", "t5 pp=2 0.1", "gpt2 tp=2 0.1", "resnet space=2 0.1", "bert sequence=2 0.1"),
    ),
    (4, "shm"): ((), (*cases(4, DROPOUT), *SPECIAL[4])),
    (4, "gloo"): ((), ("t5 pp=2,tp=2 0.1", "unet space=2,tp=2 0.1", "gpt2 pp=4 0.1 zero-bubble")),
    (8, "shm"): ((), SPECIAL[8]),
}


@dataclass(frozen=True)
class Case:
    """A row of the table, as its name says it: model, layout, probability of dropout, and words for what is special.

    Attributes:
        strategy: what averages gradients over copies, ``sharded`` in place of ddp.
        schedule: of a pipeline; without one the script computes the loss of the whole batch itself.
        num_steps: of the optimizer.
        num_parts: of each step: so many backwards are added up before it.
        autocast: mixed precision, of a model in float32.
        then: another layout, with which the training goes on from what was saved after half of the steps.
    """

    model: str
    layout: str
    rate: float
    strategy: str = "hybrid"
    schedule: str | None = None
    num_steps: int = len(ROWS)
    num_parts: int = 1
    autocast: bool = False
    then: str | None = None

    @classmethod
    def of(cls, name: str) -> Case:
        model, layout, rate, *words = name.split()
        told: dict[str, Any] = {}
        for word in words:
            what, _, value = word.partition(":" if word.startswith("then:") else "=")
            match what:
                case "steps" | "parts":
                    told[f"num_{what}"] = int(value)
                case "then":
                    told[what] = value
                case "bf16":
                    told["autocast"] = True
                case "sharded":
                    told["strategy"] = word
                case _:
                    assert word in SCHEDULES, word
                    told["schedule"] = word
        return cls(model, layout, float(rate), **told)

    @property
    def kind(self) -> Kind:
        return KINDS[self.model]

    def layouts(self) -> Iterator[tuple[str, range]]:
        """Yield each layout, and the steps that are made with it."""
        half = self.num_steps // 2
        if self.then is not None:
            yield self.layout, range(half)
            yield self.then, range(half, self.num_steps)
        else:
            yield self.layout, range(self.num_steps)

    def alone(self, num_ranks: int) -> tuple[Any, ...]:
        """Return the arguments of ``trained_alone``: what of this row one process sees."""
        layouts = tuple((Layout.parse(text, "hybrid", num_ranks), steps) for text, steps in self.layouts())
        is_normed = any(isinstance(module, nn.BatchNorm2d) for module in made(self.kind, 0.0, False).modules())
        phases = tuple((layout.dp, layout.pp > 1 and is_normed, steps) for layout, steps in layouts)
        return self.model, self.rate, phases, self.num_parts, self.autocast, self.schedule is not None


def made(kind: Kind, rate: float, autocast: bool, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = kind.make(rate)
    model = model.float() if autocast else model.double()
    for module in model.modules():
        # Otherwise gradients of zeros are rounding alone.
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model.train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)


def batch_of(kind: Kind, step: int, part: int, index: int, model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of the copy ``index`` of the model."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + index)
    batch, targets = kind.batch(ROWS[step % len(ROWS)], generator)
    dtype = next(model.parameters()).dtype
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()}, targets


def precision(autocast: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=autocast)


@functools.lru_cache(maxsize=8)
def trained_alone(
    name: str,
    rate: float,
    phases: tuple[tuple[int, bool, range], ...],
    num_parts: int,
    autocast: bool,
    separable: bool,
) -> dict[str, Any]:
    """What one process gets, in as many phases as there are layouts: the number of copies, microbatches or not, and steps.

    Copies draw for themselves, and gradients are averaged over them.
    """
    kind = KINDS[name]
    model = made(kind, rate, autocast)
    optimizer = optimizer_of(model)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    states: list[Tensor] = []
    for copies, microbatched, steps in phases:
        torch.manual_seed(5)
        states = [torch.get_rng_state()] * copies
        for step in steps:
            optimizer.zero_grad()
            losses = []
            for part in range(num_parts):
                for i in range(copies):
                    batch, targets = batch_of(kind, step, part, i, model)
                    torch.set_rng_state(states[i])
                    with precision(autocast):
                        outputs = in_microbatches(model, batch) if microbatched else model(**batch)
                        loss = (kind.separable_loss if separable else kind.loss)(outputs, targets)
                    states[i] = torch.get_rng_state()
                    (loss / copies / num_parts).backward()
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


def trained_divided(case: Case, cut: list[str] | None) -> dict[str, Any]:
    """What this rank gets of the divided model."""
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": [], "shares": []}
    saved: dict[str, Any] = {}
    kind = case.kind
    for layout, steps in case.layouts():
        model = made(kind, case.rate, case.autocast, seed=4 if saved else 3)
        parameters = dict(model.named_parameters())
        has_stages = "pp" in layout
        prepared, optimizer = gz.prepare(
            model,
            optimizer_of(model),
            strategy=case.strategy if "dp" in layout else "hybrid",
            layout=layout,
            microbatches=NUM_MICROBATCHES if has_stages else None,
            schedule=case.schedule if has_stages else None,
            loss=kind.separable_loss if case.schedule else None,
            cut=cut if has_stages else None,
            # BatchNorm of microbatches is not that of one process; what is compared with here knows of them.
            proof=not (has_stages and any(isinstance(each, nn.BatchNorm2d) for each in model.modules())),
        )
        if saved:
            assert not prepared.load_state_dict(saved["model"]).missing_keys
            optimizer.load_state_dict(saved["optimizer"])
            prepared.eval()
            with torch.no_grad():  # stages are chosen in the first forward
                prepared(**batch_of(kind, 0, 0, 0, model)[0])
            prepared.train()
            check_same({"model": prepared.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        world = gz.init()
        torch.manual_seed(5)
        peers = make_axes(world.layout).group("pp", "space", "sequence", "tp")
        if peers is not None and peers.rank():
            torch.manual_seed(6)  # a script may seed by rank, or draw on one rank only
        for step in steps:
            optimizer.zero_grad()
            losses = []
            for part in gz.accumulate(prepared, steps=case.num_parts):
                batch, targets = batch_of(kind, step, part, world.data_rank, model)
                with precision(case.autocast):
                    if case.schedule is not None:
                        loss = prepared.step(targets, **batch)
                    else:
                        loss = kind.loss(prepared(**batch), targets)
                if case.schedule is None:
                    (loss / case.num_parts).backward()
                losses.append(loss.item())
            found["losses"].append(losses)
            found["shares"].append((world.data_rank, world.data_size))
            if case.strategy == "hybrid":
                found["gradients"].append(gradients_of(parameters))
            found["norms"].append(float(gz.clip_grad_norm_(prepared.parameters(), CLIP)))
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": prepared.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
    return found | states_of(prepared, optimizer) | {"generators": torch.get_rng_state()}


def gradients_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The whole gradients, on every rank."""
    found = {}
    for name, parameter in parameters.items():
        division, gradient = division_of(parameter), parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        found[name] = (gradient if division is None else whole(gradient, division)).clone()
    return found


def states_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict()["state"])}


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


def check_same(found: dict[str, Any], saved: dict[str, Any]) -> None:
    """What was loaded is there to the bit."""
    (leaves, spec), (wanted, wanted_spec) = (pytree.tree_flatten(each) for each in (found, saved))
    assert spec == wanted_spec
    for one, other in zip(leaves, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def check_rounded(found: dict[str, Any], rounded: dict[str, Any], exact: dict[str, Any]) -> None:
    """In mixed precision each gradient is as far from that of float32 as one process's is, and so are losses and norms.

    One process's distance is the largest of its steps: in one step it can be small by chance.
    """

    def distance(of: dict[str, Any], step: int, name: str) -> float:
        return float((of["gradients"][step][name] - exact["gradients"][step][name]).norm())

    steps = range(len(exact["gradients"]))
    own = {name: max(distance(rounded, step, name) for step in steps) for name in exact["gradients"][0]}
    for step in steps:
        for name, right in exact["gradients"][step].items():
            error, norm = distance(found, step, name), float(right.norm())
            assert error <= 3 * own[name] + 0.02 * norm + 1e-6, (step, name, error, own[name], norm)
        norms = [each["norms"][step] for each in (found, rounded)]
        assert norms[0] == pytest.approx(norms[1], rel=0.03), (step, norms)
        index, copies = found["shares"][step]
        losses = found["losses"][step], rounded["losses"][step][index::copies]
        assert losses[0] == pytest.approx(losses[1], rel=0.01), (step, losses)


def check_case(name: str) -> None:
    case = Case.of(name)
    arguments = case.alone(dist.get_world_size())
    wanted = trained_alone(*arguments)
    # Where stages begin follows measured times otherwise, and norms then round differently.
    cut = [case.kind.middle] if case.num_steps > len(ROWS) and "pp=2" in case.layout else None
    found = trained_divided(case, cut)
    if case.autocast:
        exact = trained_alone(*arguments[:4], False, arguments[5])
        check_rounded(found, wanted, exact)
        return
    for step, (index, copies) in enumerate(found["shares"]):
        check_close(found["losses"][step], wanted["losses"][step][index::copies], f"step {step} loss")
        if found["gradients"]:
            gradients = wanted["gradients"][step]
            check_close({n: found["gradients"][step][n] for n in gradients}, gradients, f"step {step} gradient of")
        check_close(found["norms"][step], wanted["norms"][step], f"step {step} norm")
    check_close(found["model"], wanted["model"], "state")
    check_close(found["optimizer"], wanted["optimizer"], "optimizer's state")
    assert torch.equal(found["generators"], wanted["generators"][index]), "the generator is elsewhere"
    if dist.get_world_size() > 2 or (cut is None and "pp" in f"{case.layout} {case.then}"):
        return
    again = trained_divided(case, cut)
    assert again["losses"] == found["losses"] and again["norms"] == found["norms"], "two runs differ"
    for key, value in found["model"].items():
        assert torch.equal(again["model"][key], value), f"{key} differs between two runs"


def run_table(rank: int, world_size: int, module: str, names: Sequence[str], backend: str) -> dict[str, str]:
    """Run cases one after the other on this rank; return the tracebacks of those that failed."""
    torch.set_num_threads(1)
    gz.init(backend, timeout_s=GROUP_TIMEOUT_S)
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
            check = results_of_cases(
                __name__, num_ranks, names, {"shm": shm, "gloo": gloo}[backend], 9 * LIMIT_S, init=False
            )
            for name in names:
                yield pytest.param(check, name, marks=marks, id=f"{name} {backend} {num_ranks} ranks")


@pytest.mark.parametrize(("check", "name"), list(rows_of_table()))
def test_one_process_is_equalled(check: Any, name: str) -> None:
    check(name)

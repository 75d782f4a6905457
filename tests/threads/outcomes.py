"""Programs of the grammar on ranks that are threads; and what came of each: equal to one process, refused, or wrong."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

import guozhuang as gz
from guozhuang.errors import UnusedParameterError
from guozhuang.registry import registry
from guozhuang.strategies import get
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.ways import Setup
from guozhuang.world import World
from tests.threads.generated import Alone, Found, Script, made
from tests.threads.grammar import DATA, FULLY, KNOWN, LAYOUTS, Program
from tests.threads.ranks import run_threads

RTOL, ATOL = 1e-7, 1e-9
#: The note at an error of the model's own forward that one process does not have.
FIRST_FORWARD = "This was the first forward of its kind under layout"


class Rank(Alone):
    """A rank that is a thread, as ``gz.prepare`` would prepare it."""

    def __init__(self, program: Program, rank: int, size: int) -> None:
        super().__init__(program)
        layout = program.layout
        self.place, self.copies = layout.coordinate(rank)["dp"], layout.dp
        self.world = World(rank, size, rank, size, 0, 1, torch.device("cpu"), "threads", layout)

    def prepare(self, model: Any, optimizers: list[Any]) -> tuple[Any, list[Any]]:
        program = self.program
        options = ddp_options(program)
        if program.strategy in DATA:
            model = gz.SyncBatchNorm.convert_sync_batchnorm(model)
        if program.strategy == "the class":
            return gz.DistributedDataParallel(model, **options), optimizers
        given: Any = tuple(optimizers) if len(optimizers) > 1 else optimizers[0]
        chosen = get(LAYOUTS[program.strategy][0] if program.strategy in LAYOUTS else program.strategy)
        setup = Setup(self.world, wishes=wishes(program), ddp_options=options)
        if program.strategy in LAYOUTS:
            prepared, stepped = prepare_divided(model, given, setup, chosen)
        elif program.strategy == "ddp":
            prepared, stepped = chosen.prepare(model, optimizers[0], setup)[0], given
        else:
            prepared, stepped = chosen.prepare(model, given, setup)
        made = list(stepped) if isinstance(stepped, tuple) else [stepped]
        for each in made:
            registry.add_trained(model, prepared, each, chosen.name)
        return prepared, made

    def whole(self, tensor: Any) -> Tensor:
        """Whole weights of a divided model are what its states hold; DTensor's collectives know processes alone."""
        if not hasattr(tensor, "to_local"):
            with torch._C.DisableTorchFunctionSubclass():  # guarded ones, which are whole here
                return tensor.detach().clone().as_subclass(Tensor)  # type: ignore[no-any-return]
        local = tensor.to_local().detach()
        padded = torch.zeros(-(-tensor.shape[0] // dist.get_world_size()), *tensor.shape[1:], dtype=tensor.dtype)
        padded[: len(local)] = local
        parts = [torch.zeros_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: tensor.shape[0]]

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        if self.program.strategy in LAYOUTS:
            return {}
        return {
            name.removeprefix("module."): (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
            for name, p in model.named_parameters()
        }


def ddp_options(program: Program) -> dict[str, Any]:
    has_unused = "branches in turns" in program.parts or program.habits["loss"] == "with a slope"
    is_wrapped = program.strategy in ("ddp", "the class", "sparse-rows") or program.layout.dp > 1
    return {"find_unused_parameters": True} if is_wrapped and (has_unused or program.number % 3 == 0) else {}


def wishes(program: Program) -> dict[str, Any]:
    if program.strategy not in LAYOUTS or program.layout.pp == 1:
        return {}
    return {"num_microbatches": 2, "cut": [program.cut]}


# ---- what came of it

EQUAL, REFUSED, WARNED, KNOWN_FAULT, WRONG = "equal", "refused", "warned of", "a known fault", "WRONG"


@dataclass(frozen=True)
class Outcome:
    """What came of a program: one of the words above, and why."""

    kind: str
    why: str = ""


def run_script(program: Program, models: list[nn.Module], bench: Alone, found: Found) -> None:
    try:
        script = Script(program, models, bench, found)
        script.run()
        found.has_ended = True
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
        found.is_refusal = is_ours(error)
        if not found.is_refusal:
            found.error = traceback.format_exc()
        raise


def is_ours(error: Exception) -> bool:
    """Tell whether an error is one of this package that says what to do."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, UnusedParameterError) or any(note.startswith(FIRST_FORWARD) for note in notes):
        return True
    return isinstance(error, ValueError) and "/guozhuang/" in traceback.extract_tb(error.__traceback__)[-1].filename


def outcome_of(program: Program) -> Outcome:
    """Run a program by one process and by ranks that are threads."""
    with warnings_of() as said:
        fresh, size = made(program), program.layout.size
        alone, founds = Found(), [Found() for _ in range(size)]
        with contextlib.suppress(Exception):
            run_script(program, [copy.deepcopy(fresh) for _ in range(2)], Alone(program), alone)
        models = [[copy.deepcopy(fresh) for _ in range(2)] for _ in range(size)]

        def of_rank(rank: int, size: int) -> None:
            run_script(program, models[rank], Rank(program, rank, size), founds[rank])

        with contextlib.suppress(AssertionError):
            run_threads(of_rank, size)
        for trained in registry.trained:
            registry.forget(trained.model)
        return judged(program, alone, founds, said)


@contextlib.contextmanager
def warnings_of() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("guozhuang")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


# ---- comparing


def judged(program: Program, alone: Found, founds: list[Found], said: list[str]) -> Outcome:
    if alone.error:
        return Outcome(WRONG, f"one process fails too, so this is no program: {alone.error}")
    errors = {rank: found.error for rank, found in enumerate(founds) if found.error}
    refusals = [found.error for found in founds if found.is_refusal]
    differ = [
        f"rank {rank}: {text}" for rank, found in enumerate(founds) for text in so_far(program, alone, found, rank)
    ]
    if not errors:
        differ += mean_losses(program, alone, founds)
        differ += [
            f"rank {r}: {text}" for r, found in enumerate(founds) for text in differences(found.alike, alone.alike)
        ]
        if differ and program.strategy == "the class" and any(text.endswith("(said once)") for text in said):
            return Outcome(WARNED, words(next(text for text in said if text.endswith("(said once)"))))
        return Outcome(WRONG, "\n".join(differ)) if differ else Outcome(EQUAL)
    if differ:
        return Outcome(WRONG, "\n".join([*differ, "and then:", *errors.values()]))
    # A rank waits for one that has refused, and is woken; in a real run it is told that the other one has ended.
    others = [text for rank, text in errors.items() if not founds[rank].is_refusal and not is_consequence(text)]
    if not refusals or others:
        for text, cause in KNOWN.items():
            if all(re.search(text, each) for each in others):
                return Outcome(KNOWN_FAULT, cause)
        return Outcome(WRONG, "\n".join(others or errors.values()))
    return Outcome(REFUSED, words(refusals[0]))


def is_consequence(text: str) -> bool:
    return bool(re.search(r"AssertionError: ranks \[.*\] did not come|\b(WorldError|PeerLost):|by peer", text))


def so_far(program: Program, alone: Found, found: Found, rank: int) -> list[str]:
    """What differs in the weights after each step that a rank has made."""
    texts = []
    for step, (mine, whole) in enumerate(zip(found.trail, alone.trail, strict=False)):
        if program.strategy in FULLY:  # whole ones are gathered between a forward without a backward and the next step
            cut = {name: value.chunk(program.layout.dp) for name, value in whole.items()}
            own = {name: parts[rank] if rank < len(parts) else parts[0][:0] for name, parts in cut.items()}
            whole = {n: v if n in mine and mine[n].shape == v.shape else own[n] for n, v in whole.items()}
        texts += [f"weights after step {step}: {text}" for text in differences(mine, whole if mine else {})]
    if program.layout.dp == 1:
        texts += differences(found.losses, alone.losses[: len(found.losses)])
    return texts


def mean_losses(program: Program, alone: Found, founds: list[Found]) -> list[str]:
    """Those of ranks with different rows have the mean that one process has."""
    if len({len(each.losses) for each in [alone, *founds]}) > 1:
        return [f"numbers of losses: {[len(each.losses) for each in founds]}, and one process has {len(alone.losses)}"]
    means = [torch.stack(each).mean(0) for each in zip(*(found.losses for found in founds), strict=True)]
    return [f"losses: {text}" for text in differences(means, alone.losses)]


def differences(found: Any, wanted: Any) -> list[str]:
    """Texts about what differs by more than rounding."""
    mine, theirs = (dict(_pytree.tree_flatten_with_path(each)[0]) for each in (found, wanted))
    texts = [
        f"{_pytree.keystr(path)}: one side alone has it"
        for path in [*mine, *theirs]
        if (path in mine) != (path in theirs)
    ]
    for path in mine.keys() & theirs.keys():
        a, b = mine[path], theirs[path]
        if not isinstance(a, Tensor):
            if a != b:
                texts.append(f"{_pytree.keystr(path)}: {a} and {b}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            texts.append(f"{_pytree.keystr(path)}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
        elif a.numel():
            distance = float((a.double() - b.double()).abs().max())
            if not distance <= ATOL + RTOL * float(b.double().abs().max()):
                texts.append(
                    f"{_pytree.keystr(path)}: differs by {distance:.3g} of {float(b.double().abs().max()):.3g}"
                )
    return texts


def words(text: str) -> str:
    """The first words of a refusal, without names and numbers, to count it by."""
    text = re.sub(r"\[rank \d+\] ", "", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    return re.sub(r"\d+", "0", text).split("(got")[0].split("\n")[0][:110]


def tell(outcome: Outcome) -> list[str]:
    """Return by what an outcome is counted: its kind, and its words."""
    return [outcome.kind, f"{outcome.kind}: {outcome.why}"] if outcome.why and outcome.kind != WRONG else [outcome.kind]


def report(strategy: str, counts: Counter[str], wrong: list[str]) -> None:
    """Print what came of the programs of a strategy, and fail if some are wrong."""
    print(strategy, *(f"{count:5} {what}" for what, count in counts.most_common()), sep="\n")
    assert not wrong, f"{len(wrong)} programs are neither equal nor refused:\n\n" + "\n\n".join(wrong)

"""The programs of tests/threads/grammar.py on processes: with what draws by torch's generator, and with DTensor's collectives.

``gz.prepare`` prepares them. Ranks run one program after the other, until one is refused: then they are made anew.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.sharding.whole import full
from tests.ranks import run_ranks
from tests.threads.generated import Alone, Found, made
from tests.threads.grammar import DATA, LAYOUTS, Program, make_program
from tests.threads.grown import DROPOUT
from tests.threads.outcomes import (
    EQUAL,
    WRONG,
    ddp_options,
    judged,
    report,
    run_script,
    tell,
    wishes,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # programs are drawn, and PyTorch may advise against one
SEED = 7
# How many programs a strategy has.
NUM_PROGRAMS = {"ddp": 20, "sharded": 20, "sharded-gradients": 50, "sharded-weights": 50, "pp=2": 30, "tp=2": 40}


class ProcessRank(Alone):
    """A rank that is a process."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program, SEED)
        if program.strategy in DATA:
            self.place, self.copies = rank, program.layout.dp

    def prepare(self, model: Any, optimizers: list[Any]) -> tuple[Any, list[Any]]:
        program = self.program
        if program.strategy in DATA:
            model = gz.SyncBatchNorm.convert_sync_batchnorm(model)
        given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
        options: dict[str, Any] = {"ddp_options": ddp_options(program) or None}
        if program.strategy in LAYOUTS:
            asked = wishes(program)
            options |= {
                "layout": program.strategy,
                "cut": asked.get("cut"),
                "microbatches": asked.get("num_microbatches"),
            }
        name = LAYOUTS[program.strategy][0] if program.strategy in LAYOUTS else program.strategy
        prepared, stepped = gz.prepare(model, given, name, **options)
        return prepared, list(stepped) if len(optimizers) > 1 else [stepped]

    def whole(self, tensor: Any) -> Tensor:
        return full(tensor).clone()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        if self.program.strategy in LAYOUTS:
            return {}
        named: Any = model.named_parameters()
        return {n: (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for n, p in named}


def programs(strategy: str, numbers: list[int]) -> list[Program]:
    return [make_program(strategy, number, on_threads=False) for number in numbers]


def of_rank(rank: int, size: int, strategy: str, numbers: list[int]) -> list[Found]:
    """Run programs up to the first one that fails here."""
    gz.init()
    founds = []
    for program in programs(strategy, numbers):
        founds.append(Found())
        with contextlib.suppress(Exception):
            run_script(program, [made(program) for _ in range(2)], ProcessRank(program, rank), founds[-1])
        if founds[-1].error:
            return founds  # the other rank is told, if it waits for this one
    gz.shutdown()
    return founds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", NUM_PROGRAMS)
def test_programs_on_processes_are_equal_or_refused(strategy: str) -> None:
    counts: Counter[str] = Counter()
    equal: set[str] = set()
    wrong: list[str] = []
    left = [5 * i for i in range(NUM_PROGRAMS[strategy])]  # of all kinds of elements
    while left:
        founds = run_ranks(of_rank, 2, strategy, left, init=False)
        num = min(map(len, founds))
        for i, program in enumerate(programs(strategy, left[:num])):
            alone = Found()
            with contextlib.suppress(Exception):
                run_script(program, [made(program) for _ in range(2)], Alone(program, SEED), alone)
            outcome = judged(program, alone, [each[i] for each in founds], [])
            counts.update(tell(outcome))
            if outcome.kind == EQUAL:
                equal.update(program.elements)
            elif outcome.kind == WRONG:
                wrong.append(f"on processes, {program}{outcome.why}")
        left = left[num:]
    report(strategy, counts, wrong)
    assert counts[EQUAL] > NUM_PROGRAMS[strategy] / 2, f"most programs are refused, which proves little: {counts}"
    assert (DROPOUT in equal) == (strategy in LAYOUTS)

"""Programs of a grammar, each equal to one process or refused: models from parts, ties, hooks and outputs; scripts from habits.

A strategy and a number make a program again: ``str(make_program("sharded", 17))`` says what it is, and
``outcome_of(make_program("sharded", 17))`` what comes of it. What draws by torch's generator runs in
tests/processes/test_generated_habits.py, because ranks that are threads share it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.threads.grammar import ALWAYS_REFUSED, DATA, LAYOUTS, elements_of, make_program
from tests.threads.outcomes import EQUAL, KNOWN_FAULT, REFUSED, WARNED, WRONG, outcome_of, report, tell

pytestmark = pytest.mark.filterwarnings("ignore")  # programs are drawn, and PyTorch may advise against one
# How many programs a strategy has, at least one for each element.
NUM_PROGRAMS = {
    "ddp": 250,
    "the class": 150,
    "sharded": 250,
    "sparse-rows": 120,
    "sharded-gradients": 140,
    "sharded-weights": 140,
    "pp=2": 180,
    "tp=2": 180,
    "pp=2,tp=2": 100,
    "pp=2,dp=2": 100,
    "dp=2,tp=2": 100,
    "sharded pp=2,dp=2": 100,
    "sharded dp=2,tp=2": 100,
}

# What is in one program of a strategy alone, where something else is refused.
REFUSED_WITH_OTHERS = {"pp=2,dp=2": {"accumulates: in gz.accumulate"}, "sharded pp=2,dp=2": {"optimizers: a closure"}}


def check(strategy: str, numbers: range) -> tuple[Counter[str], set[str]]:
    """Run programs; return how often each thing came of them, and what was in programs that are equal."""
    counts: Counter[str] = Counter()
    equal: set[str] = set()
    wrong = []
    for number in numbers:
        program = make_program(strategy, number)
        outcome = outcome_of(program)
        counts.update(tell(outcome))
        if outcome.kind == EQUAL:
            equal.update(program.elements)
        elif outcome.kind == WRONG:
            wrong.append(f"{program}{outcome.why}")
    report(strategy, counts, wrong)
    return counts, equal


def check_all(strategy: str) -> None:
    num = NUM_PROGRAMS[strategy]
    counts, equal = check(strategy, range(num))
    assert counts[EQUAL] > num / 2, f"most programs are refused, which proves little: {counts}"
    assert counts[EQUAL] + counts[REFUSED] + counts[WARNED] + counts[KNOWN_FAULT] == num
    elements = set(elements_of(strategy))
    refused = ALWAYS_REFUSED.get(strategy, {}).keys() | REFUSED_WITH_OTHERS.get(strategy, set())
    assert elements - equal == elements & refused, "what is in no program that is equal, or is and should be in none"


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_some_programs_are_equal_or_refused(strategy: str) -> None:
    counts, _ = check(strategy, range(40, 42))
    assert counts[EQUAL]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DATA)
def test_programs_of_whole_models_are_equal_or_refused(strategy: str) -> None:
    check_all(strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_programs_of_divided_models_are_equal_or_refused(strategy: str) -> None:
    check_all(strategy)

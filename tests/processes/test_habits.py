"""The table of habits in docs/training.md: each cell is what two ranks did, compared with one process in float64."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import guozhuang as gz
from guozhuang.sharding.whole import full
from tests.processes.habits import HABITS
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
COLUMNS = ("ddp", "the class", "sharded", "sharded-gradients", "sharded-weights")
#: What a refusal says to do instead, by words of its text: the cells of the table.
INSTEAD = {
    r"gz\.averaged_gradients": "use `gz.averaged_gradients`",
    r"give them shape \(1,\)": "give it shape `(1,)`",
    r"leave these parameters out": "leave it out, or `sharded`",
    r"complex.*the strategy ddp": "use `ddp`",
    r"with an empty batch": "call all, or `sharded`",
    r"change the model first and prepare it then": "prepare it then",
    r"call loss\.backward\(\), which averages": "`loss.backward()`",
    r"call loss\.backward\(\) on what the model returned": "`loss.backward()`",
    r"step after the last one": "step at its end",
    r"register_post_accumulate_grad_hook of the prepared model": "hooks after `prepare`",
    r"step after loss\.backward\(\) and not in a hook": "step after backward",
    r"LBFGS.*train with the strategy ddp": "use `ddp`",
    r"is not known to act element by element": "declare it, or `ddp`",
    r"as LBFGS, needs gz\.prepare": "use `gz.prepare`",
    r"weight\.renorm_\(2, 0, max_norm\)": "limit rows after the step",
    r"find_unused_parameters=True": "`find_unused_parameters`",
}
#: Where the class does as PyTorch's and says so, since scripts that work with PyTorch's shall go on.
WARNED = "warned of"


def trained(habit: str, prepare: Any, mine: Any) -> dict[str, Tensor]:
    """Whole weights after the program, and what it returned."""
    program = HABITS[habit]
    torch.manual_seed(0)
    model: Any = program.make().double() if habit != "complex parameters" else program.make()
    program.before(model)
    model, optimizer = prepare(model, program.optimizer(model))
    found = program.train(model, optimizer, mine)
    inside = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    state = {name: full(value).clone() for name, value in inside.state_dict().items()}
    return state | ({"returned": found.detach()} if isinstance(found, Tensor) else {})


def of_rank(rank: int, size: int, habit: str, column: str, alone: dict[str, Tensor]) -> str:
    world = gz.init()
    options = {"find_unused_parameters": True} if "all called" in habit or "chosen" in habit else {}

    def prepare(model: Any, optimizer: Any) -> Any:
        if column == "the class":
            return gz.DistributedDataParallel(model, **options), optimizer
        return gz.prepare(model, optimizer, strategy=column, ddp_options=options or None)

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("guozhuang").addHandler(handler)
    try:
        found = trained(habit, prepare, lambda x: x[world.rank :: world.size])
        assert found.keys() == alone.keys()
        same = all(torch.allclose(found[name], value, rtol=0, atol=1e-9) for name, value in alone.items())
        return "equal" if same else WARNED if any(text.endswith("(said once)") for text in said) else "other numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def cell(habit: str, column: str, alone: dict[str, Tensor]) -> str:
    both = run_ranks(of_rank, 2, habit, column, alone, init=False)
    if both == ["equal", "equal"]:
        return "equal"
    if not {"equal", "other numbers", WARNED} & set(both):  # a rank that ends first is what the other one names
        for words, instead in INSTEAD.items():
            if any(re.search(words, text, re.S) for text in both):
                return instead
    if column == "the class" and WARNED in both and set(both) <= {WARNED, "other numbers"}:  # one rank says it for all
        return WARNED
    return f"?? {both}"


def row_of(habit: str) -> str:
    alone = trained(habit, lambda m, o: (m, o), lambda x: x)
    return f"| {habit} | {' | '.join(cell(habit, column, alone) for column in COLUMNS)} |"


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS)
def test_the_table_says_what_two_ranks_do(habit: str) -> None:
    row = row_of(habit)
    assert row in PAGE.read_text().splitlines(), row


def test_the_table_has_all_habits() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index(f"| habit | {' | '.join(f'`{c}`' if c != 'the class' else c for c in COLUMNS)} |")
    rows = lines[start + 2 : start + 2 + len(HABITS)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(HABITS)
    assert not lines[start + 2 + len(HABITS)].startswith("|")

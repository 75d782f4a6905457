"""Ranks of several nodes that ask for different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError
from tests.processes.test_hierarchical import EVEN, FLAT, ONE_AND_TWO, PART, THREE_AND_ONE, make
from tests.ranks import run_ranks

CALLS: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "sum": lambda group: dist.all_reduce(torch.ones(1000), group=group),
    "max": lambda group: dist.all_reduce(torch.ones(1000), op=dist.ReduceOp.MAX, group=group),
    "short": lambda group: dist.all_reduce(torch.ones(600), group=group),
    "double": lambda group: dist.all_reduce(torch.ones(1000).double(), group=group),
    "later": lambda group: dist.all_reduce(torch.ones(5 * PART), group=group, async_op=True).wait(),
    "short later": lambda group: dist.all_reduce(torch.ones(4 * PART), group=group, async_op=True).wait(),
    "reduce": lambda group: dist.reduce(torch.ones(1000), 0, group=group),
    "to last": lambda group: dist.reduce(torch.ones(1000), dist.get_world_size() - 1, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "gather": lambda group: dist.gather(torch.ones(3), None if dist.get_rank() else [torch.ones(3)] * 4, group=group),
}


def differs(rank: int, world_size: int, layout: str, names: list[str]) -> tuple[str, str]:
    group = make(layout)
    dist.all_reduce(torch.ones(3), group=group)
    texts = []
    for _ in range(2):
        try:
            CALLS[names[rank]](group)
        except (RuntimeError, ValueError) as error:
            assert type(error) is MismatchError, repr(error)
            texts.append(str(error))
    dist.barrier()  # nobody ends before all have heard why
    assert texts[0] == texts[1]
    return texts[0], names[rank]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param(EVEN, ["sum", "sum", "max", "max"], marks=pytest.mark.slow),
        (EVEN, ["sum", "short", "sum", "sum"]),
        pytest.param(EVEN, ["later", "later", "short later", "short later"], marks=pytest.mark.slow),
        (EVEN, ["reduce", "to last", "reduce", "to last"]),  # no lane differs
        pytest.param(EVEN, ["sum", "sum", "gather", "gather"], marks=pytest.mark.slow),
        (THREE_AND_ONE, ["sum", "sum", "double", "sum"]),  # the one in no lane
        pytest.param(THREE_AND_ONE, ["sum", "sum", "sum", "barrier"], marks=pytest.mark.slow),
        (FLAT, ["sum", "short", "sum"]),
    ],
    ids=str,
)
def test_ranks_that_ask_for_different_things_are_told_who_asked_for_what(layout: str, names: list[str]) -> None:
    words = {"sum": "1000 float32, sum", "max": "1000 float32, max", "short": "600 float32, sum", "reduce": "root 0",
             "later": f"{5 * PART} float32", "short later": f"{4 * PART} float32", "to last": "root 3", "barrier": "barrier",
             "gather": "gather of 3 float32, root 0, through gloo", "double": "1000 float64"}  # fmt: skip
    for text, _ in run_ranks(differs, len(layout), layout, names):
        lines = text.splitlines()[2:]
        assert len(lines) == len(layout), text
        for rank, line in enumerate(lines):
            assert line.split()[:2] == [str(rank), str("abc".index(layout[rank]))], text
            assert words[names[rank]] in line, text


def is_refused(rank: int, world_size: int, layout: str, what: str) -> tuple[str, str]:
    """The last rank's arguments cannot work: it says why, and the others raise at once."""
    group = make(layout)
    wrong = {"expanded": torch.ones(1).expand(4), "bits": torch.ones(4), "none": None}[what]
    op, right = (
        (dist.ReduceOp.BAND, torch.ones(4, dtype=torch.int32)) if what == "bits" else (dist.ReduceOp.SUM, torch.ones(4))
    )
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False
    with pytest.raises((RuntimeError, ValueError, AttributeError)) as caught:
        group.allreduce([wrong if rank == world_size - 1 else right], options)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("layout", [EVEN, FLAT])
@pytest.mark.parametrize("what", ["expanded", "bits", "none"])
def test_arguments_refused_on_one_rank_raise_on_every_rank(layout: str, what: str) -> None:
    *others, last = run_ranks(is_refused, len(layout), layout, what)
    if what == "bits" and layout == FLAT:  # gloo is asked for it, and says so on that rank alone
        return
    assert last[0] == ("AttributeError" if what == "none" else "UsageError")
    assert all(name == "MismatchError" and "refused on this rank" in text for name, text in others), others


def inside_differs(rank: int, world_size: int) -> tuple[str, str]:
    """The group inside a node finds a difference that the comparison does not show."""

    def reduce(*_: Any) -> Any:
        raise MismatchError("[rank 0] the table of the node")

    group: Any = make(ONE_AND_TWO)
    if group._inside is not None:
        group._inside.reduce = reduce
    try:
        group.allreduce([torch.ones(5)], dist.AllreduceOptions()).wait()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_the_group_inside_a_node_says_of_a_difference_reaches_the_other_nodes() -> None:
    for name, text in run_ranks(inside_differs, 3):
        assert name == "MismatchError"
        assert "the table of the node" in text

"""The texts of errors: what, value, rank, remedy; and what the classes can be caught as."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, UnusedParameterError, UsageError, WorldError, explain, rank_table
from guozhuang.groups.hierarchical.process_group import words
from guozhuang.groups.shared_memory.collectives import Combining
from guozhuang.groups.shared_memory.endpoint import cut
from guozhuang.groups.shared_memory.operations import describe
from guozhuang.groups.shared_memory.program import DType, Op


def test_a_text_has_only_the_parts_that_were_given() -> None:
    assert explain("it broke") == "it broke."
    assert explain("it broke.") == "it broke."
    assert explain("it broke", value="x", rank=3, fix="mend it") == "[rank 3] it broke (got 'x'). Fix: mend it."
    assert explain("it broke", fix="mend it.") == "it broke. Fix: mend it."


@pytest.mark.parametrize("value", [None, 0, "", False])
def test_a_value_of_nothing_is_a_value(value: object) -> None:
    assert explain("it broke", value=value) == f"it broke (got {value!r})."
    assert explain("it broke", rank=0) == "[rank 0] it broke."


def test_a_table_lines_up_and_has_a_line_per_rank() -> None:
    table = rank_table(("rank", "what"), [(0, "short"), (10, "a longer one"), (2, "")])
    lines = table.split("\n")
    assert len(lines) == 4
    assert lines[1].index("short") == lines[0].index("what") == lines[2].index("a longer one")
    assert all(line == line.rstrip() for line in lines)


def test_a_ragged_table_is_our_own_mistake() -> None:
    with pytest.raises((ValueError, IndexError)):
        rank_table(("rank", "what"), [(0, "a", "b")])


def test_errors_are_caught_as_torch_users_catch_them() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(MismatchError, ValueError) and issubclass(MismatchError, RuntimeError)
    assert issubclass(UnusedParameterError, RuntimeError)
    assert issubclass(WorldError, RuntimeError)
    with pytest.raises(RuntimeError, match="ranks differ"):
        raise MismatchError("ranks differ")


def test_a_call_of_many_tensors_still_says_what_it_does_after_it_was_cut() -> None:
    many, op = [torch.ones(1000 + i) for i in range(60)], dist.ReduceOp.MAX
    text = words("reduce", many, op, root=3)
    assert cut(text.encode()).startswith(b"reduce of 60 tensors, float32, max, root 3: 1000 + 1001 + ")
    assert len(cut(text.encode())) < len(text)
    two = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    assert words("broadcast", two, root=0) == "broadcast of 2 tensors, float32 and int64, root 0: 2 float32 + 3 int64"
    assert words("all_reduce", two[:1], op) == "all_reduce of 2 float32, max"
    uneven = describe("reduce_scatter", range(1000, 1060), torch.float32, Combining(DType.F32, Op.MAX, name="max"))
    assert uneven.startswith(b"reduce_scatter of float32, max: [1000, 1001, ")

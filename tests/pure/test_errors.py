"""The texts of errors: what, value, rank, remedy; and what the classes can be caught as."""

from __future__ import annotations

import pytest

from guozhuang.errors import MismatchError, UnusedParameterError, UsageError, WorldError, explain, rank_table


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

"""What ``guozhuang.launch`` makes of the ranks' answers, and of what is no answer."""

from __future__ import annotations

import pickle

import pytest

from guozhuang.errors import UsageError, WorldError
from guozhuang.launch import functions
from guozhuang.launch.functions import mailbox
from guozhuang.launch.functions.mailbox import Answer, Mailbox

SECOND, LATER = KeyError("second"), ValueError("later")


@pytest.mark.parametrize(
    ("failed", "answers", "rank", "text", "cause"),
    [
        (["rank 1"], [Answer(None, "in rank 0", LATER), Answer(None, "in rank 1", SECOND)], 1, "in rank 1", SECOND),
        ([], [None, Answer(None, "in rank 1", SECOND), Answer(None, "in rank 2", LATER)], 1, "in rank 1", SECOND),
        (["rank 0"], [None, Answer(None, "in rank 1")], 1, "in rank 1", None),
        (["rank 0"], [None, Answer("result")], None, "the launcher's words", None),
    ],
)
def test_the_error_of_the_first_rank_that_failed_is_raised(failed, answers, rank, text, cause) -> None:
    error = functions._failure(failed, answers, "the launcher's words", 1)
    assert error.rank == rank and text in str(error) and error.__cause__ is cause


def test_only_what_a_rank_of_this_run_has_signed_is_unpickled() -> None:
    box = Mailbox(list)
    large = b"x" * (mailbox._PART_BYTES + 1)
    mailbox._put(box._store, box._secret, mailbox._answer_of(0), pickle.dumps(Answer(large)))
    mailbox._put(box._store, b"another secret", mailbox._answer_of(1), pickle.dumps(Answer("forged")))
    try:
        found = box.answer(0)
        assert found is not None and found.result == large
        with pytest.raises(WorldError, match="rank 1 is not what its sender signed"):
            box.answer(1)
        assert box.answer(2) is None
    finally:
        box.close()
    with pytest.raises(UsageError, match="cannot be pickled for the ranks"):
        Mailbox(lambda: box)

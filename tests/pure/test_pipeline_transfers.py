"""A message that arrives just after a look has timed out is a message that arrived."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest

from guozhuang.errors import PeerLost
from guozhuang.parallel.pipeline.transfers import LOOK_S, _ended_within, _PolledReceive

LOOK = datetime.timedelta(seconds=LOOK_S)


class Arrives:
    """A work that ends between the time-out of the first wait and the next look, well or with an error of its own."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_ended, self.error = False, error

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self, limit: object = None) -> bool:
        if not self.has_ended:
            self.has_ended = True
            raise PeerLost("timed out: rank 0 did not come to the recv", rank=0, pid=1, waiting_in="recv")
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.parametrize("has_one_before", [False, True])
def test_a_message_that_arrives_just_after_a_look_is_taken(has_one_before: bool) -> None:
    found: list[str] = []

    def steps(name: str) -> Iterator[Any]:
        yield Arrives()
        yield Arrives()
        found.append(name)

    before = _PolledReceive(steps("before"), None) if has_one_before else None
    _PolledReceive(steps("this"), before).wait(LOOK)
    assert found == ["before", "this"][not has_one_before :]


def test_an_error_of_the_receive_itself_is_raised() -> None:
    own = PeerLost("rank 0 is gone", rank=0, pid=1, waiting_in="recv")
    receive = _PolledReceive(iter([Arrives(own)]), None)  # type: ignore[list-item]
    with pytest.raises(PeerLost, match="is gone"):
        receive.wait(LOOK)
    assert receive.is_completed()


def test_every_wait_of_a_receive_tells_the_two_apart() -> None:
    assert _ended_within(Arrives(), LOOK)  # type: ignore[arg-type]

"""The mean over the last seconds, by a clock that the test moves."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.compat.bagua.torch_api.utils import StatisticalAverage


def test_what_baguas_own_test_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    four, two, one, tail = 3.5034241850204078, 4.5005175, 5.0, 2.499061185570463
    found = StatisticalAverage(last_update_time=now_s, records=[one, two, four], record_tail=(2.0166309999999985, tail))
    now_s += 1
    found.record(6.0)
    for seconds, wanted in (
        (1.0, 6.0),
        (2.0, (6 + one) / 2),
        (3.0, (6 + two * 2) / 3),
        (5.0, (6 + four * 4) / 5),
        (7.0, (6 + tail * 6.016631) / 7),
    ):
        assert found.get_records_mean(seconds) == pytest.approx(wanted, abs=0.1), seconds
    assert found.total_recording_time() == pytest.approx(7.016631) and "record_tail" in str(found)
    now_s += 1
    assert found.get(0.5) == 6.0 and found.get(2.0) == found.get_records_mean(1.0)


@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(-5, 5)), min_size=1, max_size=12))
def test_the_mean_over_everything_is_exact(steps: list[tuple[float, float]]) -> None:
    found, now_s = StatisticalAverage(last_update_time=0.0), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now_s)
        for passed_s, value in steps:
            now_s += passed_s
            found.record(value)
    wanted = sum(passed_s * value for passed_s, value in steps) / now_s
    assert found.total_recording_time() == pytest.approx(now_s)
    assert found.get_records_mean(now_s) == pytest.approx(wanted, abs=1e-6)
    assert StatisticalAverage(0.0).get(3.0) == 0.0 and found.get_records_mean(0.0) == 0.0

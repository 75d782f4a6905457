"""What the driver of an elastic run does around its decisions: whom it hears, whom it tells of which network, signals."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from guozhuang.compat.horovod.runner.elastic import driver
from guozhuang.launch.console.streams import LastOutput
from guozhuang.launch.signals import ENDING, Signals


def test_what_a_worker_prints_is_a_sign_of_life() -> None:
    heard: list[tuple[object, ...]] = []
    traces = {3: LastOutput(), 4: LastOutput()}
    traces[3].lines.extend([(4.0, "step 0"), (5.0, "step 1")])
    here: Any = SimpleNamespace(
        _output=SimpleNamespace(traces=traces),
        _job=SimpleNamespace(heard=lambda *given: heard.append(given)),
        _board=SimpleNamespace(arrivals=lambda running: {}),
        _workers=SimpleNamespace(wait=lambda limit_s: {}),
        _running=[SimpleNamespace(number=number) for number in (3, 4)],
        _remote={},
        _next_beat=float("inf"),
    )
    driver.ElasticDriver._turn(here, 0.0)
    assert heard == [(3, 5.0)]


@pytest.mark.parametrize(("signals", "limit_s"), [([], None), ([signal.SIGINT], driver._LAST_WORDS_S)])
def test_the_disk_is_hurried_after_a_signal_only(signals: list[int], limit_s: float | None) -> None:
    given: list[float | None] = []
    here: Any = SimpleNamespace(_output=SimpleNamespace(end=lambda limit: True, close=given.append), _signals=signals)
    driver.ElasticDriver._show_the_rest(here)
    assert given == [limit_s]


def test_which_network_a_round_uses() -> None:
    """Hosts name an address of the driver's host; loopback is none that leads from one host to another."""
    assert driver._towards(["a", "b"], {}) == ["", ""]
    assert driver._towards(["a", "b"], {"a": "127.0.0.1"}) == ["", ""], "this machine under another name"
    reached = {"a": "127.0.0.1", "b": "10.0.0.1", "c": "10.1.0.1", "away": "10.9.0.1"}
    assert driver._towards(["here", "a", "b", "c"], reached) == ["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.1.0.1"]
    assert driver._towards(["here", "a"], reached) == ["", ""]


def test_signals_are_noted_and_handlers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in ENDING}
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGQUIT else real(number))
    signals = Signals(ENDING)
    signals.note()
    with signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert real(signal.SIGQUIT) == before[signal.SIGQUIT], "one that is not Python's stays"
    assert signals.noted == [signal.SIGTERM] * 2
    assert {number: real(number) for number in ENDING} == before

"""A loop that goes on from a checkpoint gets the batches that come next in one that was not interrupted, whatever its form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang.checkpoint import run as of_run
from tests.pure.test_checkpoint_loop import forgets, requested, settled

__all__ = ["forgets"]  # a fixture that every test of this file uses


class Stopped(Exception):
    """The run ended here."""


def drive(form: str, folder: Any, stop_at: int | None = None, num_epochs: int = 3) -> list[Any]:
    """Train, and return everything that came in order: batches and evaluations; stop at a place in this order."""
    of_run._leave()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = gz.keep(model=model, optimizer=optimizer, seen=[])
    train, other = (gz.loader(range(first, first + 12), 4, rank=0, num_replicas=1) for first in (0, 100))

    def came(what: Any) -> None:
        kept.seen.append(what)
        if len(kept.seen) == stop_at:
            raise Stopped

    def step() -> None:
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    def evaluate(num_batches: int) -> None:
        for x in itertools.islice(other, num_batches):
            came(["evaluated", *x.tolist()])

    for epoch in gz.epochs(num_epochs):
        came(["begins", epoch])
        others = iter(other)
        for x in itertools.islice(train, 2 if form == "leaves" else 3) if form in ("leaves", "counts") else train:
            step()
            if form == "two loaders":
                came([*x.tolist(), *next(others).tolist()])
                step()
            else:
                came(x.tolist())
            if form == "evaluates inside":
                evaluate(3)
        del others
        if form == "saves":
            evaluate(2)
            gz.save(folder)
    return kept.seen


def trained(came: list[Any]) -> list[Any]:
    return [what for what in came if isinstance(what[0], int)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Epoch")
@pytest.mark.parametrize("form", ["plain", "two loaders", "evaluates inside", "saves", "counts", "leaves"])
def test_a_resumed_loop_gets_what_it_would_have_got(tmp_path, monkeypatch, form) -> None:
    settled(monkeypatch)
    requested(monkeypatch, tmp_path / "whole", "1step")
    expected = drive(form, tmp_path / "whole")
    stops = [i + 1 for i, what in enumerate(expected) if form != "leaves" or what[0] == "begins"]
    for stop_at in stops[1 :: 1 if form == "leaves" else 4]:
        requested(monkeypatch, folder := tmp_path / str(stop_at), "1step")
        with pytest.raises(Stopped):
            drive(form, folder, stop_at)
        found = drive(form, folder)
        assert trained(found) == trained(expected), f"{form} stopped at {stop_at}"
        evaluated, wanted = ([what for what in some if what[0] == "evaluated"] for some in (found, expected))
        # The end of an epoch that was saved after its evaluation comes again, with all of it.
        assert evaluated == wanted or (form == "saves" and len(evaluated) == len(wanted) + 2), f"{form} at {stop_at}"

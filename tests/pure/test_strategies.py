from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.exchange import GradientExchange
from guozhuang.exchange.warmup import Warmup
from guozhuang.exchange.weights import WeightExchange
from guozhuang.strategies import PreparedPair, Strategy, apply, table
from guozhuang.world import World

ALONE = World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "alone")
PAIR = replace(ALONE, size=2, local_size=2, launcher="torchrun")


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(apply, "current", lambda: getattr(request, "param", ALONE))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError,
        match=r"single, ddp, torch-ddp, horovod, byteps, bagua-gradient-allreduce, bagua-bytegrad, dp, "
        r"sharded, .*, quantize8, .*, async-model-average, none",
    ):
        strategies.get("dpp")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        strategies.STRATEGIES["mine"] = strategies.get("ddp")  # type: ignore[index]


def test_only_the_bound_does_not_train_and_every_name_is_its_key() -> None:
    assert [s.name for s in strategies.STRATEGIES.values() if not s.trains] == ["none"]
    assert all(name == s.name for name, s in strategies.STRATEGIES.items())


def test_prepare_enters_the_world_after_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(apply, "init", lambda: entered.append(1) or ALONE)
    assert gz.prepare(*_pair(), strategy="single") and entered
    monkeypatch.setattr(apply, "init", lambda: PAIR)
    early = gz.loader(range(4))
    assert gz.prepare(*_pair(), strategy="none")  # it is not used yet
    assert len(early) == 4
    with pytest.raises(UsageError, match=r"gz.loader\(\) was used before gz.init\(\).* every rank would get all"):
        gz.prepare(*_pair(), strategy="none")
    del early


@pytest.mark.usefixtures("world")
def test_single_hands_back_what_it_got() -> None:
    model, optimizer = _pair()
    assert gz.prepare(model, optimizer, "single") == (model, optimizer)


@pytest.mark.usefixtures("world")
def test_dp_makes_as_many_replicas_as_asked_for_and_computes_the_same() -> None:
    model, optimizer = _pair()
    wrapped, same = gz.prepare(model, optimizer, "dp", num_replicas=3)
    assert isinstance(wrapped, gz.DataParallel)
    assert len(wrapped.device_ids) == 3
    assert same is optimizer
    batch = torch.randn(7, 4)
    torch.testing.assert_close(wrapped(batch), model(batch))


@pytest.mark.usefixtures("world")
def test_none_is_said_to_be_no_way_to_train(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        gz.prepare(*_pair(), "none")
    assert "not a way to train" in caplog.text


@pytest.mark.usefixtures("world")
def test_what_the_launcher_asked_for_is_taken_unless_the_script_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "requested_strategy", lambda: "dp")
    assert isinstance(gz.prepare(*_pair())[0], gz.DataParallel)
    assert type(gz.prepare(*_pair(), "single")[0]) is nn.Linear
    monkeypatch.setattr(apply, "requested_strategy", lambda: "quick")
    with pytest.raises(UsageError, match="no such strategy"):
        gz.prepare(*_pair())


@pytest.mark.parametrize("world", [PAIR], indirect=True)
@pytest.mark.parametrize("name", ["single", "dp"])
@pytest.mark.usefixtures("world")
def test_a_strategy_of_one_process_is_refused_in_a_world_of_two(name: str) -> None:
    with pytest.raises(UsageError, match="one process and this world has 2 ranks"):
        gz.prepare(*_pair(), name)


@pytest.mark.usefixtures("world")
def test_an_optimizer_over_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="not the model's"):
        gz.prepare(nn.Linear(4, 2), _pair()[1], "single")
    model, _ = _pair()
    with pytest.raises(UsageError, match="torch optimizer"):
        gz.prepare(model, model, "single")  # type: ignore[arg-type]


@pytest.mark.usefixtures("world")
def test_a_wrapped_or_frozen_model_is_refused() -> None:
    model, optimizer = _pair()
    with pytest.raises(UsageError, match="wrapped already"):
        gz.prepare(nn.DataParallel(model), optimizer, "single")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        gz.prepare(model, optimizer, "single")


class LimitedRows(nn.Module):
    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, 3, max_norm=max_norm)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(ids)
        return found


@pytest.mark.parametrize("world", [PAIR], indirect=True)
@pytest.mark.parametrize("name", ["ddp", "sharded", "sharded-weights", "parameter-server", "horovod"])
@pytest.mark.usefixtures("world")
def test_weights_that_each_rank_would_limit_by_its_own_rows_are_refused(name: str) -> None:
    model = LimitedRows(1.0)
    with pytest.raises(UsageError, match=r"max_norm changes its weights in forward.*table.*renorm_"):
        gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name)


@pytest.mark.usefixtures("world")
def test_weights_that_change_in_a_forward_are_right_in_one_process_without_replicas() -> None:
    for max_norm, name, count in ((1.0, "single", None), (1.0, "dp", 1), (None, "dp", 2)):
        model = LimitedRows(max_norm)
        gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name, num_replicas=count)
    with pytest.raises(UsageError, match="max_norm"):
        gz.prepare(model := LimitedRows(1.0), torch.optim.SGD(model.parameters(), lr=0.1), "dp")


@pytest.mark.parametrize(("name", "count"), [("single", 2), ("dp", 0)])
@pytest.mark.usefixtures("world")
def test_a_count_of_replicas_that_cannot_work_is_refused(name: str, count: int) -> None:
    with pytest.raises(UsageError, match="num_replicas"):
        gz.prepare(*_pair(), name, num_replicas=count)


@pytest.mark.parametrize("world", [replace(ALONE, device=torch.device("meta"))], indirect=True)
@pytest.mark.usefixtures("world")
def test_an_optimizer_that_could_not_follow_the_model_to_its_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"new parameters.*model.to\('meta'\)"):
        gz.prepare(*_pair(), "single")
    model = nn.Linear(4, 2)
    stepped = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    stepped.step()
    with pytest.raises(UsageError, match="already stepped"):
        gz.prepare(model, stepped, "single")


@pytest.mark.parametrize("world", [replace(ALONE, device=torch.device("meta"))], indirect=True)
@pytest.mark.usefixtures("world")
def test_a_model_that_is_on_a_device_already_stays_there() -> None:
    model = nn.Linear(4, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters())
    assert gz.prepare(model, optimizer, "single") == (model, optimizer)


@pytest.mark.usefixtures("world")
def test_a_timeline_that_was_asked_for_holds_every_part_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(apply, "requested_timeline", lambda: str(tmp_path / "trace.json"))
    monkeypatch.setattr(apply.atexit, "register", lambda write, path: at_exit.append(partial(write, path)))
    model, optimizer = gz.prepare(*_pair(), "single")
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(3, 4))
    at_exit[0]()
    events = json.loads((tmp_path / "trace.json.rank0").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["forward", "backward", "optimizer"] * 2 + ["forward"]
    assert all(span["dur"] > 0 for span in spans)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(spans))


def test_every_exchange_of_the_table_can_be_made_and_its_warm_up_is_told() -> None:
    found = {
        name: one for name, one in strategies.STRATEGIES.items() if isinstance(one.prepare, strategies.WithExchange)
    }
    assert len(found) == 24
    for name, strategy in found.items():
        exchange, optimizer = strategy.prepare.make(torch.optim.AdamW(nn.Linear(4, 2).parameters()))
        assert isinstance(exchange, GradientExchange | WeightExchange), name
        assert isinstance(optimizer, torch.optim.Optimizer), name
        assert (exchange.steps if isinstance(exchange, Warmup) else 0) == strategy.warmup_steps, name


def test_a_strategy_from_above_stands_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    mine = replace(strategies.get("ddp"), name="mine")
    table.register(mine, after="ddp")
    assert list(table._TABLE.values())[2] is mine and list(table._TABLE)[:4] == ["single", "ddp", "mine", "torch-ddp"]


def _squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.usefixtures("world")
def test_the_step_of_a_strategy_trains_as_the_loop_of_a_script_does() -> None:
    torch.manual_seed(0)
    (model, optimizer), (twin, other) = _pair(), _pair()
    twin.load_state_dict(model.state_dict())
    prepared = gz.prepare(model, optimizer, "single")
    assert isinstance(prepared, PreparedPair) and not prepared.owns_step
    for batch in torch.randn(3, 5, 4):
        passed: list[str] = []
        loss = prepared.step(batch, _squares, passed=passed.append)
        expected = _squares(twin, batch)
        expected.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(loss, expected.detach()) and not loss.requires_grad
        assert passed == ["forward", "backward", "optimizer"]
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(UsageError, match="tensor of one element"):
        prepared.step(batch, lambda model, batch: model(batch))


@pytest.mark.usefixtures("world")
def test_a_strategy_may_own_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the batch and the loss function, and calls the latter with parts of the batch, as a schedule would."""
    trained: list[torch.Tensor] = []

    def by_halves(model: nn.Module, optimizer: torch.optim.Optimizer, setup: strategies.Setup) -> PreparedPair:
        def step(
            batch: torch.Tensor, loss_fn: Callable[..., torch.Tensor], *, passed: Callable[[str], object]
        ) -> object:
            halves = [loss_fn(model, half) / 2 for half in batch.chunk(2)]
            sum(halves).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            trained.append(batch)
            return sum(halves)

        return PreparedPair(model, optimizer, partial(step, passed=lambda part: None))  # type: ignore[arg-type]

    mine = Strategy("halves", "in halves", exact=True, trains=True, one_process=False, prepare=by_halves)
    monkeypatch.setitem(table._TABLE, "halves", mine)
    (model, optimizer), (twin, other), batch = _pair(), _pair(), torch.randn(6, 4)
    twin.load_state_dict(model.state_dict())
    prepared, plain = gz.prepare(model, optimizer, "halves"), gz.prepare(twin, other, "single")
    assert prepared.owns_step and prepared == (model, optimizer)
    torch.testing.assert_close(prepared.step(batch, _squares).detach(), plain.step(batch, _squares))
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert len(trained) == 1


MODEL, OPTIMIZER = _pair()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((MODEL, OPTIMIZER, OPTIMIZER), {}, r"prepare\(model, \[first, second\]\)"),
        ((MODEL, OPTIMIZER, 3), {}, "as strategy .got 3"),
        ((MODEL, OPTIMIZER), {"layout": 2}, "as layout .got 2"),
        ((MODEL, OPTIMIZER), {"num_replicas": "2"}, "as num_replicas .got '2'"),
        ((MODEL, OPTIMIZER), {"ddp_options": [1]}, "as ddp_options .got 'list'"),
        ((nn.Linear, OPTIMIZER), {}, "takes a module as model .got 'the class Linear'"),
        ((OPTIMIZER, MODEL), {}, "takes a module as model .got 'SGD'"),
        ((MODEL, MODEL), {}, "takes a torch optimizer as its second value.*'Linear'"),
        ((MODEL, [OPTIMIZER, 1]), {}, "takes a torch optimizer as its second value.*'SGD, int'"),
    ],
)
def test_what_prepare_is_given_is_named_where_it_is_of_another_kind(arguments, options, said):
    with pytest.raises(UsageError, match=said):
        gz.prepare(*arguments, **options)

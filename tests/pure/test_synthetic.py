"""The synthetic workload, a user's own, and the interface both fill."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from guozhuang.errors import UsageError
from guozhuang.workloads import Workload, load
from guozhuang.workloads.synthetic import RandomTokens


@pytest.fixture(scope="module", autouse=True)
def transformers_is_imported() -> None:
    """Before the first test is watched: torch's compiler, which it imports, sets an environment variable."""
    pytest.importorskip("transformers.models.bert.modeling_bert")


def test_random_tokens_depend_on_seed_and_index_alone() -> None:
    data = RandomTokens(500, 16, 4, 1000, seed=3)
    again = RandomTokens(500, 16, 4, 1000, seed=3)
    for index in (0, 499, 17):
        tokens, label = data[index]
        assert np.array_equal(tokens, again[index][0]) and label == again[index][1]
        assert tokens.shape == (16,) and tokens.dtype == np.int32 and tokens.min() >= 1 and tokens.max() < 1000
    assert not np.array_equal(data[0][0], data[1][0])
    assert not np.array_equal(data[0][0], RandomTokens(500, 16, 4, 1000, seed=4)[0][0])
    counts = np.bincount([data[index][1] for index in range(500)], minlength=4)
    assert len(counts) == 4 and counts.min() > 80
    with pytest.raises(IndexError):
        data[500]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step(optimizer) -> None:
    work = load("synthetic", {"seq_len": 8, "optimizer": optimizer, "batch_size": 2, "fused": True, "num_samples": 20})
    torch.manual_seed(0)
    model = work.model()
    step = work.optimizer(model)
    assert step.defaults["fused"] is True and len(step.param_groups) == 1
    assert sum(parameter.numel() for parameter in model.parameters()) == work.details["parameters"]
    assert work.details["vocabulary"] == 30522 and len(work.train) == 20 and work.evaluate is None
    batch = work.collate([work.train[0], work.train[1]])
    assert batch["input_ids"].shape == (2, 8) and bool(batch["attention_mask"].all())
    before = work.loss(model, batch)
    before.backward()
    step.step()
    assert work.loss(model, batch) < before


def test_limits() -> None:
    with pytest.raises(UsageError, match="beyond the 512 positions"):
        load("synthetic", {"seq_len": 513})
    with pytest.raises(UsageError, match="no such workload option"):
        load("synthetic", {"data": "x"})
    with pytest.raises(UsageError, match="use text, synthetic, or module:function"):
        load("image")


def good() -> Workload:
    return load("synthetic", {"seq_len": 4})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch size .* at least 1"),
        ("batch_size", True, "batch size .* at least 1"),
        ("loss", None, "loss of the workload 'synthetic' cannot be called"),
        ("evaluate", 3, "neither a function nor None"),
        ("train", [], "is empty"),
        ("train", iter([1]), "cannot be shared out by index"),
    ],
)
def test_a_workload_that_cannot_work_is_refused(field, value, message) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(good(), **{field: value})


MODULE = """
from neighbour_{n} import VALUE
from guozhuang.workloads import load
def plain():
    return load("synthetic", {{"seq_len": 4}})
def with_options(options):
    return load("synthetic", {{"seq_len": int(options.get("len", VALUE))}})
def optional(options=None):
    return load("synthetic", options or {{}})
def two(a, b): pass
def keyword(*, a): pass
def wrong(): return 3
broken = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request) -> str:
    number = abs(hash(request.node.name)) % 10**9
    (tmp_path / f"mine_{number}.py").write_text(MODULE.format(n=number))
    (tmp_path / f"neighbour_{number}.py").write_text("VALUE = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return f"mine_{number}"


def test_a_users_own(module) -> None:
    assert load(f"{module}:plain").details["sequence length"] == 4
    assert load(f"{module}:with_options").details["sequence length"] == 5
    assert load(f"{module}:with_options", {"len": "7"}).details["sequence length"] == 7
    assert load(f"{module}:optional", {"seq_len": "6"}).details["sequence length"] == 6
    for function, told, message in [
        ("plain", {"a": "1"}, "takes no options"),
        ("two", {}, "needs other arguments"),
        ("keyword", {}, "needs other arguments"),
        ("wrong", {}, r"did not return .*got 'int'"),
        ("broken", {}, "has no function broken.*plain, with_options"),
        ("missing", {}, "has no function missing"),
        ("", {}, "give both names"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(f"{module}:{function}", told)


def test_missing_modules_are_told_from_broken_ones(module, tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no module named nowhere_at_all"):
        load("nowhere_at_all:f")
    next(Path(tmp_path).glob("neighbour_*")).unlink()
    with pytest.raises(
        UsageError, match=rf"importing {module} raised ModuleNotFoundError at .*{module}\.py:\d+.*neighbour"
    ):
        load(f"{module}:plain")


def test_a_workload_function_that_raises_is_named_with_the_place(tmp_path, monkeypatch) -> None:
    (tmp_path / "raising_workload.py").write_text("def broken():\n    raise KeyError('my own')\n")
    (tmp_path / "unreadable_workload.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"raising_workload:broken raised KeyError at .*raising_workload\.py:2"):
        load("raising_workload:broken")
    with pytest.raises(
        UsageError, match=r"importing unreadable_workload raised SyntaxError at .*unreadable_workload\.py:1"
    ):
        load("unreadable_workload:broken")

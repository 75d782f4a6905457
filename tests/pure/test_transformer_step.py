"""The time of a training step by layout: published trainings that no coefficient was fitted to, limits, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.step import A100, MeasuredStep, StepCost, fit, step
from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError

SELENE = "8xA100-80,ib=8x200gbit"


def seconds(name: str, nodes: int, **layout: Any) -> float:
    return step(Transformer.parse(name), cluster=parse_cluster(f"{nodes}x{SELENE}"), **layout).seconds


# name, nodes, layout, published seconds, how far off
PUBLISHED: list[tuple[str, int, dict[str, Any], float, float]] = [
    ("megatron-22b", 1, {"tensor": 8, "global_batch": 4, "micro_batch": 4, "recompute": "full"}, 1.42, 0.05),
    (
        "megatron-22b",
        1,
        {"tensor": 8, "global_batch": 4, "micro_batch": 4, "recompute": "selective", "sequence_parallel": True},
        1.10,
        0.05,
    ),
    (
        "gpt3-175b",
        8,
        {"tensor": 8, "pipeline": 8, "interleave": 3, "global_batch": 64, "recompute": "full"},
        18.13,
        0.05,
    ),
    (
        "megatron-530b",
        35,
        {"tensor": 8, "pipeline": 35, "interleave": 3, "global_batch": 280, "recompute": "full"},
        49.05,
        0.08,
    ),
]


@pytest.mark.parametrize(("name", "nodes", "layout", "published", "near"), PUBLISHED)
def test_published_trainings_on_a100(
    name: str, nodes: int, layout: dict[str, Any], published: float, near: float
) -> None:
    assert seconds(name, nodes, **layout) == pytest.approx(published, rel=near)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tensor", "pipeline", "gpus", "batch", "published"),
    [
        (40, 6144, 48, 8, 1, 256, 1024, 135),
        (80, 12288, 96, 8, 8, 1536, 2304, 148),
        (96, 16384, 128, 8, 16, 1920, 2160, 155),
        (128, 25600, 160, 8, 64, 3072, 3072, 163),
    ],
)
def test_published_rates_on_thousands_of_a100(
    layers: int, hidden: int, heads: int, tensor: int, pipeline: int, gpus: int, batch: int, published: float
) -> None:
    model, cluster = Transformer(layers, hidden, heads, 2048, 51200), parse_cluster(f"{gpus // 8}x{SELENE}")
    ways: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "data": gpus // tensor // pipeline}
    costs = [
        step(model, cluster=cluster, global_batch=batch, micro_batch=b, recompute="full", **ways)
        for b in (1, 2, 4, 8)
        if batch % (ways["data"] * b) == 0
    ]
    best = min(cost.seconds for cost in costs)
    assert model.flops(batch, "full") / best / gpus / 1e12 == pytest.approx(published, rel=0.04)
    assert (hidden <= 12288) or any("hidden" in reason for reason in costs[0].widened)


@pytest.mark.parametrize(
    ("shape", "cluster", "batch", "micro_batch", "recompute", "flash", "published", "near"),
    [
        ((24, 2048, 16, 2048, 50368), "16x8xA100-40,1600gbit", 2560, 10, "none", True, 2.197, 0.1),
        ((40, 5120, 40, 2048, 50368), "16x8xA100-40,1600gbit", 4096, 16, "full", True, 33.2, 0.1),
        ((80, 8192, 64, 2048, 50368), "16x8xA100-40,1600gbit", 1024, 4, "full", True, 43.6, 0.1),
    ],
)
def test_published_trainings_with_sharded_weights(
    shape: tuple[int, ...],
    cluster: str,
    batch: int,
    micro_batch: int,
    recompute: str,
    flash: bool,
    published: float,
    near: float,
) -> None:
    on, model = parse_cluster(cluster), Transformer(*shape)
    layout: dict[str, Any] = {
        "data": on.num_ranks,
        "sharding": 3,
        "overlap": True,
        "recompute": recompute,
        "flash": flash,
    }
    cost = step(model, cluster=on, global_batch=batch, micro_batch=micro_batch, **layout)
    assert cost.seconds == pytest.approx(published, rel=near)


def test_parts_add_up_and_answer_to_their_cause() -> None:
    model, cluster = Transformer.parse("megatron-39.1b"), parse_cluster(f"8x{SELENE}")
    layout: dict[str, Any] = {"tensor": 4, "pipeline": 4, "data": 4, "global_batch": 128, "micro_batch": 1}
    base = step(model, cluster=cluster, **layout)
    assert base.seconds == pytest.approx(sum(base.parts.values()))
    assert min(base.parts.values()) >= 0 and not base.widened
    interleaved = step(model, cluster=cluster, interleave=4, **layout)
    assert interleaved.parts["bubble"] == pytest.approx(base.parts["bubble"] / 4)
    assert interleaved.parts["stages"] > base.parts["stages"]
    assert step(model, cluster=cluster, recompute="full", **layout).parts["compute"] > 1.3 * base.parts["compute"]
    assert step(model, cluster=cluster, flash=True, **layout).parts["compute"] < base.parts["compute"]
    assert step(model, cluster=cluster, overlap=True, **layout).parts["data"] < base.parts["data"]
    slow = parse_cluster("8x8xA100-80,25gbit")
    assert step(model, cluster=slow, **layout).parts["data"] > 10 * base.parts["data"]
    assert step(model, cluster=slow, **layout).parts["tensor"] == base.parts["tensor"]
    sharded = step(model, cluster=slow, **layout, sharding=3)
    assert sharded.parts["optimizer"] < base.parts["optimizer"] and sharded.parts["data"] > 0
    small = step(Transformer(24, 1024, 16, 1024, 51200), cluster=parse_cluster("1x8xA100-80"), tensor=8, global_batch=4)
    assert small.parts["host"] > small.parts["compute"] + small.parts["tensor"]
    other = step(model, cluster=parse_cluster("8x8xH100,ib=8x400gbit"), **layout)
    assert other.seconds < base.seconds and any("A100-80" in reason for reason in other.widened)


def test_data_ways_send_what_each_stage_of_sharding_must() -> None:
    model, cluster = Transformer.parse("megatron-3.6b"), parse_cluster("64x8xA100-80,100mbit/0s")  # the network is all
    sent = {}
    for sharding in range(4):
        for batch in (512, 2048):
            layout: dict[str, Any] = {"data": 512, "global_batch": batch, "sharding": sharding, "kept": "fp32"}
            c = dataclasses.replace(A100, gathers=1.0, data=1.0)
            cost = step(model, cluster=cluster, coefficients=c, **layout)
            sent[sharding, batch // 512] = (
                cost.parts["data"] * cluster.between.bytes_per_s / 8 / (4 * model.parameters / 8)
            )
            assert any("set by hand" in text for text in cost.widened) == (sharding >= 2)
    for sharding in (0, 1):
        assert sent[sharding, 1] == sent[sharding, 4] == pytest.approx(2, rel=0.02)
    for micro_batches in (1, 4):
        assert sent[2, micro_batches] == pytest.approx(2 * micro_batches, rel=0.02)
        assert sent[3, micro_batches] == pytest.approx(3 * micro_batches, rel=0.02)


def test_latency_and_measured_all_reduces_count(tmp_path: Path) -> None:
    model = Transformer.parse("gpt2")
    layout: dict[str, Any] = {"data": 64, "global_batch": 64}

    def data_s(words: str, **more: Any) -> StepCost:
        cluster = parse_cluster(f"8x8xA100-80,{words}", read=lambda name: (tmp_path / name).read_text())
        return step(model, cluster=cluster, **(layout | more))

    near, far = data_s("ib=200gbit"), data_s("ib=200gbit/2ms")
    assert far.parts["data"] - near.parts["data"] == pytest.approx(2 * 3 * (2e-3 - 20e-6), rel=0.01)
    small, large = (data_s("ib=200gbit/2ms", overlap=True, bucket_bytes=size * 2**20) for size in (1, 100))
    assert small.parts["data"] > large.parts["data"], "each bucket waits"
    tensor = {"data": 4, "tensor": 4, "pipeline": 4, "global_batch": 4}
    assert data_s("ib=200gbit/2ms", **tensor).parts["stages"] > data_s("ib=200gbit", **tensor).parts["stages"]
    (tmp_path / "t.csv").write_text("bytes,seconds,ranks\n100000000,1,64\n400000000,4,64\n")
    found = data_s("ib=200gbit,t.csv")
    assert found.parts["data"] == pytest.approx(2 * model.parameters / 1e8, rel=0.1)
    assert not any("outside of the sizes" in text for text in found.widened)
    assert any("outside of the sizes" in text for text in data_s("ib=200gbit,t.csv", data=16, pipeline=4).widened)


def test_layers_that_do_not_divide_wait_for_the_longest_stage() -> None:
    layout: dict[str, Any] = {"pipeline": 4, "global_batch": 64, "cluster": parse_cluster("1x4xA100-80")}
    times = [step(Transformer(n, 4096, 32, 2048, 1024), **layout).seconds for n in (12, 13, 15, 16)]
    assert times == sorted(times)
    assert times[1] - times[0] > 0.7 * (times[3] - times[0])  # 4 layers on the longest stage, for 13 as for 16


def test_a_fit_finds_the_coefficients_that_made_the_times_and_survives_one_wrong_row() -> None:
    truth = dataclasses.replace(A100, host_s=2e-3, matmul=0.86, data=0.3)
    measured: list[MeasuredStep] = []
    for tensor, data, micro_batch in ((1, 8, 1), (1, 8, 8), (2, 4, 2), (2, 4, 8), (4, 2, 4), (8, 1, 1), (8, 1, 8)):
        for layers, hidden in ((12, 1024), (24, 4096)):
            model = Transformer(layers, hidden, 16, 1024, 51200)
            layout: dict[str, Any] = {"tensor": tensor, "data": data, "micro_batch": micro_batch, "global_batch": 64}
            cluster = parse_cluster("1x8xA100-80")
            exact = step(model, cluster=cluster, coefficients=truth, **layout).seconds
            measured.append(MeasuredStep(model, cluster, layout, exact * (1.02 if len(measured) % 2 else 0.98)))
    measured[3] = dataclasses.replace(measured[3], seconds=1.8 * measured[3].seconds)
    found = fit(measured, "A100-80")
    for number, row in enumerate(measured):
        if number != 3:
            predicted = step(row.model, cluster=row.cluster, coefficients=found, **row.layout).seconds
            assert predicted == pytest.approx(row.seconds, rel=0.06)
    assert found.host_s == pytest.approx(2e-3, rel=0.1)
    assert {name: (low, high) for name, low, high in found.ranges}["tensor"] == (1, 8)
    with pytest.raises(UsageError, match="no measured step"):
        fit([])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": 3}, "do not multiply to the number of devices, 64"),
        ({"global_batch": 100}, "not a multiple of data"),
        ({"micro_batch": 0}, "micro_batch is a positive number"),
        ({"tensor": 64, "data": 1, "global_batch": 64}, "heads"),
        ({"tensor": 1, "pipeline": 64, "data": 1}, "more stages than layers"),
        ({"interleave": 2}, "cannot be interleaved"),
        ({"recompute": "some"}, "recompute"),
        ({"sharding": 4}, "sharding"),
        ({"precision": "fp8"}, "no peak"),
        ({"cluster": parse_cluster("64x8cores,ranks=1,10gbit")}, "has none"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    layout: dict[str, Any] = {
        "tensor": 4,
        "pipeline": 1,
        "data": 16,
        "global_batch": 64,
        "cluster": parse_cluster(f"8x{SELENE}"),
    }
    with pytest.raises(UsageError, match=told):
        step(Transformer.parse("megatron-3.6b"), **(layout | change))

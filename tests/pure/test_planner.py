"""The planner: which layouts are looked at, which is chosen, why the others lost, what a budget buys."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from guozhuang import cli
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.memory import ERROR, USABLE
from guozhuang.cost.prediction import Prediction
from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError
from guozhuang.lab.planner import arguments, command, workload
from guozhuang.lab.planner.prices import MOST_NODES, amount, limits_of, listed_machine, purchases, read_prices
from guozhuang.lab.planner.reasons import mark, obstacle
from guozhuang.lab.planner.running import training_plan
from guozhuang.lab.planner.search import (
    ALIKE,
    CAPS_MB,
    EXCHANGES,
    FAMILIES,
    Arrangement,
    Candidate,
    arrangements,
    memory_of,
    pareto,
    search,
)
from guozhuang.lab.planner.training import count, phases_of, simplest
from guozhuang.lab.predict.table import Row
from guozhuang.launch.options.plan_file import read_plan
from guozhuang.parallel.prepare import SCHEDULES
from guozhuang.strategies import STRATEGIES
from guozhuang.world.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
MACHINE = str(ROOT / "examples" / "prices" / "machine-2022.csv")
RENT = str(ROOT / "examples" / "prices" / "rent-2026.toml")
BERT = Transformer.parse("bert-large")
ON = ["--on", "8xA100-80", "--batch", "16"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert command.execute(arguments.parser().parse_args([*words, "--json"])) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        command.execute(arguments.parser().parse_args(list(words)))
    assert "Fix:" in str(caught.value)
    return str(caught.value)


def test_every_layout_that_can_be_is_looked_at() -> None:
    model, cluster = Transformer.parse("L6,h64,a4,s16,V100"), parse_cluster("2x4xA100-80,ib=200gbit")
    found = set(arrangements(model, cluster, 12))
    assert {each.cap_mb for each in found} == {25.0}, "its gradients are less than 1 MiB"
    expected = {
        Arrangement(8, t, p, d, stage, v, 12, b, recompute, exchange=exchange)
        for t in (1, 2, 4)  # 8 would leave the node
        for p in (1, 2)  # 4 and 8 do not divide 6 layers
        for d in [8 // t // p]
        if 12 % d == 0
        for b in range(1, 13)
        if 12 % (d * b) == 0
        for v in (1, 3)
        if v == 1 or (p > 1 and 12 // d // b % p == 0)
        for stage in (range(4) if d > 1 else (0,))
        for recompute in ("none", "selective", "full")
        for exchange in (EXCHANGES if t * p == 1 and stage == 0 and d > 1 else ("all-reduce",))
    }
    assert found == expected and len(found) > 100
    for each in found:
        assert each.tensor * each.pipeline * each.data == 8
        assert each.num_micro_batches * each.micro_batch * each.data == 12


def test_nothing_that_runs_out_of_memory_is_recommended() -> None:
    cluster = parse_cluster("8xA100-80")
    found = search(BERT, cluster, [64], 5 * 2**30)
    most = USABLE * 5 * 2**30 / (1 + ERROR)
    assert found.fitting and all(one.memory_bytes <= most for one in found.fitting)
    assert all(each.memory_bytes > most for each in found.overflows.values())
    assert {one.arrangement.cap_mb for one in search(BERT, cluster, [64], 80 * 2**30).fitting} == set(CAPS_MB)
    assert "pure data parallel (ddp)" in found.overflows, "16 bytes a parameter are more than that"
    assert found.num_points > len(found.fitting) and not found.impossible
    times = [one.step_s for one in found.fitting]
    assert times == sorted(times) and all(abs(sum(one.parts.values()) / one.step_s - 1) < 1e-9 for one in found.fitting)


def candidate(step_s: float, memory: float, batch: int = 8, **more: Any) -> Candidate:
    arrangement = Arrangement(8, 1, 1, 8, 0, 1, batch, 1, "none")._replace(**more)
    return Candidate(arrangement, parse_cluster("8xA100-80"), step_s, {"compute": step_s}, {"weights": memory})


def test_the_front_has_what_nothing_beats_and_the_simplest_of_equals_is_chosen() -> None:
    fast, small, beaten, twin = candidate(1.0, 8), candidate(2.0, 4), candidate(2.5, 5), candidate(1.0, 8)
    large_batch = candidate(1.5, 6, batch=16)
    assert pareto([beaten, small, fast, twin, large_batch], [0.0] * 5) == [large_batch, small]
    assert pareto([beaten, small, fast], [0.1, 1.0, 1.0]) == [fast, small, beaten]
    complex_one = candidate(1.0, 8, tensor=2, data=4)
    assert simplest([complex_one, candidate(1 + ALIKE / 2, 9), candidate(1 + 2 * ALIKE, 1)]) == candidate(
        1 + ALIKE / 2, 9
    )
    assert simplest([]) is None


@pytest.mark.parametrize(
    ("changes", "strategy", "layout", "schedule"),
    [
        ({}, "ddp", None, None),
        ({"sharding": 1}, "sharded", None, None),
        ({"sharding": 2}, "sharded-gradients", None, None),
        ({"sharding": 3}, "sharded-weights", None, None),
        ({"tensor": 8, "data": 1}, "hybrid", "tp=8", None),
        ({"tensor": 2, "data": 4}, "hybrid", "dp=4,tp=2", None),
        ({"tensor": 2, "data": 4, "sharding": 1}, "sharded", "dp=4,tp=2", None),
        ({"pipeline": 2, "tensor": 2, "data": 2, "interleave": 2}, "hybrid", "pp=2,dp=2,tp=2", "interleaved"),
        ({"pipeline": 8, "data": 1}, "hybrid", "pp=8", "1f1b"),
        ({"num_ranks": 1, "data": 1}, "single", None, None),
    ],
)
def test_a_plan_has_the_options_of_a_run(
    changes: dict[str, int], strategy: str, layout: str | None, schedule: str | None
) -> None:
    one = candidate(1.0, 8, **changes)
    plan = training_plan(one, "autocast", False, "it is fast")
    assert (plan.strategy, plan.layout, plan.schedule) == (strategy, layout, schedule)
    assert strategy in STRATEGIES and schedule in (None, *SCHEDULES)
    sizes = Layout.parse(plan.layout, strategy, one.arrangement.num_ranks)
    wanted = one.arrangement
    assert (sizes.pp, sizes.dp, sizes.tp) == (wanted.pipeline, wanted.data, wanted.tensor)
    assert plan.microbatches == (wanted.num_micro_batches if wanted.pipeline > 1 else None)
    assert plan.in_the_script and plan.date and "fast" in plan.why


def test_what_a_run_cannot_do_is_marked_and_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in range(4):
        both = Arrangement(8, 2, 1, 4, stage, 1, 8, 1, "none")
        assert bool(obstacle(both)) == (stage > 1)
    assert mark(candidate(1.0, 8, exchange="bf16").arrangement) == "inexact"
    found = answer(capsys, "--model", "gpt3-175b", "--on", "8x8xA100-80,ib=800gbit", "--batch", "128")
    (phase,) = found["phases"]
    assert not obstacle(Arrangement(**{name: phase["chosen"][name] for name in Arrangement._fields}))
    assert phase["chosen"]["memory_bytes"] <= phase["limit_bytes"]
    reasons = phase["why_not"]
    assert "runs out of memory by" in reasons["pure data parallel (ddp)"]
    winner = Arrangement(**{name: phase["chosen"][name] for name in Arrangement._fields}).family
    assert reasons.keys() == set(FAMILIES) - {winner} and all(reasons.values())


def test_a_plan_is_a_file_that_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert (
        cli.main(["plan", "--model", "bert-large", *ON, "--samples", "1M", "--prices", RENT, "--out", str(file)]) == 0
    )
    said = capsys.readouterr().out
    assert f"guozhuang run --plan {file} train.py" in said and "Why not" in said and "2026-03-10" in said
    plan = read_plan(str(file))
    assert plan.num_ranks == 8 and plan.prediction["step_s"] > 0 and plan.prediction["money"] > 0
    assert "The whole training:" in said and "save a checkpoint every" in said


def test_phases_follow_each_other_and_failures_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large,s128", "--model", "bert-large", "--samples", "461M", "--samples", "51M", *ON]
    both = answer(capsys, *words)
    one = answer(capsys, "--model", "bert-large", "--tokens", f"{51_000_000 * 512}", *ON)
    assert len(both["phases"]) == 2 and both["seconds"] > 3 * one["seconds"] > 0
    assert answer(capsys, *words, "--mtbf", "50")["seconds"] > 1.05 * both["seconds"]
    larger = answer(capsys, "--model", "bert-large", "--on", "8xA100-80", "--batch", "8", "--noise-batch", "32")
    assert larger["phases"][0]["chosen"]["batch"] in (16, 32, 64), "batches up to twice the critical one are tried"


def test_clusters_are_compared_and_a_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large", "--samples", "10M", "--prices", RENT, *ON, "--on", "8xH100"]
    fast = answer(capsys, *words)
    assert fast["cluster"] == "8xH100" and fast["num_ranks"] == 8 and fast["prices"]["date"] == "2026-03-10"
    least = min(one["money"] for one in fast["clusters"])
    cheap = answer(capsys, *words, "--budget", f"{least + 0.01:.2f}USD")
    assert cheap["money"] <= least + 0.01 and cheap["seconds"] > fast["seconds"]
    assert f"raise the budget to {math.ceil(least):,}USD" in refused(*words, "--budget", "1USD")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "8xA100-80"], "nothing says what is to be trained"),
        (["--model", "bert-large", "--batch", "8"], "nothing says where"),
        (["--model", "bert-large", "--on", "8xA100-80"], "--batch is missing"),
        (["--model", "bert-large", "--on", "8xA10O-80", "--batch", "8"], "A100"),
        (["--model", "bert-larg", *ON], "bert-large"),
        (["--model", "bert-large", "--on", "2x4cores,10gbit", "--batch", "8"], "give --workload or --profile"),
        (["--model", "bert-large", *ON, "--ranks", "16"], "numbers of ranks from 1 to 8"),
        (["--model", "bert-large", *ON, "--samples", "many"], "--samples is a count (got 'many')"),
        (["--model", "bert-large", *ON, "--samples", "1", "--tokens", "1"], "both given"),
        (["--model", "bert-large", *ON, "--samples", "1", "--samples", "2"], "2 times for 1 phases"),
        (["--model", "gpt3-175b", *ON, "--rate", "1"], "--rate is of one device, and gpt3-175b does not fit there"),
        (["--model", "bert-large", *ON, "--mtbf", "0"], "--mtbf is a time above 0"),
        (["--model", "bert-large", *ON, "--mtbf", "inf"], "--mtbf is a time above 0"),
        (["--model", "bert-large", *ON, "--restart-time", "nan"], "--restart-time is a time"),
        *((["--model", "bert-large", *ON, "--noise-batch", each], "--noise-batch is a number of samples above 0")
          for each in ("inf", "nan", "0", "-4")),
        (["--model", "bert-large", "--on", "8xA100-80", "--batch", "1e15"], "up to 1,073,741,824"),
        (["--model", "bert-large", *ON, "--top", "0"], "--top is a number"),
        (["--model", "bert-large", *ON, "--strategy", "ddp"], "--strategy says nothing where --model is planned"),
        (["--model", "bert-large", "--batch", "8", "--prices", MACHINE, "--ranks", "2"], "--ranks says nothing"),
        (["--model", "bert-large", *ON, "--on", "8xH100", "--rate", "90"], "say of which: --rate 90@A100-80"),
        (["--model", "bert-large", *ON, "--measured-peak", "20GiB"], "--measured-peak 31GiB@16"),
        (["--model", "bert-large", *ON, "--measured-peak", "2GiB@16"], "not one of this training"),
        (["--model", "bert-large", *ON, "--memory-limit", "lots"], "(got '--memory-limit lots')"),
        (["--model", "bert-large", *ON, "--memory-limit", "1.2.3GiB"], "say for example --memory-limit 64GiB"),
        (["--model", "bert-large", *ON, "--memory-limit", "0GiB"], "no size of memory"),
        (["--model", "bert-large", *ON, "--measured-peak", "x@1"], "say for example --measured-peak 64GiB"),
        (["--model", "bert-large", "--on", "absent.json", "--batch", "8"], "cannot be read: No such file"),
        (["--model", "bert-large", "--on", "here", "--batch", "8"], "this machine was not measured"),
        (["--model", "bert-large", *ON, "--out", "absent/plan.json"], "--out is no file of an existing folder"),
        (["--model", "bert-large", *ON, "--out", RENT], "this is no plan"),
        (["--workload", "text", "--on", "here", "--precision", "fp32"], "--precision is for --model"),
        (["--workload", "text", "--on", "here", "--mtbf", "5"], "--mtbf is for --model"),
        (["--model", "bert-large", *ON, "--budget", "5USD"], "--budget needs prices"),
        (["--model", "bert-large", *ON, "--budget", "5EUR", "--prices", RENT], "in EUR, and the prices of"),
        (["--model", "bert-large", *ON, "--budget", "much", "--prices", RENT], "amount of money with its currency"),
        (["--model", "bert-large", *ON, "--budget", "5USD", "--prices", RENT], "give --samples or --tokens"),
        (["--model", "bert-large", "--on", "8xT4", "--batch", "8", "--prices", RENT], "no rent of the device T4"),
        (["--model", "bert-large", "--batch", "8", "--budget", "5CNY", "--prices", MACHINE], "machine costs 371,800"),
        (["--model", "gpt3-175b", *ON], "take 8 nodes"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(words: list[str], said: str) -> None:
    assert said in refused(*words)


def test_a_model_that_fits_nowhere_names_the_smallest_change() -> None:
    text = refused("--model", "gpt3-175b", *ON)
    assert "fits into no layout of 8 ranks" in text and "runs out of memory by" in text
    nodes = int(text.partition("take ")[2].split()[0])
    fits = search(Transformer.parse("gpt3-175b"), parse_cluster(f"{nodes}x8xA100-80,ib=800gbit"), [16], 80 * 2**30)
    fewer = search(
        Transformer.parse("gpt3-175b"), parse_cluster(f"{nodes // 2}x8xA100-80,ib=800gbit"), [16], 80 * 2**30
    )
    assert fits.fitting and not fewer.fitting


def test_the_list_of_a_machine_is_checked() -> None:
    prices = read_prices(MACHINE)
    assert (prices.date, prices.currency) == ("2022-01-01", "CNY")
    machine, findings = listed_machine(prices, 1_000_000)
    assert machine.price == 994_400 and machine.count("memory") == 16
    text = "\n".join(findings)
    assert "With 16 the machine costs 994,400." in text and "With 32 the machine costs 1,042,400, 42,400 over" in text
    assert "32 memory modules do not fit: the processors of a node have 16 slots" in text
    assert "64 lanes" in text and "4 devices take 64, 3 drives take 12: 12 too many" in text
    assert "No network card" in text and len(findings) == 4


def test_machines_are_made_of_what_can_be_bought(tmp_path: Path) -> None:
    found = purchases(read_prices(MACHINE), 2_000_000)
    assert [one.price for one in found] == sorted(one.price for one in found)
    counts = {one.count("device"): one for one in found}
    assert set(counts) == {1, 2, 4, 8} and all(one.num_nodes == 1 for one in found), "there is no network card to buy"
    assert (
        counts[8].count("processor") == 2 and counts[8].price == 8 * 190_000 + 2 * 95_000 + 3_800 + 6 * 3_000 + 80_000
    )
    assert counts[4].lanes_short == 4 and "1 drive takes 4" in str(limits_of(counts[4]))
    rows = Path(MACHINE).read_text() + "2022-01-01,CNY,network,a card of 100 Gbit/s,,5000,,,16,,,100,,\n"
    (tmp_path / "p.csv").write_text(rows)
    several = [one for one in purchases(read_prices(str(tmp_path / "p.csv")), 4_000_000) if one.num_nodes > 1]
    assert several and all(one.count("network") == 1 and one.description.endswith(",100gbit") for one in several)
    assert parse_cluster(several[0].description).num_nodes == several[0].num_nodes


def test_a_budget_that_is_too_small_ends_though_more_nodes_always_cost_more(tmp_path: Path) -> None:
    free = "2022-01-01,CNY,{},{},{},{},,,16,,,100,,\n".format
    rows = "date,currency,kind,name,device,price,count,total,lanes,slots,gigabytes,gbit,devices,sockets\n"
    rows += free("device", "A100", "A100-80", 0) + free("network", "card", "", 0)
    (tmp_path / "free.csv").write_text(rows)
    found = purchases(read_prices(str(tmp_path / "free.csv")), 1.0)
    assert max(one.num_nodes for one in found) == MOST_NODES
    rows = Path(MACHINE).read_text() + "2022-01-01,CNY,network,card,,5000,,,16,,,100,,\n"
    (tmp_path / "p.csv").write_text(rows)
    words = ["--model", "bert-large", "--batch", "8", "--budget", "5CNY", "--prices", str(tmp_path / "p.csv")]
    assert "the cheapest machine costs 371,800 CNY" in refused(*words)


def test_a_rate_says_on_which_device_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large", *ON, "--on", "8xH100"]
    plain, rated = answer(capsys, *words), answer(capsys, *words, "--rate", "90@A100-80")
    by_name = [{one["cluster"]: one["samples_per_s"][0] for one in each["clusters"]} for each in (plain, rated)]
    slower = {name: by_name[0][name] / by_name[1][name] for name in by_name[0]}
    assert slower["8xA100-80"] == pytest.approx(slower["8xH100"], rel=0.05) and slower["8xH100"] < 0.95, (
        "90 is faster than by the formula"
    )
    assert any("--rate was measured on A100-80" in text for text in rated["phases"][0]["chosen"]["widened"])


def test_a_measured_peak_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large", "--on", "8xA100-80", "--batch", "256", "--memory-limit", "24GiB"]
    alone = sum(memory_of(BERT, Arrangement(1, 1, 1, 1, 0, 1, 8, 8, "none")).values())
    by_formula, more, less = (
        answer(capsys, *words, *(["--measured-peak", f"{alone * share / 2**20:.0f}M@8"] if share else ()))["phases"][0]
        for share in (0, 1.5, 0.8)
    )
    assert more["num_fitting"] < by_formula["num_fitting"] < less["num_fitting"]
    assert all(each["memory_bytes"] <= more["limit_bytes"] / 1.02 for each in more["front"])


def test_the_front_has_money_over_all_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large", "--prices", RENT, *ON, "--on", "8xH100"]
    front = answer(capsys, *words)["phases"][0]["front"]
    rows = [(each["step_s"] / each["batch"], each["memory_bytes"], each["money_per_sample"]) for each in front]
    assert {each["cluster"] for each in front} == {"8xA100-80", "8xH100"} and len(
        {each["num_ranks"] for each in front}
    ) > 1
    assert rows == sorted(rows) and min(each[2] for each in rows) < rows[0][2], "what is slower may cost less"
    for one in rows:
        assert not any(all(a <= b for a, b in zip(other, one, strict=True)) for other in rows if other is not one)
    assert command.execute(arguments.parser().parse_args(words)) == 0
    assert "and money (Pareto)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["--precision", "fp32"], {}, ["weights in float32", 'set_float32_matmul_precision("high")']),
        ([], {}, ['torch.autocast("cuda", torch.bfloat16)']),
        ([], {"recompute": "full"}, ["torch.bfloat16, cache_enabled=False)", "checkpoint.checkpoint"]),
        ([], {"micro_batch": 1, "batch": 32}, ["every 4 batches, all but the last in no_sync()"]),
        ([], {"micro_batch": 1, "batch": 32, "sharding": 3}, ["without no_sync(): gradients are scattered after each"]),
        (["--flash"], {}, ["scaled_dot_product_attention"]),
    ],
)
def test_the_script_is_told_what_bytes_and_time_were_computed_for(
    words: list[str], changes: dict[str, Any], said: list[str]
) -> None:
    found = arguments.parser().parse_args(words)
    plan = training_plan(candidate(1.0, 8, **changes), found.precision, found.flash, "")
    text = "; ".join(plan.in_the_script)
    assert all(each in text for each in said), text
    assert ("autocast" in text) == (found.precision == "autocast")
    old = Candidate(candidate(1.0, 8).arrangement, parse_cluster("8xV100-32"), 1.0, {}, {})
    assert "torch.float16" in "; ".join(training_plan(old, "autocast", False, "").in_the_script)


def test_a_cap_is_an_option_of_the_run() -> None:
    plan = training_plan(candidate(1.0, 8, cap_mb=100.0), "autocast", False, "")
    assert plan.bucket_cap_mb == 100 and "--bucket-cap-mb 100" in plan.command()
    assert training_plan(candidate(1.0, 8), "autocast", False, "").bucket_cap_mb is None


def test_the_file_of_a_plan_is_no_folder_of_a_report() -> None:
    found = arguments.parser().parse_args(["--workload", "text", "--on", "here", "--out", "plan.json"])
    assert workload._as_predict_has_it(found).out is None


def test_a_budget_is_answered_with_days(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large,s128", "--model", "bert-large", "--samples", "461M", "--samples", "51M"]
    words += ["--batch", "2048", "--batch", "1024", "--budget", "1000000CNY", "--prices", MACHINE]
    words += ["--rate", "580", "--rate", "210"]  # measured on one A100
    found = answer(capsys, *words)
    best = found["optima"]
    assert best["fastest"]["price"] <= 1_000_000 < found["next_better"]["price"]
    assert best["cheapest that fits"]["price"] == 371_800 < best["fastest"]["price"]
    assert best["fastest"]["seconds"] == pytest.approx(3.0 * 86_400, rel=0.03), "about three days"
    assert found["next_better"]["seconds"] < best["fastest"]["seconds"]
    assert found["listed"]["price"] == 994_400 and len(found["listed"]["findings"]) == 4
    command.execute(arguments.parser().parse_args(words))
    said = capsys.readouterr().out
    assert "CNY per day saved" in said and "cheapest per training" in said and "left of the budget" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('currency = "USD"\nrent = [{device = "H100", per_hour = 3}]', "prices without a date"),
        ('date = "soon"\ncurrency = "USD"', "the date of prices cannot be read (got 'soon')"),
        ("date = 2026-01-01", "needs one currency"),
        ('date = 2026-01-01\ncurrency = "USD"\nrent = [{device = "H1O0", per_hour = 3}]', "did you mean H100"),
        ('date = 2026-01-01\ncurrency = "USD"\nrent = [{device = "H100"}]', "H100 has no per_hour"),
        ('date = 2026-01-01\ncurrency = "USD"\npart = [{name = "x", kind = "gpu", price = 1}]', "of no known kind (got 'gpu')"),
        ('date = 2026-01-01\ncurrency = "USD"\npart = [{name = "x", kind = "drive"}]', "x has no price"),
        ('date = 2026-01-01\ncurrency = "USD"\npart = [{name = "x", kind = "drive", price = "dear"}]', "price is no number"),
        ('date = 2026-01-01\ncurrency = "USD"\npart = [{name = "x", kind = "drive", price = 1, size = 2}]', "(got 'size')"),
        ('date = 2026-01-01\ncurrency = "USD"\npart = 1', "part is no list of tables, [[part]] (got 1)"),
        ('date = 2026-01-01\ncurrency = "USD"\nrent = ["H100"]', "rent is no list of tables"),
        ('date = 2026-01-01\ncurrency = "USD"\nprice = 3', "unknown entry (got 'price')"),
        ("date = ", "cannot be read"),
    ],
)  # fmt: skip
def test_prices_that_cannot_be_used_are_refused_with_their_file(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(content)
    with pytest.raises(UsageError) as caught:
        read_prices(str(tmp_path / "prices.toml"))
    assert said in str(caught.value) and "Fix:" in str(caught.value)
    assert "H1O0" in content or "prices.toml" in str(caught.value)


def test_a_price_beyond_the_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("kind,device,per_hour,date,currency\nrent,H100,3,2026-01-01,USD,4\n")
    with pytest.raises(UsageError, match=r"prices.csv cannot be read: .* values beyond the columns .*\['4'\]"):
        read_prices(str(tmp_path / "prices.csv"))


def test_counts_and_amounts() -> None:
    assert [count("--samples", text) for text in ("461M", "65,536", "3e11", "0.5k", "300B")] == [
        461e6,
        65536,
        3e11,
        500,
        3e11,
    ]
    assert [amount(text) for text in ("1000000CNY", "5,000 usd", "1.2MEUR")] == [
        (1e6, "CNY"),
        (5e3, "USD"),
        (1.2e6, "EUR"),
    ]
    (phase,) = phases_of(["bert-large"], ["64"], None, ["512k"])
    assert phase.samples == 1000


def row(strategy: str, num_ranks: int, step_s: float, memory: float | None = 1e9, **parts: float) -> Row:
    found = Prediction(
        strategy=strategy, num_ranks=num_ranks, batch_size=8, step_s=step_s, parts=parts or {"backward": step_s},
        bounds=(step_s, step_s), interval_s=(0.9 * step_s, 1.1 * step_s), perfect_s=step_s, largest_term="backward",
        doubts=(), memory_bytes=memory, interval_source="",
    )  # fmt: skip
    return Row(strategy, num_ranks, found)


def test_of_what_was_predicted_the_fastest_exact_strategy_that_fits_is_chosen() -> None:
    cluster = parse_cluster("2x2cores,1gbit,gloo")
    rows = [
        row("none", 4, 0.1),
        row("quantize8", 4, 0.15),
        row("ddp", 4, 0.2, exchange=0.1, backward=0.1),
        row("ddp", 1, 0.08),
    ]
    assert workload.choose(rows) is rows[2], "none is no way to train, and quantize8 is not exact"
    assert workload.choose([rows[0], rows[1]]) is rows[1], "where nothing exact was asked for"
    alike = [row("sharded", 4, 0.2), row("ddp", 4, 0.2 * (1 + ALIKE / 2)), row("ddp", 2, 0.1 * (1 + ALIKE / 2))]
    assert workload.choose(alike) is alike[2], "as fast, on fewer ranks, with the strategy that is simpler"
    with pytest.raises(UsageError, match="no strategy that trains"):
        workload.choose(rows[:1])
    plan = workload.plan_of(rows[2], cluster, None)
    assert (plan.num_nodes, plan.ranks_per_node, plan.strategy, plan.threads_per_rank) == (2, 2, "ddp", 1)
    assert (
        workload.plan_of(row("single", 1, 1.0), cluster, 2).command()
        == "guozhuang run -np 1 --strategy single --threads-per-rank 2 train.py"
    )
    reasons = [workload.why_not(each, rows[2], cluster, None) for each in rows]
    assert "a bound on speed" in reasons[0] and "inexact: try it" in reasons[1] and reasons[3].startswith("1.60")
    slow = row("sharded", 4, 0.3, exchange=0.2, backward=0.1)
    assert "exchange: 3.12 ms more a sample" in workload.why_not(slow, rows[2], cluster, None)
    assert "intervals overlap" in workload.why_not(row("sharded", 4, 0.22), rows[2], cluster, None)
    assert "overlap" not in workload.why_not(row("sharded", 4, 0.3), rows[2], cluster, None)
    assert workload.overflow(rows[2], cluster, 1e9) == pytest.approx(1.05e9 - 0.9e9)
    assert "runs out of memory by 143 MiB a rank" in workload.why_not(rows[2], rows[3], cluster, 1e9)
    node = dataclasses.replace(cluster, node_memory_bytes=2e9)
    assert workload.overflow(rows[2], node, None) == pytest.approx(2 * 1.05e9 - 0.9 * 2e9), "two ranks share a node"
    assert "286 MiB a node" in workload.why_not(rows[2], rows[3], node, None)
    assert workload.overflow(row("ddp", 4, 0.2, None), cluster, 1.0) == 0, "what was not measured is not refused"

"""The options of `guozhuang run`: what a plan is made of, and what is refused before anything is started."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from guozhuang.errors import UsageError
from guozhuang.launch.hosts import options as hosts_options
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read
from guozhuang.launch.options.plan import Plan
from guozhuang.launch.options.plan_file import TrainingPlan, read_plan, write_plan
from guozhuang.world import machine
from guozhuang.world.machine import describe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "-odd.py", "a file"):
        (tmp_path / name).touch()
    return tmp_path


def plan(*arguments: str, **environ: str) -> Plan:
    return options.plan(read([*arguments, "train.py"]), environ)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "0"], "--nnodes makes no sense (got '0')"),
        (["--nnodes", "2:1"], "--nnodes"),
        (["--nnodes", "1:2:3"], "--nnodes"),
        (["--nnodes", "two"], "--nnodes"),
        (["--nnodes", "1:2"], "--rdzv-backend c10d"),
        (["--nnodes", "1:2", "--master-addr", "127.0.0.1"], "--rdzv-backend c10d"),
        (["--standalone", "--nnodes", "2"], "--standalone means this node alone"),
        (["--standalone", "--nnodes", "2:4"], "--standalone means this node alone"),
        (["--master-port", "70000"], "no TCP port"),
        (["--master-port", "-1"], "no TCP port"),
        (["--nnodes", "2", "--master-port", "0"], "no TCP port"),
        (["--rdzv-conf", "timeout=abc"], "timeout cannot be 'abc'"),
        (["--rdzv-conf", "timeout=0"], "timeout cannot be '0'"),
        (["--rdzv-conf", "timeout"], "must have a value"),
        (["--rdzv-conf", "timeuot=3"], "'timeuot' is no setting"),
        (["--nnodes", "2", "--rdzv-conf", "join_timeout=3"], "'join_timeout' is no setting of --rdzv-backend static"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "is_host=perhaps"], "write true or false"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=cloud"], "write tcp or file"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "keep_alive_interval=0.5"], "keep_alive_interval cannot be '0.5'"),
        (["--event-log-handler", "nosuch"], "--event-log-handler"),
        (["--signals-to-handle", "SIGTERM,SIGFOO"], "(got 'SIGFOO')"),
        (["--signals-to-handle", "SIGKILL"], "(got 'SIGKILL')"),
        (["--signals-to-handle", ""], "--signals-to-handle"),
        (["--signals-to-handle", "signal"], "--signals-to-handle"),
        (["--numa-binding", "node", "-np", "99"], "99 ranks have"),
        (["--local-ranks-filter", "7", "-np", "2"], "it has 2"),
        (["--local-ranks-filter", "-1", "-np", "2"], "it has 2"),
        (["--local-ranks-filter", "a"], "cannot be read"),
        (["--local-ranks-filter", "0", "--log-dir", "d"], "--tee 3"),
        (["--nnodes", "2", "--local-addr", "10.0.0.1"], "--local-addr is of no use"),
        (["--run-path", "--start-method", "fork"], "--start-method fork has no effect"),
        (["--hang-timeout", "soon"], "--hang-timeout"),
        (["--hang-timeout", "nan"], "--hang-timeout"),
        (["--hang-timeout", "-1"], "--hang-timeout"),
        (["--log-dir", "a file"], "folder for logs"),
        (["--servers", "-1"], "--servers is a count"),
        (["--threads-per-rank", "0"], "--threads-per-rank is a count"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb is a number of MiB above 0"),
        (["--bucket-cap-mb", "inf"], "--bucket-cap-mb is a number of MiB above 0"),
        (["--bucket-cap-mb", "1", "--strategy", "sharded"], "strategy sharded does not put gradients into buckets"),
        (["--bucket-cap-mb", "1", "--replace-ddp"], "the script wraps its model itself"),
        (["--plan", "nowhere.json"], "the plan nowhere.json cannot be read: No such file"),
        (["--plan", "train.py"], "this is no plan (train.py)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused(arguments: Sequence[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(*arguments)
    assert words in str(caught.value)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize("value", ["yes", "true", ""])
def test_a_variable_for_a_flag_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PET_STANDALONE", value)
    with pytest.raises(UsageError, match=f"PET_STANDALONE='{value}'"):
        plan()


def test_more_ranks_than_visible_devices_have_no_virtual_local_rank() -> None:
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES names fewer"):
        plan("-np", "3", "--virtual-local-rank", CUDA_VISIBLE_DEVICES="0,1")


@pytest.mark.parametrize("secret", ["ab", "x", "abc", "0g" * 16])
def test_a_secret_that_ranks_would_refuse_is_refused_at_once(secret: str) -> None:
    with pytest.raises(UsageError, match="GUOZHUANG_SECRET"):
        plan(GUOZHUANG_SECRET=secret)


def test_a_secret_that_is_empty_is_none() -> None:
    assert plan(GUOZHUANG_SECRET=" ").secret is None
    assert plan(GUOZHUANG_SECRET="ab" * 16).secret == b"\xab" * 16


@pytest.mark.parametrize("nodes", [(), ("1",), ("1:1",), ("01",), ("1:4",)])
def test_standalone_is_this_node_alone(nodes: Sequence[str]) -> None:
    found = plan("--standalone", *(("--nnodes", *nodes) if nodes else ()))
    assert (found.elastic.nnodes, found.elastic.rdzv_backend) == ("1:1", "static")


def test_the_plan_has_the_servers() -> None:
    assert (plan("--servers", "3").num_servers, plan().num_servers) == (3, 0)


def test_a_number_of_nodes_that_may_change() -> None:
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    assert plan("--nnodes", "1:4", *endpoint).elastic.nnodes == "1:4"


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("OFF", "off"), ("2.50", "2.5"), ("30", "30")])
def test_the_hang_timeout(text: str, value: str) -> None:
    assert plan("-np", "2", "--hang-timeout", text).variables["GUOZHUANG_HANG_TIMEOUT"] == value
    assert "GUOZHUANG_HANG_TIMEOUT" not in plan().variables


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo"), reason="there is no interface lo")
def test_on_one_node_gloo_nccl_and_rpc_stay_on_loopback() -> None:
    all_of_them = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
    for arguments in ((), ("--standalone",), ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")):
        found = plan("-np", "2", *arguments).variables
        assert {name: found[name].removeprefix("=") for name in all_of_them} == dict.fromkeys(all_of_them, "lo")
    found = plan("-np", "2", NCCL_SOCKET_IFNAME="eth7").variables
    assert ("NCCL_SOCKET_IFNAME" in found, "GLOO_SOCKET_IFNAME" in found) == (False, True)
    assert not all_of_them & plan("--nnodes", "2").variables.keys()


def test_threads_fit_into_what_the_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    monkeypatch.setattr(machine, "quota_cores", lambda: 8.5)
    found = plan("-np", "2")
    assert found.variables["OMP_NUM_THREADS"] == "4"
    assert any("8 cores / 2 ranks" in text for text in found.chosen)
    assert plan("-np", "9").notes == ["9 ranks share 8 cores of this node"]
    monkeypatch.setattr(machine, "quota_cores", lambda: 0.5)
    assert plan("-np", "2").variables["OMP_NUM_THREADS"] == "1"


def test_a_script_that_looks_like_an_option_of_python() -> None:
    assert options.plan(read(["--", "-odd.py", "-x"]), {}).elastic.training_script == "./-odd.py"
    assert options.plan(read(["--", "train.py", "-x"]), {}).elastic.training_script == "train.py"


def test_torchruns_ways_of_logging_are_left_to_torch() -> None:
    assert plan("--log-dir", "logs").log_folder == os.path.abspath("logs")
    for option in (("-r", "3"), ("-t", "0:1"), ("--duplicate-stdout-filters", "loss")):
        assert plan("--log-dir", "logs", *option).log_folder is None
    assert plan("--log-dir", "logs", "-t", "3", "--local-ranks-filter", "0").log_folder is None


def test_a_strategy_that_begins_with_whole_gradients_says_so() -> None:
    assert [note for note in plan("--strategy", "qadam").notes if "first 300 steps" in note]
    other_node = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1")
    for silent in (("--strategy", "quantize8"), ("--strategy", "qadam", *other_node)):
        assert not [note for note in plan(*silent).notes if "whole gradients" in note]


PLANNED = TrainingPlan(
    1, 2, "pipeline", "pp=2", microbatches=4, schedule="1f1b", backend="gloo", threads_per_rank=3, why="it is faster"
)


def test_a_plan_stands_for_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(PLANNED, folder / "p.json")
    assert read_plan("p.json") == PLANNED
    words = PLANNED.command().split()
    assert words[:2] == ["guozhuang", "run"] and words[-1] == "train.py"
    expected, found = plan(*words[2:-1], OMP_NUM_THREADS="7"), plan("--plan", "p.json", OMP_NUM_THREADS="7")
    assert found.variables == expected.variables and found.num_local_ranks == expected.num_local_ranks == 2
    assert found.variables["OMP_NUM_THREADS"] == "3", "the plan says more than the environment"
    again = ("--strategy", "pipeline", "-np", "2", "--nproc-per-node", "2", "--microbatches", "4")
    with pytest.raises(UsageError, match="exclude each other"):
        read([*again, "train.py"])
    assert plan("--plan", "p.json", *again[:4], *again[6:], OMP_NUM_THREADS="7").variables == expected.variables
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert plan("--plan", "p.json").num_local_ranks == 2
    write_plan(TrainingPlan(1, 2, "ddp", groups=2, bucket_cap_mb=1.5), folder / "caps.json")
    found = plan("--plan", "caps.json")
    assert (found.variables["GUOZHUANG_BUCKET_CAP_MB"], found.variables["GUOZHUANG_GROUPS"]) == ("1.5", "2")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--strategy", "ddp"], "--strategy ddp contradicts the plan p.json, which says --strategy pipeline"),
        (["--layout", "pp=4"], "--layout pp=4 contradicts the plan p.json, which says --layout pp=2"),
        (["-np", "4"], "-np 4 contradicts the plan p.json, which says 2 ranks on each node"),
        (["--nproc-per-node", "4"], "--nproc-per-node 4 contradicts the plan p.json, which says 2 ranks on each node"),
        (["--threads-per-rank", "1"], "contradicts the plan p.json, which says --threads-per-rank 3"),
        (["--nnodes", "2"], "the plan p.json is for 1 node, and this run has 2"),
        (["-H", "a:2,b:2", "-np", "4"], "-np 4 contradicts the plan p.json, which says 2 ranks in all"),
    ],
)
def test_what_contradicts_a_plan_is_refused_with_both(folder: Path, more: list[str], words: str) -> None:
    write_plan(PLANNED, folder / "p.json")
    with pytest.raises(UsageError) as caught:
        plan("--plan", "p.json", *more)
    assert words in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 7}, "plan (p.json) is of another version of guozhuang (got 7)"),
        ({"ranks_per_node": 0}, "no usable ranks_per_node (got 0)"),
        ({"ranks_per_node": 2.0}, "no usable ranks_per_node (got 2.0)"),
        ({"threads_per_rank": True}, "no usable threads_per_rank (got True)"),
        ({"ranks_per_node": "two"}, "no usable ranks_per_node"),
        ({"num_nodes": None}, "no usable num_nodes"),
        ({"strategy": 3}, "no usable strategy"),
        ({"device": 0}, "no usable device"),
        ({"device": "tpu"}, "no usable device (got 'tpu'). Fix: write cpu or cuda"),
        ({"in_the_script": "batches"}, "no usable in_the_script"),
        ({"why": [1]}, "no usable why"),
        ({"tuned_on": [1]}, "no usable tuned_on"),
        ({"prediction": None}, "no usable prediction"),
        ({"strateggy": "ddp"}, "unknown field (got 'strateggy'). Fix: write strategy, or remove it"),
        ({"bucket_cap_mb": "big"}, "no usable bucket_cap_mb (got 'big')"),
        ({"bucket_cap_mb": float("inf")}, "no usable bucket_cap_mb"),
        ({"bucket_cap_mb": -1}, "no usable bucket_cap_mb"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_read_with_care(folder: Path, change: dict[str, Any], words: str) -> None:
    write_plan(PLANNED, folder / "p.json")
    (folder / "p.json").write_text(json.dumps(json.loads((folder / "p.json").read_text()) | change))
    with pytest.raises(UsageError) as caught:
        plan("--plan", "p.json")
    assert words in str(caught.value) and "p.json" in str(caught.value)


def test_no_file_of_another_kind_is_lost_to_a_plan(folder: Path) -> None:
    (folder / "notes.json").write_text("of a user")
    with pytest.raises(UsageError, match=r"this is no plan \(notes.json\).*name another file"):
        write_plan(PLANNED, Path("notes.json"))
    assert (folder / "notes.json").read_text() == "of a user"
    tuned = dataclasses.replace(PLANNED, tuned_on={"torch": "1.0"})
    write_plan(tuned, Path("tuned.json"))
    with pytest.raises(UsageError, match="--out holds a plan that was tuned, which would be lost"):
        write_plan(PLANNED, Path("tuned.json"))
    write_plan(dataclasses.replace(tuned, why="again"), Path("tuned.json"))
    assert read_plan("tuned.json").why == "again"


def test_a_plan_of_several_nodes_needs_their_names(folder: Path) -> None:
    write_plan(TrainingPlan(2, 4, "ddp"), folder / "two.json")
    with pytest.raises(UsageError, match=r"two.json is for 2 nodes, and this run has 1 .*name them with -H"):
        plan("--plan", "two.json")
    each = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1")
    assert plan("--plan", "two.json", *each).num_local_ranks == 4
    for hosts in ("a:4,b:4", "a:8,b:8", "a,b"):  # slots say how many ranks a host can take, the plan how many it gets
        over_hosts = read(["--plan", "two.json", "-H", hosts, "-np", "8", "train.py"])
        assert [*hosts_options.plan(over_hosts, {}).placed] == [("a", "4"), ("b", "4")]
    write_plan(TrainingPlan(2, 4, "ddp", hosts="a:4,b:4"), folder / "named.json")
    named = hosts_options.plan(read(["--plan", "named.json", "train.py"]), {})
    assert [*named.placed] == [("a", "4"), ("b", "4")] and named.options["plan"] is None
    assert (named.options["strategy"], named.options["num_ranks"]) == ("ddp", None)


@pytest.mark.parametrize(
    ("num_nodes", "hosts", "words"),
    [
        (1, ["-H", "a:2,b:2"], "the plan p.json is for 1 node, and this run has 2"),
        (1, ["-H", "a,b"], "the plan p.json is for 1 node, and this run has 2"),
        (2, ["-H", "a:4"], "the plan p.json is for 2 nodes, and this run has 1"),
        (2, ["-H", "a:2,b:2,c:2"], "the plan p.json is for 2 nodes, and this run has 3"),
        (2, ["-H", "a:2,b:1"], "more ranks than b has slots (1)"),
        (2, ["--hostfile", "hosts", "-np", "2"], "-np 2 contradicts the plan p.json, which says 4 ranks in all"),
    ],
)
def test_hosts_that_a_plan_is_not_for_are_refused(folder: Path, num_nodes: int, hosts: list[str], words: str) -> None:
    write_plan(TrainingPlan(num_nodes, 2, "ddp"), folder / "p.json")
    (folder / "hosts").write_text("a slots=2\nb slots=2\n")
    with pytest.raises(UsageError) as caught:
        hosts_options.plan(read(["--plan", "p.json", *hosts, "train.py"]), {})
    assert words in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "was"), [("torch", "2.13.0"), ("accelerators", "NVIDIA H200"), ("num_cores", None), ("cpu", "another one")]
)
def test_a_tuned_plan_counts_on_its_own_machine_alone(folder: Path, name: str, was: str | None) -> None:
    """The facts are those that `guozhuang tune` has stored: the version of torch with what follows its "+"."""
    tuned_on = {**describe().conditions, "workload": "text"}
    write_plan(TrainingPlan(1, 2, "ddp", tuned_on=tuned_on), folder / "p.json")
    assert plan("--plan", "p.json").num_local_ranks == 2
    with pytest.raises(UsageError, match="was tuned on one machine, and -H or --hostfile name others"):
        plan("--plan", "p.json", "-H", "a:2")
    other = {key: value for key, value in (tuned_on | {name: was}).items() if value is not None}
    write_plan(TrainingPlan(1, 2, "ddp", tuned_on=other), folder / "p.json")
    with pytest.raises(UsageError) as caught:
        plan("--plan", "p.json")
    assert f"{name} was {was or 'not set'}, is {tuned_on[name]}" in str(caught.value)


def test_a_plan_for_cuda_devices_needs_one_where_its_ranks_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(TrainingPlan(1, 2, "ddp", device="cuda"), folder / "p.json")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=r"the plan p.json is for CUDA devices, and this machine has none"):
        plan("--plan", "p.json")
    assert [*hosts_options.plan(read(["--plan", "p.json", "-H", "a:2", "train.py"]), {}).placed] == [("a", "2")]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert plan("--plan", "p.json").num_local_ranks == 2

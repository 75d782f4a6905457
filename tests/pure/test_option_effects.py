"""Options that make no sense, or have no effect in this run, are refused by the launcher in one line; so are variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from guozhuang.errors import UsageError
from guozhuang.launch.hosts import options as hosts_options
from guozhuang.launch.options.arguments import parser, read
from guozhuang.launch.options.plan import plan
from guozhuang.strategies import get
from guozhuang.strategies.effects import check_own
from tests.test_surface import ENVIRONMENT

ROWS = (
    (("--monitor-interval=-1",), "--monitor-interval is a number of seconds above 0"),
    (("--monitor-interval", "nan"), "--monitor-interval is a number of seconds above 0"),
    (("-np", ""), "cannot be used"),
    (("-np", "99999999"), "more ranks were asked for than a node can have"),
    (("--threads-per-rank", "99999999"), "--threads-per-rank is more than a process can use"),
    (("--checkpoint", ""), "--checkpoint names no folder"),
    (("--checkpoint", "/dev/null"), "no folder"),
    (("--checkpoint", "train.py"), "no folder"),
    (("--layout", ","), "--layout names no axis"),
    (("--layout", ""), "--layout names no axis"),
    (("--layout", "pp=3"), "the layout does not fit the world of 2 ranks"),
    (("--strategy", "ddp", "--schedule", "1f1b"), "--schedule 1f1b is about the stages of a pipeline"),
    (("--strategy", "tensor", "--microbatches", "4"), "--microbatches 4 is about the stages of a pipeline"),
    (
        ("--strategy", "ddp", "--layout", "dp=2,pp=1", "--schedule", "1f1b"),
        "strategy ddp with the layout dp=2,pp=1 has none",
    ),
    (("--strategy", "ddp", "--attention", "ring"), "--attention ring is about divided sequences"),
    (("--strategy", "ddp", "--servers", "2"), "--servers starts parameter servers, and strategy ddp uses none"),
    (("--strategy", "sharded", "--servers", "2"), "--servers starts parameter servers"),
    (
        ("--strategy", "ddp", "--no-proof"),
        "--no-proof is about models that are divided, and strategy ddp divides none here",
    ),
    (("--strategy", "sharded", "--layout", "dp=2", "--no-proof"), "--no-proof is about models that are divided"),
    (("--strategy", "hybrid", "--layout", "dp=2", "--no-proof"), "--no-proof is about models that are divided"),
    (("--strategy", "torch-pipeline", "--no-proof"), "--no-proof is about models that are divided"),
    (("--strategy", "ddp", "--audit", "0"), "--audit is a number of optimizer steps, at least 1"),
    (
        ("--strategy", "tensor", "--no-proof", "--audit", "9"),
        "--audit 9 repeats the comparison that --no-proof leaves out",
    ),
    (("--strategy", "quantize8", "--audit", "9"), "differs from one process on purpose"),
    (("--strategy", "local-sgd", "--audit", "9"), "differs from one process on purpose"),
    (("--strategy", "none", "--audit", "9"), "each rank trains a model of its own"),
    (("--strategy", "torch-tensor", "--audit", "9"), "by PyTorch's own means"),
    (("--replace-ddp", "--audit", "9"), "--audit compares what gz.prepare has prepared"),
)
# Every option of the parser, by the attribute of the command line: in which run it has no effect, and what is said there;
# or why it has one in every run. Those of ROWS are refused above. A new option must stand here.
ALWAYS, ABOVE, OF_HOSTS = "it has an effect in every run", "see ROWS", "serves only hosts that are started over ssh"
HOSTS = (("-x", "A=1"), ("--ssh-port", "7"), ("--ssh-identity", "f"), ("--ssh-config", "f"), ("--start-timeout", "9"))
KEEPS = ("--max-restarts", "1", "--on-failure", "keep-survivors")
SERVERS = (("--servers", "1", *KEEPS), "--servers acts on a world of gz.init")
EFFECTS: dict[str, str | tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("training_script", "training_script_args", "help", "num_ranks", "nproc_per_node"), ALWAYS),
    **dict.fromkeys(("strategy", "layout", "checkpoint", "timeline", "stop_on_nan", "role", "plan"), ALWAYS),
    **dict.fromkeys(("threads_per_rank", "bind", "interface", "signals_to_handle", "shutdown_timeout"), ALWAYS),
    **dict.fromkeys(("monitor_interval", "log_dir", "redirects", "tee", "logs_specs", "event_log_handler"), ALWAYS),
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters", "standalone", "rdzv_backend"), ALWAYS),
    **dict.fromkeys(("module", "virtual_local_rank", "max_restarts", "nnodes", "master_addr", "backend"), ALWAYS),
    "by_variables": "it says what is so without it, for scripts of torch.distributed.launch",
    **dict.fromkeys(("schedule", "microbatches", "attention", "no_proof", "audit", "servers"), ABOVE),
    "no_python": (("--no-python", "-m"), "-m and --no-python exclude each other"),
    "run_path": (("--run-path", "--no-warm", "--max-restarts", "1"), "--no-warm has no effect: ranks are started as"),
    "pass_local_rank": (("--pass-local-rank", "local-rank", "--use-env"), "exclude each other"),
    "replace_ddp": (("--replace-ddp", "--strategy", "sharded"), "--replace-ddp puts the strategy ddp"),
    "groups": (("--groups", "2", "--strategy", "none"), "--groups 2"),
    "bucket_cap_mb": (("--bucket-cap-mb", "3", "--replace-ddp"), "--bucket-cap-mb is for gz.prepare"),
    "batch_by": (("-np", "1", "--batch-by", "speed"), "--batch-by speed divides batches among ranks, and this run has one"),
    "hang_timeout": (("-np", "1", "--hang-timeout", "9"), "--hang-timeout 9 is about ranks that wait for each other"),
    "slow_rank": (("--slow-rank", "warn", "--hang-timeout", "off"), "--slow-rank warn reads the heartbeat"),
    "every": (("--every", "5min"), "--every is about checkpoints"),
    "keep": (("--keep", "2"), "--keep is about checkpoints"),
    "copy_output": (("--copy-output", "c", "--log-dir", "d"), "--copy-output copies what is shown"),
    "timestamps": (("--timestamps", "--log-dir", "d"), "--timestamps stand before lines that are shown"),
    "local_ranks_filter": (("--local-ranks-filter", "0", "--log-dir", "d"), "all of it goes into files"),
    "on_failure": (("--on-failure", "keep-survivors"), "no restart is allowed"),
    "no_warm": (("--no-warm",), "--no-warm says how the agent of a node starts ranks again"),
    "start_method": (("--start-method", "fork"), "--start-method fork has no effect"),
    "numa_binding": (("--numa-binding", "node"), "--numa-binding puts each rank near its GPU"),
    "local_addr": (
        ("--local-addr", "10.0.0.1", "--nnodes", "2", "--master-addr", "10.0.0.2"), "--local-addr is of no use"
    ),
    "node_rank": (("--node-rank", "1"), "--node-rank tells several nodes apart, and this run has one node"),
    "master_port": (("--standalone", "--master-port", "29511"), "--master-port says where nodes meet"),
    "rdzv_endpoint": (("--standalone", "--rdzv-endpoint", "h:1"), "--rdzv-endpoint says where nodes meet"),
    "rdzv_id": (("--standalone", "--rdzv-id", "7"), "--rdzv-id tells several runs of one meeting point apart"),
    "rdzv_conf": (("--rdzv-conf", "sometimes=1"), "no setting of --rdzv-backend"),
    "server_hosts": (("--server-hosts", "h:1"), OF_HOSTS),
    **dict.fromkeys(("hosts", "hostfile"), ALWAYS),
    **{name: (words, OF_HOSTS) for name, words in zip(
        ("exported", "ssh_port", "ssh_identity", "ssh_config", "start_timeout"), HOSTS, strict=True
    )},
}  # fmt: skip
MORE = (
    (("--strategy", "pipeline", "--slow-rank", "warn"), "ranks of a divided model do different work"),
    (("--strategy", "torch-tensor", "--slow-rank", "warn"), "ranks of a divided model do different work"),
    (("--strategy", "none", "--slow-rank", "warn"), "each rank trains a model of its own"),
    (("--strategy", "async-parameter-server", "--slow-rank", "warn"), "no rank waits for another"),
    (("-np", "1", "--slow-rank", "warn"), "--slow-rank warn compares ranks, and this run has one"),
    (
        ("--no-python", "--no-warm", "--max-restarts", "1", "sh"),
        "--no-warm has no effect: ranks are started as programs",
    ),
    (
        ("--strategy", "async-parameter-server", *KEEPS),
        "--strategy acts on a world of gz.init, which takes no rank back",
    ),
    SERVERS,
)
VARIABLES = (
    ("STRATEGY", "nothing", "no such strategy"),
    ("LAYOUT", "qq=2", "a layout has no such axis"),
    ("MICROBATCHES", "x", "GUOZHUANG_MICROBATCHES must be a whole number"),
    ("MICROBATCHES", "0", "at least 1"),
    ("SCHEDULE", "x", "--schedule is the order"),
    ("ATTENTION", "x", "--attention is the way"),
    ("PROOF", "x", "GUOZHUANG_PROOF must be one of 0, 1"),
    ("AUDIT", "x", "GUOZHUANG_AUDIT must be a whole number"),
    ("AUDIT", "0", "--audit is a number of optimizer steps"),
    ("BACKEND", "x", "backend is not known"),
    ("GROUPS", "x", "GUOZHUANG_GROUPS must be a whole number"),
    ("BUCKET_CAP_MB", "x", "GUOZHUANG_BUCKET_CAP_MB must be a number"),
    ("HANG_TIMEOUT", "x", "--hang-timeout must be a number"),
    ("SLOW_RANK", "x", "GUOZHUANG_SLOW_RANK must be one of warn, off"),
    ("BATCH_BY", "x", "GUOZHUANG_BATCH_BY must be one of equal, speed"),
    ("CHECKPOINT", "/dev/null", "no folder"),
    ("CHECKPOINT_KEEP", "2", "--keep is about checkpoints"),
    ("CHECKPOINT_EVERY", "2steps", "--every is about checkpoints"),
    ("BIND", "x", "GUOZHUANG_BIND must be one of auto, cores, numa, off"),
    ("STOP_ON_NAN", "x", "GUOZHUANG_STOP_ON_NAN must be one of 0, 1"),
    ("REPLACE_DDP", "x", "GUOZHUANG_REPLACE_DDP must be one of 0, 1"),
    ("TIMELINE", "/nowhere/trace.json", "the timeline cannot be written"),
    ("SERVERS", "x", "GUOZHUANG_SERVERS must hold a number of servers"),
    ("SECRET", "x", "GUOZHUANG_SECRET must hold an even number"),
)
# What a launcher sets for its own processes, and never reads from where it was started.
OF_LAUNCHERS = {
    *("BPSLAUNCH", "FIRST_HOST", "GUARD", "HOROVOD_ELASTIC", "LOCAL_RANK", "RUN", "RUN_STORE", "STDERR", "STDOUT"),
    *("TASK", "MEETING_DIR"),  # under mpirun ranks read it, and no other launcher's
}
FINE = (
    ("--strategy", "pipeline", "--schedule", "1f1b"),
    ("--strategy", "hybrid", "--layout", "pp=2", "--microbatches", "4"),
    ("--strategy", "sharded", "--layout", "pp=2", "--microbatches", "4"),
    ("--schedule", "1f1b"),  # the script may name the strategy
    ("--strategy", "torch-pipeline", "--schedule", "1f1b"),
    ("--strategy", "async-parameter-server", "--servers", "1"),
    ("--strategy", "byteps", "--servers", "1"),
    ("--strategy", "pipeline", "--no-proof"),
    ("--strategy", "sequence", "--attention", "ring"),
    ("--strategy", "ddp", "--layout", "sequence=2", "--attention", "ring"),
    ("--strategy", "quantize8", "--layout", "tp=2", "--no-proof"),
    ("--strategy", "hybrid", "--layout", "tp=2", "--audit", "9"),
    ("--strategy", "sharded", "--audit", "9"),
    ("--no-proof",),
    ("--audit", "9"),
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(("words", "text"), ROWS)
def test_an_option_without_an_effect_is_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan(read(["-np", "2", *words, "train.py"]), {})


@pytest.mark.parametrize(("words", "text"), [*MORE, *(each for each in EFFECTS.values() if not isinstance(each, str))])
def test_an_option_is_refused_in_a_run_where_it_has_no_effect(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        found = read(["-np", "2", *words, "train.py"])
        assert hosts_options.is_asked_for(found) or plan(found, {})


def test_every_option_says_when_it_has_an_effect() -> None:
    assert {action.dest for action in parser()._actions} == EFFECTS.keys()


@pytest.mark.parametrize(("name", "value"), [("HANG_TIMEOUT", "9"), ("SLOW_RANK", "warn"), ("BATCH_BY", "speed")])
def test_a_variable_may_be_there_for_other_runs(name: str, value: str) -> None:
    assert plan(read(["-np", "1", "train.py"]), {f"GUOZHUANG_{name}": value}).num_local_ranks == 1


def test_a_schedulers_variable_does_not_contradict_standalone(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "h:1", "PET_MASTER_PORT": "29511", "PET_RDZV_ID": "7"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert plan(read(["--standalone", "-np", "2", "train.py"]), variables).num_local_ranks == 2


@pytest.mark.parametrize(("name", "value", "text"), VARIABLES)
def test_a_variable_is_checked_as_its_option_is(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan(read(["-np", "2", "train.py"]), {f"GUOZHUANG_{name}": value})


def test_every_variable_is_checked_or_of_launchers() -> None:
    assert {f"GUOZHUANG_{name}" for name in (*(row[0] for row in VARIABLES), *OF_LAUNCHERS)} == ENVIRONMENT


def test_a_timeline_of_the_variable_is_joined_as_that_of_the_option(tmp_path: Path) -> None:
    assert plan(read(["train.py"]), {"GUOZHUANG_TIMELINE": "trace.json"}).timeline == str(tmp_path / "trace.json")


@pytest.mark.parametrize("words", FINE)
def test_options_that_have_an_effect_are_taken(words: tuple[str, ...]) -> None:
    assert plan(read(["-np", "2", *words, "train.py"]), {}).num_local_ranks == 2


def test_the_option_comes_before_the_variable() -> None:
    found = plan(read(["-np", "2", "--strategy", "sharded", "train.py"]), {"GUOZHUANG_STRATEGY": "nothing"})
    assert found.variables["GUOZHUANG_STRATEGY"] == "sharded"


def test_servers_that_the_scripts_own_strategy_does_not_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_SERVERS", "2@127.0.0.1:7")
    check_own(get("async-parameter-server"), "async-parameter-server", 0)
    for named in ("ddp", None):
        with pytest.raises(UsageError, match="--servers starts parameter servers, and strategy ddp uses none"):
            check_own(get("ddp"), named, 1)


@pytest.mark.parametrize(
    ("asked", "named", "is_said"), [("sharded", "ddp", True), ("ddp", "ddp", False), ("ddp", None, False)]
)
def test_a_strategy_that_the_script_does_not_take_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, named: str | None, is_said: bool
) -> None:
    monkeypatch.setenv("GUOZHUANG_STRATEGY", asked)
    check_own(get("ddp"), named, 1)
    assert not caplog.text
    check_own(get("ddp"), named, 0)
    assert (f"--strategy {asked} has no effect on a model" in caplog.text) == is_said

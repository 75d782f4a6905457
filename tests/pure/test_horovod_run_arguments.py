"""``horovodrun``: what is read from its command line and file, and what Guozhuang's launcher is told."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from guozhuang.compat import redirect
from guozhuang.compat.horovod.runner import arguments, engine_options, function_run, launch, run, static_run
from guozhuang.compat.horovod.runner.elastic.settings import ElasticSettings, settings_of
from guozhuang.errors import UsageError
from guozhuang.launch.hosts import run as hosts_run
from guozhuang.launch.hosts import ssh
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read
from tests.launching import ROOT

PROGRAM = ["python", "train.py", "--np", "3"]

# Every option of horovodrun 0.28.1, as its users write it.
OPTIONS = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
--torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc
--max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename
--timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


def test_every_option_is_there() -> None:
    there = set(arguments.parser()._option_string_actions)
    assert there == {*OPTIONS.split(), "-h", "--help"}


def test_the_program_keeps_its_own_options() -> None:
    found = arguments.parse(["-np", "2", "--verbose", *PROGRAM])
    assert (found.num_proc, found.verbose, found.command) == (2, True, PROGRAM)
    assert arguments.parse(["-np=2", "--", "./run", "-np", "x"]).command == ["./run", "-np", "x"]
    # Two values of one option, and the program is found all the same.
    found = arguments.parse(
        ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "60", "300", "python", "t.py", "-H"]
    )
    assert (found.cooldown_range, found.command) == ([60, 300], ["python", "t.py", "-H"])


def test_options_become_variables() -> None:
    line = (
        "-np 2 --fusion-threshold-mb 32 --cycle-time-ms 3.5 --cache-capacity 0 --no-hierarchical-allreduce --autotune "
        "--autotune-log-file log.csv --autotune-gaussian-process-noise 0.5 --timeline-filename /t.json --timeline-mark-cycles "
        "--no-stall-check --stall-check-warning-time-seconds 7 --log-level debug --log-without-timestamp --num-nccl-streams 2 "
        "--thread-affinity 0,1 --gloo-timeout-seconds 9 --mpi-threads-disable --tcp --start-timeout 12"
    )
    assert static_run.variables_for(arguments.parse([*line.split(), *PROGRAM])) == {
        "PYTHONUNBUFFERED": "1", "NCCL_IB_DISABLE": "1", "HOROVOD_START_TIMEOUT": "12",
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20), "HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5", "HOROVOD_TIMELINE": "/t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_LOG_LEVEL": "debug",
        "HOROVOD_LOG_HIDE_TIME": "1", "HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_THREAD_AFFINITY": "0,1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "9", "HOROVOD_MPI_THREADS_DISABLE": "1",
    }  # fmt: skip
    assert static_run.variables_for(arguments.parse(["-np", "2", *PROGRAM])) == {"PYTHONUNBUFFERED": "1"}


CONFIG = """
controller: mpi
verbose: true
params:
  fusion_threshold_mb: 16
  cycle_time_ms: 2
  torus_allreduce: true
autotune: {enabled: true, log_file: tune.csv, warmup_samples: 5}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 90}
library_options: {gloo_timeout_seconds: 3}
logging: {level: info, with_timestamp: true}
"""


def test_the_file_is_overridden_by_what_comes_after_it(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    before = ["--fusion-threshold-mb", "1", "--no-autotune"]
    after = ["--cycle-time-ms", "5", "--stall-check"]
    found = arguments.parse(["-np", "2", *before, "--config-file", str(path), *after, *PROGRAM])
    assert (found.use_mpi, found.verbose, found.autotune) == (True, True, True)
    told = static_run.variables_for(found)
    assert {name.removeprefix("HOROVOD_"): value for name, value in told.items() if name != "PYTHONUNBUFFERED"} == {
        "FUSION_THRESHOLD": str(16 << 20), "CYCLE_TIME": "5", "TORUS_ALLREDUCE": "1", "AUTOTUNE": "1",
        "AUTOTUNE_LOG": "tune.csv", "AUTOTUNE_WARMUP_SAMPLES": "5", "TIMELINE": "t.json", "TIMELINE_MARK_CYCLES": "1",
        "STALL_CHECK_DISABLE": "0", "STALL_CHECK_TIME_SECONDS": "90", "GLOO_TIMEOUT_SECONDS": "3", "LOG_LEVEL": "info",
        "LOG_HIDE_TIME": "0",
    }  # fmt: skip
    path.write_text("verbose: false\n")
    file = ["--config-file", str(path)]
    assert arguments.parse(["-np", "2", *file, "--verbose", *PROGRAM]).verbose is True
    assert arguments.parse(["-np", "2", "--verbose", *file, *PROGRAM]).verbose is False
    path.write_text(CONFIG)
    # Whoever was asked for on the command line stays.
    assert not arguments.parse(["-np", "2", "--gloo", "--config-file", str(path), *PROGRAM]).use_mpi


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parms: {}", "a section that is unknown (got 'parms')"),
        ("params: {fusion_mb: 1}", "params has a key that is unknown (got 'fusion_mb')"),
        (
            "params: {fusion_threshold_mb: big}",
            "params.fusion_threshold_mb must be a whole number of at least 0 (got 'big')",
        ),
        ("params: {cycle_time_ms: -1}", "params.cycle_time_ms must be a number of at least 0"),
        ("autotune: {enabled: 1}", "autotune.enabled must be true or false"),
        ("autotune: {gaussian_process_noise: 2}", "must be a number from 0 to 1"),
        ("logging: {level: chatty}", "logging.level must be one of trace"),
        ("controller: smoke", "controller must be gloo or mpi"),
        ("verbose: 'false'", "verbose must be true or false (got 'false')"),
        ("params: {cycle_time_ms: .inf}", "params.cycle_time_ms must be a number of at least 0 (got inf)"),
        ("library_options: {num_nccl_streams: 0}", "num_nccl_streams must be a whole number of at least 1 (got 0)"),
        ("params: 3", "params holds no keys"),
        ("- a\n- b", "holds no sections"),
        ("a: b: c", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        arguments.parse(["-np", "2", "--config-file", str(path), *PROGRAM])
    assert words in str(caught.value) and "Fix:" in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "config.yaml").write_text("params:\n")
    found = arguments.parse(["-np", "2", "--config-file", str(tmp_path / "config.yaml"), *PROGRAM])
    assert static_run.variables_for(found) == {"PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py", "the number of processes is missing"),
        ("-np 2", "the program is missing"),
        ("-np 0 python", "-np must be at least 1 (got 0)"),
        ("-np 2 --jsrun python", "--jsrun is not supported"),
        ("-np 2 --gloo --mpi python", "--gloo and --mpi exclude each other"),
        ("-np 2 -H a:1 -hostfile f python", "-H and --hostfile exclude each other"),
        ("-np 2 -H a:2 --host-discovery-script d.sh python", "-H and --host-discovery-script exclude each other"),
        ("-np 2 --max-np 3 --reset-limit 1 python", "--max-np, --reset-limit serves only elastic runs"),
        ("-np 2 --min-np 3 python", "must rise in this order"),
        ("-np 4 --min-np 2 --max-np 3 python", "must rise in this order"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 9 3 python", "--blacklist-cooldown-range"),
        ("-np 2 --start-timeout 0 python", "--start-timeout is a number of seconds above 0"),
        ("-np 2 --min-np 1 --slots-per-host 0 python", "--slots-per-host must be at least 1"),
        ("-np 2 --min-np 1 --slots-per-host 2 python", "no host is named (got 2)"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 0 0 python", "both above 0 (got (0, 0))"),
        ("-np 2 -p 99999 python", "--ssh-port is no TCP port (got 99999)"),
        ("-np 2 -H localhost:2 -i /nowhere/key python", "--ssh-identity-file: there is no such file"),
    ],
)
def test_what_cannot_work_is_refused(line: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        arguments.parse(line.split())
    assert words in str(caught.value) and "Fix:" in str(caught.value)


def test_parsed_numbers_are_numbers() -> None:
    """A script that calls ``horovod.runner.launch.parse_args`` computes with them."""
    line = "--cycle-time-ms 2.5 --fusion-threshold-mb 32 --gloo-timeout-seconds 9 --log-level DEBUG --autotune-log-file 1.0"
    found = launch.parse_args(["-np", "2", *line.split(), "--thread-affinity", "0", *PROGRAM])
    assert (found.cycle_time_ms, found.fusion_threshold_mb, found.gloo_timeout_seconds) == (2.5, 32, 9)
    assert (found.log_level, found.autotune_log_file, found.thread_affinity) == ("DEBUG", "1.0", "0")
    values = static_run.variables_for(found)
    assert [values[f"HOROVOD_{name}"] for name in ("LOG_LEVEL", "AUTOTUNE_LOG")] == ["DEBUG", "1.0"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--cycle-time-ms", "-1", "--cycle-time-ms must be a number of at least 0"),
        ("--num-nccl-streams", "0", "--num-nccl-streams must be a whole number of at least 1"),
        ("--log-level", "chatty", "--log-level must be one of trace"),
    ],
)
def test_options_of_the_engine_are_checked(option: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        arguments.parse(["-np", "2", option, value, *PROGRAM])


def test_processes_would_take_what_they_are_told() -> None:
    """A process does not refuse what an option accepts."""
    for each in engine_options.SETTINGS:
        value: object = True if each.off is not None else "info" if each.name == "log_level" else "1"
        found = arguments.parse(["-np", "2", *PROGRAM])
        setattr(found, each.name, value)
        assert any(name.endswith(each.variable.removeprefix("!")) for name in static_run.variables_for(found)), (
            each.name
        )


def words(line: str) -> tuple[list[str], dict[str, str]]:
    found = arguments.parse([*line.split(), *PROGRAM])
    return static_run.words_for(found, static_run.places(found))


def test_the_launcher_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = ["--no-python", *PROGRAM]
    here = ["-np", "2", "--standalone", *end]
    assert words("-np 2") == (here, {})
    assert words("-np 2 -H localhost:4 -p 2222")[0] == words("-np 2 -H 127.0.0.1:4 -p 2222")[0] == here
    line = f"-np 3 -H a:2,b:2 -p 2222 -i {__file__} --start-timeout 9 --network-interfaces eth1,eth2"
    told = f"-np 3 -H a:2,b:2 --ssh-port 2222 --ssh-identity {__file__} --start-timeout 9 --interface eth1"
    monkeypatch.setenv("DATA_FOLDER", "/data")
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "17")
    found, of_the_job = words(f"{line} --output-filename out -prefix-timestamp")
    assert found == [*told.split(), "--copy-output", "out", "--timestamps", *end]
    assert of_the_job["DATA_FOLDER"] == "/data" and not of_the_job.keys() & {"HOME", "PATH", "PWD"}
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    assert words(f"-np 2 -hostfile {tmp_path}/hosts")[0] == [
        *f"-np 2 --hostfile {tmp_path}/hosts --start-timeout 17".split(), *end
    ]  # fmt: skip


def test_one_horovodrun_starts_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun on two nodes each would start all of them; where it is told its host, a scheduler is not asked."""
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
        "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_STEPID": "0",
    }  # fmt: skip
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="started `horovodrun` on 2 nodes"):
        words("-np 4")
    line = words("-np 4 -H localhost:4")[0]
    assert (
        options.plan(read([*line[: line.index("--no-python")], "--no-python", "true"]), dict(os.environ)).node is None
    )
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(UsageError, match="srun started `horovodrun` 2 times on this node"):
        words("-np 4")
    with pytest.raises(UsageError, match="srun started `horovodrun` 2 times on this node"):
        settings_of(arguments.parse(["-np", "4", "--min-np", "2", *PROGRAM]))
    with pytest.raises(UsageError, match=r"srun started `horovod\.run` 2 times on this node"):
        run(print, num_proc=4)


def test_a_port_of_ssh_is_that_of_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher decides by the same rule which hosts are this machine, and reaches the others only."""
    started: list[list[bool]] = []

    class Run:
        may_try_again, failed = False, None

        def __init__(self, wanted: object, is_local: list[bool], *more: object) -> None:
            started.append(is_local)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(hosts_run, "HostsRun", Run)
    monkeypatch.setattr(ssh, "check_installed", lambda: None)
    line = "-np 3 -H localhost:1,127.0.0.1:1,192.0.2.9:1 -p 2222"
    assert static_run.run(arguments.parse([*line.split(), "true"]), lambda text: None) == 0
    assert started == [[True, True, False]]


def test_errors_of_the_function_speak_of_its_arguments() -> None:
    text = "-np asks for more than --min-np (a-np, --mpi-args=x) of -H: --ssh-identity-file or --mpi"
    said = "num_proc asks for more than min_num_proc (a-np, mpi_args=x) of hosts: ssh_identity_file or use_mpi"
    assert function_run.translated(text) == said
    for words, asked in (
        ("num_proc must be at least 1", {"num_proc": 0}),
        ("np is the former name of num_proc", {"num_proc": 1, "np": 2}),
        (
            "must rise in this order (got 'min_num_proc 2 num_proc 1 max_num_proc None')",
            {"num_proc": 1, "min_num_proc": 2},
        ),
        ("more ranks than there are slots, which are 2 (localhost:2)", {"num_proc": 3, "hosts": "localhost:2"}),
        ("slots is for hosts whose number of slots is not given", {"min_num_proc": 1, "slots": 1}),
    ):
        warns = pytest.warns(DeprecationWarning) if "np" in asked else contextlib.nullcontext()
        with warns, pytest.raises(UsageError) as caught:
            run(print, **asked)
        assert words in str(caught.value) and not re.search(r"(?<!\w)--?[a-z]", str(caught.value)), str(caught.value)
    assert inspect.signature(run).parameters["num_proc"].default == 1


def test_a_rank_that_ends_with_130_is_no_interrupt_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_rank(found: object, failed: Callable[[str], None], more: object) -> int:
        failed("rank 1 ended with 130")
        return 130

    monkeypatch.setattr(static_run, "run", of_a_rank)
    with pytest.raises(RuntimeError, match="rank 1 ended with 130"):
        run(print, num_proc=2)
    monkeypatch.setattr(static_run, "run", lambda found, failed, more: 130)
    with pytest.raises(KeyboardInterrupt):
        run(print, num_proc=2)


def test_places_fill_hosts_in_their_order() -> None:
    found = arguments.parse(["-np", "3", "-H", "a:2,b:2", *PROGRAM])
    assert static_run.places(found) == [("a", 2), ("b", 1)]
    with pytest.raises(UsageError, match="more ranks than there are slots"):
        static_run.places(arguments.parse(["-np", "5", "-H", "a:2,b:2", *PROGRAM]))
    with pytest.raises(UsageError, match="--ssh-identity-file serves only hosts"):
        words(f"-np 2 -i {__file__}")


def test_what_changes_nothing_is_said() -> None:
    found = arguments.parse(["-np", "2", "--mpi", "--mpi-args=--map-by node", "--network-interfaces", "a,b", *PROGRAM])
    said = "\n".join(launch.notes(found))
    assert (
        "--mpi changes nothing" in said
        and "--mpi-args mean nothing here" in said
        and "the first is used for all: a" in said
    )
    assert not launch.notes(arguments.parse(["-np", "2", "--gloo", "--disable-cache", *PROGRAM]))


def test_the_driver_of_elastic_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "-np 3 --min-np 2 --max-np 4 --host-discovery-script ./find --slots-per-host 2 --elastic-timeout 90 --reset-limit 5 "
        f"--blacklist-cooldown-range 1 9 -p 22 -i {__file__} --output-filename out -prefix-timestamp --start-timeout 71 "
        "--verbose --network-interface e --cycle-time-ms 2"
    )
    found = arguments.parse([*line.split(), *PROGRAM])
    assert arguments.is_elastic(found)
    assert settings_of(found, {"MORE": "1"}) == ElasticSettings(
        command=tuple(PROGRAM), num_proc=3, min_np=2, max_np=4, slots_per_host=2, host_discovery_script="./find", hosts=None,
        elastic_timeout_s=90.0, reset_limit=5, cooldown_range=(1, 9), ssh_port=22, ssh_identity_file=__file__,
        env={"PYTHONUNBUFFERED": "1", "HOROVOD_START_TIMEOUT": "71", "HOROVOD_CYCLE_TIME": "2", "MORE": "1"},
        output_filename="out", prefix_timestamp=True, start_timeout_s=71.0, verbose=True, network_interfaces=("e",),
    )  # fmt: skip
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "77")
    found = arguments.parse(["--min-np", "2", "-H", "a:1,b", "--slots-per-host", "3", *PROGRAM])
    told = settings_of(found)
    assert (told.num_proc, told.min_np, told.hosts, told.elastic_timeout_s) == (2, 2, [("a", 1), ("b", 3)], 77.0)
    assert settings_of(arguments.parse(["-np", "2", "--min-np", "1", *PROGRAM])).hosts == [("localhost", 2)]


def test_what_is_built(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run_commandline(["--check-build"]) == 0
    printed = capfd.readouterr().out
    rows = dict(reversed(row) for row in re.findall(r"(?m)^    \[(.)\] (.+)$", printed))
    assert (rows["PyTorch"], rows["Gloo"], rows["TensorFlow"], rows["MPI"]) == ("X", "X", " ", " ")
    assert "Horovod v0.28.1" in printed and "Available Tensor Operations:" in printed
    with pytest.raises(SystemExit) as caught:
        launch.run_commandline(["-v"])
    assert caught.value.code in (None, 0) and capfd.readouterr().out == "0.28.1\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-np 2 -H a:1 python x.py", "-np asks for more ranks"),
        ("-np 1 no-such-program", "there is no such program"),
        ("-np 1 --output-filename out python -c 0", "what rank 0 prints cannot be written to "),
    ],
)
def test_what_this_host_finds_wrong_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank.0").touch()  # where a folder is to be
    assert launch.run_commandline(line.split()) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith(f"horovodrun: {words}") and "Traceback" not in err, err


def test_the_text_of_a_failure_names_the_process() -> None:
    text = static_run.text_of("rank 3 on host b", 7)
    assert "one or more processes exited with non-zero status" in text
    assert text.endswith("Process name: rank 3 on host b\nExit code: 7")


def test_the_top_level_package_is_one_text() -> None:
    """The extras' distributions have the same file as the folder that `guozhuang run` puts on the path."""
    folder = ROOT / "guozhuang" / redirect.ON_PATH_FOLDER
    texts = set()
    for root in redirect.SYSTEMS:
        texts.add((folder / root / "__init__.py").read_text())
        texts.add((ROOT / "packaging" / root / f"guozhuang_{root}" / root / "__init__.py").read_text())
    assert len(texts) == 1
    assert sorted(path.name for path in folder.iterdir()) == sorted(redirect.SYSTEMS)  # nothing else comes to the path
    assert len({(ROOT / "packaging" / root / "setup.py").read_text() for root in redirect.SYSTEMS}) == 1

"""The public surface, frozen: names, options, environment variables, and what importing costs.

A change here is a change for users: make it on purpose, by editing the lists.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import guozhuang

PACKAGE = Path(guozhuang.__file__).parent

NAMES = {
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "PeerLost",
    "RankFailed",
    "SyncBatchNorm",
    "Tracker",
    "TrainingState",
    "World",
    "accumulate",
    "all_gather",
    "averaged_gradients",
    "clip_grad_norm_",
    "compare",
    "epochs",
    "full_tensor",
    "global_mean",
    "init",
    "keep",
    "launch",
    "loader",
    "prepare",
    "print",
    "rank_zero",
    "reduce",
    "restore",
    "save",
    "shutdown",
    "unwrap",
}
COMMANDS = {"check", "checkpoint", "compare", "completion", "plan", "predict", "run", "tune"}
SSH_OPTIONS = {
    "-H",
    "-x",
    "--hostfile",
    "--interface",
    "--ssh-config",
    "--ssh-identity",
    "--ssh-port",
    "--start-timeout",
}
RUN_OPTIONS_BESIDES_TORCHRUN = SSH_OPTIONS | {
    "-np",
    "--attention",
    "--audit",
    "--backend",
    "--batch-by",
    "--bind",
    "--bucket-cap-mb",
    "--checkpoint",
    "--copy-output",
    "--every",
    "--groups",
    "--hang-timeout",
    "--slow-rank",
    "--keep",
    "--layout",
    "--microbatches",
    "--pass-local-rank",
    "--plan",
    "--replace-ddp",
    "--schedule",
    "--server-hosts",
    "--no-proof",
    "--no-warm",
    "--on-failure",
    "--servers",
    "--stop-on-nan",
    "--strategy",
    "--threads-per-rank",
    "--timeline",
    "--timestamps",
    "--use-env",
}
CHECK_OPTIONS = SSH_OPTIONS | {"-np", "--help", "--json", "--timeout"}
COMPARE_OPTIONS = {
    "--all",
    "--backend",
    "--bad-rows",
    "--batch-size",
    "--config",
    "--data",
    "--data-format",
    "--delimiter",
    "--device",
    "--dropout",
    "--encoding",
    "--epochs",
    "--eval-data",
    "--eval-fraction",
    "--eval-limit",
    "--fresh",
    "--fused",
    "--groups",
    "--header",
    "--help",
    "--json",
    "--label",
    "--label-until",
    "--lr",
    "--max-length",
    "--model",
    "--momentum",
    "--no-fused",
    "--num-classes",
    "--num-samples",
    "--optimizer",
    "--option",
    "--out",
    "--pad-to",
    "--quoting",
    "--ranks",
    "--rounds",
    "--seed",
    "--seq-len",
    "--steps",
    "--strategies",
    "--text",
    "--threads-per-rank",
    "--timeline",
    "--timeout",
    "--vocab-size",
    "--warmup-steps",
    "--weight-decay",
    "--workload",
}
ENVIRONMENT = {
    "GUOZHUANG_ATTENTION",
    "GUOZHUANG_AUDIT",
    "GUOZHUANG_BACKEND",
    "GUOZHUANG_BATCH_BY",
    "GUOZHUANG_BIND",
    "GUOZHUANG_BPSLAUNCH",
    "GUOZHUANG_BUCKET_CAP_MB",
    "GUOZHUANG_CHECKPOINT",
    "GUOZHUANG_CHECKPOINT_EVERY",
    "GUOZHUANG_CHECKPOINT_KEEP",
    "GUOZHUANG_FIRST_HOST",
    "GUOZHUANG_GROUPS",
    "GUOZHUANG_GUARD",
    "GUOZHUANG_HANG_TIMEOUT",
    "GUOZHUANG_SLOW_RANK",
    "GUOZHUANG_HOROVOD_ELASTIC",
    "GUOZHUANG_LAYOUT",
    "GUOZHUANG_LOCAL_RANK",
    "GUOZHUANG_MEETING_DIR",
    "GUOZHUANG_MICROBATCHES",
    "GUOZHUANG_PROOF",
    "GUOZHUANG_REPLACE_DDP",
    "GUOZHUANG_RUN",
    "GUOZHUANG_RUN_STORE",
    "GUOZHUANG_SCHEDULE",
    "GUOZHUANG_SECRET",
    "GUOZHUANG_SERVERS",
    "GUOZHUANG_STDERR",
    "GUOZHUANG_STDOUT",
    "GUOZHUANG_STOP_ON_NAN",
    "GUOZHUANG_STRATEGY",
    "GUOZHUANG_TASK",
    "GUOZHUANG_TIMELINE",
}
# Imported where they are used, never by `import guozhuang`.
HEAVY = {"matplotlib", "transformers", "tokenizers", "rich", "jinja2", "psutil", "pyarrow", "torch._dynamo", "pandas"}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The long options (short ones only where there is no long one), with dashes."""
    found = set()
    for action in parser._actions:
        long = {name.replace("_", "-") for name in action.option_strings if name.startswith("--")}
        found |= long or set(action.option_strings)
    return found


def test_public_names() -> None:
    assert set(guozhuang.__all__) == NAMES - {"print"}, "`from guozhuang import *` leaves Python's print alone"
    missing = [name for name in NAMES if not hasattr(guozhuang, name)]
    assert not missing
    undocumented = [name for name in NAMES if not (getattr(guozhuang, name).__doc__ or "").strip()]
    assert not undocumented


def test_commands() -> None:
    from guozhuang import cli

    assert set(cli.COMMANDS) == COMMANDS
    help_text = cli.parser().format_help()
    assert all(re.search(rf"^ +{command}\b", help_text, re.MULTILINE) for command in COMMANDS)


def test_options_of_run() -> None:
    from torch.distributed.run import get_args_parser

    from guozhuang.launch.options.arguments import parser

    torchrun = options(get_args_parser())
    assert torchrun <= options(parser()), "every option of torchrun is an option of guozhuang run"
    ours = {name for action in parser()._actions for name in action.option_strings}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    added = ours - theirs
    assert {f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name for name in added} == (
        RUN_OPTIONS_BESIDES_TORCHRUN
    )
    for name in added:  # torchrun takes dashes and underscores; so do we
        assert not name.startswith("--") or f"--{name[2:].replace('-', '_')}" in added


def test_options_of_compare() -> None:
    from guozhuang.lab.options import parser

    assert options(parser()) == COMPARE_OPTIONS


def test_options_of_check() -> None:
    from guozhuang.check.arguments import parser

    assert options(parser()) == CHECK_OPTIONS


def test_environment_variables() -> None:
    """What the package reads or writes of its own: every such word in its source."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        found |= set(re.findall(r"\bGUOZHUANG_[A-Z0-9_]+\b", path.read_text()))
    assert found == ENVIRONMENT


IMPORTED = """
import json, os, sys, threading
import torch, torch.distributed
before = set(sys.modules)
import guozhuang
modules = sorted(set(sys.modules) - before)
specs = {spec.cached: spec.origin for name in modules if (spec := sys.modules[name].__spec__).cached}
# Each file of compiled code holds the path of its source, which is longer for one user than for another.
num_bytes = sum(os.path.getsize(file) - len(origin) for file, origin in specs.items() if os.path.exists(file))
started = [threading.active_count() > 1, torch.distributed.is_initialized(), guozhuang.world.current() is not None]
print(json.dumps([modules, num_bytes, started]))
"""
IMPORTED_BYTES = 1_516_000


@functools.cache
def imported() -> tuple[list[str], int, list[bool]]:
    """What a new process has after it has imported the package: new modules, bytes of their code, and what was started."""
    out = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        cwd=PACKAGE.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules, num_bytes, started = json.loads(out.stdout)
    return modules, num_bytes, started


def test_importing_costs_little() -> None:
    """Compiled code is what an import costs in time; benchmarks/import_cost.py measures that: less than 10 % over torch's."""
    modules, num_bytes, _ = imported()
    assert not [m for m in modules if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert "guozhuang.gradients.reducer" in modules
    assert 0 < num_bytes <= IMPORTED_BYTES, f"{num_bytes} bytes of compiled code in {modules}"


def test_importing_starts_nothing() -> None:
    threads, a_group, a_world = imported()[2]
    assert not threads and not a_group and not a_world


def test_what_an_installation_needs_has_a_tested_version() -> None:
    root = Path(guozhuang.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    pinned = {line.partition("==")[0].lower() for line in (root / "constraints.txt").read_text().splitlines()}
    assert needed <= pinned, needed - pinned

"""Options that make no sense, or have no effect in this run, are refused by the launcher in one line; so are variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from guozhuang.errors import UsageError
from guozhuang.launch.options.arguments import read
from guozhuang.launch.options.plan import plan

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
)
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


@pytest.mark.parametrize(("name", "value", "text"), VARIABLES)
def test_a_variable_is_checked_as_its_option_is(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan(read(["-np", "2", "train.py"]), {f"GUOZHUANG_{name}": value})


@pytest.mark.parametrize("words", FINE)
def test_options_that_have_an_effect_are_taken(words: tuple[str, ...]) -> None:
    assert plan(read(["-np", "2", *words, "train.py"]), {}).num_local_ranks == 2


def test_the_option_comes_before_the_variable() -> None:
    found = plan(read(["-np", "2", "--strategy", "sharded", "train.py"]), {"GUOZHUANG_STRATEGY": "nothing"})
    assert found.variables["GUOZHUANG_STRATEGY"] == "sharded"

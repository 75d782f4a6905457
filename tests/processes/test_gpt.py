"""The GPT example: six lines beside its plain twin, under twelve strategies, going on bit for bit after kill -9."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import guozhuang as gz
from tests.launching import ROOT, Launched, guozhuang
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S

GPT, PLAIN = ROOT / "examples" / "gpt.py", ROOT / "examples" / "gpt_plain.py"
SMALL = ["--epochs", "2", "--batch-size", "16", "--context", "32", "--width", "16", "--depth", "2"]
STRATEGIES = (
    *("ddp", "torch-ddp", "horovod", "sharded", "sharded-weights", "parameter-server", "quantize8"),
    *("local-sgd", "diloco", "decentralized"),
)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 100)
    return str(path)


def code(path: Path) -> list[str]:
    """The lines of a script after its docstring that are not blank."""
    return [line for line in path.read_text().split('"""', 2)[2].splitlines() if line.strip()]


def test_six_lines_are_changed() -> None:
    lines = list(difflib.ndiff(code(PLAIN), code(GPT)))
    added = [line for line in lines if line.startswith("+ ")]
    assert 0 < len(added) <= 6, "\n".join(added)
    # What else the plain script has is its own way to save itself.
    gone = [line for line in lines if line.startswith("- ")]
    assert len(gone) - len(added) <= 8, "\n".join(gone)


def trained(script: str, words: list[str]) -> tuple[list[float], dict[str, Any]]:
    """Run a script as a program; return the losses that it printed, and the weights that it has in the end."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [script, *words]), contextlib.redirect_stdout(printed):
        found = runpy.run_path(script, run_name="__main__")
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in found["model"].state_dict().items()
    }
    assert printed.getvalue().splitlines()[-1].startswith("def parse"), "it has written"
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())], weights


def trained_under(rank: int, size: int, strategies: tuple[str, ...], words: list[str]) -> dict[str, Any]:
    found = {}
    for strategy in strategies:
        os.environ["GUOZHUANG_STRATEGY"] = strategy
        found[strategy] = trained(str(GPT), words)
        gz.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategies"), [(1, ("single", "dp")), (2, STRATEGIES)])
def test_under_every_strategy(size: int, strategies: tuple[str, ...], text: str) -> None:
    first, *others = run_ranks(trained_under, size, strategies, [text, *SMALL], init=False)
    for strategy in strategies:
        losses, weights = first[strategy]
        assert len(losses) == 2 and losses[-1] < losses[0] - 0.2, (strategy, losses)
        for other in others:
            for name, value in weights.items():
                assert torch.equal(value, other[strategy][1][name]), (strategy, name)


def run(checkpoint: Path, text: str) -> list[object]:
    where = ["--nproc-per-node", 2, "--checkpoint", checkpoint, "--every", "3steps", "--keep", 100]
    return ["run", *where, GPT, text, *SMALL]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything but the state of numpy's generator, which the script does not seed."""
    parts = sorted(checkpoint.glob("*.safetensors"))
    return {
        f"{part.name} {name}": tensor
        for part in parts
        for name, tensor in load_file(part).items()
        if "numpy" not in name
    }


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal()), default=0)


@pytest.mark.slow
def test_it_goes_on_bit_for_bit_after_kill_9(tmp_path: Path, text: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = guozhuang(*run(whole, text), folder=tmp_path)
    assert done.returncode == 0, done
    with Launched(*run(cut, text), folder=tmp_path) as launched:
        launched.until(lambda: newest(cut) >= 6)
        launched.send(signal.SIGKILL)
        assert not launched.left(LIMIT_S)
    assert 6 <= newest(cut) < newest(whole), "it was killed in the middle"
    done = guozhuang(*run(cut, text), folder=tmp_path)
    assert done.returncode == 0 and "goes on from" in done.stderr, done
    assert newest(cut) == newest(whole)
    ours, theirs = (tensors_of(folder / f"step-{newest(whole)}") for folder in (cut, whole))
    assert len(ours) > 100 and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []

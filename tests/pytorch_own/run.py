"""Run PyTorch's own tests of collectives and of DDP, which ship in its wheel, with our process group or our DDP in place.

    python -m tests.pytorch_own.run --backend shm                          # collectives on "shm"
    python -m tests.pytorch_own.run --ddp guozhuang DDP ddp                # DDP's tests with our class, on gloo
    python -m tests.pytorch_own.run --json outcomes.json test_all_reduce_sum

A pattern is part of a test's name; without patterns all tests run. The tests are those of ``DistributedTest._DistTestBase`` in
``torch/testing/_internal/distributed/distributed_test.py``. That file decides while it is imported, by BACKEND and WORLD_SIZE,
which tests to skip: it is imported as for gloo, and the names of the backend and of the class are replaced after that, so that
exactly the tests of stock gloo run. Each test has ranks of its own, forked from this process, which has imported everything;
after ``LIMIT_S`` the ranks of a test are ended. The last line that is printed counts the outcomes.

From a test: ``run(backend, ddp, world_size, patterns)`` starts that process and returns the outcomes by test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 60
ROOT = Path(__file__).resolve().parents[2]
PASSED, SKIPPED = "passed", "skipped"


def run(
    backend: str, ddp: str, world_size: int, patterns: Sequence[str] = (), timeout_s: float = 500.0
) -> dict[str, str]:
    """Run the tests in a process of their own; return each test's outcome: "passed", "skipped: why", or the error's text.

    Args:
        backend: the backend of the ranks' process group: "gloo" or "shm".
        ddp: whose DistributedDataParallel the tests use: "torch" or "guozhuang".
        world_size: the number of ranks, 2 to 4; some tests need a certain number.
        patterns: parts of the names of the tests that run; all tests if there are none.
        timeout_s: the limit of all tests together.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-own-") as folder:
        path = Path(folder, "outcomes.json")
        words = ["--backend", backend, "--ddp", ddp, "--world-size", world_size, "--json", path, *patterns]
        command = [sys.executable, "-m", "tests.pytorch_own.run", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True)
        assert path.exists(), f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        outcomes: dict[str, str] = json.loads(path.read_text())
        return outcomes


def main() -> None:
    """Run tests as the command line says, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", help="the backend of the process group (default: gloo)")
    parser.add_argument("--ddp", default="torch", choices=("torch", "guozhuang"), help="whose DDP (default: torch)")
    parser.add_argument("--world-size", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--json", type=Path, help="where to write each test's outcome")
    parser.add_argument("--list", action="store_true", help="print the names of the tests instead of running them")
    parser.add_argument("patterns", nargs="*", help="part of a test's name; all tests without one")
    asked = parser.parse_args()
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(asked.world_size),
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "5",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
    }
    case = test_case(asked.backend, asked.ddp)
    names = unittest.TestLoader().getTestCaseNames(case)
    chosen = [name for name in names if not asked.patterns or any(part in name for part in asked.patterns)]
    if asked.list:
        print(*chosen, sep="\n")
        return
    outcomes = _Outcomes()
    unittest.TestSuite(map(case, chosen)).run(outcomes)
    if asked.json:
        asked.json.write_text(json.dumps(outcomes.found, indent=1))
    print(dict(Counter(text.partition(":")[0].partition("\n")[0][:20] for text in outcomes.found.values())))


def test_case(backend: str, ddp: str) -> Any:
    """Import PyTorch's tests, put our backend or class in place, and return the test case; called once in a process."""
    import torch.multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as stock

    import guozhuang

    common_distributed.logger.setLevel("WARNING")
    os.environ["BACKEND"] = (
        "mpi"  # tests of groups of some ranks are skipped below 8 ranks unless this name stands here
    )
    stock.BACKEND = backend
    stock.PROFILING_SUPPORTED_BACKENDS.append(backend)
    stock.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    if ddp == "guozhuang":
        stock.DistributedDataParallel = guozhuang.DistributedDataParallel
        torch.nn.parallel.DistributedDataParallel = guozhuang.DistributedDataParallel  # type: ignore[misc]

    class Stock(stock.TestDistBackend, stock.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
            super().tearDown()

    return Stock


class _Outcomes(unittest.TestResult):
    """Prints each test's outcome as it comes, and keeps it by the test's name in ``found``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _keep(self, test: Any, outcome: str) -> None:
        self.found[test._testMethodName] = outcome
        print(f"{test._testMethodName}: {outcome}", flush=True)

    def addSuccess(self, test: Any) -> None:
        self._keep(test, PASSED)

    def addSkip(self, test: Any, reason: str) -> None:
        self._keep(test, f"{SKIPPED}: {reason}")

    def addFailure(self, test: Any, error: Any) -> None:
        self._keep(test, self._exc_info_to_string(error, test))

    addError = addFailure


if __name__ == "__main__":
    main()

"""Run PyTorch's own tests of collectives and of DDP, which ship in its wheel, with our process group or our DDP in place.

    python -m tests.pytorch_own.run --backend shm                          # collectives on "shm"
    python -m tests.pytorch_own.run --ddp guozhuang DDP ddp                # DDP's tests with our class, on gloo
    python -m tests.pytorch_own.run --json outcomes.json test_all_reduce_sum

A pattern is part of a test's name; without patterns all tests run. The tests are those of ``DistributedTest._DistTestBase`` in
``torch/testing/_internal/distributed/distributed_test.py``. That file decides while it is imported, by BACKEND and WORLD_SIZE,
which tests to skip: it is imported as for gloo (``like``), and the names of the backend and of the class are replaced after
that, so that exactly the tests of stock gloo run. Each test has ranks of its own, forked from this process, which has imported
everything; after ``LIMIT_S`` the ranks of a test are ended. The last line that is printed counts the outcomes.

Most tests of DDP are written for GPUs. With ``--on-cpu`` they run too: what moves a tensor or a module to a GPU leaves it where
it is. Some then fail with PyTorch's class as well; what counts is that ours passes where PyTorch's passes.

From a test: ``run(backend, ddp, world_size, patterns, on_cpu)`` starts that process and returns the outcomes by test.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 60
ROOT = Path(__file__).resolve().parents[2]
PASSED, SKIPPED = "passed", "skipped"


def run(
    backend: str,
    ddp: str,
    world_size: int,
    patterns: Sequence[str] = (),
    like: str = "gloo",
    timeout_s: float = 500.0,
    on_cpu: bool = False,
    without: Iterable[str] = (),
) -> dict[str, str]:
    """Run the tests in a process of their own; return each test's outcome: "passed", "skipped: why", or the error's text.

    Args:
        backend: the backend of the ranks' process group: "gloo", "shm", or "hierarchical", which takes them for two nodes.
        ddp: whose DistributedDataParallel the tests use: "torch" or "guozhuang".
        world_size: the number of ranks, 2 to 4; some tests need a certain number.
        patterns: parts of the names of the tests that run; all tests if there are none.
        like: the backend whose tests run; tests of all_to_all on the CPU are marked for "mpi" alone.
        timeout_s: the limit of all tests together.
        on_cpu: whether tests that are written for GPUs run too, on the CPU.
        without: names of tests that do not run.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-own-") as folder:
        path = Path(folder, "outcomes.json")
        words = [
            "--backend",
            backend,
            "--ddp",
            ddp,
            "--world-size",
            world_size,
            "--like",
            like,
            "--json",
            path,
            *patterns,
        ]
        words += [*(["--on-cpu"] if on_cpu else []), *(f"--without={name}" for name in without)]
        command = [sys.executable, "-m", "tests.pytorch_own.run", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True)
        assert path.exists(), f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        outcomes: dict[str, str] = json.loads(path.read_text())
        return outcomes


def main() -> None:
    """Run tests as the command line says, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", help="gloo, shm or hierarchical (default: gloo)")
    parser.add_argument("--ddp", default="torch", choices=("torch", "guozhuang"), help="whose DDP (default: torch)")
    parser.add_argument("--world-size", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--like", default="gloo", help="the backend whose tests run: gloo or mpi (default: gloo)")
    parser.add_argument("--json", type=Path, help="where to write each test's outcome")
    parser.add_argument("--on-cpu", action="store_true", help="run tests that are written for GPUs, on the CPU")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave out this test")
    parser.add_argument("--list", action="store_true", help="print the names of the tests instead of running them")
    parser.add_argument("patterns", nargs="*", help="part of a test's name; all tests without one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pytorch-own-") as folder:
        _run(asked, folder)


def _run(asked: argparse.Namespace, folder: str) -> None:
    os.environ |= {
        "BACKEND": asked.like,
        "WORLD_SIZE": str(asked.world_size),
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "5",
        "INIT_METHOD": f"file://{folder}/store",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
    }
    case = test_case(asked.backend, asked.ddp, asked.like, asked.on_cpu)
    names = unittest.TestLoader().getTestCaseNames(case)
    chosen = [name for name in names if not asked.patterns or any(part in name for part in asked.patterns)]
    chosen = [name for name in chosen if name not in asked.without]
    if asked.list:
        print(*chosen, sep="\n")
        return
    outcomes = _Outcomes()
    unittest.TestSuite(map(case, chosen)).run(outcomes)
    if asked.json:
        asked.json.write_text(json.dumps(outcomes.found, indent=1))
    print(dict(Counter(text.partition(":")[0].partition("\n")[0][:20] for text in outcomes.found.values())))


def test_case(backend: str, ddp: str, like: str, on_cpu: bool) -> Any:
    """Import PyTorch's tests, put our backend or class in place, and return the test case; called once in a process."""
    import torch.multiprocessing
    from torch.testing._internal import common_distributed

    import guozhuang

    # Without GPUs these tests would be skipped in their ranks; so no rank starts for them.
    needs_gpu = unittest.skip("needs a GPU") if not torch.cuda.is_available() else None
    if on_cpu:
        _run_without_gpus(common_distributed)
    elif needs_gpu is not None:
        common_distributed.skip_if_no_gpu = needs_gpu
        common_distributed.skip_if_lt_x_gpu = lambda _, allow_cpu=False: (
            needs_gpu if not allow_cpu else lambda test: test
        )
    from torch.testing._internal.distributed import distributed_test as stock

    if on_cpu:
        stock.DDPUnevenTestInput = functools.partial(_smaller, stock.DDPUnevenTestInput)
    common_distributed.time = stock.time = _Polling()
    common_distributed.logger.setLevel("WARNING")
    if backend == "hierarchical":
        _register_two_nodes()
    os.environ["BACKEND"] = (
        "mpi"  # tests of groups of some ranks are skipped below 8 ranks unless this name stands here
    )
    stock.BACKEND = _Like(backend, like)
    stock.PROFILING_SUPPORTED_BACKENDS.append(backend)
    stock.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    if backend != "gloo":
        _allow(stock)
    wrapper = guozhuang.DistributedDataParallel if ddp == "guozhuang" else torch.nn.parallel.DistributedDataParallel
    if on_cpu:
        wrapper = _taking_no_device(wrapper)
        sys.modules[wrapper.__module__].DistributedDataParallel = wrapper  # type: ignore[attr-defined]  # for pickles
    stock.DistributedDataParallel = wrapper
    torch.nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = wrapper  # type: ignore[misc]

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


def _allow(stock: Any) -> None:
    """Let pass what the tests know of gloo alone.

    ``dist.monitored_barrier`` asks for gloo by name; our groups have the method that it then calls. All events of gloo in the
    profiler are asynchronous; ours are not where a call ran on the calling thread.
    """
    import torch.distributed as dist

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        group = dist.group.WORLD if group is None else group
        if not dist._rank_not_in_group(group):
            timeout = datetime.timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
            group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    events_of = stock.get_profiling_event

    def profiling_event(*args: Any, **kwargs: Any) -> Any:
        found = events_of(*args, **kwargs)
        for event in found:
            event.is_async = True
        return found

    dist.monitored_barrier = monitored_barrier
    stock.get_profiling_event = profiling_event


def _register_two_nodes() -> None:
    """Make "hierarchical" known: groups as over two nodes, of which the first half of the ranks is one."""
    import torch.distributed as dist

    from guozhuang.groups import roll_call
    from guozhuang.groups.hierarchical import HierarchicalGroup
    from guozhuang.watch.processes import Process, this_process

    def create(told: Any, options: Any) -> Any:
        rank, size = told.group_rank, told.group_size
        everyone = told.global_ranks_in_group or range(size)
        node = "ab"[everyone[rank] >= int(os.environ["WORLD_SIZE"]) // 2]
        cards = roll_call.call(told.store, "processes", rank, size, str(this_process(node)), 20.0)
        return HierarchicalGroup(told.store, rank, size, told.timeout, [Process.read(card) for card in cards])

    dist.Backend.register_backend("hierarchical", create, extended_api=True, devices=["cpu"])


def _smaller(make: Any, name: str, inp: Any, **options: Any) -> Any:
    """Return a case of ``test_ddp_uneven_inputs``: its convolutions get 30 pixels for 1000, by which a step takes a minute."""
    return make(name=name, inp=inp[..., :30, :30] if name == "large_conv_model" else inp, **options)


class _Polling:
    """The module ``time`` for PyTorch's files, which poll every 0.1 s: here every 5 ms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds if seconds != 0.1 else 0.005)


class _Like(str):
    """The name of a backend that also equals that of another, for which tests ask while they run."""

    _other: str

    def __new__(cls, name: str, other: str) -> _Like:
        made = super().__new__(cls, name)
        made._other = other
        return made

    def __eq__(self, other: object) -> bool:
        return other == self._other or str.__eq__(self, other)

    __hash__ = str.__hash__


def _run_without_gpus(common: Any) -> None:
    """Switch off the conditions that skip tests without GPUs, and make what moves tensors to GPUs leave them on the CPU."""
    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode

    def any_gpus(*args: Any, **options: Any) -> Any:
        return lambda function: function

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def placed(device: Any) -> Any:
        is_gpu = isinstance(device, int) and not isinstance(device, bool)
        is_gpu = is_gpu or (isinstance(device, str) and device.startswith("cuda"))
        return "cpu" if is_gpu or (isinstance(device, torch.device) and device.type == "cuda") else device

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if function is torch.Tensor.to:
                args = (args[0], *map(placed, args[1:]))
            if "device" in kwargs:
                kwargs["device"] = placed(kwargs["device"])
            return function(*args, **kwargs)

    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, any_gpus)
    common.skip_if_no_gpu = lambda function: function
    common.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    to = nn.Module.to
    nn.Module.to = lambda self, *args, **options: to(self, *map(placed, args), **options)  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]
    torch.cuda.set_device = nothing
    torch.cuda.synchronize = lambda *args, **options: None
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[misc, assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    # Compiling kernels for the CPU takes a minute, and the tests look at graphs and gradients alone.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    OnCpu().__enter__()


def _taking_no_device(base: Any) -> Any:
    """Return a class like ``base``, a wrapper, that ignores on which device it is told to work."""

    class OnCpu(base):  # type: ignore[misc]
        def __init__(
            self, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
        ) -> None:
            super().__init__(module, None, None, *args, **options)

    OnCpu.__name__, OnCpu.__qualname__, OnCpu.__module__ = base.__name__, base.__qualname__, base.__module__
    return OnCpu


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

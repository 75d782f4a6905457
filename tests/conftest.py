"""What holds for every test: fixed seeds, nothing left behind, and skips that say why."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forking, shards
from tests.forking import starts
from tests.waiting import LIMIT_S

# Threads that libraries start once and keep on purpose.
KEPT_THREADS = ("tqdm", "fsspecIO", "pytest_timeout")
# In the order they run: what is wrong in a line of arithmetic is not to be found after minutes of real hosts.
TIERS = ("pure", "threads", "processes", "hosts", "device")
# How many processes the tests of a whole run start themselves, from the fork server or as new programs. What those start is not
# counted: a launcher starts about six more. A start is what costs time; whoever needs more shares ranks between cases first.
# 1,912 are taken; each first batch of a divided model forks two references, which cost a hundredth of a rank with torch.
STARTS_BUDGET = {"not slow": 2_000}
# Processor time of `make test` after the installation, lint and types included. See [Note: processor time].
PROCESSOR_BUDGET_S = {"not slow": 600.0}
# Scaled times of the same tests differ that much on two cores of an AMD EPYC and of an Intel Xeon. New bytecode and a new cache
# of types are a part of it.
HEAD_ROOM = 1.15
PIECE_S = 0.012
# What other programs may use meanwhile while the budget is judged, as a share of the tests' own processor time.
OTHERS_SHARE = 0.25
# Variables that torch sets for itself: its compiler does when the first optimizer of a process imports it.
SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}

# Programs of this environment are found by name, as where it is activated: a system may have no `python`.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), *filter(None, [os.environ.get("PATH")])])

# A starter that ignores signals (nohup, the background of a shell) would have all processes of the tests ignore them. A handler
# that does nothing has the same effect on pytest, and becomes the default in the programs that pytest starts.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)

# Until tests are collected: see pytest_collection.
gc.disable()


def _settles(is_clean: Callable[[], bool]) -> bool:
    if is_clean():
        return True
    # What ends by itself gets the time to do it: a collection takes a tenth of a second of a processor.
    deadline, next_collection = time.monotonic() + LIMIT_S, time.monotonic() + 0.1
    while not is_clean():
        if time.monotonic() > deadline:
            return False
        if time.monotonic() > next_collection:
            # A thread may end with the last reference to an object that is part of a cycle: also after the first collection.
            gc.collect()
            next_collection = time.monotonic() + 1.0
        time.sleep(0.01)
    return True


def _threads() -> set[threading.Thread]:
    kept = [t for t in threading.enumerate() if t.name.startswith(KEPT_THREADS)]
    return {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)} - set(kept)


def _children_of(process: int) -> list[int]:
    """The children of a process, asked of the kernel: psutil looks at every process of the machine, for each of 3,000 tests."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return found


def _children() -> set[int]:
    """Every descendant but the two servers of multiprocessing, which live as long as the test run."""
    servers = {
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
    }
    if not os.path.exists(
        f"/proc/self/task/{os.getpid()}/children"
    ):  # no Linux, or a kernel without CONFIG_PROC_CHILDREN
        return {process.pid for process in psutil.Process().children(recursive=True)} - servers
    found: set[int] = set()
    look_at = [os.getpid()]
    while look_at:
        new = [process for process in _children_of(look_at.pop()) if process not in found]
        found.update(new)
        look_at += new
    return found - servers


def _memory_files() -> set[str]:
    """Anonymous memory files (memfd) that this process holds open."""
    found = set()
    for entry in os.scandir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("/memfd:"):
            found.add(f"{entry.name} -> {target}")
    return found


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """What lives by now, torch above all, is passed over by later collections: a second each, in some hundred tests."""
    gc.collect()
    gc.freeze()
    _pieces_s.append(_piece_of_work_s())
    # pytest hands each of its handlers to each logger that hands on nothing, six times in a test: torch has forty of them.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers in every test, in whatever order tests run."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also takes a stack trace for each kind of device


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaves environment, threads, processes, a process group or shared memory behind fails."""
    import torch
    import torch.distributed as dist

    environ, threads, children, memory = dict(os.environ), _threads(), _children(), _memory_files()
    default_dtype, num_threads, cwd = torch.get_default_dtype(), torch.get_num_threads(), os.getcwd()
    yield
    left = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        left.append("an initialised process group")
    changed = {k for k in environ.keys() | os.environ.keys() if environ.get(k) != os.environ.get(k)} - SET_BY_TORCH
    changed -= {"PYTEST_CURRENT_TEST"}
    if changed:
        left.append(f"changed environment variables: {', '.join(sorted(changed))}")
        os.environ.clear()
        os.environ.update(environ)
    if not _settles(lambda: _threads() <= threads):
        left.append(f"threads: {', '.join(t.name for t in _threads() - threads)}")
    if not _settles(lambda: _children() <= children):
        for process in _children() - children:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(f"child process {psutil.Process(process)}")
                psutil.Process(process).kill()
    if _memory_files() - memory:
        left.append(f"shared memory: {', '.join(sorted(_memory_files() - memory))}")
    if torch.get_default_dtype() != default_dtype:
        torch.set_default_dtype(default_dtype)
        left.append("another default dtype")
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
        left.append("another number of torch threads")
    if os.getcwd() != cwd:
        os.chdir(cwd)
        left.append("another working directory")
    assert not left, "the test left behind " + "; ".join(left)


# ---- side by side: `pytest -n 4 --dist loadfile`, by pytest-xdist. Without it nothing here has an effect.
# [Note: side by side] Tests mostly wait, so four workers share two cores. The tests of a file go to one worker, because cases
# share ranks; those of a file marked `waits` are dealt out one by one.


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: it is not looked through for garbage."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only deals them out needs no torch."""
    if _runs_tests(config):
        import torch

        from tests import drawing  # noqa: F401 - how many examples

        # Tests compute on small tensors, side by side: a second thread only waits for the first one, and takes processor time.
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast ones first, or what waits longest where tests run side by side; skip what this machine cannot run, and say so."""
    _keep_shard(config, items)
    is_worker = hasattr(config, "workerinput")
    items.sort(key=lambda item: TIERS.index(_tier(item.path.parts)) * (-1 if is_worker else 1))
    if is_worker:
        items.sort(key=lambda item: item.path.name != "test_types.py")  # the longest of all
    for item in items:
        if item.get_closest_marker("needs_root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root to make network namespaces"))
        if item.get_closest_marker("device") and not _has_device():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@functools.cache
def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files, or the tests of files that are marked ``waits``."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if _waits(config.rootpath / file) else file

    return Files(config, log)


@functools.cache
def _waits(file: Path) -> bool:
    return "pytest.mark.waits" in file.read_text()


# ---- the slow tests in parts: `make test-slow SHARD=3`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=int, help=f"run the slow tests of this part alone, 1 to {shards.NUM_SHARDS}")
    parser.addoption(
        "--note-durations", action="store_true", help=f"write what slow tests took to {shards.DURATIONS.name}"
    )


def _keep_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not slow, and what is in another part. See tests/shards.py."""
    number = config.getoption("--shard")
    if number is None:
        return
    # Properties are part of the slow tests too, which try more examples of them (tests/drawing.py).
    slow = [item for item in items if item.get_closest_marker("slow") or _is_property(item)]
    mine = shards.shard_of({shards.unit(item.nodeid) for item in slow}, number)
    kept = [item for item in slow if shards.unit(item.nodeid) in mine]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_property(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "obj", None), "hypothesis")


# ---- what a run cost, by tier: seconds of all workers together, processor time, and process starts
# [Note: processor time] A test costs what this process, its children and the fork server with its children used while it ran.
# What was reaped by nobody of these, such as an orphan that outlived its launcher, is not seen. Machines differ by a factor of
# three, and one machine by two within an hour. So each worker times a fixed piece of work before each module, and the budget
# holds for a machine on which that takes PIECE_S. Beside other programs the same tests cost a third more, for caches are
# shared then, so the budget is not judged there.


def _tier(parts: tuple[str, ...]) -> str:
    return next((tier for tier in TIERS if tier in parts), TIERS[0])


def _count_programs(event: str, _: object) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        starts["programs"] += 1


sys.addaudithook(_count_programs)
_noted_starts, _noted_s = 0, 0.0


def _busy_s() -> float:
    """Processor time of all programs of the machine since it was started."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))


_busy_at_first_s = _busy_s()
_pieces_s: list[float] = []  # of all workers, in the process that reports
_workers_s: list[float] = []


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forking.processor_s()


def _piece_of_work_s() -> float:
    """Processor time of a fixed piece of work, as tests do it: Python and small operations of torch."""
    import torch

    begin_s, row = time.process_time(), torch.ones(8)
    for number in range(2_000):
        row = row * 1.0 + (number % 3 == 1)
    return time.process_time() - begin_s


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _noted_s
    if not _noted_s:
        _noted_s = _processor_s() - forking.preload_s


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    global _noted_starts, _noted_s
    now_s = _processor_s() - forking.preload_s  # which belongs to no test
    item.user_properties += [("starts", starts.total() - _noted_starts), ("processor_s", now_s - _noted_s)]
    _noted_starts, _noted_s = starts.total(), now_s


def _runs_tests(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _runs_tests(session.config):
        forking.stop()
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput |= {"processor_s": _processor_s(), "pieces_s": _pieces_s}  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    output = getattr(node, "workeroutput", None) or {}
    _workers_s.append(output.get("processor_s", 0.0))
    _pieces_s.extend(output.get("pieces_s", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What each tier cost, and the dearest tests; fails the run where the whole cost more than its budget."""
    tests, seconds, started, processor_s = (collections.Counter[str]() for _ in range(4))
    dearest: collections.Counter[str] = collections.Counter()
    took: collections.Counter[str] = collections.Counter()
    for outcome in ("passed", "failed", "error", ""):
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue  # of a file that could not be collected
            tier = _tier(Path(report.nodeid.partition("::")[0]).parts)
            tests[tier] += report.when == "call"
            seconds[tier] += report.duration
            took[shards.unit(report.nodeid)] += report.duration
            noted = dict(report.user_properties) if report.when == "teardown" else {}
            started[tier] += noted.get("starts", 0)
            processor_s[tier] += noted.get("processor_s", 0.0)
            dearest[report.nodeid] += noted.get("processor_s", 0.0)
    if not tests.total():
        return
    line = terminalreporter.write_line
    for tier in TIERS:
        line(
            f"{tier:9} {tests[tier]:5} tests {seconds[tier]:6.0f} s, {processor_s[tier]:5.0f} s of a processor, "
            f"{started[tier]:5} process starts"
        )
    line("the dearest: " + ", ".join(f"{test} {cost_s:.1f} s" for test, cost_s in dearest.most_common(10)))
    if config.getoption("--note-durations"):
        shards.note(took)
    own_s = _processor_s() if _runs_tests(config) else time.process_time()  # workers have counted themselves
    whole_s, piece_s = own_s + sum(_workers_s), sum(_pieces_s) / max(len(_pieces_s), 1)
    scaled_s = whole_s * PIECE_S / piece_s if piece_s else whole_s
    line(f"in all {whole_s:.0f} s of a processor, {scaled_s:.0f} s at the speed of the machine that the budget is for")
    others_s = _busy_s() - _busy_at_first_s - whole_s
    is_alone = others_s < OTHERS_SHARE * whole_s
    if not is_alone:
        line(f"other programs used {others_s:.0f} s of a processor meanwhile, so the budget is not judged")
    most_s = PROCESSOR_BUDGET_S.get(_selected(config)) if is_alone else None
    for what, number, most in (
        ("process starts", started.total(), STARTS_BUDGET.get(_selected(config))),
        ("seconds of a processor", scaled_s / HEAD_ROOM, most_s),
    ):
        if most is not None and number > most:
            line(f"{number:.0f} {what} are more than the budget of {most:.0f}: see conftest.py")
            terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _selected(config: pytest.Config) -> str:
    """Which tests run, as the keys of the budgets say it; "part" where some were chosen by hand."""
    chosen = config.option.keyword or config.getoption("--shard") or config.args != ["tests"]
    return "part" if chosen else config.option.markexpr

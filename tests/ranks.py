"""Run a function on several real ranks and bring back what each returned, or why it did not.

    def sums(rank, world_size, scale):          # a module-level function of the test module
        tensor = torch.full((3,), float(rank * scale))
        dist.all_reduce(tensor)
        return tensor

    def test_sums():
        assert torch.equal(run_ranks(sums, 2, 10)[0], torch.full((3,), 10.0))

Ranks are forked from a server that has torch, guozhuang and the tests imported (tests/forking.py): a rank costs 20 ms.
Nothing hangs: after the time-out, or a while after the first rank failed, each rank is asked for its Python traceback
and ended, and the traceback is part of the error. Nothing is left: every process is waited for, its files are removed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forking import fork_server
from tests.waiting import LIMIT_S

# After one rank failed the others get this long to notice by themselves before they are asked and ended.
GRACE_S = 8.0
# The limit of each collective inside the ranks: below the default time-out of run_ranks, so that gloo speaks first.
GROUP_TIMEOUT_S = 0.6 * LIMIT_S
# Below those that Linux gives away by itself, above those of Slurm (tests/hosts/slurm.py).
_PORTS = range(13_000, 32_000)
_asked = itertools.count()


@dataclass(frozen=True)
class RankError:
    """How one rank failed.

    Attributes:
        rank: the rank.
        exit_code: of the process; negative for a signal, as in multiprocessing. None when it was ended for its silence.
        type_name: the name of the exception's class; "" when the process died without raising.
        message: ``str`` of the exception.
        text: the traceback, or what the rank was doing when it was ended, and what it printed.
    """

    rank: int
    exit_code: int | None
    type_name: str
    message: str
    text: str


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    backend: str = "gloo",
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    collect_errors: bool = False,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``num_ranks`` processes; return the results in rank order.

    Args:
        fn: a function at the top level of a module; it is found again by its name.
        num_ranks: how many processes.
        *args: what each rank gets, its own copy (by pickle).
        timeout_s: wall-clock limit for all of it.
        backend: of the process group that is made before ``fn`` and destroyed after it.
        init: whether to make that process group. Without it the ranks have the environment of torchrun
            (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and may call ``guozhuang.init``.
        env: further variables of the ranks; None removes one.
        collect_errors: return a ``RankError`` in the place of a failed rank's result instead of raising, and let the
            others run on until ``timeout_s``.
        group_timeout_s: the limit of each collective.

    Raises:
        AssertionError: a rank failed and ``collect_errors`` is False; the text holds the traceback of every rank.
    """
    context = fork_server()
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    environ = _environ(num_ranks, env)
    try:
        payload = pickle.dumps((fn, args))
        ranks = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            settings = (rank, num_ranks, environ, str(folder), backend if init else None, group_timeout_s)
            process = context.Process(target=_child, args=(payload, sender, settings), name=f"rank {rank}")
            process.start()
            sender.close()
            ranks.append(_Rank(rank, process, receiver, folder))
        try:
            _wait(ranks, timeout_s, GRACE_S if not collect_errors else None)
        finally:
            for each in ranks:
                each.reap()
        outcomes = [each.outcome() for each in ranks]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = [o for o in outcomes if isinstance(o, RankError)]
    if failed and not collect_errors:
        raise AssertionError("\n".join(f"---- rank {e.rank} of {num_ranks} failed:\n{e.text}" for e in failed))
    return outcomes


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on, and that the kernel gives to nobody who asks for any port.

    Processes that test side by side begin at different ports.
    """
    while True:
        port = _PORTS.start + (os.getpid() * 37 + next(_asked)) % len(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class _Rank:
    """The parent's view of one rank."""

    def __init__(self, rank: int, process: Any, receiver: Any, folder: Path) -> None:
        self.rank, self.process, self.receiver = rank, process, receiver
        self.stacks, self.output = _stacks_file(folder, rank), _output_file(folder, rank)
        self.answer: tuple[str, Any] | None = None
        self.was_ended = False

    @property
    def failed(self) -> bool:
        return (self.answer is not None and self.answer[0] == "error") or (
            self.answer is None and not self.process.is_alive() and not self.receiver.poll()
        )

    def read(self) -> None:
        try:
            self.answer = pickle.loads(self.receiver.recv_bytes())
        except (EOFError, OSError):
            self.process.join(LIMIT_S)

    def ask_for_stacks(self) -> None:
        if self.process.is_alive():
            self.was_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def reap(self) -> None:
        if self.answer is not None:
            self.process.join(LIMIT_S)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.receiver.close()

    def outcome(self) -> Any:
        if self.answer is not None and self.answer[0] == "result":
            return self.answer[1]
        printed = self.output.read_text(errors="replace")[-4000:] if self.output.exists() else ""
        printed = f"\n-- it printed:\n{printed}" if printed else ""
        code = self.process.exitcode
        if self.answer is not None:
            type_name, message, text = self.answer[1]
            return RankError(self.rank, code, type_name, message, text + printed)
        if self.was_ended:
            stacks = self.stacks.read_text(errors="replace") if self.stacks.exists() else ""
            text = f"it did not end in time and was ended; it was here:\n{stacks or '(no Python traceback)'}"
            return RankError(self.rank, None, "", "", text + printed)
        return RankError(self.rank, code, "", "", f"the process ended with code {code} and no result{printed}")


def _wait(ranks: list[_Rank], timeout_s: float, grace_s: float | None) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(ranks)
    while waiting:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        ready = multiprocessing.connection.wait([each.receiver for each in waiting], timeout=left_s)
        for each in [w for w in waiting if w.receiver in ready]:
            each.read()
            waiting.remove(each)
            if grace_s is not None and each.failed:
                deadline = min(deadline, time.monotonic() + grace_s)
    for each in waiting:
        each.ask_for_stacks()
    if waiting:
        time.sleep(0.5)  # the handlers write their files


def _environ(num_ranks: int, env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    own: dict[str, str | None] = {
        "RANK": "",  # each rank fills these two in, unless the caller did
        "LOCAL_RANK": "",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    # The server was started with the environment of an earlier test; what counts is the caller's of now.
    return dict(os.environ) | own | dict(env or {})


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}"


def _child(
    payload: bytes, sender: Any, settings: tuple[int, int, dict[str, str | None], str, str | None, float]
) -> None:
    rank, num_ranks, environ, folder, backend, group_timeout_s = settings
    with open(_output_file(Path(folder), rank), "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    stacks = open(_stacks_file(Path(folder), rank), "w")  # noqa: SIM115 - as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    wanted = environ | {k: str(rank) for k in ("RANK", "LOCAL_RANK") if environ[k] == ""}
    os.environ.clear()
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    own_pid = os.getpid()
    exit_code, store = 0, dist.FileStore(os.path.join(folder, "store"), num_ranks) if backend is not None else None
    try:
        if store is not None:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=group_timeout_s),
            )
            store.set(f"connected/{rank}", "")
        fn, args = pickle.loads(payload)
        answer = pickle.dumps(("result", fn(rank, num_ranks, *args)))
    except BaseException as error:
        answer = pickle.dumps(("error", (type(error).__name__, str(error), traceback.format_exc())))
        exit_code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    if os.getpid() != own_pid:  # the reference of a proof, in which the function has come to its end
        os._exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(answer)
    sender.close()
    if store is not None and store.check([f"connected/{rank}"]):  # else a rank that still connects would fail
        with contextlib.suppress(RuntimeError):
            store.wait([f"connected/{r}" for r in range(num_ranks)], datetime.timedelta(seconds=LIMIT_S))
    if exit_code == 0 and backend is not None and dist.is_initialized():
        dist.destroy_process_group()
    # Past this point nothing of interest happens, and an unfinished collective of a failed rank must not hold it here.
    os._exit(exit_code)

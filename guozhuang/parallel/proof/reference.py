"""The reference: a copy of this process in which the script goes on with the undivided model, until it has told what comes out.

[Note: the reference process] What a script does between a forward and its optimizer's step cannot be known: it computes losses
of parameters, of attributes that a forward has set, of what hooks have seen. So the undivided run is the script itself. One
rank forks; in the copy the model is whole, and the same script goes on as one process would. It reports after each forward,
after the first backward and where the optimizer is about to step, and there it ends. Its memory is its own: weights that lie in
shared memory are copied first. It prints nothing, and it ends at once where it would touch what it shares with the ranks: a
collective, a store, the workers of a data loader. What it has reported until then still counts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import dataloader

from guozhuang.watch.processes import SET_PDEATHSIG, prctl

from ...world.machine import available_bytes
from ..division import division_of

# Weights, gradients, and activations that may be as large as both.
_NEEDS_TIMES = 4
# How long a report may take: many times what the ranks took for the same, and never less than this.
_LEAST_LIMIT_S, _TIMES = 120.0, 50.0
_LENGTH = struct.Struct("<q")
_SAFE = ("size", "rank", "name", "boxed", "unbox", "set_timeout", "get_group_store", "bound_device_id")


@dataclass
class ReferenceReport:
    """What the reference tells after an event.

    Attributes:
        event: "forward", "backward", "step"; or "left": it has ended without reaching the next of these.
        record: of a forward.
        loss: of a backward.
        rounding: by how much that may differ because the outputs that it was computed from are rounded.
        gradients: of the parameters of each model, after a backward and before a step, by number of the model and name.
        values: of the parameters before a step.
        has_drawn: whether random numbers were drawn since it began; told in audits alone.
        why: why it has ended.
    """

    event: str
    record: Any = None
    loss: float | None = None
    rounding: float = 0.0
    gradients: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)
    values: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    has_drawn: bool = False
    why: str = ""


class Reference:
    """The reference as the process that has forked it sees it."""

    def __init__(self, pid: int, reports: int, go: int | None = None) -> None:
        self._pid, self._reports, self._began_s = pid, reports, time.monotonic()
        self._ours, self._go = os.getpid(), go

    def begin(self) -> None:
        """Let one that waits begin."""
        if self._go is not None:
            os.write(self._go, b"1")
            os.close(self._go)
            self._go = None

    def next(self) -> ReferenceReport:
        """Return its next report; it waits for one, but not without an end."""
        ours_s = time.monotonic() - self._began_s
        limit_s = max(_LEAST_LIMIT_S, _TIMES * ours_s)
        ends_s = time.monotonic() + limit_s
        head = self._read(_LENGTH.size, ends_s)
        body = self._read(_LENGTH.unpack(head)[0], ends_s) if head is not None else None
        if body is not None:
            found: ReferenceReport = torch.load(io.BytesIO(body), weights_only=False)
            return found
        is_late = time.monotonic() >= ends_s
        ended = self.end()  # its reports end with it, so that nobody has to end one that is not late
        return ReferenceReport("left", why=f"it has told nothing for {limit_s:.0f} s" if is_late else ended)

    def end(self) -> str:
        """End it, if it still runs; return in words how it has ended."""
        if self._pid == 0 or os.getpid() != self._ours:
            return "it has ended"
        pid, self._pid = self._pid, 0
        os.close(self._reports)
        if self._go is not None:
            os.close(self._go)
            self._go = None
        try:
            os.kill(pid, signal.SIGKILL)  # once, and before it is waited for: then its number may be another process's
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except (ProcessLookupError, ChildProcessError):  # the script has waited for all its children
            return "it has ended"
        return f"signal {-code} has ended it" if code < 0 else f"it has ended with code {code}"

    def __del__(self) -> None:
        self.end()

    def _read(self, num_bytes: int, ends_s: float) -> bytearray | None:
        """Return the next bytes; None if it has ended, or the time is over."""
        found = bytearray()
        while len(found) < num_bytes:
            left_s = ends_s - time.monotonic()
            if self._pid == 0 or left_s <= 0 or not select.select([self._reports], [], [], left_s)[0]:
                return None
            some = os.read(self._reports, min(num_bytes - len(found), 1 << 20))
            if not some:
                return None
            found += some
        return found


class ReferenceSide:
    """The reference as it sees itself: what it reports, and when it ends."""

    def __init__(self, reports: int) -> None:
        self._reports = reports

    def tell(self, report: ReferenceReport) -> None:
        """Send a report; it takes as long as the other process takes to read it."""
        buffer = io.BytesIO()
        torch.save(report, buffer)
        octets = memoryview(buffer.getvalue())
        _write(self._reports, _LENGTH.pack(len(octets)))
        _write(self._reports, octets)

    def leave(self, why: str) -> NoReturn:
        """End this process, saying why."""
        with contextlib.suppress(BaseException):
            self.tell(ReferenceReport("left", why=why))
        os._exit(0)


def _write(file: int, octets: bytes | memoryview) -> None:
    left = memoryview(octets)
    while left:
        left = left[os.write(file, left) :]


#: This process, if it is a reference.
here: ReferenceSide | None = None


def lack_of(parameters: Collection[Tensor], num_together: int) -> str:
    """Return why no copy of a process can compute a step with these parameters, in words; "" if one can.

    Args:
        parameters: of the models, divided or whole.
        num_together: how many processes of this node would be copied, this one among them; 0: this one would not.
    """
    if any(p.device.type != "cpu" for p in parameters):
        return "the model is on an accelerator, whose state no copy of a process has"
    shapes = ((p.shape if (division := division_of(p)) is None else division.shape, p.itemsize) for p in parameters)
    needs = _NEEDS_TIMES * sum(shape.numel() * itemsize for shape, itemsize in shapes)
    if num_together and (free := available_bytes() / num_together) < needs:
        of = f" for each of {num_together} copies" if num_together > 1 else ""
        return f"the step of one process may need {needs / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free{of}"
    return ""


def fork_reference(*, waits: bool = False) -> Reference | None:
    """Fork a reference: return it here, and None in it, where :data:`here` is set and the model is still divided.

    Args:
        waits: it begins when it is told to, or never.
    """
    global here
    receiving, sending = os.pipe()
    waiting, go = os.pipe() if waits else (None, None)
    state = random.getstate()  # which Python changes in a copy
    pid = os.fork()
    if pid:
        os.close(sending)
        if waiting is not None:
            os.close(waiting)
        return Reference(pid, receiving, go)
    try:
        os.close(receiving)
        random.setstate(state)
        here = ReferenceSide(sending)
        prctl(SET_PDEATHSIG, signal.SIGKILL)
        if waiting is not None and go is not None:
            os.close(go)
            if not os.read(waiting, 1):
                os._exit(0)
        _keep_to_itself(here)
    except BaseException:
        os._exit(1)
    return None


def _keep_to_itself(side: ReferenceSide) -> None:
    """Let nothing that this process does from now on reach others."""
    gc.disable()  # what the ranks share is not to be closed from here
    torch.set_num_threads(1)  # threads do not live on in a copy
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    with contextlib.suppress(ValueError):  # not in the thread for signals
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)

    def ended(*told: Any) -> None:
        side.leave("the script has raised " + "".join(traceback.format_exception_only(*told[:2])).strip())

    sys.excepthook = ended
    atexit.register(side.leave, "the script has ended")
    for kind in _kinds(dist.ProcessGroup):
        _refuse(side, kind, lambda name: not name.startswith(("get", "_get", "set", "_set")) and name not in _SAFE)
    for kind in _kinds(dist.Store):
        _refuse(side, kind, lambda _: True)
    iterator: Any = dataloader._BaseDataLoaderIter
    iterator.__next__ = lambda *_: side.leave("the script takes the next batch from its loader")
    workers: Any = dataloader._MultiProcessingDataLoaderIter
    workers._shutdown_workers = lambda *_: None


def _kinds(base: Any) -> Iterator[Any]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _refuse(side: ReferenceSide, kind: Any, is_refused: Callable[[str], bool]) -> None:
    """Let this process end where it calls a method of what it shares."""
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") and callable(value) and not isinstance(value, type) and is_refused(name):
            why = f"the script calls {kind.__name__}.{name}"
            setattr(kind, name, lambda *_, why=why, **__: side.leave(why))


def gradients_of(models: Mapping[int, torch.nn.Module]) -> dict[tuple[int, str], Tensor | None]:
    """Return the gradients of models, by the number of the model and the name of the parameter."""
    return {(number, name): p.grad for number, model in models.items() for name, p in model.named_parameters()}


def values_of(models: Mapping[int, torch.nn.Module]) -> dict[tuple[int, str], Tensor]:
    """Return the values of the parameters of models, by the number of the model and the name of the parameter."""
    return {(number, name): p.detach() for number, model in models.items() for name, p in model.named_parameters()}

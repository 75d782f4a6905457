"""What runs a Program: the C engine where it was built, else its twin in Python. Both work on the same control pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from guozhuang.errors import UsageError, explain

from . import arithmetic
from .program import DTYPE_OF, ELEMENT_BYTES, Kind, Op, Outcome, Place, Program, Stream
from .python_engine import PythonEngine

try:
    from . import _engine
except ImportError:  # it was not built: the twin does the work
    _engine = None  # type: ignore[assignment]

__all__ = ["Engine", "PythonEngine", "copy", "make_engine", "native_built", "reduce", "reduce_into"]

_OPS = {op.name.lower(): op for op in Op}


class Engine(Protocol):
    """Runs programs of one rank; ranks meet in barriers through their control pages. One run at a time.

    Made by ``make_engine``. It keeps only addresses and descriptors: the caller keeps mappings and pidfds alive as long
    as a run is under way.
    """

    def run(
        self,
        program: Program,
        descriptor: bytes | None,
        private: bytes,
        deadline_s: float,
        spin_us: int,
        /,
    ) -> Outcome:
        """Run a program (every rank must, with the same number of rounds); arguments by position.

        Args:
            program: what to do.
            descriptor: begins an operation: at most 256 bytes that must be the same on all ranks, compared after the first
                barrier (the program must have one). None: the run continues the operation.
            private: at most 128 bytes that the peers can read with ``privates``; ignored if ``descriptor`` is None.
            deadline_s: how long the whole run may take, in seconds from now.
            spin_us: how long each wait looks before it sleeps, in microseconds; 0 to sleep at once.

        Returns:
            ``(status, ranks)``: 0 and no ranks if all went well; else see ``Status``.

        Raises:
            ValueError: the program or an argument makes no sense; nothing was done.
            RuntimeError: a run is under way in another thread.
            KeyboardInterrupt: (or what a signal handler raises) while waiting in the main thread; the rank is BROKEN then.
        """

    def descriptors(self) -> list[bytes]:
        """The compared part (256 bytes) of the current operation, of every rank; valid until the next operation."""

    def privates(self) -> list[bytes]:
        """The private part (128 bytes) of the current operation, of every rank; valid until the next operation."""

    def doing(self, rank: int, /) -> str:
        """What a rank said it is doing."""

    def set_doing(self, text: bytes, /) -> None:
        """Say what this rank is doing; cut after 120 bytes."""

    def set_state(self, state: int, /) -> None:
        """Set this rank's State, and wake the peers that wait for it."""

    def state_of(self, rank: int, /) -> int:
        """The State of a rank."""

    def arrived_of(self, rank: int, /) -> int:
        """How many barriers a rank has arrived at, modulo 2**32."""


def native_built() -> bool:
    """Whether the C engine can be imported."""
    return _engine is not None


def make_engine(rank: int, size: int, controls: Sequence[int], pidfds: Sequence[int], *, native: bool) -> Engine:
    """Make the engine of a rank, over fresh control pages.

    Args:
        rank: of this process in the group.
        size: number of ranks.
        controls: address of each rank's control page.
        pidfds: a descriptor per rank that tells of its end: a pidfd (readable when the process ends) or a connected socket
            (hang-up; messages do not disturb); -1 for this rank, and where there is none.
        native: the C engine; ask only if ``native_built()`` on all ranks.

    Raises:
        UsageError or ValueError: the arguments do not fit each other.
        WorldError: neither engine works on this machine.
    """
    if native:
        assert _engine is not None, "the group asked for an engine that was not built"
        return _engine.Engine(rank, size, list(controls), list(pidfds))
    return PythonEngine(rank, size, controls, pidfds)


def copy(dst: int, src: int, num_bytes: int) -> None:
    """Copy between addresses, without the GIL."""
    (arithmetic if _engine is None else _engine).copy(dst, src, num_bytes)


def reduce(dsts: Sequence[int], srcs: Sequence[int], num_elements: int, dtype: int, op: int, scale: float) -> None:
    """Combine sources into destinations (addresses), without the GIL. See ``Stream`` for what the arguments mean.

    Raises:
        ValueError: no such dtype or op, or they do not go together; an address is not a multiple of the element size.
    """
    if num_elements == 0:
        return
    num_bytes = num_elements * ELEMENT_BYTES[dtype]
    places = tuple(Place(address) for address in dsts), tuple(Place(address) for address in srcs)
    program = Program((Stream(Kind.REDUCE, 0, num_bytes, num_bytes, *places, dtype, op, scale),))
    if _engine is not None:
        _engine.work(program)
    else:
        arithmetic.check(program)
        arithmetic.work(program, 0)


def reduce_into(dsts: Sequence[Tensor], srcs: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
    """Combine tensors in the given order, in this process: every dst becomes ``op(srcs) * scale``.

    float16 and bfloat16 are combined and scaled in float32, then rounded once. Autograd does not see it.

    Args:
        dsts: 1-d, contiguous CPU tensors of the same length and dtype. A dst may be one of the srcs; apart from that, their
            memory must not overlap.
        srcs: the same.
        op: "sum", "prod", "min", "max", "band", "bor" or "bxor" (the last three for integers and bool).
        scale: factor; must be 1.0 for integers and bool.

    Raises:
        UsageError: there is no tensor; dtypes, lengths or layouts differ; the op or dtype is not known; memory overlaps.
    """
    everything = [*dsts, *srcs]
    if not dsts or not srcs:
        raise UsageError(explain("reduce_into needs at least one dst and one src", value=(len(dsts), len(srcs))))
    model = dsts[0]
    if model.dtype not in DTYPE_OF:
        raise UsageError(explain("Tensors of this dtype cannot be reduced", value=model.dtype))
    if op not in _OPS:
        raise UsageError(explain("There is no such reduction", value=op, fix=f"choose one of {', '.join(_OPS)}"))
    is_float, is_bitwise = model.is_floating_point(), _OPS[op] in (Op.BAND, Op.BOR, Op.BXOR)
    if (is_float and is_bitwise) or (not is_float and scale != 1.0):
        what = "Integers and bool are not scaled, floating-point numbers not combined bit by bit"
        raise UsageError(explain(what, value=(str(model.dtype), op, scale)))
    for tensor in everything:
        layout = (tensor.ndim, tensor.numel(), tensor.dtype, tensor.device.type, tensor.is_contiguous())
        if layout != (1, model.numel(), model.dtype, "cpu", True):
            fix = "pass 1-d contiguous CPU tensors of one length and dtype"
            raise UsageError(
                explain("Tensors to reduce do not fit each other", value=(tuple(tensor.shape), tensor.dtype), fix=fix)
            )
    num_bytes = model.numel() * model.itemsize
    starts = sorted({tensor.data_ptr() for tensor in everything})
    if num_bytes and any(second - first < num_bytes for first, second in itertools.pairwise(starts)):
        raise UsageError(
            explain("The memory of tensors to reduce overlaps", fix="pass tensors that are apart, or the same")
        )
    addresses = [tensor.data_ptr() for tensor in dsts], [tensor.data_ptr() for tensor in srcs]
    reduce(*addresses, model.numel(), DTYPE_OF[model.dtype], _OPS[op], scale)

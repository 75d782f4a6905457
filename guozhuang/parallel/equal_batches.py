"""The ranks that hold one copy of a model together call it at the same time, on the same batch; if not, they are told.

[Note: equal batches] The ranks that hold one copy of the model work on the same batch: each computes the script's loss. A
script that shares out its data by rank, or whose ranks shuffle differently from some epoch on, would train on a mix of batches
without any error. So in each forward the ranks exchange checksums of their inputs: 128 bytes. Where the first operation of the
forward waits for all ranks anyhow, they are compared before it. Ranks of a pipeline begin at different times, so theirs are
looked at when the batch has gone through, and those of an accelerator with the next batch, by when they have been computed.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from ..errors import MismatchError, explain, rank_table
from ..weights.points import points_of
from ..world.layout import MODEL_AXES
from ..world.versions import all_gather_single
from .axes import Axes
from .calls import MODES, NUM_WORDS, compare_calls, number_of


class EqualBatches:
    """Compares the batches of the ranks that hold one copy of the model together. See [Note: equal batches].

    Args:
        axes: the groups of the layout.
        device: where checksums are exchanged: that of the parameters, which the groups serve.
    """

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self._group, self._device = axes.group(*MODEL_AXES), device
        # A pipeline, and divided in no other way.
        self._is_pipeline = self._group is not None and axes.size("pp") == self._group.size()
        self._is_first, self._is_inside = True, False
        self._check_last: Callable[[], None] = lambda: None
        self._points = None if self._group is None else points_of(self._group)
        self._mode = ""

    @property
    def are_shared(self) -> bool:
        """Whether other ranks work on the same batches."""
        return self._group is not None

    def stay_alone(self) -> None:
        """Compare nothing, and wait for nobody, from now on."""
        self._group = self._points = None

    def meet(self, call: str) -> None:
        """Wait until all ranks that hold one copy of the model make a call. Each must call it.

        Args:
            call: as the script writes it.

        Raises:
            WorldError: others have gone on to another one; or they have ended, or did not come in time.
        """
        if self._points is not None:
            self._points.meet(call)

    def inside(self, call: str) -> AbstractContextManager[None]:
        """Return the context of a call in which all ranks that hold one copy of the model wait for each other."""
        return nullcontext() if self._points is None else self._points.inside(call)

    @contextlib.contextmanager
    def compared(self, mode: str, *inputs: Any) -> Iterator[None]:
        """Raise in this context, on every rank of a copy of the model, unless all have the same inputs. Each must enter it.

        Args:
            mode: of this call, see :func:`mode_of`.
            inputs: of the model.

        Raises:
            MismatchError: the text names the first input that differs, or the modes, and the ranks.
        """
        if self._group is None or self._is_inside:
            yield
            return
        with self.inside(f"a forward of the model ({mode})"):
            yield from self._compared(mode, inputs)

    def _compared(self, mode: str, inputs: Any) -> Iterator[None]:
        assert self._group is not None
        self._check_last()
        words, lines = self._digest(inputs)
        words[-1] = number_of(mode)
        was_so, self._mode = self._mode == mode, mode
        found = words.new_empty(self._group.size() * NUM_WORDS)
        goes_on = self._is_pipeline and not self._is_first and was_so and found.device.type == "cpu"
        work = all_gather_single(found, words, group=self._group, async_op=goes_on)
        self._is_first = False
        if found.device.type != "cpu":
            self._check_last = self._on_accelerator(found, lines)
        elif not goes_on:
            self._check(found, lines)
        self._is_inside, is_there = True, False
        try:
            yield
        except Exception:
            if goes_on and work.is_completed():  # unequal batches are why something failed
                with contextlib.suppress(RuntimeError):
                    work.wait()
                    is_there = True
                if is_there:
                    self._check(found, lines)
            raise
        finally:
            self._is_inside = False
        if goes_on:
            work.wait()
            self._check(found, lines)

    def _on_accelerator(self, found: Tensor, lines: Sequence[str]) -> Callable[[], None]:
        """Return what compares the words once they are there, for which the queue of kernels does not have to run empty."""
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        event = torch.Event(found.device.type)
        event.record()

        def check() -> None:
            self._check_last = lambda: None
            event.synchronize()
            self._check(copy, lines)

        return check

    def _digest(self, inputs: Any) -> tuple[Tensor, list[str]]:
        """Return checksums of the inputs, on the device of the parameters, and a line for each of them."""
        # One word for each input, as far as they reach; one for all others; the last one is for the mode.
        words, lines = [0] * NUM_WORDS, []
        later: list[tuple[int, Tensor]] = []
        for i, (path, leaf) in enumerate(_pytree.tree_leaves_with_path(inputs)):
            place = min(i, NUM_WORDS - 2)
            line = f"{_pytree.keystr(path[1:])} {_kind(leaf)}"
            words[place] = zlib.crc32(line.encode(), words[place])
            lines.append(line)
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_meta or not leaf.numel():
                continue
            octets = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            if leaf.device.type == "cpu":
                words[place] = zlib.crc32(octets.numpy().data, words[place])
            else:
                later.append((place, _checksum(octets)))
        found = torch.tensor(words).to(self._device, non_blocking=True)
        for place, value in later:
            found[place] += value.to(self._device)
        return found, lines

    def _check(self, found: Tensor, lines: Sequence[str]) -> None:
        assert self._group is not None
        rows = found.view(self._group.size(), NUM_WORDS).tolist()
        if all(row == rows[0] for row in rows):
            return
        compare_calls(rows, self._group)
        ranks = dist.get_process_group_ranks(self._group)
        place = next(i for i in range(NUM_WORDS) if len({row[i] for row in rows}) > 1)
        what = f"input {place} of the model differs between ranks that hold one copy of the model together"
        fix = "load data by gz.loader, or share it out by world.data_rank of world.data_size, and draw random inputs by torch"
        shown = lines[place] if place < len(lines) else "nothing"
        table = rank_table(
            ("rank", "checksum"), [(rank, f"{row[place]:x}") for rank, row in zip(ranks, rows, strict=True)]
        )
        text = explain(what, value=shown, rank=dist.get_rank(), fix=fix)
        raise MismatchError(f"{text}\n{table}")


def mode_of(model: nn.Module) -> str:
    """Return in words whether a model is in training, and whether gradients are enabled."""
    return MODES[model.training, torch.is_grad_enabled()]


def _checksum(octets: Tensor) -> Tensor:
    """Return a sum over the bytes that depends on their order, computed on their device: 0-dimensional, int64."""
    if len(octets) % 8:
        numbers = octets.long()
    else:  # rows in the middle of a tensor may begin where no number of 8 bytes does
        numbers = (octets if octets.storage_offset() % 8 == 0 else octets.clone()).view(torch.int64)
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=octets.device)).sum()


def _kind(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    # The text of any other object may tell an address, a device or an order that differs between ranks.
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype)
    return repr(leaf)[:60] if is_plain or type(leaf).__module__ == "numpy" else type(leaf).__qualname__

"""Events of a group's calls for ``torch.profiler``: "shm:all_reduce", from the call to its end, with the shapes of its inputs.

They are made as those of PyTorch's own groups ("gloo:all_reduce"), and so are found by the same tools. A profiler records the
thread that started it and those to which autograd passes this state; calls from other threads make no event.

``profiler._is_profiler_enabled`` is the cheapest check whether any profiler runs in the process: 0.03 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Work = TypeVar("Work", bound=dist.Work)


def recorded(title: str, tensors: Sequence[Tensor], begin: Callable[[], Work]) -> Work:
    """Start a call under an event that lasts until the call has ended, on whichever thread that happens; return its work.

    Args:
        title: the event's name, backend and call: "shm:all_reduce".
        tensors: the call's inputs, whose shapes the event gets if the profiler records shapes.
        begin: starts the call, and returns a ``CallWork``.
    """
    event = torch._C._autograd._record_function_with_args_enter(title, *tensors)
    try:
        work = begin()
    except BaseException:
        _end(event)
        raise
    if not work.is_completed():
        # The profiler knows the event on this thread only; completing a future carries that knowledge to another one.
        ended: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, ended)
        ours: Any = work
        ours.before_end(lambda: ended.set_result(None))
    else:
        _end(event)
    return work


def _end(event: Any) -> None:
    torch._C._autograd._record_function_with_args_exit(event)


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the tensors of an argument that is a tensor, a list of tensors, or a list of such lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for each in argument for tensor in tensors_in(each)]

"""The state of one backward that averages gradients over the ranks (a pass), and its exchanges on the timeline.

[Note: nested backward]
Re-entrant checkpointing runs an inner backward inside the outer one. A parameter that is used in several such parts, or
inside and outside of one, gets several gradients in one pass, and after the first of them nothing shows whether more will
come. The first pass (and the first after each change of the parameters) therefore starts no bucket before its end, and only
observes: under `static_graph` it counts each parameter's gradients, and later passes wait for that many; otherwise a parameter
that ever got a gradient in an inner backward counts as ready at the end of the pass only. One case remains: a parameter gets a
gradient in an inner backward for the first time when its bucket was sent already. This raises, as the bucket is being summed.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..errors import explain
from ..exchange.base import Work
from ..groups.serial import SerialThread, SerialWork
from ..registry import OfOneModel
from ..timeline import Timeline
from ..world.versions import never_compiled
from .buckets import Bucket


@dataclass(frozen=True)
class ReducerOptions:
    """Options of a ``Reducer``: how it treats gradients.

    Args:
        find_unused: some parameters may get no gradient; after each pass the ranks agree which ones.
        static_graph: every pass is like the first; the ranks agree on unused parameters once.
        skip_unused: do not exchange a bucket of which no parameter was used; every rank must use the same parameters.
        batched_copy: copy a bucket's gradients with one call when it is full, not one by one as they come.
        overlap: start buckets while backward runs. False where the model itself communicates in backward and ranks may use
            different parameters: then only collectives after the end of backward have one order on all ranks.
        delayed: names of parameters that are exchanged last, in buckets of their own.
        trigger: name of the parameter whose gradient these buckets wait for.
        frees: give a bucket memory when the first of its gradients comes, and free it when none lies in it any more.
    """

    find_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    batched_copy: bool = False
    overlap: bool = True
    delayed: frozenset[str] = frozenset()
    trigger: str | None = None
    frees: bool = False


@dataclass
class Pass:
    """A running backward that averages gradients. Lists are by parameter index, but ``waiting`` and ``works`` by bucket.

    [Note: who drops a work last] Gloo's threads keep a work for a moment after it has been waited for, and a work holds Python
    objects of the backward that issued it. If the thread is the last to drop it, it needs the interpreter, and if that is just
    shutting down, the process aborts. So a pass holds all works that it issued, and the reducer holds the last pass.
    """

    task: int  # autograd's graph task in which the pass began
    left: list[int]  # by parameter: number of its gradients that this pass still expects
    waiting: list[int]  # by bucket: number of parameters whose gradients this pass still expects
    fired: list[int]  # by parameter: number of gradients that autograd has accumulated
    shadow: bool = False  # this rank has run out of data and only takes part in the exchanges of other ranks
    graph_start: int | None = None  # autograd's sequence number at the beginning, if this backward itself makes a graph
    num_fired: int = 0
    next_bucket: int = 0
    works: list[Work | None] = field(default_factory=list)  # by bucket: its exchange; None: not started
    others: list[object] = field(default_factory=list)  # further works, kept: see [Note: who drops a work last]
    order: list[int] = field(default_factory=list)
    predicted_unused: list[int] = field(default_factory=list)
    on_timeline: dict[int, tuple[Work, int]] = field(default_factory=dict)  # by bucket: running exchange, start in ns
    watchers: list[SerialWork] = field(default_factory=list)  # threads' jobs that record when exchanges end
    opened_ns: int = field(default_factory=time.time_ns)  # when backward reached the pass; times since 1970
    sent_ns: int = 0  # when the first bucket was sent; 0: none was
    ended_ns: int = 0  # when backward ended


def late_gradient(name: str, options: ReducerOptions, rank: int) -> RuntimeError:
    """Compose the error for a gradient that no pass of this graph can have. See [Note: nested backward].

    Without ``static_graph`` it came after its bucket was sent; with it, it came more often than in the first pass.
    """
    if options.static_graph:  # the first sentence is PyTorch's
        what = (
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got "
            "used in the second iteration. this is not compatible with static_graph set to True: "
            f"parameter {name!r} got a gradient more than in the first pass"
        )
        fix = "leave static_graph out, and pass find_unused_parameters=True if steps use different parameters"
        return RuntimeError(explain(what, rank=rank, fix=fix))
    what = f"parameter {name!r} got another gradient, in an inner (re-entrant) backward, after its bucket was complete"
    fix = "use checkpoint(..., use_reentrant=False), or static_graph=True if steps are alike"
    return RuntimeError(explain(what, rank=rank, fix=fix))


def graph_lacks(names: Mapping[int, str], rank: int) -> RuntimeError:
    """Compose the error for a pass under ``static_graph`` that lacked gradients of the first one; ``names`` is by index."""
    what = (  # PyTorch's sentences
        "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your "
        "training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got unused in "
        "the second iteration. this is not compatible with static_graph set to True.\n"
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, names))}; "
        f"parameters which did not receive grad for rank {rank}: {', '.join(names.values())}"
    )
    return RuntimeError(explain(what, rank=rank, fix="leave static_graph out, and pass find_unused_parameters=True"))


def broken_off(num_sent: int, num_buckets: int, rank: int) -> RuntimeError:
    """Compose the error for a backward that ended in the middle of its exchanges, for the next forward."""
    what = (
        f"the last backward was broken off after {num_sent} of {num_buckets} buckets had been sent, so the ranks no longer "
        "agree on what comes next"
    )
    fix = "let the error of that backward end the process, and start again from a checkpoint"
    return RuntimeError(explain(what, rank=rank, fix=fix))


def record_ready(bucket: int, step: int, timeline: Timeline | None) -> None:
    """Record on the timeline, if there is one, that a bucket has all its gradients."""
    if timeline is not None:
        timeline.mark(f"bucket {bucket} ready", "buckets", step=step)


def record_start(current: Pass, bucket: Bucket, work: Work, start_ns: int, timeline: Timeline) -> None:
    """Record on the timeline that the exchange of a bucket has begun, and arrange that its end is recorded.

    A thread of our own waits for a work of torch. A callback of the work would run in a thread of the group, which could abort
    the process at its end, see [Note: who drops a work last]. Any other work is polled whenever a gradient comes.
    """
    timeline.mark(f"bucket {bucket.index} started", "buckets", start_ns, num_bytes=bucket.num_bytes)
    if not isinstance(work, dist.Work):
        current.on_timeline[bucket.index] = (work, start_ns)
        return

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # ignored here: the pass waits for the same work, and raises its error
            work.wait()
        _add_exchange(timeline, bucket.index, start_ns)

    current.watchers.append(SerialThread(f"timeline of bucket {bucket.index}").run(watch))


def record_ends(current: Pass, timeline: Timeline, at_end: bool = False) -> None:
    """Record on the timeline the exchanges that have ended since the last call; with ``at_end``, record all as ended."""
    for index, (work, start_ns) in list(current.on_timeline.items()):
        if at_end or work.is_completed():
            _add_exchange(timeline, index, start_ns)
            del current.on_timeline[index]
    while at_end and current.watchers:
        current.watchers.pop().wait()


def _add_exchange(timeline: Timeline, index: int, start_ns: int) -> None:
    timeline.add(f"exchange {index}", f"exchange {index}", start_ns, timeline.now())


def weakly(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a hook that calls a bound method as long as its object lives, without keeping the object alive."""
    reference = weakref.WeakMethod(method)

    @never_compiled
    def hook(*_: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return hook


class UncopiedHook(OfOneModel):
    """A hook that calls a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._function(*args)

"""Parse ``--strategies`` of a comparison: each row is a strategy, with the backend and number of its process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from guozhuang import strategies
from guozhuang.errors import UsageError, explain
from guozhuang.parallel.prepare import check_schedule
from guozhuang.strategies import Strategy
from guozhuang.world.devices import served_types
from guozhuang.world.layout import HYBRID, Layout

#: PyTorch's own wrapper, and the backend on which it is compared on CPUs, with one group, as most people use it today.
_PEER, _BACKEND_OF_THE_PEER = "torch-ddp", "gloo"


@dataclass(frozen=True)
class Contender:
    """One row of a comparison's table: a strategy that is to be measured, with a backend and a number of groups.

    Attributes:
        name: the name of the row, as the command line had it: ``strategy``, or ``strategy:axis=size:schedule=name@backend``.
        strategy: the strategy's name in ``guozhuang.strategies``.
        backend: the backend of the strategy's collectives; None leaves the choice to ``gz.init``.
        num_groups: the number of process groups that exchange the buckets in turn.
        layout: the sizes of axes, as ``--layout`` takes them; None: the strategy's own.
        schedule: that of a pipeline, as ``--schedule`` takes it; None: the order of the script's own loop.
    """

    name: str
    strategy: str
    backend: str | None = None
    num_groups: int = 1
    layout: str | None = None
    schedule: str | None = None

    @property
    def entry(self) -> Strategy:
        """Return the row's strategy, as ``guozhuang.strategies`` defines it."""
        return strategies.get(self.strategy)

    @property
    def summary(self) -> str:
        """Return a one-line description of the row, for tables."""
        added = [self.layout] if self.layout else []
        added += [f"schedule {self.schedule}"] if self.schedule else []
        added += [f"on {self.backend}"] if "@" in self.name else []
        added += [f"{self.num_groups} groups in turn"] if self.num_groups > 1 else []
        return f"{self.entry.summary} ({', '.join(added)})" if added else self.entry.summary


def short_set(on_cpu: bool, shares_memory: bool) -> tuple[str, ...]:
    """Return the names of the strategies that are compared when none are named: the references, and what may win there.

    Args:
        on_cpu: whether the ranks compute on CPUs.
        shares_memory: whether the CPU ranks exchange through shared memory, so that it costs little to send much.
    """
    on_cpus = ("dp", "sharded") if shares_memory else ("sharded", "quantize8")
    fitting = on_cpus if on_cpu else ("sharded", "sharded-weights")
    return ("single", "ddp", "torch-ddp", *fitting, "none")


def contenders(text: str, backend: str | None, num_groups: int, on_cpu: bool, num_ranks: int) -> tuple[Contender, ...]:
    """Parse ``--strategies``, ``--backend`` and ``--groups`` into the rows of a comparison.

    A strategy may be written ``name@backend``, with a layout ``name:pp=2:dp=auto``, and a pipeline with a schedule
    ``name:schedule=1f1b``. Without a backend it gets that of ``--backend``, except ``torch-ddp`` on CPUs, which gets one gloo
    group, as most people use it. Strategies that use no groups ignore both options.

    Raises:
        UsageError: no name, a name given twice, an unknown strategy or backend, a backend for a strategy of one process, fewer
            than one group, several groups without a strategy that can use them, a layout that does not fit the ranks, or a
            schedule that there is not, or for a strategy without stages.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        fix = f"give some of {', '.join(strategies.STRATEGIES)}"
        raise UsageError(explain("--strategies names none", value=text, fix=fix))
    for name in names:
        if names.count(name) > 1:
            raise UsageError(explain("--strategies names one twice", value=name, fix="name each once"))
    if num_groups < 1:
        raise UsageError(explain("--groups is a count of at least 1", value=num_groups))
    if backend is not None:
        served_types(backend)
    found = tuple(_contender(name, backend, num_groups, on_cpu, num_ranks) for name in names)
    if num_groups > 1 and all(one.num_groups == 1 for one in found):
        fix = "leave --groups out, or compare ddp or torch-ddp@gloo too"
        raise UsageError(
            explain("none of --strategies can use several groups", value=f"--groups {num_groups}", fix=fix)
        )
    return found


def _contender(name: str, backend: str | None, num_groups: int, on_cpu: bool, num_ranks: int) -> Contender:
    what_runs, at, own = name.partition("@")
    strategy, _, sizes = what_runs.partition(":")
    entry = strategies.get(strategy)
    if strategy not in strategies.STRATEGIES:
        what = "strategy auto chooses among others while it trains, and so is no row of a comparison"
        raise UsageError(explain(what, value=name, fix="compare those that it chooses from, such as ddp and sharded"))
    if entry.one_process and (at or sizes):
        lacks = "where no backend carries anything" if at else "which has no axes"
        what = f"strategy {strategy} runs in one process, {lacks}"
        raise UsageError(explain(what, value=name, fix=f"write {strategy}"))
    schedules = [part.partition("=")[2] for part in sizes.split(":") if part.startswith("schedule=")]
    layout = ",".join(part for part in sizes.split(":") if not part.startswith("schedule=")) or None
    if strategy == HYBRID and layout is None:
        fix = "write the sizes of its axes too, as in hybrid:pp=2:tp=2"
        raise UsageError(explain("strategy hybrid needs a layout", value=name, fix=fix))
    found = Layout.parse(layout, strategy, num_ranks)
    for each in schedules:
        check_schedule(each)
    if len(schedules) > 1:
        raise UsageError(explain("a row of --strategies has one schedule", value=name, fix="make a row for each"))
    if schedules and found.pp == 1:
        what = "a schedule is the order in which the stages of a pipeline work, and this row divides no layers"
        raise UsageError(
            explain(what, value=name, fix=f"write pipeline:schedule={schedules[0]}, or add pp=2 to the layout")
        )
    groups = num_groups if entry.takes_groups and layout is None else 1
    more: dict[str, Any] = {"layout": layout, "schedule": schedules[0] if schedules else None}
    if at:
        served_types(own)
        return Contender(name, strategy, own, groups, **more)
    if entry.one_process:
        return Contender(name, strategy)
    if strategy == _PEER and on_cpu:
        return Contender(name, strategy, _BACKEND_OF_THE_PEER, **more)
    return Contender(name, strategy, backend, groups, **more)

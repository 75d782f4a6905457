"""The environment variables HOROVOD_*, for scripts written for Horovod: they are read and checked here, and those without
effect are named in the log."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.gradients.named import Settings

from .autotune import AutotuneSettings, check_available

_BEGIN = "HOROVOD_"
_log = logging.getLogger("guozhuang")

# Names of variables without effect that this process has logged already; each is logged only once.
_named: set[str] = set()


@dataclass(frozen=True)
class HorovodVariables:
    """The values of all variables HOROVOD_*, by name without that prefix, in lower case; None for one not set, or empty.

    Sizes are in bytes, ``cycle_time`` in milliseconds, fields that end in ``_seconds`` in seconds, as are ``start_timeout`` and
    ``elastic_timeout``. ``timeline`` is a path, or DYNAMIC. ``others`` names all set variables HOROVOD_* that have no field.
    """

    fusion_threshold: int | None = None
    cycle_time: float | None = None
    cache_capacity: int | None = None
    disable_group_fusion: bool | None = None
    dynamic_process_sets: bool | None = None
    timeline: str | None = None
    timeline_mark_cycles: bool | None = None
    stall_check_disable: bool | None = None
    stall_check_time_seconds: float | None = None
    stall_shutdown_time_seconds: float | None = None
    log_level: str | None = None
    autotune: bool | None = None
    autotune_log: str | None = None
    autotune_warmup_samples: int | None = None
    autotune_steps_per_sample: int | None = None
    autotune_bayes_opt_max_samples: int | None = None
    autotune_gaussian_process_noise: float | None = None
    elastic: bool | None = None
    elastic_timeout: float | None = None
    start_timeout: float | None = None
    # The host, rank and sizes of this process, as its launcher gave them.
    hostname: str | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    gloo_iface: str | None = None
    # Settings of Horovod's own engine, which have no effect here.
    log_hide_time: bool | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    torus_allreduce: bool | None = None
    batch_d2d_memcopies: bool | None = None
    enable_async_completion: bool | None = None
    num_nccl_streams: int | None = None
    thread_affinity: str | None = None
    gloo_timeout_seconds: float | None = None
    gloo_rendezvous_addr: str | None = None
    gloo_rendezvous_port: int | None = None
    controller: str | None = None
    cpu_operations: str | None = None
    adasum_mpi_chunk_size: int | None = None
    mpi_threads_disable: bool | None = None
    others: tuple[str, ...] = ()


def read(environ: Mapping[str, str] | None = None) -> HorovodVariables:
    """Read and check all HOROVOD_* variables of an environment.

    Args:
        environ: the environment; None: the one of this process.

    Raises:
        UsageError: a variable has a value that is not allowed; the text names both, and the allowed values.
    """
    found = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for field in dataclasses.fields(HorovodVariables):
        text = found.get(_name(field.name), "").strip()
        if text and field.name != "others":
            values[field.name] = parsed(field.name, text, f"environment variable {_name(field.name)}")
    known = {_name(field.name) for field in dataclasses.fields(HorovodVariables)}
    others = sorted(name for name in found if name.startswith(_BEGIN) and name not in known and found[name])
    return HorovodVariables(**values, others=tuple(others))  # type: ignore[arg-type]


def parsed(name: str, value: object, where: str) -> Any:
    """Convert the text of a variable to the type of its field of ``HorovodVariables``, and check that it is allowed.

    Args:
        name: the name of the field.
        value: the text; a number stands for its text.
        where: the place where the value was written, for the text of an error.

    Raises:
        UsageError: the value is not allowed.
    """
    parse = _PARSERS[HorovodVariables.__annotations__[name].removesuffix(" | None")]
    try:
        return parse(name, str(value))
    except _NotAllowedError as error:
        fix = f"set it to {error}, or leave it out"
        raise UsageError(explain(f"{where} must be {error}", value=value, fix=fix)) from None


def set_dynamic_process_sets() -> None:
    """Set the variable that allows process sets to be added after ``init``, for this process and those that it starts."""
    os.environ[_name("dynamic_process_sets")] = "1"


def without_meaning(variables: HorovodVariables) -> list[str]:
    """Return the names of variables that are set but have no effect, unless the value asks for Guozhuang's own behaviour.

    Some variables have an effect only in processes of ``horovodrun``, which passes each process its rank by variables.
    """
    inert = dict(_INERT)
    if variables.rank is None or variables.size is None:
        inert |= dict.fromkeys(_OF_HOROVODRUN, ())
    if not variables.elastic:
        inert["elastic_timeout"] = ()
    found = [field for field, asks_nothing in inert.items() if _is_asked(getattr(variables, field), asks_nothing)]
    return [*(_name(field) for field in found), *variables.others]


def check_world(variables: HorovodVariables, rank: int, size: int) -> None:
    """Check that HOROVOD_RANK and HOROVOD_SIZE, if set, agree with the rank and size that were found.

    Horovod's own launcher sets only these variables, from which Guozhuang makes no world: each process would train alone.

    Args:
        variables: the variables of this process.
        rank: the rank of this process among all that were launched. size: the number of launched processes.

    Raises:
        UsageError: the variables hold another rank or size.
    """
    given = (variables.rank, variables.size)
    if given[0] in (None, rank) and given[1] in (None, size):
        return
    what = (
        f"HOROVOD_RANK and HOROVOD_SIZE say rank {_or_none(given[0])} of {_or_none(given[1])}, but this process is rank {rank} "
        f"of {size}: they were set by a launcher that Guozhuang does not know, or are left from another run"
    )
    fix = "start it with Guozhuang's horovodrun or with `guozhuang run`, or unset HOROVOD_RANK and HOROVOD_SIZE"
    raise UsageError(explain(what, fix=fix))


def log_what_means_nothing(rank: int, variables: HorovodVariables | None = None) -> None:
    """Log on rank 0, each once per process, the names of HOROVOD_* variables that are set but have no effect.

    Args:
        rank: the rank of this process; only rank 0 logs.
        variables: the result of ``read``; None: read this process's environment.

    Raises:
        UsageError: see ``read``.
    """
    if rank != 0:
        return
    found = without_meaning(read() if variables is None else variables)
    names = [name for name in found if name not in _named]
    if names:
        _named.update(names)
        what = "these variables are set, and mean nothing to Guozhuang, which has another engine than Horovod (docs/horovod.md)"
        _log.warning("%s: %s", what, ", ".join(names))


# Fields of ``HorovodVariables`` that have an effect only in processes that horovodrun starts.
_OF_HOROVODRUN = (
    "start_timeout", "elastic", "hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
)  # fmt: skip
# Fields of ``HorovodVariables`` without effect, each with the values that ask for the behaviour that Guozhuang has anyway.
_INERT: dict[str, tuple[object, ...]] = {
    "log_hide_time": (True,),  # True asks for a log without dates, as Guozhuang's is anyway
    "hierarchical_allreduce": (False,),
    "hierarchical_allgather": (False,),
    "torus_allreduce": (False,),
    "batch_d2d_memcopies": (True,),
    "enable_async_completion": (False,),
    "num_nccl_streams": (1,),
    "thread_affinity": (),
    "gloo_timeout_seconds": (),
    "gloo_rendezvous_addr": (),
    "gloo_rendezvous_port": (),
    "controller": ("gloo",),
    "cpu_operations": ("gloo",),
    "adasum_mpi_chunk_size": (),
    "mpi_threads_disable": (False,),
}


def _is_asked(value: object, inert: Sequence[object]) -> bool:
    return value is not None and (value.lower() if isinstance(value, str) else value) not in inert


def _or_none(number: int | None) -> str:
    return "?" if number is None else str(number)


def _name(field: str) -> str:
    return _BEGIN + field.upper()


class _NotAllowedError(Exception):
    """The text of a variable is no allowed value; the message of the error describes the allowed values."""


def _switch(field: str, text: str) -> bool:
    word = text.lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    if not re.fullmatch(r"[0-9]{1,9}", word, re.ASCII):
        raise _NotAllowedError("1 or 0")
    return int(word) > 0


def _whole(field: str, text: str) -> int:
    least, most = _WHOLE_RANGES.get(field, (0, None))
    allowed = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII):
        raise _NotAllowedError(allowed)
    value = int(text)
    if value < least or (most is not None and value > most):
        raise _NotAllowedError(allowed)
    return value


def _decimal(field: str, text: str) -> float:
    most = 1.0 if field == "autotune_gaussian_process_noise" else float("inf")
    allowed = "a number from 0 to 1" if most == 1.0 else "a number of at least 0"
    try:
        value = float(text)
    except ValueError:
        raise _NotAllowedError(allowed) from None
    if not 0 <= value <= most or value == float("inf"):
        raise _NotAllowedError(allowed)
    return value


def _text(field: str, text: str) -> str:
    if field == "log_level":
        if text.lower() not in _LEVELS:
            raise _NotAllowedError("one of " + ", ".join(_LEVELS))
        return text.lower()
    return text


_WHOLE_RANGES: dict[str, tuple[int, int | None]] = {
    "gloo_rendezvous_port": (1, 65535),
    "size": (1, None),
    "local_size": (1, None),
    "cross_size": (1, None),
    "num_nccl_streams": (1, None),
}
_PARSERS: dict[str, Callable[[str, str], object]] = {"bool": _switch, "int": _whole, "float": _decimal, "str": _text}


# The functions below derive the engine's settings and the log level from the variables.

# Variables that, if set, fix a value that autotuning would search for, and the field of ``Knobs`` that each fixes.
_FIXES = {"fusion_threshold": "fusion_threshold_bytes", "cycle_time": "cycle_time_ms", "cache_capacity": "use_cache"}
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def settings_from(variables: HorovodVariables) -> Settings:
    """Return the engine's settings as HOROVOD_* variables give them; a setting without a variable keeps its default.

    Raises:
        UsageError: autotuning is asked for, and scikit-learn is missing.
    """
    if variables.autotune:
        check_available()
    given = {
        "fusion_threshold_bytes": variables.fusion_threshold,
        "cycle_time_ms": variables.cycle_time,
        "cache_capacity": variables.cache_capacity,
        "fuse_groups": None if variables.disable_group_fusion is None else not variables.disable_group_fusion,
        "stall_check": None if variables.stall_check_disable is None else not variables.stall_check_disable,
        "stall_warning_s": variables.stall_check_time_seconds,
        "stall_stop_s": variables.stall_shutdown_time_seconds,
        "autotune": _autotune(variables) if variables.autotune else None,
    }
    return replace(Settings(), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def set_log_level(variables: HorovodVariables) -> None:
    """Set the level of the logger ``guozhuang`` to HOROVOD_LOG_LEVEL; log to standard error if no handler is set up."""
    if variables.log_level is None:
        return
    level = _LEVELS[variables.log_level]
    log = logging.getLogger("guozhuang")
    log.setLevel(level)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
        log.addHandler(handler)


def _autotune(variables: HorovodVariables) -> AutotuneSettings:
    given = {
        "log": variables.autotune_log,
        "warmup_samples": variables.autotune_warmup_samples,
        "steps_per_sample": variables.autotune_steps_per_sample,
        "max_samples": variables.autotune_bayes_opt_max_samples,
        "noise": variables.autotune_gaussian_process_noise,
    }
    fixed = frozenset(knob for name, knob in _FIXES.items() if getattr(variables, name) is not None)
    chosen = {name: value for name, value in given.items() if value is not None}
    return AutotuneSettings(fixed=fixed, **chosen)  # type: ignore[arg-type]

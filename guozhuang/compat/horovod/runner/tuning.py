"""The options of ``horovodrun``, on the command line or in a file, that are passed to the ranks as variables HOROVOD_*."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.compat.horovod.common.variables import LOG_LEVELS
from guozhuang.errors import UsageError, explain


@dataclass(frozen=True)
class Setting:
    """One such option.

    Attributes:
        name: the name of the option, with underscores: cycle_time_ms for ``--cycle-time-ms``.
        kind: the type of the value; bool is a switch.
        variable: the variable's name without HOROVOD_; a "!" before it: the variable means the opposite of the switch.
        section: section and key of the option in a file; a "!" before the key: the key means the opposite of the switch.
        text: the description for ``--help``.
        off: the option that sets a switch to False.
        least: the smallest number allowed.
        most: the largest number allowed.
        choices: the words allowed.
        factor: the variable holds the value times this factor, as for MiB that are given in bytes.
    """

    name: str
    kind: type
    variable: str
    section: tuple[str, str]
    text: str
    off: str | None = None
    least: float = 0
    most: float | None = None
    choices: Sequence[str] | None = None
    factor: int = 1

    @property
    def option(self) -> str:
        """The option as it is written on the command line."""
        return "--" + self.name.replace("_", "-")

    def checked(self, value: Any, where: str) -> Any:
        """Return the value, converted, if it is allowed.

        Args:
            value: the value from the command line or the file.
            where: the option, or the place in the file, for the error's text.

        Raises:
            UsageError: the value has another type, or is not allowed.
        """
        allowed = self._allowed(value)
        if allowed:
            raise UsageError(explain(f"{where} must be {allowed}", value=value, fix=f"give {allowed}"))
        return str(value).upper() if self.choices else self.kind(value)

    def _allowed(self, value: Any) -> str:
        """Return "" if the value is allowed, else a text that says which values are."""
        if self.kind is bool:
            return "" if isinstance(value, bool) else "true or false"
        if self.choices is not None:
            return "" if str(value).upper() in self.choices else f"one of {', '.join(self.choices)}"
        if self.kind is str:
            return "" if isinstance(value, str | int) and not isinstance(value, bool) else "a text"
        is_number = isinstance(value, int | float if self.kind is float else int) and not isinstance(value, bool)
        if is_number and self.least <= value < float("inf") and (self.most is None or value <= self.most):
            return ""
        what = "a whole number" if self.kind is int else "a number"
        return (
            f"{what} of at least {self.least:g}"
            if self.most is None
            else f"{what} from {self.least:g} to {self.most:g}"
        )


SETTINGS = (
    Setting(
        "fusion_threshold_mb", int, "FUSION_THRESHOLD", ("params", "fusion_threshold_mb"),
        "MiB of small tensors that travel together; 0: each alone (default: 128).", factor=1 << 20,
    ),
    Setting(
        "cycle_time_ms", float, "CYCLE_TIME", ("params", "cycle_time_ms"),
        "Milliseconds between two rounds of negotiation (default: as tensors come).",
    ),
    Setting(
        "cache_capacity", int, "CACHE_CAPACITY", ("params", "cache_capacity"),
        "Names of tensors that are remembered, so that they cost little to negotiate (default: 1024).",
    ),
    Setting(
        "hierarchical_allreduce", bool, "HIERARCHICAL_ALLREDUCE", ("params", "hierarchical_allreduce"),
        "Means nothing here: between nodes the group does so by itself.", off="--no-hierarchical-allreduce",
    ),
    Setting(
        "hierarchical_allgather", bool, "HIERARCHICAL_ALLGATHER", ("params", "hierarchical_allgather"),
        "Means nothing here.", off="--no-hierarchical-allgather",
    ),
    Setting(
        "torus_allreduce", bool, "TORUS_ALLREDUCE", ("params", "torus_allreduce"),
        "Means nothing here.", off="--no-torus-allreduce",
    ),
    Setting(
        "autotune", bool, "AUTOTUNE", ("autotune", "enabled"),
        "Try out fusion threshold, cycle time and others while training, and keep what was fastest.", off="--no-autotune",
    ),
    Setting(
        "autotune_log_file", str, "AUTOTUNE_LOG", ("autotune", "log_file"), "File for a line per trial of --autotune.",
    ),
    Setting(
        "autotune_warmup_samples", int, "AUTOTUNE_WARMUP_SAMPLES", ("autotune", "warmup_samples"),
        "Samples that --autotune leaves out at the begin (default: 3).",
    ),
    Setting(
        "autotune_steps_per_sample", int, "AUTOTUNE_STEPS_PER_SAMPLE", ("autotune", "steps_per_sample"),
        "Steps of a sample of --autotune (default: 10).",
    ),
    Setting(
        "autotune_bayes_opt_max_samples", int, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", ("autotune", "bayes_opt_max_samples"),
        "Samples that --autotune takes at most (default: 20).",
    ),
    Setting(
        "autotune_gaussian_process_noise", float, "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ("autotune", "gaussian_process_noise"), "How noisy --autotune takes samples to be, 0 to 1 (default: 0.8).", most=1,
    ),
    Setting(
        "timeline_filename", str, "TIMELINE", ("timeline", "filename"),
        "Write what was negotiated and run when, as a Chrome trace; DYNAMIC: when hvd.start_timeline is called.",
    ),
    Setting(
        "timeline_mark_cycles", bool, "TIMELINE_MARK_CYCLES", ("timeline", "mark_cycles"),
        "Mark the rounds of negotiation there.", off="--no-timeline-mark-cycles",
    ),
    Setting(
        "no_stall_check", bool, "STALL_CHECK_DISABLE", ("stall_check", "!enabled"),
        "Do not report tensors that some ranks wait for.", off="--stall-check",
    ),
    Setting(
        "stall_check_warning_time_seconds", int, "STALL_CHECK_TIME_SECONDS", ("stall_check", "warning_time_seconds"),
        "Seconds until they are reported (default: 60).",
    ),
    Setting(
        "stall_check_shutdown_time_seconds", int, "STALL_SHUTDOWN_TIME_SECONDS",
        ("stall_check", "shutdown_time_seconds"),
        "Seconds until waiting for them fails (default: 0, at the time-out of the group).",
    ),
    Setting(
        "mpi_threads_disable", bool, "MPI_THREADS_DISABLE", ("library_options", "mpi_threads_disable"),
        "Means nothing here: there is no MPI.", off="--no-mpi-threads-disable",
    ),
    Setting(
        "num_nccl_streams", int, "NUM_NCCL_STREAMS", ("library_options", "num_nccl_streams"), "Means nothing here.",
        least=1,
    ),
    Setting(
        "thread_affinity", str, "THREAD_AFFINITY", ("library_options", "thread_affinity"), "Means nothing here.",
    ),
    Setting(
        "gloo_timeout_seconds", int, "GLOO_TIMEOUT_SECONDS", ("library_options", "gloo_timeout_seconds"),
        "Means nothing here: a lost rank is noticed by itself; see --stall-check-shutdown-time-seconds.",
    ),
    Setting(
        "log_level", str, "LOG_LEVEL", ("logging", "level"), "Least level of what is logged (default: WARNING).",
        choices=tuple(level.upper() for level in LOG_LEVELS),
    ),
    Setting(
        "log_with_timestamp", bool, "!LOG_HIDE_TIME", ("logging", "with_timestamp"),
        "Means nothing here: --prefix-output-with-timestamp dates every line.", off="--log-without-timestamp",
    ),
)  # fmt: skip


class Store(argparse.Action):
    """Store the value, and add the option to ``said``: those after the last ``--config-file``, which it does not override."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value; argparse calls this for each option."""
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.said = {*getattr(namespace, "said", ()), self.dest}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting."""
    group = parser.add_argument_group("how the engine works")
    for each in SETTINGS:
        if each.off is not None:
            group.add_argument(each.option, dest=each.name, action=Store, nargs=0, const=True, help=each.text)
            group.add_argument(each.off, dest=each.name, action=Store, nargs=0, const=False, help="The opposite of it.")
        else:
            words = {"metavar": "WORD"} if each.kind is str else {"metavar": "N"}
            convert = str.upper if each.choices else each.kind
            group.add_argument(each.option, dest=each.name, action=Store, type=convert, help=each.text, **words)  # type: ignore[arg-type]


def take_file(found: argparse.Namespace, content: object, path: str) -> None:
    """Set the options of a configuration file, except those that the command line gives after ``--config-file``.

    Args:
        found: the parsed command line, which is changed.
        content: the content of the file, as the YAML parser returns it.
        path: the path of the file, for errors.

    Raises:
        UsageError: a section or key is unknown, or a value is not allowed.
    """
    said: set[str] = getattr(found, "said", set())
    for (section, key), value in _flat(content, path).items():
        where = f"{path}: {section}.{key}" if key else f"{path}: {section}"
        if section == "verbose":
            if not isinstance(value, bool):
                raise UsageError(
                    explain(f"{where} must be true or false", value=value, fix="write true, or leave it out")
                )
            if "verbose" not in said:
                found.verbose = value
            continue
        if section == "controller":
            if str(value).lower() not in ("gloo", "mpi"):
                raise UsageError(
                    explain(f"{where} must be gloo or mpi", value=value, fix="write gloo, or leave it out")
                )
            if not (found.use_gloo or found.use_mpi):
                setattr(found, f"use_{str(value).lower()}", True)
            continue
        setting, is_opposite = _BY_KEY[section, key]
        if setting.name not in said:
            checked = setting.checked(value, where)
            setattr(found, setting.name, not checked if is_opposite else checked)


def variables(found: argparse.Namespace) -> dict[str, str]:
    """Return the variables HOROVOD_* for the environment of the ranks.

    Raises:
        UsageError: a number that is not allowed.
    """
    told = {}
    for each in SETTINGS:
        value = getattr(found, each.name)
        if value is None:
            continue
        value = each.checked(value, each.option)
        if each.kind is bool:
            value = int(value != each.variable.startswith("!"))
        told["HOROVOD_" + each.variable.removeprefix("!")] = str(value * each.factor if each.kind is int else value)
    return told


_BY_KEY = {
    (each.section[0], each.section[1].removeprefix("!")): (each, each.section[1].startswith("!")) for each in SETTINGS
}
_SECTIONS = sorted({section for section, _ in _BY_KEY} | {"controller", "verbose"})


def _flat(content: object, path: str) -> dict[tuple[str, str], Any]:
    """Return the file's values by (section, key); the key is "" for a section that has a value instead of keys."""
    fix = f"the sections are {', '.join(_SECTIONS)}"
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(explain(f"{path} holds no sections", value=content, fix=fix))
    flat: dict[tuple[str, str], Any] = {}
    for section, values in content.items():
        if section not in _SECTIONS:
            raise UsageError(explain(f"{path} has a section that is unknown", value=section, fix=fix))
        if section in ("controller", "verbose"):
            flat[section, ""] = values
            continue
        keys = sorted(key for each, key in _BY_KEY if each == section)
        if values is not None and not isinstance(values, Mapping):
            raise UsageError(explain(f"{path}: {section} holds no keys", value=values, fix=f"it has {', '.join(keys)}"))
        for key, value in (values or {}).items():
            if (section, key) not in _BY_KEY:
                what = f"{path}: {section} has a key that is unknown"
                raise UsageError(explain(what, value=key, fix=f"its keys are {', '.join(keys)}"))
            if value is not None:
                flat[section, key] = value
    return flat

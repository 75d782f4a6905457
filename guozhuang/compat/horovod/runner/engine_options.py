"""The options of ``horovodrun``, on the command line or in a file, that are passed to the ranks as variables HOROVOD_*."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from guozhuang.compat.horovod.common.variables import parsed
from guozhuang.errors import UsageError, explain


@dataclass(frozen=True)
class Setting:
    """An option of ``horovodrun`` that ranks get as a variable HOROVOD_*. ``common.variables`` defines its allowed values.

    Attributes:
        name: the name of the option, with underscores: cycle_time_ms for ``--cycle-time-ms``.
        variable: the variable's name without HOROVOD_; a "!" before it: the variable means the opposite of the switch.
        section: section and key of the option in a file; a "!" before the key: the key means the opposite of the switch.
        text: the description for ``--help``.
        off: the option that sets a switch to False; None: the option is no switch.
        factor: the variable holds the value times this factor, as for MiB that are given in bytes.
    """

    name: str
    variable: str
    section: tuple[str, str]
    text: str
    off: str | None = None
    factor: int = 1

    @property
    def option(self) -> str:
        """Return the option as it is written on the command line, such as ``--cycle-time-ms``."""
        return "--" + self.name.replace("_", "-")

    def checked(self, value: Any, where: str) -> Any:
        """Check that a value is allowed for this option, and return it: as a number if the option takes one.

        Args:
            value: the value from the command line or the file.
            where: the option, or the place in the file, for the error's text.

        Raises:
            UsageError: the value has another type, or is not allowed.
        """
        is_switch = self.off is not None
        if is_switch != isinstance(value, bool) or not isinstance(value, str | int | float):
            allowed = "true or false" if is_switch else "a text or a number"
            raise UsageError(explain(f"{where} must be {allowed}", value=value, fix=f"give {allowed}"))
        if is_switch:
            return value
        found = parsed(self.variable.lower(), value, where)
        return str(value) if isinstance(found, str) else found  # a text stays as it was written


SETTINGS = (
    Setting(
        "fusion_threshold_mb", "FUSION_THRESHOLD", ("params", "fusion_threshold_mb"),
        "MiB of small tensors that travel together; 0: each alone (default: 128).", factor=1 << 20,
    ),
    Setting(
        "cycle_time_ms", "CYCLE_TIME", ("params", "cycle_time_ms"),
        "Milliseconds between two rounds of negotiation (default: as tensors come).",
    ),
    Setting(
        "cache_capacity", "CACHE_CAPACITY", ("params", "cache_capacity"),
        "Names of tensors that are remembered, so that they cost little to negotiate (default: 1024).",
    ),
    Setting(
        "hierarchical_allreduce", "HIERARCHICAL_ALLREDUCE", ("params", "hierarchical_allreduce"),
        "Means nothing here: between nodes the group does so by itself.", off="--no-hierarchical-allreduce",
    ),
    Setting(
        "hierarchical_allgather", "HIERARCHICAL_ALLGATHER", ("params", "hierarchical_allgather"),
        "Means nothing here.", off="--no-hierarchical-allgather",
    ),
    Setting(
        "torus_allreduce", "TORUS_ALLREDUCE", ("params", "torus_allreduce"),
        "Means nothing here.", off="--no-torus-allreduce",
    ),
    Setting(
        "autotune", "AUTOTUNE", ("autotune", "enabled"),
        "Try out fusion threshold, cycle time and others while training, and keep what was fastest.", off="--no-autotune",
    ),
    Setting(
        "autotune_log_file", "AUTOTUNE_LOG", ("autotune", "log_file"), "File for a line per trial of --autotune.",
    ),
    Setting(
        "autotune_warmup_samples", "AUTOTUNE_WARMUP_SAMPLES", ("autotune", "warmup_samples"),
        "Samples that --autotune leaves out at the begin (default: 3).",
    ),
    Setting(
        "autotune_steps_per_sample", "AUTOTUNE_STEPS_PER_SAMPLE", ("autotune", "steps_per_sample"),
        "Steps of a sample of --autotune (default: 10).",
    ),
    Setting(
        "autotune_bayes_opt_max_samples", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", ("autotune", "bayes_opt_max_samples"),
        "Samples that --autotune takes at most (default: 20).",
    ),
    Setting(
        "autotune_gaussian_process_noise", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ("autotune", "gaussian_process_noise"), "How noisy --autotune takes samples to be, 0 to 1 (default: 0.8).",
    ),
    Setting(
        "timeline_filename", "TIMELINE", ("timeline", "filename"),
        "Write what was negotiated and run when, as a Chrome trace; DYNAMIC: when hvd.start_timeline is called.",
    ),
    Setting(
        "timeline_mark_cycles", "TIMELINE_MARK_CYCLES", ("timeline", "mark_cycles"),
        "Mark the rounds of negotiation there.", off="--no-timeline-mark-cycles",
    ),
    Setting(
        "no_stall_check", "STALL_CHECK_DISABLE", ("stall_check", "!enabled"),
        "Do not report tensors that some ranks wait for.", off="--stall-check",
    ),
    Setting(
        "stall_check_warning_time_seconds", "STALL_CHECK_TIME_SECONDS", ("stall_check", "warning_time_seconds"),
        "Seconds until they are reported (default: 60).",
    ),
    Setting(
        "stall_check_shutdown_time_seconds", "STALL_SHUTDOWN_TIME_SECONDS",
        ("stall_check", "shutdown_time_seconds"),
        "Seconds until waiting for them fails (default: 0, at the time-out of the group).",
    ),
    Setting(
        "mpi_threads_disable", "MPI_THREADS_DISABLE", ("library_options", "mpi_threads_disable"),
        "Means nothing here: there is no MPI.", off="--no-mpi-threads-disable",
    ),
    Setting(
        "num_nccl_streams", "NUM_NCCL_STREAMS", ("library_options", "num_nccl_streams"), "Means nothing here.",
    ),
    Setting(
        "thread_affinity", "THREAD_AFFINITY", ("library_options", "thread_affinity"), "Means nothing here.",
    ),
    Setting(
        "gloo_timeout_seconds", "GLOO_TIMEOUT_SECONDS", ("library_options", "gloo_timeout_seconds"),
        "Means nothing here: a lost rank is noticed by itself; see --stall-check-shutdown-time-seconds.",
    ),
    Setting(
        "log_level", "LOG_LEVEL", ("logging", "level"), "Least level of what is logged (default: WARNING).",
    ),
    Setting(
        "log_with_timestamp", "!LOG_HIDE_TIME", ("logging", "with_timestamp"),
        "Means nothing here: --prefix-output-with-timestamp dates every line.", off="--log-without-timestamp",
    ),
)  # fmt: skip


class StoreOption(argparse.Action):
    """Stores an option's value, and records that it was given after the last ``--config-file`` and so overrides the file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """StoreOption the option's value; argparse calls this each time the option is given.

        Raises:
            UsageError: the value is not allowed.
        """
        value = self.const if self.nargs == 0 else _BY_NAME[self.dest].checked(values, self.option_strings[-1])
        setattr(namespace, self.dest, value)
        namespace.given_later = {*getattr(namespace, "given_later", ()), self.dest}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command-line option to ``parser`` for each of ``SETTINGS``."""
    group = parser.add_argument_group("how the engine works")
    for each in SETTINGS:
        if each.off is not None:
            group.add_argument(each.option, dest=each.name, action=StoreOption, nargs=0, const=True, help=each.text)
            group.add_argument(
                each.off, dest=each.name, action=StoreOption, nargs=0, const=False, help="The opposite of it."
            )
        else:
            group.add_argument(each.option, dest=each.name, action=StoreOption, metavar="VALUE", help=each.text)


def take_file(found: argparse.Namespace, content: object, path: str) -> None:
    """Set the options of a configuration file, except those that the command line gives after ``--config-file``.

    Args:
        found: the parsed command line, which is changed.
        content: the content of the file, as the YAML parser returns it.
        path: the path of the file, for errors.

    Raises:
        UsageError: a section or key is unknown, or a value is not allowed.
    """
    given_later: set[str] = getattr(found, "given_later", set())
    if content is not None and not isinstance(content, Mapping):
        raise UsageError(explain(f"{path} holds no sections", value=content, fix=_SECTIONS_FIX))
    for section, values in (content or {}).items():
        where = f"{path}: {section}"
        if section == "verbose":
            if not isinstance(values, bool):
                fix = "write true, or leave it out"
                raise UsageError(explain(f"{where} must be true or false", value=values, fix=fix))
            if "verbose" not in given_later:
                found.verbose = values
        elif section == "controller":
            if str(values).lower() not in ("gloo", "mpi"):
                fix = "write gloo, or leave it out"
                raise UsageError(explain(f"{where} must be gloo or mpi", value=values, fix=fix))
            if not (found.use_gloo or found.use_mpi):
                setattr(found, f"use_{str(values).lower()}", True)
        elif section not in _KEYS:
            raise UsageError(explain(f"{path} has a section that is unknown", value=section, fix=_SECTIONS_FIX))
        else:
            _take_section(found, _KEYS[section], values, where, given_later)


def _take_section(
    found: argparse.Namespace,
    settings: Mapping[str, tuple[Setting, bool]],
    values: object,
    where: str,
    given_later: set[str],
) -> None:
    keys = ", ".join(sorted(settings))
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(explain(f"{where} holds no keys", value=values, fix=f"it has {keys}"))
    for key, value in (values or {}).items():
        if key not in settings:
            raise UsageError(explain(f"{where} has a key that is unknown", value=key, fix=f"its keys are {keys}"))
        setting, is_opposite = settings[key]
        if value is not None and setting.name not in given_later:
            checked = setting.checked(value, f"{where}.{key}")
            setattr(found, setting.name, not checked if is_opposite else checked)


def variables(found: argparse.Namespace) -> dict[str, str]:
    """Return the given options as variables HOROVOD_* for the environment of the ranks.

    Raises:
        UsageError: a number that is not allowed.
    """
    values = {}
    for each in SETTINGS:
        value = getattr(found, each.name)
        if value is None:
            continue
        value = each.checked(value, each.option)
        if each.off is not None:
            value = int(value != each.variable.startswith("!"))
        text = str(value * each.factor)
        is_whole = isinstance(value, float) and value.is_integer()
        values["HOROVOD_" + each.variable.removeprefix("!")] = text.removesuffix(".0") if is_whole else text
    return values


_BY_NAME = {each.name: each for each in SETTINGS}
# For each section and key of a configuration file: its ``Setting``, and whether the key means the opposite of the switch.
_KEYS: dict[str, dict[str, tuple[Setting, bool]]] = {}
for _each in SETTINGS:
    _section, _key = _each.section
    _KEYS.setdefault(_section, {})[_key.removeprefix("!")] = (_each, _key.startswith("!"))
_SECTIONS_FIX = f"the sections are {', '.join(sorted([*_KEYS, 'controller', 'verbose']))}"

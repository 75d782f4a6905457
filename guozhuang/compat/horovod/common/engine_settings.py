"""What the HOROVOD_* variables ask of the engine."""

from __future__ import annotations

import logging
from dataclasses import replace

from guozhuang.compat.horovod.common.variables import HorovodVariables
from guozhuang.gradients.named import AutotuneSettings, Settings, check_available

# A variable that fixes a knob of the tuner, and the field of ``negotiated.Knobs`` that it fixes.
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
    """Return the engine's settings; what is not set stays as the engine has it.

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
    """Let the log of ``guozhuang`` say as much as HOROVOD_LOG_LEVEL asks for, on stderr where nobody else takes it."""
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

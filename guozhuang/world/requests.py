"""Options of `guozhuang run` that this process reads from its environment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from guozhuang.errors import UsageError, explain
from guozhuang.world.layout import OWN_AXIS, Layout
from guozhuang.world.variables import number

#: The seconds after which a run that hangs is ended; None: never; "off": no heartbeat, so lost ranks stay unnoticed too.
HangTimeout = float | Literal["off"] | None

#: What ``--slow-rank`` may ask for.
SLOW_RANK = ("warn", "off")

#: What ``--bind`` may ask for.
BIND = ("auto", "cores", "numa", "off")

#: How often checkpoints are saved, and how many stay, where nothing else is asked for.
CHECKPOINT_EVERY, CHECKPOINT_KEEP = "5min", 3

_MIN_SECRET_BYTES = 8


def requested_strategy() -> str | None:
    """Return the strategy of ``guozhuang run --strategy NAME`` (environment GUOZHUANG_STRATEGY); None if none was given."""
    return os.environ.get("GUOZHUANG_STRATEGY") or None


def requested_backend() -> str | None:
    """Return the backend of ``guozhuang run --backend NAME`` (environment GUOZHUANG_BACKEND); None if none was given."""
    return os.environ.get("GUOZHUANG_BACKEND") or None


def requested_groups() -> int:
    """Return the number of process groups, K of ``guozhuang run --groups K`` (environment GUOZHUANG_GROUPS); 1 by default.

    Raises:
        UsageError: the variable holds no whole number of at least 1.
    """
    if not os.environ.get("GUOZHUANG_GROUPS"):
        return 1
    fix = "give `guozhuang run --groups` a count of process groups, or unset it"
    return number(os.environ, "GUOZHUANG_GROUPS", at_least=1, fix=fix) or 1


def requested_bucket_cap_mb() -> float | None:
    """Return the MiB of ``guozhuang run --bucket-cap-mb`` (environment GUOZHUANG_BUCKET_CAP_MB); None if none were given.

    Raises:
        UsageError: the variable holds no number above 0.
    """
    text = os.environ.get("GUOZHUANG_BUCKET_CAP_MB", "").strip()
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        what = "environment variable GUOZHUANG_BUCKET_CAP_MB must hold a number of MiB above 0"
        raise UsageError(explain(what, value=text, fix="give `guozhuang run --bucket-cap-mb` one, or unset it"))
    return found


def requested_shares() -> str | None:
    """Return by what loaders divide batches: "speed" for ``guozhuang run --batch-by speed`` (environment GUOZHUANG_BATCH_BY).

    None, the default, is for equal parts.

    Raises:
        UsageError: the variable holds neither "speed" nor "equal".
    """
    text = os.environ.get("GUOZHUANG_BATCH_BY", "").strip()
    if text not in ("", "equal", "speed"):
        what = "environment variable GUOZHUANG_BATCH_BY must hold speed or equal"
        raise UsageError(explain(what, value=text, fix="give `guozhuang run --batch-by` one of them, or unset it"))
    return "speed" if text == "speed" else None


def requested_layout() -> str | None:
    """Return the layout of ``guozhuang run --layout`` (environment GUOZHUANG_LAYOUT), as written; None if none was given."""
    return os.environ.get("GUOZHUANG_LAYOUT", "").strip() or None


def layout_of_environment(num_ranks: int) -> Layout:
    """Return the layout that the environment asks for in a world of so many ranks.

    Raises:
        UsageError: the layout is of another form, or does not fit the strategy or the number of ranks.
    """
    text, strategy = requested_layout(), requested_strategy() or ""
    if text is None and strategy not in OWN_AXIS:  # also for hybrid, which a script may give its layout
        return Layout(dp=num_ranks)
    return Layout.parse(text, strategy, num_ranks)


def requested_microbatches() -> int | None:
    """Return M of ``guozhuang run --microbatches M`` (environment GUOZHUANG_MICROBATCHES); None if none was given.

    Raises:
        UsageError: the variable holds no whole number of at least 1.
    """
    fix = "give `guozhuang run --microbatches` a count of microbatches, or unset it"
    return number(os.environ, "GUOZHUANG_MICROBATCHES", at_least=1, fix=fix)


def requested_schedule() -> str | None:
    """Return the schedule of ``guozhuang run --schedule NAME`` (environment GUOZHUANG_SCHEDULE); None if none was given."""
    return os.environ.get("GUOZHUANG_SCHEDULE", "").strip() or None


def requested_attention() -> str | None:
    """Return the way of ``guozhuang run --attention WAY`` (environment GUOZHUANG_ATTENTION); None if none was given."""
    return os.environ.get("GUOZHUANG_ATTENTION", "").strip() or None


def requested_proof() -> bool:
    """Return whether the first batches of a divided model are compared with one process; not with ``guozhuang run --no-proof``.

    Raises:
        UsageError: the variable GUOZHUANG_PROOF holds neither 0 nor 1.
    """
    text = os.environ.get("GUOZHUANG_PROOF", "").strip() or "1"
    if text not in ("0", "1"):
        what = "GUOZHUANG_PROOF says whether the first batches of a divided model are compared with one process"
        raise UsageError(explain(what, value=text, fix="set it to 0 or 1, or unset it"))
    return text == "1"


def requested_audit() -> int | None:
    """Return N of ``guozhuang run --audit N`` (environment GUOZHUANG_AUDIT); None if it was not given.

    Raises:
        UsageError: the variable holds no whole number of at least 1.
    """
    fix = "give `guozhuang run --audit` a number of optimizer steps, or unset it"
    return number(os.environ, "GUOZHUANG_AUDIT", at_least=1, fix=fix)


def requested_servers(environ: Mapping[str, str] | None = None) -> tuple[int, str] | None:
    """Return (number of servers, ``host:port`` of the store at which they meet) of this run; None if it has no servers.

    Set by ``guozhuang run --servers K`` (environment GUOZHUANG_SERVERS, as in ``2@127.0.0.1:41234``).

    Args:
        environ: the environment to read; None: the environment of this process.

    Raises:
        UsageError: the variable has another form.
    """
    text = (os.environ if environ is None else environ).get("GUOZHUANG_SERVERS", "").strip()
    if not text:
        return None
    count, _, address = text.partition("@")
    host, _, port = address.rpartition(":")
    if not (count.isdecimal() and int(count) > 0 and host and port.isdecimal()):
        what = "environment variable GUOZHUANG_SERVERS must hold a number of servers and where they meet, as COUNT@HOST:PORT"
        raise UsageError(explain(what, value=text, fix="let `guozhuang run --servers COUNT` set it, or unset it"))
    return int(count), address


def requested_stop_on_nan() -> bool:
    """Return whether ``guozhuang run --stop-on-nan`` (environment GUOZHUANG_STOP_ON_NAN=1) was given.

    Raises:
        UsageError: the variable holds neither 0 nor 1.
    """
    text = os.environ.get("GUOZHUANG_STOP_ON_NAN", "").strip() or "0"
    if text not in ("0", "1"):
        what = "GUOZHUANG_STOP_ON_NAN says whether a gradient that is NaN ends the run"
        raise UsageError(explain(what, value=text, fix="set it to 0 or 1, or unset it"))
    return text == "1"


def requested_gloo_interface() -> str | None:
    """Return the network interfaces that gloo is to use (gloo's own environment variable GLOO_SOCKET_IFNAME), or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def requested_nccl_interface() -> str | None:
    """Return the network interfaces that NCCL is to use or to leave out (its variable NCCL_SOCKET_IFNAME), or None."""
    return os.environ.get("NCCL_SOCKET_IFNAME") or None


def requested_timeline() -> str | None:
    """Return the path of ``guozhuang run --timeline FILE`` (environment GUOZHUANG_TIMELINE); None if none was given.

    Each rank writes its own part to that path with ".rank" and its number added, ``trace.json.rank3``; ``guozhuang run``
    joins the parts of its node into ``FILE`` when the ranks have ended.
    """
    return os.environ.get("GUOZHUANG_TIMELINE") or None


@dataclass(frozen=True)
class CheckpointRequest:
    """What ``guozhuang run --checkpoint DIR --every WHEN --keep K`` asks for.

    Attributes:
        folder: the absolute path of DIR.
        every_steps: save after so many steps; None: by time.
        every_s: save after so many seconds; None: by steps.
        keep: how many checkpoints stay.
    """

    folder: str
    every_steps: int | None
    every_s: float | None
    keep: int


def requested_checkpoint() -> CheckpointRequest | None:
    """Return what ``guozhuang run --checkpoint`` asks for (environment GUOZHUANG_CHECKPOINT, _EVERY, _KEEP); None by default.

    Raises:
        UsageError: a variable holds what its option would not accept.
    """
    folder = os.environ.get("GUOZHUANG_CHECKPOINT")
    if not folder:
        return None
    name = "environment variable GUOZHUANG_CHECKPOINT_EVERY"
    steps, seconds = checkpoint_interval(os.environ.get("GUOZHUANG_CHECKPOINT_EVERY") or CHECKPOINT_EVERY, name)
    fix = "give `guozhuang run --keep` a count of checkpoints, or unset it"
    keep = number(os.environ, "GUOZHUANG_CHECKPOINT_KEEP", at_least=1, fix=fix) or CHECKPOINT_KEEP
    return CheckpointRequest(os.path.abspath(folder), steps, seconds, keep)


def checkpoint_interval(text: str, name: str = "--every") -> tuple[int | None, float | None]:
    """Parse how often to save: return (steps, None) or (None, seconds).

    Args:
        text: ``500steps``, or a duration such as ``30s``, ``5min`` or ``2h``.
        name: the option or variable that holds it, for the error's text.

    Raises:
        UsageError: the text is of another form, or not above 0.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(steps?|s|min|h)", text.strip())
    if match is not None and float(match[1]) > 0:
        if not match[2].startswith("step"):
            return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
        if match[1].isdecimal():
            return int(match[1]), None
    what = f"{name} must be a number of steps or a duration above 0"
    raise UsageError(explain(what, value=text, fix="write it as 500steps, 30s, 5min or 2h"))


def requested_hang_timeout() -> HangTimeout:
    """Return the seconds (or "off") of ``guozhuang run --hang-timeout`` (environment GUOZHUANG_HANG_TIMEOUT); None by default.

    Raises:
        UsageError: the variable holds neither a number of seconds above 0 nor "off".
    """
    name = "GUOZHUANG_HANG_TIMEOUT"
    text = os.environ.get(name, "")
    return hang_timeout(text, f"environment variable {name}") if text.strip() else None


def hang_timeout(text: str, name: str = "--hang-timeout") -> float | Literal["off"]:
    """Parse a hang time-out: return its seconds, or "off" for no heartbeat at all.

    Args:
        text: the text from the command line or the environment.
        name: the option or variable that holds it, for the error's text.

    Raises:
        UsageError: the text is neither a number of seconds above 0 nor "off".
    """
    if text.strip().lower() == "off":
        return "off"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        what = f"{name} must be a number of seconds above 0, or off"
        raise UsageError(
            explain(what, value=text.strip(), fix='leave it out to wait for ever; "off" ends the heartbeat too')
        )
    return seconds


def requested_slow_rank() -> str:
    """Return what ``guozhuang run --slow-rank`` (environment GUOZHUANG_SLOW_RANK) asks for: "warn", "off", or "" by default.

    Raises:
        UsageError: the variable holds another word.
    """
    text = os.environ.get("GUOZHUANG_SLOW_RANK", "").strip().lower()
    if text not in ("", *SLOW_RANK):
        what = "environment variable GUOZHUANG_SLOW_RANK must be warn or off"
        raise UsageError(explain(what, value=text, fix="unset it: slow ranks are then named too, without a table"))
    return text


def requested_bind() -> str:
    """Return what ranks on CPUs are bound to: WHAT of ``guozhuang run --bind WHAT`` (environment GUOZHUANG_BIND), or "auto".

    Raises:
        UsageError: the variable holds another word.
    """
    text = os.environ.get("GUOZHUANG_BIND", "").strip().lower() or "auto"
    if text not in BIND:
        what = f"environment variable GUOZHUANG_BIND must hold one of {', '.join(BIND)}"
        raise UsageError(explain(what, value=text, fix="give `guozhuang run --bind` one of them, or unset it"))
    return text


def requested_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """Return the secret of this run (environment GUOZHUANG_SECRET, in hexadecimal); empty if none was given.

    Args:
        environ: the environment to read; None: the environment of this process.

    Raises:
        UsageError: the variable holds no hexadecimal number, or one that is too short to be a secret.
    """
    text = (os.environ if environ is None else environ).get("GUOZHUANG_SECRET", "").strip()
    if not text:
        return b""
    fix = "export GUOZHUANG_SECRET=$(openssl rand -hex 32) before the ranks are started, the same for all"
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        # The error does not show the value, because it may be a secret all the same.
        what = "environment variable GUOZHUANG_SECRET must hold an even number of hexadecimal digits and nothing else"
        raise UsageError(explain(what, fix=fix)) from None
    if len(secret) < _MIN_SECRET_BYTES:
        what = f"environment variable GUOZHUANG_SECRET must have at least {2 * _MIN_SECRET_BYTES} hexadecimal digits"
        raise UsageError(explain(what, value=f"{len(text)} digits", fix=fix))
    return secret


_NAMED_BY_TORCH = {
    "": ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        *("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
        *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ),
}


def torch_settings(backend: str) -> dict[str, str]:
    """Return what PyTorch's wrapper logs of the environment, by its keys; "N/A" where a variable is not set.

    Args:
        backend: the name of the process group's backend.
    """
    names = (*_NAMED_BY_TORCH[""], *_NAMED_BY_TORCH.get(backend, ()))
    return {name.lower().replace("torch_nccl", "nccl"): os.environ.get(name, "N/A") for name in names}

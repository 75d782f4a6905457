"""Options of `guozhuang run` that this process reads from its environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Literal

from guozhuang.errors import UsageError, explain
from guozhuang.world.variables import number

#: Seconds, after which a run in which nothing moves is ended; None: never; "off": nobody watches for lost ranks either.
HangTimeout = float | Literal["off"] | None

_MIN_SECRET_BYTES = 8


def requested_strategy() -> str | None:
    """The name given by ``guozhuang run --strategy NAME`` (environment GUOZHUANG_STRATEGY); None if none was."""
    return os.environ.get("GUOZHUANG_STRATEGY") or None


def requested_backend() -> str | None:
    """The name given by ``guozhuang run --backend NAME`` (environment GUOZHUANG_BACKEND); None if none was."""
    return os.environ.get("GUOZHUANG_BACKEND") or None


def requested_groups() -> int:
    """The number given by ``guozhuang run --groups K`` (environment GUOZHUANG_GROUPS); 1 if none was.

    Raises:
        UsageError: the variable holds no whole number of at least 1.
    """
    if not os.environ.get("GUOZHUANG_GROUPS"):
        return 1
    fix = "give `guozhuang run --groups` a count of process groups, or unset it"
    return number(os.environ, "GUOZHUANG_GROUPS", at_least=1, fix=fix) or 1


def requested_servers() -> tuple[int, str] | None:
    """(how many, ``host:port`` of the store they meet at) of the servers of this run; None if it has none.

    Told by ``guozhuang run --servers K`` (environment GUOZHUANG_SERVERS, as in ``2@127.0.0.1:41234``).

    Raises:
        UsageError: the variable holds something else.
    """
    text = os.environ.get("GUOZHUANG_SERVERS", "").strip()
    if not text:
        return None
    count, _, address = text.partition("@")
    host, _, port = address.rpartition(":")
    if not (count.isdecimal() and int(count) > 0 and host and port.isdecimal()):
        what = "environment variable GUOZHUANG_SERVERS must hold a number of servers and where they meet, as COUNT@HOST:PORT"
        raise UsageError(explain(what, value=text, fix="let `guozhuang run --servers COUNT` set it, or unset it"))
    return int(count), address


def requested_gloo_interface() -> str | None:
    """The network interfaces that gloo was told to use (gloo's own environment variable GLOO_SOCKET_IFNAME), or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def requested_nccl_interface() -> str | None:
    """The network interfaces that NCCL was told to use or to leave out (its variable NCCL_SOCKET_IFNAME), or None."""
    return os.environ.get("NCCL_SOCKET_IFNAME") or None


def requested_timeline() -> str | None:
    """The path given by ``guozhuang run --timeline FILE`` (environment GUOZHUANG_TIMELINE); None if none was.

    Each rank writes its own part to that path with ".rank" and its number added, ``trace.json.rank3``; ``guozhuang run``
    joins the parts of its node into the file itself when the ranks have ended.
    """
    return os.environ.get("GUOZHUANG_TIMELINE") or None


def requested_hang_timeout() -> HangTimeout:
    """What ``guozhuang run --hang-timeout`` was given (environment GUOZHUANG_HANG_TIMEOUT); None if nothing was.

    Raises:
        UsageError: the variable holds neither a number of seconds above 0 nor "off".
    """
    name = "GUOZHUANG_HANG_TIMEOUT"
    text = os.environ.get(name, "")
    return hang_timeout(text, f"environment variable {name}") if text.strip() else None


def hang_timeout(text: str, name: str = "--hang-timeout") -> float | Literal["off"]:
    """The seconds that ``text`` holds; "off": no heartbeat at all.

    Args:
        text: as it stands on the command line or in the environment.
        name: where it was found, for the error's text.

    Raises:
        UsageError: it is neither a number of seconds above 0 nor "off".
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


def requested_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """What only the processes of this run know (environment GUOZHUANG_SECRET, in hexadecimal); empty if nothing was given.

    Args:
        environ: the environment to look into; None: the one of this process.

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
        # The value is not shown: it may be somebody's secret all the same.
        what = "environment variable GUOZHUANG_SECRET must hold an even number of hexadecimal digits and nothing else"
        raise UsageError(explain(what, fix=fix)) from None
    if len(secret) < _MIN_SECRET_BYTES:
        what = f"environment variable GUOZHUANG_SECRET must have at least {2 * _MIN_SECRET_BYTES} hexadecimal digits"
        raise UsageError(explain(what, value=f"{len(text)} digits", fix=fix))
    return secret

"""Read numbers out of an environment, with errors that name the variable, its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping

from guozhuang.errors import UsageError, explain


def number(
    environ: Mapping[str, str], name: str, *, fix: str, at_least: int = 0, below: tuple[str, int] | None = None
) -> int | None:
    """Return the whole number that variable ``name`` holds; None if it is not set.

    Args:
        environ: the environment.
        name: the variable.
        fix: the remedy, for the error's text.
        at_least: the smallest number allowed.
        below: (name, value) of a limit that the number must stay below; the error shows the name.

    Raises:
        UsageError: the variable holds anything else.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip(), re.ASCII):
        raise UsageError(explain(f"environment variable {name} must be a whole number", value=text, fix=fix))
    value = int(text)
    if value < at_least:
        raise UsageError(explain(f"environment variable {name} must be at least {at_least}", value=text, fix=fix))
    if below is not None and value >= below[1]:
        limit = f"{below[0]}={below[1]}"
        raise UsageError(explain(f"environment variable {name} must be below {limit}", value=text, fix=fix))
    return value


def asked_meeting(environ: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return MASTER_ADDR and MASTER_PORT, which a user may export under launchers that set neither, as lists; [] if not set.

    Raises:
        UsageError: MASTER_PORT is no port.
    """
    fix = "export the number of a TCP port, or leave it out: the ranks find one by themselves"
    host = bare_host(environ.get("MASTER_ADDR", ""))
    port = None
    if environ.get("MASTER_PORT", "").strip():
        port = number(environ, "MASTER_PORT", at_least=1, below=("the number of TCP ports", 65536), fix=fix)
    return [host] if host else [], [port] if port is not None else []


def bare_host(text: str) -> str:
    """Return a host without surrounding spaces and brackets, in which IPv6 addresses are often written."""
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text

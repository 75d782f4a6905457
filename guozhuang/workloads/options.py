"""Options declared once, as fields of a frozen dataclass: command line, checks and defaults follow from that."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from guozhuang.errors import UsageError, explain

#: The values that an option may hold; all of them survive JSON, so a dict of options can be sent to every rank.
OptionValue: TypeAlias = str | int | float | bool | list[str] | None

Options = TypeVar("Options")


@dataclass(frozen=True)
class _Rule:
    kind: type  # str, int, float, bool, or list for several words
    help: str
    choices: tuple[str, ...]
    low: float | None
    below: float | None


def option(
    default: OptionValue,
    kind: type,
    help: str,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare an option of the command line, as a field of a dataclass.

    Args:
        default: the value if the option is not given; None means that the code which uses the option decides.
        kind: str, int, float, bool, or list (several words, for a ``str`` list).
        help: the option's text in ``--help``.
        choices: the words allowed; empty means any.
        low: the smallest number allowed.
        below: the number must be smaller than this.
    """
    rule = _Rule(kind, help, tuple(choices), low, below)
    return dataclasses.field(default=default, metadata=MappingProxyType({"rule": rule}))


def _rules(options: type) -> dict[str, _Rule]:
    return {field.name: field.metadata["rule"] for field in dataclasses.fields(options) if "rule" in field.metadata}


def add_arguments(options: type, parser: argparse._ActionsContainer) -> None:
    """Add an option ``--name`` for every field of a dataclass of options to a parser, or to a group of its arguments.

    An option that is not given is absent from the namespace. An option that the parser already has (two workloads share
    ``--model``) is not added again.
    """
    for name, rule in _rules(options).items():
        flag = "--" + name.replace("_", "-")
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": rule.help.replace("%", "%%")}
        if rule.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = "|".join(rule.choices) if rule.choices else name.rsplit("_", 1)[-1].upper()
            settings["nargs"] = "+" if rule.kind is list else None
        try:
            parser.add_argument(flag, **settings)
        except argparse.ArgumentError as error:
            if "conflicting" not in str(error):
                raise


def given(options: type, namespace: argparse.Namespace) -> dict[str, OptionValue]:
    """Return the options that a parsed command line sets, by field of a dataclass of options; those not given are left out.

    Raises:
        UsageError: a value is invalid.
    """
    values = {n: getattr(namespace, n) for n in _rules(options) if getattr(namespace, n, None) is not None}
    found: Any = read(options, values)
    return {name: getattr(found, name) for name in values}


def read(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Return a dataclass of options from a dict of values, which are checked; the defaults are filled in.

    Args:
        options: a frozen dataclass whose fields were made by ``option``.
        values: values by field name; numbers and booleans may be given as text.

    Raises:
        UsageError: a name is not an option, or a value is invalid.
    """
    rules = _rules(options)
    unknown = sorted(set(values) - set(rules))
    if unknown:
        raise UsageError(
            explain("no such workload option", value=", ".join(unknown), fix="use one of: " + ", ".join(sorted(rules)))
        )
    return options(
        **{name: _converted(name, rules[name], value) for name, value in values.items() if value is not None}
    )


def _converted(name: str, rule: _Rule, value: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    if rule.kind is list:
        words = [value] if isinstance(value, str | int) else list(value)
        return [str(word) for word in words]
    if rule.kind is bool:
        table = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
        if isinstance(value, bool) or str(value).lower() in table:
            return table[str(value).lower()]
        raise UsageError(explain(f"{flag} is yes or no", value=value, fix=f"say {flag} or --no-{flag[2:]}"))
    if rule.kind is str:
        if rule.choices and str(value) not in rule.choices:
            raise UsageError(explain(f"{flag} has no such choice", value=value, fix=f"use {', '.join(rule.choices)}"))
        return str(value)
    try:
        number = rule.kind(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or number != number or (rule.kind is int and isinstance(value, float) and number != value):
        kind = "a whole number" if rule.kind is int else "a number"
        raise UsageError(explain(f"{flag} is not {kind}", value=value, fix=f"give {kind}"))
    if (rule.low is not None and number < rule.low) or (rule.below is not None and number >= rule.below):
        span = " and ".join(
            words for words in (f"at least {rule.low:g}" if rule.low is not None else "",
                                f"below {rule.below:g}" if rule.below is not None else "") if words
        )  # fmt: skip
        raise UsageError(explain(f"{flag} is out of range", value=number, fix=f"give a number of {span}"))
    return number

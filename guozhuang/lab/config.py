"""Options of a comparison by their names: from a config file, or from the arguments of ``guozhuang.compare``."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from guozhuang.errors import UsageError, explain
from guozhuang.lab.options import parser

# Of each pair one is given: one on the command line also replaces the other one in the config file.
_INSTEAD = (("strategies", "all"), ("all", "strategies"), ("steps", "epochs"), ("epochs", "steps"))


def with_config(found: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line, and for those not given the ones of its config file, if it names one.

    Args:
        found: the parsed command line.
        arguments: the command line.

    Raises:
        UsageError: the file cannot be read, has an unknown key, or a value that its option does not accept.
    """
    if found.config is None:
        return found
    path = Path(found.config)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        what = f"the config file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(explain(what, value=str(path), fix="give the path of a TOML file")) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(explain(f"{path} is not TOML: {error}", fix="write lines like steps = 100")) from error
    given = _given(arguments)
    pairs = dict(pair.partition("=")[::2] for pair in given.get("option") or ())
    options = values.get("option")
    if isinstance(options, Mapping):
        values["option"] = {key: value for key, value in options.items() if key not in pairs}
    values = {
        key: value
        for key, value in values.items()
        if not any(key.replace("-", "_") == other and name in given for name, other in _INSTEAD)
    }
    return read(values, str(path), arguments)


def read(values: Mapping[str, Any], where: str, arguments: Sequence[str] = ()) -> argparse.Namespace:
    """Return the parsed options for values by their names.

    Args:
        values: by the names of options, with ``_`` or ``-`` between words: ``{"warmup_steps": 10, "fused": True}``. Several
            strategies or columns of text are a list; ``option`` is a mapping. None leaves an option out.
        where: the source of the values, for errors.
        arguments: a command line without mistakes, whose options replace these.

    Raises:
        UsageError: an unknown name, or a value that its option does not accept.
    """
    made = parser()

    def refuse(message: str) -> NoReturn:
        raise UsageError(explain(f"{where}: {message}", fix="see guozhuang compare --help"))

    made.error = refuse  # type: ignore[method-assign]
    return made.parse_args([*_words(values, where), *arguments])


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that a command line sets, without defaults."""
    bare = parser()
    for action in bare._actions:
        action.default = argparse.SUPPRESS
    return vars(bare.parse_args(list(arguments)))


def _words(values: Mapping[str, Any], where: str) -> list[str]:
    """Return the words of a command line that sets these options."""
    options = {
        name[2:].replace("-", "_"): action
        for action in parser()._actions
        for name in action.option_strings
        if name.startswith("--") and not name.startswith("--no-") and name not in ("--help", "--config")
    }
    words: list[str] = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            fix = f"write {near[0]}" if near else "use the names of the options that guozhuang compare --help lists"
            raise UsageError(explain(f"{where}: there is no such option of guozhuang compare", value=key, fix=fix))
        if value is not None:
            words += _words_of(options[name], name, value, where)
    return words


def _words_of(action: argparse.Action, name: str, value: Any, where: str) -> list[str]:
    flag = action.option_strings[0]

    def wrong(what: str, fix: str) -> UsageError:
        return UsageError(explain(f"{where}: {name} {what}", value=value, fix=fix))

    if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise wrong("is true or false", f"write {name} = true")
        negated = [f"--no-{flag[2:]}"] if isinstance(action, argparse.BooleanOptionalAction) else []
        return [flag] if value else negated
    if isinstance(action, argparse._AppendAction):
        if not isinstance(value, Mapping):
            raise wrong("is a table of keys and values", f'write [{name}], and below it lines like key = "value"')
        return [f"{flag}={key}={each}" for key, each in value.items()]
    if isinstance(value, Mapping | bool):
        raise wrong("is one value", f"write {name} = VALUE")
    if action.nargs == "+":
        return [flag, *map(str, [value] if isinstance(value, str | int) else value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name != "strategies":
            raise wrong("is one value, not a list", f"write {name} = VALUE")
        value = ",".join(map(str, value))
    return [f"{flag}={value}"]

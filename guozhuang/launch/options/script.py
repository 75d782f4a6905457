"""Find the script on the command line of ``guozhuang run``, and check that it compiles before any process is started.

``argparse`` inspects every word before it passes the rest to the script, and so refuses a script's ``--max 3`` or ``-n``
because they resemble options of ours. So the command line is cut at the script first; all later words go to the script.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from guozhuang.errors import UsageError, explain

_ORDER = "options of `guozhuang run` stand before the script, the script's own after it"


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the words before the script; the words after it become ``training_script_args`` unchanged.

    Args:
        parser: torchrun's parser, or an extension of it: its positional arguments are the script and the script's arguments.
        arguments: all words after ``guozhuang run``.

    Raises:
        SystemExit: an unknown option, or no script; the parser has printed the error.
    """
    at = _script_at(parser, arguments)
    found = parser.parse_args(list(arguments[: at + 1]))
    found.training_script_args = list(arguments[at + 1 :])
    return found


def _script_at(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Return the index of the script: the first word that is no option and no value of one; the end if an option is unknown."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return at + 1
        if not word.startswith("-") or word == "-":
            return at
        option, has_value = _option(parser, word)
        if option is None:
            return len(arguments)
        num_values = option.nargs if isinstance(option.nargs, int) else 1
        at += 1 if has_value else 1 + num_values
    return at


def _option(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, bool]:
    """Return the option that a word names, by argparse's rules, and whether the word contains its value."""
    known = parser._option_string_actions
    name, equals, _ = word.partition("=")
    if word in known:
        return known[word], False
    if name in known:
        return known[name], bool(equals)
    if not word.startswith("--"):
        return known.get(word[:2]), True  # a short option and its value in one word, as in -Hhost:2
    fitting = {id(action): action for option, action in known.items() if option.startswith(name)}
    return (next(iter(fitting.values())) if len(fitting) == 1 else None), bool(equals)


def check(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Check that the script exists, and compile it without running it.

    Raises:
        UsageError: the script does not exist, or has a syntax error; the text names the file and the line.
    """
    script = found.training_script
    if found.module and found.no_python:
        raise UsageError(explain("-m and --no-python exclude each other", fix="leave one out"))
    # Only for the interpreter of this process: that of PYTHON_EXEC may have another grammar and other modules.
    is_ours = "PYTHON_EXEC" not in environ
    if found.no_python and not found.run_path:
        if shutil.which(script) is None:
            fix = "check the path, and that the file may be executed"
            raise UsageError(explain("there is no such program", value=script, fix=fix))
    elif found.module and not found.run_path:
        if is_ours:
            _check_module(script)
    elif not os.path.exists(script):
        raise UsageError(explain("there is no such script", value=script, fix=f"check the path; {_ORDER}"))
    elif is_ours:
        path = Path(script)
        if path.is_dir():
            path /= "__main__.py"
            if not path.exists():
                raise UsageError(explain("the folder has no __main__.py to start", value=script, fix="give a script"))
        if not zipfile.is_zipfile(path):
            _compile(path)


def _check_module(name: str) -> None:
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
        if spec is None:
            fix = "name the module inside it that is to run"
            raise UsageError(explain("the package has no __main__ to start", value=name, fix=fix))
    if spec is None:
        fix = f"check the name, and that it can be imported from the current folder or is installed; {_ORDER}"
        raise UsageError(explain("there is no such module", value=name, fix=fix))
    if spec.origin is not None and os.path.exists(spec.origin):
        _compile(Path(spec.origin))


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, without importing the packages that contain it."""
    top, *below = name.split(".")
    path = [os.getcwd(), *sys.path]
    found = importlib.machinery.PathFinder.find_spec(top, path)
    if found is None:
        try:
            found = importlib.util.find_spec(top)  # finds a built-in module, or one of a custom importer
        except (ImportError, ValueError):
            found = None
    name = top
    for part in below:
        if found is None or found.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        found = importlib.machinery.PathFinder.find_spec(name, list(found.submodule_search_locations))
    return found


def _compile(path: Path) -> None:
    if path.suffix in (".pyc", *importlib.machinery.EXTENSION_SUFFIXES) or not path.is_file():
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank prints the warnings about its script itself
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        fix = "check its permissions"
        raise UsageError(explain(f"the script cannot be read: {error.strerror}", value=str(path), fix=fix)) from error
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else str(path)
        text = f": {error.text.strip()}" if error.text else ""
        fix = "mend that line; for a program that is not Python there is --no-python"
        raise UsageError(explain(f"syntax error in {where}: {error.msg}{text}", fix=fix)) from error
    except (ValueError, RecursionError, MemoryError):
        return  # the script has NUL bytes, or is too large to compile here: the rank will report that

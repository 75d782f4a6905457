"""Builds a workload from the value of ``--workload``: a built-in one, or a user's own function."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.workloads import bert, options, synthetic, text
from guozhuang.workloads.arguments import OPTIONS
from guozhuang.workloads.base import Workload

_PICKLE = ".pickle"

WORKLOADS: Mapping[str, Callable[[Mapping[str, Any], Path | None], Workload]] = MappingProxyType(
    {"text": text.load, "synthetic": synthetic.load}
)
"""The functions that build the built-in workloads, by name."""


def load(name: str, given: Mapping[str, Any] | None = None, cache_dir: Path | None = None) -> Workload:
    """Build the named workload. Every process must call this with equal arguments, and gets an equal one; none communicates.

    Args:
        name: text, synthetic, ``module:function``, or a ``.pickle`` file of a function that cloudpickle has written.
        given: options of the workload, as ``options_from`` returns them.
        cache_dir: folder for tokenised data, so that only the first process tokenises; None: data is kept in memory.

    Raises:
        UsageError: no such workload, or options that it cannot use.
    """
    given = {} if given is None else given
    if name in WORKLOADS:
        return WORKLOADS[name](given, cache_dir)
    if ":" in name or name.endswith(_PICKLE):
        return _users(name, given)
    raise UsageError(
        explain("no such workload", value=name, fix=f"use {', '.join(WORKLOADS)}, or module:function for your own")
    )


def title(name: str) -> str:
    """Return what a workload is called for readers: the name, or that of the function in a ``.pickle`` file."""
    return Path(name).stem if name.endswith(_PICKLE) else name


def origin(name: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of the files that a workload is read from, by path, to notice that one has changed.

    Those are the data and the checkpoint of a built-in one, and the file in which your own function is defined.
    """
    if name in WORKLOADS:
        paths = [
            Path(str(given[key])) for key in ("data", "eval_data", "model") if given.get(key) not in (None, *bert.SIZES)
        ]
        files = [path for each in paths for path in (sorted(each.iterdir()) if each.is_dir() else [each])]
        return {str(path): f"{path.stat().st_size} bytes of {path.stat().st_mtime_ns}" for path in files}
    try:
        function = inspect.unwrap(_find(name))
        source = inspect.getsource(function) if name.endswith(_PICKLE) else Path(inspect.getfile(function)).read_text()
    except (OSError, TypeError):  # written in C, or typed into an interpreter
        return {}
    return {f"of {title(name)}": hashlib.sha256(source.encode()).hexdigest()[:12]}


def options_from(name: str, namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the options of one workload from a parsed command line, as ``load`` takes them; JSON can represent them.

    Raises:
        UsageError: an invalid value, or an option that only another workload has.
    """
    pairs = getattr(namespace, "option", None) or []
    if name not in WORKLOADS:
        _refuse(name, namespace, set())
        return _pairs(pairs)
    if pairs:
        raise UsageError(
            explain(f"--option is for a workload of your own, not for {name}", value=pairs[0], fix="leave it out")
        )
    given: dict[str, Any] = options.given(OPTIONS[name], namespace)
    for field in {"data", "eval_data"} & given.keys():  # made absolute, because ranks may run in another directory
        given[field] = os.path.abspath(os.path.expanduser(given[field]))
    if "model" in given and given["model"] not in bert.SIZES:
        given["model"] = str(bert.find(given["model"]))
    _refuse(name, namespace, set(given))
    return given


def _refuse(name: str, namespace: argparse.Namespace, used: set[str]) -> None:
    """Raise UsageError for a given option that belongs to another workload only, instead of ignoring it.

    ``seed`` and ``batch_size`` are not checked: the command that trains may have options of these names too.
    """
    for other in OPTIONS.values():
        for field in options.given(other, namespace):
            if field not in used and field not in ("seed", "batch_size"):
                what = f"the workload {name} has no option --{field.replace('_', '-')}"
                fix = "leave it out, or choose the workload it belongs to"
                raise UsageError(explain(what, value=getattr(namespace, field), fix=fix))


def _pairs(pairs: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise UsageError(explain("--option wants KEY=VALUE", value=pair, fix="write it as --option size=large"))
        if key in given:
            raise UsageError(explain("--option was given twice for one key", value=key, fix="give it once"))
        given[key] = value
    return given


def _users(name: str, given: Mapping[str, Any]) -> Workload:
    function = _find(name)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = [p for p in parameters if p.kind in (*positional, inspect.Parameter.VAR_POSITIONAL)]
    needs = [p for p in parameters if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)]
    if len(needs) > 1 or (needs and needs[0].kind is inspect.Parameter.KEYWORD_ONLY):
        what = f"the workload function {name} needs other arguments than one dict of options"
        fix = "write it as function() or function(options)"
        raise UsageError(explain(what, value=", ".join(p.name for p in needs), fix=fix))
    if not takes and given:
        what = f"the workload function {name} takes no options"
        fix = "write it as function(options), or leave --option out"
        raise UsageError(explain(what, value=", ".join(map(str, given)), fix=fix))
    try:
        made = function(dict(given)) if takes else function()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(_failed(f"the workload function {name} raised", error)) from error
    if not isinstance(made, Workload):
        what = f"the workload function {name} did not return a guozhuang.workloads.Workload"
        fix = "return one; its docstring says what its fields are"
        raise UsageError(explain(what, value=type(made).__name__, fix=fix))
    return made


def _failed(what: str, error: Exception) -> str:
    """Describe an exception of the user's own code, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return explain(f"{what} {type(error).__name__} at {place}: {error}", fix="mend it there")


def _find(name: str) -> Callable[..., Any]:
    if name.endswith(_PICKLE):
        found: Callable[..., Any] = pickle.loads(Path(name).read_bytes())
        return found
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(explain("a workload of your own is named module:function", value=name, fix="give both names"))
    # Add the current directory to the path, as `python -m` does; for good, since the module may import its neighbours later.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):  # the module's own import failed
            raise UsageError(_failed(f"importing {module_name} raised", error)) from error
        raise UsageError(
            explain(
                f"no module named {module_name} in {here} or among the installed packages",
                value=name,
                fix="name a module as in `import`, without .py",
            )
        ) from None
    except Exception as error:
        raise UsageError(_failed(f"importing {module_name} raised", error)) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        there = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module_name
        ]
        what = f"the module {module_name} has no function {function_name}"
        fix = f"use one of: {', '.join(there)}" if there else "define it there"
        raise UsageError(explain(what, value=name, fix=fix))
    return function

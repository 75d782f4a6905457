"""What README and docs/ show: each command line is understood, Python code names what exists, the API page is whole."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import guozhuang
from guozhuang.cli import COMMANDS
from guozhuang.launch.options.arguments import read
from tests.documented import ROOT, blocks, of_guozhuang


def understand(words: list[str]) -> None:
    command, *rest = [word for word in words[1:] if word != "..."]
    if command.startswith("-"):
        assert command in ("--help", "--version")
    elif command == "run":
        read(rest)
    else:
        COMMANDS[command].parser().parse_args(rest)


def test_each_command_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    found, faults = of_guozhuang(), []
    assert len(found) > 15, found
    for page, words in found:
        try:
            understand(words)
        except (SystemExit, KeyError, guozhuang.errors.UsageError) as error:
            if not ("--help" in words and isinstance(error, SystemExit) and error.code == 0):
                faults.append((page, " ".join(words), error, capsys.readouterr().err))
    assert not faults, faults


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name. Those for other libraries are read, because importing them would import these libraries."""
    if module.startswith("guozhuang.compat."):
        found = importlib.util.find_spec(module)
        return found is not None and re.search(rf"\b{name}\b", Path(str(found.origin)).read_text()) is not None
    return hasattr(importlib.import_module(module), name)


def test_python_code_compiles_and_names_what_exists() -> None:
    faults = []
    for page, text in blocks("python"):
        for node in ast.walk(ast.parse(text, page)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("guozhuang"):
                faults += [(page, node.module, a.name) for a in node.names if not is_there(str(node.module), a.name)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gz":
                faults += [(page, "gz", node.attr)] * (not hasattr(guozhuang, node.attr))
    assert not faults, faults


def test_the_api_page_names_each_public_name_once() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = [line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")]
    assert sorted(named) == sorted([*guozhuang.__all__, "ComparisonOutcome", "print"])  # print: not in a star import


def test_make_commands_exist() -> None:
    """The commands of make that README names are targets."""
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "test-slow"} <= named
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named), named

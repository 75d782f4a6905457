"""docs/architecture.md names files and functions: all of them exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILE = r"`([\w/]+\.py)`"
# `file.py` → `name`, `name`; or, in tables, `file.py` (`name`).
NAMED = FILE + r"\s+(?:→\s+|\()((?:`[\w.]+`(?:,\s+)?)+)"


@cache
def names_of(path: str) -> frozenset[str]:
    """Functions, classes and methods of a file: "main", "Door", "Door.close"."""
    tree = ast.parse((ROOT / "guozhuang" / path).read_text())
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tops = [node for node in tree.body if isinstance(node, defined)]
    inner = {f"{top.name}.{node.name}" for top in tops for node in top.body if isinstance(node, defined)}
    return frozenset({top.name for top in tops} | inner)


def test_files_on_the_page_exist() -> None:
    files = set(re.findall(FILE, PAGE)) - {"train.py"}
    missing = {
        each for each in files if not (ROOT / ("" if each.startswith("tests/") else "guozhuang") / each).is_file()
    }
    assert len(files) > 50 and not missing


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", PAGE, re.MULTILINE)[:5])
def test_names_on_the_page_exist(heading: str) -> None:
    section = PAGE[PAGE.index(f"## {heading}") :].split("\n## ")[0]
    named = [(path, name) for path, names in re.findall(NAMED, section) for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) >= 4
    assert not [f"{path} has no {name}" for path, name in named if name not in names_of(path)]

"""The default corpus: docstrings of the standard library of this machine's Python, labelled by package."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from guozhuang.errors import UsageError, explain

NUM_PACKAGES = 16
MAX_PER_PACKAGE = 1000
_LEAST_PER_PACKAGE = 50
_LEAST_PACKAGES = 4

# Folders that are skipped: tests and installed packages are not part of the library.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_WORD = re.compile(r"[A-Za-z]{2,}")
_BLANK_LINES = re.compile(r"\n\s*\n")
_LEAST_WORDS = 5


def corpus(library: Path | None = None) -> tuple[list[str], list[str]]:
    """Return labelled texts from the docstrings of a Python library: its files are parsed, nothing is imported.

    A text is a paragraph of a docstring with at least five words and no ``>>>`` example, each once. Its label
    is the top-level package or module that contains it. The 16 packages with the most texts are used, with at most 1,000 texts
    each, evenly over the package. The result depends on the Python version and on which parts of it are installed.

    Args:
        library: the folder of the library; None means the standard library of this interpreter.

    Returns:
        labels and texts, in an order that depends only on the files.

    Raises:
        UsageError: the source files are missing, or too few texts were found.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        parts = path.relative_to(library).parts
        if _LEFT_OUT.intersection(parts) or any(part.startswith("config-") for part in parts):
            continue
        for text in _paragraphs(path):
            if text not in seen:
                seen.add(text)
                found.setdefault(parts[0].removesuffix(".py"), []).append(text)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:NUM_PACKAGES]
    taken = sorted(name for name in largest if len(found[name]) >= _LEAST_PER_PACKAGE)
    if len(taken) < _LEAST_PACKAGES:
        raise UsageError(
            explain(
                f"the Python standard library in {library} has too few docstrings for the default corpus "
                f"({len(taken)} packages with {_LEAST_PER_PACKAGE} texts or more)",
                fix="bring your own texts with --data FILE, or use a Python that has its library as .py files",
            )
        )
    labels, texts = [], []
    for name in taken:
        some = found[name]
        count = min(len(some), MAX_PER_PACKAGE)
        texts += [some[index * len(some) // count] for index in range(count)]
        labels += [name] * count
    return labels, texts


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():  # warnings about old escapes in the library's strings do not concern the user
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # the library contains files that are broken on purpose
        return
    # Only statements can contain definitions, so expressions, most of the tree, are skipped.
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        nodes += reversed([c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.excepthandler)])
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in _BLANK_LINES.split(ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if ">>>" not in text and "\0" not in text and len(_WORD.findall(text)) >= _LEAST_WORDS:
                    yield text

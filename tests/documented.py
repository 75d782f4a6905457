"""The commands and the Python code that README and the pages of docs/ show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Yield a page's name, and the text of each block of this kind in it."""
    for page in PAGES:
        for found, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if found == kind:
                yield page.relative_to(ROOT).as_posix(), text


def commands() -> list[tuple[str, list[str]]]:
    """A page's name, and the words of each command after a prompt, without its comment; variables before it are words too.

    Commands that are shown with the error they end with are left out.
    """
    found = []
    for page, text in blocks("console"):
        for shown in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            line, _, output = shown.partition("\n")
            if not re.search(r"\berror: |\bFix: ", output):
                found += [(page, shlex.split(part, comments=True)) for part in re.split(r" && | \| ", line)]
    return found


def of_guozhuang() -> list[tuple[str, list[str]]]:
    """A page's name, and the words of each command that calls ``guozhuang``, from that word on."""
    return [(page, words[words.index("guozhuang") :]) for page, words in commands() if "guozhuang" in words]

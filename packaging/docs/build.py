"""Builds the documentation site from README.md, docs/ and the docstrings: ``make docs`` calls it.

The pages link to each other, to benchmarks/README.md and to files of source code by their places in the repository. So
that the links hold on the site as they do in the repository, the site is built from a copy of these files that is laid
out as the repository is. A link to a page, heading or file that is not there ends the build with an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "docs"
PATTERNS = (
    *("README.md", "LICENSE", "docs/**/*.md", "benchmarks/README.md", "examples/*.py", "guozhuang/**/*.py"),
    "packaging/docs/*.css",
)
# A link in Markdown: its target without the heading. Addresses of other sites have a colon.
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def main() -> int:
    """Build the site into build/docs/site.

    Returns:
        0 if it was built, 1 if the navigation lacks a page or a link leads nowhere.
    """
    shutil.rmtree(BUILT, ignore_errors=True)
    pages = BUILT / "pages"
    for pattern in PATTERNS:
        for source in ROOT.glob(pattern):
            target = pages / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    config = Path(__file__).with_name("zensical.toml").read_text(encoding="utf-8").replace("@ROOT@", ROOT.as_posix())
    (BUILT / "zensical.toml").write_text(config, encoding="utf-8")
    faults = [*_not_in_navigation(pages, tomllib.loads(config)), *_broken_links(pages)]
    for fault in faults:
        print(f"make docs: {fault}", file=sys.stderr)
    if faults:
        return 1
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    code = subprocess.run(command, cwd=BUILT, timeout=300).returncode
    if code == 0:
        print(f"documentation: {BUILT.relative_to(ROOT) / 'site' / 'index.html'}")
    return min(code, 1)


def _not_in_navigation(pages: Path, config: dict) -> Iterator[str]:
    """Yield a sentence for each page that the navigation does not name, and for each name that is no page."""
    named = set(_leaves(config["project"]["nav"]))
    present = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    for name in sorted(present - named):
        yield f"{name} is not in the navigation. Fix: add it to nav in packaging/docs/zensical.toml"
    for name in sorted(named - present):
        yield f"the navigation names {name}, which does not exist. Fix: remove it from nav in packaging/docs/zensical.toml"


def _leaves(entry: list | dict | str) -> Iterator[str]:
    """Yield the files that an entry of the navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(inner)


def _broken_links(pages: Path) -> Iterator[str]:
    """Yield a sentence for each link to a file that does not exist. Zensical checks links to pages and headings alone."""
    for page in sorted(pages.rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in LINK.findall(text):
            if not (page.parent / target).exists():
                yield f"{page.relative_to(pages)} links to {target}, which does not exist or is no part of the site"


if __name__ == "__main__":
    sys.exit(main())

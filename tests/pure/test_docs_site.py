"""The documentation site: its pages, links and headings exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of what the site is made of, so that a test may change pages."""
    for name in ("docs", "examples", "guozhuang", "packaging/docs"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.h")
        )
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "LICENSE", "benchmarks/README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "packaging/docs/build.py"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_site_is_built_and_each_public_name_stands_in_it(copied: Path) -> None:
    pytest.importorskip("zensical", reason="the extra 'docs' is not installed")
    done = build(copied)
    assert done.returncode == 0, done.stdout + done.stderr
    site = copied / "build/docs/site"
    assert 'id="guozhuang.init"' in (site / "docs/api.html").read_text()
    assert "torch.distributed" in (site / "search.json").read_text()

    page = copied / "docs/compare.md"  # what Zensical finds itself
    page.write_text(page.read_text() + "\nSee [there](run.md#no-such-heading).\n")
    done = build(copied)
    assert done.returncode == 1 and "anchor does not exist" in done.stdout + done.stderr


def test_faults_of_pages_are_named(copied: Path) -> None:
    (copied / "docs/new.md").write_text(
        "See [a](nowhere.md), [b](../guozhuang/nothing.py#L1) and [c](https://pytorch.org).\n"
    )
    (copied / "docs/hosts.md").unlink()
    done = build(copied)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert "docs/new.md is not in the navigation. Fix: add it to nav in packaging/docs/zensical.toml" in said[0]
    assert "the navigation names docs/hosts.md, which does not exist" in said[1]
    assert any("docs/new.md links to nowhere.md" in line for line in said)
    assert any("docs/new.md links to ../guozhuang/nothing.py" in line for line in said)
    assert any("docs/run.md links to hosts.md" in line or "README.md links to docs/hosts.md" in line for line in said)
    assert not any("pytorch.org" in line for line in said)

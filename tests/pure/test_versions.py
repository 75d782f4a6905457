"""A PyTorch that is too old says so when the part that needs it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guozhuang.world.versions import OLDEST, require

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git123", "2.13.0+cpu", "3.0", "10.1"])
def test_new_enough(version: str) -> None:
    require("gz.thing", (2, 11), version)


@pytest.mark.parametrize("version", ["2.10.1+cu128", "1.13.1", "2.9", "unknown", ""])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        require("gz.thing", (2, 11), version)
    assert "gz.thing needs PyTorch 2.11 or later" in str(caught.value)
    assert repr(version) in str(caught.value)
    assert "pip install" in str(caught.value)


def test_importing_the_package_on_an_old_one_says_so() -> None:
    code = "import torch; torch.__version__ = '2.4.1'; import guozhuang"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: guozhuang.world needs PyTorch 2.11 or later (got '2.4.1')"
    )


def test_what_is_declared_is_what_is_checked() -> None:
    wanted = ".".join(map(str, OLDEST))
    assert f'"torch>={wanted}"' in (ROOT / "pyproject.toml").read_text()

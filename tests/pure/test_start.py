"""The way by which scripts that never import guozhuang meet it: classes of other libraries make objects of ours."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import _guozhuang_start as start
import guozhuang  # noqa: F401  a program that imports it is served
from guozhuang.compat import prepared

ROOT = Path(__file__).resolve().parents[2]


class Ours:
    """Stands for the part that a layer of compat adds to a class of another library."""

    def __init__(self, *args: Any) -> None:
        self.seen = args
        super().__init__(*args)


def plugged(theirs: type) -> type:
    return theirs if issubclass(theirs, Ours) else type(theirs.__name__, (Ours, theirs), {})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library that is imported, with a class that a stand-in is waiting for."""

    class Theirs:
        def __init__(self, value: int) -> None:
            self.value = value

    module = types.ModuleType("alibrary.part")
    module.Theirs = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "alibrary.part", module)
    waiting = {("alibrary.part", "Theirs"): lambda found: start.stand_in(found, f"{__name__}:plugged")}
    monkeypatch.setattr(start, "_WAITING", waiting)
    monkeypatch.setattr(start, "_LIBRARIES", ("alibrary.",))
    return module


def test_a_class_that_was_imported_by_name_makes_objects_of_ours_once_its_library_goes_on(library: Any) -> None:
    theirs = library.Theirs  # as a script holds it
    class_of_a_script = type("Mine", (theirs,), {"more": 1})
    lookout = start._Lookout()
    assert lookout.find_spec("another.module") is None
    assert not isinstance(theirs(3), Ours)
    assert lookout.find_spec("alibrary.last") is None
    for cls in (theirs, class_of_a_script):
        made = cls(3)
        assert isinstance(made, Ours) and isinstance(made, cls) and made.value == 3 and made.seen == (3,)
        assert list(inspect.signature(cls).parameters) == ["value"], "programs that read it see no change"
    assert not start._WAITING, "done once"


def test_nothing_is_replaced_in_a_program_that_has_nothing_to_do_with_guozhuang(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start._Lookout().find_spec("alibrary.last")
    monkeypatch.delitem(sys.modules, "guozhuang")
    for name in ("GUOZHUANG_STRATEGY", "GUOZHUANG_REPLACE_DDP"):
        monkeypatch.delenv(name, raising=False)
    assert not isinstance(library.Theirs(3), Ours)
    monkeypatch.setenv("GUOZHUANG_STRATEGY", "sharded")
    assert isinstance(library.Theirs(3), Ours)


def test_a_step_that_fails_breaks_no_import(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(found: Any) -> None:
        raise KeyError("ddp_backend")

    monkeypatch.setattr(start, "_WAITING", {("alibrary.part", "Theirs"): fails})
    assert start._Lookout().find_spec("alibrary.last") is None and not start._WAITING
    assert "guozhuang could not serve alibrary.part.Theirs: KeyError: 'ddp_backend'" in caplog.text


@pytest.mark.parametrize(
    ("version", "registered"), [("2.13.0+cpu", True), ("2.13a0", True), ("own", True), ("2.14.0", False)]
)
def test_any_version_of_torch_is_understood(version: str, registered: bool) -> None:
    named: list[str] = []
    backend = types.SimpleNamespace(backend_list=[], register_backend=lambda name, *_, **__: named.append(name))
    start._register_backend(
        types.SimpleNamespace(distributed=types.SimpleNamespace(Backend=backend), __version__=version)
    )
    assert named == ["shm"] * registered


def test_torch_finds_it_by_an_entry_point() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    assert declared == {"guozhuang": "_guozhuang_start:attach"}
    found = importlib.metadata.entry_points(group="torch.backends", name="guozhuang")
    assert [each.value for each in found] == ["_guozhuang_start:attach"], "install anew: pip install -e ."
    assert any(isinstance(finder, start._Lookout) for finder in sys.meta_path)


@pytest.mark.parametrize(("rank", "is_said"), [(None, True), ("", True), ("0", True), ("1", False), ("?", False)])
def test_what_is_said_before_there_is_a_group_never_ends_the_script(
    rank: str | None, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    prepared.say_once(f"RANK was {rank!r}")
    assert bool(capsys.readouterr().err) == is_said

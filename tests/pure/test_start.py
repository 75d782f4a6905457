"""The way by which scripts that never import guozhuang meet it: classes of other libraries make objects of ours."""

from __future__ import annotations

import datetime
import importlib.metadata
import inspect
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import _guozhuang_start as start
import guozhuang  # noqa: F401  a program that imports it is served
from guozhuang.compat import prepared
from tests.ranks import free_port
from tests.waiting import EXPIRES_S, LIMIT_S

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


@pytest.mark.parametrize(
    ("noted", "error_file", "host", "port", "is_own"),
    [
        ("127.0.0.1:4711 /run/0", "/run/0", "127.0.0.1", 4711, False),
        ("127.0.0.1:4711 /run/0", "/run/0", "localhost", 4711, False),
        ("127.0.0.1:4711 /run/0", "/run/0", "localhost", 29500, True),
        ("h1:29500 /run/0", "/run/0", "H1", 29500, False),
        ("h1:29500 /run/0", "/run/0", "h2", 29500, True),
        ("fe80::1:29500 /run/0", "/run/0", "fe80::1", 29500, False),
        ("127.0.0.1:4711 /run/0", "/another/0", "127.0.0.1", 29500, False),  # a rank of another launcher in this rank
        ("127.0.0.1:4711 ", None, "localhost", 29500, True),
        (None, "/run/0", "localhost", 29500, False),  # not started by guozhuang run
    ],
)
def test_a_store_of_the_scripts_own_is_told_from_that_of_the_launcher(
    noted: str | None, error_file: str | None, host: str, port: int, is_own: bool
) -> None:
    environ = {"GUOZHUANG_RUN_STORE": noted, "TORCHELASTIC_ERROR_FILE": error_file}
    assert start.is_own_store(host, port, {k: v for k, v in environ.items() if v is not None}) is is_own


OVER_SSH = {"GUOZHUANG_RUN_STORE": "127.0.0.1:4711 /run/0", "GUOZHUANG_FIRST_HOST": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}
BY_HAND = {"GUOZHUANG_RUN_STORE": "10.0.0.1:29500 /run/0", "LOCAL_WORLD_SIZE": "2"}
ON_ONE_MACHINE = {"GUOZHUANG_RUN_STORE": "127.0.0.1:29500 /run/0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "host", "size", "found", "warns"),
    [
        pytest.param(OVER_SSH, "127.0.0.1", 3, "10.0.0.1", False, id="MASTER_ADDR is the first host"),
        pytest.param(OVER_SSH, "127.0.0.1", 2, "127.0.0.1", False, id="all of them may be on this host"),
        pytest.param(OVER_SSH, "localhost", 3, "localhost", True, id="this host cannot be meant"),
        pytest.param(OVER_SSH, "10.0.0.2", 3, "10.0.0.2", False, id="a host is named"),
        pytest.param(BY_HAND, "10.0.0.1", 3, "10.0.0.1", False, id="MASTER_ADDR names a host"),
        pytest.param(BY_HAND, "localhost", 3, "localhost", True, id="this host cannot be meant by hand"),
        pytest.param(ON_ONE_MACHINE, "localhost", 3, "localhost", False, id="all nodes are one machine"),
    ],
)
def test_master_addr_with_a_port_of_the_scripts_own_is_the_first_host(
    environ: dict[str, str], host: str, size: int, found: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert start.host_of_own_store(host, 29600, size, environ | {"RANK": "2"}) == found
    text = f"rank 2 looks for a store of {size} ranks on its own host, which has 2 ranks, at {host}:29600. "
    assert (text in caplog.text and f"give the script 10.0.0.1 in place of {host}" in caplog.text) is warns


def test_rank_0_keeps_a_store_of_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    url, limit = f"tcp://localhost:{free_port()}", datetime.timedelta(seconds=LIMIT_S)
    with pytest.raises(dist.DistError):  # one that nobody keeps
        next(dist.rendezvous(url, 0, 1, timeout=datetime.timedelta(seconds=EXPIRES_S)))
    monkeypatch.setenv("GUOZHUANG_RUN_STORE", "127.0.0.1:1 ")
    store, rank, size = next(dist.rendezvous(url, 0, 1, timeout=limit))
    store.set("key", "value")
    assert (rank, size, store.get("key")) == (0, 1, b"value")
    monkeypatch.setenv("GUOZHUANG_RUN_STORE", url.removeprefix("tcp://") + " ")  # as if the launcher kept it
    again, *_ = next(dist.rendezvous(url, 0, 1, timeout=limit))
    assert again.get("key") == b"value"


@pytest.mark.parametrize(("rank", "is_said"), [(None, True), ("", True), ("0", True), ("1", False), ("?", False)])
def test_what_is_said_before_there_is_a_group_never_ends_the_script(
    rank: str | None, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    prepared.say_once(f"RANK was {rank!r}")
    assert bool(capsys.readouterr().err) == is_said

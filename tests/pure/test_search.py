"""How ranks find each other without a port that is told: rank 0's door, and who looks for it. Sockets of this process only."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guozhuang.errors import UsageError, WorldError
from guozhuang.net import client, interfaces, search
from guozhuang.net import door as doors
from guozhuang.net import meeting_point as ports
from guozhuang.net.door import Door, passage_from
from guozhuang.net.meeting_point import PortSequence
from tests.pure import test_door
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

OTHER_JOB = ports.secret(b"", ["another"])


@pytest.fixture
def point(request: pytest.FixtureRequest) -> PortSequence:
    """Of its own for every test, so that two test runs do not meet; nobody listens at its ports."""
    for number in itertools.count():
        key = [request.node.nodeid, str(os.getpid()), str(number)]
        with contextlib.suppress(OSError):
            for port in ports.sequence(key):
                socket.create_server(("127.0.0.1", port)).close()
            return PortSequence(("127.0.0.1",), ports.sequence(key), ports.secret(b"", key), is_one_node=True)
    raise AssertionError("no ports are free")


@contextlib.contextmanager
def rank_0(point: PortSequence, secret: bytes | None = None) -> Iterator[tuple[int, int]]:
    """Its door and something behind it; gives the ports of both."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        listener = search.listener_of(point)
        door = Door(listener, store.getsockname()[1], secret or point.secret)
        try:
            yield door.address[1], store.getsockname()[1]
        finally:
            door.close()


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> list[search._Search]:
    """The searches of a test. A silent stranger costs them little at first, and no rank 0 is too slow for them."""
    made: list[search._Search] = []

    class Noted(search._Search):
        def run(self) -> search.OpenDoor:
            made.append(self)
            return super().run()

    monkeypatch.setattr(search, "_Search", Noted)
    monkeypatch.setattr(search, "_FIRST_KNOCK_S", EXPIRES_S)
    monkeypatch.setattr(search, "_LONGEST_KNOCK_S", LIMIT_S)
    monkeypatch.setattr(doors, "HANDSHAKE_S", NEVER_S)
    return made


@contextlib.contextmanager
def over_once(
    searches: list[search._Search], comes: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The time of the search inside is over as soon as ``comes()``. It looks at its time whenever a notice is due."""
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.05)
    monkeypatch.setattr(client, "NEXT_NOTICE_S", 0.05)

    def end() -> None:
        until(lambda: searches and comes())
        searches[0].deadline = time.monotonic()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def stranger(port: int, answer: bytes | None = None) -> contextlib.AbstractContextManager[tuple[str, int]]:
    return test_door.stranger(answer, port=port)


def test_the_first_port_is_taken_where_it_is_free(point: PortSequence) -> None:
    with rank_0(point) as (port, store_port):
        assert port == point.ports[0]
        found = search.find(point, 1, NEVER_S)
        assert (found.host, found.port, found.store_port) == ("127.0.0.1", port, store_port)
        found.connection.close()


def test_strangers_and_other_jobs_hold_the_first_ports(point: PortSequence) -> None:
    other = replace(point, secret=OTHER_JOB)
    with stranger(point.ports[0]), stranger(point.ports[1], b"220 mail\r\n"), rank_0(other) as (theirs, _):
        assert theirs == point.ports[2]
        with rank_0(point) as (port, _):
            assert port == point.ports[3]
            found = search.find(point, 1, NEVER_S)
            assert found.port == port
            found.connection.close()


def test_one_that_comes_late_is_waited_for(point: PortSequence, searches: list[search._Search]) -> None:
    found: list[search.OpenDoor] = []
    thread = threading.Thread(target=lambda: found.append(search.find(point, 1, NEVER_S)))
    thread.start()
    until(lambda: searches and len(searches[0].seen) == len(point.ports))
    with rank_0(point) as (port, _):
        thread.join(LIMIT_S)
        assert [each.port for each in found] == [port]
        found[0].connection.close()


def test_who_finds_nobody_says_where_it_looked(
    point: PortSequence, searches: list[search._Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = replace(point, hosts=("127.0.0.1", "no-such-host.invalid"))
    other = replace(point, secret=OTHER_JOB, ports=point.ports[1:])

    def has_seen_all() -> bool:
        return len(searches[0].seen) == len(point.ports) and bool(searches[0].unresolved)

    over = over_once(searches, has_seen_all, monkeypatch)
    with stranger(point.ports[0]), rank_0(other), over, pytest.raises(WorldError) as caught:
        search.find(asking, 3, NEVER_S)
    text = str(caught.value)
    assert f"[rank 3] found no door of rank 0 within {NEVER_S:g} s" in text
    assert "did not answer within" in text and f"port {point.ports[0]}" in text
    assert f"belongs to another run (the secrets differ) (port {point.ports[1]})" in text
    assert "nobody listens there (port " in text
    assert "no-such-host.invalid: the name cannot be resolved" in text
    assert "put no-such-host.invalid into DNS or /etc/hosts of this node, or export MASTER_ADDR" in text, "the remedy"


def test_who_waits_long_says_so_and_what_it_saw(
    point: PortSequence,
    searches: list[search._Search],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = "rank 3 found no door of rank 0 yet; knocked at 127.0.0.1: nobody listens there"
    over = over_once(searches, lambda: words in caplog.text, monkeypatch)
    with caplog.at_level(logging.WARNING, "guozhuang"), over, pytest.raises(WorldError):
        search.find(point, 3, NEVER_S)
    caplog.clear()
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    with caplog.at_level(logging.WARNING, "guozhuang"), pytest.raises(WorldError):
        search.find(point, 3, EXPIRES_S, log_notices=False)
    assert not caplog.records, "one rank of a node speaks for all"


def test_a_host_that_swallows_everything_does_not_delay_the_right_one(
    point: PortSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of the documentation's network, where nothing answers."""
    go_on = threading.Event()

    def knock(host: str, *more: Any) -> search.OpenDoor:
        if host == "192.0.2.77":
            go_on.wait()
            raise TimeoutError
        return doors.knock(host, *more)

    monkeypatch.setattr(search, "knock", knock)
    with rank_0(point) as (port, _):
        try:
            found = search.find(replace(point, hosts=("192.0.2.77", "127.0.0.1")), 1, NEVER_S)
        finally:
            go_on.set()
        assert found.port == port
        found.connection.close()


def test_no_free_port_is_an_error_that_lists_them(point: PortSequence) -> None:
    two = replace(point, ports=point.ports[:2])
    with stranger(two.ports[0]), stranger(two.ports[1]), pytest.raises(UsageError) as caught:
        search.listener_of(two)
    assert f"{two.ports[0]}, {two.ports[1]} of 127.0.0.1" in str(caught.value)
    assert "MASTER_PORT" in str(caught.value)


# ---- which address


def test_one_node_listens_on_loopback_only(point: PortSequence) -> None:
    with search.listener_of(point) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_address_is_one_that_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interfaces, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"]}
    )
    names = {"me": ["127.0.1.1"], "me-ib": ["10.1.0.5"], "login": ["10.9.9.9"]}
    monkeypatch.setattr(interfaces, "resolve", lambda host: names.get(host, []))

    def towards(host: str) -> str:
        if host != "other":
            raise WorldError("no route")
        return "10.0.0.5"

    monkeypatch.setattr(interfaces, "own_address_towards", towards)
    assert interfaces.own_address(["me-ib", "login"], ["other"]) == "10.1.0.5"
    assert interfaces.own_address(["me", "login"], ["other"]) == "10.0.0.5", (
        "its name leads to loopback: towards the others"
    )
    assert interfaces.own_address(["me"], ["unknown"]) == "10.0.0.5", "no sign: not loopback, where nobody could come"
    assert interfaces.own_address(["me", "127.0.0.1"], ["unknown"]) == "127.0.0.1", "the others look there"
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": ["127.0.0.1"]})
    assert interfaces.own_address([], []) == "127.0.0.1"


def test_bridges_of_containers_and_later_hints_that_fit_by_chance_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Open MPI tells every address of mpirun's node, and nodes often have some addresses in common."""
    known = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7"], "usb0": ["169.254.3.1"]}
    monkeypatch.setattr(interfaces, "addresses", lambda: known)
    monkeypatch.setattr(interfaces, "resolve", lambda host: [host])
    routes = {"10.0.0.5": "10.0.0.7", "172.17.0.1": "172.17.0.1", "169.254.3.1": "169.254.3.1"}
    monkeypatch.setattr(interfaces, "own_address_towards", routes.__getitem__)
    for mpirun in (["10.0.0.5", "172.17.0.1"], ["172.17.0.1", "10.0.0.5"], ["10.0.0.5", "169.254.3.1"]):
        assert interfaces.own_address(mpirun, mpirun) == "10.0.0.7", mpirun
    assert interfaces.own_address(["172.17.0.1", "10.0.0.7"], ["172.17.0.1"]) == "10.0.0.7", "mpirun's own node"


# ---- notes


@pytest.fixture
def noted(point: PortSequence, tmp_path: Path) -> PortSequence:
    return replace(point, hosts=(), note=str(tmp_path / "folder" / "meet-1"), is_one_node=False)


def test_a_note_is_for_the_users_eyes_and_whole(noted: PortSequence) -> None:
    assert search.read_note(noted) is None
    assert search.write_note(noted, ("10.0.0.5", 15000))
    assert search.read_note(noted) == ("10.0.0.5", 15000)
    path = Path(noted.note)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["meet-1"], "nothing half written stays"
    assert noted.secret.hex() not in path.read_text()
    assert search.read_note(replace(noted, secret=OTHER_JOB)) is None
    search.remove_note(noted)
    search.remove_note(noted)
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"host": "a"}', '{"host": "a", "port": "x", "proof": ""}', "\0" * 9999]
)
def test_a_note_that_says_nothing_is_none(text: str, noted: PortSequence) -> None:
    Path(noted.note).parent.mkdir()
    Path(noted.note).write_text(text)
    assert search.read_note(noted) is None


def test_a_note_that_others_could_write_is_none(noted: PortSequence) -> None:
    search.write_note(noted, ("127.0.0.1", 15000))
    Path(noted.note).chmod(0o666)
    assert search.read_note(noted) is None


def test_a_note_changed_by_somebody_is_none(noted: PortSequence) -> None:
    search.write_note(noted, ("127.0.0.1", 15000))
    told = json.loads(Path(noted.note).read_text())
    Path(noted.note).write_text(json.dumps(told | {"port": 15001}))
    assert search.read_note(noted) is None


def test_a_folder_that_cannot_be_written_is_said(noted: PortSequence, caplog: pytest.LogCaptureFixture) -> None:
    Path(noted.note).parent.write_text("a file stands in the way")
    with caplog.at_level(logging.WARNING, "guozhuang"):
        assert not search.write_note(noted, ("127.0.0.1", 15000))
    assert "GUOZHUANG_MEETING_DIR" in caplog.text


def test_old_notes_are_cleared_away(noted: PortSequence) -> None:
    folder = Path(noted.note).parent
    folder.mkdir()
    for name, age_s in (("meet-old", 48 * 3600), ("meet-new", 60), ("something else", 48 * 3600)):
        (folder / name).write_text("")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    search.write_note(noted, ("127.0.0.1", 15000))
    assert set(os.listdir(folder)) == {"meet-new", "something else", "meet-1"}


def test_a_note_leads_to_the_door_and_a_stale_one_misleads_nobody(
    noted: PortSequence, searches: list[search._Search]
) -> None:
    """The note of a run that died is there first, and its port was taken over by a stranger."""
    search.write_note(noted, ("127.0.0.1", noted.ports[5]))
    found: list[search.OpenDoor] = []
    thread = threading.Thread(target=lambda: found.append(search.find(noted, 1, NEVER_S)))
    with stranger(noted.ports[5]):
        thread.start()
        until(lambda: searches and ("127.0.0.1", noted.ports[5]) in searches[0].seen)
        assert not found
        with rank_0(replace(noted, is_one_node=True)) as (port, store_port):
            search.write_note(noted, ("127.0.0.1", port))
            thread.join(LIMIT_S)
            assert [(each.port, each.store_port) for each in found] == [(port, store_port)]
            passage = passage_from(found[0], noted.secret)
            passage.close()


def test_who_waits_for_a_note_says_where(noted: PortSequence) -> None:
    with pytest.raises(WorldError) as caught:
        search.find(noted, 1, EXPIRES_S)
    assert noted.note in str(caught.value)

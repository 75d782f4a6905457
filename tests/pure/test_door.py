"""The door in front of a store: who gets in, who does not, and that neither holds up the other."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError
from guozhuang.net import client
from guozhuang.net import door as doors
from guozhuang.net.door import Door, NotOurDoorError, WrongSecretError, knock, pass_through
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, remaining, until

SECRET = bytes(range(16))
LIMIT = datetime.timedelta(seconds=NEVER_S)


class Echo:
    """What stands behind the door here: sends back what it gets, and counts its visitors."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.visitors = 0
        self._threads = [threading.Thread(target=self._accept, name="echo")]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.visitors += 1
            thread = threading.Thread(target=self._serve, args=(connection,), name="echo")
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                if data == b"leave":
                    return
                connection.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


@contextmanager
def door_before(port: int, secret: bytes = SECRET) -> Iterator[Door]:
    door = Door(socket.create_server(("127.0.0.1", 0)), port, secret)
    try:
        yield door
    finally:
        door.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def ranks_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handshake of a rank runs into a limit, however slow the machine is."""
    monkeypatch.setattr(doors, "HANDSHAKE_S", NEVER_S)
    monkeypatch.setattr(doors, "LATER_S", NEVER_S)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.settimeout(LIMIT_S)
    connection.sendall(data)
    back = b""
    while len(back) < len(data):
        part = connection.recv(65536)
        assert part, "the connection ended"
        back += part
    return back


def is_ended(connection: socket.socket, limit_s: float = LIMIT_S) -> bool:
    connection.settimeout(limit_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_who_knows_the_secret_gets_through(echo: Echo) -> None:
    with door_before(echo.port) as door:
        with knock(*door.address, SECRET, NEVER_S) as connection:
            assert exchange(connection, b"hello") == b"hello"
            connection.sendall(b"leave")
            assert is_ended(connection), "the end of the store is the end of the connection"
        inside = knock(*door.address, SECRET, NEVER_S)
        inside.connection.close()
        assert (inside.host, inside.port, inside.store_port) == (*door.address, echo.port)
        for _ in range(20):  # one after the other, and all at once
            knock(*door.address, SECRET, NEVER_S).connection.close()
        many = [knock(*door.address, SECRET, NEVER_S).connection for _ in range(20)]
        assert [exchange(each, b"%d" % i) for i, each in enumerate(many)] == [b"%d" % i for i in range(20)]
        for each in many:
            each.close()


def test_a_store_of_pytorch_behind_it() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    with door_before(store.port) as door:
        passages = [pass_through(*door.address, SECRET, NEVER_S) for _ in range(2)]
        try:
            host, port = passages[0]
            assert (host, port) == (passages[0].host, passages[0].port)
            assert host == "127.0.0.1"
            # Several through one passage, besides the first, whose connection was knocked for already.
            clients = [dist.TCPStore(*each, None, False, LIMIT, wait_for_workers=False) for each in passages * 3]
            clients[0].set("big", os.urandom(1 << 20).hex())
            assert clients[1].get("big") == store.get("big")
            assert [each.add("count", 1) for each in clients] == [1, 2, 3, 4, 5, 6]
            del clients
        finally:
            for passage in passages:
                passage.close()
                passage.close()
        with pytest.raises(OSError):
            socket.create_connection((host, port), timeout=LIMIT_S)


def test_large_amounts_go_both_ways_and_memory_stays_bounded(echo: Echo) -> None:
    data = os.urandom(4 << 20)
    with door_before(echo.port) as door, knock(*door.address, SECRET, NEVER_S) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        back = bytearray()
        while len(back) < len(data):
            back += connection.recv(1 << 20)
        sender.join(LIMIT_S)
        assert bytes(back) == data
        # Nobody reads: the sender is stopped after what fits into the buffers of the kernel, and a few of ours.
        connection.settimeout(EXPIRES_S)
        sent = 0
        # Four sockets lie on the way there and back; the kernel lets each hold as much as it is told to.
        kernel = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[2]) for way in "rw")
        with pytest.raises(TimeoutError):
            while sent < 4 * kernel + (16 << 20):
                sent += connection.send(data)


def test_a_wrong_secret_is_refused_and_said_once(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    with door_before(echo.port) as door, caplog.at_level(logging.WARNING, "guozhuang"):
        for _ in range(3):
            with pytest.raises(WrongSecretError, match="another run"):
                knock(*door.address, b"another", NEVER_S)
        with pytest.raises(WorldError, match=r"refuses this process.*GUOZHUANG_SECRET"):
            pass_through(*door.address, b"another", NEVER_S)  # at once, not at its time-out
        assert echo.visitors == 0
        with knock(*door.address, SECRET, NEVER_S) as connection:
            assert exchange(connection, b"x") == b"x"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "refused a connection from 127.0.0.1" in said[0]
    assert "does not know the secret" in said[0]


def test_a_wrong_secret_is_said_of_an_address_that_sent_garbage_before(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    with door_before(echo.port) as door, caplog.at_level(logging.WARNING, "guozhuang"):
        with socket.create_connection(door.address, timeout=LIMIT_S) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_ended(scanner)
        with pytest.raises(WrongSecretError):
            knock(*door.address, b"another", NEVER_S)
    garbage, wrong = [each.getMessage() for each in caplog.records]
    assert "did not begin the handshake of a rank" in garbage and "does not know the secret" in wrong


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 3000, b"GZ-DOOR2" + b"x" * 64, b"GZ-DOOR1" + b"\xff" * 64, b"", b"GZ-"],
    ids=["http", "zeros", "almost", "no proof", "nothing", "a part"],
)
def test_garbage_and_silence_are_refused_and_hold_up_nobody(
    garbage: bytes, echo: Echo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(door: Door) -> list[socket.socket]:
        strangers = [socket.create_connection(door.address, timeout=LIMIT_S) for _ in range(5)]
        for each in strangers:
            each.sendall(garbage)
        return strangers

    with door_before(echo.port) as door:
        strangers = come(door)
        with knock(*door.address, SECRET, NEVER_S) as connection:  # who waits for a stranger here waits for ever
            assert exchange(connection, b"x") == b"x"
    is_silent = garbage in (b"", b"GZ-")
    monkeypatch.setattr(doors, "HANDSHAKE_S", EXPIRES_S if is_silent else NEVER_S)
    caplog.clear()
    with door_before(echo.port) as door, caplog.at_level(logging.WARNING, "guozhuang"):
        strangers += come(door)
        assert all(is_ended(each) for each in strangers)
        for each in strangers:
            each.close()
        assert echo.visitors == 1
    assert len(caplog.records) == 1


def test_a_client_of_the_store_without_the_secret_gets_nothing() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    store.set("key", "value")
    with door_before(store.port) as door:
        short = datetime.timedelta(seconds=EXPIRES_S)
        with pytest.raises(RuntimeError):
            dist.TCPStore(*door.address, None, False, short, wait_for_workers=False).get("key")


def test_a_flood_of_strangers_keeps_no_rank_out(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_MAX_STRANGERS", 8)
    with door_before(echo.port) as door:
        strangers = [socket.create_connection(door.address, timeout=LIMIT_S) for _ in range(40)]
        with knock(*door.address, SECRET, NEVER_S) as connection:
            assert exchange(connection, b"x") == b"x"
        assert all(is_ended(each) for each in strangers[:30]), "the oldest go first, before their time is over"
        for each in strangers:
            each.close()


def test_a_later_connection_that_was_refused_is_tried_again(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_MAX_STRANGERS", 1)
    with door_before(echo.port) as door:
        passage = pass_through(*door.address, SECRET, NEVER_S)
        over = threading.Event()

        def flood() -> None:  # each stranger makes the door drop whoever is in its handshake
            while not over.is_set():
                with suppress(OSError), socket.create_connection(door.address, timeout=LIMIT_S):
                    time.sleep(0.001)

        strangers = [threading.Thread(target=flood) for _ in range(2)]
        for each in strangers:
            each.start()
        try:
            for _ in range(5):
                with socket.create_connection(passage, timeout=doors.LATER_S) as connection:
                    assert exchange(connection, b"x") == b"x"
        finally:
            over.set()
            for each in strangers:
                each.join()
            passage.close()


def test_an_answer_cannot_be_played_back(echo: Echo) -> None:
    """A stranger in between notes all that both sides say, and says it again to the door."""
    with door_before(echo.port) as door:
        heard = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as between:

            def listen() -> None:
                with between.accept()[0] as near, socket.create_connection(door.address) as far:
                    for num_bytes, source, target in (
                        (40, near, far),
                        (40, far, near),
                        (32, near, far),
                        (35, far, near),
                    ):
                        part = source.recv(num_bytes, socket.MSG_WAITALL)
                        target.sendall(part)
                        if source is near:
                            heard.extend(part)

            thread = threading.Thread(target=listen)
            thread.start()
            knock(*between.getsockname(), SECRET, NEVER_S).connection.close()
            thread.join(LIMIT_S)
        with socket.create_connection(door.address, timeout=LIMIT_S) as again:
            again.sendall(heard)
            assert again.recv(40, socket.MSG_WAITALL)[:8] == b"GZ-DOOR1"
            assert again.recv(1) == b"N"
        # And the door's own words sent back to it are no proof either.
        with socket.create_connection(door.address, timeout=LIMIT_S) as mirror:
            mirror.sendall(b"GZ-DOOR1" + bytes(32))
            said = mirror.recv(40, socket.MSG_WAITALL)
            mirror.sendall(said[8:])
            assert mirror.recv(1) == b"N"


@contextmanager
def stranger(answer: bytes | None, *, stay: bool = True, port: int = 0) -> Iterator[tuple[str, int]]:
    """Somebody else's service: says ``answer`` to each who comes (None: nothing), and stays or ends the connection."""
    listener = socket.create_server(("127.0.0.1", port))
    kept = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                kept.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                if not stay:
                    connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(LIMIT_S)
        for each in kept:
            each.close()


@pytest.mark.parametrize(
    ("answer", "stay", "words"),
    [
        (None, True, "did not answer within"),
        (b"SSH-2.0-x\r\n", True, "not as a door"),
        (b"GZ", True, "did not answer within"),
        (None, False, "ended it"),
        (b"GZ-DOOR1" + bytes(32) + b"Y" + bytes(34), True, "claims to know the secret"),
    ],
)
def test_a_stranger_at_the_port_is_known_as_one(answer: bytes | None, stay: bool, words: str) -> None:
    with stranger(answer, stay=stay) as address, pytest.raises(NotOurDoorError, match=words):
        knock(*address, SECRET, EXPIRES_S if "within" in words else NEVER_S)


def test_a_door_that_opens_late_is_waited_for(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody listens there yet
    tries, opened = [0], list[Door]()

    def counted(*arguments: Any) -> doors.OpenDoor:
        tries[0] += 1
        if tries[0] == 3:
            listener.listen()
            opened.append(Door(listener, echo.port, SECRET))
        return knock(*arguments)

    monkeypatch.setattr(doors, "knock", counted)
    passage = pass_through(*listener.getsockname(), SECRET, NEVER_S)
    assert tries[0] == 3
    with socket.create_connection(passage) as connection:
        assert exchange(connection, b"x") == b"x"
    passage.close()
    opened[0].close()


def test_a_door_that_never_opens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    with pytest.raises(WorldError, match=f"door at {host}:{port} within {EXPIRES_S:g} s") as caught:
        pass_through(host, port, SECRET, EXPIRES_S)
    assert "Fix:" in str(caught.value)


def test_who_waits_for_a_door_is_named_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_asked = [0]

    def resolve(*arguments: object, **more: object) -> Any:
        num_asked[0] += 1
        if num_asked[0] == 2:
            until(lambda: caplog.text)  # it says so before its time is over
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    with caplog.at_level(logging.WARNING, "guozhuang"), pytest.raises(WorldError) as caught:
        pass_through("no-such-host.invalid", 15000, SECRET, EXPIRES_S, rank=3)
    what = f"[rank 3] could not pass the door at no-such-host.invalid:15000 within {EXPIRES_S:g} s"
    assert what in str(caught.value)
    assert "the name cannot be resolved here" in str(caught.value)
    assert "rank 3 waits for the door at no-such-host.invalid:15000: the name" in caplog.text
    caplog.clear()
    with pytest.raises(WorldError):
        pass_through("no-such-host.invalid", 15000, SECRET, EXPIRES_S, rank=3, log_notices=False)
    assert not caplog.records


def test_closing_ends_everything(echo: Echo) -> None:
    before = set(threading.enumerate())
    with door_before(echo.port) as door:
        passage = pass_through(*door.address, SECRET, NEVER_S)
        through = [socket.create_connection(passage) for _ in range(3)]
        assert [exchange(each, b"x") for each in through] == [b"x"] * 3
        unused = pass_through(*door.address, SECRET, NEVER_S)
        door.close()
        door.close()
        assert all(is_ended(each) for each in through), "who is inside goes too"
        for each in through:
            each.close()
        passage.close()
        unused.close()
    assert not remaining(lambda: {t for t in set(threading.enumerate()) - before if t.name.startswith("guozhuang")})
    gc.collect()  # a socket that nobody closed would be reported here


def test_the_store_may_be_gone(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with door_before(port) as door, knock(*door.address, SECRET, NEVER_S) as connection:
        assert is_ended(connection)
    assert f"no store listens on loopback port {port}" in caplog.text


def test_a_secret_cannot_be_empty(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for attempt in (lambda: Door(listener, echo.port, b""), lambda: knock("127.0.0.1", echo.port, b"", 1)):
            with pytest.raises(UsageError, match="empty"):
                attempt()

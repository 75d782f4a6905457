"""Where rank 0's store listens, how the others come to it, and the roll call: within this process."""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.run import config_from_args

from guozhuang.errors import UsageError, WorldError
from guozhuang.groups import agreement
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read
from guozhuang.launch.rendezvous import endpoint
from guozhuang.launch.rendezvous.fixed import STORE_S, FixedRendezvous, NodeShare
from guozhuang.launch.request import Request
from guozhuang.net import client, interfaces
from guozhuang.net import meet as rendezvous
from guozhuang.net import meeting_point as ports
from guozhuang.net import store as stores
from guozhuang.net.ended import ended_with_0, forget_ended, tell_ended
from guozhuang.net.meet import RankCard, open_store, roll_call
from guozhuang.net.meeting_point import MeetingPoint, PortSequence
from guozhuang.watch.processes import node_identity
from guozhuang.world import torchrun
from tests.ranks import free_port
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

ADDRESS = interfaces.own_address([], [])
needs_an_address = pytest.mark.skipif(ADDRESS.startswith("127."), reason="needs an address besides loopback")
SECRET = bytes(range(16))
LIMIT = datetime.timedelta(seconds=LIMIT_S)


@contextlib.contextmanager
def silent_service() -> Iterator[int]:
    """The port of somebody who accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# ---- waiting


def test_what_does_not_end_is_given_up_and_what_does_is_handed_on() -> None:
    never = threading.Event()
    try:
        with pytest.raises(WorldError, match=rf"\[rank 2\] the store at x:1 has not answered for {EXPIRES_S} s\. Fix:"):
            client.within(EXPIRES_S, "the store at x:1", never.wait, rank=2)
    finally:
        never.set()
    assert client.within(NEVER_S, "it", lambda: 7) == 7
    with pytest.raises(KeyError):
        client.within(NEVER_S, "it", lambda: {}["x"])


def test_notices_of_a_failed_step_wait_for_no_store_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a cut cable a request to the store is answered after a quarter of an hour."""
    never, asked = threading.Event(), []

    class SilentStore:
        def set(self, *_: str) -> None:
            asked.append("set")
            never.wait(LIMIT_S)

        def add(self, *_: object) -> int:
            asked.append("add")
            never.wait(LIMIT_S)
            return 0

    monkeypatch.setattr(agreement, "STORE_S", 0.1)
    monkeypatch.setattr(agreement, "store_of", lambda group: SilentStore())
    monkeypatch.setattr(agreement, "next_part", lambda store, topic, rank: store)
    notices = agreement.StepNotices(dist.ProcessGroup(0, 2), "a topic")
    try:
        notices.leave(7, "a parameter had no gradient")
        assert notices.read(7, patience_s=NEVER_S) == {} and asked == ["set", "add"]
    finally:
        never.set()


def test_notices_come_first_soon_and_then_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "guozhuang"):
        patched.setattr(client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        notices = client.Notices()
        for _ in range(140):
            now_s[0] += 1.0
            if notices.are_due():
                notices.say("waiting for the moon")
    assert caplog.messages == [f"after {waited_s} s: waiting for the moon" for waited_s in (10, 70, 130)]
    caplog.clear()
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    never = threading.Event()
    with caplog.at_level(logging.WARNING, "guozhuang"), pytest.raises(client.OverdueError):
        client.attempt(EXPIRES_S, never.wait, lambda: "waiting for the sun")
    never.set()
    [said] = caplog.messages
    assert "waiting for the sun" in said


# ---- coming to a store


@pytest.mark.parametrize("silent", ["add", "set", "check"])
def test_a_comparison_waits_for_no_store_that_is_silent(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever request the store leaves unanswered, the rank raises in time and says what it compared."""
    never, store = threading.Event(), dist.HashStore()

    def wait(*_: object) -> None:
        never.wait(LIMIT_S)
        raise RuntimeError("the store is gone")

    class Cut:
        def __getattr__(self, name: str) -> Any:
            return wait if name == silent else getattr(store, name)

    class Two:
        size = staticmethod(lambda: 2)
        rank = staticmethod(lambda: 0)

    monkeypatch.setattr(agreement, "store_of", lambda group: Cut())
    monkeypatch.setattr(agreement, "STORE_S", 0.1)
    try:
        with pytest.raises(
            WorldError, match=r"\[rank 0\] the store in which the ranks compare the buffers has not answered"
        ):
            agreement.agree(Two(), "the buffers", ["one"], 0.1, "look")  # type: ignore[arg-type]
    finally:
        never.set()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", f"within {EXPIRES_S} s: nobody listens there"),
        ("no-such-host.invalid", f"within {EXPIRES_S} s: the name cannot be resolved here"),
    ],
)
def test_who_reaches_nobody_ends_in_time_and_says_why(
    host: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = client.tries

    def tries_after_the_notice(*arguments: Any) -> Iterator[float]:
        until(lambda: caplog.text)
        yield from tries(*arguments)

    monkeypatch.setattr(client, "tries", tries_after_the_notice)
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    point = MeetingPoint(host, free_port())
    with caplog.at_level(logging.WARNING, "guozhuang"), pytest.raises(WorldError) as caught:
        open_store(point, 1, EXPIRES_S)
    assert words in str(caught.value) and "[rank 1]" in str(caught.value)
    assert ("DNS or /etc/hosts" in str(caught.value)) == (host != "127.0.0.1")
    assert f"rank 1 waits for rank 0's store at {host}" in caplog.text


def test_a_silent_service_ends_in_time() -> None:
    within = rf"is no store of PyTorch: it did not answer within {EXPIRES_S} s"
    with silent_service() as port, pytest.raises(WorldError, match=within):
        stores.reach(MeetingPoint("127.0.0.1", port), 1, EXPIRES_S, "there")


def test_a_store_that_comes_late_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody listens there yet
    tries, kept = client.tries, list[dist.Store]()

    def tries_until_it_is_there(*arguments: Any) -> Iterator[float]:
        for number, left_s in enumerate(tries(*arguments)):
            if number == 2:
                listener.listen()
                kept.append(stores.serve(listener, timeout_s=LIMIT_S))
            yield left_s

    monkeypatch.setattr(client, "tries", tries_until_it_is_there)
    store, host = stores.reach(MeetingPoint("localhost", listener.getsockname()[1]), 1, LIMIT_S, "there")
    kept[0].set("key", "value")
    assert (store.get("key"), host) == (b"value", "localhost")
    assert store.timeout == LIMIT, "later operations have the whole time again"


@pytest.mark.parametrize("way", ["address", "one node", "door"])
def test_what_is_left_of_the_time_to_join_limits_no_later_operation(way: str, tmp_path: Path) -> None:
    point: MeetingPoint | PortSequence = MeetingPoint("127.0.0.1", free_port())
    if way != "address":
        ports_of_it = ports.sequence([str(tmp_path)])
        point = PortSequence(("127.0.0.1",), ports_of_it, SECRET, is_one_node=way == "one node")
    kept = rendezvous.keep(point, LIMIT_S)
    for operation_s in (None, 300.0):
        joined = rendezvous.join(point, 1, LIMIT_S, operation_s=operation_s)
        assert joined.store.timeout == datetime.timedelta(seconds=operation_s or LIMIT_S)
        joined.close()
    kept.close()


# ---- where rank 0 listens


def told(**environ: str) -> MeetingPoint:
    identity = torchrun.read({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", **environ})
    assert identity is not None and isinstance(identity.meeting_point, MeetingPoint)
    return identity.meeting_point


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node-0"}, False),
        ({"MASTER_ADDR": "node-0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "node-0", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"MASTER_ADDR": "node-0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, False),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "LOCAL_WORLD_SIZE": "2"}, True),
    ],
)
def test_whether_loopback_means_one_machine(environ: Mapping[str, str], expected: bool) -> None:
    assert told(**environ).is_loopback_meant is expected


def test_an_address_in_brackets_is_an_address() -> None:
    assert told(MASTER_ADDR="[::1]").host == "::1"
    assert told(MASTER_ADDR=" fd00::2 ").host == "fd00::2"


@pytest.mark.parametrize(
    ("host", "resolved", "is_loopback_meant", "expected"),
    [
        ("localhost", ["127.0.0.1", "::1"], True, "127.0.0.1"),
        ("localhost", ["127.0.0.1"], False, "10.0.0.7"),  # Kubernetes' operators, on rank 0
        ("me", ["127.0.1.1"], False, "10.0.0.7"),  # Debian
        ("me", ["127.0.1.1", "10.1.0.7"], False, "10.1.0.7"),
        ("10.1.0.7", ["10.1.0.7"], True, "10.1.0.7"),
        ("service", ["10.96.4.4"], False, "10.1.0.7"),  # translated: what comes through it comes to this address
        ("not-yet-known", [], False, "10.0.0.7"),
    ],
)
def test_rank_0_listens_at_one_address_where_the_others_come(
    host: str, resolved: list[str], is_loopback_meant: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7"], "ib0": ["10.1.0.7"]}
    routes = {"service": "10.1.0.7", "me": "127.0.0.1", "198.51.100.1": "10.0.0.7"}

    def towards(other: str) -> str:
        if other not in routes:
            raise WorldError("no route")
        return routes[other]

    monkeypatch.setattr(interfaces, "addresses", lambda: known)
    monkeypatch.setattr(interfaces, "own_address_towards", towards)
    monkeypatch.setattr(interfaces, "resolve", lambda name: resolved)
    assert stores.listening_address(MeetingPoint(host, 29500, is_loopback_meant=is_loopback_meant)) == expected


def test_an_address_of_another_node_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interfaces, "own_address", lambda hints, others: "127.0.0.1")
    said = r"203\.0\.113\.9 is no address of this node .*: the store listens at 127\.0\.0\.1:\d+, and 203\.0\.113\.9:\d+ must"
    with caplog.at_level(logging.WARNING, "guozhuang"):
        open_store(MeetingPoint("203.0.113.9", 0), 0, LIMIT_S, is_one_node=True).close()
        assert re.match(said, caplog.messages[0]) and len(caplog.messages) == 1, "rank 0 logs it"
        FixedRendezvous(MeetingPoint("203.0.113.9", 0), 0, 2, "run", LIMIT_S).close()
        assert re.match(f"guozhuang run: {said}", capsys.readouterr().err) and len(caplog.messages) == 1, (
            "agents print it"
        )
        with silent_service() as port, pytest.raises(UsageError, match="is taken"):
            FixedRendezvous(MeetingPoint("203.0.113.9", port), 0, 2, "run", LIMIT_S)
        assert not capsys.readouterr().err and len(caplog.messages) == 1, "no store listens there"


def test_a_busy_port_is_named_with_the_rank_and_the_option() -> None:
    taken = r"port {0} is taken .*\(127\.0\.0\.1:{0}\)\. Fix: choose another {1}; "
    with silent_service() as port:
        with pytest.raises(UsageError, match=r"^\[rank 0\] " + taken.format(port, r"MASTER_PORT \(--master-port\)")):
            open_store(MeetingPoint("127.0.0.1", port), 0, LIMIT_S)
        at = f"127.0.0.1:{port}"
        for words in (["--rdzv-endpoint", at], ["--master-addr", "127.0.0.1", "--master-port", str(port)]):
            plan = options.plan(read([*words, "--nnodes", "2", "--node-rank", "0", __file__]), {})
            with pytest.raises(UsageError, match="^" + taken.format(port, words[-2])):
                endpoint.open_fixed(plan, config_from_args(plan.elastic)[0], Request())
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--nnodes", "1:2", "--rdzv-conf", "is_host=1"]
        plan = options.plan(read([*words, __file__]), {})
        with pytest.raises(UsageError, match="^" + taken.format(port, "--rdzv-endpoint")):
            endpoint.open_for_torch(plan, config_from_args(plan.elastic)[0])


@needs_an_address
def test_torch_elastic_gets_an_address_that_other_nodes_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts may give a node's name a loopback address and a real one."""
    look_up, port = socket.getaddrinfo, free_port()

    def two_addresses(host: str, *more: Any, **options: Any) -> list[Any]:
        hosts = ["127.0.1.1", ADDRESS] if host == "node-a" else [host]
        return [found for each in hosts for found in look_up(each, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    for host, expected in (("node-a", ADDRESS), ("localhost", "127.0.0.1")):
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", "--nnodes", "1:2"]
        plan = options.plan(read([*words, __file__]), {})
        config = config_from_args(plan.elastic)[0]
        endpoint.open_for_torch(plan, config).close()
        assert config.local_addr == expected
        assert config.rdzv_endpoint.startswith(expected)


@needs_an_address
def test_a_store_of_torchrun_has_no_door_whatever_secret_is_exported(caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server((ADDRESS, 0))
    store = stores.serve(listener, LIMIT_S)
    point = MeetingPoint(ADDRESS, store.port, is_kept_by_launcher=True, secret=SECRET)
    with caplog.at_level(logging.WARNING, "guozhuang"):
        for rank in range(3):
            meeting = open_store(point, rank, LIMIT_S)
            assert meeting.store.add("count", 1) == rank + 1
            meeting.close()
    [said] = [each.getMessage() for each in caplog.records]
    assert "checks no secret" in said and "guozhuang run" in said, "once, by rank 0"


# ---- the roll call


class Counting(dist.Store):
    """A store in memory that counts its questions, and stops answering with the first of those that ``stops_at`` names."""

    def __init__(self, stops_at: str = "") -> None:
        super().__init__()
        self.stops_at = stops_at
        self.inner, self.asked = dist.HashStore(), dict[str, int]()
        self.answers = threading.Event()
        self.answers.set()

    def _ask(self, what: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1
        if what == self.stops_at:
            self.answers.clear()
        self.answers.wait(LIMIT_S)

    def add(self, key: str, amount: int) -> int:
        self._ask("add")
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._ask("compare_set")
        return self.inner.compare_set(key, expected, desired)

    def set(self, key: str, value: str) -> None:
        self._ask("set")
        self.inner.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._ask("check")
        return self.inner.check(keys)

    def get(self, key: str) -> bytes:
        self._ask("get")
        return self.inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._ask("multi_get")
        return self.inner.multi_get(keys)


def call_all(store: dist.Store, size: int, who: range, timeout_s: float) -> list[list[RankCard] | Exception]:
    found: dict[int, list[RankCard] | Exception] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = roll_call(store, rank, size, timeout_s, note=f"GPU-{rank},GPU-x")
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in who]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [found[rank] for rank in who]


def test_everybody_hears_what_everybody_told() -> None:
    store = Counting()
    expected = [RankCard(node_identity(), f"GPU-{rank},GPU-x") for rank in range(8)]
    assert call_all(store, 8, range(8), LIMIT_S) == [expected] * 8
    assert store.asked["multi_get"] == 8 and "get" not in store.asked, "one question a rank, not one for each other"


def test_who_is_missing_is_said_while_waiting_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    monkeypatch.setattr(rendezvous, "_AFTER_VERDICT_S", 0.0)
    store, limit_s = dist.HashStore(), 3 * EXPIRES_S
    for key in ("x/host/0", "x/host/1", "y/host/1", "y/host/2", "y/host/3"):
        store.set(key, "")  # whoever looks first finds the others there already
    with caplog.at_level(logging.WARNING, "guozhuang"):
        errors = call_all(dist.PrefixStore("x", store), 40, range(2), limit_s)
    for error in errors:
        assert isinstance(error, WorldError)
        what = f"38 of 40 ranks did not come within {limit_s:g} s: 2, 3, 4"
        assert what in str(error) and "and 22 more" in str(error)
    [said] = [each.getMessage() for each in caplog.records]
    assert "38 of 40 ranks are not here yet: 2, 3, 4" in said, "rank 0 says it for all"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "guozhuang"):
        call_all(dist.PrefixStore("y", store), 4, range(1, 4), limit_s)
    assert len(caplog.records) == 1, "the first to ask, where rank 0 is missing"
    assert "1 of 4 ranks are not here yet: 0" in caplog.text


def test_a_rank_that_ended_before_it_joined_is_told_by_the_launcher() -> None:
    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def tell() -> None:
        until(lambda: other.check(["y/host/0", "y/host/1"]))  # they wait
        tell_ended(other, 2)

    teller = threading.Thread(target=tell)
    teller.start()
    for error in call_all(dist.PrefixStore("y", other), 3, range(2), NEVER_S):
        assert isinstance(error, WorldError), error
        assert "rank 2 of 3 ended with exit code 0 before the world began" in str(error)
    teller.join()


def test_a_store_on_loopback_is_named_as_a_likely_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_VERDICT_S", 0.0)
    for is_one_node, expected in ((False, True), (True, False)):
        point = MeetingPoint("127.0.0.1", free_port())
        store = dist.PrefixStore("part", open_store(point, 0, LIMIT_S, is_one_node=is_one_node).store)
        with pytest.raises(WorldError, match="1 of 2 ranks did not come") as caught:
            roll_call(store, 0, 2, EXPIRES_S)
        assert ("which other hosts cannot reach" in str(caught.value)) is expected


def test_a_store_that_stops_answering_does_not_hold_us(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_GRACE_S", 1.0)
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.0)
    store = Counting("check")  # it does not hear that the rank waits
    try:
        with caplog.at_level(logging.WARNING, "guozhuang"):
            [error] = call_all(store, 2, range(1, 2), EXPIRES_S)
        assert isinstance(error, WorldError)
        assert "[rank 1] the store that the ranks meet at has not answered for 1 s" in str(error)
        assert "the store that the ranks meet at does not answer yet" in caplog.text
    finally:
        store.answers.set()


# ---- an agent's note


def test_the_note_of_an_agent_goes_when_all_have_met_or_it_ends(tmp_path: Path) -> None:
    key = [str(tmp_path)]
    note = tmp_path / "home" / "meet-1"
    point = PortSequence(("127.0.0.1",), ports.sequence(key), ports.secret(b"", key), note=str(note))
    for ends in ("remove_note", "close"):
        kept = rendezvous.keep(point, LIMIT_S)
        assert note.exists()
        getattr(kept, ends)()
        assert not note.exists(), ends
        kept.close()


def test_agents_that_have_met_leave_no_note(tmp_path: Path) -> None:
    key = [str(tmp_path), "agents"]
    note = tmp_path / "meet-1"
    secret = ports.secret(b"", key)
    point = PortSequence(("127.0.0.1",), ports.sequence(key), secret, is_one_node=True, note=str(note))
    agents = [FixedRendezvous(point, node, 2, "run", LIMIT_S) for node in range(2)]
    try:
        assert note.exists()
        other = threading.Thread(target=agents[1].meet, args=(NodeShare(1),))
        other.start()
        agents[0].meet(NodeShare(1))
        other.join(LIMIT_S)
        assert not note.exists()
        assert agents[1]._kept is not None and agents[1]._kept.store.timeout == datetime.timedelta(seconds=STORE_S)
    finally:
        for each in agents:
            each.close()


def test_ranks_that_ended_are_told_until_they_are_forgotten() -> None:
    store = dist.HashStore()
    part = dist.PrefixStore("a", dist.PrefixStore("b", store))
    assert ended_with_0(part) == []
    for rank in (3, 1, 3):
        tell_ended(store, rank)
    assert ended_with_0(part) == [1, 3]
    forget_ended(store)
    assert ended_with_0(part) == []

"""Who am I, from an environment given as a dict: nothing is read from the real one, nothing is started."""

from __future__ import annotations

import os
import re
import socket
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import MismatchError, UsageError, WorldError
from guozhuang.net import interfaces
from guozhuang.net.meet import RankCard, places
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world import connecting, devices, session
from guozhuang.world.devices import (
    UNKNOWN,
    backend_of_cpu_ranks,
    check_own,
    choose,
    device_to_bind,
    own_index,
    uuids,
)
from guozhuang.world.discovery import discover
from guozhuang.world.identity import Identity
from guozhuang.world.requests import (
    hang_timeout,
    requested_backend,
    requested_groups,
    requested_hang_timeout,
    requested_secret,
    requested_strategy,
    requested_timeline,
)


def torchrun(
    rank: int = 3, size: int = 4, local_size: int = 2, address: str = "10.0.0.1", port: int = 29400
) -> dict[str, str]:
    """The environment of a rank under torchrun, on nodes of ``local_size`` ranks each."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def error(environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        discover(environ)
    text = str(caught.value)
    assert "Fix:" in text
    return text


def test_torchrun() -> None:
    assert discover(torchrun()) == Identity(
        launcher="torchrun",
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        node_rank=1,
        num_nodes=2,
        meeting_point=MeetingPoint("10.0.0.1", 29400, is_kept_by_launcher=True, attempt="2"),
    )


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_every_rank_of_a_regular_world_knows_its_place(num_nodes: int, local_size: int, data: st.DataObject) -> None:
    size = num_nodes * local_size
    rank = data.draw(st.integers(0, size - 1))
    environ = torchrun(rank, size, local_size)
    told = discover(environ)
    assert (told.rank, told.size, told.local_rank, told.local_size) == (rank, size, rank % local_size, local_size)
    assert (told.node_rank, told.num_nodes) == (rank // local_size, num_nodes)
    # Without torchrun's GROUP_ variables the same follows by division.
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del environ[name]
    derived = discover(environ)
    assert (derived.node_rank, derived.num_nodes) == (told.node_rank, told.num_nodes)
    assert derived.launcher == "environment"


def test_what_is_not_told_is_left_open() -> None:
    told = discover({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert (told.local_rank, told.local_size, told.node_rank, told.num_nodes) == (None, None, None, None)
    uneven = discover(torchrun(2, 3, 2) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"})
    assert (uneven.node_rank, uneven.num_nodes) == (1, 2)


def test_alone() -> None:
    # An address says where somebody is, not that there are several.
    for environ in (
        {},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ):
        assert discover(environ) == Identity(
            "alone", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, meeting_point=None
        )


def test_a_world_of_one_needs_no_address() -> None:
    told = discover({"RANK": "0", "WORLD_SIZE": "1"})
    assert (told.local_rank, told.local_size, told.node_rank, told.num_nodes) == (0, 1, 0, 1)
    assert told.meeting_point is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(name: str) -> None:
    environ = torchrun()
    del environ[name]
    assert f"{name} is not set" in error(environ)


@pytest.mark.parametrize(
    "sign", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"]
)
def test_a_single_sign_of_others_is_no_world_of_one(sign: str) -> None:
    text = error({sign: "2"})
    assert "is not set" in text
    assert f"{sign}='2'" in text


@pytest.mark.parametrize(
    ("changes", "named", "value"),
    [
        ({"RANK": "4"}, "RANK", "4"),
        ({"RANK": "-1"}, "RANK", "-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK", "2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE", "5"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK", "2"),
        ({"GROUP_WORLD_SIZE": "9"}, "GROUP_WORLD_SIZE", "9"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT", "0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT", "65536"),
        ({"RANK": "0", "LOCAL_RANK": "1"}, "LOCAL_RANK", "1"),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "LOCAL_RANK", "2"),
    ],
)
def test_contradictions_name_the_variable_and_its_value(changes: dict[str, str], named: str, value: str) -> None:
    text = error(torchrun() | changes)
    assert named in text
    assert repr(value) in text


def test_one_node_cannot_hold_a_part_of_the_ranks_only() -> None:
    assert "GROUP_WORLD_SIZE=1" in error(torchrun() | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"})


def is_number(text: str) -> bool:
    stripped = text.strip()
    digits = stripped[1:] if stripped[:1] in ("+", "-") else stripped
    return digits.isascii() and digits.isdigit()


@given(
    st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT"]),
    st.text(string.printable + "٣½²⁹", max_size=6).filter(lambda text: not is_number(text)),
)
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    text = error(torchrun() | {name: value})
    assert name in text
    assert repr(value) in text or "is not set" in text  # an empty port is as good as none


@given(st.dictionaries(st.sampled_from(sorted(torchrun())), st.integers(-2, 9).map(str)))
def test_any_environment_gives_a_sound_identity_or_one_clear_error(environ: dict[str, str]) -> None:
    try:
        told = discover(environ)
    except UsageError as problem:
        assert any(name in str(problem) for name in (*environ, "RANK", "WORLD_SIZE"))
        return
    assert 0 <= told.rank < told.size
    assert (told.meeting_point is None) == (told.size == 1)
    local_rank, local_size = told.local_rank or 0, told.local_size or told.size
    assert 0 <= local_rank <= told.rank
    assert local_rank < local_size <= told.size
    if told.node_rank is not None and told.num_nodes is not None:
        assert 0 <= told.node_rank < told.num_nodes <= told.size


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_what_torchrun_says_inside_of_another_launcher_counts(name: str) -> None:
    assert discover({name: "7"} | torchrun()) == discover(torchrun())


def test_a_size_exported_for_all_must_be_the_launchers() -> None:
    step = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    step |= {"PMIX_NAMESPACE": "1"}
    assert discover(step | {"WORLD_SIZE": "2"}).launcher == "openmpi"
    text = error(step | {"WORLD_SIZE": "4"})
    assert "WORLD_SIZE=4" in text
    assert "2 processes" in text


def test_places_follow_the_hosts() -> None:
    hosts = ["b", "a", "b", "a", "c"]
    assert [places(hosts, rank) for rank in range(5)] == [
        (0, 2, 0, 3),
        (0, 2, 1, 3),
        (1, 2, 0, 3),
        (1, 2, 1, 3),
        (0, 1, 2, 3),
    ]


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "device", "num_cuda", "expected"),
    [
        (None, None, 0, ("gloo", CPU)),
        (None, "cpu", 4, ("gloo", CPU)),
        ("gloo", None, 4, ("gloo", CPU)),
        ("gloo", "cuda", 4, ("gloo", CUDA)),
        ("gloo", "cuda:0", 4, ("gloo", torch.device("cuda", 0))),
        ("gloo", torch.device("cuda:1"), 4, ("gloo", CUDA)),
        ("cpu:gloo,cuda:gloo", "cuda", 2, ("cpu:gloo,cuda:gloo", CUDA)),
    ],
)
def test_choice_of_backend_and_device(
    backend: str | None, device: str | torch.device | None, num_cuda: int, expected: tuple[str, torch.device]
) -> None:
    assert choose(backend, device, local_rank=1, num_cuda=num_cuda) == expected


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_a_device_of_its_own_is_the_one(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    own = torch.device("cuda", 0)
    assert choose(backend, None, local_rank=3, num_cuda=1, is_bound=True) == (backend or "nccl", own)
    assert choose(backend, "cuda", local_rank=3, num_cuda=1, is_bound=True)[1] == own
    # All devices of the node are visible: by the local rank as ever.
    assert choose(backend, None, local_rank=3, num_cuda=4, is_bound=True)[1] == torch.device("cuda", 3)
    with pytest.raises(UsageError, match="local rank 3 has no CUDA device: 2 visible"):
        choose(backend, None, local_rank=3, num_cuda=2, is_bound=True)


HOST, OTHER = "h", "i"
TWO_NODES = [HOST, HOST, OTHER, OTHER]


@pytest.mark.parametrize(
    ("hosts", "seen", "indices"),
    [
        pytest.param([HOST] * 3, ["ABCD"] * 3, [0, 1, 2], id="all see all"),
        pytest.param(TWO_NODES, ["AB", "AB", "CD", "CD"], [0, 1, 0, 1], id="all of their node"),
        pytest.param([HOST] * 3, ["A", "B", "C"], [0, 0, 0], id="one of its own each"),
        pytest.param([HOST] * 3, ["AB", "CD", "EF"], [0, 0, 0], id="two of their own each"),
        pytest.param([HOST] * 4, ["AB", "AB", "CD", "CD"], [0, 1, 0, 1], id="those of its socket"),
        pytest.param([HOST] * 3, ["ABC", "BCA", "CAB"], [0, 0, 0], id="all, its own first"),
        pytest.param(TWO_NODES, ["AB", "AB", "AB", "AB"], [0, 1, 0, 1], id="hosts apart are told apart"),
        pytest.param([HOST] * 3, ["", "A", "A"], [None, 0, None], id="one on the CPU, one too many"),
        pytest.param([HOST] * 2, ["A?", "B"], [None, None], id="unknown"),
        pytest.param([HOST] * 2, ["?", "?"], [None, None], id="parts of a GPU"),
    ],
)
def test_each_rank_takes_a_device_that_no_other_has(
    hosts: list[str], seen: list[str], indices: list[int | None]
) -> None:
    told = [list(each) for each in seen]
    locals_ = [places(hosts, rank)[0] for rank in range(len(hosts))]
    assert [own_index(rank, locals_[rank], hosts, told) for rank in range(len(hosts))] == indices


def test_the_local_rank_that_was_told_counts_where_all_see_the_same() -> None:
    """A launcher may number the ranks of a node in another order; scripts look at LOCAL_RANK as well."""
    assert [own_index(rank, 1 - rank, [HOST] * 2, [["A", "B"]] * 2) for rank in (0, 1)] == [1, 0]


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        ("slurm", "--gpus-per-task=1"),
        ("openmpi", "ppr:1:node"),
        ("hydra", "-ppn 1"),
        ("torchrun", "--nproc-per-node=1"),
        ("environment", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_ranks_that_would_share_a_device_are_named(launcher: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_own([OTHER, HOST, HOST], [["GPU-1"], ["GPU-2"], ["GPU-2"]], launcher)
    text = str(caught.value)
    assert "rank 2 has no CUDA device of its own: it sees GPU-2 alone, which rank 1 of the same node has" in text
    assert fix in text
    assert "--nproc-per-node" not in text or launcher == "torchrun"


def test_nothing_is_said_against_ranks_that_share_none_or_may_not_be_known() -> None:
    check_own([HOST] * 2, [["A", "B"], ["A", "B"]], "slurm")
    check_own([HOST] * 2, [[], []], "slurm")
    check_own([HOST] * 2, [[UNKNOWN], [UNKNOWN]], "slurm")


def test_what_a_rank_tells_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, name: str, uuid: str | None) -> None:
            self.name = name
            if uuid is not None:
                self.uuid = uuid

    known = [Properties("NVIDIA X", "a"), Properties("NVIDIA X MIG 1g.5gb", "b"), Properties("other", None)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    assert uuids(torch.device("cuda")) == ["a", UNKNOWN, UNKNOWN]
    assert uuids(torch.device("cuda", 0)) == ["a"]
    assert uuids(CPU) == []


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_cuda_goes_with_nccl(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    assert choose(backend, None, local_rank=1, num_cuda=4) == (backend or "nccl", CUDA)


@pytest.mark.parametrize(
    ("backend", "device", "num_cuda", "words"),
    [
        ("glue", None, 0, "'glue'"),
        ("undefined", None, 0, "'undefined'"),
        (None, "toaster", 0, "'toaster'"),
        (None, "cuda", 0, "no CUDA device is visible"),
        (None, "cuda", 1, "local rank 1 has no CUDA device: 1 visible"),
        (None, "cuda:3", 2, "'cuda:3'"),
        (None, "meta", 0, "'meta'"),
        ("cpu:gloo", "cuda", 2, "cannot serve device cuda:1"),
    ],
)
def test_what_cannot_work_is_said(backend: str | None, device: str | None, num_cuda: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(backend, device, local_rank=1, num_cuda=num_cuda)
    assert words in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_requests_come_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GUOZHUANG_STRATEGY", raising=False)
    monkeypatch.setenv("GUOZHUANG_TIMELINE", "")
    monkeypatch.delenv("GUOZHUANG_BACKEND", raising=False)
    monkeypatch.setenv("GUOZHUANG_GROUPS", "")
    assert (requested_strategy(), requested_timeline()) == (None, None)
    assert (requested_backend(), requested_groups()) == (None, 1)
    monkeypatch.setenv("GUOZHUANG_STRATEGY", "ddp")
    monkeypatch.setenv("GUOZHUANG_TIMELINE", "/tmp/a.json")
    assert (requested_strategy(), requested_timeline()) == ("ddp", "/tmp/a.json")
    monkeypatch.setenv("GUOZHUANG_BACKEND", "gloo")
    monkeypatch.setenv("GUOZHUANG_GROUPS", "3")
    assert (requested_backend(), requested_groups()) == ("gloo", 3)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("", None), ("30", 30.0), (" 1.5 ", 1.5), ("off", "off"), (" OFF\n", "off")]
)
def test_a_hang_timeout_is_seconds_or_off(
    text: str | None, seconds: float | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GUOZHUANG_HANG_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("GUOZHUANG_HANG_TIMEOUT", text)
    assert requested_hang_timeout() == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_hang_timeout_that_is_none_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_HANG_TIMEOUT", text)
    with pytest.raises(UsageError, match="GUOZHUANG_HANG_TIMEOUT") as caught:
        requested_hang_timeout()
    assert repr(text) in str(caught.value)
    with pytest.raises(UsageError, match="--hang-timeout must be a number of seconds above 0, or off"):
        hang_timeout(text)


def test_a_secret_is_hexadecimal_and_long() -> None:
    assert requested_secret({}) == requested_secret({"GUOZHUANG_SECRET": " "}) == b""
    assert requested_secret({"GUOZHUANG_SECRET": "00ff" * 8 + "\n"}) == bytes([0, 255] * 8)
    for wrong in ("xyz" * 8, "0" * 17, "0011"):
        with pytest.raises(UsageError, match="GUOZHUANG_SECRET") as caught:
            requested_secret({"GUOZHUANG_SECRET": wrong})
        assert wrong not in str(caught.value), "it may be somebody's secret all the same"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_groups_are_a_count(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_GROUPS", text)
    with pytest.raises(UsageError, match="GUOZHUANG_GROUPS") as caught:
        requested_groups()
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "platform", "registered", "expected", "why"),
    [
        (["a", "a"], "linux", True, "shm", "2 ranks on one node"),
        (["a", "a"], "darwin", True, "gloo", "needs Linux"),
        (["a", "a"], "linux", False, "gloo", "not registered"),
        (["a", "b", "a"], "linux", True, "gloo", "3 ranks on 2 nodes"),
        ([""], "linux", True, "gloo", "one rank"),
    ],
)
def test_cpu_ranks_of_one_linux_node_share_memory(
    hosts: list[str], platform: str, registered: bool, expected: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: registered)
    backend, reason = backend_of_cpu_ranks(hosts, platform)
    assert backend == expected
    assert why in reason
    # The name goes into the choice for CPUs only.
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "nccl", "shm"])
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    assert choose(None, "cpu", 0, 2, backend) == (expected, CPU)
    assert choose(None, None, 1, 2, backend) == ("nccl", CUDA)
    assert choose("gloo", "cpu", 0, 2, backend) == ("gloo", CPU)


@pytest.mark.parametrize(
    ("backend", "device", "bound"),
    [
        ("nccl", "cuda:1", True),
        ("NCCL", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cuda:1", True),
        ("cuda:NCCL", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("gloo", "cuda:1", False),
        ("cpu:gloo,cuda:gloo", "cuda:1", False),
    ],
)
def test_a_group_is_bound_to_a_device_that_nccl_serves(backend: str, device: str, bound: bool) -> None:
    assert device_to_bind(backend, torch.device(device)) == (torch.device(device) if bound else None)


# ---- the pieces of gz.init that need no other rank


def test_ranks_of_one_node_need_no_interface_but_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (interfaces.GLOO, interfaces.NCCL):
        monkeypatch.delenv(name, raising=False)
    try:
        session._set_interfaces(False, None)
        assert {os.environ[name].lstrip("=") for name in (interfaces.GLOO, interfaces.NCCL)} <= {"lo", "lo0"}
    finally:
        session._restore_interfaces()
    assert not {interfaces.GLOO, interfaces.NCCL} & os.environ.keys()
    monkeypatch.setenv(interfaces.NCCL, "eth7")
    try:
        session._set_interfaces(False, None)
        assert (os.environ[interfaces.NCCL], interfaces.GLOO in os.environ) == ("eth7", True)
    finally:
        session._restore_interfaces()
    assert os.environ[interfaces.NCCL] == "eth7", "the user's"


@pytest.mark.parametrize("error", [ValueError("no"), UsageError("no"), KeyboardInterrupt(), RuntimeError("no")])
def test_what_init_set_is_unset_whatever_ends_it(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (interfaces.GLOO, interfaces.NCCL, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def fail(*_: object, **__: object) -> None:
        assert interfaces.GLOO in os.environ
        raise error

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(WorldError if isinstance(error, RuntimeError) else type(error)):
        session.init("gloo", "cpu")
    assert not {interfaces.GLOO, interfaces.NCCL} & os.environ.keys()
    assert session.current() is None


@pytest.mark.parametrize(
    ("notes", "chosen"),
    [
        (["a,b", "c,d", "e,f"], "cuda:0"),
        (["a,b,c", "a,b,c", "a,b,c"], "cuda:2"),
        (["?", "?", "?"], "cuda:0"),
        (["a", "b", "b"], None),
    ],
    ids=["two of its own", "all", "a part of a GPU of its own", "shared"],
)
def test_a_rank_of_srun_finds_its_device(notes: list[str], chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    monkeypatch.setattr(devices, "num_cuda", lambda: len(notes[2].split(",")))
    hosts = ["h"] * len(notes)
    for device in (None, "cuda"):
        if chosen is not None:
            assert devices.choose_own(None, device, SRUN_2, hosts, notes, {}) == ("nccl", torch.device(chosen))
        else:
            with pytest.raises(UsageError, match="rank 2 has no CUDA device of its own: it sees b alone, which rank 1"):
                devices.choose_own(None, device, SRUN_2, hosts, notes, {})
    # Gloo can share one.
    assert devices.choose_own("gloo", "cuda:0", SRUN_2, hosts, notes, {}) == ("gloo", torch.device("cuda:0"))


SRUN_2 = Identity("slurm", rank=2, size=3, local_rank=2, local_size=3, node_rank=0, num_nodes=1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Connection refused", True),
        ("Could not find the default backend type 0 for Process Group with name shm.", False),
    ],
)
def test_interfaces_are_named_only_where_they_may_be_the_cause(text: str, named: bool) -> None:
    error = connecting._not_made("shm", RuntimeError(text), 3)
    assert text in str(error) and "[rank 3]" in str(error)
    assert (interfaces.GLOO in str(error)) == named
    assert named or "--backend gloo" in str(error) or "was tried with" in str(error)


def card(host: str = "a", **changed: str) -> RankCard:
    return RankCard.of_text(RankCard(host, "", connecting.settings(None, "cpu") | changed).to_text())


@pytest.mark.parametrize(
    ("cards", "lines"),
    [
        ([card(), card(), card()], []),
        ([card(), card(backend="shm")], []),
        (
            [card(), card(backend="gloo"), card()],
            ["setting  value  ranks", "backend  shm    ranks 0, 2", "backend  gloo   rank 1"],
        ),
        (
            [card(), card(**{"--strategy": "sharded", "PyTorch": "2.11.0"})],
            ["--strategy  not given  rank 0", "--strategy  sharded    rank 1", "PyTorch     2.11.0     rank 1"],
        ),
        ([card(), RankCard.of_text("b\nnote")], ["guozhuang        unknown    rank 1"]),
    ],
    ids=["equal", "asked for what is the default", "backend", "strategy and version", "a version that tells nothing"],
)
def test_settings_that_differ_are_named_with_their_ranks(cards: list[RankCard], lines: list[str]) -> None:
    try:
        connecting.check_settings(cards, 1, "shm")
    except MismatchError as error:
        assert lines and str(error).startswith("[rank 1] ranks have different settings"), error
        assert all(re.search(rf"^ +{re.escape(line)}$", str(error), re.MULTILINE) for line in lines), error
    else:
        assert not lines


def test_ways_that_lead_nowhere_are_found_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = {1: there.getsockname(), 2: gone.getsockname()}
        gone.close()
        found = connecting._unreached(addresses, 5.0)
    assert list(found) == [2] and "refused, though it listens" in found[2]
    hosts = ["a", "a", "b", "b", "c"]
    assert [connecting._one_of_each_node(hosts, rank) for rank in range(5)] == [[2, 4], [3, 4], [0, 4], [1, 4], [0, 2]]

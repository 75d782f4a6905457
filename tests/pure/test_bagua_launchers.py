"""The command lines of Bagua's launchers, translated to those of `guozhuang run`."""

from __future__ import annotations

from typing import Any

import pytest

from guozhuang.compat.bagua.distributed import launch, options, run
from guozhuang.compat.bagua.script import baguarun
from guozhuang.launch.options.arguments import read

LAUNCH = [
    ("t.py", "--nproc-per-node 1 --standalone t.py"),
    ("--nproc_per_node 2 t.py --nproc_per_node 5", "--nproc-per-node 2 --standalone t.py --nproc_per_node 5"),
    (
        "--nnodes 2 --node_rank 1 --master_addr h --nproc_per_node 2 t.py",
        "--nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr h --master-port 29500 t.py",
    ),
    (
        "--set_additional_flag --logdir d -m a.b x",
        "--nproc-per-node 1 --standalone --pass-local-rank local_rank --copy-output d -m a.b x",
    ),
    ("--no_python --autotune_level 1 sh -c", "--nproc-per-node 1 --standalone --no-python sh -c"),
    # One node has the port that was asked for, and else a free one.
    ("--master_port 29500 t.py", "--nproc-per-node 1 --master-port 29500 t.py"),
    ("--master_addr h --master_port 0 t.py", "--nproc-per-node 1 --master-addr h --master-port 0 t.py"),
]
RUN = [
    ("t.py", "--nproc_per_node auto --max_restarts 3 t.py"),
    ("--nnodes 1:2 --nproc_per_node 1 t.py -x", "--nnodes 1:2 --nproc_per_node 1 --max_restarts 3 t.py -x"),
    (
        "--standalone --max_restarts 0 -m a.b --nnodes 7",
        "--nproc_per_node auto --standalone --max_restarts 0 --module a.b --nnodes 7",
    ),
    (
        "--rdzv_backend c10d --rdzv_endpoint h:1 --rdzv_id 5 --default_bucket_size 9 t.py",
        "--nproc_per_node auto --rdzv_backend c10d --rdzv_endpoint h:1 --rdzv_id 5 --max_restarts 3 t.py",
    ),
]
HOSTS = [
    ("--host_list a,b --nproc_per_node 2 t.py -x", "-H a:2,b:2 t.py -x"),
    ("--host_list a:22,b --ssh_port 22 --nproc_per_node 1 t.py", "-H a:1,b:1 --ssh-port 22 t.py"),
    (
        "--host_list a --master_port 5 --no_python -x A -x B=1 --nproc_per_node 1 sh",
        "-H a:1 --master-port 5 -x A -x B=1 --no-python sh",
    ),
]


@pytest.mark.parametrize(
    ("module", "given", "wanted"),
    [(module, *case) for module, cases in ((launch, LAUNCH), (run, RUN), (baguarun, HOSTS)) for case in cases],
)
def test_words(module: Any, given: str, wanted: str) -> None:
    words, _ = module.words_for(given.split())
    assert " ".join(words) == wanted


@pytest.mark.parametrize(
    ("given", "ranks", "restarts"),
    [("t.py", "3", 5), ("--max_restarts 0 t.py", "3", 0), ("--nproc_per_node 2 --max_restarts 5 t.py", "2", 5)],
)
def test_variables_of_torchrun_go_before_defaults(
    monkeypatch: pytest.MonkeyPatch, given: str, ranks: str, restarts: int
) -> None:
    for name, value in (("NPROC_PER_NODE", "3"), ("MAX_RESTARTS", "5"), ("RDZV_BACKEND", "c10d"), ("STANDALONE", "1")):
        monkeypatch.setenv(f"PET_{name}", value)
    words, _ = run.words_for(given.split())
    found = read(words)  # as `guozhuang run` reads them, which takes the rest from the variables
    assert (found.nproc_per_node, found.max_restarts) == (ranks, restarts)
    assert (found.rdzv_backend, found.standalone) == ("c10d", True)


def test_a_variable_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert run.main(["t.py"]) == 2 and "neither by its PET_ variable" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (launch, "-m --no_python t", "exclude each other"),
        (launch, "--default_bucket_size 0 t.py", "number of bytes"),
        (baguarun, "--nproc_per_node 1 t.py", "BAGUA_NODE_DOMAIN_NAMES"),
        (baguarun, "--host_list a:1,b:2 --nproc_per_node 1 t.py", "different ports"),
    ],
)
def test_refused(module: Any, given: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert module.main(given.split()) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("t.py", []),
        ("--autotune_warmup_time 5 t.py", ["not searched for"]),
        ("--ssh_port 22 --enable_bagua_net t.py", ["NCCL", "options of baguarun"]),
    ],
)
def test_what_has_no_effect_is_said(given: str, said: list[str]) -> None:
    _, found = launch.words_for(given.split())
    notes = options._notes(found)
    assert len(notes) == len(said) and all(word in note for word, note in zip(said, notes, strict=True))


def test_hosts_and_port_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_NODE_DOMAIN_NAMES", "a, b")
    monkeypatch.setenv("BAGUA_SSH_PORT", "2222")
    words, _ = baguarun.words_for(["--nproc_per_node", "3", "t.py"])
    assert words == ["-H", "a:3,b:3", "--ssh-port", "2222", "t.py"]

"""Ranks on two hosts between which a firewall passes the port of MASTER_PORT and no other: they say who cannot reach whom."""

from __future__ import annotations

import re
import sys

import pytest

from tests.hosts.network import Hosts, missing, run_everywhere
from tests.launching import environment

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(bool(missing(delay=True)), reason=missing(delay=True) or "it can"),
]

ENTERS = "import guozhuang as gz; gz.init({backend!r}, timeout_s=3600); print('in')"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_who_cannot_reach_whom_is_named_on_every_rank(backend: str) -> None:
    with Hosts(2) as hosts:
        hosts.pass_only(29500)
        command = [sys.executable, "-c", ENTERS.format(backend=backend)]
        told = run_everywhere(hosts, [2, 1], command, environment(), expect_failure=True)
    for text in told:
        assert "the ranks met, but some cannot connect to others" in text, text
        for rank, peer in ((0, 2), (1, 2), (2, 0)):
            mine, theirs = (hosts.address(each // 2) for each in (rank, peer))
            line = rf"rank {rank} \({mine}\) cannot reach rank {peer} at {theirs}:\d+: no answer within 10 s"
            assert re.search(line, text), text

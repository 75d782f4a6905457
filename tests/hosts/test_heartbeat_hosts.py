"""The heartbeat on hosts with a network between them: what either side says after a cable is cut."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from guozhuang.watch.report import EXIT_CODE
from tests.hosts.network import Hosts, missing
from tests.launching import environment
from tests.waiting import EXPIRES_S, LIMIT_S

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(missing()), reason=missing() or "it can")]

HANG_S = 6.0
GIVES_UP_S = 40 * EXPIRES_S  # gloo; the heartbeat, whose limit is 3 s or more, has found the loss by then
# Says when the heartbeats of all ranks have come to the rank that watches, and its word to this rank. The ranks wait meanwhile
# for nothing but the heartbeat: in test_a_cut_cable... it is that of tests/processes/heartbeat_rank.py.
HEARS = """
import threading, time
from guozhuang.world import session
from tests.processes import heartbeat_rank

def hear():
    while True:
        one = session._session.heartbeat or (heartbeat_rank.RUNNING or [None])[0]
        if one is not None and one._status is not None and one._status.keeper is not None:
            if one._watch is None or len(one._watch._judge.beats()) == one.size:
                print("HEARD", flush=True)
                return
        time.sleep(0.02)

threading.Thread(target=hear, daemon=True).start()
"""


@pytest.mark.slow
def test_a_cut_cable_is_named_on_both_sides_and_ends_both(tmp_path: Path) -> None:
    code = f"{HEARS}from tests.processes.heartbeat_rank import main; main('train', -1, {HANG_S})"
    with Hosts(2) as hosts:
        processes = []
        for rank in range(4):
            own = {
                "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            processes.append(hosts.start(rank // 2, [sys.executable, "-c", code], environment(**own)))
        for process in processes:
            assert process.stdout is not None
            while "HEARD" not in (line := process.stdout.readline()):
                assert line, "a rank ended before it was ready"
        hosts.cut(1)
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    # Of the two with the store, the one that ends first closes its connections, of which the other one's collective may fail.
    assert codes[2:] == [EXIT_CODE] * 2 and EXIT_CODE in codes[:2] and {*codes} <= {EXIT_CODE, 1}, "\n".join(texts)
    for rank in (0, 1):  # the report may be written when only one of the two has been silent for long enough
        lost = r"(ranks 2-3|rank 2|rank 3)"
        assert re.search(rf"{lost} of 4: no sign of life for \d s, nor from any other rank of its node", texts[rank])
        assert re.search(rf"held up by {lost}, lost", texts[rank])
    assert "---- ranks 2-3: gave no stack" in texts[0] and "in all_reduce" in texts[0]
    for rank in (2, 3):  # without it
        assert f"[rank {rank}] no answer from the store of the world for 3 s: rank 0, which keeps it" in texts[rank]
        assert "or this node cut off" in texts[rank]
        assert f"(--hang-timeout {HANG_S:g}), and ends itself with exit code {EXIT_CODE}" in texts[rank]
        assert "in all_reduce" in texts[rank]


TRAINS = f"""{HEARS}
import datetime, sys, torch, torch.distributed as dist, guozhuang as gz
gz.init("gloo", timeout_s={LIMIT_S})
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=float(sys.argv[1])), dist.group.WORLD)
while True:
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
def test_without_a_hang_timeout_the_time_out_of_gloo_is_one_sentence() -> None:
    with Hosts(2) as hosts:
        processes = []
        for rank in range(2):
            own = {
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            processes.append(hosts.start(rank, [sys.executable, "-c", TRAINS, str(GIVES_UP_S)], environment(**own)))
        for process in processes:
            assert process.stdout is not None
            while "HEARD" not in (line := process.stdout.readline()):
                assert line, "a rank ended before it was ready"
        hosts.cut(1)
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    for rank, text in enumerate(texts):
        said = rf"WorldError: \[rank {rank}\] all_reduce .*failed: Timed out waiting {1000 * GIVES_UP_S:g}ms"
        assert re.search(rf"{said} for .*; rank {1 - rank} is lost\. Fix: look whether that node is up", text), text
        assert "frame #" not in text and "gloo/transport" not in text[text.index("Traceback") :]

"""``horovodrun -H``, ``horovod.run``, and launchers of other systems over hosts with a network between them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guozhuang.compat.horovod.common import extension
from tests.hosts import network
from tests.hosts.network import Hosts
from tests.hosts.sshd import Sshd, missing, none_left, with_ssh
from tests.launching import environment
from tests.waiting import LIMIT_S

_LACKS = network.missing() or missing()
pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "it can"),
]

TRAIN = """
import os
import torch
import horovod.torch as hvd
hvd.init()
mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="mean").item()
names = ("HOROVOD_HOSTNAME", "HOROVOD_CYCLE_TIME", "DATA_FOLDER")
print("told", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), mean,
      *(os.environ[name] for name in names))
"""
CALL = """
import horovod

def work(base):
    import os
    import horovod.torch as hvd
    hvd.init()
    return base + hvd.rank(), hvd.cross_rank(), os.environ["HOROVOD_HOSTNAME"], b"x" * (9 << 20)

if __name__ == "__main__":
    found = horovod.run(work, (10,), num_proc=2, hosts="h0:1,h1:1")
    print([each[:3] for each in found], [len(each[3]) for each in found])
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Hosts, dict[str, str], Path]]:
    """Two hosts, an environment whose ssh knows their names (horovodrun has no option for that), and a folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        path = os.pathsep.join([environment()["PYTHONPATH"], extension.ON_PATH])
        yield hosts, with_ssh(folder, sshd, PYTHONPATH=path, DATA_FOLDER="/data"), folder


def test_two_hosts_train_and_the_first_failure_is_named(two: tuple[Hosts, dict[str, str], Path]) -> None:
    hosts, environ, folder = two
    (folder / "train.py").write_text(TRAIN)
    (folder / "fail.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(5)\ntime.sleep(3600)\n"
    )
    (folder / "hosts").write_text("h0 slots=2\nh1 slots=2\n")
    run = [sys.executable, "-m", "guozhuang.compat.horovod.runner.launch", "-np", "3", "-hostfile", "hosts"]
    more = ["--cycle-time-ms", "2", "--output-filename", "out", "--start-timeout", "40"]
    process = hosts.start(0, [*run, *more, sys.executable, "train.py"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert sorted(re.findall(r"told (.+)", out)) == [
        "0 3 0 2 0 2 1.0 h0 2 /data", "1 3 1 2 0 1 1.0 h0 2 /data", "2 3 0 1 1 2 1.0 h1 2 /data"
    ]  # fmt: skip
    # Each host has written its own, here into one folder.
    assert (folder / "out" / "rank.2" / "stdout").read_text().startswith("told 2 3")
    process = hosts.start(0, [*run, sys.executable, "fail.py"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and re.search(r"Process name: rank 2 on host h1\nExit code: 5\n", out), out
    assert not none_left(str(folder))


def test_a_function_runs_on_two_hosts_and_its_results_come_back(two: tuple[Hosts, dict[str, str], Path]) -> None:
    hosts, environ, folder = two
    (folder / "call.py").write_text(CALL)
    process = hosts.start(0, [sys.executable, "call.py"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    size = 9 << 20
    assert f"[(10, 0, 'h0'), (11, 1, 'h1')] [{size}, {size}]" in out
    assert not none_left(str(folder))


BAGUA = """
import os, sys
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
bagua.init_process_group()
group = bagua.communication._get_default_group()
places = [os.environ["NODE_RANK"], os.environ["DATA_FOLDER"], os.environ["BAGUA_DEFAULT_BUCKET_SIZE"]]
sizes = [group.get_intra_node_communicator().nranks()]
if bagua.get_local_rank() == 0:
    sizes.append(group.get_inter_node_communicator().nranks())
torch.manual_seed(bagua.get_rank())
for name in ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"hierarchical": True, **({"peer_selection_mode": "shift_one"} if name == "decentralized" else {})}
    model.with_bagua([optimizer], Algorithm.init(name, **options))
    for _ in range(30):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 1.5, (name, loss)
print("told", bagua.get_rank(), bagua.get_world_size(), *places, *sizes)
if "fail" in sys.argv and bagua.get_rank() == 3:
    sys.exit(4)
"""


def test_baguarun_starts_two_hosts(two: tuple[Hosts, dict[str, str], Path]) -> None:
    """On two nodes the hierarchical algorithms train, and the failing rank's code is the run's."""
    hosts, environ, folder = two
    (folder / "train.py").write_text(BAGUA)
    run = [sys.executable, "-m", "guozhuang.compat.bagua.script.baguarun", "--nproc_per_node", "2"]
    more = ["-x", "DATA_FOLDER", "--default_bucket_size", "4096"]
    process = hosts.start(0, [*run, "--host_list", "h0,h1", *more, "train.py"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert sorted(re.findall(r"told (.+)", out)) == [
        "0 4 0 /data 4096 2 2", "1 4 0 /data 4096 2", "2 4 1 /data 4096 2 2", "3 4 1 /data 4096 2"
    ]  # fmt: skip
    process = hosts.start(0, [*run, "--host_list", "h0,h1", *more, "train.py", "fail"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4 and "rank 3" in out, out
    process = hosts.start(0, [*run, "--host_list", "h0,nowhere", "train.py"], environ, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode not in (0, None) and "nowhere" in out, out
    assert not none_left(str(folder))


BYTEPS = """
import os
import torch
import byteps.torch as bps
bps.init()
torch.manual_seed(bps.rank())
p = torch.nn.Parameter(torch.full((4,), 1.0 + bps.rank()))
optimizer = bps.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), named_parameters=[("p", p)])
for gradient in (1.0, 0.0):
    p.grad = torch.full((4,), gradient)
    optimizer.step()
    met = bps.push_pull(torch.ones(1), average=False, name="met").item()
names = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "DATA_FOLDER")
print("told", bps.rank(), met, f"{p[0].item():.2f}", *(os.environ[name] for name in names))
"""


def test_dist_launcher_starts_workers_and_a_server(tmp_path: Path) -> None:
    """Ranks on two hosts add their steps to weights on a third; a line with a bpslaunch in it is its command."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(BYTEPS)
    (folder / "workers").write_text("h0\nh1\n")
    (folder / "servers").write_text("h2\n")
    with Hosts(3) as hosts, Sshd(tmp_path, hosts, 3) as sshd:
        path = os.pathsep.join([environment()["PYTHONPATH"], extension.ON_PATH])
        environ = with_ssh(folder, sshd, PYTHONPATH=path, BYTEPS_ENABLE_ASYNC="1")
        run = [sys.executable, "-m", "guozhuang.compat.byteps.dist_launcher", "-WH", "workers", "-SH", "servers"]
        run += ["--scheduler-ip", "h0", "--scheduler-port", "1234", "--env", "DATA_FOLDER:/data"]
        run += ["--env", "NVIDIA_VISIBLE_DEVICES:0,1"]
        line = f"{sys.executable} -m guozhuang.compat.byteps.bpslaunch {sys.executable} train.py"
        process = hosts.start(0, [*run, f"true && {line}"], environ, cwd=folder)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        assert sorted(re.findall(r"told (.+)", out)) == [
            f"{rank} 4.0 0.60 {rank % 2} 2 /data" for rank in range(4)
        ]  # fmt: skip
        process = hosts.start(
            0, [*run, "bpslaunch", "sh", "-c", '[ "$RANK" != 3 ] || exit 4; sleep 3600'], environ, cwd=folder
        )
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 4 and "rank 3" in out, out
        assert not none_left(str(folder))

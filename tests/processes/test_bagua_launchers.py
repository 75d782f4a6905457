"""Bagua's launchers start ranks, hand on their exit codes, and end all when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launching
from tests.launching import write
from tests.ranks import free_port

SCRIPT = """
import os, sys, time
import bagua.torch_api as bagua
bagua.init_process_group()
assert os.environ["NODE_RANK"] == "0" and bagua.get_local_size() == 2
print(f"port {os.environ['MASTER_PORT']}")
print("rank", bagua.get_rank(), sys.argv[1:], os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE"), flush=True)
if "fail" in sys.argv:
    if bagua.get_rank() == 1:
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.parametrize("module", ["launch", pytest.param("run", marks=pytest.mark.slow)])
def test_ranks_of_one_node(tmp_path: Path, module: str) -> None:
    script = write(tmp_path, SCRIPT)
    port = str(free_port())
    own = ["--set_additional_flag", "--logdir", "logs", "--autotune_level", "1", "--master_port", port]
    own = own if module == "launch" else []
    words = ["--nproc_per_node", "2", *own, "--default_bucket_size", "4096", script, "a b"]
    program = f"guozhuang.compat.bagua.distributed.{module}:main"
    done = launching.guozhuang(*words, folder=tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    flags = ["--local_rank=0"] if own else []
    assert f"rank 0 {[*flags, 'a b']} 4096" in done.stdout.replace("[0] ", "")
    if own:
        assert "buckets are not searched for" in done.stderr
        names = [f"node_0_local_rank_{rank}_{stream}" for rank in (0, 1) for stream in ("stderr", "stdout")]
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == names
        assert (tmp_path / "logs" / names[3]).read_text().startswith(f"port {port}\nrank 1 ")


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    words = ["-m", "guozhuang.compat.bagua.distributed.launch", "--nproc_per_node", "2"]
    done = launching.python(*words, script, "fail", folder=tmp_path)
    assert done.returncode == 3 and "rank 1" in done.stderr

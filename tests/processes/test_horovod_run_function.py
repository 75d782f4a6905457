"""``horovod.run``: a function in several processes, and what it returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import guozhuang, write

pytestmark = pytest.mark.waits

CALL = """
import os
import horovod
from beside import twice   # found by the caller because it lies beside its script

big = b"x" * (9 << 20)  # more than a store takes at once, there and back

def work(base, *, scale):
    import horovod.torch as hvd
    import torch
    hvd.init()
    mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="mean")
    assert len(big) == 9 << 20 and "GUOZHUANG_TASK" not in os.environ
    result = base + twice(hvd.rank()) * scale, mean.item(), hvd.size(), os.environ["HOROVOD_RANK"], big
    alone = [hvd.rank()]
    hvd.shutdown()
    hvd.init(comm=alone)  # each is rank 0 of a world of its own, and its result that of the rank that was launched
    assert (hvd.rank(), hvd.size()) == (0, 1)
    return result

def fail(rank):
    if os.environ["HOROVOD_RANK"] == str(rank):
        raise LookupError("on purpose")

def raises(kind, words, **more):
    try:
        horovod.run(work, **more)
    except kind as error:
        assert words in str(error), error
    else:
        raise SystemExit(f"{more} was taken")

if __name__ == "__main__":
    found = horovod.run(work, args=(100,), kwargs={"scale": 10}, num_proc=2, output_filename="out")
    assert [each[:4] for each in found] == [(100, 0.5, 2, "0"), (120, 0.5, 2, "1")], found
    assert all(each[4] == big for each in found) and sorted(os.listdir("out")) == ["rank.0", "rank.1"]
    try:
        horovod.run(fail, (1,), num_proc=2)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "Process name: rank 1" in str(error) and "Exit code: 1" in str(error), error
    raises(ValueError, "hosts and hostfile exclude each other", hosts="a:1", hostfile="f")
    raises(ValueError, "use_gloo and use_mpi exclude each other", use_gloo=True, use_mpi=True)
    raises(ValueError, "num_proc must be at least 1", num_proc=0)
    raises(ValueError, "num_proc is a whole number (got '2')", num_proc="2")
    raises(ValueError, "args is a tuple", args=3)
    raises(ValueError, "more ranks than there are slots", num_proc=3, hosts="localhost:2")
    print("done")
"""


@pytest.mark.slow
def test_results_come_back_by_rank(tmp_path: Path) -> None:
    """Everything in one caller, which is a rank itself of no run: `guozhuang run` starts it for the path alone."""
    write(tmp_path, "def twice(x):\n    return 2 * x\n", "beside.py")
    done = guozhuang("run", "-np", 1, write(tmp_path, CALL), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "LookupError: on purpose" in done.stderr


MORE = """
import os, warnings
import horovod

def leave():
    os._exit(0)

def rank_of(scale):
    import horovod.torch as hvd
    hvd.init()
    hvd.barrier()
    return scale * hvd.rank()

if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert horovod.run(lambda: os.environ["HOROVOD_LOCAL_SIZE"], np=2) == ["2", "2"]
    assert [str(each.message) for each in caught if each.category is DeprecationWarning] == ["np is deprecated, use num_proc"]
    try:
        horovod.run(leave)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "there is no result of rank 0" in str(error), error
    assert horovod.run(rank_of, (10,), min_num_proc=2, max_num_proc=2, hosts="localhost:2", slots=1) == [0, 10]
    try:
        horovod.run(leave, min_np=1, host_discovery_script="echo localhost:1")
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "there is no result of rank 0" in str(error), error
    print("done")
"""


@pytest.mark.slow
def test_old_names_and_elastic_runs(tmp_path: Path) -> None:
    """And a process that leaves no result although it ended well."""
    done = guozhuang("run", "-np", 1, write(tmp_path, MORE), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
